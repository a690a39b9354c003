"""From settings to a run: models, prompts, rewards and stages, bound once. Only the command line comes through here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fppo import config, data, losses, models, rewards, settings_checks, tree
from fppo.data import DataCursor, PromptSet
from fppo.key import Key
from fppo.losses import KLState
from fppo.models.model import Model, Params
from fppo.pipeline import stages
from fppo.pipeline.estimators import estimator
from fppo.pipeline.evaluate import evaluate
from fppo.pipeline.measure import with_mfu
from fppo.pipeline.run import Program, RunState
from fppo.pipeline.train import Draw, Evaluate
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Sampling
from fppo.runtime.mesh import Mesh
from fppo.settings import ActorSettings, CriticSettings, OptimizerSettings, TrainSettings
from fppo.steps.forward import compute_reward_scores
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizer import Optimizer
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo.steps.update import update_actor, update_critic
from fppo_kernels import table as tables
from fppo_kernels.record import Kernels


@attrs.frozen(kw_only=True)
class Assembled:
    """What a command needs of a run, bound."""

    run: RunState  # before its first step
    program: Program
    draw: Draw
    evaluate: Evaluate | None
    tokenizer: PreTrainedTokenizerBase
    model: Model
    critic_model: Model | None
    prompts: PromptSet


def device_of(settings: TrainSettings) -> torch.device:
    """The device that the settings name. Raises ValueError if it is not there."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device = {name!r}: torch sees no GPU here; give cpu")
    return torch.device(name)


def load_tokenizer(settings: TrainSettings) -> PreTrainedTokenizerBase:
    """The policy's tokenizer. Raises ValueError if it lacks what the settings need of it."""
    tokenizer = AutoTokenizer.from_pretrained(settings.model.path, trust_remote_code=settings.model.trust_remote_code)
    data.check_tokenizer(tokenizer, pad_token=settings.data.pad_token)
    if settings.data.chat:
        data.check_chat_template(tokenizer)
    return tokenizer


def load_prompts(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, *, held_out: bool) -> PromptSet:
    """The prompts to train on, or those to evaluate on."""
    section = settings.data
    prompts = data.load_prompts(
        section.eval_path if held_out else section.path,
        tokenizer,
        prompt=section.prompt,
        ground_truth=section.ground_truth,
        source=section.source,
        split=section.eval_split if held_out else section.split,
        chat=section.chat,
        max_prompt_tokens=section.max_prompt_tokens,
        over_long=section.over_long,
        pad_token=section.pad_token,
    )
    limit = settings.eval.max_prompts
    if held_out and limit is not None and limit < len(prompts):
        return data.select(prompts, range(limit))
    return prompts


def policy_loss(actor: ActorSettings) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """The policy loss with its scalars bound, and its selection of tokens if it has one."""
    name = actor.loss.name
    if ":" in name:
        return _imported(name), None
    loss = partial(getattr(losses, name), **config.loss_scalars(actor.loss))
    if name not in settings_checks.SELECTION_KEYWORDS:
        return loss, None
    return loss, partial(getattr(losses, f"select_{name}"), **config.selection_scalars(actor.loss))


def _imported(name: str) -> Callable[..., Any]:
    """The policy loss of "module:function". Raises ValueError if it does not import."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"actor.loss.name = {name!r} does not import: {error}") from error


def optimizer_of(settings: OptimizerSettings, updates: int) -> Optimizer:
    """The optimizer for a run of `updates` updates."""
    rate = schedule(
        settings.schedule,
        settings.lr,
        total_steps=updates,
        warmup_steps=settings.warmup_steps,
        min_ratio=settings.min_lr_ratio,
    )
    return Optimizer(
        schedule=rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm or None,
    )


def micro_batching_of(section: ActorSettings | CriticSettings) -> MicroBatching:
    """The micro-batching that a section asks for."""
    size, budget = config.micro_batching(section)
    return MicroBatching(size=size, token_budget=budget)


def sampling_of(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How responses are sampled in training."""
    rollout = settings.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        n=rollout.n,
        max_tokens=rollout.max_tokens,
        stop_token_ids=data.stop_tokens(tokenizer, rollout.stop, rollout.stop_token_ids),
    )


def program_of(
    settings: TrainSettings,
    *,
    model: Model,
    critic_model: Model | None,
    engine: EmbeddedEngine,
    sampling: Sampling,
    score: stages.ScoreFn,
    loss: tuple[Callable[..., Any], Callable[..., Any] | None],
) -> Program:
    """The stages of the settings' algorithm, bound."""
    actor, algorithm = settings.actor, settings.algorithm
    mini = config.mini_batch_size(actor, settings.rollout.batch_size)
    corrected = algorithm.correction.mode != "none" or bool(algorithm.correction.rejection)
    alone = actor.epochs == 1 and mini == settings.rollout.batch_size
    on_policy = alone and algorithm.kl.coef == 0 and not corrected
    shared = {"kernels": engine.kernels, "mesh": Mesh.local(), "remove_padding": settings.model.remove_padding}
    shared |= {"temperature": sampling.temperature, "on_policy": on_policy}
    return Program(
        rollout=partial(stages.rollout_stage, engine=engine, sampling=sampling),
        score=_score_stage(algorithm.advantage, engine, sampling, score),
        annotate=partial(
            stages.annotate,
            model=model,
            critic_model=critic_model,
            micro_batching=micro_batching_of(actor),
            sum_squared=algorithm.advantage == "optimal_token_baseline",
            **shared,
        ),
        estimate=_estimate_stage(settings, sampling, engine.kernels),
        update_critic=_update_critic(settings, critic_model, engine.kernels),
        update_actor=partial(
            with_mfu("actor", update_actor),
            model=model,
            loss_fn=loss[0],
            select_fn=loss[1],
            optimizer=optimizer_of(
                actor.optimizer, settings.steps * actor.epochs * settings.rollout.batch_size // mini
            ),
            mini_batch_size=mini,
            micro_batching=micro_batching_of(actor),
            epochs=actor.epochs,
            weight_mode=actor.weight_mode,
            horizon=actor.horizon,
            entropy_coef=actor.entropy_coef,
            kl_coef=actor.kl_coef,
            kl_kind=actor.kl_kind,
            **shared,
        ),
        critic_warmup=settings.critic.warmup_steps if critic_model is not None else 0,
    )


def _estimate_stage(settings: TrainSettings, sampling: Sampling, kernels: Kernels) -> Callable[..., Any]:
    algorithm = settings.algorithm
    kl, corrected = algorithm.kl, config.correction_keywords(algorithm.correction)
    estimate = estimator(
        algorithm.advantage, gamma=algorithm.gamma, lam=algorithm.lam, scale=algorithm.scale, gae=kernels.gae
    )
    return partial(
        stages.estimate,
        advantage_fn=estimate,
        max_tokens=sampling.max_tokens,
        kl_in_reward=kl.coef > 0,
        kl_kind=kl.kind,
        update_kl=partial(losses.update_kl, kind=kl.controller, target=kl.target, horizon=kl.horizon),
        correct=partial(losses.rollout_correction, **corrected) if corrected else None,
        whiten=algorithm.whiten and algorithm.advantage == "gae",
    )


def _score_stage(
    advantage: str, engine: EmbeddedEngine, sampling: Sampling, score: stages.ScoreFn
) -> Callable[..., Any]:
    if advantage != "remax":
        return partial(stages.score_stage, score=score)
    greedy = attrs.evolve(sampling, greedy=True, n=1)
    return partial(stages.score_with_greedy, score=score, engine=engine, sampling=greedy)


def _update_critic(settings: TrainSettings, critic_model: Model | None, kernels: Kernels) -> Any:
    critic, batch_size = settings.critic, settings.rollout.batch_size
    if critic_model is None:
        return None
    mini = config.mini_batch_size(critic, batch_size)
    return partial(
        with_mfu("critic", update_critic),
        model=critic_model,
        optimizer=optimizer_of(critic.optimizer, settings.steps * critic.epochs * batch_size // mini),
        kernels=kernels,
        mesh=Mesh.local(),
        mini_batch_size=mini,
        micro_batching=micro_batching_of(critic),
        epochs=critic.epochs,
        clip=critic.value_clip,
        weight_mode=critic.weight_mode,
        horizon=critic.horizon,
        remove_padding=settings.model.remove_padding,
    )


def load_models(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, key: Key
) -> tuple[Model, Params, Model | None, Params | None, Params | None]:
    """The actor, the critic (a model and its parameters, or None twice) and the reference's parameters or None."""
    section = settings.model
    load = partial(
        models.load,
        compute_dtype=None if section.compute_dtype == "float32" else getattr(torch, section.compute_dtype),
        checkpoint_layers=section.checkpoint_layers,
        trust_remote_code=section.trust_remote_code,
    )
    device = device_of(settings)
    model, params = load(section.path)
    critic_model, critic = None, None
    if settings_checks.uses_critic(settings):
        critic_model, critic = load(section.critic_path or section.path, "value", key=key.fold("value head"))
    ref_model, ref = None, None
    if settings_checks.uses_reference(settings):
        ref_model, ref = (model, tree.copy(params)) if section.ref_path is None else load(section.ref_path)
    others = {"critic": critic_model, "reference": ref_model}
    for each in (model, *others.values()):
        if each is not None:
            _check_attention(settings, each)
    configs = {"actor": model.config} | {name: m.config for name, m in others.items() if m is not None}
    data.check_vocabulary(tokenizer, configs)
    place = partial(tree.map, lambda x: x.to(device))
    return model, place(params), critic_model, critic and place(critic), ref and place(ref)


def _check_attention(settings: TrainSettings, model: Model) -> None:
    """Raises ValueError if the attention that the settings name has not what the model asks of it, or not its dtype."""
    dtype = str(model.compute_dtype or torch.float32).removeprefix("torch.")
    tables.get("attention", settings.model.attention, needs={*models.attention_needs(model), dtype})


def reward_of(settings: TrainSettings, extra: dict[str, Any]) -> rewards.Reward:
    """The sum of the settings' reward functions and of `extra` ones."""
    section = settings.reward
    return rewards.combine(
        section.functions,
        section.weights,
        pattern=section.pattern,
        max_tokens=settings.rollout.max_tokens,
        overlong_buffer=section.overlong_buffer,
        overlong_penalty=1.0 if section.overlong_penalty is None else section.overlong_penalty,
        extra=extra,
    )


def reward_model_of(settings: TrainSettings, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The reward model as a function of the rollout, by name; nothing without one."""
    path = settings.model.reward_path
    if path is None:
        return {}
    model, params = models.load(path, "value", trust_remote_code=settings.model.trust_remote_code)
    _check_attention(settings, model)
    data.check_vocabulary(tokenizer, {"reward model": model.config})
    device = device_of(settings)
    scores = partial(
        compute_reward_scores,
        tree.map(lambda x: x.to(device), params),
        model=model,
        kernels=kernels_of(settings),
        mesh=Mesh.local(),
        micro_batching=micro_batching_of(settings.actor),
    )
    return {"reward_model": rewards.tensor_reward(lambda rollout: scores(rollout))}


def kernels_of(settings: TrainSettings) -> Kernels:
    """The kernels that the settings name."""
    return Kernels.named(attention=settings.model.attention, log_probs=settings.model.log_probs)


@contextlib.contextmanager
def assembled(settings: TrainSettings, *, kernels: Kernels | None = None) -> Iterator[Assembled]:
    """The run that the settings describe, before its first step. What is wrong with them is raised before any work.

    `kernels` stand in for those that the settings name.
    """
    key = Key(settings.seed)
    device_of(settings)
    kernels = kernels_of(settings) if kernels is None else kernels
    loss_fn = policy_loss(settings.actor)
    tokenizer = load_tokenizer(settings)
    prompts = load_prompts(settings, tokenizer, held_out=False)
    held_out = load_prompts(settings, tokenizer, held_out=True) if settings.data.eval_path else None
    sampling = sampling_of(settings, tokenizer)
    reward = reward_of(settings, reward_model_of(settings, tokenizer))
    model, params, critic_model, critic, ref = load_models(settings, tokenizer, key)
    for given in (prompts, held_out):
        if given is not None:
            data.check_tokens(given, model.config.vocab_size)
    section = settings.reward
    with rewards.RewardRunner(reward, time_limit=section.time_limit, workers=section.workers) as runner:
        score = partial(rewards.score, reward=runner, tokenizer=tokenizer)
        engine = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=prompts.pad_token_id)
        yield Assembled(
            run=RunState(
                actor=init_state(params),
                critic=None if critic is None else init_state(critic),
                ref=ref,
                kl=KLState(coef=settings.algorithm.kl.coef),
                key=key,
                cursor=DataCursor(),
                step=0,
            ),
            program=program_of(
                settings,
                model=model,
                critic_model=critic_model,
                engine=engine,
                sampling=sampling,
                score=score,
                loss=loss_fn,
            ),
            draw=partial(
                _draw,
                prompts=prompts,
                size=settings.rollout.batch_size // settings.rollout.n,
                key=key.fold("data"),
                shuffle=settings.data.shuffle,
            ),
            evaluate=None if held_out is None else _evaluation(settings, held_out, engine, sampling, score),
            tokenizer=tokenizer,
            model=model,
            critic_model=critic_model,
            prompts=prompts,
        )


def _draw(cursor: DataCursor, *, prompts: PromptSet, size: int, key: Key, shuffle: bool) -> Any:
    return data.next_batch(prompts, cursor, size=size, key=key, shuffle=shuffle)


def _evaluation(
    settings: TrainSettings, held_out: PromptSet, engine: EmbeddedEngine, sampling: Sampling, score: stages.ScoreFn
) -> Evaluate:
    section = settings.eval
    wanted = attrs.evolve(
        sampling,
        n=section.n,
        greedy=section.temperature == 0,
        temperature=section.temperature or 1.0,
    )
    size = max(settings.rollout.batch_size // section.n, 1)
    return lambda run: evaluate(run, batches=data.batches(held_out, size), engine=engine, sampling=wanted, score=score)
