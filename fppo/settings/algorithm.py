"""The settings of how scores become advantages."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.fields import above, at_least, at_most, nonempty, setting

OldLogProbs = Literal["pass", "engine", "update", "auto"]
KlKind = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


@attrs.frozen(kw_only=True)
class KlRewardSettings:
    """A penalty in the token rewards for leaving the reference."""

    coef: float = setting(0.0, at_least(0))
    """The factor of the KL estimate taken off the token rewards; 0: none, and no reference model for it."""
    kind: KlKind = setting("k1")
    """The estimator of the KL divergence."""
    controller: Literal["fixed", "adaptive"] = setting("fixed")
    """Keep coef, or steer it to the target."""
    target: float = setting(0.1, above(0))
    """The KL per token that the adaptive controller steers to."""
    horizon: int = setting(10000, at_least(1))
    """Sequences over which the adaptive controller acts."""


@attrs.frozen(kw_only=True)
class CorrectionSettings:
    """What is done about the difference between the engine's log-probs and the trainer's."""

    mode: Literal["none", "token", "sequence"] = setting("none")
    """Importance weights: none, per token, or per sequence."""
    high: float = setting(2.0, above(0), unbounded=True)
    """The largest weight; what is above is truncated."""
    low: float | None = setting(None, above(0))
    """With a lower bound, weights outside [low, high] become 0 (IcePop); None: truncate only."""
    batch_normalize: bool = setting(False)
    """Divide the weights by their mean."""
    rejection: tuple[str, ...] = setting(())
    """Drop what is too far off by all these statistics: token_k1, seq_mean_k3, seq_max_k2, ..."""
    rejection_high: tuple[float, ...] = setting((), unbounded=True)
    """The upper bound of each rejection statistic."""
    rejection_low: tuple[float, ...] = setting(())
    """The lower bound of each k1 rejection statistic; none: 1 / the upper bound."""


@attrs.frozen(kw_only=True)
class AlgorithmSettings:
    """How scores become advantages."""

    advantage: str = setting("gae", nonempty("give the name of an estimator, as gae"))
    """The estimator of advantages; gae is PPO's and the only one that trains a critic; or module:function."""
    gamma: float = setting(1.0, above(0), at_most(1))
    """The discount per token (gae, reinforce_plus_plus)."""
    lam: float = setting(1.0, at_least(0), at_most(1))
    """The decay of gae: 0 trusts the critic, 1 the rewards."""
    whiten: bool = setting(True)
    """Give gae's advantages mean 0 and variance 1 over the whole batch."""
    scale: Literal["std", "none"] = setting("std")
    """Divide by the group's standard deviation or not (grpo, grpo_passk, gdpo)."""
    kl: KlRewardSettings = setting(KlRewardSettings)
    """A penalty in the token rewards for leaving the reference."""
    old_log_probs: OldLogProbs | None = setting(None)
    """From a pass before the update, the engine, or the update; auto: the cheapest sound one; None: update or pass."""
    correction: CorrectionSettings = setting(CorrectionSettings)
    """What is done about the difference between the engine's log-probs and the trainer's."""
