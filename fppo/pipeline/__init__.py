"""A run as state and stages: one step of it, the loop around it, and what computes or compares its steps again.

In: a `RunState` and a `Program` of stages: sample, score, annotate, estimate, update. Out: the next state, the step's
`Experience` and metrics. Each stage adds columns to the record of the stage before it.
Begin with `step.ppo_step` and `wiring.pieces`; `stages` has the stages, `estimators` what reads their columns.
"""

from fppo.pipeline.estimators import OfRows
from fppo.pipeline.evaluate import evaluate
from fppo.pipeline.passes import Passes, policy_pass, value_pass
from fppo.pipeline.program import Draw, Program, RunState, in_turn, sample_batch
from fppo.pipeline.stages import annotate, annotate_by, estimate, rollout_stage, score_stage, score_with_greedy
from fppo.pipeline.step import ppo_step
from fppo.pipeline.train import Evaluation, StepRecord, iterate, train
from fppo.pipeline.waiting import Waiting
from fppo.pipeline.wiring import Pieces, pieces

__all__ = [
    "Draw",
    "Evaluation",
    "OfRows",
    "Passes",
    "Pieces",
    "Program",
    "RunState",
    "StepRecord",
    "Waiting",
    "annotate",
    "annotate_by",
    "estimate",
    "evaluate",
    "in_turn",
    "iterate",
    "pieces",
    "policy_pass",
    "ppo_step",
    "rollout_stage",
    "sample_batch",
    "score_stage",
    "score_with_greedy",
    "train",
    "value_pass",
]
