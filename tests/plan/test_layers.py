"""From few layers to many."""

from __future__ import annotations

from collections import Counter
from functools import partial

import attrs
import pytest

from fppo.plan import layers
from fppo.plan.estimate import seconds_of, wires
from fppo.plan.passes import Built, model_of
from fppo.plan.plan import phases_of
from fppo.plan.track import ACTIVATIONS, GATHERED, GRADIENTS, Cost, Phase, peak_of
from tests.plan.cases import case, config

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


def test_what_grows_with_the_layers_is_a_line_through_both_runs():
    for count, number in ((layers.FEW, 10.0), (layers.MORE, 13.0), (32, 10.0 + 3.0 * (32 - layers.FEW))):
        assert layers._linear({"grows": 10.0}, {"grows": 13.0}, count) == {"grows": number}
