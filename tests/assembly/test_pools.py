"""Groups have the ranks, axes, threads and patience that the settings of their pools give."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable

import attrs
import pytest
import torch

from fppo.assembly import pools
from fppo.fleet import RankSpec
from fppo.runtime.mesh import AXES, Sharding
from tests import tiny_run

PLACED = {
    "placement__pools": {
        "p": {"ranks": 4, "gpus": 1.0, "pipeline": 2, "virtual_stages": 2, "threads": 3, "context": 2, "ring": True},
        "v": {"ranks": 2, "gpus": 1.0, "tensor": 2, "threads": 5},
        "e": {"ranks": 3, "threads": 1, "gpus": 0.5},
    },
    "placement__roles__actor": "p",
    "placement__roles__critic": "v",
    "placement__roles__rollout": "e",
    "placement__patience": 77.0,
    "placement__cluster": "local",
    "mesh__stage": 2,
    "mesh__reduce_dtype": "bfloat16",
    "mesh__prefetch": False,
}


@attrs.define
class Recorded:
    """A group that only notes what it was made of."""

    name: str
    ranks: RankSpec
    patience: float = attrs.field(kw_only=True)
    device: torch.device = attrs.field(kw_only=True)
    begin: Callable[[], None] | None = attrs.field(kw_only=True)
    started: int = 0
    closed: int = 0

    def start(self):
        self.started += 1

    def close(self):
        self.closed += 1


class Cluster:
    def ranks(self, spec):
        return spec


def groups_of(settings, named, **modules):
    placed = settings.placement, settings.mesh, settings.device
    open_cluster = lambda name: named.append(name) or contextlib.nullcontext(Cluster())  # noqa: E731
    return pools.groups_of(*placed, settings.model_roles, open_cluster=open_cluster, **modules)


def test_every_group_has_the_ranks_of_its_pool(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(pools, "Group", Recorded)
    settings = tiny_run.settings(tmp_path, device="auto", **PLACED)
    with groups_of(settings, named, modules=["own_of_pools"], module_dirs=[str(tmp_path)]) as at:
        groups = [at.roles["actor"], at.roles["critic"], *at.engines]
        assert all((group.started, group.closed, group.patience) == (1, 0, 77.0) for group in groups)
    assert all(group.closed == 1 for group in groups)
    assert named == ["local"]
    assert {role: group.name for role, group in at.roles.items()} == {"actor": "p", "critic": "v", "reference": "p"}
    assert at.roles["actor"] is at.roles["reference"]
    assert [group.name for group in at.engines] == ["e 0", "e 1", "e 2"]
    one = dict.fromkeys(AXES, 1)
    common = {"sharding": Sharding(stage=2, reduce_dtype=torch.bfloat16, prefetch=False), "patience": 77.0}
    expected = [
        RankSpec(
            count=4,
            gpus=1.0,
            sizes=one | {"pipeline": 2, "context": 2},
            virtual_stages=2,
            ring=True,
            threads=3,
            **common,
        ),
        RankSpec(count=2, gpus=1.0, sizes=one | {"tensor": 2}, threads=5, **common),
        *[RankSpec(count=1, gpus=0.5, sizes=one, threads=1, **common)] * 3,
    ]
    assert [group.ranks for group in groups] == expected
    for group in groups:
        with pytest.raises(ValueError, match="'own_of_pools' does not import"):
            group.begin()
    (tmp_path / "own_of_pools.py").write_text("")
    importlib.invalidate_caches()
    assert [group.begin() for group in groups] == [None] * 5


@pytest.mark.parametrize(("changes", "home"), [({}, "cpu"), ({"reward__judge__path": "x"}, "cuda:1")])
def test_results_come_to_where_this_process_has_batches(tmp_path, monkeypatch, changes, home):
    monkeypatch.setattr(pools, "Group", Recorded)
    monkeypatch.setattr(pools, "device_of", lambda name, _: torch.device(name))
    with groups_of(tiny_run.settings(tmp_path, device="cuda:1", **PLACED, **changes), []) as at:
        assert {group.device for group in (*at.roles.values(), *at.engines)} == {torch.device(home)}


def test_without_pools_there_is_no_group(tmp_path):
    with groups_of(tiny_run.settings(tmp_path), []) as at:
        assert (dict(at.roles), list(at.engines)) == ({}, [])


GPU = torch.device("cuda")


NO_CRITIC = {"algorithm__advantage": "remax"}
TAUGHT = tiny_run.NO_KL | {"algorithm__advantage": "distill", "model__teacher_path": "x"}


@pytest.mark.parametrize(
    ("places", "changes", "here"),
    [
        ((), NO_CRITIC, True),
        (("actor",), NO_CRITIC, False),
        (("actor", "reference", "rollout"), NO_CRITIC, False),
        (("actor",), {}, True),
        (("actor", "critic"), {}, False),
        (("actor",), {"critic__reads": "confidence"}, False),
        (("actor",), NO_CRITIC | {"reward__model__path": "x"}, True),
        (("actor", "reward"), NO_CRITIC | {"reward__model__path": "x"}, False),
        (("actor", "reward"), NO_CRITIC | {"reward__judge__path": "x"}, True),
        (("actor",), TAUGHT, True),
        (("actor", "teacher"), TAUGHT, False),
    ],
)
def test_batches_are_on_the_device_where_a_model_is_here(tmp_path, places, changes, here):
    found = pools.batch_device_of(places, GPU, tiny_run.settings(tmp_path, **changes).model_roles)
    assert found == (GPU if here else torch.device("cpu"))
