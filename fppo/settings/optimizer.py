"""The settings of the updates of actor and critic."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.component import given, named
from fppo.settings.fields import Table, above, at_least, at_most, setting
from fppo.settings.tables import OPTIMIZERS

WeightMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@attrs.frozen(kw_only=True)
class OptimizerSettings:
    """The optimizer, its learning rate, and any keywords of its function."""

    name: str = named("adamw", OPTIMIZERS, "an optimizer")
    """Its name; or module:function, called with the schedule (update's number -> rate) for an Optimizer."""
    lr: float = setting(1e-6, above(0))
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "exponential", "wsd"] = setting("constant")
    """How the rate falls to the run's end; exponential: by one factor each update; wsd: in the last fifth alone."""
    warmup_steps: int = setting(0, at_least(0))
    """Updates over which the rate rises, skipped ones not counted; the first is not 0."""
    min_lr_ratio: float = setting(0.0, at_least(0), at_most(1))
    """Where the rate ends, as a part of lr; exponential needs one above 0."""
    keywords: Table = given()
