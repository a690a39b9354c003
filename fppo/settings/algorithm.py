"""The settings of how scores become advantages."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.fields import above, at_least, at_most, nonempty, setting

OldLogProbs = Literal["pass", "engine", "update", "auto"]
CRITIC_ADVANTAGES = ("gae", "turn_gae", "td", "vtrace")  # those that have a critic
KlKind = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


@attrs.frozen(kw_only=True)
class KlRewardSettings:
    """A penalty in the token rewards for leaving the reference."""

    coef: float = setting(0.0, at_least(0))
    """The factor of the KL estimate taken off the token rewards; 0: none, and no reference model for it."""
    kind: KlKind = setting("k1")
    """The estimator of the KL divergence; k1, or k1+, which is the same in a reward: the others are for losses."""
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
    """The estimator of advantages; gae (PPO's), turn_gae, td and vtrace train a critic; or module:function."""
    gamma: float = setting(1.0, above(0), at_most(1))
    """The discount per token, or per turn of turn_gae (gae, turn_gae, td, vtrace, reinforce_plus_plus)."""
    lam: float = setting(1.0, at_least(0), at_most(1))
    """The decay of gae, turn_gae and vtrace: 0 trusts the critic, 1 the rewards."""
    critic_lam: float | None = setting(None, at_least(0), at_most(1))
    """The decay behind what gae's critic learns, VC-PPO's decoupled one; None: lam, as for the policy."""
    lam_alpha: float | None = setting(None, above(0))
    """In place of lam, 1 - 1 / (this * a response's tokens) for each response of gae, VAPO's; None: lam."""
    gae: str = setting("scan", nonempty("give the name of a kernel for gae, as scan"))
    """The kernel for gae with one decay for all rows: scan, loop, cpp (for CPUs); or module:function."""
    td_steps: int | None = setting(None, at_least(1))
    """The tokens after which td takes the critic's word for the rest."""
    trace_cut: float = setting(1.0, above(0))
    """The largest factor by which vtrace passes a later surprise on, its c; its rho is correction.high."""
    whiten: bool = setting(True)
    """Give the advantages of estimators with a critic mean 0 and variance 1 over the whole batch."""
    scale: Literal["std", "none"] = setting("std")
    """Divide by the group's standard deviation or not (grpo, grpo_passk, gdpo)."""
    leave_one_out: bool = setting(False)
    """Keep a row's own return out of its baseline, which takes a bias away (opo, optimal_token_baseline)."""
    kl: KlRewardSettings = setting(KlRewardSettings)
    """A penalty in the token rewards for leaving the reference."""
    old_log_probs: OldLogProbs | None = setting(None)
    """From a pass before the update, the engine, or the update; auto: the cheapest sound one; None: update or pass."""
    correction: CorrectionSettings = setting(CorrectionSettings)
    """What is done about the difference between the engine's log-probs and the trainer's."""
    router_replay: Literal["none", "rollout", "old_log_probs", "all"] = setting("none")
    """Have the update choose the experts of the rollout, or of the pass for old log-probs (all: the reference, too)."""
