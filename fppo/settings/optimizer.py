"""The settings of the updates of actor and critic."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.fields import above, at_least, at_most, below, nonempty, setting

WeightMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@attrs.frozen(kw_only=True)
class OptimizerSettings:
    """The optimizer and its learning rate."""

    name: str = setting("adamw", nonempty("give the name of an optimizer, as adamw"))
    """adamw, sgd or muon; or module:function, called with the schedule (update's number -> rate) for an Optimizer."""
    lr: float = setting(1e-6, above(0))
    """The peak learning rate."""
    beta1: float = setting(0.9, at_least(0), below(1))
    """The decay of the first moment (adamw, muon's vectors and embeddings)."""
    beta2: float = setting(0.999, at_least(0), below(1))
    """The decay of the second moment (adamw, muon's vectors and embeddings)."""
    eps: float = setting(1e-8, above(0))
    """What is added to the root of the second moment (adamw, muon's vectors and embeddings)."""
    momentum: float | None = setting(None, at_least(0), below(1))
    """The decay of the momentum; None: 0 for sgd, 0.95 for muon's matrices."""
    weight_decay: float = setting(0.01, at_least(0))
    """The decoupled weight decay."""
    max_grad_norm: float = setting(1.0, at_least(0))
    """The global norm that gradients are clipped to; 0: no clipping."""
    schedule: Literal["constant", "linear", "cosine", "exponential", "wsd"] = setting("constant")
    """How the rate falls to the run's end; exponential: by one factor each update; wsd: in the last fifth alone."""
    warmup_steps: int = setting(0, at_least(0))
    """Updates over which the rate rises, skipped ones not counted; the first is not 0."""
    min_lr_ratio: float = setting(0.0, at_least(0), at_most(1))
    """Where the rate ends, as a part of lr; exponential needs one above 0."""
