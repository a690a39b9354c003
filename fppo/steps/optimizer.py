"""AdamW with global-norm clipping, as a pure function over torch's own kernels."""

from __future__ import annotations

import attrs
from torch import Tensor
from torch.nn.utils import get_total_norm

from fppo import metrics, tree
from fppo.metrics import Metrics
from fppo.runtime.mesh import Mesh, all_reduce
from fppo.steps.schedules import Schedule
from fppo.steps.train_state import Params, TrainState
from fppo_kernels.record import Kernels


@attrs.frozen
class Optimizer:
    """AdamW's numbers (Loshchilov and Hutter, 2019, arXiv:1711.05101). `max_grad_norm` None does not clip."""

    schedule: Schedule
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0


def optimizer_step(
    state: TrainState,
    grads: Params,
    *,
    optimizer: Optimizer,
    kernels: Kernels,
    mesh: Mesh,
    donate: bool = False,
    donate_grads: bool = False,
) -> tuple[TrainState, Metrics]:
    """The state after one update with `grads`, clipped to a global norm of `optimizer.max_grad_norm`.

    `grads` are summed over all ranks already. On a mesh that shards parameters, they and the state are shards, and the
    norm is that of all of them. A norm that is not finite leaves parameters, moments and count as they were, bit for
    bit, and counts as `skipped`: decided on the device, without waiting for it. With `donate` the memory of `state` is
    taken over and it is left empty; `donate_grads` does the same to `grads`, which the kernel scales in place.

    Metrics: grad_norm (before clipping), lr, skipped (0 or 1).
    """
    lr = optimizer.schedule(state.step)
    state = tree.donate(state) if donate else tree.copy(state)
    grads = tree.donate(grads) if donate_grads else tree.copy(grads)
    names = list(state.params)
    norm = _global_norm(list(grads.values()), mesh)
    skipped = (~norm.isfinite()).float()
    scale = None
    if optimizer.max_grad_norm is not None:
        scale = ((norm.float() + 1e-6) / optimizer.max_grad_norm).clamp(min=1.0)
    count = state.opt.count
    steps = [count.clone() for _ in names]
    kernels.adamw(
        [state.params[n] for n in names],
        [grads[n] for n in names],
        [state.opt.mu[n] for n in names],
        [state.opt.nu[n] for n in names],
        steps,
        lr=lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        grad_scale=scale,
        found_inf=skipped,
    )
    opt = tree.replace(state.opt, count=count + (1.0 - skipped.to(count)))
    report: Metrics = {
        "grad_norm": metrics.mean(norm),
        "lr": metrics.mean(lr),
        "skipped": metrics.mean(skipped),
    }
    return tree.replace(state, opt=opt, step=state.step + 1), report


def _global_norm(grads: list[Tensor], mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients, on all ranks: 0-d, of their dtype."""
    norm = get_total_norm(grads)
    if not mesh.sharded:
        return norm
    return all_reduce(norm.double().square(), mesh["shard"]).sqrt().to(norm.dtype)
