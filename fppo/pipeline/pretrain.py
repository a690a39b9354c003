"""Value pretraining: at the start of a run the critic is fitted to a fixed policy, until that helps no more."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from fppo import advantages, metrics
from fppo.batch import Experience
from fppo.episodes import joined, layout_of
from fppo.metrics import Mean, Metrics
from fppo.tree import replace, state


def _none() -> Tensor:
    return torch.tensor(-torch.inf, dtype=torch.float64)


@state
class Pretraining:
    """The progress of value pretraining, as leaves, so that a resumed run continues it."""

    best: Tensor = attrs.field(factory=_none)  # 0-d float64, the best explained variance so far
    waited: int = 0  # steps since that rose
    steps: int = 0
    over: int = 0  # 1 once the policy is updated


def plain_returns(experience: Experience, *, gamma: float = 1.0, turns: bool = False) -> Tensor:
    """Returns [B, T] without a critic's estimates, for `Pretrain.returns_of`: discounted by token, or by turn. They run
    on through all rows of an episode."""
    whole = joined(experience)
    rewards, mask = whole.token_rewards, whole.response_mask
    if turns:
        returns = advantages.turn_returns(rewards, mask, turn_ids=whole.turn_ids, gamma=gamma)
    else:
        returns = advantages.discounted_returns(rewards, mask, gamma=gamma)
    return returns if experience.episodes is None else layout_of(experience).of_rows(returns)


@attrs.frozen(kw_only=True)
class Pretrain:
    """The end of value pretraining: after `limit` steps, or once the explained variance has not risen by `rise` for
    `patience` steps.

    `returns_of(experience)` [B, T] is what the critic learns until then: returns without its own estimates.
    """

    limit: int
    patience: int = 3
    rise: float = 0.01
    returns_of: Callable[[Experience], Tensor] = plain_returns


def pretrain(
    progress: Pretraining, experience: Experience, *, rule: Pretrain
) -> tuple[Pretraining, Experience, Metrics]:
    """Advance value pretraining by a step: decide whether the policy is updated from this step on, and give the batch
    the returns to learn.

    The rows are responses that the critic has not learned from yet, so the variance of their returns that its values
    explain (1 - var(returns - values) / var(returns)) is a held-out one. VC-PPO's value pretraining, arXiv:2503.01491.
    """
    if progress.over:
        return progress, experience, {}
    assert experience.values is not None
    mask = experience.response_mask
    returns = rule.returns_of(experience)
    explained = explained_variance(experience.values, returns, mask)
    share = explained.total / explained.count
    rises = bool(share > progress.best + rule.rise)
    waited = 0 if rises else progress.waited + 1
    over = int(waited >= rule.patience or progress.steps >= rule.limit)
    after = Pretraining(
        best=share.to(progress.best.device) if rises else progress.best,
        waited=waited,
        steps=progress.steps + 1 - over,
        over=over,
    )
    report: Metrics = {"critic/pretrain/explained_var": explained, "critic/pretrain/over": metrics.mean(float(over))}
    return after, experience if over else replace(experience, returns=returns), report


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Mean:
    """1 - var(returns - values) / var(returns) over the mask: 1 for a perfect critic, 0 for a constant one."""

    def variance(x: Tensor) -> Tensor:
        m = metrics.masked_mean(x, mask)
        return metrics.masked_mean((x.double() - m.total / m.count).square(), mask).total

    return metrics.mean(1.0 - variance(returns - values) / (variance(returns) + 1e-5))
