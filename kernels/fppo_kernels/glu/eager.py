"""Gated activations as in their formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional as F

from fppo_kernels.shapes import Float

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu}
)


def eager(
    gate: Float[Tensor, "*rows h"], up: Float[Tensor, "*rows h"], *, activation: str = "silu"
) -> Float[Tensor, "*rows h"]:
    """Compute activation(gate) * up [..., H], for an activation in ACTIVATIONS. Models with this kernel use their own
    code."""
    return ACTIVATIONS[activation](gate) * up
