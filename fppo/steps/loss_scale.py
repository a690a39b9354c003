"""Dynamic loss scaling, without which gradients of float16 passes would vanish or overflow (arXiv:1710.03740, 3.2)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo import metrics, tree
from fppo.metrics import Mean, Metrics
from fppo.models.model import Params
from fppo.runtime.mesh import Mesh
from fppo.steps.optimizers import Optimizer
from fppo.tree import state

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24  # powers of two: scaling rounds nothing


@state
class LossScaled:
    """The inner optimizer's state, and the current factor of the loss."""

    inner: Any
    scale: Tensor  # [] float32
    steady: Tensor  # [] float32: the updates since its last change


def loss_scaled(optimizer: Optimizer, *, first: float = FIRST, interval: int = 2000) -> Optimizer:
    """Wrap an optimizer for gradients of a scaled loss: they are divided by the scale in its state, `first` at the
    start.

    An update that `optimizer` skips because its gradients are not finite halves the scale. `interval` consecutive
    updates without a skip double it, within `LEAST` and `MOST`. The decision is made on the device, equally on all
    ranks, and is part of the state. Metrics: those of `optimizer`, and loss_scale. Raises ValueError for an interval
    below 1, and in an update for an optimizer without the metric skipped.
    """
    if interval < 1:
        raise ValueError(f"interval={interval}: give 1 or more")

    def init(params: Params) -> LossScaled:
        devices = [p.device for p in params.values()] or [torch.device("cpu")]
        scale = torch.full((), first, dtype=torch.float32, device=devices[0])
        return LossScaled(inner=optimizer.init(params), scale=scale, steady=torch.zeros_like(scale))

    update = partial(_update, optimizer=optimizer, interval=interval)
    return Optimizer(init, update, loss_scale=lambda own: own.scale, kernel=optimizer.kernel)


def _update(
    params: Params,
    grads: Params,
    state: LossScaled,
    step: float,
    *,
    mesh: Mesh,
    donate: bool = False,
    optimizer: Optimizer,
    interval: int,
) -> tuple[Params, LossScaled, Metrics]:
    take = tree.donate if donate else tree.copy
    grads, scale, steady = take(grads), *take((state.scale, state.steady))
    leaves = list(grads.values())
    if leaves:  # the scale may be on the host
        torch._foreach_div_(leaves, scale.to(leaves[0].device))  # pyright: ignore[reportPrivateImportUsage]
    params, inner, report = optimizer.update(params, grads, state.inner, step, mesh=mesh, donate=donate)
    skipped = report.get("skipped")
    if not isinstance(skipped, Mean):
        raise ValueError("an optimizer with a loss scale must say what it skips: give the metric skipped, 0 or 1")
    bad = skipped.total.to(scale.device) > 0
    grown = ~bad & (steady + 1 >= interval)
    after = torch.where(bad, scale / 2, torch.where(grown, scale * 2, scale)).clamp(LEAST, MOST)
    kept = LossScaled(inner=inner, scale=after, steady=torch.where(bad | grown, 0.0, steady + 1))
    return params, kept, report | {"loss_scale": metrics.mean(scale)}
