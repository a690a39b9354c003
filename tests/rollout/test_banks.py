"""Keys and values that move between rows and columns: against tensors that are moved one call at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rollout import banks as bank_rows
from fppo.rollout import cache as caches
from fppo.rollout.banks import BankLayout, Moves
from fppo.rollout.prefill import adapter_slices, groups_within

CPU = torch.device("cpu")
SHAPES = st.lists(
    st.tuples(
        st.sampled_from([(1, 2), (2, 2), (2, 3)]),
        st.sampled_from([(1, 2), (2, 3)]),
        st.sampled_from([torch.float32, torch.float64]),
    ),
    min_size=1,
    max_size=4,
)


def layers_of(shapes, tokens, seed):
    """Keys and values [N, H, D] of calls of these shapes, their numbers in any order."""
    g = torch.Generator().manual_seed(seed)
    made = {
        number: tuple(torch.randn(tokens, *shape, generator=g).to(dtype) for shape in (keys, values))
        for number, (keys, values, dtype) in enumerate(shapes)
    }
    return dict(sorted(made.items(), key=lambda pair: -pair[0]))


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 5))
def test_each_call_has_its_own_part_of_the_banks(shapes, seed):
    like = layers_of(shapes, 3, seed)
    layout = BankLayout.of_layers(like, CPU)
    row, rows = layout.row(5), layout.rows(2, 5)
    assert sum(x.numel() * x.element_size() for x in row) == caches.row_bytes(like, 5)
    assert all((x == 0).all() for x in rows)
    for banks, ahead in ((row, ()), (rows, (2,))):
        layers = layout.layers(banks)
        assert [*layers] == [*range(len(shapes))]
        for number, pair in layers.items():
            for x, own in zip(pair, like[number], strict=True):
                assert x.shape == (*ahead, own.shape[1], 5, own.shape[2])
                assert x.dtype == own.dtype
        parts = [x for number in layers for x in layers[number]]
        for number, x in enumerate(parts):
            x.fill_(number)  # of memory of its own
        assert all((x == number).all() for number, x in enumerate(parts))


MOVES = st.lists(
    st.tuples(st.sampled_from(["put", "move", "shift", "shift out"]), st.integers(0, 99), st.integers(0, 99)),
    max_size=8,
)


@settings(max_examples=40)
@given(SHAPES, MOVES, st.integers(0, 5))
def test_moves_are_those_of_single_columns(shapes, moves, seed):
    """A list of columns of each row, of which each is a number for each call, moves beside the banks."""
    layout = BankLayout.of_layers(layers_of(shapes, 1, seed), CPU)
    banks, numbers = layout.rows(3, 6), iter(range(1, 10_000))
    plain = [[0.0] * 6 for _ in range(3)]

    def row_of(values):
        own = layout.row(len(values))
        for x in own:
            x.copy_(torch.tensor(values).to(x.dtype)[:, None].expand(x.shape))
        return own

    for what, first, second in moves:
        if what == "put":
            row, end = first % 3, 1 + second % 6
            values = [float(next(numbers)) for _ in range(1 + first % end)]
            bank_rows.put_(banks, slice(row, row + 1), end, row_of(values))
            plain[row][end - len(values) : end] = values
        elif what == "move":
            leaving, start = sorted({first % 3, second % 3}), first % 6
            end = start + second % (7 - start)
            moved = Moves.of(3, leaving)
            bank_rows.move_(banks, moved, start, end)
            stay = [row for row in range(3) if row not in leaving]
            assert sorted(moved.order.tolist()) == stay
            before = [[*row] for row in plain]
            for place, row in enumerate(moved.order.tolist()):
                plain[place][start:end] = before[row][start:end]
        else:
            rows, start = 1 + first % 3, second % 6
            end = start + first % (7 - start)
            by = first % (7 - end) - second % (start + 1)
            by = min(max(by, -start), 6 - end)
            other = banks if what == "shift" else layout.rows(3, 6)
            bank_rows.shift_(banks, other, rows, start, end, by)
            there = plain if what == "shift" else [[0.0] * 6 for _ in range(3)]
            for row in range(rows):
                there[row][start + by : end + by] = plain[row][start:end]
            banks, plain = other, there
        for x in banks:
            expected = torch.tensor(plain).to(x.dtype)[None, :, None, :, None]
            assert torch.equal(x, expected.expand(x.shape))
    copy = bank_rows.taken(banks, 1, 2, 5)
    both = bank_rows.joined([copy, row_of([7.0, 8.0])])
    for x in banks:
        x.fill_(-1.0)
    for x in both:
        expected = torch.tensor([*plain[1][2:5], 7.0, 8.0]).to(x.dtype)[None, None, :, None]
        assert torch.equal(x, expected.expand(x.shape))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 12))
def test_groups_are_as_large_as_they_may_be(sizes, most):
    """Each but the last could not have had the next one, too; one that is too large is alone."""
    groups = [*groups_within(sizes, most)]
    assert [i for group in groups for i in range(group.start, group.stop)] == [*range(len(sizes))]
    for group, later in pairwise(groups):
        assert group.start < group.stop
        assert sum(sizes[group]) + sizes[later.start] > most
    assert all(sum(sizes[group]) <= most or group.stop - group.start == 1 for group in groups)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 3)), max_size=8))
def test_adapters_own_the_rows_of_their_neighbours(sizes):
    each = [name for name, size in sizes for _ in range(size)]
    found = [None] * len(each)
    for adapter, rows in adapter_slices(sizes):
        assert adapter is not None
        found[rows] = [adapter] * (rows.stop - rows.start)
    assert found == each


@settings(max_examples=40)
@given(SHAPES, st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 2))
def test_prompts_are_written_to_the_rows_of_their_draws(shapes, lengths, n, start):
    """Each row has its prompt's tokens before the end; other rows and columns stay."""
    passed = layers_of(shapes, sum(lengths) + 1, 0)
    layout, count = BankLayout.of_layers(passed, CPU), len(lengths) * n
    layers = layout.layers(layout.rows(start + count + 1, max(lengths) + 3))
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    spans = [(begin, length) for begin, length in zip(begins, lengths, strict=True) for _ in range(n)]
    end = max(lengths) + 1
    bank_rows.put_passed_(layers, slice(start, start + count), end, passed, spans)
    for number, pair in layers.items():
        for x, own in zip(pair, passed[number], strict=True):
            for row, (begin, length) in enumerate(spans, start):
                assert torch.equal(x[row, :, end - length : end], own[begin : begin + length].transpose(0, 1))
            assert not x[[*range(start), start + count]].any()
            assert not x[:, :, end:].any()
