"""Estimators along the tokens of a row. Tokens outside the mask are bridged as if they were not there."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, check_rows, check_tokens
from fppo.advantages.whitening import whiten

Scalar = float | Tensor  # a number, or a 0-d tensor so that an estimator can be vmapped over it


def _check_unit(name: str, value: Scalar) -> None:
    if not isinstance(value, Tensor) and not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def _clean(x: Tensor, mask: Tensor) -> Tensor:
    return x.detach().double().where(mask, 0.0)


def _accumulate(x: Tensor, mask: Tensor, decay: Scalar) -> Tensor:
    """y_t = x_t + decay * y_s, s the next token of the mask after t; x is 0 outside the mask. float64 [B, T]."""
    if not isinstance(decay, Tensor) and decay == 1:
        return x.flip(1).cumsum(1).flip(1)
    factor = decay.to(x) if isinstance(decay, Tensor) else torch.full((), decay, dtype=x.dtype, device=x.device)
    factors = torch.where(mask, factor, 1.0).T.contiguous().unbind()
    carry, columns = x.new_zeros(len(x)), []
    for value, scale in zip(reversed(x.T.contiguous().unbind()), reversed(factors), strict=True):
        carry = torch.addcmul(value, scale, carry)
        columns.append(carry)
    return torch.stack(columns[::-1], 1) if columns else x


def _next(x: Tensor, mask: Tensor) -> Tensor:
    """`x` at the next token of the mask after each position, 0 where there is none; x is 0 outside the mask."""
    length = x.shape[1]
    places = torch.arange(length, device=x.device).where(mask, length)
    following = places.flip(1).cummin(1).values.flip(1)[:, 1:] if length else places
    end = x.new_zeros(len(x), 1)
    following = torch.cat([following, torch.full_like(places[:, :1], length)], 1)
    return torch.cat([x, end], 1).gather(1, following)


def token_rewards(scores: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: Scalar = 0.0) -> Tensor:
    """The score [B] at the last token of each row, minus kl_coef * kl [B, T] at every token; [B, T].

    0 outside the mask; a row without tokens gets nothing. All arguments are constants to the gradient.
    """
    check_rows(mask, scores=scores)
    after = mask.flip(1).cumsum(1).flip(1)
    rewards = scores.detach()[:, None].where(mask & (after == 1), 0.0)
    if kl is None or (not isinstance(kl_coef, Tensor) and kl_coef == 0):
        return rewards
    check_tokens(mask, kl=kl)
    return rewards - (kl_coef * kl.detach()).where(mask, 0.0).to(rewards.dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: Scalar = 1.0) -> Tensor:
    """The reward-to-go G_t = r_t + gamma * G_s, s the row's next token in the mask; [B, T], 0 outside the mask."""
    check_tokens(mask, rewards=rewards)
    _check_unit("gamma", gamma)
    return _accumulate(_clean(rewards, mask), mask, gamma).where(mask, 0.0).to(rewards.dtype)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: Scalar = 1.0, lam: Scalar = 1.0) -> Advantages:
    """Generalised advantage estimates, A_t = delta_t + gamma lam A_s with delta_t = r_t + gamma V_s - V_t.

    s is the row's next token in the mask (after the last one V = A = 0), so tool tokens inside a response are
    bridged without discount. returns = A + V. Not whitened. lam = 1: return minus value; lam = 0: the TD error.
    Schulman et al., arXiv:1506.02438. All [B, T]; the result is 0 outside the mask.
    """
    check_tokens(mask, rewards=rewards, values=values)
    _check_unit("gamma", gamma)
    _check_unit("lam", lam)
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    rewards, values = _clean(rewards, mask), _clean(values, mask)
    delta = (rewards + gamma * _next(values, mask) - values).where(mask, 0.0)
    advantages = _accumulate(delta, mask, gamma * lam).where(mask, 0.0)
    return Advantages(advantages.to(dtype), (advantages + values).to(dtype))


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: Scalar = 1.0) -> Advantages:
    """Whitened reward-to-go, without a critic: advantages = whiten(G), returns = G of `discounted_returns`.

    `rewards` are token rewards [B, T], with the KL penalty in them. arXiv:2501.03262.
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return Advantages(whiten(returns, mask), returns)


def remax(rewards: Tensor, baselines: Tensor, mask: Tensor) -> Advantages:
    """Reward-to-go minus the score of the greedy response to the same prompt; arXiv:2310.10505.

    `rewards` are token rewards [B, T] (`token_rewards`), `baselines` [B].
    """
    check_rows(mask, baselines=baselines)
    check_tokens(mask, rewards=rewards)
    returns = _accumulate(_clean(rewards, mask), mask, 1.0)
    advantages = (returns - baselines.detach().double()[:, None]).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), returns.where(mask, 0.0).to(rewards.dtype))
