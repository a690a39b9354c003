# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
"""Linear layers by products in bfloat16, beside float32 weights, for processors that multiply in it.

With r(a), a rounded to bfloat16:

    y = r(r(x) @ r(W).T) + bias      dx = r(r(dy) @ r(W))      dW = r(r(dy).T @ r(x))      dbias = sum of the rows of dy

Products are summed in float32. On a CPU torch has none that returns these sums, so the result is rounded too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn import functional as F

from fppo_kernels.linear.onednn import stacked
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import refuse

DTYPES = (torch.float32, torch.bfloat16)


def bfloat16(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, "m h"], bias: Float[Tensor, " m"] | None = None
) -> Float[Tensor, "*rows m"]:
    """Compute x @ weight.T + bias from operands rounded to bfloat16, in the dtype of `x`; the weight may be rounded
    before. Only first derivatives, those of the formula above.

    It computes on every processor, slowly on one without such products. Raises ValueError for a dtype of `x` that is
    not float32 or bfloat16.
    """
    refuse("linear/bfloat16", "its roundings are steps; linear/torch has")
    if x.dtype not in DTYPES:
        raise ValueError(f"linear/bfloat16 takes {[str(d) for d in DTYPES]}, got {x.dtype}: take linear/torch")
    y = _Bfloat16Linear.apply(x, weight)
    return y if bias is None else y + bias  # type: ignore[return-value]


class _Bfloat16Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        operand = x.bfloat16()
        ctx.save_for_backward(operand, weight)
        return F.linear(operand, weight.bfloat16()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), slope = ctx.saved_tensors, grad.bfloat16()
        d_x = (slope @ weight.bfloat16()).to(grad.dtype) if ctx.needs_input_grad[0] else None
        rows, inputs = slope.reshape(-1, slope.shape[-1]), x.reshape(-1, x.shape[-1])
        return d_x, (rows.t() @ inputs).to(weight.dtype) if ctx.needs_input_grad[1] else None


def rounded(*weights: Tensor) -> Tensor:
    """Copy weights [M, H], one below the other, in bfloat16, for products without gradients. Others than plain tensors
    keep their dtype."""
    weight = stacked(*weights)
    return weight.detach().bfloat16() if type(weight) in (Tensor, Parameter) else weight


def multiplies() -> bool:
    """True if this processor has products in bfloat16: AVX512-BF16 or AMX."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
