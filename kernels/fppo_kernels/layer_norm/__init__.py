"""Layer normalisation: rows normalised by mean and variance (Ba et al., 2016, arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fppo_kernels.operation import Arguments, Drawn, Kernel, Operation, OperationCost, Shape, filled, normal64
from fppo_kernels.shapes import Float


def eager(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], bias: Float[Tensor, " h"] | None = None, *, eps: float
) -> Float[Tensor, "*rows h"]:
    """Compute (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in the dtype of `x`.

    The computation is in float32 or wider, rounded once. Models with this kernel call their own norms.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide)
    return (normed if bias is None else normed + bias.to(wide)).to(x.dtype)


def functional(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], bias: Float[Tensor, " h"] | None = None, *, eps: float
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` by torch.nn.functional.layer_norm: one kernel for each pass."""
    if x.is_cpu and x.dtype.itemsize == 2:  # with a wide weight torch keeps mean and deviation in float32, as on GPUs
        weight, bias = weight.float(), None if bias is None else bias.float()
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def liger(
    x: Float[Tensor, "*rows h"], weight: Float[Tensor, " h"], bias: Float[Tensor, " h"] | None = None, *, eps: float
) -> Float[Tensor, "*rows h"]:
    """Compute `eager` by Liger's Triton kernels (Hsu et al., 2024), for comparison."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found]  # where it is

    if not x.numel():
        return x * weight
    given = torch.zeros_like(weight) if bias is None else bias
    return LigerLayerNormFunction.apply(x, weight, given, eps)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"result": kernel(x["x"], x["weight"], keywords.get("bias"), eps=keywords["eps"])}


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw rows of size 1, of size sqrt(eps) and large ones, shifted by their size, with and without a bias."""
    eps = (1e-6, 1e-2)[number % 2]
    sizes = torch.tensor([1.0, eps**0.5, 100.0], dtype=torch.float64)[torch.arange(rows) % 3, None]
    x = sizes * (normal64(generator, rows, width) + normal64(generator, rows, 1))
    extras = {"eps": torch.tensor(eps, dtype=torch.float64)}
    if number >= 2:
        extras["bias"] = normal64(generator, width)
    # small rows have a steep slope, hence a small weight
    weights = sizes.clamp(max=1.0) * normal64(generator, rows, width)
    return Drawn({"x": x, "weight": normal64(generator, width)}, extras, weights)


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, width = shape["N"], shape["H"]
    extras = {"eps": 1e-5, "bias": torch.full((width,), 0.5, dtype=dtype, device=device)}
    return filled(device, dtype, (rows, width), extras, x=(rows, width), weight=(width,))


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * shape["H"] * itemsize
    return OperationCost(
        bytes_forward=2 * size,
        bytes_total=5 * size,
        words="bytes: x read and the result written; with backward x and the result's gradient read, x's written",
    )


OPERATION = Operation(
    name="layer_norm",
    call=_call,
    reference=eager,
    leaves=("x", "weight", "bias"),
    rows=("x",),
    draw=_draw,
    shape={"N": 1024, "H": 512},
    sized=_sized,
    cost=_cost,
)
