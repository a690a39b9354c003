"""What is wrong with how a run scores responses."""

from __future__ import annotations

import re

import attrs

from fppo.rewards.question import pattern_problem, template_problem
from fppo.settings.checks_vllm import too_short, vllm_on_ranks, vllm_problems
from fppo.settings.component import keyword_problems
from fppo.settings.problems import Problems, problem, unread, unread_section
from fppo.settings.reward import JudgeSettings, RewardModelSettings
from fppo.settings.tables import REWARDS
from fppo.settings.train import TrainSettings

FUNCTION = re.compile(r"[\w.]+:[\w.]+")


def reward_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section reward, with itself and with others."""
    yield from _functions(s)
    yield from _model(s.reward.model)
    yield from _judge(s)


def judge_on_ranks(s: TrainSettings, world: int) -> Problems:
    """What keeps a judge from running beside `world` - 1 others."""
    judge = s.reward.judge
    if judge.path is not None and judge.engine == "vllm":
        yield from vllm_on_ranks(judge.vllm, "reward.judge.vllm", world)


def _functions(s: TrainSettings) -> Problems:
    names, weights = s.reward.functions, s.reward.weights
    if not names and s.reward.model.path is None and s.reward.judge.path is None:
        text = "nothing scores the responses; give reward functions, reward.model.path or reward.judge.path"
        yield problem("reward.functions", list(names), text)
    for name in names:
        if ":" in name and not FUNCTION.fullmatch(name):
            yield problem("reward.functions", list(names), f"{name!r} is not of the form module:function")
    if weights and len(weights) != len(names):
        text = f"needs one weight for each of the {len(names)} reward.functions, or none"
        yield problem("reward.weights", list(weights), text)
    yield from _all_zero(s)
    for name in names:
        keywords = s.reward.arguments.get(name, {})
        if isinstance(keywords, dict):
            yield from keyword_problems(f"reward.arguments.{name}", name, keywords, REWARDS)
    for name, keywords in s.reward.arguments.items():
        if name not in names:
            yield from unread(
                f"reward.arguments.{name}", keywords, None, f"functions among reward.functions = {[*names]}"
            )
        elif not isinstance(keywords, dict):
            yield problem(f"reward.arguments.{name}", keywords, "must be a table of keywords, as {pattern = '[0-9]+'}")
    if s.reward.overlong_buffer == 0:
        yield from unread("reward.overlong_penalty", s.reward.overlong_penalty, None, "reward.overlong_buffer > 0")
    if s.reward.overlong_buffer >= s.rollout.max_tokens:
        text = f"must be less than rollout.max_tokens = {s.rollout.max_tokens}"
        yield problem("reward.overlong_buffer", s.reward.overlong_buffer, text)


def _all_zero(s: TrainSettings) -> Problems:
    """Weights under which every response scores the same."""
    named = {"reward.weights": s.reward.weights or ((1.0,) if s.reward.functions else ())}
    named |= {"reward.model.weight": (s.reward.model.weight,)} if s.reward.model.path is not None else {}
    named |= {"reward.judge.weight": (s.reward.judge.weight,)} if s.reward.judge.path is not None else {}
    if any(named.values()) and not any(weight for each in named.values() for weight in each):
        name = next(name for name, each in named.items() if each)
        value = list(named[name]) if name == "reward.weights" else 0.0
        text = "every response would score 0, and nothing would be learned; give one of the rewards another weight"
        yield problem(name, value, text)


def _model(model: RewardModelSettings) -> Problems:
    if model.path is None:
        yield from unread_section(model, "reward.model", "reward.model.path")
    if model.micro_batch_size is not None and model.token_budget is not None:
        text = f"reward.model.token_budget = {model.token_budget} is given too; give one of the two"
        yield problem("reward.model.micro_batch_size", model.micro_batch_size, text)


def _judge(s: TrainSettings) -> Problems:
    judge, path = s.reward.judge, "reward.judge"
    if judge.path is None:
        yield from unread_section(attrs.evolve(judge, vllm=type(judge.vllm)()), path, "reward.judge.path")
    for name, find in (("template", template_problem), ("pattern", pattern_problem)):
        value = getattr(judge, name)
        if value and (wrong := find(value)):
            yield problem(f"{path}.{name}", value, wrong)
    if judge.path is None or judge.engine != "vllm":
        yield from unread_section(judge.vllm, f"{path}.vllm", 'reward.judge.engine = "vllm"')
    if judge.path is not None and judge.engine == "vllm":
        reader = 'reward.judge.engine = "embedded"'
        yield from unread(f"{path}.max_rows", judge.max_rows, attrs.fields(JudgeSettings).max_rows.default, reader)
        yield from unread(f"{path}.offload", judge.offload, None, reader)
        yield from _judge_on_vllm(s)


def _judge_on_vllm(s: TrainSettings) -> Problems:
    judge, own, other = s.reward.judge, s.reward.judge.vllm, s.rollout.vllm
    path = "reward.judge.vllm"
    needed = judge.max_prompt_tokens + judge.max_tokens
    yield from too_short(own, path, needed, "reward.judge.max_prompt_tokens and max_tokens")
    yield from vllm_problems(own, path)
    if own.transport != "auto":
        yield problem(
            f"{path}.transport", own.transport, "a judge's weights are sent once, from the host; leave it out"
        )
    if s.rollout.engine == "vllm" and own.host == other.host == "local":
        text = (
            'a process runs one vLLM, and this one that of rollout.vllm; give "process", for one of its own, or "ray"'
        )
        yield problem(f"{path}.host", own.host, text)
    if s.rollout.engine == "vllm" and (own.memory_share or 0) + (other.memory_share or 0) > 1:
        text = f"with rollout.vllm.memory_share = {other.memory_share} it is more than all of the device's memory"
        yield problem(f"{path}.memory_share", own.memory_share, text)
