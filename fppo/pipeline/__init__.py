"""A run as state and stages: one step of it, the loop around it, and what computes or compares its steps again."""

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
