"""From few layers to many."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

from fppo.plan import layers, passes
from fppo.plan.plan import phases_of
from fppo.plan.values import peak_of
from tests.plan.cases import case, config

CASES = [
    ({"shard": 8}, 1, True, "update actor"),
    ({"shard": 8}, 2, False, "update critic"),
    ({"shard": 8, "sequence": 2}, 3, False, "update actor"),
    ({"shard": 8}, 3, True, "log-probs"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stage", "again", "name"), CASES)
def test_many_layers_follow_from_few_exactly(mesh, stage, again, name):
    what = case(layers=6, mesh=mesh, stage=stage, checkpoint_layers=again)
    model = passes.model_of(what, passes.STAGES[name])
    full, quick = phases_of(what, name, model), phases_of(attrs.evolve(what, full=False), name, model)
    assert peak_of(quick)[0] == peak_of(full)[0]
    assert dict(peak_of(quick)[1].peak) == dict(peak_of(full)[1].peak)
    assert len(quick[1].segments) < len(full[1].segments)
    for a, b in zip(quick, full, strict=True):
        for counter in ("flops", "other", "sent", "calls"):
            assert +Counter(getattr(a.cost, counter)) == +getattr(b.cost, counter)


def test_layers_that_differ_are_all_run():
    kinds = ["full_attention", "sliding_attention"] * 3
    what = case(config=config(num_hidden_layers=6, layer_types=kinds, use_sliding_window=True, sliding_window=16))
    assert not layers.alike(passes.model_of(what, "actor"))
    assert layers.alike(passes.model_of(case(layers=6), "actor"))
