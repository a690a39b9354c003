"""Estimators along the tokens of a row. Tokens outside the mask are bridged as if they were not there.

Tensors of other shapes or dtypes than annotated, and a gamma or lam outside [0, 1], are a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, check_rows
from fppo.advantages.whitening import whiten
from fppo.losses._common import check_tokens
from fppo.shapes import Mask, Rows, Scalar, Tokens
from fppo_kernels.gae.scan import reverse_scan, scan


def _check_unit(name: str, value: Scalar) -> None:
    if not isinstance(value, Tensor) and not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")


def _clean(x: Tokens, mask: Mask) -> Tokens:
    return x.detach().double().where(mask, 0.0)


def _accumulate(x: Tokens, mask: Mask, decay: float) -> Tokens:
    """y_t = x_t + decay * y_s, s the next token of the mask after t; x is 0 outside the mask. float64 [B, T]."""
    return reverse_scan(x, torch.full_like(x, decay).where(mask, 1.0))


def token_rewards(scores: Rows, mask: Mask, *, kl: Tokens | None = None, kl_coef: Scalar = 0.0) -> Tokens:
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


def discounted_returns(rewards: Tokens, mask: Mask, *, gamma: float = 1.0) -> Tokens:
    """The reward-to-go G_t = r_t + gamma * G_s, s the row's next token in the mask; [B, T], 0 outside the mask."""
    check_tokens(mask, rewards=rewards)
    _check_unit("gamma", gamma)
    return _accumulate(_clean(rewards, mask), mask, gamma).where(mask, 0.0).to(rewards.dtype)


def gae(
    rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    gamma: Scalar = 1.0,
    lam: Scalar = 1.0,
    kernel: Callable[..., tuple[Tensor, Tensor]] = scan,
) -> Advantages:
    """Generalised advantage estimates, A_t = delta_t + gamma lam A_s with delta_t = r_t + gamma V_s - V_t.

    s is the row's next token in the mask (after the last one V = A = 0), so tool tokens inside a response are
    bridged without discount. returns = A + V. Not whitened. lam = 1: return minus value; lam = 0: the TD error.
    Schulman et al., arXiv:1506.02438. All [B, T]; the result is 0 outside the mask. `kernel` computes it, such as
    `Kernels.gae`; to vmap over `gamma` or `lam` pass `fppo_kernels.gae.loop.loop`.
    """
    check_tokens(mask, rewards=rewards, values=values)
    _check_unit("gamma", gamma)
    _check_unit("lam", lam)
    return Advantages(*kernel(rewards, values, mask, gamma=gamma, lam=lam))


def reinforce_plus_plus(rewards: Tokens, mask: Mask, *, gamma: float = 1.0) -> Advantages:
    """Whitened reward-to-go, without a critic: advantages = whiten(G), returns = G of `discounted_returns`.

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
    returns = _accumulate(_clean(rewards, mask), mask, 1.0)
    advantages = (returns - baselines.detach().double()[:, None]).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), returns.where(mask, 0.0).to(rewards.dtype))
