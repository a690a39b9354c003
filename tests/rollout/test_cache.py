"""Attention over a cache of keys and values, as it is and as it is recorded, against a loop over rows and heads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.models.seams import AttentionLayer
from fppo.rollout.cache import bias_of, decode_attention, fixed_attention, row_bytes
from fppo_kernels.decode_attention.eager import eager

ROWS, HEADS, KEPT, WIDTH, COLUMNS = 3, 4, 2, 5, 9


def by_hand(query, keys, values, pad, column, layer):
    """The attention of one row's query [Hq, D] over the columns that it sees."""
    first = pad if layer.window is None else max(pad, column + 1 - layer.window)
    found = []
    for head in range(HEADS):
        kept = head // (HEADS // KEPT)
        scores = [float(query[head] @ keys[kept, c]) * layer.scale for c in range(first, column + 1)]
        if layer.softcap is not None:
            scores = [layer.softcap * math.tanh(x / layer.softcap) for x in scores]
        more = [] if layer.sinks is None else [math.exp(float(layer.sinks[head]))]
        weights = [math.exp(x) for x in scores]
        total = sum(weights) + sum(more)
        found.append(sum(w / total * values[kept, c] for w, c in zip(weights, range(first, column + 1), strict=True)))
    return torch.stack(found)


def layer_of(number, g):
    window, softcap, sinks = number
    own = torch.randn(HEADS, generator=g, dtype=torch.float64) if sinks else None
    return AttentionLayer(0, 0.3, window, softcap, own)


LAYERS = st.lists(
    st.tuples(st.sampled_from([None, 1, 2, 4]), st.sampled_from([None, 0.7]), st.booleans()), min_size=1, max_size=3
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    LAYERS, st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS), st.integers(4, COLUMNS - 1), st.integers(0, 9)
)
def test_a_step_attends_to_what_each_row_has_and_writes_its_own(layers, pads, column, seed):
    """Whatever the windows, caps and sinks of its layers; columns that are not yet written may hold anything."""
    g = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    layers = [layer_of(number, g) for number in layers]
    cache = {i: (noise(ROWS, KEPT, COLUMNS, WIDTH), noise(ROWS, KEPT, COLUMNS, WIDTH)) for i in range(len(layers))}
    others = {i: tuple(x.clone() for x in pair) for i, pair in cache.items()}
    counts = torch.tensor(pads)[:, None]
    hidden = torch.arange(COLUMNS) < counts
    alike = len({*pads}) == 1
    plain = decode_attention(eager, cache, column, min(pads), None if alike else bias_of(hidden, cache))
    fixed = fixed_attention(eager, others, torch.tensor([column]), counts)
    for i, layer in enumerate(layers):
        query, key, value = noise(ROWS, 1, HEADS, WIDTH), noise(ROWS, 1, KEPT, WIDTH), noise(ROWS, 1, KEPT, WIDTH)
        before = [x.clone() for x in cache[i]]
        out, again = plain(query, key, value, layer), fixed(query, key, value, layer)
        for x, old, new, other in zip(cache[i], before, (key, value), others[i], strict=True):
            assert torch.equal(x[:, :, column], new[:, 0])
            rest = torch.arange(COLUMNS) != column
            assert torch.equal(x[:, :, rest], old[:, :, rest])
            assert torch.equal(other, x)
        for row in range(ROWS):
            expected = by_hand(query[row, 0], cache[i][0][row], cache[i][1][row], pads[row], column, layer)
            torch.testing.assert_close(out[row, 0], expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(again[row, 0], expected, rtol=0, atol=1e-12)
    assert row_bytes({0: (torch.zeros(7, 2, 3), torch.zeros(7, 1, 5))}, 4) == 4 * (2 * 3 + 5) * 4
