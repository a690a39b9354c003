"""From settings to optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fppo.assembly.parts import offload_of
from fppo.runtime.offload import Lane, offloaded_adamw
from fppo.settings.component import bound
from fppo.settings.learning import OptimizerSettings
from fppo.settings.tables import OPTIMIZERS
from fppo.settings.train import TrainSettings
from fppo.steps.clock import Timeline
from fppo.steps.optimizers import Optimizer, kept_on_host
from fppo.steps.schedules import schedule
from fppo_kernels.adamw import adamw_
from fppo_kernels.table import Kernels


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
    return optimizer_of(
        section.optimizer,
        updates_of(settings, role),
        setting=f"{role}.optimizer",
        kernel=kernels.adamw,
        on_host=on_host,
    )


def updates_of(settings: TrainSettings, role: Literal["actor", "critic"]) -> int:
    """The updates of one of them in the whole run, as far as settings know: the actor has none while the critic warms
    up. What a run knows better its clock says (`steps.clock`)."""
    batch_size, section = settings.rollout.batch_size, settings.actor if role == "actor" else settings.critic
    first = settings.critic.warmup_steps + settings.critic.pretrain if settings.algorithm.uses_critic else 0
    steps = settings.steps - (first if role == "actor" else 0)
    return steps * section.epochs * batch_size // section.mini_batch(batch_size)


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
    setting: str,
    kernel: Callable[..., None] = adamw_,
    on_host: Lane | None = None,
) -> Optimizer:
    """The optimizer for a run of `updates` updates, AdamW by the `kernel`. Its state is on the host if it has a lane.

    `setting` is what errors call the section. Raises ValueError for a function of the user's that does not import or
    makes no optimizer, and what the optimizer's function says of its keywords.
    """
    rate = schedule(
        settings.schedule,
        settings.lr,
        total_steps=updates,
        warmup_steps=settings.warmup_steps,
        min_ratio=settings.min_lr_ratio,
    )
    (make,) = bound(settings, OPTIMIZERS, setting)
    if settings.name == "adamw":
        return make(rate, kernel=kernel if on_host is None else offloaded_adamw(kernel, on_host))
    optimizer = make(rate)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{setting}.name = {settings.name!r}: it returned a {type(optimizer).__name__}: called with a schedule, it "
            "must return an fppo.steps.optimizers.Optimizer; from_function makes one of a plain function"
        )
    return optimizer if on_host is None else kept_on_host(optimizer, on_host)
