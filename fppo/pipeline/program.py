"""The state of a run, and its unchanging program: stages, each of which extends the record of the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from fppo import metrics
from fppo.batch import Annotated, Experience, Prompts, Rollout, Scored
from fppo.data.cursor import DataCursor, at_step
from fppo.key import Key
from fppo.losses import KLState
from fppo.metrics import Metrics
from fppo.pipeline.checks import check_stages
from fppo.pipeline.pretrain import Pretrain, Pretraining
from fppo.pipeline.timing import timed
from fppo.pipeline.waiting import Waiting
from fppo.steps.train_state import Params, TrainState
from fppo.tree import copy, state


@state
class Base:
    """The base of an adapter, which a checkpoint does not hold, and the adapter in words."""

    source: str
    digest: str  # of its weights, as they are kept
    dtype: str
    adapter: str  # rank, alpha, scaling and targets, in words


@state
class RunState:
    """The whole state of a run: saving it saves everything, and two runs from equal states are equal."""

    actor: TrainState
    key: Key
    critic: TrainState | None = None
    ref: Params | None = None
    kl: KLState = attrs.field(factory=lambda: KLState(coef=0.0))
    cursor: DataCursor = attrs.field(factory=DataCursor)
    step: int = 0
    pretraining: Pretraining | None = None
    bases: dict[str, Base] | None = None  # by role, of those that are trained by adapters
    ahead: tuple[Waiting, ...] = ()  # the batches of the next steps: see pipeline.ahead


Draw = Callable[[DataCursor], tuple[Prompts, DataCursor]]
LearnOfPrompts = Callable[[DataCursor, Scored], tuple[DataCursor, Metrics]]
Work = Mapping[str, Callable[[], Any]]  # of which none needs another's result
Together = Callable[[Work], dict[str, Any]]


def in_turn(work: Work) -> dict[str, Any]:
    """The results of pieces of work, done one after the other. Any other order, or all at once, gives the same."""
    done = {}
    for name, do in work.items():
        done[name] = do()
    return done


class RolloutStage(Protocol):
    """Responses to prompts by the policy `params`, whose number is `version`. Where `Program.interrupts` it takes
    `newer` too, as an `Ask` has it."""

    def __call__(self, prompts: Prompts, params: Params, *, key: Key, version: int) -> tuple[Rollout, Metrics]: ...


class ScoreStage(Protocol):
    """The rollout with scores. `prompts` are None where the rollout comes from a file."""

    def __call__(self, rollout: Rollout, *, params: Params, prompts: Prompts | None) -> tuple[Scored, Metrics]: ...


class SampleStage(Protocol):
    """The scored batch of step `run.step`, drawn from `run.cursor` on, and the cursor behind its prompts.

    Of `run` it reads the step, the cursor, the key, and the actor's parameters and number of updates.
    """

    def __call__(
        self, run: RunState, *, draw: Draw, rollout: RolloutStage, score: ScoreStage
    ) -> tuple[Scored, DataCursor, Metrics]: ...


class AnnotateStage(Protocol):
    """Scored rows with what the models of `run` say of them."""

    def __call__(self, scored: Scored, run: RunState) -> tuple[Annotated, Metrics]: ...


class EstimateStage(Protocol):
    """Annotated rows with rewards, advantages and returns, and the KL controller's next state."""

    def __call__(self, annotated: Annotated, kl: KLState) -> tuple[Experience, KLState, Metrics]: ...


class UpdateStage(Protocol):
    """The state of actor or critic after its updates on the batch; `donate` gives up the memory of the old one."""

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key, donate: bool
    ) -> tuple[TrainState, Metrics]: ...


def roll_out(
    prompts: Prompts, params: Params, *, key: Key, version: int, rollout: RolloutStage, score: ScoreStage
) -> tuple[Scored, Metrics]:
    """Responses to the prompts, with their scores."""
    responses, generated = timed("gen", rollout)(prompts, params, key=key, version=version)
    scored, judged = timed("reward", score)(responses, params=params, prompts=prompts)
    return scored, metrics.merge(generated, judged)


def learn_nothing(cursor: DataCursor, scored: Scored) -> tuple[DataCursor, Metrics]:
    """Leave the cursor as it is."""
    del scored
    return cursor, {}


@attrs.frozen
class SampleBatch:
    """Makes a batch of one draw of prompts, rolled out and scored.

    `learn` adds the scores to what the cursor knows of the prompts, for a curriculum (`data.Learn`).
    """

    learn: LearnOfPrompts = learn_nothing

    def __call__(
        self, run: RunState, *, draw: Draw, rollout: RolloutStage, score: ScoreStage
    ) -> tuple[Scored, DataCursor, Metrics]:
        prompts, cursor = draw(at_step(run.cursor, run.step))
        key, actor = run.key.fold("step", run.step).fold("rollout"), run.actor
        how = {"key": key, "version": actor.step, "rollout": rollout, "score": score}
        scored, report = roll_out(prompts, actor.params, **how)
        cursor, learned = self.learn(cursor, scored)
        return scored, cursor, metrics.merge(report, learned)


def _nothing(params: Params) -> None:
    del params


@attrs.frozen(kw_only=True)
class Program:
    """The stages of a step, bound to models, kernels, mesh and scalars. A script may swap any.

    Losses, estimators and kernels of one's own that are fields of the stages are put through the laws that take no time
    (`laws.screen_policy_loss` and the like), unless `check` is False. Raises LawViolation.
    """

    rollout: RolloutStage
    score: ScoreStage
    annotate: AnnotateStage
    estimate: EstimateStage
    update_actor: UpdateStage
    update_critic: UpdateStage | None = None
    sample: SampleStage = attrs.field(factory=SampleBatch)
    critic_warmup: int = 0  # steps at the start that train the critic alone
    pretrain: Pretrain | None = None  # in their place, steps at the start as long as they help
    steps: int | None = None  # of the run in all, for states with a clock (`steps.clock`)
    freeze_critic: bool = False  # once the policy is updated
    together: Together = in_turn  # how the updates of actor and critic run
    hold: Callable[[Params], Params] = copy  # keeps a policy to sample from, while its own memory is given up
    bring: Callable[[Params], None] = _nothing  # takes what is kept to where it is sampled from
    interrupts: bool = False  # whether `rollout` takes `newer` weights on the way: see pipeline.ahead
    check: bool = True

    def __attrs_post_init__(self) -> None:
        if self.check:
            check_stages(
                rollout=self.rollout,
                annotate=self.annotate,
                estimate=self.estimate,
                update_actor=self.update_actor,
                update_critic=self.update_critic,
            )
