"""The settings of how scores become advantages."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.component import given, named
from fppo.settings.fields import Table, above, at_least, nonempty, setting
from fppo.settings.tables import CORRECTIONS, ESTIMATORS

OldLogProbs = Literal["pass", "engine", "update", "auto"]
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
    """The correction for the difference between the engine's log-probs and the trainer's, and any of its keywords."""

    name: str = named("none", CORRECTIONS, "a correction")
    """none, rollout (importance weights and rejection), or module:function for your own."""
    keywords: Table = given()


@attrs.frozen(kw_only=True)
class AdvantageSettings:
    """The estimator of advantages, and any of its keywords."""

    name: str = named("gae", ESTIMATORS, "an estimator")
    """Its name, gae (PPO's), turn_gae, td and vtrace with a critic; or module:function for your own."""
    keywords: Table = given()


@attrs.frozen(kw_only=True)
class AlgorithmSettings:
    """How scores become advantages."""

    advantage: AdvantageSettings = setting(AdvantageSettings)
    """The estimator of advantages."""
    gae: str = setting("scan", nonempty("give the name of a kernel for gae, as scan"))
    """The kernel for gae with one decay for all rows: scan, loop, cpp (for CPUs); or module:function."""
    whiten: bool | None = setting(None)
    """Give advantages mean 0 and variance 1 over the whole batch; None: with a critic, and where the estimator does."""
    kl: KlRewardSettings = setting(KlRewardSettings)
    """A penalty in the token rewards for leaving the reference."""
    old_log_probs: OldLogProbs | None = setting(None)
    """From a pass before the update, the engine, or the update; auto: the cheapest sound one; None: update or pass."""
    correction: CorrectionSettings = setting(CorrectionSettings)
    """What is done about the difference between the engine's log-probs and the trainer's."""
    router_replay: Literal["none", "rollout", "old_log_probs", "all"] = setting("none")
    """Have the update choose the experts of the rollout, or of the pass for old log-probs (all: the reference, too)."""
