"""Our estimators keep the laws, and every law catches the mistake it is there for."""

from functools import partial

import pytest
import torch

from fppo import advantages, laws
from fppo.advantages import Advantages
from fppo.laws import _search


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "lite_ppo"])
def test_group_estimators_keep_the_laws(name):
    laws.check_advantages(getattr(advantages, name))


@pytest.mark.slow
def test_others_keep_the_laws():
    laws.check_advantages(advantages.grpo_passk)
    laws.check_advantages(advantages.pkpo)
    laws.check_advantages(advantages.qae)
    laws.check_advantages(lambda s, m, g: advantages.gdpo({"a": s, "b": s.abs()}, m, g), higher_scores=False)
    laws.check_gae(advantages.gae)
    laws.check_whiten(advantages.whiten)


@pytest.fixture
def few(monkeypatch):
    """Half of the examples in which a mistake is looked for: each kind of mask once in each size."""
    monkeypatch.setattr(_search, "check", partial(_search.check, seeds=3))


def plain_reinforce(scores, mask, groups):
    return scores.detach()[:, None].where(mask, 0.0)


def test_equal_rewards_can_be_left_out():
    with pytest.raises(laws.LawViolation, match="equal rewards"):
        laws.check_advantages(plain_reinforce)
    laws.check_advantages(plain_reinforce, equal_rewards=False)


def amplified_noise(scores, mask, groups):
    """verl's grpo: the mean's rounding over 1e-6."""
    result = torch.zeros_like(scores)
    for g in groups.unique():
        rows = (groups == g) & mask.any(1)
        s = scores.detach()[rows]
        if rows.sum() > 1:
            result = result.masked_scatter(rows, (s - s.sum() / len(s) * (1 + 1e-16) + 1e-17) / (s.std() + 1e-6))
    return result[:, None].where(mask, 0.0)


def counts_empty_rows(scores, mask, groups):
    mean = torch.stack([scores.detach()[groups == g].mean() for g in groups])
    return (scores.detach() - mean)[:, None].where(mask, 0.0)


def multiplied_mask(scores, mask, groups):
    return scores.detach()[:, None] * mask


def not_masked(scores, mask, groups):
    present = mask.any(1)
    return scores.detach().where(present, 0.0)[:, None].expand(mask.shape)


def contiguous_groups(scores, mask, groups):
    starts = torch.cat([torch.ones(1, dtype=torch.bool), groups[1:] != groups[:-1]])
    return advantages.rloo(scores, mask, starts.cumsum(0))


def ordered_names(scores, mask, groups):
    return advantages.rloo(scores * (groups + 1), mask, groups)


def padded_mean(scores, mask, groups):
    result = advantages.rloo(scores, mask, groups)
    return Advantages(result.advantages / mask.shape[1], result.returns)


def numpy_baseline(scores, mask, groups):
    """An estimator that takes its scores to be numbers, which they are in a run: nothing asks for their gradient."""
    live, group, score = mask.any(1).numpy(), groups.numpy(), scores.numpy()
    above = score.copy()
    for g in set(group[live]):
        rows = (group == g) & live
        if rows.sum() > 1:
            low = score[rows].min()
            above[rows] = score[rows] - low - (score[rows] - low).mean()
    return torch.from_numpy(above)[:, None].where(mask, 0.0)


def test_scores_are_handed_in_without_a_gradient_to_come():
    laws.check_advantages(numpy_baseline)
    laws.check_advantages(lambda scores, mask, groups: scores[:, None].where(mask, 0.0), equal_rewards=False)


def negated(scores, mask, groups):
    return -numpy_baseline(scores, mask, groups)


def nothing(scores, mask, groups):
    return torch.zeros_like(mask, dtype=scores.dtype)


def one_column(scores, mask, groups):
    return scores.detach()


def single_precision(scores, mask, groups):
    return advantages.rloo(scores.float(), mask, groups)


def in_place(scores, mask, groups):
    scores.detach().sub_(scores.detach().mean())
    return advantages.rloo(scores, mask, groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        (amplified_noise, "equal rewards"),
        (counts_empty_rows, "masked garbage"),
        (multiplied_mask, "masked garbage"),
        (not_masked, "zero outside the mask"),
        (contiguous_groups, "row order"),
        (ordered_names, "group names"),
        (padded_mean, "padding width"),
        (negated, "higher scores"),
        (nothing, "unequal rewards"),
        (one_column, "shape"),
        (single_precision, "shape"),
        (in_place, "purity"),
    ],
)
def test_each_mistake_of_a_group_estimator_breaks_its_law(mistake, law, few):
    with pytest.raises(laws.LawViolation, match=mistake.__name__) as caught:
        laws.check_advantages(mistake)
    assert caught.value.law == law
    assert "scores" in caught.value.example


def test_an_estimator_that_takes_no_groups_of_one_is_told_how_to_say_so():
    def pairs(scores, mask, groups):
        if (groups[mask.any(1)].unique(return_counts=True)[1] == 1).any():
            raise ValueError("pairs needs two rows")
        return advantages.grpo_passk(scores, mask, groups)

    with pytest.raises(laws.LawViolation, match=r"pairs needs two rows(.|\n)*give group_rows=2") as caught:
        laws.check_advantages(pairs)
    assert caught.value.law == "groups of one"

    def crashes(scores, mask, groups):
        raise RuntimeError("always")

    with pytest.raises(laws.LawViolation, match="it raised RuntimeError: always") as caught:
        laws.check_advantages(crashes)
    assert caught.value.law == "shape"


@pytest.mark.slow
def test_each_law_of_order_can_be_left_out():
    with pytest.raises(laws.LawViolation, match="give higher_scores=False"):
        laws.check_advantages(negated)
    laws.check_advantages(negated, higher_scores=False)
    with pytest.raises(laws.LawViolation, match="give unequal_rewards=False"):
        laws.check_advantages(nothing)
    laws.check_advantages(nothing, unequal_rewards=False)


def by_loop(advantage_of):
    """`advantage_of(score, the scores of its group, the lengths of its group)` for every row."""

    def slow(scores, mask, groups):
        rows = torch.zeros_like(scores)
        for row, group in enumerate(groups.tolist()):
            peers = (groups == group) & mask.any(1)
            if mask[row].any():
                rows[row] = advantage_of(scores[row], scores[peers], mask[peers].sum(1))
        return rows[:, None].where(mask, 0.0)

    return slow


grpo_by_loop = by_loop(lambda s, group, n: (s - group.mean()) / (group.std() + 1e-6))
rloo_by_loop = by_loop(lambda s, group, n: (s - group.mean()) * len(group) / (len(group) - 1))
opo_by_loop = by_loop(lambda s, group, n: s - (group * n).sum() / n.sum())


def biased_deviation(scores, mask, groups):
    peers = ((groups[:, None] == groups) & mask.any(1)).sum(1)
    result = advantages.grpo(scores, mask, groups)
    return result.advantages * (peers / (peers - 1).clamp(min=1)).sqrt().where(peers > 1, 1.0)[:, None]


def without_factor(scores, mask, groups):
    return advantages.grpo(scores, mask, groups, scale="none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "mistake", "slow"),
    [
        (advantages.grpo, biased_deviation, grpo_by_loop),
        (advantages.rloo, without_factor, rloo_by_loop),
        (advantages.opo, without_factor, opo_by_loop),
    ],
)
def test_factors_and_lengths_are_held_against_a_reference(estimator, mistake, slow, few):
    laws.check_advantages(estimator, reference=slow, group_rows=2)
    laws.check_advantages(estimator, reference=slow, group_rows=2, dtype=torch.float32)
    with pytest.raises(laws.LawViolation, match=r"expected .*, as of slow") as caught:
        laws.check_advantages(mistake, reference=slow, group_rows=2)
    assert caught.value.law == "reference"


@pytest.mark.parametrize("mistake", [biased_deviation, without_factor])
def test_without_a_reference_factors_and_lengths_go_unseen(mistake, few):
    laws.check_advantages(mistake)


@pytest.mark.slow
def test_an_estimator_in_single_precision_is_checked_in_that():
    with pytest.raises(laws.LawViolation, match=r"precision; if that is meant, give dtype=torch\.float32"):
        laws.check_advantages(single_precision)
    laws.check_advantages(single_precision, dtype=torch.float32)


def arithmetic_carry(rewards, values, mask, *, gamma, lam):
    """verl's carry, V m + (1 - m) next: a NaN at a masked token reaches every token before it."""
    m, following, carry = mask.double(), torch.zeros(len(mask)).double(), torch.zeros(len(mask)).double()
    columns = []
    for t in reversed(range(mask.shape[1])):
        delta = rewards.detach()[:, t] + gamma * following - values.detach()[:, t]
        carry = m[:, t] * (delta + gamma * lam * carry) + (1 - m[:, t]) * carry
        following = m[:, t] * values.detach()[:, t] + (1 - m[:, t]) * following
        columns.append(carry.where(mask[:, t], 0.0))
    result = torch.stack(columns[::-1], 1)
    return Advantages(result, (result + values.detach()).where(mask, 0.0))


def reset_at_holes(rewards, values, mask, *, gamma, lam):
    following, carry = torch.zeros(len(mask)).double(), torch.zeros(len(mask)).double()
    columns = []
    rewards, values = (x.detach().where(mask, 0.0) for x in (rewards, values))
    for t in reversed(range(mask.shape[1])):
        carry = (rewards[:, t] + gamma * following - values[:, t] + gamma * lam * carry).where(mask[:, t], 0.0)
        following = values[:, t]
        columns.append(carry)
    result = torch.stack(columns[::-1], 1)
    return Advantages(result, (result + values).where(mask, 0.0))


def discounts_holes(rewards, values, mask, *, gamma, lam):
    """Right without discount; with one, a masked step costs a factor."""
    plain = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
    holes = (mask.cumsum(1) < mask.sum(1, keepdim=True)) & ~mask
    scale = gamma ** holes.flip(1).cumsum(1).flip(1)
    return Advantages(plain.advantages * scale, plain.returns)


def whitened(rewards, values, mask, *, gamma, lam):
    result = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
    return Advantages(advantages.whiten(result.advantages, mask), result.returns)


def raw_returns(rewards, values, mask, *, gamma, lam):
    result = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
    return Advantages(result.advantages, advantages.discounted_returns(rewards, mask, gamma=gamma))


def swapped(rewards, values, mask, *, gamma, lam):
    return advantages.gae(rewards, values, mask, gamma=lam, lam=gamma)


@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        (arithmetic_carry, "masked garbage"),
        (reset_at_holes, "return minus value"),
        (whitened, "return minus value"),
        (discounts_holes, "masked steps"),
        (raw_returns, "definition"),
        (swapped, "definition"),
    ],
)
def test_each_mistake_of_gae_breaks_its_law(mistake, law, few):
    with pytest.raises(laws.LawViolation, match=mistake.__name__) as caught:
        laws.check_gae(mistake)
    assert caught.value.law == law


def verl_whiten(x, mask):
    x = x.detach().where(mask, 0.0)
    count = mask.sum().clamp(min=1)
    mean = x.sum() / count
    variance = (x - mean).where(mask, 0.0).square().sum() / (count - 1).clamp(min=1)
    return ((x - mean) * (variance + 1e-8).rsqrt()).where(mask, 0.0)


def biased_whiten(x, mask):
    result = advantages.whiten(x, mask)
    return result * 1.01


def noisy_whiten(x, mask):
    x, count = x.detach().where(mask, 0.0), mask.sum().clamp(min=2)
    deviation = (x - x.sum() / mask.sum().clamp(min=1)).where(mask, 0.0)
    std = (deviation.square().sum() / (count - 1)).sqrt()
    return deviation / std.where(std > 0, 1.0)


def signed_whiten(x, mask):
    return advantages.whiten(x, mask) * x.detach().where(mask, 0.0).sum().sign()


@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        (signed_whiten, "shift and scale"),
        (verl_whiten, "mean and variance"),
        (biased_whiten, "mean and variance"),
        (noisy_whiten, "equal numbers"),
    ],
)
def test_each_mistake_of_whitening_breaks_its_law(mistake, law):
    with pytest.raises(laws.LawViolation, match=mistake.__name__) as caught:
        laws.check_whiten(mistake)
    assert caught.value.law == law


def kept_mean(x, mask, eps=0.0):
    """verl's masked_whiten(shift_mean=False), with its 1e-8 or without."""
    x = x.detach().where(mask, 0.0)
    mean = x.sum() / mask.sum().clamp(min=1)
    whitened = advantages.whiten(x, mask) if not eps else verl_whiten(x, mask)
    return (whitened + mean).where(mask, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whiten", "keywords"),
    [
        (verl_whiten, {"eps": 1e-8}),
        (kept_mean, {"shift_mean": False}),
        (lambda x, mask: kept_mean(x, mask, 1e-8), {"shift_mean": False, "eps": 1e-8}),
    ],
)
def test_whitening_of_other_kinds_is_checked_for_what_it_is(whiten, keywords):
    laws.check_whiten(whiten, **keywords)
    with pytest.raises(laws.LawViolation, match=r"give shift_mean=False if the mean is kept, eps=\.\.\. for what"):
        laws.check_whiten(whiten)
    with pytest.raises(laws.LawViolation):
        laws.check_whiten(lambda x, mask: 1.01 * whiten(x, mask), **keywords)
    with pytest.raises(laws.LawViolation):
        laws.check_whiten(lambda x, mask: (whiten(x, mask) + 0.1).where(mask, 0.0), **keywords)
