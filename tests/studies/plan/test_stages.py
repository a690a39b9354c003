"""A planned stage: how much it waits for the slowest of its pipeline, and which of a rank's state is on the host; and
the order in which more GPUs are offered."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from fppo.studies.plan import search
from fppo.studies.plan.case import Role
from fppo.studies.plan.host import state_of
from fppo.studies.plan.passes import Built
from fppo.studies.plan.plan import TRANSIENT, _stage
from tests.studies.plan.cases import case

PLAN: Any = sys.modules["fppo.studies.plan.plan"]


@pytest.mark.parametrize(("rank", "slowest"), [(0, 4.0), (1, 1.0), (2, 2.0)])
@pytest.mark.parametrize("name", ["update actor", "log-probs"])
def test_a_stage_waits_for_the_slowest_of_its_pipeline(monkeypatch, rank, slowest, name):
    asked: list[Any] = []
    kind = next(iter(TRANSIENT))
    monkeypatch.setattr(PLAN, "pipeline_work", lambda at, *_: [3.0, 12.0, 6.0])
    monkeypatch.setattr(PLAN, "seconds_of", lambda phases, at, **named: asked.append((phases, at, named)) or "seconds")
    monkeypatch.setattr(PLAN, "peak_of", lambda phases: ("there", SimpleNamespace(peak={kind: 7})))
    monkeypatch.setattr(PLAN, "wires", lambda phases, at: {"to": len(phases)})
    whole = case(mesh={"pipeline": 3}, pipeline_rank=rank)
    at, phases = whole.at(name), ["phase", "another"]
    passed: Any = phases
    made = _stage(whole, at, name, {"rest": 5.0}, passed, Built())
    assert asked == [(phases, at, {"slowest": slowest, "recorded": False})]
    assert (made.name, made.where, made.seconds, made.wire) == (name, "there", "seconds", {"to": 2})
    assert made.memory.items() >= {"rest": 5.0, kind: 7.0}.items()


@pytest.mark.parametrize("name", ["log-probs", "reference", "values", "update critic", "update actor"])
def test_only_updates_train(monkeypatch, name):
    """By the counts of a model's work: what a stage computes for a mini-batch, divided among the ranks."""
    asked: list[Any] = []

    def count(kind: str, work: float) -> Any:
        return lambda model, lengths, **named: asked.append((kind, model.head, lengths, named)) or work

    counts = SimpleNamespace(train_flops=count("train", 30.0), forward_flops=count("forward", 12.0))
    for part, stand_in in {"pipeline_work": [1.0], "seconds_of": "seconds", "wires": {}}.items():
        monkeypatch.setattr(PLAN, part, lambda *_, made=stand_in, **__: made)
    monkeypatch.setattr(PLAN, "peak_of", lambda phases: ("there", SimpleNamespace(peak={})))
    monkeypatch.setattr(PLAN, "flops", counts)
    whole = case(mesh={"shard": 2, "tensor": 2})
    at = whole.at(name)
    made = _stage(whole, at, name, {}, [], Built())
    trains, head = name.startswith("update"), "value" if name in ("values", "update critic") else "lm"
    tokens = {"head_tokens": at.rows * at.response_tokens, "shared": at.shared}
    assert asked == [("train" if trains else "forward", head, [at.length] * at.rows, tokens)]
    assert made.model_flops == (30.0 if trains else 12.0) / at.rows * whole.mini_batch / 4  # ranks


LEVELS = ["none", "moments", "all"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("of_critic", [None, *LEVELS])
@pytest.mark.parametrize("of_reference", [None, "none", "all"])
def test_each_role_says_what_of_its_state_is_on_the_host(level, of_critic, of_reference):
    roles = {"critic": Role(offload=of_critic), "reference": Role(offload=of_reference)}
    found = state_of(attrs.evolve(case(layers=1, offload=level), roles=roles), Built())
    critic, reference = of_critic or level, of_reference or level
    assert {name: away for name, (away, _) in found.items()} == {
        "actor's parameters": level == "all",
        "actor's optimizer": level != "none",
        "critic's parameters": critic == "all",
        "critic's optimizer": critic != "none",
        "reference's parameters": reference == "all",
    }
    actor, moments = (found[f"actor's {x}"][1] for x in ("parameters", "optimizer"))
    assert sum(moments) == 2 * sum(actor) == 2 * sum(found["reference's parameters"][1])


@pytest.mark.parametrize(
    ("alone", "both", "expected"),
    [(8, 4, [4, 8]), (4, 8, [4, 8]), (4, 4, [4, 4]), (None, 8, [8]), (4, None, [4]), (None, None, [])],
)
def test_more_gpus_are_offered_the_fewest_first(monkeypatch, alone, both, expected):
    """By one change alone, and by several together, where nothing helps on the given number of them."""

    def remedy(world: int | None) -> Any:
        return None if world is None else SimpleNamespace(plan=SimpleNamespace(case=SimpleNamespace(world=world)))

    monkeypatch.setattr(search, "families", lambda case: [])
    monkeypatch.setattr(search, "_helps", lambda family, base: True)
    monkeypatch.setattr(search, "_first", lambda *_: remedy(alone))
    monkeypatch.setattr(search, "_together", lambda case, built, flags=None: remedy(both) if flags else None)
    base: Any = SimpleNamespace(case=case())
    assert [x.plan.case.world for x in search.remedies(base)] == expected


@pytest.mark.parametrize(
    ("own", "runs"),
    [
        ([32], [[4], [5]]),
        ([32, 30], [[4, 2], [5, 3]]),
        ([32, 29], [[4, 1], [5, 2]]),
        ([32, 28], [[32, 28]]),  # of which few would leave none
        ([30, 9, 32], [[30, 9, 32]]),
        ([9], [[9]]),  # as many as both runs together
        ([10], [[4], [5]]),
    ],
)
def test_stages_of_many_layers_follow_from_few_where_each_has_some(monkeypatch, own, runs):
    """Each has as many fewer than the largest as it has."""
    asked: list[Any] = []
    monkeypatch.setattr(
        PLAN.passes, "run_stage", lambda case, name, *, own, built: asked.append((name, own, built)) or own
    )
    monkeypatch.setattr(PLAN.layers, "extrapolated", lambda few, more, most: (few, more, most))
    what: Any = case()
    built: Any = "built"
    found = PLAN._from_few(what, "values", own, built)
    assert asked == [("values", each, built) for each in runs]
    assert found == (own if len(runs) == 1 else (*runs, max(own)))
    asked.clear()
    monkeypatch.setattr(PLAN.layers, "extrapolated", lambda few, more, most: None)  # they do not match
    assert PLAN._from_few(what, "values", own, built) == own
    assert asked[-1] == ("values", own, built)


SIZES = {"log-probs": 1.0, "reference": 9.0, "values": 2.0, "update critic": 5.0, "update actor": 3.0}


@pytest.mark.parametrize(
    ("memory", "only_if_fits", "planned"),
    [
        (9.0, True, list(SIZES)),
        (8.9, True, ["reference", "values", "update critic", "update actor"]),
        (4.9, True, ["update critic", "update actor"]),
        (2.9, True, ["update actor"]),
        (0.4, True, []),  # less than what is at rest
        (0.4, False, list(SIZES)),
    ],
)
def test_a_plan_that_must_fit_ends_with_the_first_stage_that_does_not(monkeypatch, memory, only_if_fits, planned):
    """The last stages first; the reference's pass is that of the policy where they are alike."""
    traced: list[str] = []
    monkeypatch.setattr(PLAN, "_at_rest", lambda case, built: {"x": 0.5})
    monkeypatch.setattr(PLAN, "pipeline_work", lambda *_: [1.0])
    monkeypatch.setattr(PLAN, "phases_of", lambda at, name, built: traced.append(name) or [name])
    monkeypatch.setattr(
        PLAN, "_stage", lambda case, at, name, rest, phases, built: SimpleNamespace(name=name, total=SIZES[name])
    )
    monkeypatch.setattr(PLAN, "host_of", lambda case, built, known: {name: [*x] for name, x in known.items()})
    monkeypatch.setattr(PLAN, "rollout_of", lambda case, rest, built: ("rollout", rest))
    what = case(layers=1)
    what = attrs.evolve(what, hardware=attrs.evolve(what.hardware, memory=memory))
    found = PLAN._plan(what, only_if_fits, Built())
    assert [stage.name for stage in found.stages] == planned
    assert found.rest == {"x": 0.5}
    if planned:
        own = {name for name in planned if name != "reference"} | ({"log-probs"} if "reference" in planned else set())
        assert {*traced} == {*found.host} == own
        assert len(traced) == len(own)
        assert found.rollout == ("rollout", {"x": 0.5})
