"""A teacher: a frozen policy whose log-probs of the sampled tokens are added to a batch with the scores."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

from fppo import advantages
from fppo.batch import Rollout, Scored
from fppo.metrics import Metrics
from fppo.pipeline.passes import PolicyPass, View, required
from fppo.pipeline.stages import ScoreFn
from fppo.pipeline.timing import timed
from fppo.rewards.scoring import means
from fppo.steps.critic import as_it_is
from fppo.steps.outputs import Rows
from fppo.steps.train_state import Params
from fppo.tree import replace

TeacherFn = Callable[[Rollout, float], Tensor]  # (rows, temperature) -> log-probs [B, T] of the sampled tokens
REVERSE_KL = "reverse_kl"  # among the named scores


@attrs.frozen(kw_only=True)
class TeacherPass:
    """Compute a teacher's log-probs [B, T] of sampled tokens: a policy's pass with fixed parameters, over rows as
    `view` shows them to it (`data.with_teacher_prompt`, for example)."""

    params: Params
    policy: PolicyPass
    view: View = as_it_is

    def __call__(self, rows: Rows, temperature: float) -> Tensor:
        """Log-probs of all rows, under softmax(logits / temperature)."""
        policy = attrs.evolve(self.policy, temperature=temperature)
        return required(policy(self.params, self.view(rows), outputs=("log_probs",)).log_probs)


@attrs.frozen(kw_only=True)
class ScoreByTeacher:
    """Score a rollout by another function, and add a teacher's log-probs of its tokens at the `temperature` at which
    they were sampled.

    The named score "reverse_kl" is the mean over a row's tokens of the engine's log-prob minus the teacher's
    (`advantages.mean_reverse_kl`). It does not count in the score, unless the teacher is `alone`: then there is no
    other reward, and the score is -reverse_kl. timing_s/teacher is the time of the pass, within that of the scoring.
    """

    score: ScoreFn
    teacher: TeacherFn
    temperature: float = 1.0
    alone: bool = False

    def __call__(self, rollout: Rollout) -> tuple[Scored, Metrics]:
        """The scored rows, with `teacher_log_probs`. Raises ValueError for a reward with a number of the same name."""
        scored, report = self.score(rollout)
        if REVERSE_KL in scored.named_scores:
            text = "which a run with a teacher has itself: rename yours"
            raise ValueError(f"the reward has a function or a number named {REVERSE_KL!r}, {text}")
        taught, spent = timed("teacher", self._log_probs)(rollout)
        mask = rollout.response_mask
        apart = advantages.mean_reverse_kl(rollout.rollout_log_probs, taught, mask).float()
        scored = replace(
            scored,
            teacher_log_probs=taught,
            named_scores={**scored.named_scores, REVERSE_KL: apart},
            scores=-apart if self.alone else scored.scores,
        )
        return scored, report | means(scored) | spent

    def _log_probs(self, rollout: Rollout) -> tuple[Tensor, Metrics]:
        return self.teacher(rollout, self.temperature), {}
