"""What is wrong with how a run scores responses."""

from __future__ import annotations

import re

import attrs

from fppo.settings import TrainSettings
from fppo.settings_problems import Problems, problem, unread
from fppo.settings_reward import RewardModelSettings

FUNCTION = re.compile(r"[\w.]+:[\w.]+")


def reward_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section reward, with itself and with others."""
    yield from _functions(s)
    yield from _model(s.reward.model)


def _functions(s: TrainSettings) -> Problems:
    names, weights = s.reward.functions, s.reward.weights
    if not names and s.reward.model.path is None:
        text = "nothing scores the responses; give reward functions, or reward.model.path"
        yield problem("reward.functions", list(names), text)
    for name in names:
        if ":" in name and not FUNCTION.fullmatch(name):
            yield problem("reward.functions", list(names), f"{name!r} is not of the form module:function")
    if weights and len(weights) != len(names):
        text = f"needs one weight for each of the {len(names)} reward.functions, or none"
        yield problem("reward.weights", list(weights), text)
    if "regular_expression" in names and s.reward.pattern is None:
        yield problem("reward.pattern", None, "regular_expression in reward.functions needs a pattern")
    if "regular_expression" not in names:
        yield from unread("reward.pattern", s.reward.pattern, None, "regular_expression in reward.functions")
    if s.reward.pattern is not None:
        try:
            re.compile(s.reward.pattern)
        except re.error as error:
            yield problem("reward.pattern", s.reward.pattern, f"not a regular expression: {error}")
    if s.reward.overlong_buffer == 0:
        yield from unread("reward.overlong_penalty", s.reward.overlong_penalty, None, "reward.overlong_buffer > 0")
    if s.reward.overlong_buffer >= s.rollout.max_tokens:
        text = f"must be less than rollout.max_tokens = {s.rollout.max_tokens}"
        yield problem("reward.overlong_buffer", s.reward.overlong_buffer, text)


def _model(model: RewardModelSettings) -> Problems:
    if model.path is None:
        for field in attrs.fields(RewardModelSettings):
            value = getattr(model, field.name)
            yield from unread(f"reward.model.{field.name}", value, field.default, "reward.model.path")
    if model.micro_batch_size is not None and model.token_budget is not None:
        text = f"reward.model.token_budget = {model.token_budget} is given too; give one of the two"
        yield problem("reward.model.micro_batch_size", model.micro_batch_size, text)
