"""Which rows are a mini-batch follows from the rows, and from the key."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import metrics
from fppo.key import Key
from fppo.models import flops
from fppo.runtime.simulate import simulate
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop, _mini_batches
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.packed import masks_and_tokens
from fppo.steps.ranks import collect, imbalance, mini_batches, saved_work
from fppo.steps.shared import SortedRows
from tests import tiny


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=12, unique=True), st.integers(1, 12), st.data())
def test_mini_batches_follow_the_rows_and_not_their_places(ids, size, data):
    mixed = data.draw(st.permutations(ids))

    def drawn(rows):
        return [[rows[i] for i in numbers.tolist()] for numbers in mini_batches(torch.tensor(rows), size, key=Key(5))]

    assert drawn(ids) == drawn(mixed)
    assert sorted(row for rows in drawn(ids) for row in rows) == sorted(ids)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 12), st.data())
def test_drawn_by_prompt_the_rows_of_one_stand_together(sizes, size, data):
    """Whatever number each group has, and wherever its rows stand."""
    own = [100 + 7 * number for number, count in enumerate(sizes) for _ in range(count)]
    names = data.draw(st.permutations(sorted({*own})))
    places = data.draw(st.permutations(range(len(own))))

    def drawn(order, groups, seed):
        ids, groups = torch.tensor(order), torch.tensor([groups[row] for row in order])
        return [ids[numbers].tolist() for numbers in mini_batches(ids, size, key=Key(seed), groups=groups)]

    renamed = dict(zip(sorted({*own}), names, strict=True))
    parts = drawn(range(len(own)), own, 5)
    assert parts == drawn(places, [renamed[group] for group in own], 5)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    rows = [row for part in parts for row in part]
    assert sorted(rows) == [*range(len(own))]
    runs = [group for group, _ in itertools.groupby(own[row] for row in rows)]
    assert len(runs) == len(sizes)
    assert all(a < b for a, b in itertools.pairwise(rows) if own[a] == own[b])


def test_prompts_are_drawn_in_every_order():
    ids = torch.arange(6)
    orders = {tuple(torch.cat(mini_batches(ids, 2, key=Key(seed), groups=ids // 2)).tolist()) for seed in range(60)}
    assert len(orders) == 6


def test_what_ranks_made_comes_back_in_the_order_of_the_rows():
    """Their numbers, one rank after the other, are a permutation that is not its own inverse."""
    shared, rows = [[2, 0], [1, 4], [3]], torch.arange(10.0).view(5, 2)

    def run(mesh):
        own = rows[shared[mesh["replicate"].rank]]
        return collect(own, shared, mesh), collect(own > 4, shared, mesh)

    for numbers, larger in simulate({"replicate": 3}, run):
        assert torch.equal(numbers, rows)
        assert torch.equal(larger, rows > 4)


def test_imbalance_is_the_most_work_over_the_mean():
    model, _ = tiny.model_and_params("lm")
    rows = SortedRows(order=[0, 1, 2], lengths=[4, 4, 4], depths=[0, 0, 0])
    assert imbalance(model, rows, [[0], [1], [2]]) == 1.0
    assert imbalance(model, rows, [[0, 1, 2], [], []]) == 3.0


def test_the_weights_of_all_ranks_are_those_of_one_token_mean():
    model, _ = tiny.model_and_params("lm")
    batch, loop = tiny.experience(3, 5), Loop(mini_batch_size=5, micro_batching=MicroBatching(size=2))

    def on_rank(mesh):
        (mini,) = _mini_batches(batch, loop, Forward(model, mesh=mesh), None)
        return mini.weights.sum().item()

    shares = simulate({"replicate": 2}, on_rank)
    assert 0 < min(shares) < max(shares)
    assert sum(shares) == pytest.approx(1.0)


def test_what_sharing_saves_is_weighed_by_the_work_of_each_mini_batch():
    model, _ = tiny.model_and_params()
    batch, parts = tiny.experience(0, 6), []
    for rows, index in ((batch, [0, 0, 0]), (batch, [1, 2, 3, 4, 5])):
        masks = masks_and_tokens(batches.rows(rows, index))
        whole = flops.train_flops(model, masks.lengths, head_tokens=int(masks.response.sum()))
        report = saved_work(model, masks, [list(range(len(index)))], "actor")
        parts.append((report, whole * metrics.report(report)["perf/shared_flops/actor"], whole))
    (one, saved, work), (other, less, more) = parts
    together = metrics.report(metrics.merge(one, other))["perf/shared_flops/actor"]
    assert saved > 0
    assert together == pytest.approx((saved + less) / (work + more))
