"""`fppo train` on real processes: the run of one, killed and resumed, and on another number of ranks."""

import contextlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fppo.commands import cli
from fppo.runs import jsonl, memory, session
from fppo.runtime import checkpoint
from fppo.settings import files
from tests import tiny_run
from tests.distributed.ranks import Ranks

STEPS = {"eval__before": False, "rollout__batch_size": 4, "checkpoint__keep": 1, "mesh__shard": 2}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    return directory


def write(task, directory, **changes):
    file = directory.with_suffix(".toml")
    files.save(tiny_run.settings(task, output_dir=str(directory), **changes), file)
    return file


def digests(directory: Path):
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


def saved(directory: Path) -> int:
    return max(checkpoint.steps(directory / session.CHECKPOINTS), default=0)


def stat(process: int) -> tuple[str, int]:
    """The state and the parent of a process; it is as good as ended if it is a zombie."""
    with contextlib.suppress(OSError):
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
        return state, int(parent)
    return "Z", 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_ranks_end_when_their_launcher_is_killed_while_they_start(task, tmp_path):
    """They have not met yet, and would wait minutes for the store that was in it."""
    file = write(task, tmp_path / "run", **STEPS)
    launcher = subprocess.Popen([sys.executable, "-m", "fppo", "train", str(file)], stderr=subprocess.DEVNULL)
    ranks: list[int] = []
    deadline = time.monotonic() + 200
    while len(ranks) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
        ranks = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if stat(p)[1] == launcher.pid]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60
    while any(stat(rank)[0] != "Z" for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [rank for rank in ranks if stat(rank)[0] != "Z"]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert (len(ranks), left) == (2, [])


@pytest.mark.slow
def test_ranks_killed_at_random_moments_end_where_undisturbed_ones_end(task, tmp_path):
    """4 starts, in each of which a rank is killed, at start-up, in a step or while writing, unless the machine let
    both end before: the other ends by itself, unless they had not met yet (then a launcher ends it)."""
    changes = STEPS | {"steps": 16}
    file, log = write(task, tmp_path / "killed", **changes), tmp_path / "log"
    draw, killed = random.Random(0), 0
    for kill in range(4):
        ranks = Ranks(["train", str(file)], 2, log)
        before = saved(tmp_path / "killed")
        while kill % 4 and saved(tmp_path / "killed") == before and ranks.processes[0].is_alive():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.3))
        victim = ranks.processes[draw.randrange(2)]
        victim.kill()
        statuses = ranks.end(200 if kill % 4 else 1)
        killed += victim.exitcode == -signal.SIGKILL
        assert kill % 4 == 0 or None not in statuses, "the other rank did not end"
        assert saved(tmp_path / "killed") >= before
    assert killed > 1, "runs ended before they were killed: give them more steps"
    ranks = Ranks(["train", str(file)], 2, log)
    assert ranks.end(300) == [0, 0], log.read_text()[-2000:]
    whole = Ranks(["train", str(write(task, tmp_path / "whole", **changes))], 2, log)
    assert whole.end(300) == [0, 0]
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert sorted(digests(tmp_path / "whole")) == list(range(1, 17))


def numbers(directory: Path) -> dict[int, dict[str, float]]:
    """The metrics by step, without what depends on the clock or the machine."""
    lines = jsonl.read(directory / "metrics.jsonl")
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(tiny_run.UNLIKE)} for line in lines}


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_on_one_and_on_four(task, tmp_path):
    """With the numbers of one process from the first step to the last, also where batches are made ahead."""
    shared = {"checkpoint__every": 3, "mesh__stage": 2, "actor__optimizer__schedule": "constant", "rollout__ahead": 1}
    expected = tmp_path / "one"
    assert cli.main(["train", str(write(task, expected, **shared))]) == 0
    both = tmp_path / "both"
    ranks = Ranks(["train", str(write(task, both, **shared, mesh__shard=2)), "--steps", "3"], 2, tmp_path / "log")
    assert ranks.end(300) == [0, 0], (tmp_path / "log").read_text()[-2000:]
    for name, size in (("alone", 1), ("four", 4)):
        shutil.copytree(both, tmp_path / name)
        file = str(write(task, tmp_path / name, **shared, mesh__shard=size))
        assert Ranks(["train", file], size, tmp_path / "log").end(300) == [0] * size
        found = numbers(tmp_path / name)
        for step, line in numbers(expected).items():
            same = {k: v for k, v in line.items() if isinstance(v, float) and k != "time"}
            assert {k: found[step][k] for k in same} == pytest.approx(same, rel=1e-3, abs=1e-4, nan_ok=True), step


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2, "pipeline": 2}, {"context": 2}])
def test_a_run_killed_on_axes_that_cut_models_and_rows_goes_on_bit_for_bit(tmp_path, mesh):
    """In a step or while it writes, unless the machine let all end before; the others end by themselves, and all,
    started again, end where undisturbed ones end."""
    task, log, size = tmp_path / "task", tmp_path / "log", math.prod(mesh.values())
    task.mkdir()
    tiny_run.write_task(task, layers=2)
    changes = STEPS | {"mesh__shard": None, "steps": 3} | {f"mesh__{axis}": ranks for axis, ranks in mesh.items()}
    file = str(write(task, tmp_path / "killed", **changes))
    ranks = Ranks(["train", file], size, log)
    while not saved(tmp_path / "killed") and ranks.processes[0].is_alive():
        time.sleep(0.001)
    ranks.processes[1].kill()
    assert None not in ranks.end(200), "the other ranks did not end"
    assert saved(tmp_path / "killed") > 0
    assert Ranks(["train", file], size, log).end(300) == [0] * size, log.read_text()[-2000:]
    assert Ranks(["train", str(write(task, tmp_path / "whole", **changes))], size, log).end(300) == [0] * size
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert sorted(digests(tmp_path / "whole")) == list(range(1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_run_on_an_axis_that_cuts_models_has_the_numbers_of_one_process(tmp_path, axis):
    """It is resumed once, by one process, from what both ranks have written. The policy is trained by an adapter; the
    critic on a tensor axis whole, on a pipeline by one on the same base. The memory of each rank's second step is
    written, with its part of the base."""
    task = tmp_path / "task"
    task.mkdir()
    tiny_run.write_task(task, layers=2)
    shared = {"actor__optimizer__schedule": "constant", "mesh__shard": None, "steps": 3, "model__lora__rank": 2}
    shared |= {"model__lora__critic_rank": 0} if axis == "tensor" else {}
    expected, both = tmp_path / "one", tmp_path / "both"
    assert cli.main(["train", str(write(task, expected, **shared))]) == 0
    file = str(write(task, both, **shared, **{f"mesh__{axis}": 2}, log__memory_steps=[2]))
    assert Ranks(["train", file, "--steps", "2"], 2, tmp_path / "log").end(300) == [0, 0], (
        tmp_path / "log"
    ).read_text()
    looked = memory.read(both)
    updates = [stage for each in looked for stage in each.stages if stage.stage == "update_actor"]
    assert [(each.step, each.rank) for each in looked] == [(2, 0), (2, 1)]
    assert sum(x.parameters for x in updates) > (task / "start" / "model.safetensors").stat().st_size
    assert all(0 < 2 * x.gradients < x.parameters for x in updates), "adapters alone have gradients"
    assert cli.main(["train", str(write(task, both, **shared))]) == 0
    found = numbers(both)
    for step, line in numbers(expected).items():
        same = {k: v for k, v in line.items() if isinstance(v, float) and k != "time"}
        assert {k: found[step][k] for k in same} == pytest.approx(same, rel=1e-3, abs=1e-4, nan_ok=True), step
