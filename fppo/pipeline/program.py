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
    digest: str  # of its weights, as they are stored
    dtype: str
    adapter: str  # rank, alpha, scaling and targets, in words


@state
class RunState:
    """The whole state of a run: saving it saves everything, and two runs from equal states are equal."""

    actor: TrainState
    key: Key
    critic: TrainState | None = None
    ref: Params | None = None
    teacher: Params | None = None  # an average of the policy's past, which teaches it: see teacher.TeachByPolicy
    kl: KLState = attrs.field(factory=lambda: KLState(coef=0.0))
    cursor: DataCursor = attrs.field(factory=DataCursor)
    step: int = 0
    pretraining: Pretraining | None = None
    bases: dict[str, Base] | None = None  # by role, for roles trained by adapters
    ahead: tuple[Waiting, ...] = ()  # the batches of the next steps: see pipeline.ahead


Draw = Callable[[DataCursor], tuple[Prompts, DataCursor]]
LearnOfPrompts = Callable[[DataCursor, Scored], tuple[DataCursor, Metrics]]
Work = Mapping[str, Callable[[], Any]]  # by name; none needs another's result
Together = Callable[[Work], dict[str, Any]]


def in_turn(work: Work) -> dict[str, Any]:
    """Run pieces of work one after the other, and return their results by name. Any order, or all at once, gives the
    same."""
    done = {}
    for name, do in work.items():
        done[name] = do()
    return done


class RolloutStage(Protocol):
    """Sample responses to prompts by the policy `params` after `version` updates. With `Program.interrupts` it takes
    `newer` too, as `Ask` does."""

    def __call__(self, prompts: Prompts, params: Params, *, key: Key, version: int) -> tuple[Rollout, Metrics]: ...


class ScoreStage(Protocol):
    """Add scores to a rollout. `prompts` is None for a rollout from a file."""

    def __call__(self, rollout: Rollout, *, params: Params, prompts: Prompts | None) -> tuple[Scored, Metrics]: ...


class SampleStage(Protocol):
    """Make the scored batch of step `run.step`, drawn from `run.cursor`; return it, and the cursor after its prompts.

    It reads only the step, the cursor and the key of `run`, and the actor's parameters and number of updates.
    """

    def __call__(
        self, run: RunState, *, draw: Draw, rollout: RolloutStage, score: ScoreStage
    ) -> tuple[Scored, DataCursor, Metrics]: ...


class AnnotateStage(Protocol):
    """Add the outputs of the run's models to scored rows."""

    def __call__(self, scored: Scored, run: RunState) -> tuple[Annotated, Metrics]: ...


class EstimateStage(Protocol):
    """Add rewards, advantages and returns to annotated rows, and advance the KL controller."""

    def __call__(self, annotated: Annotated, kl: KLState) -> tuple[Experience, KLState, Metrics]: ...


class UpdateStage(Protocol):
    """Update the state of actor or critic on the batch; `donate` gives up the memory of the old state."""

    def __call__(
        self, state: TrainState, batch: Experience, *, key: Key, donate: bool
    ) -> tuple[TrainState, Metrics]: ...


def roll_out(
    prompts: Prompts, params: Params, *, key: Key, version: int, rollout: RolloutStage, score: ScoreStage
) -> tuple[Scored, Metrics]:
    """Sample responses to the prompts, and score them."""
    responses, generated = timed("gen", rollout)(prompts, params, key=key, version=version)
    scored, judged = timed("reward", score)(responses, params=params, prompts=prompts)
    return scored, metrics.merge(generated, judged)


def learn_nothing(cursor: DataCursor, scored: Scored) -> tuple[DataCursor, Metrics]:
    """Leave the cursor as it is."""
    del scored
    return cursor, {}


@attrs.frozen
class SampleBatch:
    """Make a batch of one draw of prompts, rolled out and scored.

    `learn` updates the cursor with the scores, for a curriculum (`data.Learn`).
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


def stay(teacher: Params, params: Params) -> Params:
    """Leave the teacher as it is."""
    del params
    return teacher


def _nothing(params: Params) -> None:
    del params


@attrs.frozen(kw_only=True)
class Program:
    """The stages of a step, bound to models, kernels, mesh and scalars. A script may swap any.

    User-defined losses, estimators and kernels among the stages' fields are checked by the laws that take no time
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
    pretrain: Pretrain | None = None  # instead of that number, as long as it helps
    steps: int | None = None  # of the whole run, for states with a clock (`steps.clock`)
    freeze_critic: bool = False  # from the policy's first update on
    follow: Callable[[Params, Params], Params] = stay  # (RunState.teacher, the updated policy) -> the next teacher
    together: Together | None = None  # how the updates of actor and critic run; None: one after the other
    hold: Callable[[Params], Params] = copy  # copies a policy to sample from, since its memory is given up
    bring: Callable[[Params], None] = _nothing  # sends the copy to where it is sampled from
    interrupts: bool = False  # whether `rollout` takes `newer` weights while it generates: see pipeline.ahead
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
