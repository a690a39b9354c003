"""How far critics are apart, and which tokens that leaves, against slow loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.advantages import decisive, disagreement, undisputed


def by_loop(values):
    """The deviation of some numbers from their mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))


def left(apart, mask, share):
    """The places of the mask that stay: those with at least floor(share * n) of the others, or as many, below them."""
    places = [(b, t) for b, row in enumerate(mask) for t, there in enumerate(row) if there]
    ranked = sorted(apart[b][t] for b, t in places)
    least = ranked[math.floor(share * len(ranked))] if ranked else 0.0
    return {(b, t) for b, t in places if apart[b][t] >= least}


def calm_by_loop(apart, mask, share):
    """The places of the mask that stay when one after the other those furthest apart go, equal ones together."""
    places = {(b, t) for b, row in enumerate(mask) for t, there in enumerate(row) if there}
    left, most = set(places), math.floor(share * len(places))
    while left:
        worst = max(apart[b][t] for b, t in left)
        gone = {(b, t) for b, t in left if apart[b][t] == worst}
        if len(places) - len(left) + len(gone) > most:
            return left
        left -= gone
    return left


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.5, 0.99]), st.integers(0, 99)
)
def test_tokens_in_which_critics_agree_most_go(members, rows, width, share, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 4, (members, rows, width), generator=generator).double()  # with ties
    mask = torch.rand(rows, width, generator=generator) < 0.7
    apart = disagreement(values)
    expected = [[by_loop(values[:, b, t].tolist()) for t in range(width)] for b in range(rows)]
    torch.testing.assert_close(apart, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    kept = decisive(apart.where(mask, torch.nan), mask, share=share)
    assert {(b, t) for b, t in kept.nonzero().tolist()} == left(apart.tolist(), mask.tolist(), share)
    assert (mask & ~kept).sum() <= share * mask.sum()
    calm = undisputed(apart.where(mask, torch.nan), mask, share=share)
    assert {(b, t) for b, t in calm.nonzero().tolist()} == calm_by_loop(apart.tolist(), mask.tolist(), share)
    assert (mask & ~calm).sum() <= share * mask.sum()
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(decisive(apart[order], mask[order], share=share), kept[order])


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("apart", [torch.zeros(2, 1), torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64)])
@pytest.mark.parametrize("fn", [decisive, undisputed])
def test_what_would_be_spread_over_the_tokens_is_refused(fn, apart):
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^disagreement must be floating \[B, T\] = \[2, 3\] as the mask, got"):
        fn(apart, mask, share=0.4)
    with pytest.raises(ValueError, match="mask must be bool"):
        fn(torch.zeros(2, 3), mask.long(), share=0.4)


def test_critics_that_are_all_equal_leave_all_tokens():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert torch.equal(decisive(torch.zeros(2, 3), mask, share=0.9), mask)
    assert not decisive(torch.zeros(2, 3), torch.zeros_like(mask), share=0.9).any()
    with pytest.raises(ValueError, match="share=1"):
        decisive(torch.zeros(2, 3), mask, share=1)
