"""Whole runs on an accelerator that is not CUDA, by a stand-in in a process of its own."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from fppo.commands import actions
from fppo.runs import jsonl
from tests import tiny_run
from tests.standin.cases import CASES, settings_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="compiles C++ for Linux"),
]


def _told(task, directory, *cases, **environment):
    """What the process said of these cases, which it ran in `directory`."""
    directory.mkdir(exist_ok=True)
    result = directory / "result.json"
    command = [sys.executable, "-m", "tests.standin.runs", str(task), str(result), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


def _numbers(directory):
    """The metrics of each step, without those of the clock and the machine."""
    every = jsonl.read(directory / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith((*tiny_run.UNLIKE, "time"))} for line in every]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A directory with a task, and in cpu the runs on the CPU."""
    task = tmp_path_factory.mktemp("task")
    tiny_run.write_task(task)
    for name in CASES:
        assert actions.train(settings_of(name, task, task / "cpu", "cpu")) == 0
    return task


@pytest.fixture(scope="module")
def both(task):
    """The directories of all runs on the CPU and on the stand-in, and what the stand-in's process said."""
    return task / "cpu", task / "npu", _told(task, task / "npu", *CASES)


def _check_equal(ours, theirs):
    """Compare the metrics of two runs, step by step."""
    assert [line.get("step") for line in ours] == [line.get("step") for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        assert line.keys() == other.keys()
        for key, value in other.items():
            assert line[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-4, abs=1e-6)), key


def test_runs_checks_plans_and_resumes_end_well(both):
    assert set(both[2]["codes"].values()) == {0}, both[2]["codes"]
    assert both[2]["codes"].keys() == {*CASES, "check ppo", "plan ppo"}


@pytest.mark.parametrize("name", sorted({case.partition("-")[0] for case in CASES}))
def test_a_run_has_the_numbers_of_the_cpu(both, name):
    cpu, npu, told = both
    assert told["widest"] == "torch.float64"
    _check_equal(_numbers(npu / name), _numbers(cpu / name))


def test_a_device_without_float64_has_the_numbers_of_the_cpu(task):
    """Draws are of float32 there, which these few leave the same; all else on rows is computed on the host."""
    told = _told(task, task / "narrow", "ppo", STANDIN_WITHOUT_FLOAT64="1")
    assert set(told["codes"].values()) == {0}, told["codes"]
    assert told["widest"] == "torch.float32"
    steps = len(_numbers(task / "narrow" / "ppo"))
    _check_equal(_numbers(task / "narrow" / "ppo"), _numbers(task / "cpu" / "ppo")[:steps])


def test_the_runs_were_on_the_device_and_no_tensor_strayed(both):
    _, npu, told = both
    assert told["auto"] == "npu"
    assert told["strays"] == []
    last = jsonl.read(npu / "ppo" / "metrics.jsonl")[-1]
    assert 0 < last["perf/max_memory_allocated_gb"] <= last["perf/max_memory_reserved_gb"] < 0.1


def test_no_function_of_cuda_was_called(both):
    assert both[2]["cuda"] == []
