"""How actor and critic learn: from settings to optimizers, loops and updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import attrs
import torch

from fppo import tree
from fppo.assembly.functions import optimizer_of
from fppo.assembly.parts import Tools, micro_batching_of
from fppo.fields import only
from fppo.models.model import Model, Params
from fppo.pipeline.gap import HoldExact, Then, WatchUpdate
from fppo.pipeline.measure import Measured
from fppo.pipeline.program import UpdateStage
from fppo.runtime.layout import Layout
from fppo.runtime.mapped import to_files
from fppo.runtime.offload import HostActivations, Lane, Offloaded, to_host
from fppo.settings.learning import ActorSettings, CriticSettings, OptimizerSettings
from fppo.settings.model import Offload
from fppo.settings.rollout import RolloutSettings
from fppo.steps.clock import Clock, Timeline
from fppo.steps.host_step import HostStep, Kernel, on_host
from fppo.steps.loop import Loop
from fppo.steps.loss_scale import loss_scaled
from fppo.steps.optimizers import Optimizer
from fppo.steps.outputs import Forward
from fppo.steps.train_state import TrainState, check_cuts, init_state

# k3 divergence per token of two computations of the same log-probs, 0.01 (float32) or 0.3 (16 bits) apart
_EXACT_GAP, _COARSE_GAP = 1e-4, 0.05
Watch = tuple[float, Then]  # the largest gap to the engine that is tolerated, and what to do beyond it


@attrs.frozen
class Learning:
    """How a role learns in a run: its optimizer, its number of updates, its loop, and what is offloaded to the host."""

    role: Literal["actor", "critic"]
    optimizer: OptimizerSettings
    updates: int  # in the whole run, by the settings; the clock corrects it as the run learns more (`steps.clock`)
    loop: Loop
    offload: Offload  # of the state, between uses
    offload_activations: bool
    moments_directory: str | None = None  # of the files that what the optimizer keeps on the host is in; None: none

    def optimizer_on(self, tools: Tools, model: Model | None) -> Optimizer:
        """The role's optimizer, with the kernels of this process's `tools`, and with a loss scale for a model that
        computes in float16. Raises ValueError for a mesh whose cuts of parameters cannot be those of its state."""
        half = model is not None and model.compute_dtype == torch.float16
        by_step, lane = self.offload == "optimizer_step", tools.lane

        def make(wrap: Callable[[Kernel], Kernel]) -> Optimizer:
            optimizer = optimizer_of(
                self.optimizer,
                self.updates,
                setting=f"{self.role}.optimizer",
                kernel=wrap(tools.kernels.adamw),
                on_host=None if by_step or self.offload == "none" else lane,
            )
            return loss_scaled(optimizer) if half else optimizer

        if model is not None and model.state_layout is not None:
            self._check_cuts(model.state_layout)
        if by_step:
            return on_host(make, lane, fixed=() if model is None else model.untrained_params)
        return make(lambda kernel: kernel)

    def _check_cuts(self, layout: Layout) -> None:
        setting, name = f"{self.role}.optimizer", self.optimizer.name
        try:
            check_cuts(optimizer_of(self.optimizer, self.updates, setting=setting), layout)
        except ValueError as error:
            raise ValueError(f"{setting}.name = {name!r}: {error}") from error

    def state(self, params: Params, optimizer: Optimizer) -> TrainState:
        """The state before the first update, with a clock for its schedule."""
        if self.offload == "optimizer_step":  # moments begin there
            params = to_host(params)
        state = init_state(params, optimizer, token_budget=self.loop.micro_batching.halved_from)
        state = tree.replace(state, clock=Clock())
        if self.offload == "none":
            return state
        opt = to_host(state.opt) if self.offload in ("moments", "all") else state.opt
        if self.moments_directory is not None:
            opt = to_files(opt, Path(self.moments_directory), setting="model.moments_directory")
        return tree.replace(state, opt=opt, params=to_host(params) if self.offload == "all" else params)

    def measured(self, update: UpdateStage, forward: Forward, lane: Lane) -> UpdateStage:
        """Wrap the update: it reports its FLOPs per second, counted from the model's pass `forward`, as metrics, and
        `lane` moves its state and activations to the host and back as the settings say."""
        if self.offload_activations:
            update = HostActivations(update, lane)
        if self.offload == "all":
            update = Offloaded(update, lane)
        if self.offload == "optimizer_step":
            update = HostStep(update, lane, forward)
        return Measured(stage=update, role=self.role, forward=forward, epochs=self.loop.epochs)


def learning_of(
    role: Literal["actor", "critic"],
    section: ActorSettings | CriticSettings,
    *,
    batch_size: int,
    n: int,
    steps: int,
    offload: Offload,
    offload_activations: bool,
    moments_directory: str | None,
) -> Learning:
    """How the actor or the critic learns in `steps` steps from batches of `batch_size` sequences, `n` per prompt."""
    optimizer, updates = section.optimizer, steps * section.updates(batch_size, n)
    warmup = optimizer.warmup(updates)
    constant = optimizer.schedule == "constant" and not warmup
    loop = Loop(
        mini_batch_size=section.mini_batch(batch_size, n),
        micro_batching=micro_batching_of(section),
        **only(section, "epochs", "weight_mode", "horizon"),
        balance_rate=section.experts.bias_rate if isinstance(section, ActorSettings) else 0.0,
        by_prompt=section.draw_by == "prompt",
        timeline=None if constant else Timeline(warmup, updates),
    )
    return Learning(role, optimizer, updates, loop, offload, offload_activations, moments_directory)


def watch_of(rollout: RolloutSettings, compute_dtype: str) -> Watch | None:
    """The largest divergence between the engine's policy and the trainer's that their dtypes explain, and what to do
    beyond it; None if it is not watched."""
    if rollout.gap == "off" or rollout.from_ is not None:
        return None
    exact = {compute_dtype, rollout.vllm.dtype or compute_dtype} == {"float32"}
    return (_EXACT_GAP if exact else _COARSE_GAP), rollout.gap


def update_watch(rollout: RolloutSettings, compute_dtype: str, loop: Loop) -> Callable[..., UpdateStage] | None:
    """A wrapper for the actor's update stage, which compares the engine's log-probs with those of the update; None if
    nothing is compared."""
    if rollout.exact:
        return HoldExact
    watch = watch_of(rollout, compute_dtype)
    if watch is None or loop.epochs > 1 or loop.mini_batch_size < rollout.batch_size:
        return None
    return partial(WatchUpdate, limit=watch[0], then=watch[1])
