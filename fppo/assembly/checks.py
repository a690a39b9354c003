"""Checks of a run before any weights are read: its functions, and how models, tokenizer, rows and mesh fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import attrs
import torch
from transformers import GenerationConfig

from fppo import data
from fppo.assembly.adapters import check_export, shape_of
from fppo.assembly.environments import maker_of
from fppo.assembly.functions import advantage_of, check_laws, check_own_kernels, distill_term, optimizer_of, policy_loss
from fppo.assembly.inputs import Check, Inputs, attempt, or_none
from fppo.assembly.parts import (
    axes_at,
    bare_model,
    check_base,
    check_kernels,
    check_length,
    check_mesh,
    check_positions,
    check_vision,
    kernels_need_check,
    mesh_at,
)
from fppo.assembly.rewards import check_scorers
from fppo.assembly.rows import check_ids, check_row_lengths
from fppo.assembly.teacher import check_adapter, check_teacher
from fppo.assembly.texts import config_of, config_place
from fppo.assembly.trials import value_problems
from fppo.data import PromptSet
from fppo.data.privileged import TEACHER_PROMPT
from fppo.fields import module_function
from fppo.models.lengths import positions
from fppo.models.model import Model
from fppo.pipeline.checks import Usage
from fppo.rewards.truths import check_truths
from fppo.rollout import saved
from fppo.rollout.turns import tools
from fppo.rollout.vllm.families import check_family
from fppo.rollout.vllm.vision import check_videos
from fppo.settings import checks, files
from fppo.settings.component import parts
from fppo.settings.learning import OptimizerSettings
from fppo.settings.model import is_adapter, whole_teachers
from fppo.settings.modules import kernels_named
from fppo.settings.train import TrainSettings
from fppo.steps.outputs import Top
from fppo.workers.imports import imported
from fppo_kernels.table import Kernels

Build = Callable[[], Model]


def check_functions(inputs: Inputs) -> Iterator[Check]:
    """Try the functions that the settings name. If nothing is wrong with any, the user's own are held to the laws that
    are quick to check."""
    s = inputs.settings
    kernels = or_none(lambda: inputs.kernels) or Kernels.named()
    attempt(_functions(inputs, kernels))
    if s.check and inputs.own_kernels is None:  # kernels that are compared with others may be wrong
        use, advantage = _usage(inputs, _builders(inputs).values()), advantage_of(s.algorithm, kernels)
        yield partial(check_laws, s.actor.loss, s.algorithm.advantage, advantage, kernels_named(s), kernels, use)


def _functions(inputs: Inputs, kernels: Kernels) -> Iterator[Check]:
    s = inputs.settings
    yield partial(policy_loss, s.actor.loss)
    yield partial(advantage_of, s.algorithm, kernels)
    yield partial(_check_values, s)
    if s.actor.distill.used:
        yield partial(distill_term, s.actor.distill, Top(1, 1))
    for name, path in ((s.data.teacher_function, "data.teacher_prompt"), (s.model.teacher_by, "model.teacher_by")):
        if name is not None and module_function(name) is None:
            yield partial(imported, name, path)
    optimizers = {path: part for path, part, _ in parts(s) if path in ("actor.optimizer", "critic.optimizer")}
    for path, part in optimizers.items():
        if isinstance(part, OptimizerSettings) and not part.keywords:  # else its values are checked
            yield partial(optimizer_of, part, 1, setting=path)
    yield partial(check_rewards, inputs)
    yield lambda: inputs.loggers
    yield lambda: inputs.observers
    if s.rollout.from_ is not None:
        how = {"until": s.steps, "rows": s.rollout.batch_size, "routed": s.algorithm.routed}
        yield partial(saved.check, Path(s.rollout.from_), **how)


def _check_values(settings: TrainSettings) -> None:
    """Raise SettingsError for keywords that named functions refuse. Those with other problems are not tried."""
    if wrong := value_problems(parts(settings), checks.problems(settings)):
        raise files.SettingsError(wrong)


def check_kernels_alone(inputs: Inputs) -> None:
    """Hold the user's own kernels to the laws that are quick to check, as an evaluation uses them."""
    if inputs.settings.check:
        use = _usage(inputs, [partial(bare_model, inputs.settings.model)])
        check_own_kernels(kernels_named(inputs.settings), inputs.kernels, use)


def _usage(inputs: Inputs, models: Iterable[Build]) -> Usage:
    """How a run uses its losses and kernels, so that they are checked under its own conditions. `models` build the
    run's models."""
    section, rows, rollout = inputs.settings.model, inputs.settings.data, inputs.settings.rollout
    return Usage(
        group=rollout.n,
        dtype=getattr(torch, section.compute_dtype),
        device=inputs.device,
        models=lambda: [build() for build in models],
        temperature=rollout.temperature,
        longest=None if inputs.settings.in_turns else rows.max_prompt_tokens + rollout.max_tokens,
    )


def check_rewards(inputs: Inputs) -> None:
    """Try the rewards, the tool and the environment that the settings name."""
    rollout = inputs.settings.rollout
    _ = inputs.rewards
    if rollout.turns.respond is not None:
        tools.resolve(rollout.turns.respond)
    if rollout.environment.used:
        maker_of(rollout.environment)


def check_ground_truths(inputs: Inputs) -> None:
    """Raise DataError for ground truths that a reward function cannot score, or would never score 1. Rewards that are
    wrong are reported elsewhere."""
    rewards = or_none(lambda: inputs.rewards)
    rows = (zip(x.ids, x.ground_truths, strict=True) for x in _prompt_sets(inputs) if x is not None)
    if rewards is not None:
        check_truths(rewards, chain.from_iterable(rows))


def _prompt_sets(inputs: Inputs) -> tuple[PromptSet | None, PromptSet | None]:
    """The prompts to train on, and those held out; None for those that are not read, or wrong."""
    return or_none(lambda: inputs.prompts) if inputs.trains else None, or_none(lambda: inputs.held_out)


def _places(inputs: Inputs) -> dict[str, tuple[str, str]]:
    """The model path of the actor and of each other used role with a path of its own, and the setting that gives it, by
    role."""
    s, section = inputs.settings, inputs.settings.model
    used = {
        "critic": (inputs.trains and s.uses_critic_model, section.critic_path, "model.critic_path"),
        "reference": (inputs.trains and s.uses_reference, section.ref_path, "model.ref_path"),
        "teacher": (s.loads_teacher, section.teacher_path, "model.teacher_path"),
    }
    if s.loads_teacher:
        named = whole_teachers(section).items()
        used |= {f"teacher {name}": (True, path, f"model.teachers.{name}") for name, path in named}
    own = {role: (path, setting) for role, (is_used, path, setting) in used.items() if is_used and path is not None}
    return {"actor": (section.path, "model.path")} | own


def is_teacher(role: str) -> bool:
    """Whether a role is a teacher's, or that of one of several, which their names tell apart."""
    return role.partition(" ")[0] == "teacher"


def _builders(inputs: Inputs) -> Mapping[str, Build]:
    """Functions that build the models without parameters, by role: those of actor and critic, and of reference and
    teacher if they have paths of their own."""
    s, section, places = inputs.settings, inputs.settings.model, _places(inputs)
    built = {"actor": partial(bare_model, section)}
    if inputs.trains and s.algorithm.uses_critic:
        built["critic"] = partial(bare_model, section, s.critic)
    others = {role: path for role, (path, _) in places.items() if role == "reference" or is_teacher(role)}
    return built | {role: partial(bare_model, attrs.evolve(section, path=path)) for role, path in others.items()}


def check_models(inputs: Inputs) -> Iterator[Check]:
    """Hold all models against the tokenizer, each other, the mesh and the longest row that settings allow."""
    s, tokenizer, mesh = inputs.settings, inputs.tokenizer, inputs.mesh
    section, critic, placement = s.model, s.critic, s.placement
    yield partial(check_scorers, inputs, mesh_at(placement, "reward", mesh))
    configs = {role: config_of(section, config_place(*place)) for role, place in _places(inputs).items()}
    own = {role: config for role, config in configs.items() if not is_teacher(role)}
    yield partial(data.check_vocabulary, tokenizer, own, any_text=s.in_turns or critic.privileged > 0)
    places = _places(inputs)
    for role in filter(is_teacher, configs):
        yield partial(check_teacher, section, tokenizer, {**configs, "teacher": configs[role]}, places[role])
    for name, path in section.teachers.items() if s.loads_teacher else ():
        if is_adapter(path):
            yield partial(check_adapter, section, tokenizer, (path, f"model.teachers.{name}"))
    if s.rollout.engine == "vllm":
        how = {"tensor_parallel": s.rollout.vllm.tensor_parallel, "alone": section.lora.send == "alone"}
        yield partial(check_family, configs["actor"], **how)
    yield partial(_kernel_checks, inputs)
    of_critic = "critic" if "critic" in configs else "actor" if inputs.trains and s.uses_critic_model else None
    of_policy = {"critic": inputs.trains and s.uses_critic_model, "reference": inputs.trains}
    for role in (*configs, *(role for role, used in of_policy.items() if used and role not in configs)):
        asked = (
            configs.get(role, configs["actor"]),
            *(mesh_at(placement, role.partition(" ")[0], mesh) if inputs.trains else ("", mesh)),
        )
        yield partial(check_mesh, *asked)
        if role == "actor" or (role == "critic" and section.lora.of_critic):
            yield partial(check_base, section.lora.base, *asked)
    for role, config in configs.items():
        privileged = critic.privileged if role == of_critic else 0
        if is_teacher(role) and s.data.teacher_prompt is not None:
            privileged = max(0, s.data.teacher_prompt_tokens - s.data.max_prompt_tokens)
        yield partial(check_length, config, s.data, s.rollout, s.eval, privileged)
        yield partial(check_vision, section, config)
    for prompts in _prompt_sets(inputs):
        if prompts is not None and s.rollout.engine == "vllm" and s.data.videos is not None:
            yield lambda prompts=prompts: check_videos(bare_model(section), prompts)
        if prompts is not None:
            yield partial(data.check_tokens, prompts, data.vocabulary_size(configs["actor"]))


def _kernel_checks(inputs: Inputs) -> Iterator[Check]:
    names, s = kernels_named(inputs.settings), inputs.settings
    if kernels_need_check(names, compiled=s.model.compile_layers) or s.model.mlp_slice_tokens is not None:
        for role, build in _builders(inputs).items():
            axes = axes_at(s.placement, role.partition(" ")[0], s.mesh)
            yield lambda build=build, axes=axes: check_kernels(names, build(), axes)


def check_rows(inputs: Inputs) -> Iterator[Check]:
    """Hold each model's positions against the longest row that it may read. An environment's own prompts are not known,
    so only their responses count."""
    s, places = inputs.settings, _places(inputs)
    trained, most = ("rollout.max_tokens", s.rollout.max_tokens), s.eval.max_tokens
    evaluated = trained if most is None else ("eval.max_tokens", most)
    has_critic = inputs.trains and s.uses_critic_model
    places |= {"critic": places["actor"]} if has_critic and "critic" not in places else {}
    for role, place in places.items():
        extra = s.critic.privileged if role == "critic" else 0
        for of, response in zip(_prompt_sets(inputs), (trained, evaluated if role == "actor" else None), strict=True):
            if of is not None and response is not None:
                longest = _longest(of, taught=is_teacher(role)) + extra
                yield partial(_check_row, inputs, place, longest, response)


def _check_row(inputs: Inputs, place: tuple[str, str], longest: int, response: tuple[str, int]) -> None:
    check_positions(config_of(inputs.settings.model, config_place(*place)), longest, response, place=place)


def _longest(prompts: PromptSet, *, taught: bool) -> int:
    """Tokens of the longest prompt, or of the longest of the teacher's prompts if `taught`."""
    own = (extra.get(TEACHER_PROMPT) if taught else None for extra in prompts.extras)
    return max(len(tokens if of is None else of) for tokens, of in zip(prompts.tokens, own, strict=True))


def check_files(inputs: Inputs) -> None:
    """Raise ValueError for an adapter, a tokenizer or a processor that the policy's export cannot hold, and for a
    critic's adapter that does not fit it."""
    generation = or_none(lambda: inputs.generation) or GenerationConfig()
    check_export(inputs.settings.model, inputs.texts, generation)
    if inputs.trains and inputs.settings.uses_critic_model and inputs.settings.model.lora.of_critic:
        shape_of(inputs.settings.model, inputs.settings.critic)


def check_sft_optimizer(inputs: Inputs) -> None:
    """Try the optimizer of a supervised run."""
    optimizer_of(inputs.settings.sft.optimizer, 1, setting="sft.optimizer")


def check_sft_kernels(inputs: Inputs) -> None:
    """Hold the user's own kernels to the laws that are quick to check, as a supervised run uses them."""
    s = inputs.settings
    if s.check:
        how = {"dtype": getattr(torch, s.model.compute_dtype), "models": lambda: [bare_model(s.model)]}
        use = Usage(group=1, device=inputs.device, longest=s.sft.max_tokens, **how)
        check_own_kernels(kernels_named(s), inputs.kernels, use)


def check_demonstrations(inputs: Inputs) -> Iterator[Check]:
    """Hold a supervised run's demonstrations and mesh against its model."""
    s, config = inputs.settings, inputs.config
    yield partial(data.check_vocabulary, inputs.tokenizer, {"actor": config})
    yield partial(check_mesh, config, "", inputs.mesh)
    sets = or_none(lambda: inputs.demonstrations), or_none(lambda: inputs.held_out_demonstrations)
    for each in filter(None, sets):
        yield partial(check_ids, each, data.vocabulary_size(config))
        yield partial(check_row_lengths, each, positions(config), s.model.path)
    yield lambda: check_kernels(kernels_named(s), bare_model(s.model), s.mesh)


TRAIN = (
    *(Inputs.device, Inputs.kernels, check_functions),
    *(Inputs.tokenizer, Inputs.generation, Inputs.images, Inputs.prompts, Inputs.held_out, check_ground_truths),
    *(check_models, check_rows, check_files),
    *(Inputs.sampling, Inputs.eval_sampling, Inputs.drawing),
)
EVALUATE = (
    *(Inputs.device, Inputs.kernels, check_kernels_alone, check_rewards),
    *(Inputs.tokenizer, Inputs.images, Inputs.held_out, check_ground_truths),
    *(Inputs.generation, Inputs.eval_sampling, check_models, check_rows),
)
IMITATE = (
    *(Inputs.device, Inputs.kernels, check_sft_optimizer, Inputs.loggers, Inputs.observers),
    *(Inputs.tokenizer, Inputs.generation, check_files),
    *(Inputs.demonstrations, Inputs.held_out_demonstrations, check_demonstrations),
)
