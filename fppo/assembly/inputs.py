"""The inputs of a run apart from its weights, opened together so that one error names all problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fppo import data
from fppo.assembly.adapters import check_export
from fppo.assembly.environments import episode_prompts, maker_of
from fppo.assembly.functions import (
    Advantage,
    advantage_of,
    check_laws,
    check_own_kernels,
    curriculum_of,
    optimizer_of,
    policy_loss,
)
from fppo.assembly.parts import (
    axes_at,
    bare_model,
    check_base,
    check_kernels,
    check_length,
    check_mesh,
    check_positions,
    check_vision,
    device_of,
    kernels_need_check,
    kernels_of,
    mesh_at,
)
from fppo.assembly.rewards import check_scorers, reward_of
from fppo.assembly.teacher import check_teacher
from fppo.assembly.texts import (
    chat_options,
    config_of,
    config_place,
    eval_sampling_of,
    load_images,
    load_tokenizer,
    policy_generation,
    sampling_of,
)
from fppo.assembly.trials import value_problems
from fppo.data import Curriculum, DataCursor, Learn, PromptSet
from fppo.data.cursor import Order
from fppo.data.examples import check_fields
from fppo.data.privileged import TEACHER_PROMPT
from fppo.data.problems import lines_of, together
from fppo.fields import Problem, only
from fppo.key import Key
from fppo.models.model import Model
from fppo.pipeline.checks import Usage
from fppo.pipeline.program import LearnOfPrompts, learn_nothing
from fppo.rewards.functions import WeightedSum
from fppo.rewards.truths import check_truths
from fppo.rollout import saved
from fppo.rollout.engine import Sampling
from fppo.rollout.turns import tools
from fppo.rollout.vllm.families import check_family
from fppo.rollout.vllm.vision import check_videos
from fppo.runtime.mesh import Mesh
from fppo.settings import checks, files
from fppo.settings.component import Functions, parts
from fppo.settings.learning import CriticSettings
from fppo.settings.model import ModelSettings
from fppo.settings.modules import kernels_named
from fppo.settings.reward import RewardSettings
from fppo.settings.rollout import EnvironmentSettings, RolloutSettings
from fppo.settings.train import DataSettings, EvalSettings, LogSettings, TrainSettings
from fppo.workers.imports import imported, search
from fppo_kernels.table import Kernels

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Drawing:
    """How prompts are drawn from the cursor `begin` on: by the user's order, or by a curriculum that `learn`
    updates."""

    order: Order | None = None
    curriculum: Curriculum | None = None
    begin: DataCursor = attrs.field(factory=DataCursor)
    learn: LearnOfPrompts = learn_nothing


@attrs.frozen(kw_only=True)
class EvalInputs:
    """The inputs of an evaluation on held-out prompts, opened as the settings name them."""

    device: torch.device
    kernels: Kernels
    tokenizer: PreTrainedTokenizerBase
    held_out: PromptSet
    sampling: Sampling


@attrs.frozen(kw_only=True)
class Inputs:
    """The inputs of a run, opened as the settings name them."""

    device: torch.device  # what models work on
    kernels: Kernels
    advantage: Advantage
    tokenizer: PreTrainedTokenizerBase
    images: data.ImageReader | None
    generation: GenerationConfig  # exported with the policy
    prompts: PromptSet
    drawing: Drawing
    loggers: Mapping[str, Callable[..., Any]]  # those of the user's, by name
    observers: Mapping[str, Callable[..., Any]]  # the same
    sampling: Sampling
    eval: EvalInputs | None  # None without held-out prompts

    @property
    def texts(self) -> Any:
        """The processor, which has the tokenizer too, of a model that takes images; else the tokenizer."""
        return self.tokenizer if self.images is None else self.images.processor


def read_inputs(
    settings: TrainSettings, *, mesh: Mesh, kernels: Kernels | None = None, device: torch.device | None = None
) -> Inputs:
    """Open everything that the settings name; `kernels` and `device`, if given, replace theirs.

    Raises SettingsError that names all problems at once.
    """
    search(settings.module_dirs)
    tried = Tried()
    check = settings.check and kernels is None  # kernels that are compared with others may be wrong
    model, rows, rollout, names = settings.model, settings.data, settings.rollout, kernels_named(settings)
    device = device or tried(lambda: device_of(settings.device, settings.placement))
    kernels = kernels or tried(lambda: kernels_of(names))
    actor, algorithm, before = settings.actor, settings.algorithm, len(tried.problems)
    tried(lambda: policy_loss(actor.loss))
    advantage = tried(lambda: advantage_of(algorithm, kernels or Kernels.named()))
    tried(lambda: _check_values(parts(settings), checks.problems(settings)))
    tried(lambda: _check_rewards(settings.reward, rollout))
    watching = tried(lambda: watching_of(settings.log))
    tried(lambda: _check_saved(rollout, until=settings.steps, routed=algorithm.routed))
    if check and advantage is not None and device is not None and len(tried.problems) == before:
        law = partial(check_laws, actor.loss, algorithm.advantage, advantage, names, kernels or Kernels.named())
        others = {"reference": settings.uses_reference, "teacher": settings.uses_teacher}
        named = _models_named(model, critic=settings.uses_critic_model, **others)
        built = _builders(model, settings.critic if algorithm.uses_critic else None, named)
        use = _usage(model, rows, rollout, device, built.values, in_turns=settings.in_turns)
        tried(lambda: law(use))
    tokenizer, generation, images = _text_tools(model, rows, tried)
    prompts = tried(lambda: _prompts(rows, rollout.environment, tokenizer, images))
    held_out = tried(lambda: _held_out(rows, settings.eval, rollout.environment, tokenizer, images))
    tried(lambda: _check_truths(settings.reward, rollout, prompts, held_out))
    _check_models(settings, tokenizer, [x for x in (prompts, held_out) if x is not None], mesh, tried)
    privileged = settings.critic.privileged if settings.uses_critic_model else None
    others = {"reference": settings.uses_reference, "teacher": settings.uses_teacher}
    _check_rows(model, rollout, settings.eval, privileged, others, (prompts, held_out), tried)
    tried(lambda: check_export(model, tokenizer if images is None else images.processor, generation))
    sampling = tried(lambda: sampling_of(rollout, tokenizer, generation))
    eval_sampling = tried(lambda: eval_sampling_of(settings.eval, rollout, tokenizer, generation, like=sampling))
    drawing = None if prompts is None else tried(lambda: drawing_of(rows, prompts, Key(settings.seed).fold("data")))
    if tried.problems:
        raise tried.error()
    assert device is not None and kernels is not None and advantage is not None and watching is not None  # noqa: PT018
    assert prompts is not None and sampling is not None and eval_sampling is not None  # noqa: PT018
    assert drawing is not None
    common = {"device": device, "kernels": kernels, "tokenizer": tokenizer}
    return Inputs(
        **common,
        advantage=advantage,
        images=images,
        generation=generation,
        prompts=prompts,
        drawing=drawing,
        loggers=watching["loggers"],
        observers=watching["observers"],
        sampling=sampling,
        eval=None if held_out is None else EvalInputs(**common, held_out=held_out, sampling=eval_sampling),
    )


def _usage(
    section: ModelSettings,
    rows: DataSettings,
    rollout: RolloutSettings,
    device: torch.device,
    models: Callable[[], Iterable[Callable[[], Model]]],
    *,
    in_turns: bool,
) -> Usage:
    """How a run uses its losses and kernels, so that they are checked under its own conditions. `models` returns the
    functions that build the run's models."""
    return Usage(
        group=rollout.n,
        dtype=getattr(torch, section.compute_dtype),
        device=device,
        models=lambda: [build() for build in models()],
        temperature=rollout.temperature,
        longest=None if in_turns else rows.max_prompt_tokens + rollout.max_tokens,
    )


def _text_tools(
    model: ModelSettings, rows: DataSettings, tried: Tried
) -> tuple[PreTrainedTokenizerBase, GenerationConfig, data.ImageReader | None]:
    """The policy's tokenizer, its generation config, and the reader of images if there are any. Raises SettingsError
    with all problems so far if prompts cannot be read."""
    tokenizer = tried(lambda: load_tokenizer(model, rows))
    if tokenizer is None:
        raise tried.error()
    generation = tried(lambda: policy_generation(model, rows, tokenizer))
    images = tried(lambda: load_images(model, rows, tokenizer))
    if rows.seen and images is None:
        raise tried.error()
    return tokenizer, generation or GenerationConfig(), images


def read_eval_inputs(settings: TrainSettings, *, mesh: Mesh, device: torch.device | None = None) -> EvalInputs:
    """Open the inputs of an evaluation, without those that only training needs. Raises SettingsError that names all
    problems at once."""
    search(settings.module_dirs)
    tried = Tried()
    device, names = device or tried(lambda: device_of(settings.device, settings.placement)), kernels_named(settings)
    kernels = tried(lambda: kernels_of(names))
    if settings.check and kernels is not None and device is not None:
        sections = settings.model, settings.data, settings.rollout
        use = _usage(*sections, device, lambda: [partial(bare_model, settings.model)], in_turns=settings.in_turns)
        tried(lambda: check_own_kernels(names, kernels, use))
    tried(lambda: _check_rewards(settings.reward, settings.rollout))
    tokenizer = tried(lambda: load_tokenizer(settings.model, settings.data))
    if tokenizer is None:
        raise tried.error()
    images = tried(lambda: load_images(settings.model, settings.data, tokenizer))
    held_out = None
    if not settings.data.seen or images is not None:
        sections = settings.data, settings.eval, settings.rollout.environment
        held_out = tried(lambda: _held_out(*sections, tokenizer, images))
        tried(lambda: _check_truths(settings.reward, settings.rollout, held_out))
    generation = tried(lambda: policy_generation(settings.model, settings.data, tokenizer)) or GenerationConfig()
    sampling = tried(lambda: eval_sampling_of(settings.eval, settings.rollout, tokenizer, generation))
    _check_models(settings, tokenizer, [] if held_out is None else [held_out], mesh, tried, trained=False)
    none = {"reference": False, "teacher": False}
    _check_rows(settings.model, settings.rollout, settings.eval, None, none, (None, held_out), tried)
    if tried.problems:
        raise tried.error()
    assert device is not None and kernels is not None  # noqa: PT018
    assert held_out is not None and sampling is not None  # noqa: PT018
    return EvalInputs(device=device, kernels=kernels, tokenizer=tokenizer, held_out=held_out, sampling=sampling)


class Tried:
    """The problems of several attempts, collected."""

    def __init__(self) -> None:
        self.problems: list[Exception] = []

    def __call__(self, act: Callable[[], T]) -> T | None:
        """Return the result of `act`; if it raises ValueError or OSError, note the error and return None."""
        try:
            return act()
        except (ValueError, OSError) as error:
            self.problems.append(error)
            return None

    def error(self) -> files.SettingsError:
        """One SettingsError with all the problems collected; its cause is the first."""
        found = together(self.problems)
        lines = [x.problems if isinstance(x, files.SettingsError) else lines_of(x) for x in found]
        whole = files.SettingsError(list(dict.fromkeys(line for each in lines for line in each)))
        whole.__cause__ = self.problems[0]
        return whole


def _prompts(
    rows: DataSettings,
    environment: EnvironmentSettings,
    tokenizer: PreTrainedTokenizerBase,
    images: data.ImageReader | None,
) -> PromptSet:
    """The prompts to train on: rows of data or, without any, empty ones that the environment fills."""
    if environment.used and not rows.path and rows.rows is None:
        return episode_prompts(environment.episodes, tokenizer)
    return load_prompts(rows, tokenizer, images)


def _held_out(
    rows: DataSettings,
    how: EvalSettings,
    environment: EnvironmentSettings,
    tokenizer: PreTrainedTokenizerBase,
    images: data.ImageReader | None,
) -> PromptSet | None:
    """The prompts to evaluate on: rows of data, or empty ones that the environment fills; None without either."""
    count, most = environment.eval_episodes, how.max_prompts
    if not environment.has_held_out:
        return load_held_out(rows, how, tokenizer, images) if rows.has_held_out else None
    return episode_prompts(count if most is None else min(count, most), tokenizer)


def read_data(section: DataSettings, problems: data.Problems) -> Sequence[data.Row]:
    """The rows to train on; faulty ones are noted in `problems`. Raises ValueError."""
    fn = section.rows
    if fn is None:
        return data.read_rows(section.path, **only(section, "split", "stream"), problems=problems)
    return data.rows_of(imported(fn, "data.rows")(), fn, problems=problems)


def load_prompts(
    section: DataSettings, tokenizer: PreTrainedTokenizerBase, images: data.ImageReader | None = None
) -> PromptSet:
    """The prompts to train on, with a teacher's own prompts in their extras. Raises ValueError that names every faulty
    row."""
    problems = data.Problems()
    rows = read_data(section, problems)
    encode = partial(data.encode_rows, rows, tokenizer, pad_token=section.pad_token, chat=chat_options(section))
    check_fields(rows, {"data.teacher_prompt": section.teacher_prompt}, problems)
    own = only(section, "max_prompt_tokens", "over_long")
    prompts = encode(fields=section.fields, images=images, problems=problems, **own)
    if section.teacher_prompt is None:
        return prompts
    fields = attrs.evolve(section.fields, prompt=section.teacher_prompt)
    try:
        taught = encode(fields=fields, max_prompt_tokens=section.teacher_prompt_tokens)
    except ValueError as error:
        raise ValueError(f"data.teacher_prompt = {section.teacher_prompt!r}: {error}") from error
    tokens = dict(zip(taught.ids, taught.tokens, strict=True))
    extras = ({**extra, TEACHER_PROMPT: [*tokens[i]]} for i, extra in zip(prompts.ids, prompts.extras, strict=True))
    return attrs.evolve(prompts, extras=tuple(extras))


def load_held_out(
    section: DataSettings, how: EvalSettings, tokenizer: PreTrainedTokenizerBase, images: data.ImageReader | None = None
) -> PromptSet:
    """The prompts to evaluate on. Raises ValueError that names every faulty row."""
    own = {"path": section.eval_path, "split": section.eval_split, "rows": section.eval_rows}
    prompts = load_prompts(attrs.evolve(section, **own), tokenizer, images)
    limit = how.max_prompts
    return prompts if limit is None or limit >= len(prompts) else data.select(prompts, range(limit))


def order_of(name: str | None, prompts: PromptSet, key: Key) -> Order | None:
    """The order of prompts by epoch, from the user's function `name`; None without one.

    The first epoch's order is computed at once. Raises ValueError if the function does not import or its order is
    invalid.
    """
    if name is None:
        return None
    own = imported(name, "data.sampler")

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return data.checked_order(own(prompts, epoch, key.fold("epoch", epoch)), len(prompts), f"data.sampler {name!r}")

    order(0)
    return order


def drawing_of(section: DataSettings, prompts: PromptSet, key: Key) -> Drawing:
    """How the settings want these prompts drawn. Raises ValueError for an order or a curriculum that does not import,
    is invalid, or does not fit the prompts."""
    curriculum = curriculum_of(section.curriculum)
    if curriculum is None:
        return Drawing(order=order_of(section.sampler, prompts, key))
    try:
        begin, learn = data.begin_course(curriculum, prompts), Learn.of(curriculum, prompts)
    except ValueError as error:
        raise ValueError(f"data.curriculum = {section.curriculum.name!r}: {error}") from error
    return Drawing(curriculum=curriculum, begin=begin, learn=learn)


def watching_of(section: LogSettings) -> dict[str, dict[str, Callable[..., Any]]]:
    """The user's own loggers and observers, by name. Raises ValueError for one that does not import."""
    return {
        "loggers": {name: imported(name, "log.loggers") for name in section.loggers if ":" in name},
        "observers": {name: imported(name, "log.observers") for name in section.observers},
    }


def _check_values(named: Iterable[tuple[str, Any, Functions]], known: Sequence[Problem]) -> None:
    """Check the functions that settings name, given as (path, part, functions of its kind). Raises SettingsError naming
    all keywords that a function refuses, and what is named as an optimizer but does not import or is none. Keywords of
    parts with `known` problems are not tried."""
    every, tried = [*named], Tried()
    wrong = [str(problem) for problem in value_problems(every, known)]
    for path, part, _ in every:
        if path in ("actor.optimizer", "critic.optimizer") and not part.keywords:  # else it was tried
            tried(partial(optimizer_of, part, 1, setting=path))
    if wrong or tried.problems:
        raise files.SettingsError([*wrong, *map(str, tried.problems)])


def _check_saved(section: RolloutSettings, *, until: int, routed: bool) -> None:
    """Raises ValueError if saved rollouts do not suffice up to step `until`."""
    if section.from_ is not None:
        saved.check(Path(section.from_), until=until, rows=section.batch_size, routed=routed)


def _check_rewards(reward: RewardSettings, rollout: RolloutSettings) -> None:
    """Raises ValueError for rewards, tools and environments that the settings name and that do not exist."""
    if reward.functions:
        reward_of(reward, {}, max_tokens=rollout.max_tokens)
    if rollout.turns.respond is not None:
        tools.resolve(rollout.turns.respond)
    if rollout.environment.used:
        maker_of(rollout.environment)


def _check_truths(reward: RewardSettings, rollout: RolloutSettings, *prompt_sets: PromptSet | None) -> None:
    """Raises DataError for ground truths that a reward function cannot score, or would never score 1. Invalid rewards
    are reported elsewhere."""
    try:
        functions = reward_of(reward, {}, max_tokens=rollout.max_tokens) if reward.functions else WeightedSum(())
    except ValueError:
        return
    rows = (zip(x.ids, x.ground_truths, strict=True) for x in prompt_sets if x is not None)
    check_truths(functions, chain.from_iterable(rows))


def _models_named(
    section: ModelSettings, *, critic: bool, reference: bool, teacher: bool
) -> dict[str, tuple[str, str]]:
    """The model path of the actor and of each other used role with a path of its own, and the setting that gives it, by
    role."""
    paths = {
        "critic": (section.critic_path if critic else None, "model.critic_path"),
        "reference": (section.ref_path if reference else None, "model.ref_path"),
        "teacher": (section.teacher_path if teacher else None, "model.teacher_path"),
    }
    own = {role: (path, setting) for role, (path, setting) in paths.items() if path is not None}
    return {"actor": (section.path, "model.path")} | own


def _builders(
    section: ModelSettings, critic: CriticSettings | None, named: Mapping[str, tuple[str, str]]
) -> Mapping[str, Callable[[], Model]]:
    """Functions that build the models without parameters, by role: for the actor, for the critic if its section is
    given, and for reference and teacher if `named` holds their paths."""
    built = {"actor": partial(bare_model, section)}
    if critic is not None:
        built["critic"] = partial(bare_model, section, critic)
    others = {role: named[role][0] for role in ("reference", "teacher") if role in named}
    return built | {role: partial(bare_model, attrs.evolve(section, path=path)) for role, path in others.items()}


def _check_rows(
    section: ModelSettings,
    rollout: RolloutSettings,
    how: EvalSettings,
    privileged: int | None,
    others: Mapping[str, bool],
    sets: tuple[PromptSet | None, PromptSet | None],
    tried: Tried,
) -> None:
    """Note models made for fewer positions than the longest row may have: the policy, a critic with `privileged` more
    tokens (None: it has no model), and the `others` in use. `sets` are the prompts to train on and those held out; an
    environment's own prompts are not known, so only their responses count."""
    trained, most, has_critic = ("rollout.max_tokens", rollout.max_tokens), how.max_tokens, privileged is not None
    evaluated = trained if most is None else ("eval.max_tokens", most)
    named = _models_named(section, critic=has_critic, **others)
    named |= {"critic": named["actor"]} if has_critic and "critic" not in named else {}
    for role, place in named.items():
        extra = (privileged or 0) if role == "critic" else 0
        for of, response in zip(sets, (trained, evaluated if role == "actor" else None), strict=True):
            if of is not None and response is not None:
                longest = _longest(of, taught=role == "teacher") + extra
                tried(partial(_check_row, section, place, longest, response))


def _check_row(section: ModelSettings, place: tuple[str, str], longest: int, response: tuple[str, int]) -> None:
    check_positions(config_of(section, config_place(*place)), longest, response, place=place)


def _longest(prompts: PromptSet, *, taught: bool) -> int:
    """Tokens of the longest prompt, or of the longest of the teacher's prompts if `taught`."""
    own = (extra.get(TEACHER_PROMPT) if taught else None for extra in prompts.extras)
    return max(len(tokens if of is None else of) for tokens, of in zip(prompts.tokens, own, strict=True))


def _check_models(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    prompt_sets: list[PromptSet],
    mesh: Mesh,
    tried: Tried,
    *,
    trained: bool = True,
) -> None:
    """Note in `tried` all models that do not fit the tokenizer, each other, the prompts, the mesh or the longest row.
    `trained`: the run trains; else it only evaluates, without critic and reference."""
    section, rollout, critic, placement = settings.model, settings.rollout, settings.critic, settings.placement
    names, critic_model = kernels_named(settings), trained and settings.uses_critic_model
    others = {"reference": trained and settings.uses_reference, "teacher": settings.uses_teacher}
    named = _models_named(section, critic=critic_model, **others)
    pool = mesh_at(placement, "reward", mesh)
    tried(lambda: check_scorers(settings.reward, section, tokenizer, mesh, pool=pool, rows=settings.data))
    configs = tried(lambda: {role: config_of(section, config_place(*place)) for role, place in named.items()})
    if configs is None:
        return
    reads = settings.in_turns or critic.privileged > 0
    own = {role: config for role, config in configs.items() if role != "teacher"}
    tried(lambda: data.check_vocabulary(tokenizer, own, any_text=reads))
    if "teacher" in configs:
        tried(lambda: check_teacher(section, tokenizer, configs))
    if rollout.engine == "vllm":
        over, alone = rollout.vllm.tensor_parallel, section.lora.send == "alone"
        tried(lambda: check_family(configs["actor"], tensor_parallel=over, alone=alone))
    if tried(lambda: kernels_need_check(names, compiled=section.compile_layers)):
        own_critic = critic if trained and settings.algorithm.uses_critic else None
        for role, build in _builders(section, own_critic, named).items():
            axes = axes_at(placement, role, settings.mesh)
            tried(lambda build=build, axes=axes: check_kernels(names, build(), axes))
    of_critic = "critic" if "critic" in configs else "actor" if critic_model else None
    of_policy = {"critic": critic_model, "reference": trained}
    for role in (*configs, *(role for role, used in of_policy.items() if used and role not in configs)):
        asked = configs.get(role, configs["actor"]), *(mesh_at(placement, role, mesh) if trained else ("", mesh))
        tried(partial(check_mesh, *asked))
        if role == "actor" or (role == "critic" and section.lora.of_critic):
            tried(partial(check_base, section.lora.base, *asked))
    for role, config in configs.items():
        privileged = critic.privileged if role == of_critic else 0
        if role == "teacher" and settings.data.teacher_prompt is not None:
            privileged = max(0, settings.data.teacher_prompt_tokens - settings.data.max_prompt_tokens)
        tried(partial(check_length, config, settings.data, rollout, settings.eval, privileged))
        tried(partial(check_vision, section, config))
    for prompts in prompt_sets:
        if rollout.engine == "vllm" and settings.data.videos is not None:
            tried(lambda prompts=prompts: check_videos(bare_model(section), prompts))
        tried(lambda prompts=prompts: data.check_tokens(prompts, data.vocabulary_size(configs["actor"])))
