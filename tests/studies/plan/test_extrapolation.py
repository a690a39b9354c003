"""Extrapolation on phases made by hand: lines through two points, and ranks of long pipelines from short ones."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

from fppo.runtime.mesh import Sharding
from fppo.runtime.schedule import all_forward, one_f_one_b
from fppo.studies.plan import layers
from fppo.studies.plan.layers import FEW, MORE, extrapolated, piped
from fppo.studies.plan.track import ACTIVATIONS, GATHERED, STATE, Cost, Phase, Segment
from tests.studies.plan.cases import case


def phase(name, *totals, flops=0.0, sent=0.0, start=0.0, kind=ACTIVATIONS):
    """A phase with a segment for each total, and its cost."""
    cost = Cost(Counter({"matmul": flops}), Counter(launches=flops), Counter({("shard", "all_gather", True): sent}))
    cost.calls["shard", "all_gather", True] = 1
    return Phase(name, tuple(Segment({kind: float(x)}) for x in totals), cost, {kind: start})


def forward(count):
    """A pass over `count` layers that keeps 10 for each of them, on 100, with a segment between any two."""
    totals = [100.0 + 10 * n for n in range(count + 1)]
    return phase("forward 1", *totals, flops=7.0 * count + 3, sent=2.0 * count, start=100.0 + count)


@pytest.mark.parametrize("count", [9, 33])
def test_the_phases_of_many_layers_lie_on_a_line_with_those_of_few(count):
    (found,) = extrapolated([forward(FEW)], [forward(MORE)], count)
    whole = forward(count)
    kept = len(forward(FEW).segments)
    half = (kept + 1) // 2
    first, last = whole.segments[:half], whole.segments[half - kept :]
    # the first segments are those of the first layers, the last ones those of the last layers
    assert found.segments[-1] == last[-1]
    assert [segment.total for segment in found.segments[half:]] == [segment.total for segment in last]
    assert [segment.total for segment in found.segments[:half]] == [segment.total for segment in first]
    assert (found.cost.flops, found.cost.sent) == (whole.cost.flops, whole.cost.sent)
    assert found.cost.other == whole.cost.other
    assert found.cost.calls["shard", "all_gather", True] == 1
    assert dict(found.start) == dict(whole.start)


def test_phases_that_do_not_match_have_no_line():
    assert extrapolated([forward(FEW)], [phase("backward 1", 1.0)], 9) is None
    assert extrapolated([forward(FEW)], [forward(FEW - 1)], 9) is None
    assert MORE - FEW == 1


def stage_of(short, count):
    """The phases of one stage: it holds 1000 for each layer, a pass keeps 10 for each, and 4 for its gradients."""
    held = 1000.0 * count
    kept, grads = 10.0 * count, 4.0 * count
    at = {STATE: held}

    def part(name, peak, *, after, flops):
        """A phase from `at` on, at whose end so much is held."""
        own = Phase(name, (Segment(at | {ACTIVATIONS: peak}),), Cost(Counter({"matmul": flops})), dict(at))
        at[ACTIVATIONS] = after
        return own

    return [
        part("setup", 0.0, after=0.0, flops=1.0),
        part("forward 1", kept + 5, after=kept, flops=2.0 * count),
        part("backward 1", kept + 9, after=grads, flops=4.0 * count),
        part("after 1", grads + 1, after=grads, flops=0.0),
        part("forward 2", grads + kept + 5, after=grads + kept, flops=2.0 * count),
        part("backward 2", grads + kept + 9, after=grads, flops=4.0 * count),
        part("after 2", grads + 2, after=grads, flops=8.0),
        part("after", grads + 3, after=grads, flops=11.0),
    ]


def passes_in(phases):
    return [each.name for each in phases if each.name in ("forward", "backward")]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_of_a_long_pipeline_holds_the_passes_of_its_schedule(rank):
    what = case(layers=12, mesh={"pipeline": 4}, pipeline_rank=rank, micro_batches=9, full=False)
    found = piped(what, "update actor", [3], stage_of)
    count = layers.passes.passes_of(what, "update actor")
    actions = one_f_one_b(4, count, 1).actions[rank]
    assert [each.name for each in found] == ["setup", *(action.kind for action in actions), "after"]
    before = [list(actions[:n]) for n in range(len(actions))]
    in_flight = [sum(x.kind == "forward" for x in done) - sum(x.kind == "backward" for x in done) for done in before]
    trained = [any(x.kind == "backward" for x in done) for done in before]
    for each, held, again, action in zip(found[1:-1], in_flight, trained, actions, strict=True):
        own = 30.0 * held + 12.0 * again + (35.0 if action.kind == "forward" else 9.0)
        assert each.segments[0].peak[ACTIVATIONS] == own
        assert each.segments[0].peak[STATE] == 3000.0
    flops = Counter(action.kind for action in actions)
    total = sum(each.cost.flops["matmul"] for each in found)
    # a later backward pass has the sum of gradients, and the update comes once
    assert total == 1.0 + flops["forward"] * 6.0 + flops["backward"] * (12.0 + 8.0) + (11.0 - 8.0)


def test_a_rank_with_two_stages_holds_both_of_their_states():
    what = case(layers=12, mesh={"pipeline": 2}, virtual_stages=2, micro_batches=8, full=False)
    found = piped(what, "update actor", [2, 4], stage_of)
    assert {each.segments[0].peak[STATE] for each in found} == {6000.0}
    assert passes_in(found).count("forward") == 2 * layers.passes.passes_of(what, "update actor")


def test_passes_without_gradients_run_one_after_the_other():
    what = case(layers=12, mesh={"pipeline": 4}, micro_batches=9, full=False)

    def run(short, count):
        assert (short.mesh["pipeline"], short.virtual_stages, short.in_turn) == (3, 1, True)
        return [*stage_of(short, count)[:2], stage_of(short, count)[4]]

    found = piped(what, "log-probs", [3], run)
    assert passes_in(found) == ["forward"] * len(all_forward(4, layers.passes.PASSES, 1).actions[0])


@pytest.mark.parametrize(
    ("rank", "virtual", "places"), [(0, 1, [0]), (1, 1, [1]), (3, 1, [2]), (0, 2, [0, 1]), (3, 2, [1, 2])]
)
def test_each_stage_is_that_of_a_short_pipeline_with_the_same_ends(rank, virtual, places):
    asked = []

    def run(short, count):
        asked.append((short.pipeline_rank, count))
        return stage_of(short, count)

    what = case(mesh={"pipeline": 4}, virtual_stages=virtual, pipeline_rank=rank, micro_batches=8)
    own = [3, 2][:virtual]
    piped(what, "update actor", own, run)
    assert asked == list(zip(places, own, strict=True))


def test_gathered_weights_of_other_stages_are_held_where_they_stay():
    def run(short, count):
        return [each._replace(start={**each.start, GATHERED: 50.0 * count}) for each in stage_of(short, count)]

    held = []
    for stage in (1, 3):
        what = case(mesh={"pipeline": 2}, virtual_stages=2, micro_batches=8)
        found = piped(attrs.evolve(what, sharding=Sharding(stage=stage)), "update actor", [2, 4], run)
        held.append(found[1].segments[0].peak[GATHERED])
    assert held[0] - held[1] == 50.0 * 4
