"""Estimators along the tokens of a row: returns, GAE, and estimators with a weight per step, turn or row.

Tokens outside the mask are skipped: the step after a token is the row's next token in the mask, and after the last one
the value is 0. No gradient passes through the estimators. Tensors of other shapes or dtypes than annotated, and a
gamma or lam outside [0, 1], raise ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from fppo.advantages._common import Advantages, check_rows, check_unit, on_mask, rounding
from fppo.advantages.whitening import whiten
from fppo.batch import last_tokens, next_in_mask, turn_bounds
from fppo.losses._common import check_mask, check_tokens, positive
from fppo.shapes import Mask, Rows, Scalar, Tokens
from fppo_kernels.gae.scan import reverse_scan, scan


def _accumulate(x: Tokens, mask: Mask, decay: float) -> Tokens:
    """y_t = x_t + decay * y_s, float64 [B, T]; s: the next position after t in the mask. `x` is 0 outside the mask."""
    return reverse_scan(x, torch.full_like(x, decay).where(mask, 1.0))


def token_rewards(
    scores: Rows, mask: Mask, *, turns: Tokens | None = None, kl: Tokens | None = None, kl_coef: Scalar = 0.0
) -> Tokens:
    """The score [B] at the last token of each row, minus kl_coef * kl [B, T] at every token; [B, T].

    `turns` [B, T] are rewards within rows, such as an environment's for turns, or those of steps: they stay at their
    tokens, and the last token gets the rest, the score minus their sum over the mask; nothing if that is a rounding
    error. A nan among them counts as 0. The result is 0 outside the mask, and for a row without tokens. All arguments
    are constants to the gradient.
    """
    check_rows(mask, scores=scores)
    rest = scores.detach()
    if turns is None:
        rewards = rest[:, None].where(last_tokens(mask), 0.0)
    else:
        check_tokens(mask, turns=turns)
        within = turns.detach().nan_to_num(nan=0.0).where(mask, 0.0).double()
        least = rounding(within.abs().sum(1).maximum(rest.abs().double()), rest.dtype)
        rest = rest.double() - within.sum(1)
        rest = rest.masked_fill(rest.abs() <= least, 0.0)
        rewards = (within + rest[:, None].where(last_tokens(mask), 0.0)).to(scores.dtype)
    if kl is None or (not isinstance(kl_coef, Tensor) and kl_coef == 0):
        return rewards
    check_tokens(mask, kl=kl)
    return rewards - (kl_coef * kl.detach()).where(mask, 0.0).to(rewards.dtype)


def discounted_returns(rewards: Tokens, mask: Mask, *, gamma: float = 1.0) -> Tokens:
    """The reward-to-go G_t = r_t + gamma * G_s, s the row's next token in the mask; [B, T], 0 outside the mask."""
    check_tokens(mask, rewards=rewards)
    check_unit("gamma", gamma)
    return _accumulate(on_mask(rewards, mask), mask, gamma).where(mask, 0.0).to(rewards.dtype)


def gae(
    rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    gamma: Scalar = 1.0,
    lam: Scalar | Rows = 1.0,
    critic_lam: Scalar | None = None,
    lam_alpha: float | None = None,
    kernel: Callable[..., tuple[Tensor, Tensor]] = scan,
) -> Advantages:
    """Generalised advantage estimates, A_t = delta_t + gamma lam A_s with delta_t = r_t + gamma V_s - V_t.

    s is the row's next token in the mask (after the last one V = A = 0), so tool tokens inside a response are
    skipped without discount. returns = A + V. Not whitened. lam = 1: return minus value; lam = 0: the TD error.
    Schulman et al., arXiv:1506.02438. All [B, T]; the result is 0 outside the mask. `kernel` computes it, such as
    `Kernels.gae`; to vmap over `gamma` or `lam` pass `fppo_kernels.gae.loop.loop`.

    `lam` [B] gives each row its own decay, which takes no kernel. `lam_alpha` sets it to VAPO's `length_lam` with that
    alpha. `critic_lam` is a second decay for the returns, the critic's targets: VC-PPO's decoupled GAE
    (arXiv:2503.01491) with 1, and 0.95 for the advantages.
    """
    if lam_alpha is not None:
        if isinstance(lam, Tensor) or lam != 1.0:
            raise ValueError(f"lam={lam} and lam_alpha={lam_alpha}: lam_alpha replaces lam; give one of them")
        lam = length_lam(mask, alpha=lam_alpha)
    check_tokens(mask, rewards=rewards, values=values)
    check_unit("gamma", gamma)
    check_unit("lam", lam)
    if isinstance(lam, Tensor) and lam.dim() == 1:
        check_rows(mask, lam=lam)
        goals = lambda_returns(rewards, values, mask, gamma=gamma, lam=lam)
        result = Advantages((goals - on_mask(values, mask)).to(rewards.dtype), goals.to(rewards.dtype))
    else:
        result = Advantages(*kernel(rewards, values, mask, gamma=gamma, lam=lam))
    if critic_lam is None:
        return result
    check_unit("critic_lam", critic_lam)
    return result._replace(returns=kernel(rewards, values, mask, gamma=gamma, lam=critic_lam)[1])


def reinforce_plus_plus(rewards: Tokens, mask: Mask, *, gamma: float = 1.0) -> Advantages:
    """Whitened reward-to-go, without a critic: advantages = whiten(G), returns = G, the result of `discounted_returns`.

    `rewards` are token rewards [B, T], with the KL penalty in them. arXiv:2501.03262.
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return Advantages(whiten(returns, mask), returns)


def remax(rewards: Tokens, baselines: Rows, mask: Mask) -> Advantages:
    """Reward-to-go minus the score of the greedy response to the same prompt; arXiv:2310.10505.

    `rewards` are token rewards [B, T] (`token_rewards`), `baselines` [B].
    """
    check_rows(mask, baselines=baselines)
    check_tokens(mask, rewards=rewards)
    returns = _accumulate(on_mask(rewards, mask), mask, 1.0)
    advantages = (returns - baselines.detach().double()[:, None]).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), returns.where(mask, 0.0).to(rewards.dtype))


def length_lam(mask: Mask, *, alpha: float = 0.05) -> Rows:
    """The decay of each row by its length l, the tokens of its mask: max(0, 1 - 1 / (alpha l)), float64 [B].

    The weights of GAE's terms then add up to alpha l, in proportion to the length. VAPO, arXiv:2504.05118, with alpha
    0.05. A row of 1 / alpha tokens or fewer has 0. Later tokens decide the length that weighs the earlier ones: even
    with exact values that turns the gradient, by 2 % in responses of 1 to 3 tokens (`fppo bias`). Raises ValueError for
    an alpha <= 0.
    """
    check_mask(mask)
    positive("alpha", alpha)
    return (1 - 1 / (alpha * mask.sum(1).clamp(min=1).double())).clamp(min=0.0)


def turn_gae(
    rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    turn_ids: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """GAE whose actions are turns: A_k = R_k + gamma V_{k+1} - V_k + gamma lam A_{k+1}, at every token of turn k.

    A turn is the tokens of the mask with one number in `turn_ids`, integers [B, T] that do not fall along a row;
    without them a run of tokens in the mask, such as those between two answers of a tool. R_k is the sum of its rewards
    and V_k the value before its first token. `gamma` and `lam` act between turns, not within. The critic's target at a
    token is the sum of the turn's rewards from it on + gamma ((1 - lam) V_{k+1} + lam (A_{k+1} + V_{k+1})); at the
    first token that is A_k + V_k. All [B, T]; 0 outside the mask. Turn-PPO, arXiv:2512.17008.
    """
    check_tokens(mask, rewards=rewards, values=values)
    check_unit("gamma", gamma)
    check_unit("lam", lam)
    ends, starts = turn_bounds(mask, turn_ids)
    of_turn = torch.ones_like(mask, dtype=torch.float64)
    reward, value = on_mask(rewards, mask), on_mask(values, mask)
    # within a turn lam is 1: the values are not read
    goals = _goals(reward, value, mask, gamma=of_turn.where(~ends, gamma), lam=of_turn.where(~ends, lam))
    place = torch.arange(mask.shape[1], device=mask.device).expand_as(mask).where(starts, 0)
    first = place.cummax(1).values if mask.numel() else place
    advantages = (goals - value).gather(1, first).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), goals.where(mask, 0.0).to(rewards.dtype))


def turn_returns(rewards: Tokens, mask: Mask, *, turn_ids: Tensor | None = None, gamma: float = 1.0) -> Tokens:
    """The reward-to-go of each token, discounted by `gamma` between turns and not within; [B, T], 0 outside the mask.
    Turns are those of `turn_gae`."""
    return turn_gae(rewards, torch.zeros_like(rewards), mask, turn_ids=turn_ids, gamma=gamma).returns


def td(rewards: Tokens, values: Tokens, mask: Mask, *, steps: int, gamma: float = 1.0) -> Advantages:
    """The TD error over n = `steps` tokens: A_t = sum_{l < n} gamma^l r_{t+l} + gamma^n V_{t+n} - V_t.

    Steps are tokens of the mask; beyond the last one rewards and values are 0, so n = 1 is the TD error, and n of the
    row's length the return minus the value. returns = A + V. All [B, T]; 0 outside the mask. Sutton and Barto,
    Reinforcement Learning (2018), 7.1. Raises ValueError for steps below 1.
    """
    check_tokens(mask, rewards=rewards, values=values)
    check_unit("gamma", gamma)
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    order = torch.argsort((~mask).long(), dim=1, stable=True)  # the tokens of the mask first
    reward, value = (on_mask(x, mask).gather(1, order) for x in (rewards, values))
    to_go = reverse_scan(reward, gamma)
    shift = min(steps, mask.shape[1])
    later = pad(value - to_go, (0, shift))[:, shift:]
    goals = torch.zeros_like(to_go).scatter(1, order, to_go + gamma**steps * later)
    advantages = (goals - on_mask(values, mask)).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), goals.where(mask, 0.0).to(rewards.dtype))


def vtrace(
    rewards: Tokens,
    values: Tokens,
    correction_weights: Tokens,
    mask: Mask,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    cut: float = 1.0,
) -> Advantages:
    """V-trace: the critic's targets and the advantages for tokens sampled off policy.

    returns v_t = V_t + w_t (r_t + gamma V_s - V_t) + gamma c_t (v_s - V_s), with c_t = lam min(cut, w_t), and
    advantages r_t + gamma v_s - V_t, s the row's next token in the mask. The weights w = `correction_weights` [B, T],
    at least 0, are current over sampling probabilities, truncated as the paper's rho (`losses.rollout_correction` at
    the level "token"). They are not in the advantages: the policy loss multiplies each token by its weight.
    With weights of 1 the returns are those of `gae`. All [B, T]; 0 outside the mask. Espeholt et al.,
    arXiv:1802.01561, 4.1 and 4.2; lam as in its remark 2.
    """
    check_tokens(mask, rewards=rewards, values=values, correction_weights=correction_weights)
    check_unit("gamma", gamma)
    check_unit("lam", lam)
    positive("cut", cut)
    reward, value, weight = (on_mask(x, mask) for x in (rewards, values, correction_weights))
    delta = weight * (reward + gamma * next_in_mask(value, mask) - value)
    trace = (gamma * lam * weight.clamp(max=cut)).where(mask, 1.0)
    goals = value + reverse_scan(delta, trace)
    advantages = (reward + gamma * next_in_mask(goals, mask) - value).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), goals.where(mask, 0.0).to(rewards.dtype))


def lambda_returns(rewards: Tokens, values: Tokens, mask: Mask, *, gamma: float | Tensor, lam: Tensor) -> Tokens:
    """GAE's returns [B, T] in float64 with a decay for each row, `lam` [B] in [0, 1]; 0 outside the mask."""
    return _goals(on_mask(rewards, mask), on_mask(values, mask), mask, gamma=gamma, lam=lam[:, None].double())


def _goals(reward: Tensor, value: Tensor, mask: Tensor, *, gamma: float | Tensor, lam: Tensor) -> Tensor:
    """G_t = r_t + gamma ((1 - lam) V_s + lam G_s), [B, T]; s: the next position after t that the mask holds; after the
    last one V = G = 0. `reward` (r) and `value` (V) are 0 outside the mask, `gamma` and `lam` broadcast to [B, T]."""
    x = (reward + gamma * (1 - lam) * next_in_mask(value, mask)).where(mask, 0.0)
    return reverse_scan(x, (gamma * lam).expand_as(x).where(mask, 1.0)).where(mask, 0.0)
