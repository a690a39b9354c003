"""From settings to a run: models, prompts, rewards and stages, bound once. Only the command line comes through here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial

import attrs
import torch
from transformers import PreTrainedTokenizerBase

from fppo import data, rewards, tree
from fppo.assembly.parts import (
    bare_model,
    check_attention,
    check_heads,
    device_of,
    engine_of,
    kernels_of,
    load_models,
    load_prompts,
    load_tokenizer,
)
from fppo.assembly.program import Resources, functions_of, optimizers_of, program_of
from fppo.assembly.rewards import reward_runner
from fppo.assembly.turns import in_turns
from fppo.data import DataCursor, PromptSet
from fppo.key import Key
from fppo.losses import KLState
from fppo.models.model import Model, Params
from fppo.pipeline import stages
from fppo.pipeline.evaluate import evaluate
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.train import Evaluate
from fppo.rewards.distributed import SpreadRewardRunner
from fppo.rewards.early import EarlyRewardRunner
from fppo.rollout.engine import Engine, Sampling
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane, to_host
from fppo.settings.train import TrainSettings
from fppo.steps.forward import Forward
from fppo.steps.optimizers import Optimizer
from fppo.steps.train_state import TrainState, init_state, whole_shapes
from fppo.workers.imports import search
from fppo_kernels.record import Kernels


@attrs.frozen(kw_only=True)
class Assembly:
    """A run before its first step, its program, and what they were made from: all that a command needs of it."""

    run: RunState
    program: Program
    draw: Draw
    evaluate: Evaluate | None
    tokenizer: PreTrainedTokenizerBase
    model: Model
    critic_model: Model | None
    mesh: Mesh
    shapes: dict[str, torch.Size]  # whole shapes of the leaves of `run` that a mesh may cut


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


@contextlib.contextmanager
def assemble(
    settings: TrainSettings,
    *,
    kernels: Kernels | None = None,
    mesh: Mesh = LOCAL,
    sampling_mesh: Mesh | None = None,
    device: torch.device | None = None,
) -> Iterator[Assembly]:
    """The run that the settings describe, before its first step. What is wrong with them is raised before any work.

    `kernels` stand in for those that the settings name, and `device` for the one they name. On a `mesh` of several
    ranks this is one rank's part of the run; what samples and scores has the groups of `sampling_mesh` if that is
    given, which it must be for a run that samples ahead.
    """
    search(settings.module_dirs)
    key, sampling_mesh = Key(settings.seed), sampling_mesh or mesh
    check = settings.check and kernels is None  # kernels that are compared with others may be wrong
    device, kernels = device or device_of(settings), kernels or kernels_of(settings)
    loss_fn, advantage = functions_of(settings, kernels, device, check=check)
    tokenizer = load_tokenizer(settings)
    prompts = load_prompts(settings, tokenizer, held_out=False)
    held_out = load_prompts(settings, tokenizer, held_out=True) if settings.data.eval_path else None
    sampling = sampling_of(settings, tokenizer)
    model, params, critic_model, critic, ref = load_models(settings, tokenizer, key, mesh, device)
    for prompt_set in [prompts] if held_out is None else [prompts, held_out]:
        data.check_tokens(prompt_set, model.config.vocab_size)
    pad, lane = prompts.pad_token_id, Lane(device)
    optimizers = optimizers_of(settings, kernels, lane)
    run = _fresh(settings, key, params, critic, ref, optimizers)
    with _answering(settings, kernels, model, tokenizer, pad, sampling_mesh, lane) as answering:
        forward = Forward(model, kernels=kernels, mesh=mesh, remove_padding=settings.model.remove_padding)
        resources = Resources(
            forward=forward,
            critic=None if critic_model is None else attrs.evolve(forward, model=critic_model),
            engine=answering.engine,
            sampling=sampling,
            pad_token_id=pad,
            lane=lane,
            runner=answering.runner,
            score=answering.score,
            loss_fn=loss_fn,
            optimizers=optimizers,
            advantage=advantage,
        )
        yield Assembly(
            run=run,
            program=program_of(settings, resources),
            draw=_draw(settings, prompts, key.fold("data")),
            evaluate=None if held_out is None else _evaluation(settings, held_out, sampling, answering),
            tokenizer=tokenizer,
            model=model,
            critic_model=critic_model,
            mesh=mesh,
            shapes=_shapes(run, model, critic_model),
        )


@attrs.frozen(kw_only=True)
class Evaluator:
    """What answers and scores held-out prompts with parameters of the policy, of which it holds none."""

    evaluate: Evaluate
    model: Model
    device: torch.device  # where it wants them


@contextlib.contextmanager
def assemble_evaluation(
    settings: TrainSettings, *, mesh: Mesh = LOCAL, device: torch.device | None = None
) -> Iterator[Evaluator]:
    """What evaluates a policy, and nothing that trains one: no other data, no parameters, no critic.

    Of the policy itself `settings.model.path` needs the config and the tokenizer alone. Raises ValueError for settings
    without held-out prompts.
    """
    if not settings.data.eval_path:
        raise ValueError("data.eval_path is not set: there are no held-out prompts; give --data.eval-path FILE")
    search(settings.module_dirs)
    device, kernels = device or device_of(settings), kernels_of(settings)
    tokenizer = load_tokenizer(settings)
    held_out = load_prompts(settings, tokenizer, held_out=True)
    model = bare_model(settings)
    check_attention(settings, model)
    check_heads(model, mesh)
    data.check_vocabulary(tokenizer, {"actor": model.config})
    data.check_tokens(held_out, model.config.vocab_size)
    with _answering(settings, kernels, model, tokenizer, held_out.pad_token_id, mesh, Lane(device)) as answering:
        run_evaluation = _evaluation(settings, held_out, sampling_of(settings, tokenizer), answering)
        place = torch.device("cpu") if settings.model.offload == "all" else device
        yield Evaluator(evaluate=run_evaluation, model=model, device=place)


@attrs.frozen(kw_only=True)
class _Answering:
    """What answers prompts and scores the responses."""

    engine: Engine
    runner: EarlyRewardRunner
    score: stages.ScoreFn


@contextlib.contextmanager
def _answering(
    settings: TrainSettings,
    kernels: Kernels,
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    pad: int,
    mesh: Mesh,
    lane: Lane,
) -> Iterator[_Answering]:
    with (
        reward_runner(settings, tokenizer, mesh, lane.device) as runner,
        engine_of(settings, model, kernels, pad, mesh, lane) as alone,
        in_turns(settings, alone, tokenizer, pad, mesh) as engine,
    ):
        reward = SpreadRewardRunner(runner, mesh, lane.device)
        yield _Answering(engine=engine, runner=runner, score=partial(rewards.score, reward=reward, tokenizer=tokenizer))


def _fresh(
    settings: TrainSettings,
    key: Key,
    params: Params,
    critic: Params | None,
    ref: Params | None,
    optimizers: Mapping[str, Optimizer],
) -> RunState:
    """The run before its first step."""
    return RunState(
        actor=_state(settings, params, optimizers["actor"]),
        critic=None if critic is None else _state(settings, critic, optimizers["critic"]),
        ref=to_host(ref) if ref is not None and settings.model.offload == "all" else ref,
        kl=KLState(coef=settings.algorithm.kl.coef),
        key=key,
        cursor=DataCursor(),
        step=0,
    )


def _state(settings: TrainSettings, params: Params, optimizer: Optimizer) -> TrainState:
    """The state before the first update, on the host as far as the settings want it there."""
    state = init_state(params, optimizer)
    match settings.model.offload:
        case "all":
            return to_host(state)
        case "moments":
            return tree.replace(state, opt=to_host(state.opt))
        case _:
            return state


def _shapes(run: RunState, model: Model, critic_model: Model | None) -> dict[str, torch.Size]:
    """By the paths of a RunState's leaves."""
    shapes = {f".actor{path}": shape for path, shape in whole_shapes(run.actor, model.shapes).items()}
    if run.critic is not None and critic_model is not None:
        shapes |= {f".critic{path}": shape for path, shape in whole_shapes(run.critic, critic_model.shapes).items()}
    if run.ref is not None:
        shapes |= {f".ref[{name!r}]": shape for name, shape in model.shapes.items()}
    return shapes


def _draw(settings: TrainSettings, prompts: PromptSet, key: Key) -> Draw:
    size = settings.rollout.batch_size // settings.rollout.n
    return lambda cursor: data.next_batch(prompts, cursor, size=size, key=key, shuffle=settings.data.shuffle)


def _evaluation(settings: TrainSettings, held_out: PromptSet, sampling: Sampling, answering: _Answering) -> Evaluate:
    section = settings.eval
    sampling = attrs.evolve(
        sampling,
        n=section.n,
        greedy=section.temperature == 0,
        temperature=section.temperature or 1.0,
    )
    batches = partial(data.batches, held_out, max(settings.rollout.batch_size // section.n, 1))
    engine, score = answering.engine, answering.score
    return lambda run: evaluate(run, batches=batches(), engine=engine, sampling=sampling, score=score)
