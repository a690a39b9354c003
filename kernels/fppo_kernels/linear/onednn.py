# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Linear layers by oneDNN's product, which is twice as fast as torch's (MKL's) on some CPUs."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.nn import functional as F

from fppo_kernels.shapes import Float
from fppo_kernels.transforms import active

_PACKED_ROWS = 64  # the number of rows for which the layout of a packed weight is chosen; any other works too


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a @ b.T + bias for [*, H] and [M, H].

    A single row is extended by a row of zeros, because oneDNN has another kernel for one row, which sums in another
    order. So a row's bits do not depend on the number of rows.
    """
    if a.numel() == a.shape[-1]:
        alone = a.reshape(1, -1)
        return product(torch.cat([alone, torch.zeros_like(alone)]), b, bias)[:1].view(*a.shape[:-1], b.shape[0])
    if torch.compiler.is_compiling():
        return _opaque(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


# the compiler would assume a constant weight for torch's own operation
@torch.library.custom_op(
    "fppo_kernels::product", mutates_args=(), schema="(Tensor a, Tensor b, Tensor? bias) -> Tensor"
)
def _opaque(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


@_opaque.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[0])


class _OnednnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        rows = grad.flatten(0, -2)
        d_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = _weight_gradient(x.contiguous().flatten(0, -2), rows) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Compute grad.T @ x [M, H]. The narrower of `grad` and `x` is the first operand, which is copied."""
    if grad.shape[1] > x.shape[1]:
        return product(x.t(), grad.t()).t().contiguous()
    return product(grad.t(), x.t())


def onednn(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, "m h"], bias: Float[Tensor, " m"] | None = None
) -> Float[Tensor, "*rows m"]:
    """Compute x @ weight.T + bias by oneDNN, forward and backward, with first derivatives only; under transforms of
    torch.func by torch.

    torch computes the products that oneDNN lacks: dtypes other than float32 and bfloat16, bfloat16 on CPUs without
    AVX-512, other devices, tensors without data (empty, on meta, fake), and `x` without rows.
    """
    operands = [x, weight] if bias is None else [x, weight, bias]
    fits = _multiplies(x.dtype) and x.dim() > 1 and x.numel() and weight.numel()
    transformed = not torch.compiler.is_compiling() and active()
    if transformed or not fits or not all(is_plain(each) and each.dtype == x.dtype for each in operands):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(each.requires_grad for each in operands):
        return _OnednnLinear.apply(x, weight, bias)
    return product(x, weight, bias)


def stacked(*weights: Tensor) -> Tensor:
    """Join weights [M, H] one below the other; a single one is returned as it is."""
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def packed(*weights: Tensor) -> Tensor:
    """Copy weights [M, H], one below the other, into the layout in which oneDNN multiplies by them fastest, for
    products without gradients.

    `onednn` takes the copy as a weight. On some processors its results are then rounded differently, so exact rollouts
    pack no weights. A weight that oneDNN does not multiply is returned as it is.
    """
    weight = stacked(*weights)
    if not (is_plain(weight) and weight.numel() and _multiplies(weight.dtype)):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_ROWS)


def fast_on_this_processor() -> bool:
    """Whether oneDNN's float32 products are faster than torch's on this machine: on AMD's processors with AVX-512,
    where torch's are MKL's, which leave AVX-512 to Intel's. Nothing is timed, so every run decides alike."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available() and _made_by_amd()


def _made_by_amd() -> bool:
    try:
        said = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        said = platform.processor()
    return "AuthenticAMD" in said


def _multiplies(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_plain(x: Tensor) -> bool:
    """Whether `x` is a plain tensor on the CPU, whose memory a kernel may read."""
    return type(x) in (Tensor, Parameter) and x.device.type == "cpu"
