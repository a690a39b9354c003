"""What a pass over rows can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fppo.models.model import Model
from fppo.shapes import Outputs, Tokens
from fppo.steps import experts
from fppo.steps.experts import RouterSums
from fppo_kernels.shapes import Float, Int

OF_VALUE_HEADS = ("values", "outputs")
OF_ROUTERS = ("routed", "loads", "router_sums")
OUTPUTS = ("log_probs", "entropy", "sum_squared_probs", "hidden", *OF_VALUE_HEADS, *OF_ROUTERS)


class TokenOutputs(NamedTuple):
    """Per-token outputs [B, T], float32 (float64 from float64 parameters), zero outside the response mask; the K
    numbers of a value head, [B, T, K]; the states that a vocabulary head reads, [B, T, H]; and those of routers: the
    experts that they choose, by themselves where others are replayed, [B, S, L, k], and of this pass how many tokens
    each got, and sums for losses."""

    log_probs: Tokens | None = None
    entropy: Tokens | None = None
    sum_squared_probs: Tokens | None = None
    values: Tokens | None = None
    outputs: Outputs | None = None
    hidden: Outputs | None = None
    routed: Int[Tensor, "b s l k"] | None = None
    loads: Float[Tensor, "l e"] | None = None  # over the tokens of rows with a response
    router_sums: RouterSums | None = None  # likewise


def check_outputs(model: Model, outputs: Sequence[str]) -> None:
    """Raises ValueError for outputs that there are not, or that a model lacks something for."""
    if unknown := [name for name in outputs if name not in OUTPUTS]:
        raise ValueError(f"unknown outputs {unknown}; there are {list(OUTPUTS)}")
    if of_routers := [name for name in outputs if name in OF_ROUTERS]:
        experts.check_routers(model, f"leave out {of_routers}")
    needed = {"value" if name in OF_VALUE_HEADS else "lm" for name in outputs if name not in OF_ROUTERS}
    if needed - {model.head}:
        has, lacks = ("value", "vocabulary") if model.head == "value" else ("vocabulary", "value")
        raise ValueError(f"outputs {list(outputs)} need a {lacks} head; this model has a {has} head")
