"""Optimizers as pairs of functions, with clipping, skipping and donation around each: AdamW, SGD, Lion, and
user-defined ones.

`muon` has a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.sgd import sgd as fused_sgd

from fppo import metrics, tree
from fppo.metrics import Metrics
from fppo.models.model import Params
from fppo.runtime.mesh import CUTTING_AXES, SHARD_AXES, Mesh, all_reduce
from fppo.runtime.offload import Lane, copied, to_device, to_host
from fppo.steps.schedules import Schedule
from fppo.tree import state
from fppo_kernels.adamw import adamw_
from fppo_kernels.transforms import active


class Update(Protocol):
    """Compute new parameters, new optimizer state, and metrics, from gradients that are already summed over all ranks.

    `step` is the number of earlier updates, or the position on the schedule (`steps.clock`), which may have a fraction.
    On a mesh that cuts parameters, parameters, gradients and state are shards. With `donate` the function takes over
    the memory of all three trees, and leaves them empty.
    """

    def __call__(
        self, params: Params, grads: Params, state: Any, step: float, *, mesh: Mesh, donate: bool
    ) -> tuple[Params, Any, Metrics]: ...


class Optimizer(NamedTuple):
    """An optimizer as a pair of functions, as in optax. `init(params)` makes its state: any tree of tensors.

    Where a mesh cuts parameters, a tensor of the state is either a number (0-d), or has, in a mapping, the name of a
    parameter and its shape, or the shape with one axis divided by the size of a block; it is then cut like the
    parameter, never inside of a block (`train_state.check_cuts`). With `loss_scale` gradients are those of the loss
    times `loss_scale(state)`, 0-d; see `loss_scale.loss_scaled`. `kernel` is AdamW's kernel, if there is one.
    `says(params)` describes how it treats which parameters, if not all alike; it reads only names and shapes.
    `landing(state)` says where gradients go, and in which dtypes they are summed, if not as the parameters: see
    `host_step.on_host`.
    """

    init: Callable[[Params], Any]
    update: Update
    loss_scale: Callable[[Any], Tensor] | None = None
    kernel: Callable[..., None] | None = None
    says: Callable[[Mapping[str, Tensor]], str] | None = None
    landing: Callable[[Any], Landing] | None = None


class Landing(NamedTuple):
    """The way of gradients to the host, by name of their parameter: the dtype in which each is summed on the device,
    and the lane on which the sum is copied."""

    lane: Lane
    dtypes: Mapping[str, torch.dtype]


class UpdateCall(NamedTuple):
    """Arguments of an update besides its trees: position, mesh, divisor of gradients, and whether it is `skipped`."""

    step: float
    mesh: Mesh
    scale: Tensor | None  # 0-d, the divisor of gradients; None: none
    skipped: Tensor  # 0-d float32; if it is 1, no bit of parameters and state may change


# write_(params, grads, state, call) -> state: it may overwrite the tensors of its arguments
Write = Callable[[Params, Params, Any, UpdateCall], Any]


def clipped(
    init: Callable[[Params], Any],
    write_: Write,
    *,
    max_grad_norm: float | None,
    schedule: Schedule | None = None,
) -> Optimizer:
    """Make an optimizer of `init`, which makes the state, and `write_`, which updates in place, by adding clipping to
    the global norm `max_grad_norm` (None: no clipping), skipping and donation.

    The norm is that of all gradients on all ranks. If it is not finite, parameters and state stay as they were, bit for
    bit, and the update counts as `skipped`. The device decides that, and the host does not wait for it.

    Metrics: grad_norm (before clipping), lr (of a `schedule`), skipped (0 or 1).
    """
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, or None for no clipping, got {max_grad_norm}")
    return Optimizer(init, partial(_update, write_=write_, max_grad_norm=max_grad_norm, schedule=schedule))


def _update(
    params: Params,
    grads: Params,
    state: Any,
    step: float,
    *,
    mesh: Mesh,
    donate: bool = False,
    write_: Write,
    max_grad_norm: float | None,
    schedule: Schedule | None,
) -> tuple[Params, Any, Metrics]:
    mapped = active()  # if vmap maps over the norm, copies must be mapped over too
    if not mapped:
        take = tree.donate if donate else tree.copy
        params, grads, state = take(params), take(grads), take(state)
    layout = mesh.layout  # a rank may own no parameters, but the norm needs a dtype and device
    sharded = mesh.sharded
    owned = [g if layout is None or layout.owns(name, sharded=sharded) else g[:0] for name, g in grads.items()]
    norm = global_norm(owned, mesh)
    if mapped:
        take = _mapped_as(norm, schedule, step)
        params, grads, state = take(params), take(grads), take(state)
    skipped = (~norm.isfinite()).float()
    scale = None
    if max_grad_norm is not None:
        scale = ((norm.float() + 1e-6) / max_grad_norm).clamp(min=1.0)
    state = write_(params, grads, state, UpdateCall(step, mesh, scale, skipped))
    report: Metrics = {"grad_norm": metrics.mean(norm)}
    if schedule is not None:
        report["lr"] = metrics.mean(schedule(step))
    return params, state, report | {"skipped": metrics.mean(skipped)}


def _mapped_as(norm: Tensor, schedule: Schedule | None, step: float) -> Callable[[Any], Any]:
    """Make a function that copies trees. If vmap maps over the gradients' `norm` or the learning rate, it maps over the
    copies too, so that results can be written into them."""
    rate = norm if schedule is None else torch.as_tensor(schedule(step), device=norm.device)
    nothing = torch.zeros_like(norm, dtype=torch.bool) & torch.zeros_like(rate, dtype=torch.bool)
    return lambda each: tree.map(lambda x: torch.where(nothing, torch.zeros_like(x), x), each)


def global_norm(grads: list[Tensor], mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients over all ranks: 0-d, in their dtype. Each gradient counts on one of the ranks over
    which the mesh cuts parameters."""
    norm = torch.cat([g.flatten() for g in grads]).norm() if active() else get_total_norm(grads)
    axes, done = ([mesh.shard_axis()], SHARD_AXES) if mesh.sharded else ([], ())
    if mesh.layout is not None:
        axes += [mesh[name] for name in (*CUTTING_AXES, "pipeline") if name not in done]
    if not axes:
        return norm
    total = norm.double().square().to(mesh.wire or norm.device)
    for axis in axes:
        total = all_reduce(total, axis)
    return total.sqrt().to(norm)


def check_decays(*, weight_decay: float, momentum: float = 0.0, betas: tuple[float, ...] = ()) -> None:
    """Raise ValueError for a weight decay below 0, and for momentum or betas outside [0, 1)."""
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be 0 or more, got {weight_decay}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be 0 or more, and less than 1, got {momentum}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be 0 or more, and less than 1, got {betas}")


def zeros_like(params: Params) -> Params:
    """Zeros with the structure of the parameters."""
    return {name: torch.zeros_like(p) for name, p in params.items()}


@state
class AdamWState:
    """First and second moments with the structure of the parameters, and the number of updates applied."""

    mu: Params
    nu: Params
    count: Tensor  # [] float32, as torch's kernels require


def init_adamw(params: Params) -> AdamWState:
    """AdamW's state before the first update."""
    devices = [p.device for p in params.values()] or [torch.device("cpu")]
    count = torch.zeros((), dtype=torch.float32, device=devices[0])
    return AdamWState(mu=zeros_like(params), nu=zeros_like(params), count=count)


def adamw(
    schedule: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    kernel: Callable[..., None] = adamw_,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) by a kernel like `fppo_kernels.adamw.adamw_`.

    The kernel clips and skips too, so that each tensor is read and written once. With `max_grad_norm` None gradients
    are not clipped.
    """
    write_ = adamw_write(schedule, betas=betas, eps=eps, weight_decay=weight_decay, kernel=kernel)
    return clipped(init_adamw, write_, max_grad_norm=max_grad_norm, schedule=schedule)._replace(kernel=kernel)


def adamw_write(
    schedule: Schedule, *, betas: tuple[float, float], eps: float, weight_decay: float, kernel: Callable[..., None]
) -> Write:
    """AdamW's in-place update of the parameters in its state. Raises ValueError for numbers out of range."""
    check_decays(weight_decay=weight_decay, betas=betas)
    if not eps > 0:
        raise ValueError(f"eps must be > 0, got {eps}")
    return partial(_write_adamw_, schedule=schedule, betas=betas, eps=eps, weight_decay=weight_decay, kernel=kernel)


def _write_adamw_(
    params: Params,
    grads: Params,
    state: AdamWState,
    call: UpdateCall,
    *,
    schedule: Schedule,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    kernel: Callable[..., None],
) -> AdamWState:
    names, count = list(state.mu), state.count
    kernel(
        [params[n] for n in names],
        [grads[n] for n in names],
        [state.mu[n] for n in names],
        [state.nu[n] for n in names],
        [count.clone() for _ in names],
        lr=schedule(call.step),
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        grad_scale=call.scale,
        found_inf=call.skipped,
    )
    return tree.replace(state, count=count + (1.0 - call.skipped.to(count)))


@state
class SgdState:
    """Momentum: a sum of gradients with the structure of the parameters; empty without momentum."""

    momentum: Params


def sgd(
    schedule: Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> Optimizer:
    """Stochastic gradient descent with momentum as in torch.optim.SGD, by torch's kernel.

    The weight decay is decoupled: algorithm 1 of Loshchilov and Hutter (2019, arXiv:1711.05101), the rate in the decay.
    """
    check_decays(weight_decay=weight_decay, momentum=momentum)

    def write_(params: Params, grads: Params, state: SgdState, call: UpdateCall) -> SgdState:
        lr, names = schedule(call.step), list(params)
        if weight_decay:
            decay_(list(params.values()), lr * weight_decay, call.skipped)
        if active():
            _plain_sgd_(params, grads, state, call, lr=lr, momentum=momentum, nesterov=nesterov)
            return state
        fused_sgd(
            [params[n] for n in names],
            [_laid_out_as(params[n], grads[n]) for n in names],
            [state.momentum[n] if momentum else None for n in names],
            fused=True,
            grad_scale=call.scale,
            found_inf=call.skipped,
            weight_decay=0.0,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=nesterov,
            maximize=False,
        )
        return state

    def init(params: Params) -> SgdState:
        return SgdState(momentum=zeros_like(params) if momentum else {})

    return clipped(init, write_, max_grad_norm=max_grad_norm, schedule=schedule)


@state
class LionState:
    """The momentum with the structure of the parameters: half of AdamW's state."""

    momentum: Params


def lion(
    schedule: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
) -> Optimizer:
    """Lion (Chen et al., 2023, arXiv:2302.06675, algorithm 2): steps of equal size, in the direction of a momentum's
    sign.

    c = beta1 m + (1 - beta1) g; p <- p - lr (sign(c) + weight_decay p); m <- beta2 m + (1 - beta2) g. The paper
    (section 5) takes rates 3 to 10 times lower than AdamW's, and as much more weight decay.
    """
    check_decays(weight_decay=weight_decay, betas=betas)

    def write_(params: Params, grads: Params, state: LionState, call: UpdateCall) -> LionState:
        lr, skipped = schedule(call.step), call.skipped.bool()
        decay_(list(params.values()), lr * weight_decay, call.skipped)
        for name, old in state.momentum.items():
            grad = grads[name] if call.scale is None else grads[name].div_(call.scale)
            sign = torch.lerp(grad, old, betas[0]).sign_()
            params[name].sub_(torch.where(skipped, 0.0, lr * sign))
            old.copy_(torch.where(skipped, old, torch.lerp(grad, old, betas[1])))
        return state

    def init(params: Params) -> LionState:
        return LionState(momentum=zeros_like(params))

    return clipped(init, write_, max_grad_norm=max_grad_norm, schedule=schedule)


def _plain_sgd_(
    params: Params, grads: Params, state: SgdState, call: UpdateCall, *, lr: float, momentum: float, nesterov: bool
) -> None:
    """Compute torch's SGD update in plain operations, for transforms of torch.func, unsupported by its kernel."""
    skipped = call.skipped.bool()
    for name, p in params.items():
        grad = grads[name] if call.scale is None else grads[name] / call.scale
        if momentum:
            total = momentum * state.momentum[name] + grad
            state.momentum[name].copy_(torch.where(skipped, state.momentum[name], total))
            grad = grad + momentum * total if nesterov else total
        p.copy_(torch.where(skipped, p, p - lr * grad))


def decay_(params: Sequence[Tensor], rate: float, skipped: Tensor) -> None:
    """Multiply parameters in place by 1 - `rate`; by 1 if `skipped` (0-d) is 1."""
    for p in params:
        p.mul_(1.0 - rate * (1.0 - skipped.to(p)))


def _laid_out_as(param: Tensor, grad: Tensor) -> Tensor:
    """Lay out a gradient with the strides of its parameter, since torch's kernel walks both in memory order."""
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)


def from_function(
    init: Callable[[Params], Any],
    fn: Callable[[Params, Params, Any, float], tuple[Params, Any]],
    *,
    max_grad_norm: float | None = 1.0,
) -> Optimizer:
    """Make an optimizer of a plain function `fn(params, grads, state, step) -> (params, state)`, which changes no
    argument.

    Gradients come clipped, and all trees are this rank's shards where a mesh cuts parameters: a function that is not
    elementwise, or by blocks, would be wrong there. The state is a tree of tensors, see `Optimizer`; `init(params)`
    makes it.
    """

    def write_(params: Params, grads: Params, state: Any, call: UpdateCall) -> Any:
        if call.scale is not None:
            grads = {name: g.div_(call.scale) for name, g in grads.items()}
        skipped = call.skipped.bool()
        old, new = (params, state), fn(params, grads, state, call.step)
        chosen = tree.map(lambda x, y: torch.where(skipped, x, y), old, tuple(new))  # may share memory
        tree.map(Tensor.copy_, old, chosen)
        return state

    return clipped(init, write_, max_grad_norm=max_grad_norm)


def kept_on_host(optimizer: Optimizer, lane: Lane) -> Optimizer:
    """Wrap an optimizer so that its state is on the host between updates, and on the lane's device, all of it, during
    an update.

    AdamW has a kernel for this that takes less of the device's memory: `offload.offloaded_adamw`.
    """

    def update(
        params: Params, grads: Params, state: Any, step: float, *, mesh: Mesh, donate: bool = False
    ) -> tuple[Params, Any, Metrics]:
        home = tree.donate(state) if donate else copied(state)
        params, after, report = optimizer.update(params, grads, to_device(home, lane), step, mesh=mesh, donate=donate)
        lane.store(tree.tensors(after), tree.tensors(home))
        lane.settle()
        return params, home, report

    return optimizer._replace(init=lambda params: to_host(optimizer.init(params)), update=update)
