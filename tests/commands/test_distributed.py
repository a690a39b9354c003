"""Which GPU a process is on, and what is refused before any process starts: stand-ins for torch's view of the GPUs."""

import contextlib
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo.commands import distributed
from fppo.commands.actions import CommandRank
from fppo.runtime import launch
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.settings import files


@pytest.fixture
def run(monkeypatch):
    """`distributed.placed` on a machine with four GPUs; what was chosen and started goes to its list."""
    log = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: log.append(torch.device(device)))

    def run(nproc=1, trains=True, **changes):
        log.clear()
        start = files.from_dict({"model": {"path": "m"}, "data": {"path": ["d"]}, "output_dir": "o"})
        settings = files.replace(start, {name.replace("__", "."): value for name, value in changes.items()})
        found = distributed.placed(lambda settings, here: log.append("run") or 0, settings, [], nproc, trains=trains)
        if isinstance(found, partial) and found.func is launch.start:  # which would start processes
            log.append(found.args[1])
        else:
            found()
        return log

    return run


def test_a_single_process_is_on_the_gpu_that_is_named(run):
    assert run(device="cuda:1") == [torch.device("cuda", 1), "run"]
    assert run(device="cuda") == run(device="cpu") == ["run"]
    with pytest.raises(ValueError, match="device = 'cuda:4': there are 4 GPUs here"):
        run(device="cuda:4")


@pytest.mark.parametrize(("attempt", "resume"), [(0, "never"), (1, "auto")])
def test_a_rank_that_was_started_again_resumes_from_its_run_s_checkpoints(monkeypatch, attempt, resume):
    """A first start does not: what lies in the directory is another run's."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), (launch.RESTARTS, attempt)):
        monkeypatch.setenv(name, str(value))
    seen = []
    start = files.from_dict({"model": {"path": "m"}, "data": {"path": ["d"]}, "device": "cpu", "resume": "never"})
    distributed.placed(lambda settings, here: seen.append(settings.resume) or 0, start, [], 1)()
    assert seen == [resume]


def test_several_processes_are_not_on_one_gpu(run):
    assert run(2, device="cuda") == [2]
    with pytest.raises(ValueError, match="device = 'cuda:1': 2 processes train on a GPU each; give cuda"):
        run(2, device="cuda:1")


def test_sampling_ahead_on_several_gpus_is_refused_by_name_and_number(run):
    with pytest.raises(ValueError, match=r"rollout.ahead = 2 on 3 GPUs: .* give rollout.ahead = 0, or one GPU"):
        run(3, device="cuda", rollout__ahead=2)
    assert run(3, device="cpu", rollout__ahead=2) == [3]
    assert run(1, device="cuda", rollout__ahead=2) == run(1, device="cpu") == ["run"]
    with pytest.raises(ValueError, match=r"rollout.interrupt on 3 ranks: .* or place the roles"):
        run(3, device="cpu", rollout__ahead=2, rollout__interrupt=8)
    assert run(3, trains=False, device="cuda", rollout__ahead=2) == [3]  # an evaluation of such a run


AXES = {"pipeline": 2, "replicate": 1, "shard": 2, "expert": 1, "sequence": 1, "context": 2, "tensor": 1}
CUT = {"virtual_stages": 3, "ring": True, "stage": 2, "reduce_dtype": "bfloat16", "prefetch": False, "timeout": 7.0}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_rank_that_was_started_joins_the_mesh_of_its_settings(run, monkeypatch, trains, ahead, device):
    """With meshes of its own for sampling during training, on the GPU of its place."""
    calls = []
    place = SimpleNamespace(world=8, started=True, attempt=0, local_rank=3)
    monkeypatch.setattr(distributed.Place, "of_environment", lambda: place)

    @contextlib.contextmanager
    def joined(sizes, *given, twin, **how):
        calls.append((sizes, *given, twin, how))
        yield LOCAL, "watch", attrs.evolve(LOCAL, virtual_stages=9) if twin else None
        calls.append("left")

    monkeypatch.setattr(launch, "joined", joined)
    start = files.from_dict({"model": {"path": "m"}, "data": {"path": ["d"]}, "output_dir": "o", "device": device})
    settings = files.replace(start, {f"mesh.{name}": x for name, x in (AXES | CUT | {"shard": None}).items()})
    settings = files.replace(settings, {"rollout.ahead": ahead if device == "cpu" or not trains else 0})
    seen = []
    run = lambda settings, here: seen.append((settings, here)) or 5  # noqa: E731
    made = distributed.placed(run, settings, ["x"], 3, trains=trains)()
    own = torch.device("cpu") if device == "cpu" else torch.device("cuda", 3)
    twin = trains and ahead > 0 and device == "cpu"
    how = {"timeout": 7.0, "virtual_stages": 3, "sharding": Sharding(2, torch.bfloat16, False)}
    assert calls == [(AXES, place, own, twin, how), "left"]
    sampling = attrs.evolve(LOCAL, virtual_stages=9, ring=True) if twin else None
    here = CommandRank(attrs.evolve(LOCAL, ring=True), own, "watch", sampling)
    assert (made, seen) == (5, [(files.replace(settings, {"mesh.shard": 2}), here)])
