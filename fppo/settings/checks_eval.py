"""What is wrong with the settings of evaluations."""

from __future__ import annotations

import attrs

from fppo.settings.checks_data import has_held_out
from fppo.settings.component import value_of
from fppo.settings.problems import Problems, problem, unread, unread_section
from fppo.settings.reward import RewardSettings
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import TrainSettings


def eval_problems(s: TrainSettings, *, critic: bool) -> Problems:
    """What is wrong with how held-out prompts are answered, in a run that has a critic or has none."""
    if s.eval.every and not has_held_out(s):
        yield problem("eval.every", s.eval.every, "there are no held-out prompts; give data.eval_path")
    if not has_held_out(s):
        unasked = attrs.evolve(s.eval, every=0, before=True)
        yield from unread_section(unasked, "eval", "held-out prompts, data.eval_path")
    elif s.eval.temperature == 0:
        for name in ("top_k", "top_p"):
            yield from unread(f"eval.{name}", getattr(s.eval, name), None, "eval.temperature > 0")
    if s.eval.n > 1 and s.eval.temperature == 0:
        text = f"the likeliest response is the same all {s.eval.n} times; give a temperature, or eval.n = 1"
        yield problem("eval.temperature", s.eval.temperature, text)
    if s.eval.exact_values:
        yield from _exact_values(s, critic)


def _exact_values(s: TrainSettings, critic: bool) -> Problems:
    """What keeps the value of a prompt from being the probability of its one right answer, or that of a game."""
    used, respond = ("functions", "weights", "overlong_buffer", "model", "judge"), s.rollout.turns.respond
    score = "exact_match" if respond is None else f"{respond}.score"
    bare = RewardSettings(functions=(score,))
    rewards, bare = ([getattr(section, name) for name in used] for section in (s.reward, bare))
    of_game = "" if respond is None else ", the score of the game that responds"
    gamma = value_of(s.algorithm.advantage, ESTIMATORS, "gamma", 1.0)
    needed = {
        "held-out prompts; give data.eval_path": has_held_out(s),
        "a critic; give algorithm.advantage = 'gae'": critic,
        f"the reward of {score} alone{of_game}; leave the rest of [reward] as it is": rewards == bare,
        "all tokens; give rollout.top_k = None and rollout.top_p = 1.0": not s.rollout.top_k and s.rollout.top_p == 1.0,
        "responses that no text ends; leave rollout.stop empty": respond is not None or not s.rollout.stop,
        "a discount for tokens; with turns and turn_gae give algorithm.advantage.gamma = 1.0": (
            respond is None or s.algorithm.advantage.name != "turn_gae" or gamma == 1.0
        ),
    }
    for text, there in needed.items():
        if not there:
            yield problem("eval.exact_values", True, f"exact values need {text}")
