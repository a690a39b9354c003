"""Estimators along the tokens of a row. Tokens outside the mask are skipped, as if the row were cut without them.

Tensors of other shapes or dtypes than annotated, and a gamma or lam outside [0, 1], raise ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, check_rows, check_unit, on_mask
from fppo.advantages.traces import lambda_returns, length_lam
from fppo.advantages.whitening import whiten
from fppo.losses._common import check_tokens
from fppo.shapes import Mask, Rows, Scalar, Tokens
from fppo_kernels.gae.scan import reverse_scan, scan


def _accumulate(x: Tokens, mask: Mask, decay: float) -> Tokens:
    """y_t = x_t + decay * y_s, s the next token of the mask after t; x is 0 outside the mask. float64 [B, T]."""
    return reverse_scan(x, torch.full_like(x, decay).where(mask, 1.0))


def token_rewards(scores: Rows, mask: Mask, *, kl: Tokens | None = None, kl_coef: Scalar = 0.0) -> Tokens:
    """The score [B] at the last token of each row, minus kl_coef * kl [B, T] at every token; [B, T].

    0 outside the mask, and for a row without tokens. All arguments are constants to the gradient.
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

    `lam` [B] gives each row its decay, and no kernel is called. `lam_alpha` sets it to VAPO's `length_lam` with that
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
    returns = _accumulate(on_mask(rewards, mask), mask, 1.0)
    advantages = (returns - baselines.detach().double()[:, None]).where(mask, 0.0)
    return Advantages(advantages.to(rewards.dtype), returns.where(mask, 0.0).to(rewards.dtype))
