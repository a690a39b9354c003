"""Estimators that weigh steps by length, by turn and by off-policy weights, against their formulas as loops."""

from functools import partial

import pytest
import torch

from fppo import advantages, laws
from fppo.advantages import gae, length_lam, td, turn_gae, vtrace
from fppo.laws import LawViolation
from fppo.laws.references import advantages as references


def adaptive(rewards, values, mask):
    lam = length_lam(mask, alpha=0.6)
    return gae(rewards, values, mask, gamma=0.9, lam=lam, critic_lam=1.0)


FORMULAS = {
    "decoupled": ("gae", {"gamma": 0.9, "lam": 0.7, "critic_lam": 1.0}, {}),
    "length": ("gae", {"gamma": 0.9, "lam_alpha": 0.6, "critic_lam": 1.0}, {}),
    "turns": ("turn_gae", {"gamma": 0.9, "lam": 0.7}, {"bridges": False}),
    "td": ("td", {"steps": 3, "gamma": 0.9}, {}),
    "vtrace": ("vtrace", {"gamma": 0.9, "lam": 0.8, "cut": 0.7}, {"columns": ("rewards", "values", "weights")}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_an_estimator_is_its_formula_and_keeps_the_laws(name):
    function, scalars, how = FORMULAS[name]
    estimator, reference = (partial(getattr(of, function), **scalars) for of in (advantages, references))
    laws.check_temporal(estimator, reference=reference, **how)


@pytest.mark.slow
def test_a_wrong_discount_is_seen():
    with pytest.raises(LawViolation, match=r"as of partial\(td") as caught:
        laws.check_temporal(partial(td, steps=3, gamma=0.8), reference=partial(references.td, steps=3, gamma=0.9))
    assert caught.value.law == "reference"
    with pytest.raises(LawViolation, match="without its masked steps"):
        laws.check_temporal(partial(turn_gae, gamma=0.9))


def test_the_ends_of_the_ranges_are_known_estimators():
    draws = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 9, generator=draws, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=draws) < 0.7
    whole = torch.ones_like(mask)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for steps, lam in ((1, 0.0), (99, 1.0)):
        close(td(rewards, values, mask, steps=steps, gamma=0.9), gae(rewards, values, mask, gamma=0.9, lam=lam))
    on_policy = vtrace(rewards, values, torch.ones_like(rewards), mask, gamma=0.9, lam=0.7)
    close(on_policy.returns, gae(rewards, values, mask, gamma=0.9, lam=0.7).returns)
    one_turn = turn_gae(rewards, values, whole, gamma=0.5, lam=0.5)  # which no discount reaches
    close(one_turn.advantages, (rewards.sum(1) - values[:, 0])[:, None].expand_as(rewards))
    close(one_turn.returns, gae(rewards, values, whole).returns)
    assert length_lam(torch.ones(1, 400, dtype=torch.bool)).tolist() == [0.95]
    assert length_lam(torch.ones(1, 20, dtype=torch.bool)).tolist() == [0.0]


def test_nothing_to_estimate_and_numbers_out_of_range():
    for shape in ((0, 3), (3, 0)):
        x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        for result in (td(x, x, mask, steps=1), turn_gae(x, x, mask), vtrace(x, x, x, mask), adaptive(x, x, mask)):
            assert result.advantages.shape == result.returns.shape == shape
    x, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for call, text in (
        (partial(td, steps=0), "steps must be 1 or more, got 0"),
        (partial(turn_gae, lam=1.5), "lam must be between 0 and 1, got 1.5"),
        (partial(gae, critic_lam=-0.1), "critic_lam must be between 0 and 1, got -0.1"),
    ):
        with pytest.raises(ValueError, match=text):
            call(x, x, mask)
    with pytest.raises(ValueError, match="cut must be > 0"):
        vtrace(x, x, x, mask, cut=0.0)
    with pytest.raises(ValueError, match="alpha must be > 0"):
        length_lam(mask, alpha=0.0)
