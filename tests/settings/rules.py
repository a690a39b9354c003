"""Settings that agree, and how a rule between settings is checked from both sides."""

from __future__ import annotations

from typing import Any

from fppo.settings import checks, files
from fppo.settings.train import TrainSettings

BASE = {"model.path": "m", "data.path": ["a.jsonl"], "reward.functions": ["exact_match"]}
HELD = {"data.eval_path": ["b.jsonl"]}
GROUPS = {"algorithm.advantage": "grpo", "rollout.n": 2}
NO_CRITIC = {"algorithm.advantage": "reinforce_plus_plus"}
VLLM = {"rollout.engine": "vllm"}
APART = VLLM | {"rollout.vllm.host": "process"}
ENV = {"rollout.environment": "my:env", "reward.functions": []}
AGENT = {"rollout.environment": "agent", "rollout.environment.play": "my:play", "reward.functions": []}
TOOL = {"rollout.turns.respond": "my:tool"}
SAVED = {"rollout.from": "saved"}
JUDGE = {"reward.judge.path": "j"}
SCORER = {"reward.model.path": "r"}
LORA = {"model.lora.rank": 4}
KL = {"actor.kl_coef": 0.1}
TAUGHT = {
    "algorithm.advantage": "distill",
    "model.teacher_path": "t",
    "model.teacher_dtype": "bfloat16",
    "model.teacher_offload": True,
}
OWN_PROMPTS = TAUGHT | {"data.teacher_prompt": "x", "data.teacher_prompt_tokens": 9}
UNSCORED = TAUGHT | HELD | {"reward.functions": [], "eval.temperature": 1.0}
IMAGES = {"data.chat": True, "data.images": "i"}
EXACT = HELD | {"eval.exact_values": True}
GAME = EXACT | {"rollout.turns.respond": "my:game", "reward.functions": ["my:game.score"]}

Rule = tuple[dict[str, Any], dict[str, Any], list[str]]


def make(changes: dict[str, Any]) -> TrainSettings:
    return files.replace(TrainSettings(), BASE | changes)


def numbered(rules: list[Any]) -> list[str]:
    return [f"{rule[-1][0]}-{number}" for number, rule in enumerate(rules)]


WRONG: dict[str, list[str]] = {}  # what is wrong with settings of which several rows are one step away


def check_rule(agreeing: dict[str, Any], step: dict[str, Any], named: list[str]) -> None:
    if (text := repr(agreeing)) not in WRONG:
        WRONG[text] = [*map(str, checks.problems(make(agreeing)))]
    assert WRONG[text] == [], WRONG[text]
    found = checks.problems(make(agreeing | step))
    assert sorted(problem.path for problem in found) == sorted(named), [*map(str, found)]
