"""A run as a state and stages: a step, the loop around steps, and replays and comparisons of steps.

In: a `RunState` and a `Program` of stages: sample, score, annotate, estimate, update. Out: the next state, the step's
`Experience` and metrics. Each stage adds columns to the record of the stage before it. Begin with `step.ppo_step` and
`wiring.pieces`; `stages` has the stages, `checks` the checks before a run.
"""

from fppo.advantages.columns import OfRows
from fppo.pipeline.evaluate import evaluate
from fppo.pipeline.feedback import PromptByFeedback, ScoredGroup, ScoredResponse
from fppo.pipeline.passes import Passes, PolicyPass, ValuePass, local_passes
from fppo.pipeline.program import Draw, Program, RunState, SampleBatch, in_turn
from fppo.pipeline.stages import Annotate, Estimate, RollOut, Score, ScoreWithGreedy, turn_metrics
from fppo.pipeline.step import ppo_step
from fppo.pipeline.teacher import ScoreByTeacher, TeachByPolicy, TeacherPass, follow
from fppo.pipeline.train import Evaluation, StepRecord, iterate, train
from fppo.pipeline.waiting import Waiting
from fppo.pipeline.wiring import Pieces, pieces, self_taught, with_teacher

__all__ = [
    "Annotate",
    "Draw",
    "Estimate",
    "Evaluation",
    "OfRows",
    "Passes",
    "Pieces",
    "PolicyPass",
    "Program",
    "PromptByFeedback",
    "RollOut",
    "RunState",
    "SampleBatch",
    "Score",
    "ScoreByTeacher",
    "ScoreWithGreedy",
    "ScoredGroup",
    "ScoredResponse",
    "StepRecord",
    "TeachByPolicy",
    "TeacherPass",
    "ValuePass",
    "Waiting",
    "evaluate",
    "follow",
    "in_turn",
    "iterate",
    "local_passes",
    "pieces",
    "ppo_step",
    "self_taught",
    "train",
    "turn_metrics",
    "with_teacher",
]
