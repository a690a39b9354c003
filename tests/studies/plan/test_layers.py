"""From few layers to many."""

from __future__ import annotations

from collections import Counter
from functools import partial

import attrs
import pytest

from fppo.runtime.schedule import all_forward, one_f_one_b
from fppo.studies.plan import layers
from fppo.studies.plan.estimate import seconds_of, wires
from fppo.studies.plan.passes import Built, model_of
from fppo.studies.plan.plan import phases_of
from fppo.studies.plan.track import ACTIVATIONS, BATCH, GATHERED, GRADIENTS, STATE, Cost, Phase, Segment, peak_of
from tests.studies.plan.cases import case, config

CASES = [
    ({"shard": 8}, 1, "selective", "update actor"),
    ({"shard": 8}, 2, False, "update critic"),
    ({"shard": 8, "sequence": 2}, 3, False, "update actor"),
    ({"shard": 8}, 3, True, "log-probs"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stage", "again", "name"), CASES)
def test_many_layers_follow_from_few_exactly(mesh, stage, again, name):
    what = case(layers=10, mesh=mesh, stage=stage, checkpoint_layers=again)
    full, quick = phases_of(what, name), phases_of(attrs.evolve(what, full=False), name)
    assert peak_of(quick)[0] == peak_of(full)[0]
    assert dict(peak_of(quick)[1].peak) == dict(peak_of(full)[1].peak)
    assert len(quick[1].segments) < len(full[1].segments)
    for a, b in zip(quick, full, strict=True):
        for counter in ("flops", "other", "sent", "calls"):
            assert +Counter(getattr(a.cost, counter)) == +getattr(b.cost, counter)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "virtual", "stage", "passes"), [(0, 1, 3, 5), (0, 2, 1, 8), (3, 2, 3, 4)])
def test_a_long_pipeline_follows_from_a_short_one(rank, virtual, stage, passes):
    """Of which every pass is run."""
    mesh = {"pipeline": 4, "shard": 2}
    what = case(layers=8, mesh=mesh, stage=stage, virtual_stages=virtual, pipeline_rank=rank, micro_batches=passes)
    full, quick = phases_of(what, "update actor"), phases_of(attrs.evolve(what, full=False), "update actor")
    assert sum(phase.name.startswith("forward") for phase in full) == passes * virtual
    (where, held), (place, found) = peak_of(full), peak_of(quick)
    assert where.startswith(place)
    assert found.total == pytest.approx(held.total, rel=0.03)
    for kind in (ACTIVATIONS, GATHERED, GRADIENTS):
        assert found.peak[kind] == pytest.approx(held.peak[kind], rel=0.05)
    assert {axis: wire.sent for axis, wire in wires(quick, what).items()} == pytest.approx(
        {axis: wire.sent for axis, wire in wires(full, what).items()}, rel=0.01
    )
    # each pass that is run once adds its gradients by launches of its own
    for recorded, rel in ((True, 0.02), (False, 0.05)):
        short, long = (seconds_of(phases, what, recorded=recorded).compute for phases in (quick, full))
        assert short == pytest.approx(long, rel=rel)


def test_stages_of_other_numbers_of_layers_are_other_runs():
    built, what = Built(), case()
    runs = [built.run(what, "update actor", n, partial(list, [Phase(str(n), (), Cost())])) for n in (1, 2, 1)]
    assert [phases[0].name for phases in runs] == ["1", "2", "1"]


def test_layers_that_differ_are_all_run():
    kinds = ["full_attention", "sliding_attention"] * 3
    what = case(config=config(num_hidden_layers=6, layer_types=kinds, use_sliding_window=True, sliding_window=16))
    assert not layers.alike(model_of(what, "actor"))
    assert layers.alike(model_of(case(layers=6), "actor"))


def of_stage(what, layers, *, trains):
    """The phases of a stage of a short pipeline: what an action adds depends on the stage's place and layers alone."""
    state, kept, grads = 100 * (1 + what.pipeline_rank), 10 * layers, 3 * layers if trains else 0
    held = Counter({STATE: state, GATHERED: 2 * layers, BATCH: 7})
    phases = [Phase("setup", (Segment(held + Counter({BATCH: 1})),), Cost(other=Counter(x=50)), {STATE: state})]

    def add(name, cost, *, peak, then):
        phases.append(Phase(name, (Segment(held + Counter(peak)),), Cost(other=Counter(x=cost)), dict(held)))
        held.update(then)

    for number in (1, 2, 3) if trains else (1, 2):
        cost = (90 if number == 1 else 4) * layers if trains else 90 * layers + 6 * (number == 2)
        add(f"forward {number}", cost, peak={ACTIVATIONS: kept + 1}, then={ACTIVATIONS: kept if trains else 0})
        if trains:
            first = grads if number == 1 else 0
            add(f"backward {number}", 2 * cost, peak={GRADIENTS: first + 5}, then={GRADIENTS: first})
            add(f"after {number}", 1 if number < 3 else 1000, peak={BATCH: 2}, then={ACTIVATIONS: -kept})
    return phases


@pytest.mark.parametrize("name", ["update actor", "log-probs"])
@pytest.mark.parametrize("sharding", [1, 3])
@pytest.mark.parametrize(("rank", "virtual"), [(0, 1), (2, 1), (3, 1), (0, 2), (1, 2), (3, 2)])
def test_a_pipelines_actions_add_what_they_do_in_a_short_one(name, sharding, rank, virtual):
    """In the order of its schedule, from the state of all stages of a rank; later passes find the gradients there."""
    trains, ranks, own = name.startswith("update"), 4, [6, 5][:virtual]
    mesh = {"pipeline": ranks, "shard": 2}
    what = case(layers=20, mesh=mesh, stage=sharding, virtual_stages=virtual, pipeline_rank=rank, micro_batches=5)
    asked = []

    def run(short, count):
        assert (short.size("pipeline"), short.virtual_stages, short.in_turn) == (layers.SHORT, 1, True)
        asked.append((short.pipeline_rank, count))
        return of_stage(short, count, trains=trains)

    found = layers.piped(what, name, own, run)
    stages = dict(zip(range(rank, ranks * virtual, ranks), own, strict=True))
    places = {x: 0 if x == 0 else 2 if x == ranks * virtual - 1 else 1 for x in stages}
    assert asked == [(places[x], count) for x, count in stages.items()]
    held = Counter({BATCH: 7})
    for number, (stage, count) in enumerate(stages.items()):
        held[STATE] += 100 * (1 + places[stage])
        held[GATHERED] += 2 * count if sharding == 1 or number == 0 else 0
    setup = found[0]
    assert setup.cost.other["x"] == 50 * virtual
    assert +Counter(setup.segments[0].peak) == held + Counter({BATCH: 1})
    schedule = one_f_one_b if trains else all_forward
    count = layers.passes.passes_of(what, name)
    seen = set()
    actions = schedule(ranks, count, virtual).actions[rank]
    assert [phase.name for phase in found[1:]] == [*(x.kind for x in actions), "after"]
    for action, phase in zip(actions, found[1:], strict=False):
        size, again = stages[action.stage], (action.kind, action.stage) in seen
        seen.add((action.kind, action.stage))
        grads = 3 * size if action.kind == "backward" and not again else 0
        peaks = [held + Counter({ACTIVATIONS: 10 * size + 1})]
        if action.kind == "backward":
            peaks = [held + Counter({GRADIENTS: grads + 5}), held + Counter({GRADIENTS: grads, BATCH: 2})]
        assert [+Counter(x.peak) for x in phase.segments] == [+x for x in peaks]
        cost = (4 if trains else 90) * size
        assert phase.cost.other["x"] == (cost if action.kind == "forward" else 2 * cost + 1)
        held[ACTIVATIONS] += {"forward": 10 * size if trains else 0, "backward": -10 * size}[action.kind]
        held[GRADIENTS] += grads
    assert found[-1].cost.other["x"] == virtual * (999 if trains else 6)
