"""The settings of the critic."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.component import given, named
from fppo.settings.fields import Table, at_least, at_most, below, setting
from fppo.settings.optimizer import OptimizerSettings, WeightMode
from fppo.settings.tables import VALUE_HEADS


def _critic_optimizer() -> OptimizerSettings:
    return OptimizerSettings(lr=1e-5)


@attrs.frozen(kw_only=True)
class ValueHeadSettings:
    """What fits the critic to the returns, with the head that goes with it, and any of its keywords."""

    name: str = named("mse", VALUE_HEADS, "a value loss")
    """Its name; hl_gauss, two_hot and quantile have a head of several outputs; or module:function for your own."""
    keywords: Table = given()


@attrs.frozen(kw_only=True)
class CriticSettings:
    """How the critic is updated; there is one if the estimator of algorithm.advantage reads values."""

    reads: Literal["tokens", "confidence", "hidden"] = setting("tokens")
    """The tokens, as a model of its own; or, without one, how sure the policy is of them, or its hidden states."""
    privileged: int = setting(0, at_least(0))
    """The most tokens of the ground truth that it knows, and the policy does not: a model reads them; 0: none."""
    ensemble: int = setting(1, at_least(1))
    """How many small ones, each of its own share of the prompts, whose mean is the value (confidence, hidden)."""
    leave_agreed: float = setting(0.0, at_least(0), below(1))
    """The share of tokens, those in which the ensemble agrees most, that the policy does not learn from (AsyPPO)."""
    leave_disputed: float = setting(0.0, at_least(0), below(1))
    """The share of tokens, those in which the ensemble disagrees most, that have no entropy bonus (AsyPPO)."""
    loss: ValueHeadSettings = setting(ValueHeadSettings)
    """What fits it to the returns, with the head that goes with it."""
    popart: float = setting(0.0, at_least(0), at_most(1))
    """The share of a step in the mean and deviation of returns, the units it learns in (mse, huber); 0: it has none."""
    warmup_steps: int = setting(0, at_least(0))
    """Steps at the start in which only the critic is updated."""
    pretrain: int = setting(0, at_least(0))
    """In place of warmup_steps, the most steps that fit it to fresh rollouts of the policy as it is."""
    pretrain_patience: int = setting(3, at_least(1))
    """They end once the variance that it explains of rollouts it has not seen has not risen for so many steps."""
    pretrain_rise: float = setting(0.01, at_least(0))
    """What counts as a rise of that."""
    freeze: bool = setting(False)
    """Leave it as it is once the policy is updated: as it was loaded, warmed up or pretrained."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None)
    """The dtype of its forward and backward passes; None: model.compute_dtype."""
    checkpoint_layers: Literal["selective"] | bool | None = setting(None)
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
