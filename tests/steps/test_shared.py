"""Rows that begin alike: distinct tokens are those of the trie of the rows, and cuts and deals keep them together."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.batch import RowInputs
from fppo.runtime.simulate import simulate
from fppo.steps.micro_batching import MicroBatching, partition
from fppo.steps.packed import gathered, own_tokens
from fppo.steps.shared import (
    cut_runs,
    deal_shared,
    distinct_inputs,
    pack_rows,
    partition_shared,
    sort_rows,
)

WIDTH = 5
# few tokens, few prompts: rows begin alike by chance too, within prompts, beyond them, and as wholes
TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=WIDTH)
ROWS = st.lists(TOKENS, min_size=1, max_size=3).flatmap(
    lambda prompts: st.lists(st.tuples(st.sampled_from(prompts), TOKENS), min_size=0, max_size=9)
)


def padded(rows):
    """Prompts on the right of the first columns, responses on the left of the others."""
    tokens = torch.zeros(len(rows), 2 * WIDTH, dtype=torch.int64)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (prompt, response) in enumerate(rows):
        own = slice(WIDTH - len(prompt), WIDTH + len(response))
        tokens[i, own], mask[i, own] = torch.tensor([*prompt, *response], dtype=torch.int64), True
    return tokens, mask


def made(rows, step=1):
    return sort_rows(*padded(rows), WIDTH, step=step)


def trie(rows):
    """The distinct beginnings of rows: one for each distinct token."""
    whole = [tuple(prompt) + tuple(response) for prompt, response in rows]
    return {row[:n] for row in whole for n in range(1, len(row) + 1)}


@given(ROWS)
def test_distinct_tokens_are_the_nodes_of_the_trie(rows):
    found = made(rows)
    assert sorted(found.order) == list(range(len(rows)))
    assert found.tokens == len(trie(rows))
    _, mask = padded(rows)
    packed = pack_rows(found, mask)
    assert len(packed.index) == sum(piece.size for piece in packed.pieces) == found.tokens
    assert len(packed.places) == int(mask.sum())


@given(ROWS, st.sampled_from([1, 2, 3]))
def test_each_row_is_the_pieces_on_the_way_to_its_last_token(rows, step):
    found = made(rows, step)
    tokens, mask = padded(rows)
    packed, flat = pack_rows(found, mask), tokens.flatten()
    begins = [0, *itertools.accumulate(piece.size for piece in packed.pieces)]
    whole = {}
    for number, (size, parent) in enumerate(packed.pieces):
        assert size > 0
        assert parent < number
        whole[number] = [*(whole[parent] if parent >= 0 else []), *range(begins[number], begins[number] + size)]
    assert len(trie(rows)) <= found.tokens <= int(mask.sum())
    for row, own in zip(rows, packed.places.split(mask.sum(1).tolist()), strict=True):
        assert flat[packed.index[own]].tolist() == [*row[0], *row[1]]
        assert not len(own) or own.tolist() == next(x for x in whole.values() if int(own[-1]) in x)[: len(own)]


@given(ROWS, st.sets(st.integers(0, 8)))
def test_some_of_the_rows_share_what_those_between_them_do(rows, chosen):
    found = made(rows)
    chosen = sorted(row for row in chosen if row < len(rows))
    part = found.part(chosen)
    assert sorted(part.order) == chosen
    assert part.tokens == len(trie([rows[row] for row in chosen]))
    assert found.apart().tokens == sum(found.lengths)


@given(ROWS)
def test_pieces_that_follow_none_come_first(rows):
    _, mask = padded(rows)
    parents = [piece.parent for piece in pack_rows(made(rows), mask).pieces]
    assert parents == sorted(parents, key=lambda parent: parent >= 0)


@given(ROWS, st.integers(1, 30))
def test_micro_batches_hold_no_more_distinct_tokens_than_the_budget(rows, budget):
    parts = partition_shared(made(rows), MicroBatching(token_budget=budget))
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        assert part == sorted(part)
        assert len(trie([rows[i] for i in part])) <= budget or len(part) == 1


@given(ROWS, st.integers(1, 30), st.sampled_from([2, 4]))
def test_no_more_tokens_are_computed_than_without_sharing(rows, budget, step):
    found = made(rows, step)
    runs = cut_runs(found, budget)
    for own, tokens in runs:
        assert made([rows[i] for i in own], step).tokens == tokens
        assert tokens <= budget or len(own) == 1
    assert sum(tokens for _, tokens in runs) <= sum(found.lengths)


@given(ROWS, st.integers(1, 4))
def test_micro_batches_of_so_many_rows_keep_prompts_together(rows, size):
    parts = partition_shared(made(rows), MicroBatching(size=size))
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert all(len(part) == size for part in parts[:-1])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_a_prompt_that_fits_is_in_one_micro_batch_and_on_one_rank(counts, data):
    """Prompts that begin with other tokens, and rows in any order."""
    rows = [([number, 9], [7, i]) for number, count in enumerate(counts) for i in range(count)]
    rows = data.draw(st.permutations(rows))
    found = made(rows)
    for parts in (
        partition_shared(found, MicroBatching(token_budget=2 + 4 * 4)),
        deal_shared(found, 2, float) if len(counts) > 1 and len(set(counts)) == 1 and len(counts) % 2 == 0 else [],
    ):
        homes = Counter((rows[i][0][0], number) for number, part in enumerate(parts) for i in part)
        assert len(homes) == (len(counts) if parts else 0)


@given(ROWS, st.integers(1, 4))
def test_ranks_share_all_rows_and_no_tree_is_more_than_its_part_and_a_row(rows, ranks):
    cost = lambda n: float(n * (n + 3))  # noqa: E731
    found = made(rows)
    parts = deal_shared(found, ranks, cost)
    assert len(parts) == ranks
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    whole = sum(map(cost, found.lengths)) - sum(map(cost, found.depths))
    for own, work in cut_runs(found, whole / ranks, cost):
        assert work <= whole / ranks or len(own) == 1


def test_the_gain_is_kept_by_the_cut_that_keeps_prompts_together():
    """Prompts of 256 tokens, 8 responses of up to 64: cut by row, 4,096 tokens at a time leave most of these."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(32, 65, (32 * 8,), generator=g)
    numbers = torch.arange(32).repeat_interleave(8)
    mask = torch.arange(256 + 64) < 256 + sizes[:, None]
    tokens = torch.where(torch.arange(320) < 256, numbers[:, None], torch.randint(10**6, (256, 320), generator=g))
    found, lengths = sort_rows(tokens, mask, 256, step=1), mask.sum(1).tolist()
    budget = MicroBatching(token_budget=4096)
    plain, kept = partition(lengths, budget), partition_shared(found, budget)

    def computed(parts):
        return sum(sort_rows(tokens[part], mask[part], 256, step=1).tokens for part in parts) / sum(lengths)

    assert computed(plain) > 0.8
    assert computed(kept) == pytest.approx(found.tokens / sum(lengths))
    assert found.saved == pytest.approx(1 - computed(kept))
    assert computed(kept) < 0.27
    assert (len(plain), len(kept)) == (20, 6)


def test_rows_share_prompts_whole_and_more_in_steps():
    assert made([([1, 2, 3], [1, 1, 1, 5]), ([1, 2, 3], [1, 1, 1, 6])], 2).depths == [0, 5]
    assert made([([1, 2, 3], [1, 1]), ([1, 2], [3, 1, 1])], 2).depths == [0, 5]  # the same rows in full
    assert made([([1, 2, 3], [1]), ([1, 2, 4], [1])], 2).depths == [0, 2]
    assert made([([1, 2, 3, 4], [1]), ([1, 2, 3, 5], [1])], 2).depths == [0, 2]  # no prompt as a whole
    assert made([([1], [1]), ([1], [2])], 2).depths == [0, 1]


def test_rows_of_other_images_share_nothing():
    one, other = (
        RowInputs({"pixel_values": torch.full((1,), x)}, torch.tensor([0]), torch.zeros(0, 1, 1, 3, dtype=torch.uint8))
        for x in (1.0, 2.0)
    )
    rows = [([1, 1], [1]), ([1, 1], [2]), ([1, 1], [3]), ([1, 1], [4])]
    tokens, mask = padded(rows)
    own = distinct_inputs(tokens, [one, other, one, None])
    found = sort_rows(own, mask, WIDTH, step=1)
    assert sorted(found.depths) == [0, 0, 0, 2]
    assert distinct_inputs(tokens, None) is tokens


@given(st.sampled_from([2, 4]), st.integers(1, 3), st.lists(st.integers(0, 11), max_size=9))
def test_a_token_before_several_responses_is_gathered_for_each(ranks, length, tokens):
    """The last token of a prompt precedes all of its responses."""
    places = torch.tensor([x % (ranks * length) for x in tokens], dtype=torch.int64)
    values, weights = torch.randn(ranks * length, 2).double(), torch.randn(len(places), 2).double()

    def run(mesh):
        axis = mesh["sequence"]
        x = values.clone().requires_grad_()
        own = own_tokens(places, length, axis)
        mine = x[axis.rank * length : (axis.rank + 1) * length][own.places] * weights[own.numbers]
        (whole,) = gathered([mine], own, axis)
        return whole.detach(), torch.autograd.grad(whole.square().sum(), x)[0]

    found = simulate({"sequence": ranks}, run)
    x = values.clone().requires_grad_()
    expected = x[places] * weights
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    for whole, _ in found:
        torch.testing.assert_close(whole, expected.detach(), rtol=0, atol=0)
    torch.testing.assert_close(sum(share for _, share in found), grad)
