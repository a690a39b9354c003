"""Reward functions, run in isolation and with time limits, and validation metrics of their scores.

In: a `Rollout` and functions of samples, or models and judges. Out: `Scored`, with a score [B] (nan for a failed row),
and counts of failures. Worker processes import this package to load the functions, so nothing here imports torch at the
top. Begin with `runner.RewardRunner` and `scoring.score`; `early` scores rows while others are still sampled.
"""

from fppo.rewards.builtin import exact_match, length_penalty, math_verify, regular_expression
from fppo.rewards.functions import (
    Reward,
    RewardFn,
    batch_reward,
    inline_reward,
    shaping_reward,
    tensor_reward,
    weighted_sum,
)
from fppo.rewards.resolve import combine, resolve
from fppo.rewards.runner import Failure, RewardResults, RewardRunner
from fppo.rewards.scoring import samples_of, score
from fppo.rewards.validation import best_at_k, majority_at_k, summarize
from fppo.workers.sample import Sample, StepRewards

__all__ = [
    "Failure",
    "Reward",
    "RewardFn",
    "RewardResults",
    "RewardRunner",
    "Sample",
    "StepRewards",
    "batch_reward",
    "best_at_k",
    "combine",
    "exact_match",
    "inline_reward",
    "length_penalty",
    "majority_at_k",
    "math_verify",
    "regular_expression",
    "resolve",
    "samples_of",
    "score",
    "shaping_reward",
    "summarize",
    "tensor_reward",
    "weighted_sum",
]
