"""Groups have the ranks, axes, threads and patience that the settings of their pools give."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import tree
from fppo.assembly import placed, pools
from fppo.fleet import RankSpec
from fppo.key import Key
from fppo.pipeline.program import Base, RunState
from fppo.runtime import checkpoint
from fppo.runtime.mesh import AXES, Sharding
from fppo.steps.train_state import TrainState
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


def groups_of(settings):
    return pools.groups_of(settings.placement, settings.mesh, settings.device, settings.model_roles)


def test_every_group_has_the_ranks_of_its_pool(tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(pools, "cluster", lambda name: named.append(name) or contextlib.nullcontext(Cluster()))
    monkeypatch.setattr(pools, "Group", Recorded)
    settings = tiny_run.settings(tmp_path, device="auto", **PLACED)
    with groups_of(settings) as at:
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


@pytest.mark.parametrize(("changes", "home"), [({}, "cpu"), ({"reward__judge__path": "x"}, "cuda:1")])
def test_results_come_to_where_this_process_has_batches(tmp_path, monkeypatch, changes, home):
    monkeypatch.setattr(pools, "cluster", lambda _: contextlib.nullcontext(Cluster()))
    monkeypatch.setattr(pools, "Group", Recorded)
    monkeypatch.setattr(pools, "device_of", lambda name, _: torch.device(name))
    with groups_of(tiny_run.settings(tmp_path, device="cuda:1", **PLACED, **changes)) as at:
        assert {group.device for group in (*at.roles.values(), *at.engines)} == {torch.device(home)}


def test_without_pools_there_is_no_group(tmp_path):
    with groups_of(tiny_run.settings(tmp_path)) as at:
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


class Counted:
    """A group of so many ranks that notes what it is called with."""

    def __init__(self, ranks, calls):
        self.ranks, self._calls = ranks, calls

    def call(self, fn, *args, label, stays=()):
        self._calls.append((label, fn, args, stays))
        return label


def state_of(step=3):
    part = TrainState(params={"w": torch.ones(1)}, opt=None, step=0)
    base = Base(source="the base", digest="d", dtype="float32", adapter="rank 4")
    return RunState(actor=part, critic=part, key=Key(0), step=step, bases={"actor": base})


@pytest.fixture
def apart():
    """The state of a run whose actor has two ranks and whose critic has one, and the calls of both."""
    calls = []
    parts = {"actor": placed._Part(Counted(2, calls), "a"), "critic": placed._Part(Counted(1, calls), "c")}
    return placed.Placed(parts=parts, kind="sums"), calls


@pytest.mark.parametrize(
    ("ranks", "device", "kind"),
    [
        ((1, 1, 1), "cpu", "blake2b"),
        ((1, 1, 2), "cpu", "sums"),
        ((2, 1, 1), "cpu", "sums"),
        ((1, 1, 1), "cuda", "sums"),
    ],
)
def test_every_role_in_a_group_is_a_field_of_the_state(monkeypatch, ranks, device, kind):
    monkeypatch.setattr(placed, "Group", Counted)
    names = ("actor", "critic", "reference")
    at = {name: Counted(count, []) for name, count in zip(names, ranks, strict=True)}

    def of(at, *present):
        roles = {name: SimpleNamespace(model=f"model of {name}") if name in present else None for name in names}
        return placed.Placed.of(SimpleNamespace(at=at, **roles), torch.device(device))  # pyright: ignore

    found = of(at, *names)
    assert found.kind == kind
    assert {field: (part.group, part.model) for field, part in found.parts.items()} == {
        "actor": (at["actor"], "model of actor"),
        "critic": (at["critic"], "model of critic"),
        "ref": (at["reference"], "model of reference"),
    }
    assert [*of(at | {"critic": "here"}, *names).parts] == ["actor", "ref"]
    assert [*of(at, "actor", "critic").parts] == ["actor", "critic"]
    assert of(dict.fromkeys(at, "here"), *names) is None


def test_a_state_in_groups_is_saved_once_with_files_for_every_rank(apart, tmp_path, monkeypatch):
    own, calls = apart
    run, asked = state_of(), []
    pending = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(placed.checkpoint, "begin_save", lambda *args, **named: asked.append((args, named)) or pending)
    assert own.save(run, tmp_path, keep=2, notes={"note": "x"}) is pending
    assert own.save(run, tmp_path, keep=2).wait() == checkpoint.path_of(tmp_path, 3)  # it is there
    (((rest, directory, step), named),) = asked
    assert (rest.actor, rest.critic, rest.key, rest.bases) == (None, None, run.key, run.bases)
    assert (directory, step) == (tmp_path, 3)
    parts = named.pop("parts")
    assert named == {"free": placed.AHEAD, "keep": 2, "notes": {"note": "x"}}
    assert parts.files == 3
    assert parts.write(tmp_path / "draft") == ["save actor", "save critic"]
    written = {label: args for label, _, args, _ in calls}
    assert written["save actor"][1:] == (run.actor, "a", "actor", tmp_path / "draft", 0)
    assert written["save critic"][1:] == (run.critic, "c", "critic", tmp_path / "draft", 2)


def test_a_state_is_loaded_where_it_is_and_what_was_loaded_is_not_written_again(apart, tmp_path, monkeypatch):
    own, calls = apart
    run, asked = state_of(), []
    monkeypatch.setattr(placed.checkpoint, "load", lambda *args, **named: asked.append((args, named)) or run)
    found = own.load(run, tmp_path, 3, device="device")
    assert asked == [((run, tmp_path, 3), {"free": placed.AHEAD, "device": "device"})]
    assert (found.actor, found.critic) == ("load actor", "load critic")
    assert all((fn, stays) == (placed._load, True) for _, fn, _, stays in calls)
    assert [args[1:] for *_, args, _ in calls] == [
        (run.actor, "a", "actor", tmp_path.absolute(), 3),
        (run.critic, "c", "critic", tmp_path.absolute(), 3),
    ]
    assert own.save(run, tmp_path, keep=2).wait() == checkpoint.path_of(tmp_path, 3)


@pytest.mark.parametrize(("adapted", "source"), [(True, "the base"), (False, None)])
def test_a_policy_in_a_group_is_exported_by_it(apart, tmp_path, adapted, source):
    own, calls = apart
    run = state_of()
    own.export(run if adapted else tree.replace(run, bases=None), tmp_path / "out", "tokenizer", "generation")
    ((label, fn, args, _),) = calls
    assert (label, fn) == ("export", placed._export)
    assert args[1:] == ("a", run.actor.params, (tmp_path / "out").absolute(), "tokenizer", "generation", source)
