"""Teachers, whose log-probs of the sampled tokens are added to a batch: a frozen policy, or the policy itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from fppo import advantages
from fppo.batch import Annotated, Rollout, Scored, narrow
from fppo.metrics import Metrics
from fppo.pipeline.feedback import Prompt
from fppo.pipeline.passes import PolicyFn, PolicyPass, View, required
from fppo.pipeline.program import AnnotateStage, RunState
from fppo.pipeline.stages import ScoreFn
from fppo.pipeline.timing import timed
from fppo.rewards.scoring import means
from fppo.steps.critic import as_it_is
from fppo.steps.outputs import Rows, TokenOutputs
from fppo.steps.train_state import Params
from fppo.tree import replace

TeacherFn = Callable[[Rollout, float], TokenOutputs]  # (rows, temperature) -> what it says of each token
REVERSE_KL = "reverse_kl"  # among the named scores
LOG_PROBS = ("log_probs",)
TOP = ("log_probs", "top_ids", "top_log_probs")  # the outputs of a teacher for divergences of distributions


def as_drawn(scored: Scored) -> tuple[Scored, Metrics]:
    """Leave the teacher's prompts as the rows were drawn with them."""
    return scored, {}


def taught_by(rows: Scored, out: TokenOutputs) -> Scored:
    """The rows with what a teacher says of their tokens."""
    ids = None if out.top_ids is None else out.top_ids.to(torch.int32)
    return replace(rows, teacher_log_probs=out.log_probs, teacher_top_ids=ids, teacher_top_log_probs=out.top_log_probs)


@attrs.frozen(kw_only=True)
class TeacherPass:
    """Compute a teacher's log-probs [B, T] of sampled tokens, and other `outputs`: a policy's pass with fixed
    parameters, over rows as `view` shows them to it (`data.with_teacher_prompt`, for example)."""

    params: Params
    policy: PolicyPass
    view: View = as_it_is
    outputs: Sequence[str] = LOG_PROBS

    def __call__(self, rows: Rows, temperature: float) -> TokenOutputs:
        """The outputs for all rows, under softmax(logits / temperature)."""
        policy = attrs.evolve(self.policy, temperature=temperature)
        return policy(self.params, self.view(rows), outputs=self.outputs)


@attrs.frozen(kw_only=True)
class ScoreByTeacher:
    """Score a rollout by another function, and add a teacher's log-probs of its tokens at the `temperature` at which
    they were sampled.

    The named score "reverse_kl" is the mean over a row's tokens of the engine's log-prob minus the teacher's
    (`advantages.mean_reverse_kl`). It does not count in the score, unless the teacher is `alone`: then there is no
    other reward, and the score is -reverse_kl. timing_s/teacher is the time of the pass, within that of the scoring.
    `prompt` gives the teacher prompts of its own by the scores; rows without one have no reverse_kl.
    """

    score: ScoreFn
    teacher: TeacherFn
    temperature: float = 1.0
    alone: bool = False
    prompt: Prompt = as_drawn

    def __call__(self, rollout: Rollout) -> tuple[Scored, Metrics]:
        """The scored rows, with `teacher_log_probs`. Raises ValueError for a reward with a number of the same name."""
        scored, report = self.score(rollout)
        if REVERSE_KL in scored.named_scores:
            text = "which a run with a teacher has itself: rename yours"
            raise ValueError(f"the reward has a function or a number named {REVERSE_KL!r}, {text}")
        scored, prompted = self.prompt(scored)
        out, spent = timed("teacher", self._outputs)(narrow(Rollout, scored))
        mask = rollout.response_mask
        apart = advantages.mean_reverse_kl(rollout.rollout_log_probs, required(out.log_probs), mask).float()
        apart = apart if scored.taught is None else apart.where(scored.taught, torch.nan)
        scored = replace(
            taught_by(scored, out),
            named_scores={**scored.named_scores, REVERSE_KL: apart},
            scores=-apart if self.alone else scored.scores,
        )
        return scored, report | means(scored) | prompted | spent

    def _outputs(self, rollout: Rollout) -> tuple[TokenOutputs, Metrics]:
        return self.teacher(rollout, self.temperature), {}


@attrs.frozen(kw_only=True)
class TeachByPolicy:
    """Annotate by another stage rows to which the policy itself is the teacher: as it is now or, for a run with
    `RunState.teacher`, as that average of its past is (SDPO, arXiv:2601.20802). `policy` is the policy's pass.

    It reads the same responses behind prompts of its own, which `prompt` gives by the scores, as `view` shows them.
    timing_s/teacher is the time of the pass.
    """

    stage: AnnotateStage
    policy: PolicyFn
    prompt: Prompt = as_drawn
    view: View = as_it_is
    outputs: Sequence[str] = LOG_PROBS

    def __call__(self, scored: Scored, run: RunState) -> tuple[Annotated, Metrics]:
        """The annotated rows, with what the teacher says of their tokens."""
        rows, prompted = self.prompt(scored)
        out, spent = timed("teacher", self._outputs)(rows, run)
        annotated, report = self.stage(taught_by(rows, out), run)
        return annotated, report | prompted | spent

    def _outputs(self, rows: Scored, run: RunState) -> tuple[TokenOutputs, Metrics]:
        params = run.actor.params if run.teacher is None else run.teacher
        return self.policy(params, self.view(rows), outputs=self.outputs), {}


def follow(average: Params, params: Params, *, decay: float) -> Params:
    """The next average of a policy's past, decay * average + (1 - decay) * params, per tensor; numbers that are no
    floats are the policy's own. With a decay of 1 it stays as it is."""
    if decay == 1:
        return average
    moved = ((name, x, params[name]) for name, x in average.items())
    return {name: decay * x + (1 - decay) * new if x.is_floating_point() else new for name, x, new in moved}
