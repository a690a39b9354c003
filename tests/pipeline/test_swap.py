"""Where one step parts from another: by steps that are equal but for one leaf, and by a step of two runs."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch

from fppo import metrics, tree
from fppo.batch import Column
from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.pipeline.swap import ANNOTATIONS, ESTIMATES, StageDifference, Trace, stage_differences, trace, watch
from fppo.steps.train_state import TrainState
from fppo_kernels.table import Kernels
from tests import tiny

ROWS = 4
BARE = tiny.experience(0, ROWS)
SHAPE = BARE.response_mask.shape


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1.0


WHOLE = attrs.evolve(
    BARE,
    **{name: numbers(i, *SHAPE) for i, name in enumerate(ANNOTATIONS[:6])},
    hidden=numbers(7, *SHAPE, 3),
    truth_signs=numbers(8, *SHAPE, 2),
    routed=torch.ones(*BARE.tokens.shape, 1, 2, dtype=torch.uint8),
    **{name: numbers(20 + i, *SHAPE) for i, name in enumerate(ESTIMATES[:4])},
    entropy_mask=torch.ones(SHAPE, dtype=torch.bool),
)


def state(first: float) -> TrainState:
    return TrainState(params={"a": torch.full((2,), first), "b": torch.ones(1)}, opt=None, step=3)


def step_of(experience: Any = WHOLE, **changes: Any) -> Trace:
    after = RunState(actor=state(1.0), critic=state(2.0), key=Key(0))
    gradients = {role: [("a", torch.tensor([2.0, -4.0])), ("b", torch.ones(1))] for role in ("actor", "critic")}
    parts = {"sampled": WHOLE, "experience": experience, "after": after, "gradients": gradients}
    return Trace(**{**parts, **changes})


STAGES = ["rollout", *ANNOTATIONS, "advantages", "critic gradients", "critic state", "actor gradients", "actor state"]


def test_equal_steps_part_nowhere():
    found = stage_differences(step_of(), step_of())
    assert [x.stage for x in found] == STAGES
    assert all((x.leaf, x.max_abs, x.relative, x.worst, x.differing) == (None, 0.0, 0.0, 0.0, 0) for x in found)
    leaves = {x.stage: x.leaves for x in found}
    assert {leaves[name] for name in ANNOTATIONS} == {1}
    assert (leaves["advantages"], leaves["actor gradients"]) == (len(ESTIMATES), 2)
    assert leaves["rollout"] > 10


@pytest.mark.parametrize("name", [*ANNOTATIONS[:8], *ESTIMATES[:4]])
def test_a_column_that_differs_parts_its_own_stage_by_its_largest_difference(name):
    column = getattr(WHOLE, name)
    other = column.clone()
    place = (1, 2, *[0] * (column.dim() - 2))
    other[place] -= 0.25
    other[(0,) * column.dim()] += 0.125
    found = {x.stage: x for x in stage_differences(step_of(), step_of(attrs.evolve(WHOLE, **{name: other})))}
    stage = "advantages" if name in ESTIMATES else name
    relative = 0.25 / column.abs().max().item()
    expected = StageDifference(
        stage=stage,
        leaf=name,
        max_abs=pytest.approx(0.25),
        relative=pytest.approx(relative),
        worst=pytest.approx(relative),
        differing=1,
        leaves=found[stage].leaves,
    )
    assert found.pop(stage) == expected
    assert all(x.leaf is None for x in found.values())


def test_of_several_leaves_the_first_is_named_and_the_worst_is_counted():
    rows = attrs.evolve(WHOLE, token_rewards=WHOLE.token_rewards + 0.01, returns=WHOLE.returns * 3)
    (found,) = [x for x in stage_differences(step_of(), step_of(rows)) if x.leaf is not None]
    assert (found.stage, found.leaf, found.differing) == ("advantages", "token_rewards", 2)
    assert found.max_abs == pytest.approx(0.01)
    assert found.worst == pytest.approx(2.0)  # of the returns
    assert found.relative == pytest.approx(0.01 / WHOLE.token_rewards.max().item())


def test_gradients_and_states_part_by_role():
    gradients = step_of().gradients | {"actor": [("a", torch.tensor([2.0, -5.0])), ("b", torch.ones(1))]}
    found = {x.stage: x for x in stage_differences(step_of(), step_of(gradients=gradients)) if x.leaf is not None}
    assert list(found) == ["actor gradients"]
    assert (found["actor gradients"].leaf, found["actor gradients"].relative) == ("a", 0.25)
    moved = RunState(actor=state(1.0), critic=state(2.5), key=Key(0))
    found = {x.stage: x for x in stage_differences(step_of(), step_of(after=moved)) if x.leaf is not None}
    assert list(found) == ["critic state"]
    assert (found["critic state"].leaf, found["critic state"].max_abs) == (".params['a']", 0.5)


@pytest.mark.parametrize(
    ("other", "gap"),
    [
        (torch.ones(ROWS, 1), math.inf),
        (WHOLE.values.float(), math.inf),
        (None, math.inf),
        (WHOLE.values.where(WHOLE.values < 1.5, torch.nan), math.inf),
        (WHOLE.values.where(WHOLE.values < 1.5, torch.inf), math.inf),
        (WHOLE.values, 0.0),
    ],
    ids=["another shape", "another dtype", "gone", "no number", "infinite", "equal"],
)
def test_what_cannot_be_compared_is_infinitely_far(other, gap):
    found = {x.stage: x for x in stage_differences(step_of(), step_of(attrs.evolve(WHOLE, values=other)))}["values"]
    assert (found.max_abs, found.relative) == (gap, gap)
    assert (found.leaf is None) == (gap == 0)


def test_infinities_in_both_are_equal_and_large_is_what_is_finite():
    here, there = WHOLE.values.clone(), WHOLE.values.clone()
    here[0, :2] = there[0, :2] = torch.tensor([torch.inf, -torch.inf])
    there[1, 2] -= 0.25
    steps = [step_of(attrs.evolve(WHOLE, values=x)) for x in (here, there)]
    (found,) = [x for x in stage_differences(*steps) if x.stage == "values"]
    assert found.max_abs == pytest.approx(0.25)
    assert found.relative == pytest.approx(0.25 / here[here.isfinite()].abs().max().item())


def test_numbers_that_are_none_in_both_are_equal_and_zeros_are_far_by_their_difference():
    nan = WHOLE.values.clone()
    nan[0, 0] = torch.nan
    both = [attrs.evolve(WHOLE, values=x) for x in (nan, nan.clone())]
    both[1].values[0, 1] += 0.5
    (found,) = [x for x in stage_differences(*map(step_of, both)) if x.leaf is not None]
    assert found.max_abs == pytest.approx(0.5)
    zeros = attrs.evolve(WHOLE, values=torch.zeros(SHAPE))
    (found,) = [
        x
        for x in stage_differences(step_of(zeros), step_of(attrs.evolve(WHOLE, values=torch.full(SHAPE, 0.5))))
        if x.leaf
    ]
    assert (found.max_abs, found.relative) == (0.5, 0.5)


def test_objects_of_rows_differ_or_do_not():
    other = attrs.evolve(WHOLE, finish=Column(["length"] * ROWS))
    (found,) = [x for x in stage_differences(step_of(), step_of(sampled=other)) if x.leaf is not None]
    assert (found.stage, found.differing, found.max_abs) == ("rollout", 1, math.inf)


def test_a_step_without_a_critic_or_a_rollout_has_fewer_stages():
    alone = RunState(actor=state(1.0), key=Key(0))
    bare = step_of(BARE, sampled=None, after=alone, gradients={"actor": step_of().gradients["actor"]})
    there = [name for name in ANNOTATIONS if getattr(BARE, name) is not None]
    assert [x.stage for x in stage_differences(bare, bare)] == [*there, "advantages", "actor gradients", "actor state"]


def updating(role, watched):
    """An update whose optimizer calls the watched kernel twice."""

    def update(state, batch, *, key, donate):
        assert not donate
        for scale in (1.0, 10.0):
            watched.kernels.adamw(list(state.params.values()), [scale * torch.full((2,), len(role)), torch.ones(1)], [])
        return attrs.evolve(state, step=state.step + 2), {"perf/total_num_tokens": metrics.mean(1.0)}

    return update


def test_a_trace_has_the_batch_and_the_gradients_of_the_first_update_of_each_role():
    from tests.pipeline.test_step import Stages

    called = []

    def adamw(params, grads, *rest):
        called.append(grads)
        grads[0].zero_()  # its own from now on

    kernels = attrs.evolve(Kernels.named(), adamw=adamw)
    watched, stages = watch(kernels), Stages()
    program = stages.program(update_actor=updating("actor", watched), update_critic=updating("critic", watched))
    run = RunState(actor=state(1.0), critic=state(2.0), key=Key(2), step=3)
    before = tree.digest(run)
    found = trace(run, program=program, draw="draw", watched=watched)
    assert len(called) == 4  # all go on to the kernel
    assert {role: [name for name, _ in grads] for role, grads in found.gradients.items()} == {
        "critic": ["a", "b"],
        "actor": ["a", "b"],
    }
    assert {role: grads[0][1].tolist() for role, grads in found.gradients.items()} == {
        "critic": [6.0, 6.0],
        "actor": [5.0, 5.0],
    }
    sampled = stages.calls["sample"]
    assert found.sampled is found.experience
    assert (sampled[0].step, found.after.step) == (3, 4)
    assert tree.digest(run) == before
    reference = attrs.evolve(found, sampled=attrs.evolve(found.sampled, scores=found.sampled.scores + 1))
    again = trace(run, program=program, draw="draw", watched=watch(kernels), reference=reference)
    assert again.sampled is found.sampled  # what was sampled here
    assert again.experience is reference.sampled  # what the stages began with


@pytest.mark.parametrize("critic", ["none", "some"])
def test_gradients_of_a_role_are_those_of_its_own_update_with_all_its_parameters(critic):
    """An update by another optimizer calls no kernel of AdamW's, and one by muon calls it with some parameters."""
    from tests.pipeline.test_step import Stages

    kernels = attrs.evolve(Kernels.named(), adamw=lambda *args: None)
    watched = watch(kernels)

    def other(state, batch, *, key, donate):
        if critic == "some":
            watched.kernels.adamw([state.params["b"]], [torch.ones(1)], [])
        return attrs.evolve(state, step=state.step + 2), {}

    program = Stages().program(update_actor=updating("actor", watched), update_critic=other)
    run = RunState(actor=state(1.0), critic=state(2.0), key=Key(2), step=3)
    found = trace(run, program=program, draw="draw", watched=watched)
    assert {role: [name for name, _ in grads] for role, grads in found.gradients.items()} == {"actor": ["a", "b"]}
    assert found.gradients["actor"][0][1].tolist() == [5.0, 5.0]
    stages = [x.stage for x in stage_differences(found, found)]
    assert [name for name in STAGES[-4:] if name in stages] == ["critic state", "actor gradients", "actor state"]
