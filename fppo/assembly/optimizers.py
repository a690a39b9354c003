"""From settings to optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fppo.assembly.parts import offload_of
from fppo.runtime.offload import Lane, offloaded_adamw
from fppo.settings import checks, files
from fppo.settings.optimizer import OptimizerSettings
from fppo.settings.train import TrainSettings
from fppo.steps.clock import Timeline
from fppo.steps.muon import muon
from fppo.steps.optimizers import Optimizer, adamw, kept_on_host, sgd
from fppo.steps.schedules import schedule
from fppo.workers.imports import imported
from fppo_kernels.adamw import adamw_
from fppo_kernels.record import Kernels


def optimizers_of(settings: TrainSettings, kernels: Kernels, lane: Lane | None) -> dict[str, Optimizer]:
    """The optimizers of actor and critic. What the settings keep on the host goes by the lane; without one it stays on
    the device."""
    return {role: optimizer_for(settings, role, kernels, lane) for role in ("actor", "critic")}


def optimizer_for(
    settings: TrainSettings, role: Literal["actor", "critic"], kernels: Kernels, lane: Lane | None
) -> Optimizer:
    """The optimizer of one of them."""
    section = settings.actor if role == "actor" else settings.critic
    on_host = None if offload_of(settings, role) == "none" else lane
    return optimizer_of(section.optimizer, updates_of(settings, role), kernel=kernels.adamw, on_host=on_host)


def updates_of(settings: TrainSettings, role: Literal["actor", "critic"]) -> int:
    """The updates of one of them in the whole run, as far as settings know: the actor has none while the critic warms
    up. What a run knows better its clock says (`steps.clock`)."""
    batch_size, section = settings.rollout.batch_size, settings.actor if role == "actor" else settings.critic
    first = settings.critic.warmup_steps + settings.critic.pretrain if checks.uses_critic(settings) else 0
    steps = settings.steps - (first if role == "actor" else 0)
    return steps * section.epochs * batch_size // files.mini_batch_size(section, batch_size)


def timeline_of(settings: TrainSettings, role: Literal["actor", "critic"]) -> Timeline | None:
    """The schedule of one of them, for its clock; None if its rate stays the same."""
    section = (settings.actor if role == "actor" else settings.critic).optimizer
    if section.schedule == "constant" and not section.warmup_steps:
        return None
    return Timeline(section.warmup_steps, updates_of(settings, role))


def optimizer_of(
    settings: OptimizerSettings,
    updates: int,
    *,
    kernel: Callable[..., None] = adamw_,
    on_host: Lane | None = None,
) -> Optimizer:
    """The optimizer for a run of `updates` updates, AdamW by the `kernel`. Its state is on the host if it has a lane.

    Raises ValueError for a function of the user's that does not import, or makes no optimizer.
    """
    rate = schedule(
        settings.schedule,
        settings.lr,
        total_steps=updates,
        warmup_steps=settings.warmup_steps,
        min_ratio=settings.min_lr_ratio,
    )
    clip, betas, decay = settings.max_grad_norm or None, (settings.beta1, settings.beta2), settings.weight_decay
    if settings.name == "adamw":
        kernel = kernel if on_host is None else offloaded_adamw(kernel, on_host)
        return adamw(rate, betas=betas, eps=settings.eps, weight_decay=decay, max_grad_norm=clip, kernel=kernel)
    if settings.name == "sgd":
        optimizer = sgd(rate, momentum=settings.momentum or 0.0, weight_decay=decay, max_grad_norm=clip)
    elif settings.name == "muon":
        momentum = 0.95 if settings.momentum is None else settings.momentum
        optimizer = muon(rate, momentum=momentum, betas=betas, eps=settings.eps, weight_decay=decay, max_grad_norm=clip)
    else:
        optimizer = imported(settings.name, "optimizer")(rate)
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer {settings.name!r} returned a {type(optimizer).__name__}: called with a schedule, it must "
                "return an fppo.steps.optimizers.Optimizer; from_function makes one of a plain function"
            )
    return optimizer if on_host is None else kept_on_host(optimizer, on_host)
