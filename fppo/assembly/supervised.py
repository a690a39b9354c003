"""From settings to a supervised run: demonstrations, model and update, bound once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from fppo import data, devices, tree
from fppo.assembly.adapters import base_of_role, bases_of, load_policy
from fppo.assembly.announce import optimizer_lines, supervised_lines
from fppo.assembly.checks import IMITATE, check_sft_kernels
from fppo.assembly.inputs import Inputs
from fppo.assembly.learning import Learning, learning_of
from fppo.assembly.machine import resolved
from fppo.assembly.parts import Tools
from fppo.assembly.roles import PassOptions, fetch_of
from fppo.assembly.run import PromptRecord
from fppo.data import DataCursor, DemonstrationSet
from fppo.data.conversations import digest_of_demonstrations
from fppo.fields import only
from fppo.fleet import Call, Here
from fppo.key import Key
from fppo.models.model import Model
from fppo.pipeline.passes import PolicyFn
from fppo.pipeline.program import RunState
from fppo.pipeline.supervised import EvaluateLoss, Imitation, imitate_steps
from fppo.pipeline.train import StepsOf
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane
from fppo.settings import files
from fppo.settings.checks_sft import rate_problems
from fppo.settings.learning import ActorSettings
from fppo.settings.model import ModelSettings
from fppo.settings.sft import SftSettings
from fppo.settings.train import TrainSettings, sized_for_sft
from fppo.steps.supervised import Demonstrations, UpdateSupervised, demonstrations
from fppo.steps.train_state import whole_shapes

COMMAND = "fppo sft"


@attrs.frozen(kw_only=True)
class SupervisedAssembly:
    """A supervised run before its first step, and what it was made from."""

    run: RunState
    imitation: Imitation
    evaluate: EvaluateLoss | None
    inputs: Inputs
    model: Model
    mesh: Mesh
    device: torch.device
    shapes: dict[str, torch.Size | Extent]  # whole shapes of the leaves of `run` that a mesh may cut
    drawn: PromptRecord
    critic_model: None = None
    placed: None = None
    calls: Callable[[], list[Call]] = list

    @property
    def steps(self) -> Callable[..., StepsOf]:
        """The steps from a state."""
        return partial(imitate_steps, imitation=self.imitation, mesh=self.mesh)


def assemble_supervised(
    settings: TrainSettings,
    *,
    mesh: Mesh = LOCAL,
    device: torch.device | None = None,
    announce: Callable[[Sequence[str]], None] = lambda lines: None,
) -> tuple[TrainSettings, SupervisedAssembly]:
    """The resolved settings, with the number of steps, and the supervised run that they describe, before its first
    step. Invalid settings are raised before any work."""
    model, chosen = resolved(sized_for_sft(settings), device)
    settings = attrs.evolve(settings, model=model.model)
    section, sft, key = settings.model, settings.sft, Key(settings.seed)
    inputs = Inputs(settings=settings, mesh=mesh, own_device=device).need(*IMITATE).need(check_sft_kernels)
    device, rows, held_out = inputs.device, inputs.demonstrations, inputs.held_out_demonstrations
    settings = attrs.evolve(settings, steps=_steps(sft, settings.steps, len(rows)))
    counts = {"demonstrations": rows, "held out": held_out}
    announce(supervised_lines(device, section, counts, settings.steps, sft.batch_size, chosen))
    tools, learning = Tools(inputs.kernels, Lane(device)), _learning(sft, section, settings.steps)
    model, params = load_policy(section, settings.critic, key, mesh, device)
    if said := optimizer_lines("sft", sft.optimizer, model):
        announce(said)
    optimizer = learning.optimizer_on(tools, model)
    passes = _pass_options(section, learning)
    here, home = Here(mesh, device), devices.home_of(device)
    forward = attrs.evolve(passes.forward(here, tools.kernels, model), share_prompts=False)
    update: Any = UpdateSupervised(forward=forward, loop=learning.loop, optimizer=optimizer)
    state = learning.state(params, optimizer)
    run = RunState(actor=state, key=key, bases=bases_of({"actor": base_of_role(section, "actor", model)}))
    policy = passes.policy(forward, None, fetch_of(learning.offload, tools.lane), "rollout")
    return settings, SupervisedAssembly(
        run=run,
        imitation=Imitation(
            draw=partial(_next, rows, sft.batch_size, key.fold("data"), home, settings.data.shuffle),
            update=learning.measured(update, forward, tools.lane),
            steps=settings.steps,
        ),
        evaluate=_evaluation(held_out, sft.batch_size, home, policy),
        inputs=inputs,
        model=model,
        mesh=mesh,
        device=device,
        shapes={f".actor{path}": extent for path, extent in whole_shapes(state, model.extents).items()},
        drawn=_drawn(rows, held_out, may_change=settings.data.may_change),
    )


def _drawn(rows: DemonstrationSet, held_out: DemonstrationSet | None, *, may_change: bool) -> PromptRecord:
    """The demonstrations that the run draws from."""
    sets = {"prompts": rows} if held_out is None else {"prompts": rows, "held-out prompts": held_out}
    return PromptRecord(sets, may_change=may_change, digests_of=digest_of_demonstrations, made_by=COMMAND)


def _steps(sft: SftSettings, steps: int, rows: int) -> int:
    """The steps of a run: `steps`, or enough for the settings' epochs over `rows` rows. Raises SettingsError for a
    learning rate whose course does not fit into them."""
    steps = steps if sft.epochs is None else math.ceil(rows * sft.epochs / sft.batch_size)
    if wrong := [*map(str, rate_problems(sft.optimizer, "sft.optimizer", steps, f"the run's {steps} updates"))]:
        raise files.SettingsError(wrong)
    return steps


def _learning(sft: SftSettings, section: ModelSettings, steps: int) -> Learning:
    """How the policy learns: one update for each batch."""
    names = ("weight_mode", "horizon", "micro_batch_size", "token_budget", "optimizer")
    actor = ActorSettings(**only(sft, *names), mini_batch_size=sft.batch_size)
    how = {"batch_size": sft.batch_size, "n": 1, "steps": steps}
    return learning_of("actor", actor, **how, **only(section, "offload", "offload_activations", "moments_directory"))


def _pass_options(section: ModelSettings, learning: Learning) -> PassOptions:
    return PassOptions(
        **only(section, "remove_padding"),
        share_prompts=False,
        graphs=False,
        micro_batching=learning.loop.micro_batching,
        temperature=1.0,
        replay="none",
    )


def _evaluation(
    held_out: DemonstrationSet | None, size: int, device: torch.device, policy: PolicyFn
) -> EvaluateLoss | None:
    """The evaluation of the policy on held-out demonstrations, `size` at a time; None if none are held out."""
    if held_out is None:
        return None
    return EvaluateLoss(batches=partial(_batches, held_out, size, device), policy=policy)


def _next(
    rows: DemonstrationSet, size: int, key: Key, device: torch.device, shuffle: bool, cursor: DataCursor
) -> tuple[Demonstrations, DataCursor]:
    """The next demonstrations, on the device, and the cursor after them."""
    indices, after = data.next_indices(len(rows), cursor, size=size, key=key, shuffle=shuffle)
    return collated(rows, indices, device), after


def _batches(rows: DemonstrationSet, size: int, device: torch.device) -> Iterator[tuple[Demonstrations, list[str]]]:
    """All demonstrations in order, with their sources."""
    for start in range(0, len(rows), size):
        indices = range(start, min(start + size, len(rows)))
        yield collated(rows, indices, device), [rows.sources[i] for i in indices]


def collated(rows: DemonstrationSet, indices: Sequence[int], device: torch.device) -> Demonstrations:
    """The demonstrations at `indices` as a record on the device."""
    chosen = [rows.rows[i] for i in indices]
    record = demonstrations(
        [list(x.prompt) for x in chosen],
        [list(x.response) for x in chosen],
        pad_token_id=rows.pad_token_id,
        imitated=[x.mask for x in chosen],
    )
    return tree.map(lambda x: x.to(device), record)
