"""From settings to a run: models, prompts, rewards and stages, bound once. Only the command line comes through here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fppo import data, rewards, tree
from fppo.assembly.announce import input_lines, model_lines
from fppo.assembly.answers import right_answers
from fppo.assembly.inputs import EvalInputs, Inputs, read_eval_inputs, read_inputs
from fppo.assembly.machine import resolved
from fppo.assembly.parts import (
    Offload,
    bare_model,
    engine_of,
    forward_micro_batching_of,
    load_models,
    offload_of,
    value_head_of,
)
from fppo.assembly.program import Resources, along_of, fetch_of, optimizers_of, pretrain_of, program_of
from fppo.assembly.rewards import reward_runner
from fppo.assembly.turns import in_turns
from fppo.data import DataCursor
from fppo.key import Key
from fppo.losses import KLState
from fppo.metrics import Metrics
from fppo.models.model import Model, Params
from fppo.pipeline import stages
from fppo.pipeline.estimators import of_values
from fppo.pipeline.evaluate import EvaluateRun, OnScored, evaluate
from fppo.pipeline.pretrain import Pretraining
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.truth import Known, OnBeside, critic_truth
from fppo.rewards.distributed import SpreadRewardRunner
from fppo.rewards.early import EarlyRewardRunner
from fppo.rollout.engine import Engine
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane, to_host
from fppo.settings.checks_data import has_held_out
from fppo.settings.train import TrainSettings
from fppo.steps.confidence import confidence_values
from fppo.steps.forward import Forward
from fppo.steps.optimizers import Optimizer
from fppo.steps.train_state import TrainState, init_state, whole_shapes
from fppo_kernels.record import Kernels


@attrs.frozen(kw_only=True)
class Assembly:
    """A run before its first step, its program, and what they were made from: all that a command needs of it."""

    run: RunState
    program: Program
    draw: Draw
    evaluate: EvaluateRun | None
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig  # which goes with the policy where it is exported
    model: Model
    critic_model: Model | None
    mesh: Mesh
    device: torch.device  # which works, and has the batches; the state may be on the host
    shapes: dict[str, torch.Size | Extent]  # whole shapes of the leaves of `run` that a mesh may cut


@contextlib.contextmanager
def assemble(
    settings: TrainSettings,
    *,
    kernels: Kernels | None = None,
    mesh: Mesh = LOCAL,
    sampling_mesh: Mesh | None = None,
    device: torch.device | None = None,
    announce: Callable[[Sequence[str]], None] = lambda lines: None,
) -> Iterator[Assembly]:
    """The run that the settings describe, before its first step. What is wrong with them is raised before any work.

    `kernels` stand in for those that the settings name, and `device` for the one they name. On a `mesh` of several
    ranks this is one rank's part of the run; what samples and scores has the groups of `sampling_mesh` if that is
    given, which it must be for a run that samples ahead. `announce` is told what is loaded, in lines.
    """
    settings, chosen = resolved(settings, device)
    key, sampling_mesh = Key(settings.seed), sampling_mesh or mesh
    inputs = read_inputs(settings, mesh=mesh, kernels=kernels, device=device)
    tokenizer, kernels, device, pad = inputs.tokenizer, inputs.kernels, inputs.device, inputs.prompts.pad_token_id
    announce(input_lines(settings, inputs, chosen))
    model, params, critic_model, critic, ref = load_models(settings, key, mesh, device)
    others = [name for name, part in (("critic", critic), ("reference", ref)) if part is not None]
    announce(model_lines(model, settings.model.path, others=others))
    lane = Lane(device)
    optimizers = optimizers_of(settings, kernels, lane)
    run = _fresh(settings, key, params, critic, ref, optimizers)
    with _answering(settings, kernels, model, tokenizer, pad, sampling_mesh, lane) as answering:
        forward = Forward(model, kernels=kernels, mesh=mesh, remove_padding=settings.model.remove_padding)
        resources = Resources(
            forward=forward,
            critic=_values_by(settings, critic_model, critic, forward),
            engine=answering.engine,
            sampling=inputs.sampling,
            pad_token_id=pad,
            lane=lane,
            runner=answering.runner,
            score=answering.score,
            loss_fn=inputs.loss_fn,
            optimizers=optimizers,
            advantage=inputs.advantage,
        )
        yield Assembly(
            run=run,
            program=program_of(settings, resources),
            draw=_draw(settings, inputs, key.fold("data")),
            evaluate=None if inputs.eval is None else _evaluation(settings, inputs.eval, answering, resources),
            tokenizer=tokenizer,
            generation=inputs.generation,
            model=model,
            critic_model=critic_model,
            mesh=mesh,
            device=lane.device,
            shapes=_shapes(run, model, critic_model),
        )


@attrs.frozen(kw_only=True)
class Evaluator:
    """What answers and scores held-out prompts with parameters of the policy, of which it holds none."""

    evaluate: EvaluateRun
    tokenizer: PreTrainedTokenizerBase
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
    if not has_held_out(settings):
        raise ValueError("data.eval_path is not set: there are no held-out prompts; give --data.eval-path FILE")
    settings, _ = resolved(settings, device)
    inputs = read_eval_inputs(settings, mesh=mesh, device=device)
    tokenizer, kernels, device, pad = inputs.tokenizer, inputs.kernels, inputs.device, inputs.held_out.pad_token_id
    model = bare_model(settings)
    with _answering(settings, kernels, model, tokenizer, pad, mesh, Lane(device)) as answering:
        place = torch.device("cpu") if offload_of(settings, "actor") == "all" else device
        evaluation = _evaluation(settings, inputs, answering)
        yield Evaluator(evaluate=evaluation, tokenizer=tokenizer, model=model, device=place)


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


def _values_by(
    settings: TrainSettings, model: Model | None, critic: Params | None, policy: Forward
) -> Forward | stages.ConfidenceFn | None:
    """What computes the critic's values: its model if it is one."""
    if critic is None:
        return None
    read = value_head_of(settings).read
    return partial(confidence_values, read=read) if model is None else attrs.evolve(policy, model=model, read=read)


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
        actor=_state(params, optimizers["actor"], offload_of(settings, "actor")),
        critic=None if critic is None else _state(critic, optimizers["critic"], offload_of(settings, "critic")),
        ref=to_host(ref) if ref is not None and offload_of(settings, "ref") == "all" else ref,
        kl=KLState(coef=settings.algorithm.kl.coef),
        key=key,
        cursor=DataCursor(),
        step=0,
        pretraining=None if pretrain_of(settings) is None else Pretraining(),
    )


def _state(params: Params, optimizer: Optimizer, offload: Offload) -> TrainState:
    """The state before the first update, on the host as far as that is asked for."""
    state = init_state(params, optimizer)
    match offload:
        case "all":
            return to_host(state)
        case "moments":
            return tree.replace(state, opt=to_host(state.opt))
        case _:
            return state


def _shapes(run: RunState, model: Model, critic_model: Model | None) -> dict[str, torch.Size | Extent]:
    """By the paths of a RunState's leaves."""
    shapes = {f".actor{path}": extent for path, extent in whole_shapes(run.actor, model.extents).items()}
    if run.critic is not None and critic_model is not None:
        shapes |= {f".critic{path}": extent for path, extent in whole_shapes(run.critic, critic_model.extents).items()}
    if run.ref is not None:
        shapes |= {f".ref[{name!r}]": extent for name, extent in model.extents.items()}
    return shapes


def _draw(settings: TrainSettings, inputs: Inputs, key: Key) -> Draw:
    size, shuffle = settings.rollout.batch_size // settings.rollout.n, settings.data.shuffle
    return lambda cursor: data.next_batch(
        inputs.prompts, cursor, size=size, key=key, shuffle=shuffle, order=inputs.order
    )


def _evaluation(
    settings: TrainSettings, inputs: EvalInputs, answering: _Answering, resources: Resources | None = None
) -> EvaluateRun:
    """Of the policy, and with a run's resources of its critic too, where the settings ask for that."""
    batches = partial(data.batches, inputs.held_out, max(settings.rollout.batch_size // settings.eval.n, 1))
    engine, score, sampling = answering.engine, answering.score, inputs.sampling
    truth = None if resources is None or not settings.eval.exact_values else _truth(settings, inputs, resources)

    def evaluation(
        run: RunState, keep: OnScored = lambda scored: None, keep_beside: OnBeside = lambda beside: None
    ) -> Metrics:
        report = evaluate(run, batches=batches(), engine=engine, sampling=sampling, score=score, on_scored=keep)
        return report if truth is None else report | truth(run, prompts=batches(), keep=keep_beside)

    return evaluation


def _truth(settings: TrainSettings, inputs: EvalInputs, resources: Resources) -> Callable[..., Metrics]:
    sampling, algorithm = attrs.evolve(resources.sampling, n=1), settings.algorithm
    assert resources.critic is not None  # or the settings are refused
    return partial(
        critic_truth,
        known=Known(
            answers=partial(right_answers, tokenizer=inputs.tokenizer, sampling=sampling),
            gamma=1.0 if algorithm.advantage == "turn_gae" else algorithm.gamma,  # of one turn
            estimate=of_values(algorithm.advantage, along_of(algorithm)),
        ),
        engine=resources.engine,
        sampling=sampling,
        forward=resources.forward,
        critic=resources.critic,
        micro_batching=forward_micro_batching_of(settings),
        fetch=fetch_of(settings, resources.lane),
    )
