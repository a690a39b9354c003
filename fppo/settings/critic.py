"""The settings of the critic."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.fields import above, at_least, setting
from fppo.settings.optimizer import OptimizerSettings, WeightMode


def _critic_optimizer() -> OptimizerSettings:
    return OptimizerSettings(lr=1e-5)


@attrs.frozen(kw_only=True)
class CriticSettings:
    """How the critic is updated; there is one if algorithm.advantage is gae, turn_gae, td or vtrace."""

    reads: Literal["tokens", "confidence"] = setting("tokens")
    """The tokens, as a model of its own; or how sure the policy is of them, with no model and no pass of its own."""
    value_clip: float = setting(0.5, above(0), unbounded=True)
    """How far a value may move from the old one in a step; inf: any distance."""
    warmup_steps: int = setting(0, at_least(0))
    """Steps at the start in which only the critic is updated."""
    compute_dtype: Literal["float32", "bfloat16"] | None = setting(None)
    """The dtype of its forward and backward passes; None: model.compute_dtype."""
    checkpoint_layers: bool | None = setting(None)
    """Recompute each of its layers in the backward pass; None: as model.checkpoint_layers."""
    offload: Literal["none", "moments", "all"] | None = setting(None)
    """What of it to keep in the host's memory between uses (GPUs); None: as model.offload."""
    weight_mode: WeightMode = setting("token-mean")
    """How per-token losses are weighted into one."""
    horizon: int | None = setting(None, at_least(1))
    """The constant length that seq-mean-token-sum-norm divides by."""
    epochs: int = setting(1, at_least(1))
    """Passes over the batch in a step."""
    mini_batch_size: int | None = setting(None, at_least(1))
    """Sequences per optimizer update; it must divide rollout.batch_size; None: all of them."""
    micro_batch_size: int | None = setting(None, at_least(0))
    """Sequences per forward and backward pass; 0 or None: split by token_budget."""
    token_budget: int | None = setting(None, at_least(0))
    """Tokens per forward and backward pass; None: 16384, unless micro_batch_size is given."""
    optimizer: OptimizerSettings = attrs.field(factory=_critic_optimizer)
    """The optimizer and its learning rate."""
