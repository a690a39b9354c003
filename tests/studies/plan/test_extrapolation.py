"""Extrapolation on phases made by hand: lines through two points."""

from __future__ import annotations

from collections import Counter

import pytest

from fppo.studies.plan.layers import FEW, MORE, extrapolated
from fppo.studies.plan.track import ACTIVATIONS, Cost, Phase, Segment


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
