from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages
from fppo.advantages import discounted_returns, gae, reinforce_plus_plus, remax, token_rewards, whiten
from fppo.laws.references import advantages as references
from fppo_kernels.gae.loop import loop
from tests.advantages._data import cases, close, spoil

units = st.sampled_from([0.0, 0.3, 0.95, 1.0])


def steps(row):
    return [t for t in range(len(row)) if row[t]]


@given(cases(), units, units)
def test_gae_is_its_definition(case, gamma, lam):
    rewards, values, _ = case.tokens
    result = gae(rewards, values, case.mask, gamma=gamma, lam=lam)
    expected = references.gae(rewards, values, case.mask, gamma=gamma, lam=lam)
    close(result.advantages, expected.advantages)
    close(result.returns, expected.returns)


@given(cases(), units, units, units)
def test_the_critics_returns_have_a_decay_of_their_own(case, gamma, lam, critic_lam):
    """VAPO's decoupled GAE: the advantages by one lambda, what the critic learns by another."""
    rewards, values, _ = case.tokens
    result = gae(rewards, values, case.mask, gamma=gamma, lam=lam, critic_lam=critic_lam)
    close(result.advantages, references.gae(rewards, values, case.mask, gamma=gamma, lam=lam).advantages)
    close(result.returns, references.gae(rewards, values, case.mask, gamma=gamma, lam=critic_lam).returns)


@given(cases(), units)
def test_gae_with_lam_one_is_return_minus_value_and_with_zero_the_td_error(case, gamma):
    rewards, values, _ = case.tokens
    mask = case.mask
    one = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    close(one.advantages, (references.discounted_returns(rewards, mask, gamma=gamma) - values).where(mask, 0.0))
    close(one.returns, references.discounted_returns(rewards, mask, gamma=gamma))
    zero = gae(rewards, values, mask, gamma=gamma, lam=0.0).advantages
    for b, row in enumerate(mask):
        at = steps(row)
        for t, following in zip(at, [*at[1:], None]):
            bootstrap = 0.0 if following is None else gamma * values[b, following]
            close(zero[b, t], rewards[b, t] + bootstrap - values[b, t])


def along_tokens(name, case):
    """An estimator that works row by row on tokens, and its token arguments."""
    rewards, values, _ = case.tokens
    return {
        "gae": (partial(gae, gamma=0.9, lam=0.8), (rewards, values)),
        "plain gae": (gae, (rewards, values)),
        "returns": (lambda r, m: (discounted_returns(r, m, gamma=0.9),), (rewards,)),
        "plain returns": (lambda r, m: (discounted_returns(r, m),), (rewards,)),
        "remax": (lambda r, m: remax(r, torch.full_like(r[:, :1].sum(1), 0.3), m), (rewards,)),
    }[name]


NAMES = ["gae", "plain gae", "returns", "plain returns", "remax"]


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
def test_commutes_with_deleting_masked_steps(name, case):
    fn, tensors = along_tokens(name, case)
    for result, pieces in zip(
        fn(*tensors, case.mask),
        zip(*(fn(*(x[b, m][None] for x in tensors), m[m][None]) for b, m in enumerate(case.mask))),
    ):
        for b, row in enumerate(case.mask):
            close(result[b, row], pieces[b][0])
            assert not result[b, ~row].any()


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(), width=st.integers(0, 3))
def test_padding_width_and_row_order_change_nothing(name, case, width):
    fn, tensors = along_tokens(name, case)
    plain = fn(*tensors, case.mask)
    pad = partial(torch.nn.functional.pad, pad=(width, width))
    for a, b in zip(plain, fn(*map(pad, tensors), pad(case.mask))):
        assert torch.equal(pad(a), b)
    order = torch.randperm(len(case.mask), generator=case.generator)
    for a, b in zip(plain, fn(*(x[order] for x in tensors), case.mask[order])):
        assert torch.equal(a[order], b)


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
def test_garbage_outside_the_mask_never_leaks(name, case):
    fn, tensors = along_tokens(name, case)
    spoiled = (spoil(x, ~case.mask, case.generator) for x in tensors)
    for a, b in zip(fn(*tensors, case.mask), fn(*spoiled, case.mask)):
        assert torch.equal(a, b)


@given(cases())
def test_score_lands_on_the_last_token_and_kl_on_every_one(case):
    kl = case.tokens[0]
    plain = token_rewards(case.scores, case.mask)
    full = token_rewards(case.scores, case.mask, kl=spoil(kl, ~case.mask, case.generator), kl_coef=0.3)
    assert torch.equal(plain, references.token_rewards(case.scores, case.mask))
    close(full, references.token_rewards(case.scores, case.mask, kl=kl, kl_coef=0.3))
    assert torch.equal(
        full, token_rewards(case.scores, case.mask, kl=kl, kl_coef=torch.tensor(0.3, dtype=torch.float64))
    )


def test_score_of_a_row_without_tokens_goes_nowhere():
    mask = torch.tensor([[False, False], [True, False]])
    assert token_rewards(torch.tensor([float("nan"), 2.0]), mask).tolist() == [[0.0, 0.0], [2.0, 0.0]]


@given(cases(), units)
def test_reinforce_plus_plus_is_whitened_reward_to_go_across_tool_gaps(case, gamma):
    rewards = case.tokens[0]
    result = reinforce_plus_plus(spoil(rewards, ~case.mask, case.generator), case.mask, gamma=gamma)
    expected = references.discounted_returns(rewards, case.mask, gamma=gamma)
    close(result.returns, expected)
    close(result.advantages, whiten(expected, case.mask), 1e-7)


def test_reinforce_plus_plus_carries_a_reward_over_a_gap():
    mask = torch.tensor([[True, False, False, True, False]])
    rewards = torch.tensor([[0.0, 9.0, 9.0, 2.0, 9.0]])
    assert reinforce_plus_plus(rewards, mask, gamma=0.5).returns.tolist() == [[1.0, 0.0, 0.0, 2.0, 0.0]]


@given(cases())
def test_remax_is_reward_to_go_minus_the_greedy_score(case):
    rewards, mask = case.tokens[0], case.mask
    baselines = spoil(case.scores, ~mask.any(1), case.generator)
    result = remax(rewards, baselines, mask)
    expected = references.discounted_returns(rewards, mask, gamma=1.0)
    close(result.returns, expected)
    close(result.advantages, references.remax(rewards, case.scores, mask).advantages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_no_gradient_passes(dtype):
    rewards, values = (torch.randn(2, 3, dtype=dtype, requires_grad=True) for _ in range(2))
    mask, scores = torch.ones(2, 3, dtype=torch.bool), torch.randn(2, dtype=dtype, requires_grad=True)
    results = [*gae(rewards, values, mask, lam=0.9), *remax(rewards, scores, mask), *reinforce_plus_plus(rewards, mask)]
    results += [token_rewards(scores, mask, kl=values, kl_coef=0.1), discounted_returns(rewards, mask, gamma=0.9)]
    assert all(x.dtype == dtype and not x.requires_grad for x in results)


def test_gae_can_be_mapped_over_lam():
    rewards, values = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0)).unbind()
    mask, lams = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool(), torch.tensor([0.0, 0.5, 1.0])
    swept = torch.func.vmap(lambda lam: gae(rewards, values, mask, lam=lam, kernel=loop))(lams)
    for i, lam in enumerate(lams):
        close(swept.advantages[i], gae(rewards, values, mask, lam=lam.item()).advantages, 1e-6)


def test_no_columns_and_no_rows():
    for shape in [(0, 3), (3, 0)]:
        empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        assert gae(empty, empty, mask, gamma=0.9).advantages.shape == shape
        assert token_rewards(torch.zeros(shape[0]), mask).shape == shape
        assert whiten(empty, mask).shape == shape


@pytest.mark.usefixtures("unhooked")
def test_bad_arguments_are_named():
    mask, x = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mask must be bool.*mask\.bool\(\)"):
        gae(x, x, mask.float())
    with pytest.raises(ValueError, match=r"values must be floating \[B, T\] = \[2, 3\].*\[2, 4\]"):
        gae(x, torch.zeros(2, 4), mask)
    with pytest.raises(ValueError, match=r"gamma must be between 0 and 1, got 1\.5"):
        gae(x, x, mask, gamma=1.5)
    with pytest.raises(ValueError, match=r"scores must be floating \[B\] = \[2\]"):
        token_rewards(torch.zeros(3), mask)
    with pytest.raises(ValueError, match="baselines must be floating"):
        remax(x, torch.zeros(2, dtype=torch.int64), mask)


def test_every_estimator_is_exported():
    assert all(hasattr(advantages, name) for name in advantages.__all__)
