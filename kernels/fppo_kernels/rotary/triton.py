# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Rotary positions by one Triton program, which rotates inversely in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import triton as _triton
from torch import Tensor

from fppo_kernels.rotary._triton_kernels import rotary_turn
from fppo_kernels.rotary._turned import turned
from fppo_kernels.shapes import Float

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 2048  # numbers of a half that one instance holds


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    out, (heads, width) = torch.empty_like(x), x.shape[-2:]
    if x.numel():
        with torch.cuda.device_of(x):
            rows, half = cos.numel() // width, width // 2
            block = _triton.next_power_of_2(half)
            tile = min(_triton.next_power_of_2(heads), max(AT_ONCE // block, 1))
            settings: dict[str, Any] = {"HEADS": tile, "BLOCK": block, "num_warps": min(max(tile * block // 256, 1), 4)}
            rotary_turn[(rows,)](x, cos, sin, out, rows, heads, half, sign, **settings)
    return out


def triton(
    query: Float[Tensor, "*rows q d"],
    key: Float[Tensor, "*rows k d"],
    cos: Float[Tensor, "*rows d"],
    sin: Float[Tensor, "*rows d"],
) -> tuple[Float[Tensor, "*rows q d"], Float[Tensor, "*rows k d"]]:
    """Compute `eager` in one pass, in float32, rounded once. Derivatives beyond the first are those of `eager`.

    Raises ValueError for float64.
    """
    kinds = [x.dtype for x in (query, key, cos, sin)]
    if not set(kinds) <= set(DTYPES):
        raise ValueError(f"rotary/triton takes float32, bfloat16 and float16, got {kinds}; rotary/eager takes any")
    return turned(query, key, cos, sin, _turn)
