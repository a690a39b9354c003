"""The settings of low-rank adapters, and what does not go together with them."""

from __future__ import annotations

from typing import Literal

import attrs

from fppo.settings.fields import above, at_least, nonempty, setting


@attrs.frozen(kw_only=True)
class LoraSettings:
    """Low-rank adapters, which are trained in place of the weights; policy, critic and reference share one base."""

    rank: int = setting(0, at_least(0))
    """The rank of the policy's adapter; 0: train all weights."""
    alpha: float = setting(16.0, above(0))
    """What an adapter's product is multiplied by, before scaling divides it."""
    scaling: Literal["standard", "rslora"] = setting("standard")
    """What divides alpha: the rank (standard), or its square root (rslora)."""
    targets: tuple[str, ...] = setting(("all-linear",), nonempty("give names of weights, or all-linear"))
    """The weights that have adapters: all-linear, ends of names, as q_proj, or patterns of whole names."""
    path: str | None = setting(None)
    """A directory with PEFT's files, whose adapter the policy starts from; rank, alpha, scaling and targets are its."""
    reference: Literal["start", "base"] = setting("start")
    """What the policy is compared with, if it starts from path: the policy as it starts, or its base."""
    send: Literal["merged", "alone"] = setting("merged")
    """How the policy's adapter goes to vLLM: in merged weights, or alone, beside a base that is sent once."""
    base: Literal["float", "int8", "nf4"] = setting("float")
    """How the frozen base keeps the weights of its linear layers: as they are, or quantised by bitsandbytes."""
    critic_rank: int | None = setting(None, at_least(0))
    """The rank of the critic's adapter, else as the policy's; None: rank; 0: train all of the critic's weights."""
