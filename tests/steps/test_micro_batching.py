"""Groups of rows: every row once, budgets kept, loads even."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.steps.micro_batching import MicroBatching, balance, fit, partition

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=40)


@given(LENGTHS, st.integers(1, 100))
def test_a_budget_is_kept_unless_one_sequence_alone_exceeds_it(lengths, budget):
    parts = fit(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        assert part
        assert sum(lengths[i] for i in part) <= budget or len(part) == 1
        assert part == sorted(part)


@given(LENGTHS, st.integers(1, 9))
def test_a_size_splits_in_order(lengths, size):
    parts = partition(lengths, MicroBatching(size=size))
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    assert all(len(part) == size for part in parts[:-1])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.data())
def test_balance_shares_all_rows_and_respects_grahams_bound(lengths, data):
    k = data.draw(st.integers(1, len(lengths)))
    parts = balance(lengths, k)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) == k
    assert all(parts)
    heaviest = max(sum(lengths[i] for i in part) for part in parts)
    ordered = sorted(lengths, reverse=True)
    pairs = ordered[k - 1] + ordered[k] if len(lengths) > k else 0
    best = max(math.ceil(sum(lengths) / k), ordered[0], pairs)
    assert heaviest <= best * 4 / 3 + 1e-9


def _log_normal(count):
    draws = np.random.default_rng(0).lognormal(math.log(490), 0.8, count)
    return np.clip(draws, 16, 4096).astype(int).tolist()


def test_many_sequences_need_at_most_one_micro_batch_more_than_the_bound():
    lengths = _log_normal(8192)
    assert len(fit(lengths, 16384)) <= math.ceil(sum(lengths) / 16384) + 1


def test_64_way_balance_is_within_a_ten_thousandth_of_the_mean():
    lengths = _log_normal(8192)
    heaviest = max(sum(lengths[i] for i in part) for part in balance(lengths, 64))
    assert heaviest <= 1.0001 * sum(lengths) / 64


@pytest.mark.parametrize("settings", [{}, {"size": 1, "token_budget": 1}, {"size": 0}, {"token_budget": -3}])
def test_micro_batching_is_one_positive_number(settings):
    with pytest.raises(ValueError, match="micro-batching"):
        MicroBatching(**settings)


def test_more_parts_than_rows_is_an_error():
    with pytest.raises(ValueError, match="2 sequences among 3"):
        balance([1, 2], 3)
