"""Traces are of the steps that were asked for, from one to the next, with their stages by name."""

import gzip
import json

import pytest

from fppo.assembly.run import assemble
from fppo.pipeline import train
from fppo.runs.observers import GIB, Profiles, copied, counts
from tests import tiny_run


@pytest.mark.slow
def test_a_step_is_profiled_with_its_stages(tmp_path):
    tiny_run.write_task(tmp_path)
    profiles, records = Profiles(directory=tmp_path, steps=(2,)), []
    profiles.begin(1)
    with assemble(tiny_run.settings(tmp_path, rollout__batch_size=4, actor__epochs=1)) as assembly:
        observers = [profiles, lambda record: records.append(record.metrics)]
        train(assembly.run, program=assembly.program, draw=assembly.draw, steps=2, observers=observers)
    assert not profiles.running
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "step_00000002.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    stages = ["gen", "reward", "annotate", "adv", "update_critic", "update_actor"]
    assert [name for name in named if name in stages] == stages  # once: it is one step
    assert [numbers.get("perf/recompiles") for numbers in records] == [None, 0.0]


def test_launches_and_waits_are_counted_on_a_gpu():
    assert counts({"aten::mm": 3}) == {}
    events = {"cudaLaunchKernel": 5, "cuLaunchKernelEx": 2, "cudaStreamSynchronize": 3, "aten::mm": 3}
    assert counts(events) == {"perf/launches": 7, "perf/host_syncs": 3}


def test_bytes_to_and_from_a_gpu_are_added_up():
    """Of a trace's events as kineto writes them."""

    def event(name, cat, **args):
        return {"ph": "X", "cat": cat, "name": name, "args": args}

    events = [
        event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", bytes=GIB),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", bytes=GIB // 2),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", bytes=GIB // 4),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", bytes=GIB),
        event("Memset (Device)", "gpu_memset", bytes=GIB),
        event("aten::copy_", "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    assert copied(events) == {"perf/to_device_gb": 1.5, "perf/to_host_gb": 0.25}
