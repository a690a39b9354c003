"""The groups of a mesh, by a stand-in for torch.distributed: their ranks, their limits, and NCCL's device."""

import contextlib
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from fppo.runtime import launch
from fppo.runtime.launch import Place, joined
from fppo.runtime.mesh import Sharding


@pytest.fixture
def asked(monkeypatch):
    """What was asked of torch.distributed: keywords of its start, ranks and limit of each group."""
    asked = SimpleNamespace(start={}, groups=[])

    def new_group(ranks, *, timeout):
        asked.groups.append((tuple(ranks), timeout))
        return tuple(ranks)

    distributed = SimpleNamespace(
        init_process_group=lambda backend, **keywords: asked.start.update(keywords, backend=backend),
        new_group=new_group,
        group=SimpleNamespace(WORLD="everyone"),
        barrier=lambda: None,
        destroy_process_group=lambda: None,
        ProcessGroup=None,
    )
    monkeypatch.setattr(launch, "dist", distributed)
    monkeypatch.setattr(launch, "rendezvous", lambda *_, **__: iter([(None,)]))
    monkeypatch.setattr(launch, "PrefixStore", lambda name, store: name)
    monkeypatch.setattr(launch, "Monitor", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(launch, "watched", lambda mesh: (mesh, None))
    return asked


@pytest.mark.parametrize(("device", "bound"), [("cpu", None), ("cuda:3", torch.device("cuda:3"))])
def test_every_group_waits_as_long_as_the_settings_say(asked, device, bound):
    sizes = {"replicate": 2, "shard": 2, "sequence": 1}
    place, limit = Place(rank=2, world=4), timedelta(seconds=20)
    with joined(sizes, place, torch.device(device), timeout=10.0, sharding=Sharding(), twin=True) as (mesh, _, second):
        axes = {name: (axis.size, axis.rank, axis.group) for name, axis in mesh.axes.items()}
        assert axes == {"replicate": (2, 1, (0, 2)), "shard": (2, 0, (2, 3))}
        assert second.axes == mesh.axes
    assert (asked.start["timeout"], asked.start["device_id"]) == (limit, bound)
    assert asked.groups == [((0, 2), limit), ((1, 3), limit), ((0, 1), limit), ((2, 3), limit)] * 2


def test_one_axis_is_the_group_of_all_but_for_a_twin(asked):
    place = Place(rank=1, world=2)
    with joined({"shard": 2}, place, torch.device("cpu"), timeout=1.0, sharding=Sharding(), twin=True) as (
        mesh,
        _,
        second,
    ):
        assert (mesh["shard"].rank, mesh["shard"].group, mesh.sharded) == (1, "everyone", True)
        assert second["shard"].group == (0, 1)
