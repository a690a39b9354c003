"""From settings to a supervised run: demonstrations, model and update, bound once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fppo import data, tree
from fppo.assembly.adapters import base_of_role, bases_of, check_export, load_policy
from fppo.assembly.announce import optimizer_lines, supervised_lines
from fppo.assembly.functions import check_own_kernels, optimizer_of
from fppo.assembly.inputs import Tried, read_data, watching_of
from fppo.assembly.learning import Learning, learning_of
from fppo.assembly.machine import resolved
from fppo.assembly.parts import Tools, bare_model, check_kernels, check_mesh, device_of, kernels_of
from fppo.assembly.roles import PassOptions, fetch_of
from fppo.assembly.run import PromptRecord
from fppo.assembly.texts import chat_options, config_of, config_place, load_tokenizer, policy_generation
from fppo.data import DataCursor, DemonstrationSet
from fppo.data.conversations import digest_of_demonstrations
from fppo.data.examples import Answers
from fppo.fields import only
from fppo.fleet import Call, Here
from fppo.key import Key
from fppo.models.lengths import positions
from fppo.models.model import Model
from fppo.pipeline.checks import Usage
from fppo.pipeline.passes import PolicyFn
from fppo.pipeline.program import RunState
from fppo.pipeline.supervised import EvaluateLoss, Imitation
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane
from fppo.settings import files
from fppo.settings.learning import ActorSettings
from fppo.settings.model import ModelSettings
from fppo.settings.modules import kernels_named
from fppo.settings.placement import AxesSettings
from fppo.settings.sft import SftSettings
from fppo.settings.train import DataSettings, EvalSettings, LogSettings, TrainSettings, sized_for_sft
from fppo.steps.supervised import Demonstrations, UpdateSupervised, demonstrations
from fppo.steps.train_state import whole_shapes
from fppo.workers.imports import search
from fppo_kernels.table import Kernels

COMMAND = "fppo sft"


@attrs.frozen(kw_only=True)
class SupervisedInputs:
    """The inputs of a supervised run, opened as the settings name them."""

    device: torch.device
    kernels: Kernels
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    rows: DemonstrationSet
    held_out: DemonstrationSet | None
    loggers: Mapping[str, Callable[..., Any]]  # those of the user's, by name
    observers: Mapping[str, Callable[..., Any]]

    @property
    def texts(self) -> PreTrainedTokenizerBase:
        """The tokenizer, which an export holds beside the model."""
        return self.tokenizer


@attrs.frozen(kw_only=True)
class SupervisedAssembly:
    """A supervised run before its first step, and what it was made from."""

    run: RunState
    imitation: Imitation
    evaluate: EvaluateLoss | None
    inputs: SupervisedInputs
    model: Model
    mesh: Mesh
    device: torch.device
    shapes: dict[str, torch.Size | Extent]  # whole shapes of the leaves of `run` that a mesh may cut
    drawn: PromptRecord
    critic_model: None = None
    placed: None = None
    calls: Callable[[], list[Call]] = list


def read_supervised(
    section: ModelSettings,
    rows: DataSettings,
    sft: SftSettings,
    how: EvalSettings,
    log: LogSettings,
    *,
    names: Mapping[str, str],
    axes: AxesSettings,
    mesh: Mesh,
    device: torch.device | None,
    tried: Tried,
) -> SupervisedInputs:
    """Open everything that a supervised run reads, weights apart, with kernels by the settings in `names`.

    Raises SettingsError that names all problems, with those already in `tried`; a missing `device` is one of them.
    """
    kernels = tried(lambda: kernels_of(names))
    tried(lambda: optimizer_of(sft.optimizer, 1, setting="sft.optimizer"))
    watching = tried(lambda: watching_of(log))
    tokenizer = tried(lambda: load_tokenizer(section, rows))
    if tokenizer is None:
        raise tried.error()
    generation = tried(lambda: policy_generation(section, rows, tokenizer))
    tried(lambda: check_export(section, tokenizer, generation or GenerationConfig()))
    made = tried(lambda: load_demonstrations(rows, sft, tokenizer))
    held_out = tried(lambda: _held_out(rows, sft, how.max_prompts, tokenizer))
    config = tried(lambda: config_of(section, config_place(section.path, "model.path")))
    if config is not None:
        tried(lambda: data.check_vocabulary(tokenizer, {"actor": config}))
        tried(lambda: check_mesh(config, "", mesh))
        for each in (made, held_out):
            tried(lambda each=each: _check_ids(each, data.vocabulary_size(config)))
            tried(lambda each=each: _check_positions(each, positions(config), section.path))
        tried(lambda: check_kernels(names, bare_model(section), axes))
    if tried.problems:
        raise tried.error()
    assert device is not None and kernels is not None and watching is not None  # noqa: PT018
    assert generation is not None and made is not None  # noqa: PT018
    return SupervisedInputs(
        device=device,
        kernels=kernels,
        tokenizer=tokenizer,
        generation=generation,
        rows=made,
        held_out=held_out,
        loggers=watching["loggers"],
        observers=watching["observers"],
    )


def load_demonstrations(
    section: DataSettings, sft: SftSettings, tokenizer: PreTrainedTokenizerBase
) -> DemonstrationSet:
    """The demonstrations to train on. Raises ValueError that names every faulty row."""
    problems = data.Problems()
    return data.encode_demonstrations(
        read_data(section, problems),
        tokenizer,
        fields=attrs.evolve(section.fields, ground_truth=None),
        answers=Answers(**only(sft, "response", "messages", "turns")),
        max_tokens=sft.max_tokens,
        **only(section, "over_long", "pad_token"),
        chat=chat_options(section),
        problems=problems,
    )


def _held_out(
    section: DataSettings, sft: SftSettings, most: int | None, tokenizer: PreTrainedTokenizerBase
) -> DemonstrationSet | None:
    """The held-out demonstrations; None if the settings name none."""
    if not section.has_held_out:
        return None
    own = {"path": section.eval_path, "split": section.eval_split, "rows": section.eval_rows}
    found = load_demonstrations(attrs.evolve(section, **own), sft, tokenizer)
    return attrs.evolve(found, rows=found.rows[:most], ids=found.ids[:most], sources=found.sources[:most])


def _check_ids(found: DemonstrationSet | None, vocabulary: int) -> None:
    """Raise ValueError for token ids that the model has no embedding for, naming the rows."""
    problems = data.Problems()
    for row, name in zip(found.rows, found.ids, strict=True) if found is not None else ():
        largest = max(*row.prompt, *row.response)
        if largest >= vocabulary:
            problems.add(f"token id {largest} is outside the model's vocabulary of {vocabulary}", at=name)
    problems.check("demonstrations")


def _check_positions(found: DemonstrationSet | None, most: int | None, path: str) -> None:
    """Raise ValueError for rows of more tokens than the model was made for, naming them."""
    problems = data.Problems()
    if found is None or most is None:
        return
    for row, name in zip(found.rows, found.ids, strict=True):
        if (size := row.num_tokens) > most:
            text = f"{size} tokens, and model.path = {path!r} has {most} positions (max_position_embeddings)"
            problems.add(f"{text}; with sft.max_tokens = {most} and data.over_long such rows are left out", at=name)
    problems.check("demonstrations")


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
    section, sft, key, tried = settings.model, settings.sft, Key(settings.seed), Tried()
    search(settings.module_dirs)
    inputs = read_supervised(
        *(section, settings.data, sft, settings.eval, settings.log),
        names=kernels_named(settings),
        axes=settings.mesh,
        mesh=mesh,
        device=device or tried(lambda: device_of(settings.device, settings.placement)),
        tried=tried,
    )
    device = inputs.device
    if settings.check:
        use = Usage(group=1, dtype=getattr(torch, section.compute_dtype), device=device, longest=sft.max_tokens)
        use = attrs.evolve(use, models=lambda: [bare_model(section)])
        check_own_kernels(kernels_named(settings), inputs.kernels, use)
    settings = attrs.evolve(settings, steps=_steps(sft, settings.steps, len(inputs.rows)))
    counts = {"demonstrations": inputs.rows, "held out": inputs.held_out}
    announce(supervised_lines(device, section, counts, settings.steps, sft.batch_size, chosen))
    tools, learning = Tools(inputs.kernels, Lane(device)), _learning(sft, section, settings.steps)
    model, params = load_policy(section, settings.critic, key, mesh, device)
    if said := optimizer_lines("sft", sft.optimizer, model):
        announce(said)
    optimizer = learning.optimizer_on(tools, model)
    passes = _pass_options(section, learning)
    here = Here(mesh, device)
    forward = attrs.evolve(passes.forward(here, tools.kernels, model), share_prompts=False)
    update: Any = UpdateSupervised(forward=forward, loop=learning.loop, optimizer=optimizer)
    state = learning.state(params, optimizer)
    run = RunState(actor=state, key=key, bases=bases_of({"actor": base_of_role(section, "actor", model)}))
    policy = passes.policy(forward, None, fetch_of(learning.offload, tools.lane), "rollout")
    return settings, SupervisedAssembly(
        run=run,
        imitation=Imitation(
            draw=partial(_next, inputs.rows, sft.batch_size, key.fold("data"), device, settings.data.shuffle),
            update=learning.measured(update, forward, tools.lane),
            steps=settings.steps,
        ),
        evaluate=_evaluation(inputs.held_out, sft.batch_size, device, policy),
        inputs=inputs,
        model=model,
        mesh=mesh,
        device=device,
        shapes={f".actor{path}": extent for path, extent in whole_shapes(state, model.extents).items()},
        drawn=_drawn(inputs, may_change=settings.data.may_change),
    )


def _drawn(inputs: SupervisedInputs, *, may_change: bool) -> PromptRecord:
    """The demonstrations that the run draws from."""
    held_out = {} if inputs.held_out is None else {"held-out prompts": inputs.held_out}
    sets = {"prompts": inputs.rows, **held_out}
    return PromptRecord(sets, may_change=may_change, digests_of=digest_of_demonstrations, made_by=COMMAND)


def _steps(sft: SftSettings, steps: int, rows: int) -> int:
    """The steps of a run: `steps`, or enough for the settings' epochs over `rows` rows. Raises SettingsError for a
    warm-up that does not end before the run."""
    steps = steps if sft.epochs is None else math.ceil(rows * sft.epochs / sft.batch_size)
    if sft.optimizer.warmup_steps >= steps:
        text = f"must be less than the run's {steps} updates"
        raise files.SettingsError([f"sft.optimizer.warmup_steps = {sft.optimizer.warmup_steps}: {text}"])
    return steps


def _learning(sft: SftSettings, section: ModelSettings, steps: int) -> Learning:
    """How the policy learns: one update for each batch."""
    names = ("weight_mode", "horizon", "micro_batch_size", "token_budget", "optimizer")
    actor = ActorSettings(**only(sft, *names), mini_batch_size=sft.batch_size)
    how = {"batch_size": sft.batch_size, "n": 1, "steps": steps}
    return learning_of("actor", actor, **how, **only(section, "offload", "offload_activations"))


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
