"""All that a run is made from but its weights: looked at as a whole, so that one error names all that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import attrs
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fppo import data
from fppo.assembly.environments import episode_prompts, maker_of
from fppo.assembly.optimizers import optimizers_of
from fppo.assembly.parts import (
    bare_model,
    check_base,
    check_kernels,
    check_length,
    check_mesh,
    check_vision,
    device_of,
    kernels_of,
    lacks_something,
    mesh_at,
)
from fppo.assembly.program import advantage_of, functions_of, policy_loss
from fppo.assembly.rewards import check_scorers, reward_of
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
from fppo.data import PromptSet
from fppo.data.cursor import Order
from fppo.data.problems import together
from fppo.fields import only
from fppo.key import Key
from fppo.pipeline.estimators import AdvantageFn
from fppo.rollout import saved
from fppo.rollout.engine import Sampling
from fppo.rollout.turns import tools
from fppo.rollout.vllm.families import check_family
from fppo.rollout.vllm.vision import check_videos
from fppo.runtime.mesh import Mesh
from fppo.settings import files
from fppo.settings.reward import RewardSettings
from fppo.settings.rollout import RolloutSettings
from fppo.settings.train import DataSettings, EvalSettings, TrainSettings
from fppo.workers.imports import imported, search
from fppo_kernels.table import Kernels

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class EvalInputs:
    """The inputs of an evaluation, opened as the settings name them."""

    device: torch.device
    kernels: Kernels
    tokenizer: PreTrainedTokenizerBase
    held_out: PromptSet
    sampling: Sampling


@attrs.frozen(kw_only=True)
class Inputs:
    """The inputs of a run, opened as the settings name them."""

    device: torch.device
    kernels: Kernels
    advantage: Callable[[Mapping[str, float]], AdvantageFn]
    tokenizer: PreTrainedTokenizerBase
    images: data.ImageReader | None
    generation: GenerationConfig
    prompts: PromptSet
    order: Order | None
    sampling: Sampling
    eval: EvalInputs | None  # None without held-out prompts


def read_inputs(
    settings: TrainSettings, *, mesh: Mesh, kernels: Kernels | None = None, device: torch.device | None = None
) -> Inputs:
    """All of it. Raises SettingsError that names everything that is wrong. `kernels` stand in for those that the
    settings name, and `device` for the one they name."""
    search(settings.module_dirs)
    tried = _Tried()
    check = settings.check and kernels is None  # kernels that are compared with others may be wrong
    device = device or tried(lambda: device_of(settings))
    kernels = kernels or tried(lambda: kernels_of(settings))
    advantage = _functions(settings, kernels, device, tried, check=check)
    tokenizer = tried(lambda: load_tokenizer(settings.model, settings.data))
    if tokenizer is None:
        raise tried.error()
    generation = tried(lambda: policy_generation(settings.model, settings.data, tokenizer))
    ends = generation or GenerationConfig()
    images = tried(lambda: load_images(settings.model, settings.data, tokenizer))
    if settings.data.seen and images is None:
        raise tried.error()
    prompts = tried(lambda: _prompts(settings, tokenizer, images))
    there = settings.has_held_out
    held_out = tried(lambda: _held_out(settings, tokenizer, images)) if there else None
    _check_models(settings, tokenizer, [x for x in (prompts, held_out) if x is not None], mesh, tried)
    sampling = tried(lambda: sampling_of(settings.rollout, tokenizer, ends))
    eval_sampling = tried(lambda: eval_sampling_of(settings.eval, settings.rollout, tokenizer, ends, like=sampling))
    order = (
        None
        if prompts is None
        else tried(lambda: order_of(settings.data.sampler, prompts, Key(settings.seed).fold("data")))
    )
    if tried.problems:
        raise tried.error()
    assert device is not None and kernels is not None and advantage is not None  # noqa: PT018
    assert prompts is not None and sampling is not None and eval_sampling is not None  # noqa: PT018
    evaluation = None
    if held_out is not None:
        evaluation = EvalInputs(
            device=device, kernels=kernels, tokenizer=tokenizer, held_out=held_out, sampling=eval_sampling
        )
    return Inputs(
        device=device,
        kernels=kernels,
        advantage=advantage,
        tokenizer=tokenizer,
        images=images,
        generation=ends,
        prompts=prompts,
        order=order,
        sampling=sampling,
        eval=evaluation,
    )


def read_eval_inputs(settings: TrainSettings, *, mesh: Mesh, device: torch.device | None = None) -> EvalInputs:
    """The inputs of an evaluation, and none for training alone. Raises SettingsError with everything that is wrong."""
    search(settings.module_dirs)
    tried = _Tried()
    device = device or tried(lambda: device_of(settings))
    kernels = tried(lambda: kernels_of(settings))
    tried(lambda: _check_rewards(settings.reward, settings.rollout))
    tokenizer = tried(lambda: load_tokenizer(settings.model, settings.data))
    if tokenizer is None:
        raise tried.error()
    images = tried(lambda: load_images(settings.model, settings.data, tokenizer))
    held_out = None
    if not settings.data.seen or images is not None:
        held_out = tried(lambda: _held_out(settings, tokenizer, images))
    generation = tried(lambda: policy_generation(settings.model, settings.data, tokenizer)) or GenerationConfig()
    sampling = tried(lambda: eval_sampling_of(settings.eval, settings.rollout, tokenizer, generation))
    _check_models(settings, tokenizer, [] if held_out is None else [held_out], mesh, tried, trained=False)
    if tried.problems:
        raise tried.error()
    assert device is not None and kernels is not None  # noqa: PT018
    assert held_out is not None and sampling is not None  # noqa: PT018
    return EvalInputs(device=device, kernels=kernels, tokenizer=tokenizer, held_out=held_out, sampling=sampling)


class _Tried:
    """The problems of several attempts, collected."""

    def __init__(self) -> None:
        self.problems: list[Exception] = []

    def __call__(self, act: Callable[[], T]) -> T | None:
        """The result of `act`; None, and its error noted, if it fails in a way that a user can mend."""
        try:
            return act()
        except (ValueError, OSError) as error:
            self.problems.append(error)
            return None

    def error(self) -> files.SettingsError:
        """One error for all of them, with the first one's place."""
        found = together(self.problems)
        lines = [x.problems if isinstance(x, files.SettingsError) else (str(x),) for x in found]
        whole = files.SettingsError(list(dict.fromkeys(line for each in lines for line in each)))
        whole.__cause__ = self.problems[0]
        return whole


def _prompts(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, images: data.ImageReader | None) -> PromptSet:
    """The prompts to train on: rows, or without any those that the environment fills."""
    section, rows = settings.rollout.environment, settings.data
    if section.used and not rows.path and rows.rows is None:
        return episode_prompts(section.episodes, tokenizer)
    return load_prompts(rows, tokenizer, images)


def _held_out(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, images: data.ImageReader | None
) -> PromptSet:
    """The prompts to evaluate on: rows, or those that the environment fills."""
    count, most = settings.rollout.environment.eval_episodes, settings.eval.max_prompts
    if not count:
        return load_held_out(settings.data, settings.eval, tokenizer, images)
    return episode_prompts(count if most is None else min(count, most), tokenizer)


def load_prompts(
    section: DataSettings, tokenizer: PreTrainedTokenizerBase, images: data.ImageReader | None = None
) -> PromptSet:
    """The prompts to train on. Raises ValueError that names every faulty row."""
    problems, fn = data.Problems(), section.rows
    if fn is None:
        rows = data.read_rows(section.path, split=section.split, problems=problems)
    else:
        rows = data.rows_of(imported(fn, "data.rows")(), fn, problems=problems)
    return data.encode_rows(
        rows,
        tokenizer,
        fields=section.fields,
        **only(section, "max_prompt_tokens", "over_long", "pad_token"),
        chat=chat_options(section),
        images=images,
        problems=problems,
    )


def load_held_out(
    section: DataSettings, how: EvalSettings, tokenizer: PreTrainedTokenizerBase, images: data.ImageReader | None = None
) -> PromptSet:
    """The prompts to evaluate on. Raises ValueError that names every faulty row."""
    own = {"path": section.eval_path, "split": section.eval_split, "rows": section.eval_rows}
    prompts = load_prompts(attrs.evolve(section, **own), tokenizer, images)
    limit = how.max_prompts
    return prompts if limit is None or limit >= len(prompts) else data.select(prompts, range(limit))


def order_of(name: str | None, prompts: PromptSet, key: Key) -> Order | None:
    """The order of prompts that a function of the user's gives each epoch; None without one.

    The function is asked about the first epoch here. Raises ValueError if it does not import or gives no such order.
    """
    if name is None:
        return None
    own = imported(name, "data.sampler")

    @lru_cache(maxsize=2)
    def order(epoch: int) -> list[int]:
        return data.checked_order(own(prompts, epoch, key.fold("epoch", epoch)), len(prompts), f"data.sampler {name!r}")

    order(0)
    return order


def _functions(
    settings: TrainSettings, kernels: Kernels | None, device: torch.device | None, tried: _Tried, *, check: bool
) -> Callable[[Mapping[str, float]], AdvantageFn] | None:
    """The estimator; None, and all that is wrong noted, if it, the loss or a kernel is missing or not sound."""
    before = len(tried.problems)
    some = kernels or Kernels.named()
    tried(lambda: policy_loss(settings.actor))
    tried(lambda: advantage_of(settings, some))
    tried(lambda: optimizers_of(settings, some, None))
    tried(lambda: _check_rewards(settings.reward, settings.rollout))
    tried(lambda: [imported(name, "log.loggers") for name in settings.log.loggers if ":" in name])
    if settings.rollout.from_ is not None:
        start, rows = Path(settings.rollout.from_), settings.rollout.batch_size
        routed = settings.algorithm.router_replay == "rollout"
        tried(lambda: saved.check(start, until=settings.steps, rows=rows, routed=routed))
    if len(tried.problems) > before or device is None:
        return None
    return tried(lambda: functions_of(settings, some, device, check=check))


def _check_rewards(reward: RewardSettings, rollout: RolloutSettings) -> None:
    """Raises ValueError for rewards and tools that the settings name and that there are not."""
    if reward.functions:
        reward_of(reward, {}, max_tokens=rollout.max_tokens)
    if rollout.turns.respond is not None:
        tools.resolve(rollout.turns.respond)
    if rollout.environment.used:
        maker_of(rollout.environment)


def _check_models(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    prompt_sets: list[PromptSet],
    mesh: Mesh,
    tried: _Tried,
    *,
    trained: bool = True,
) -> None:
    """Notes models that do not fit the tokenizer, each other, the prompts, the mesh or the longest row."""
    section = settings.model
    named = {"actor": ("model.path", section.path)}
    if trained and settings.uses_critic_model and section.critic_path is not None:
        named["critic"] = ("model.critic_path", section.critic_path)
    if trained and settings.uses_reference and section.ref_path is not None:
        named["reference"] = ("model.ref_path", section.ref_path)
    tried(lambda: check_scorers(settings, tokenizer, mesh))
    configs = tried(
        lambda: {role: config_of(section, config_place(path, name)) for role, (name, path) in named.items()}
    )
    if configs is None:
        return
    reads = settings.in_turns or settings.critic.privileged > 0
    tried(lambda: data.check_vocabulary(tokenizer, configs, any_text=reads))
    if settings.rollout.engine == "vllm":
        over, alone = settings.rollout.vllm.tensor_parallel, section.lora.send == "alone"
        tried(lambda: check_family(configs["actor"], tensor_parallel=over, alone=alone))
    if tried(lambda: lacks_something(settings)):
        tried(lambda: check_kernels(settings, bare_model(settings)))
        if trained and settings.algorithm.uses_critic:
            tried(lambda: check_kernels(settings, bare_model(settings, "value"), "critic"))
        if "reference" in configs:
            reference = attrs.evolve(settings, model=attrs.evolve(section, path=section.ref_path))
            tried(lambda: check_kernels(settings, bare_model(reference), "reference"))
    of_critic = "critic" if "critic" in configs else "actor" if trained and settings.uses_critic_model else None
    of_policy = {"critic": trained and settings.uses_critic_model, "reference": trained}
    for role in (*configs, *(role for role, used in of_policy.items() if used and role not in configs)):
        asked = configs.get(role, configs["actor"]), *(mesh_at(settings, role, mesh) if trained else ("", mesh))
        tried(partial(check_mesh, *asked))
        if role == "actor" or (role == "critic" and settings.model.lora.of_critic):
            tried(partial(check_base, settings, *asked))
    for role, config in configs.items():
        tried(lambda role=role, config=config: check_length(settings, config, critic=role == of_critic))
        tried(lambda config=config: check_vision(settings, config))
    for prompts in prompt_sets:
        if settings.rollout.engine == "vllm" and settings.data.videos is not None:
            tried(lambda prompts=prompts: check_videos(bare_model(settings), prompts))
        tried(lambda prompts=prompts: data.check_tokens(prompts, data.vocabulary_size(configs["actor"])))
