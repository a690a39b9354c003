"""Checks of the source of a run's prompts, and of the scoring of responses."""

from __future__ import annotations

import re
import string
from pathlib import Path

from fppo.data.read import FORMATS
from fppo.fields import FUNCTION, Problem, Problems, only, problem_at, unread_problems, value_at
from fppo.settings.checks_rollout import too_short, vllm_problems
from fppo.settings.component import keyword_problems, value_of
from fppo.settings.reward import RewardSettings
from fppo.settings.rollout import CUTS, RolloutSettings
from fppo.settings.tables import ESTIMATORS, REWARDS
from fppo.settings.train import TrainSettings

COMPARING = ("exact_match", "regular_expression", "math_verify")  # built-in rewards that read the ground truth


def data_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section data."""
    data = s.data
    if not data.path and data.rows is None and not s.rollout.environment.used:
        text = "is not set; give jsonl, csv or parquet files, the name of a data set, or data.rows"
        yield problem_at(s, "data.path", text)
    for path, rows in (("path", "rows"), ("eval_path", "eval_rows")):
        if getattr(data, path) and getattr(data, rows) is not None:
            yield problem_at(
                s, f"data.{path}", f"data.{rows} = {getattr(data, rows)!r} is given too; give one of the two"
            )
    if data.stream is not None and all(Path(x).suffix.lower() in FORMATS for x in (*data.path, *data.eval_path)):
        yield problem_at(
            s, "data.stream", "only data sets by name are streamed, and files are read whole; leave it out"
        )
    if data.sampler is not None and not data.shuffle:
        yield problem_at(s, "data.shuffle", "data.sampler gives the order; leave one of them out")
    if data.curriculum.used:
        text = f"data.curriculum = {data.curriculum.name!r} chooses the prompts; leave one of them out"
        if data.sampler is not None:
            yield problem_at(s, "data.sampler", text)
        elif not data.shuffle:
            yield problem_at(s, "data.shuffle", text)
        if s.rollout.from_ is not None:
            yield problem_at(s, "rollout.from", f"no prompts are drawn: {text}")
    if not data.chat:
        names = ("chat_template", "chat_arguments", "tools", "row_tools")
        yield from unread_problems(s, (f"data.{name}" for name in names), "data.chat = true")
    if data.seen:
        yield from _images(s)
    if data.videos is None:
        yield from unread_problems(s, ["data.video_fps", "data.video_frames"], "data.videos")
    if data.video_fps is not None and data.video_frames is not None:
        text = f"data.video_fps = {data.video_fps} is given too; frames are picked by one of the two"
        yield problem_at(s, "data.video_frames", text)
    if not data.ground_truth:
        yield from _truth(s)
    try:
        if any(not re.match(r"\w", name) for name in _template_fields(data.prompt)):
            yield problem_at(s, "data.prompt", "a {} without the name of a field; write {{ and }} for plain braces")
    except ValueError as error:
        yield problem_at(s, "data.prompt", f"not a template: {error}; write {{{{ and }}}} for plain braces")
    same = sorted(set(data.path) & set(data.eval_path))
    if same and (data.split == data.eval_split or any("." in path for path in same)):
        yield problem_at(s, "data.eval_path", f"{same} are trained on too (data.path); held-out prompts must be others")


def _truth(s: TrainSettings) -> Problems:
    """Yield a problem if readers of the ground truth are set without one."""
    readers = [f"reward {name}" for name in s.reward.functions if name in COMPARING]
    readers += ["critic.privileged"] if s.critic.privileged else []
    readers += ["eval.exact_values"] if s.eval.exact_values else []
    judge = s.reward.judge
    readers += ["reward.judge.template"] if judge.path and "{ground_truth}" in judge.template else []
    if readers:
        yield problem_at(s, "data.ground_truth", f"{', '.join(readers)} would read it; give a field of the rows")


def _images(s: TrainSettings) -> Problems:
    """Yield the conflicts of other settings with images and videos."""
    names = " and ".join(name.removeprefix("data.") for name in s.data.seen)
    if not s.data.chat:
        for name in s.data.seen:
            yield problem_at(s, name, f"{names} stand in chat messages: give data.chat = true")
    if s.data.over_long == "truncate":
        yield problem_at(s, "data.over_long", f"would cut {names} apart; give error or drop")
    text = f"prompts with {names} ({', '.join(s.data.seen)}) do not go with it yet; leave one of them out"
    others = ("data.row_tools", "rollout.turns.respond", "critic.privileged")
    others += ("reward.model.path", "reward.judge.path", "model.teacher_path")
    for name in others:
        if value_at(s, name) not in (None, 0):
            yield problem_at(s, name, text)
    if s.rollout.environment.used:
        yield problem_at(s, "rollout.environment.name", text)


def _template_fields(text: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]


def eval_problems(s: TrainSettings) -> Problems:
    """Yield the problems of the settings of held-out prompts."""
    section = s.eval
    if section.every and not s.has_held_out:
        yield problem_at(s, "eval.every", "there are no held-out prompts; give data.eval_path")
    if not s.has_held_out:
        found = unread_problems(s, ["eval"], "held-out prompts, data.eval_path")
        yield from (problem for problem in found if problem.path not in ("eval.every", "eval.before"))
    elif section.temperature == 0:
        yield from unread_problems(s, (f"eval.{name}" for name in CUTS), "eval.temperature > 0")
    if section.n > 1 and section.temperature == 0:
        text = f"the likeliest response is the same all {section.n} times; give a temperature, or eval.n = 1"
        yield problem_at(s, "eval.temperature", text)
    if section.exact_values:
        yield from (
            problem_at(s, "eval.exact_values", f"exact values need {text}") for text in _lacks_of_exact_values(s)
        )


def _lacks_of_exact_values(s: TrainSettings) -> list[str]:
    """List the requirements of `eval.exact_values` that the settings do not meet. If all are met, the exact value of a
    prompt is the probability of its one right answer, or the expected return of a game."""
    used, respond = ("functions", "weights", "overlong_buffer", "model", "judge"), s.rollout.turns.respond
    score = "exact_match" if respond is None else f"{respond}.score"
    bare = RewardSettings(functions=(score,))
    rewards, bare = ([getattr(section, name) for name in used] for section in (s.reward, bare))
    of_game = "" if respond is None else ", the score of the game that responds"
    gamma = value_of(s.algorithm.advantage, ESTIMATORS, "gamma", 1.0)
    cuts, full = (only(rollout, *CUTS) for rollout in (s.rollout, RolloutSettings()))
    needed = {
        "held-out prompts; give data.eval_path": s.has_held_out,
        "no environment; leave rollout.environment out": not s.rollout.environment.used,
        "a critic; give algorithm.advantage = 'gae'": s.algorithm.uses_critic,
        f"the reward of {score} alone{of_game}; leave the rest of [reward] as it is": rewards == bare,
        f"all tokens; give {' and '.join(f'rollout.{name} = {x}' for name, x in full.items())}": cuts == full,
        "responses that no text ends; leave rollout.stop empty": respond is not None or not s.rollout.stop,
        "a discount for tokens; with turns and turn_gae give algorithm.advantage.gamma = 1.0": (
            respond is None or s.algorithm.advantage.name != "turn_gae" or gamma == 1.0
        ),
    }
    return [text for text, met in needed.items() if not met]


def reward_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section reward, with itself and with others."""
    yield from _functions(s)
    model = s.reward.model
    if model.path is None:
        yield from unread_problems(s, ["reward.model"], "reward.model.path")
    elif model.max_tokens is None:
        yield from unread_problems(s, ["reward.model.over_long"], "reward.model.max_tokens")
    if model.micro_batch_size is not None and model.token_budget is not None:
        text = f"reward.model.token_budget = {model.token_budget} is given too; give one of the two"
        yield problem_at(s, "reward.model.micro_batch_size", text)
    yield from _judge(s)


def _functions(s: TrainSettings) -> Problems:
    section, names, weights = s.reward, s.reward.functions, s.reward.weights
    if not s.has_reward and not s.loads_teacher:
        text = "nothing scores the responses; give reward functions, reward.model.path or reward.judge.path"
        yield problem_at(s, "reward.functions", text)
    if not s.has_reward:
        yield from unread_problems(s, ["reward.overlong_buffer", "reward.failure_score"], "a reward")
    for name in names:
        if ":" in name and not FUNCTION.fullmatch(name):
            yield problem_at(s, "reward.functions", f"{name!r} is not of the form module:function")
    if weights and len(weights) != len(names):
        text = f"needs one weight for each of the {len(names)} reward.functions, or none"
        yield problem_at(s, "reward.weights", text)
    yield from _all_zero(s)
    for name in names:
        keywords = section.arguments.get(name, {})
        if isinstance(keywords, dict):
            yield from keyword_problems(f"reward.arguments.{name}", name, keywords, REWARDS)
    for name, keywords in section.arguments.items():
        if name not in names:
            text = f"nothing reads it here: it is for functions among reward.functions = {[*names]}; leave it out"
            yield Problem(f"reward.arguments.{name}", keywords, text)
        elif not isinstance(keywords, dict):
            yield Problem(f"reward.arguments.{name}", keywords, "must be a table of keywords, as {pattern = '[0-9]+'}")
    if section.overlong_buffer == 0:
        yield from unread_problems(s, ["reward.overlong_penalty"], "reward.overlong_buffer > 0")
    if section.overlong_buffer >= s.rollout.max_tokens:
        yield problem_at(s, "reward.overlong_buffer", f"must be less than rollout.max_tokens = {s.rollout.max_tokens}")


def _all_zero(s: TrainSettings) -> Problems:
    """Yield a problem if all weights of rewards are 0, so that every response would score the same."""
    named = {"reward.weights": s.reward.weights or ((1.0,) if s.reward.functions else ())}
    named |= {"reward.model.weight": (s.reward.model.weight,)} if s.reward.model.path is not None else {}
    named |= {"reward.judge.weight": (s.reward.judge.weight,)} if s.reward.judge.path is not None else {}
    if any(named.values()) and not any(weight for each in named.values() for weight in each):
        text = "every response would score 0, and nothing would be learned; give one of the rewards another weight"
        yield problem_at(s, next(name for name, each in named.items() if each), text)


def _judge(s: TrainSettings) -> Problems:
    judge, path = s.reward.judge, "reward.judge"
    if judge.path is None:
        found = unread_problems(s, [path], f"{path}.path")
        yield from (problem for problem in found if not problem.path.startswith(f"{path}.vllm."))
    if not judge.on_vllm:
        yield from unread_problems(s, [f"{path}.vllm"], f'{path}.engine = "vllm"')
        return
    yield from unread_problems(s, [f"{path}.max_rows", f"{path}.offload"], f'{path}.engine = "embedded"')
    own, other = judge.vllm, s.rollout.vllm
    needed = judge.max_prompt_tokens + judge.max_tokens
    yield from too_short(s, f"{path}.vllm", needed, f"{path}.max_prompt_tokens and max_tokens")
    yield from vllm_problems(s, f"{path}.vllm")
    if own.transport != "auto":
        yield problem_at(s, f"{path}.vllm.transport", "a judge's weights are sent once, from the host; leave it out")
    if s.rollout.engine == "vllm" and own.host == other.host == "local":
        text = "a process runs one vLLM, and this one that of rollout.vllm; "
        yield problem_at(s, f"{path}.vllm.host", f'{text}give "process", for one of its own, or "ray"')
    if s.rollout.engine == "vllm" and (own.memory_share or 0) + (other.memory_share or 0) > 1:
        text = f"with rollout.vllm.memory_share = {other.memory_share} it is more than all of the device's memory"
        yield problem_at(s, f"{path}.vllm.memory_share", text)
