"""Keys and values that move between rows and columns: against tensors that are moved one call at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rollout import banks as bank_rows
from fppo.rollout import cache as caches
from fppo.rollout.banks import BankLayout
from fppo.rollout.reading import groups_within, owned

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
    layout = BankLayout.of(like, CPU)
    row, rows = layout.row(5), layout.rows(2, 5)
    assert sum(x.numel() * x.element_size() for x in row) == 5 * layout.token_bytes
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
    assert caches.row_bytes(like, 7) == 7 * layout.token_bytes


MOVES = st.lists(
    st.tuples(st.sampled_from(["put", "move", "shift", "shift out"]), st.integers(0, 99), st.integers(0, 99)),
    max_size=8,
)


@settings(max_examples=40)
@given(SHAPES, MOVES, st.integers(0, 5))
def test_moves_are_those_of_single_columns(shapes, moves, seed):
    """A list of columns of each row, of which each is a number for each call, moves beside the banks."""
    layout = BankLayout.of(layers_of(shapes, 1, seed), CPU)
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
            bank_rows.put_(banks, row, end, row_of(values))
            plain[row][end - len(values) : end] = values
        elif what == "move":
            source, target, start = first % 3, second % 3, first % 6
            end = start + second % (7 - start)
            bank_rows.move_(banks, source, target, start, end)
            plain[target][start:end] = plain[source][start:end]
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
    for adapter, rows in owned(sizes):
        assert adapter is not None
        found[rows] = [adapter] * (rows.stop - rows.start)
    assert found == each


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 2))
def test_prompts_are_written_to_the_rows_of_their_draws(lengths, n, start):
    """Padding becomes zero, padding of the packed row is dropped, and other rows and columns stay."""
    width, batch = max(lengths) + 1, len(lengths)
    index = torch.tensor(
        [row * width + width - size + i for row, size in enumerate(lengths) for i in range(size)], dtype=torch.int64
    )
    kept = {0: tuple(torch.arange(1.0, len(index) + 3)[:, None, None] * sign for sign in (1, -1))}
    cache = {0: tuple(torch.full((start + batch * n + 1, 1, width + 2, 1), 99.0) for _ in range(2))}
    caches.write_prompts_(cache, start, kept, index, (batch, width), n)
    for x, sign in zip(cache[0], (1, -1), strict=True):
        expected = torch.full_like(x, 99.0)
        number = 0
        for row, size in enumerate(lengths):
            own = [0.0] * (width - size) + [sign * float(number + i + 1) for i in range(size)]
            number += size
            for j in range(n):
                expected[start + row * n + j, 0, :width, 0] = torch.tensor(own)
        assert torch.equal(x, expected)
