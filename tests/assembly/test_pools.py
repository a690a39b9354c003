"""Groups have the ranks, axes, threads and patience that the settings of their pools give."""

from __future__ import annotations

import contextlib

import attrs
import pytest
import torch

from fppo.assembly import pools
from fppo.fleet import RankSpec
from fppo.runtime.mesh import AXES, Sharding
from fppo.settings.reward import JudgeSettings, RewardModelSettings, RewardSettings
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
    started: int = 0
    closed: int = 0

    def start(self):
        self.started += 1

    def close(self):
        self.closed += 1


class Cluster:
    def ranks(self, spec):
        return spec


def test_every_group_has_the_ranks_of_its_pool(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(pools, "cluster", lambda name: named.append(name) or contextlib.nullcontext(Cluster()))
    monkeypatch.setattr(pools, "Group", Recorded)
    settings = tiny_run.settings(tmp_path, device="auto", **PLACED)
    with pools.groups_of(settings) as at:
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


def test_without_pools_there_is_no_group(tmp_path):
    with pools.groups_of(tiny_run.settings(tmp_path)) as at:
        assert (dict(at.roles), list(at.engines)) == ({}, [])


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("places", "reward", "models", "here"),
    [
        ((), {}, {}, True),
        (("actor",), {}, {}, False),
        (("actor",), {}, {"critic_model": True}, True),
        (("actor", "critic"), {}, {"critic_model": True}, False),
        (("actor",), {"model": RewardModelSettings(path="x")}, {}, True),
        (("actor", "reward"), {"model": RewardModelSettings(path="x")}, {}, False),
        (("actor",), {"judge": JudgeSettings(path="x")}, {}, True),
        (("actor",), {}, {"teacher": True}, True),
        (("actor", "teacher"), {}, {"teacher": True}, False),
    ],
)
def test_batches_are_on_the_device_where_a_model_is_here(places, reward, models, here):
    found = pools.home_of(places, GPU, RewardSettings(**reward), **{"critic_model": False} | models)
    assert found == (GPU if here else torch.device("cpu"))
