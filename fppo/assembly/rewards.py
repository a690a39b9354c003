"""Scorers of the responses of a run, as its settings name them: functions, a reward model, a judge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fppo import data, models, rewards
from fppo.assembly.engines import vllm_engine
from fppo.assembly.environments import environment_terms
from fppo.assembly.parts import (
    axes_at,
    check_kernels,
    check_mesh,
    compute_dtype_of,
    forward_micro_batching_of,
    kernels_of,
    offload_of,
    on_device,
)
from fppo.assembly.teacher import teacher_on
from fppo.assembly.texts import (
    config_of,
    config_place,
    directory_of,
    ends_of,
    generation_config,
    has_tokenizer,
    open_tokenizer,
)
from fppo.data import ChatOptions
from fppo.data.encode import check_open_end
from fppo.fields import only
from fppo.fleet import HERE, LOCAL_GROUP, AnyGroup, Here, LocalGroup, on
from fppo.key import Key
from fppo.models.load import read_config
from fppo.models.model import Model, Params
from fppo.pipeline.stages import ScoreFn
from fppo.pipeline.teacher import ScoreByTeacher, TeacherFn
from fppo.rewards.distributed import SpreadRewardRunner
from fppo.rewards.early import EarlyRewardRunner
from fppo.rewards.functions import RewardFn, WeightedSum, tensor_reward
from fppo.rewards.judge import LanguageJudge
from fppo.rewards.models import encode, find_reward_model, load_reward_model, model_reward
from fppo.rollout.check import check_engine
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Engine, Sampling
from fppo.rollout.spread import FetchingEngine
from fppo.rollout.vllm.host import EngineFailure
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane, OnHost, to_host
from fppo.settings.model import ModelSettings
from fppo.settings.modules import kernels_named
from fppo.settings.placement import AxesSettings
from fppo.settings.reward import JudgeSettings, RewardModelSettings, RewardSettings
from fppo.settings.train import DataSettings, TrainSettings
from fppo.steps.micro_batching import MicroBatching
from fppo.workers.imports import search
from fppo_kernels.table import Kernels

Weighted = Mapping[str, tuple[RewardFn, float]]  # by name: a function and its factor


@attrs.frozen(kw_only=True)
class Scoring:
    """The scoring of a run's responses: its runner, the rewards, and the teacher, if there is one."""

    runner: EarlyRewardRunner
    score: ScoreFn  # by rewards
    teacher: TeacherFn | None = None
    alone: bool = False  # whether the teacher gives the only score

    def at(self, temperature: float) -> ScoreFn:
        """The scoring stage, with the teacher if there is one, for responses sampled at this temperature."""
        if self.teacher is None:
            return self.score
        return ScoreByTeacher(score=self.score, teacher=self.teacher, temperature=temperature, alone=self.alone)


@contextlib.contextmanager
def scoring(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    device: torch.device,
    groups: Mapping[str, AnyGroup] = MappingProxyType({}),
) -> Iterator[Scoring]:
    """The scoring of a run's responses, for as long as the context lasts, with the reward model and the teacher on the
    ranks of their `groups` or in this process."""
    section, model, here, placement = settings.reward, settings.model, Here(mesh, device), settings.placement
    names, environment = kernels_named(settings), environment_terms(settings.rollout.environment)
    common = {"names": names, "micro_batching": forward_micro_batching_of(model, settings.actor)}
    make = partial(
        reward_model_of,
        section=section.model,
        common=model,
        tokenizer=tokenizer,
        axes=axes_at(placement, "reward", settings.mesh),
        chat=_reads_chat(section.model, settings.data),
        **common,
    )
    at = {role: groups.get(role, LOCAL_GROUP) for role in ("reward", "teacher")}
    scorer, teacher = _reward_model(make, here, at["reward"], section.model, settings.module_dirs), None
    if settings.uses_teacher:
        how = {"module_dirs": settings.module_dirs, "prompted": settings.data.teacher_prompt is not None}
        teacher = teacher_on(at["teacher"], here, model, **common, **how)
    axes, key = axes_at(placement, "actor", settings.mesh), Key(settings.seed).fold("judge")
    with (
        judge_of(here, section.judge, model, tokenizer, names=names, axes=axes, key=key) as judge,
        rewards.RewardRunner(
            reward_of(section, {**scorer, **judge, **environment}, max_tokens=settings.rollout.max_tokens)
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
        yield Scoring(runner=early, score=score, teacher=teacher, alone=not settings.has_reward)


def _reward_model(
    make: Callable[[Here], Weighted], here: Here, group: AnyGroup, section: RewardModelSettings, dirs: Sequence[str]
) -> Weighted:
    """The reward model as a weighted function by name, on the ranks of `group`, or `here` for the group of this
    process; empty if the settings name no reward model."""
    if isinstance(group, LocalGroup) or section.path is None:
        return make(here)
    fn = group.call(_make_reward_model, HERE, dirs, make, stays=True, label="make reward model")
    return {"reward_model": (tensor_reward(on(group, fn, label="reward_model")), section.weight)}


def check_scorers(
    section: RewardSettings,
    common: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    *,
    pool: tuple[str, Mesh],
    rows: DataSettings,
) -> None:
    """Raises ValueError for a reward model or a judge whose files, tokenizer or mesh do not fit; weights are not read.

    `pool` is the name of the reward model's pool as a prefix of messages, and its mesh.
    """
    model, judge, remote = section.model, section.judge, common.trust_remote_code
    if model.path is not None:
        directory_of(model.path, "reward.model.path")
        directory, _ = find_reward_model(model.path, label=model.label, trust_remote_code=remote)
        config = read_config(directory, trust_remote_code=remote)
        check_mesh(config, *pool)
        _own_tokenizer(model, common, tokenizer, config, chat=_reads_chat(model, rows))
    if judge.path is not None:
        directory = config_place(judge.path, "reward.judge.path")
        config = read_config(directory, trust_remote_code=remote)
        own = _judge_tokenizer(directory, chat=judge.chat, trust_remote_code=remote)
        if judge.engine == "embedded":
            check_mesh(config, "", mesh)
        data.check_vocabulary(own, {"judge": config}, any_text=True)


def reward_of(section: RewardSettings, extra: Weighted, *, max_tokens: int) -> rewards.Reward:
    """The sum of the settings' reward functions and of `extra` ones, for responses of at most `max_tokens` tokens."""
    return rewards.combine(
        section.functions,
        section.weights,
        **only(section, "arguments", "overlong_buffer"),
        max_tokens=max_tokens,
        overlong_penalty=1.0 if section.overlong_penalty is None else section.overlong_penalty,
        extra=extra,
    )


def reward_model_of(
    here: Here,
    section: RewardModelSettings,
    common: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    names: Mapping[str, str],
    axes: AxesSettings,
    chat: bool,
    micro_batching: MicroBatching,
) -> Weighted:
    """The reward model as a weighted function, by name; empty without one. All ranks share its work. `names` gives
    kernels by setting, and `common` what all models share.

    Raises ValueError if it is no reward model, or does not fit its tokenizer.
    """
    if section.path is None:
        return {}
    model, params = load_reward_model(
        directory_of(section.path, "reward.model.path"),
        label=section.label,
        dtype=getattr(torch, section.dtype),
        compute_dtype=compute_dtype_of(common.compute_dtype),
        trust_remote_code=common.trust_remote_code,
        mesh=here.mesh,
    )
    check_kernels(names, model, axes)
    own = _own_tokenizer(section, common, tokenizer, model.config, chat=chat)
    params = on_device(params, here.device)
    read = (
        {}
        if own is None
        else {"read": partial(encode, tokenizer=tokenizer, own=own, chat=chat, vocabulary=model.config.vocab_size)}
    )
    kept = offload_of(common.offload, section.offload) == "all"
    fn = model_reward(
        OnHost(to_host(params), Lane(here.device)) if kept else params,
        model=model,
        kernels=kernels_of(names),
        mesh=here.mesh,
        micro_batching=_micro_batching(section, micro_batching),
        share_prompts=common.share_prompts,
        **read,
    )
    return {"reward_model": (fn, section.weight)}


def _make_reward_model(here: Here, module_dirs: Sequence[str], make: Callable[[Here], Weighted]) -> RewardFn:
    """Make the reward model on a rank of a group, and return its function."""
    search(module_dirs)
    transformers_logging.disable_progress_bar()  # the controller reports progress
    ((fn, _),) = make(here).values()
    return fn


def _reads_chat(section: RewardModelSettings, rows: DataSettings) -> bool:
    return rows.chat if section.chat is None else section.chat


def _micro_batching(section: RewardModelSettings, common: MicroBatching) -> MicroBatching:
    if section.micro_batch_size is None and section.token_budget is None:
        return common
    return MicroBatching(size=section.micro_batch_size, token_budget=section.token_budget)


def _own_tokenizer(
    section: RewardModelSettings, model: ModelSettings, tokenizer: PreTrainedTokenizerBase, config: Any, *, chat: bool
) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer, which encodes responses for it; None if it reads the policy's tokens as they are.

    Raises ValueError if the reward model's vocabulary does not fit the tokenizer whose tokens it reads, or if the
    settings of its chat template do not fit.
    """
    assert section.path is not None
    path, own, remote = section.tokenizer, None, model.trust_remote_code
    if path is not None:
        own = open_tokenizer(path, "reward.model.tokenizer", remote)
    elif has_tokenizer(directory := directory_of(section.path, "reward.model.path")):
        path = section.path
        own = open_tokenizer(str(directory), "reward.model.path", remote)
    if own is not None and (section.tokenizer is not None or _differs(own, tokenizer, chat=chat)):
        data.check_vocabulary(own, {"reward model": config}, any_text=True)
        if chat and own.chat_template is None:
            raise ValueError(
                f"the reward model's tokenizer {path} has no chat template; give another (reward.model.tokenizer), "
                "or texts without one (reward.model.chat = false)"
            )
        return own
    if section.chat is not None:
        raise ValueError(
            f"reward.model.chat = {section.chat}: the reward model reads the policy's tokens as they are, since it has "
            "no tokenizer that differs; leave it out, or name its tokenizer (reward.model.tokenizer)"
        )
    policy = config_of(model, config_place(model.path, "model.path"))
    others = {} if own is None else {"reward model": own}
    data.check_vocabulary(tokenizer, {"policy": policy, "reward model": config}, tokenizers=others)
    return None


def _differs(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, *, chat: bool) -> bool:
    """Whether a model with the tokenizer `own` would misread the policy's tokens: another vocabulary or, for a `chat`,
    another chat template."""
    if own.get_vocab() != policy.get_vocab():
        return True
    return chat and own.chat_template is not None and own.chat_template != policy.chat_template


@contextlib.contextmanager
def judge_of(
    here: Here,
    section: JudgeSettings,
    common: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    names: Mapping[str, str],
    axes: AxesSettings,
    key: Key,
) -> Iterator[Weighted]:
    """The judge as a weighted function, by name, with its engine open for as long as the context lasts; empty without a
    judge. It samples by the key.

    Raises ValueError if the judge does not fit its tokenizer, or the tokenizer does not fit the settings; EngineFailure
    if its vLLM does not start.
    """
    if section.path is None:
        yield {}
        return
    remote = common.trust_remote_code
    directory = directory_of(section.path, "reward.judge.path")
    own = _judge_tokenizer(directory, chat=section.chat, trust_remote_code=remote)
    compute = compute_dtype_of(common.compute_dtype)
    model, params = models.load(
        directory,
        dtype=compute or torch.float32,
        compute_dtype=compute,
        trust_remote_code=remote,
        mesh=here.mesh if section.engine == "embedded" else LOCAL,
    )
    data.check_vocabulary(own, {"judge": model.config}, any_text=True)
    sampling = _judge_sampling(section, own, directory, model.config)
    if section.engine == "embedded":
        check_kernels(names, model, axes)
    pad, kept = sampling.stop_token_ids[0], offload_of(common.offload, section.offload) == "all"
    made = _judge_engine(here, section, kernels_of(names), model, params, pad, on_host=kept)
    with made as (engine, judge_params, together):
        judge = LanguageJudge(
            engine=engine,
            params=judge_params,
            tokenizer=own,
            rollout_tokenizer=tokenizer,
            **only(section, "template", "pattern", "max_prompt_tokens", "chat"),
            sampling=sampling,
            key=key,
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
        greedy=section.temperature == 0,
        temperature=section.temperature or 1.0,
    )


def _judge_tokenizer(directory: Path, *, chat: bool, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The judge's tokenizer. Raises ValueError if there is none, or it does not fit the settings."""
    tokenizer = open_tokenizer(str(directory), "reward.judge.path", trust_remote_code)
    if not chat:
        check_open_end("a question", tokenizer)
    elif tokenizer.chat_template is None:
        raise ValueError(
            "reward.judge.chat: the judge's tokenizer has no chat template; use a chat model, or set it to false"
        )
    else:
        data.check_chat_template(tokenizer)
    return tokenizer


@contextlib.contextmanager
def _judge_engine(
    here: Here, section: JudgeSettings, kernels: Kernels, model: Model, params: Params, pad: int, *, on_host: bool
) -> Iterator[tuple[Engine, Params, tuple[str, ...]]]:
    """The judge's engine, the parameters to pass to it (for the embedded engine, this rank's part of them), and the
    mesh axes whose ranks generate the same answers together.

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
