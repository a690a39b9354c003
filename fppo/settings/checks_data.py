"""What is wrong with where a run's prompts come from."""

from __future__ import annotations

import re
import string

from fppo.settings.checks_reward import FUNCTION
from fppo.settings.problems import Problems, problem, unread
from fppo.settings.train import TrainSettings

COMPARING = ("exact_match", "regular_expression", "math_verify")  # built-in rewards that read the ground truth


def has_held_out(settings: TrainSettings) -> bool:
    """Whether there are prompts to evaluate on."""
    return bool(settings.data.eval_path) or settings.data.eval_rows is not None


def data_problems(s: TrainSettings) -> Problems:
    """The conflicts of the section data."""
    data = s.data
    if not data.path and data.rows is None:
        yield problem(
            "data.path", [], "is not set; give jsonl, csv or parquet files, the name of a data set, or data.rows"
        )
    for path, rows in (("path", "rows"), ("eval_path", "eval_rows")):
        if getattr(data, path) and getattr(data, rows) is not None:
            text = f"data.{rows} = {getattr(data, rows)!r} is given too; give one of the two"
            yield problem(f"data.{path}", list(getattr(data, path)), text)
    for name in ("rows", "eval_rows", "sampler"):
        value = getattr(data, name)
        if value is not None and not FUNCTION.fullmatch(value):
            yield problem(f"data.{name}", value, "must be module:function")
    if data.sampler is not None and not data.shuffle:
        yield problem("data.shuffle", False, "data.sampler gives the order; leave one of them out")
    if not data.chat:
        for name, default in (("chat_template", None), ("chat_arguments", {}), ("tools", None), ("row_tools", None)):
            yield from unread(f"data.{name}", getattr(data, name), default, "data.chat = true")
    if data.seen:
        yield from _image_problems(s)
    if data.videos is None:
        for name in ("video_fps", "video_frames"):
            yield from unread(f"data.{name}", getattr(data, name), None, "data.videos")
    if data.video_fps is not None and data.video_frames is not None:
        text = f"data.video_fps = {data.video_fps} is given too; frames are picked by one of the two"
        yield problem("data.video_frames", data.video_frames, text)
    if not data.ground_truth:
        yield from _truth_problems(s)
    try:
        if any(not re.match(r"\w", name) for name in _template_fields(s.data.prompt)):
            hint = "a {} without the name of a field; write {{ and }} for plain braces"
            yield problem("data.prompt", s.data.prompt, hint)
    except ValueError as error:
        hint = f"not a template: {error}; write {{{{ and }}}} for plain braces"
        yield problem("data.prompt", s.data.prompt, hint)
    same = sorted(set(s.data.path) & set(s.data.eval_path))
    if same and (s.data.split == s.data.eval_split or any("." in path for path in same)):
        text = f"{same} are trained on too (data.path); held-out prompts must be others"
        yield problem("data.eval_path", list(s.data.eval_path), text)


def _truth_problems(s: TrainSettings) -> Problems:
    """What compares with a ground truth, where there is none."""
    readers = [f"reward {name}" for name in s.reward.functions if name in COMPARING]
    readers += ["critic.privileged"] if s.critic.privileged else []
    readers += ["eval.exact_values"] if s.eval.exact_values else []
    judge = s.reward.judge
    readers += ["reward.judge.template"] if judge.path and "{ground_truth}" in judge.template else []
    if readers:
        yield problem("data.ground_truth", "", f"{', '.join(readers)} would read it; give a field of the rows")


def _image_problems(s: TrainSettings) -> Problems:
    """What images and videos do not go with, or not yet."""
    names = " and ".join(name.removeprefix("data.") for name in s.data.seen)
    if not s.data.chat:
        for name, field in s.data.seen.items():
            yield problem(name, field, f"{names} stand in chat messages: give data.chat = true")
    if s.data.over_long == "truncate":
        yield problem("data.over_long", "truncate", f"would cut {names} apart; give error or drop")
    text = f"prompts with {names} ({', '.join(s.data.seen)}) do not go with it yet; leave one of them out"
    settings = {
        "data.row_tools": (s.data.row_tools, None),
        "rollout.turns.respond": (s.rollout.turns.respond, None),
        "critic.privileged": (s.critic.privileged, 0),
        "reward.model.path": (s.reward.model.path, None),
        "reward.judge.path": (s.reward.judge.path, None),
    }
    for name, (value, default) in settings.items():
        if value != default:
            yield problem(name, value, text)


def _template_fields(text: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
