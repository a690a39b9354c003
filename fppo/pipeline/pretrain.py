"""The start of a run in which a critic is fitted to a policy that stays as it is, until that helps no more."""

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
    """How far it has come: leaves, so that a run goes on with it."""

    best: Tensor = attrs.field(factory=_none)  # 0-d float64, the explained variance
    waited: int = 0  # steps since that rose
    steps: int = 0
    over: int = 0  # 1 once the policy is updated


def plain_returns(experience: Experience, *, gamma: float = 1.0, turns: bool = False) -> Tensor:
    """Returns without a critic's estimates, as `Pretrain.returns_of`: discounted by token, or by turn; [B, T]. Those of
    a row go on in the next rows of its episode."""
    whole = joined(experience)
    rewards, mask = whole.token_rewards, whole.response_mask
    if turns:
        returns = advantages.turn_returns(rewards, mask, turn_ids=whole.turn_ids, gamma=gamma)
    else:
        returns = advantages.discounted_returns(rewards, mask, gamma=gamma)
    return returns if experience.episodes is None else layout_of(experience).of_rows(returns)


@attrs.frozen(kw_only=True)
class Pretrain:
    """When it ends: after `limit` steps, or once the explained variance has not risen by `rise` for `patience` steps.

    `returns_of(experience)` [B, T] is what the critic learns meanwhile: returns without its own estimates.
    """

    limit: int
    patience: int = 3
    rise: float = 0.01
    returns_of: Callable[[Experience], Tensor] = plain_returns


def pretrain(
    progress: Pretraining, experience: Experience, *, rule: Pretrain
) -> tuple[Pretraining, Experience, Metrics]:
    """A step of it: whether the policy is updated from this step on, and the batch with the returns to learn.

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
