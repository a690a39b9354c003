"""AdamW in place on lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fppo_kernels.operation import Arguments, Drawn, Kernel, Operation, OperationCost, Shape, normal
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import active

LEAF = 1 << 20  # numbers in one parameter of an ablation


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Float[Tensor, ""]],
    *,
    lr: float | Float[Tensor, ""],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: Float[Tensor, ""] | None = None,
    found_inf: Float[Tensor, ""] | None = None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter, 2019, algorithm 2) on every parameter, in place, by torch's kernel.

    `steps` holds one float32 0-d count per parameter, raised by 1 here. The gradients are divided by `grad_scale` (0-d
    float32), in place too, or in a copy if a gradient's strides are not its parameter's. If `found_inf` (0-d float32)
    is 1, parameters, moments and steps do not change. Under transforms of torch.func the paper's formula replaces the
    kernel.
    """
    if active():
        lists = params, grads, exp_avgs, exp_avg_sqs, steps
        _write_(*lists, lr=lr, betas=betas, eps=eps, decay=weight_decay, grad_scale=grad_scale, found_inf=found_inf)
        return
    adamw(
        params,
        [_laid_out_as(p, g) for p, g in zip(params, grads, strict=True)],
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def _laid_out_as(param: Tensor, grad: Tensor) -> Tensor:
    """Lay out a gradient with its parameter's strides, since torch's kernel walks both in memory order."""
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)


@torch.no_grad()
def reference_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Float[Tensor, ""]],
    *,
    lr: float | Float[Tensor, ""],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: Float[Tensor, ""] | None = None,
    found_inf: Float[Tensor, ""] | None = None,
) -> None:
    """One step of AdamW in place, like `adamw_`, as the paper writes it, in the dtype of the parameters."""
    lists = params, grads, exp_avgs, exp_avg_sqs, steps
    _write_(*lists, lr=lr, betas=betas, eps=eps, decay=weight_decay, grad_scale=grad_scale, found_inf=found_inf)


def _write_(
    *lists: list[Tensor],
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Compute the paper's formula by differentiable operations, and write the results into `lists` (parameters,
    gradients, first and second moments, steps). Gradients are first divided by `grad_scale`, if given, and if
    `found_inf` is 1 all else stays. `decay` is the weight decay. The derivative of the square root at 0 is 0."""
    for param, grad, mu, nu, step in zip(*lists, strict=True):
        if grad_scale is not None:
            grad.div_(grad_scale)
        count = step + 1
        first = betas[0] * mu + (1 - betas[0]) * grad
        second = betas[1] * nu + (1 - betas[1]) * grad.square()
        unbiased_first = first / (1 - betas[0] ** count.double())
        unbiased_second = second / (1 - betas[1] ** count.double())
        seen = unbiased_second > 0
        root = torch.where(seen, unbiased_second.where(seen, 1.0).sqrt(), unbiased_second)
        update = unbiased_first / (root + eps) + decay * param
        for old, new in ((param, param - lr * update), (mu, first), (nu, second), (step, count)):
            old.copy_(new if found_inf is None else torch.where(found_inf == 1, old, new))


def _cloned(inputs: Arguments) -> dict[str, list[Tensor]]:
    return {name: [x.clone() for x in xs] for name, xs in inputs.items() if name != "donated"}


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    """Run one step in place on a copy of the tensors, and return the new `outputs` by name. Without `outputs` (to
    measure time) run it on the tensors "donated" of `x`, and return nothing."""
    donated = _cloned(x) if outputs else x["donated"]
    kernel(*donated.values(), **keywords)
    return {name: torch.cat(donated[name]) for name in outputs}


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    """Parameters of a million numbers each, the last one smaller, with moments and counts as after nine steps."""
    generator, count = torch.Generator().manual_seed(0), shape["P"]
    sizes = [LEAF] * (count // LEAF) + ([count % LEAF] if count % LEAF else [])
    inputs: dict[str, Any] = {
        name: [normal(generator, n, scale=scale).to(device, dtype) for n in sizes]
        for name, scale in (("params", 0.02), ("grads", 1e-3), ("exp_avgs", 1e-3))
    }
    inputs["exp_avg_sqs"] = [(x.float() ** 2 + 1e-8).to(dtype) for x in inputs["grads"]]
    inputs["steps"] = [torch.full((), 9.0, device=device) for _ in sizes]
    extras = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    return Drawn(inputs | {"donated": _cloned(inputs)}, extras, torch.zeros(0))


def _cost(shape: Shape, itemsize: int) -> OperationCost:
    words = "bytes: parameters, gradients and two moments read, all but the gradients written"
    return OperationCost(bytes_forward=7 * shape["P"] * itemsize, bytes_total=None, words=words)


OPERATION = Operation(
    name="adamw",
    call=_call,
    reference=reference_,
    outputs=("params", "exp_avgs", "exp_avg_sqs"),
    sloped=(),
    shape={"P": 16_000_000},
    sized=_sized,
    cost=_cost,
    timed=(),
    transforms=("grad", "vmap"),
)
