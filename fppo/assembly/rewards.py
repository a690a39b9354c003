"""Scorers of the responses of a run, as its settings name them: functions, a reward model, a judge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from fppo import data, models, rewards
from fppo.assembly.engines import vllm_engine
from fppo.assembly.environments import environment_terms
from fppo.assembly.functions import reward_of
from fppo.assembly.inputs import Inputs, made_on
from fppo.assembly.parts import (
    axes_at,
    check_kernels,
    check_mesh,
    compute_dtype_of,
    forward_micro_batching_of,
    offload_of,
    on_device,
)
from fppo.assembly.teacher import prompt_of_teacher, teacher_on
from fppo.assembly.texts import (
    directory_of,
    ends_of,
    generation_config,
)
from fppo.data import ChatOptions
from fppo.fields import only
from fppo.fleet import LOCAL_GROUP, AnyGroup, Here, LocalGroup, on
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.pipeline.feedback import Prompt
from fppo.pipeline.stages import ScoreFn
from fppo.pipeline.teacher import ScoreByTeacher, TeacherFn, as_drawn
from fppo.rewards.distributed import SpreadRewardRunner
from fppo.rewards.early import EarlyRewardRunner
from fppo.rewards.functions import RewardFn, WeightedSum, tensor_reward
from fppo.rewards.judge import LanguageJudge
from fppo.rewards.models import encode, load_reward_model, model_reward
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Engine, Sampling
from fppo.rollout.spread import FetchingEngine
from fppo.rollout.vllm.host import EngineFailure
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane, OnHost, to_host
from fppo.settings.modules import kernels_named
from fppo.settings.reward import JudgeSettings, RewardModelSettings
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels.table import Kernels

Weighted = Mapping[str, tuple[RewardFn, float]]  # by name: a function and its factor


@attrs.frozen(kw_only=True)
class Scoring:
    """The scoring of a run's responses: its runner, the rewards, and the teacher, if there is one."""

    runner: EarlyRewardRunner
    score: ScoreFn  # by rewards
    teacher: TeacherFn | None = None
    alone: bool = False  # whether the teacher gives the only score
    prompt: Prompt = as_drawn  # of the teacher

    def at(self, temperature: float) -> ScoreFn:
        """The scoring stage, with the teacher if there is one, for responses sampled at this temperature."""
        if self.teacher is None:
            return self.score
        how = {"temperature": temperature, "alone": self.alone, "prompt": self.prompt}
        return ScoreByTeacher(score=self.score, teacher=self.teacher, **how)


@contextlib.contextmanager
def scoring(
    inputs: Inputs, mesh: Mesh, device: torch.device, groups: Mapping[str, AnyGroup] = MappingProxyType({})
) -> Iterator[Scoring]:
    """The scoring of a run's responses, for as long as the context lasts, with the reward model and the teacher on the
    ranks of their `groups` or in this process."""
    settings, tokenizer, here = inputs.settings, inputs.tokenizer, Here(mesh, device)
    section, environment = settings.reward, environment_terms(settings.rollout.environment)
    scorer = reward_model_on(groups.get("reward", LOCAL_GROUP), here, inputs)
    teacher = teacher_on(groups.get("teacher", LOCAL_GROUP), here, inputs) if settings.loads_teacher else None
    with (
        judge_of(here, inputs) as judge,
        rewards.RewardRunner(
            reward_of(
                section,
                {**scorer, **judge, **environment},
                max_tokens=settings.rollout.max_tokens,
                own=inputs.own_rewards,
            )
            if settings.has_reward
            else WeightedSum(()),
            time_limit=section.time_limit,
            batch_limit=section.batch_time_limit,
            workers=section.workers,
        ) as runner,
        EarlyRewardRunner(runner, tokenizer, early=section.overlap) as early,
    ):
        reward = SpreadRewardRunner(early, mesh, device)
        score = partial(rewards.score, reward=reward, tokenizer=tokenizer, failure_score=section.failure_score)
        prompt = as_drawn if teacher is None else prompt_of_teacher(settings.data, tokenizer)
        yield Scoring(runner=early, score=score, teacher=teacher, alone=not settings.has_reward, prompt=prompt)


def check_scorers(inputs: Inputs, pool: tuple[str, Mesh]) -> None:
    """Raises ValueError for a reward model or a judge whose files, tokenizer or mesh do not fit; weights are not read.

    `pool` is the name of the reward model's pool as a prefix of messages, and its mesh.
    """
    model, judge = inputs.settings.reward.model, inputs.settings.reward.judge
    if model.path is not None:
        check_mesh(inputs.reward_config, *pool)
        _ = inputs.reward_tokenizer
    if judge.path is not None:
        own, config = inputs.judge_tokenizer, inputs.judge_config
        if judge.engine == "embedded":
            check_mesh(config, "", inputs.mesh)
        data.check_vocabulary(own, {"judge": config}, any_text=True)


def reward_model_on(group: AnyGroup, here: Here, inputs: Inputs) -> Weighted:
    """The reward model as a weighted function by name, on the ranks of `group`, or `here` for the group of this
    process; empty if the settings name no reward model."""
    section = inputs.settings.reward.model
    if section.path is None:
        return {}
    fn = made_on(group, here, reward_model_of, inputs, label="make reward model")
    if not isinstance(group, LocalGroup):
        fn = tensor_reward(on(group, fn, label="reward_model"))
    return {"reward_model": (fn, section.weight)}


def reward_model_of(here: Here, inputs: Inputs) -> RewardFn:
    """The reward model's function on a rank. All ranks share its work.

    Raises ValueError if it is no reward model, or does not fit its tokenizer.
    """
    settings, section, common = inputs.settings, inputs.settings.reward.model, inputs.settings.model
    assert section.path is not None
    model, params = load_reward_model(
        directory_of(section.path, "reward.model.path"),
        label=section.label,
        dtype=getattr(torch, section.dtype),
        compute_dtype=compute_dtype_of(common.compute_dtype),
        trust_remote_code=common.trust_remote_code,
        mesh=here.mesh,
    )
    check_kernels(kernels_named(settings), model, axes_at(settings.placement, "reward", settings.mesh))
    params, own = on_device(params, here.device), inputs.reward_tokenizer
    how = {"tokenizer": inputs.tokenizer, "own": own, "chat": inputs.scores_chats}
    kept = offload_of(common.offload, section.offload) == "all"
    read: dict[str, Any] = {} if own is None else {"read": partial(encode, vocabulary=model.config.vocab_size, **how)}
    return model_reward(
        OnHost(to_host(params), Lane(here.device)) if kept else params,
        model=model,
        kernels=inputs.kernels,
        mesh=here.mesh,
        micro_batching=_micro_batching(section, forward_micro_batching_of(common, settings.actor)),
        share_prompts=common.share_prompts,
        **only(section, "max_tokens", "over_long"),
        **read,
    )


def _micro_batching(section: RewardModelSettings, common: MicroBatching) -> MicroBatching:
    if section.micro_batch_size is None and section.token_budget is None:
        return common
    return MicroBatching(size=section.micro_batch_size, token_budget=section.token_budget)


@contextlib.contextmanager
def judge_of(here: Here, inputs: Inputs) -> Iterator[Weighted]:
    """Provide {"judge": (reward function, its weight)} for the context, with the judge's engine open as long; {} if
    `reward.judge.path` is not set. The judge samples by a random key apart from the policy's.

    Raises ValueError if the judge's vocabulary lacks tokens of its tokenizer, or if the tokenizer cannot be used with
    the settings; EngineFailure if its vLLM does not start.
    """
    settings, section, common = inputs.settings, inputs.settings.reward.judge, inputs.settings.model
    if section.path is None:
        yield {}
        return
    directory, own = directory_of(section.path, "reward.judge.path"), inputs.judge_tokenizer
    compute = compute_dtype_of(common.compute_dtype)
    model, params = models.load(
        directory,
        dtype=compute or torch.float32,
        compute_dtype=compute,
        trust_remote_code=common.trust_remote_code,
        mesh=here.mesh if section.engine == "embedded" else LOCAL,
    )
    data.check_vocabulary(own, {"judge": model.config}, any_text=True)
    sampling = _judge_sampling(section, own, directory, model.config)
    if section.engine == "embedded":
        check_kernels(kernels_named(settings), model, axes_at(settings.placement, "actor", settings.mesh))
    pad, kept = sampling.stop_token_ids[0], offload_of(common.offload, section.offload) == "all"
    made = _judge_engine(here, section, inputs.kernels, model, params, pad, on_host=kept)
    with made as (engine, judge_params, together):
        judge = LanguageJudge(
            engine=engine,
            params=judge_params,
            tokenizer=own,
            rollout_tokenizer=inputs.tokenizer,
            **only(section, "template", "pattern", "max_prompt_tokens", "chat"),
            sampling=sampling,
            key=Key(settings.seed).fold("judge"),
            mesh=here.mesh,
            together=together,
            vocabulary=model.config.vocab_size,
        )
        yield {"judge": (judge, section.weight)}


def _judge_sampling(
    section: JudgeSettings, tokenizer: PreTrainedTokenizerBase, directory: Path, config: PreTrainedConfig
) -> Sampling:
    """How the judge's answers are sampled; they stop at the end tokens that the judge's files name."""
    generation = generation_config(directory, config, tokenizer, chat=ChatOptions() if section.chat else None)
    return Sampling(
        max_tokens=section.max_tokens,
        stop_token_ids=data.stop_tokens(tokenizer, turn_ends=ends_of(generation)),
    ).at(section.temperature)


@contextlib.contextmanager
def _judge_engine(
    here: Here, section: JudgeSettings, kernels: Kernels, model: Model, params: Params, pad: int, *, on_host: bool
) -> Iterator[tuple[Engine, Params, tuple[str, ...]]]:
    """The judge's engine, which pads with the token `pad`; the parameters to pass to it (for the embedded engine, this
    rank's part of them); and the mesh axes whose ranks generate the same answers together. With `on_host` the embedded
    engine's parameters stay on the host between its calls.

    A vLLM is sent whole parameters once, from the host, so none are kept on the device beside it.
    """
    if section.engine == "embedded":
        check_engine(model)
        rows = section.max_rows
        embedded = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=pad, max_rows=rows, mesh=here.mesh)
        engine: Engine = embedded
        params = on_device(params, here.device)
        if on_host:
            params, engine = to_host(params), FetchingEngine(engine=engine, lane=Lane(here.device))
        yield engine, params, embedded.together
        return
    limit = section.vllm.max_model_len or section.max_prompt_tokens + section.max_tokens
    vllm = attrs.evolve(section.vllm, max_model_len=limit)
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(vllm_engine(vllm, model, pad, LOCAL))
        except EngineFailure as error:
            raise EngineFailure(f"reward.judge: {error}") from error
        yield engine, params, ()
