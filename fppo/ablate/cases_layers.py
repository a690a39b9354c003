"""The operations inside a model's layers, row by row: linear layers, norms, rotary positions, gated activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.ablate.cases import FLOATS, Drawn, OperationCase, Shape, differentiate, exact_by, normal
from fppo.ablate.result import OperationCost
from fppo.laws.layers import KINDS, check_add_rms_norm, check_glu, check_linear, check_rms_norm, check_rotary
from fppo_kernels.glu.eager import eager as plain_glu
from fppo_kernels.linear.plain import plain as plain_linear
from fppo_kernels.rms_norm.eager import add_eager as plain_add_norm
from fppo_kernels.rms_norm.eager import eager as plain_norm
from fppo_kernels.rotary.eager import eager as plain_rotary
from fppo_kernels.table import Implementation

EPS = 1e-6


def _drawn(device: torch.device, dtype: torch.dtype, result: tuple[int, ...], **inputs: tuple[int, ...]) -> Drawn:
    """Standard normal inputs of these shapes; a weight of two dimensions keeps the size of what it multiplies."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: normal(generator, *shape, scale=shape[1] ** -0.5 if name == "weight" and len(shape) == 2 else 1.0)
        for name, shape in inputs.items()
    }
    moved = {name: x.to(device, dtype) for name, x in tensors.items()}
    return Drawn(moved, {"result": normal(generator, *result).to(device)})


def _case(
    *,
    op: str,
    shape: dict[str, int],
    leaves: tuple[str, ...],
    draw: Callable[[Shape, torch.dtype, torch.device], Drawn],
    call: Callable[[Callable, dict[str, Any]], Tensor],
    reference: Callable[..., Any],
    cost: Callable[[Shape, int], OperationCost],
    check: Callable[[Callable, torch.dtype, torch.device, Implementation], bool],
) -> OperationCase:
    def result(fn: Callable, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Tensor]:
        return {"result": call(fn, inputs)}

    evaluate = differentiate(result, leaves)
    return OperationCase(
        op=op,
        shape=shape,
        dtypes=FLOATS,
        bound="matmul" if op == "linear" else "copy",
        outputs=("result",),
        timed=("result",),
        leaves=leaves,
        draw=draw,
        evaluate=evaluate,
        exact=partial(exact_by, evaluate, reference),
        cost=cost,
        check=check,
    )


def _draw_linear(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, width, out = shape["N"], shape["H"], shape["M"]
    return _drawn(device, dtype, (rows, out), x=(rows, width), weight=(out, width))


def _call_linear(fn: Callable, inputs: dict[str, Any]) -> Tensor:
    return fn(inputs["x"], inputs["weight"], None)


def _cost_linear(shape: Shape, itemsize: int) -> OperationCost:
    rows, width, out = shape["N"], shape["H"], shape["M"]
    read, written = (rows * width + out * width) * itemsize, rows * out * itemsize
    product = 2 * rows * width * out
    return OperationCost(
        bytes_forward=read + written,
        bytes_total=3 * read + 2 * written,
        flops_forward=product,
        flops_total=3 * product,
        words="bytes: x and weight read, with backward again, their gradients written; work: 2 N H M, with backward 3 "
        "times that",
    )


def _check_linear(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_linear(fn, dtypes=(dtype,), device=device, reference=chosen.definition() or plain_linear)
    return True


def _draw_norm(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, width = shape["N"], shape["H"]
    return _drawn(device, dtype, (rows, width), x=(rows, width), weight=(width,))


def _call_norm(fn: Callable, inputs: dict[str, Any]) -> Tensor:
    return fn(inputs["x"], inputs["weight"], eps=EPS)


def _cost_norm(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * shape["H"] * itemsize
    return OperationCost(
        bytes_forward=2 * size,
        bytes_total=5 * size,
        words="bytes: x read and the result written; with backward x and the result's gradient read, x's written",
    )


def _check_norm(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_rms_norm(fn, dtypes=(dtype,), device=device)
    return True


def _draw_add_norm(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, width = shape["N"], shape["H"]
    return _drawn(device, dtype, (rows, 2 * width), x=(rows, width), residual=(rows, width), weight=(width,))


def _call_add_norm(fn: Callable, inputs: dict[str, Any]) -> Tensor:
    return torch.cat(fn(inputs["x"], inputs["residual"], inputs["weight"], eps=EPS), -1)


def _cost_add_norm(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * shape["H"] * itemsize
    return OperationCost(
        bytes_forward=4 * size,
        bytes_total=8 * size,
        words="bytes: x and residual read, the norm and the sum written; with backward the sum and two gradients read, "
        "one written",
    )


def _check_add_norm(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_add_rms_norm(fn, dtypes=(dtype,), device=device)
    return True


def _draw_rotary(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, queries, keys, width = (shape[name] for name in ("N", "heads", "kv_heads", "head_dim"))
    drawn = _drawn(device, dtype, (rows, queries + keys, width), query=(rows, queries, width), key=(rows, keys, width))
    angle = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.cat([angle, angle], -1).to(device)
    return drawn._replace(inputs={**drawn.inputs, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)})


def _call_rotary(fn: Callable, inputs: dict[str, Any]) -> Tensor:
    return torch.cat(fn(*(inputs[name] for name in ("query", "key", "cos", "sin"))), -2)


def _cost_rotary(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * (shape["heads"] + shape["kv_heads"]) * shape["head_dim"] * itemsize
    return OperationCost(
        bytes_forward=2 * size,
        bytes_total=4 * size,
        words="bytes: queries and keys read and written; with backward the gradients too",
    )


def _check_rotary(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_rotary(fn, dtypes=(dtype,), device=device)
    return True


def _draw_glu(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    size = shape["N"], shape["M"]
    return _drawn(device, dtype, size, gate=size, up=size)


def _call_glu(fn: Callable, inputs: dict[str, Any]) -> Tensor:
    return fn(inputs["gate"], inputs["up"], activation="silu")


def _cost_glu(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["N"] * shape["M"] * itemsize
    return OperationCost(
        bytes_forward=3 * size,
        bytes_total=8 * size,
        words="bytes: gate and up read and the result written; with backward these and the result's gradient read, two "
        "gradients written",
    )


def _check_glu(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_glu(fn, activations=[name for name in KINDS if name not in chosen.lacks], dtypes=(dtype,), device=device)
    return True


LINEAR = _case(
    op="linear",
    shape={"N": 1024, "H": 512, "M": 1536},
    leaves=("x", "weight"),
    draw=_draw_linear,
    call=_call_linear,
    reference=plain_linear,
    cost=_cost_linear,
    check=_check_linear,
)
RMS_NORM = _case(
    op="rms_norm",
    shape={"N": 1024, "H": 512},
    leaves=("x", "weight"),
    draw=_draw_norm,
    call=_call_norm,
    reference=plain_norm,
    cost=_cost_norm,
    check=_check_norm,
)
ADD_RMS_NORM = _case(
    op="add_rms_norm",
    shape={"N": 1024, "H": 512},
    leaves=("x", "residual", "weight"),
    draw=_draw_add_norm,
    call=_call_add_norm,
    reference=plain_add_norm,
    cost=_cost_add_norm,
    check=_check_add_norm,
)
ROTARY = _case(
    op="rotary",
    shape={"N": 1024, "heads": 14, "kv_heads": 2, "head_dim": 64},
    leaves=("query", "key"),
    draw=_draw_rotary,
    call=_call_rotary,
    reference=plain_rotary,
    cost=_cost_rotary,
    check=_check_rotary,
)
GLU = _case(
    op="glu",
    shape={"N": 1024, "M": 1536},
    leaves=("gate", "up"),
    draw=_draw_glu,
    call=_call_glu,
    reference=plain_glu,
    cost=_cost_glu,
    check=_check_glu,
)
