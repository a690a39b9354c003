"""What the settings of sampling do not go with."""

from __future__ import annotations

from fppo.settings.component import requires
from fppo.settings.problems import Problems, problem, unread
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import TrainSettings


def sampling_problems(s: TrainSettings) -> Problems:
    """What is sampled ahead, filtered, or read from files."""
    kept, default = s.rollout.filter, type(s.rollout.filter)()
    if not kept.groups:
        for name in ("by", "max_draws"):
            value = getattr(kept, name)
            yield from unread(f"rollout.filter.{name}", value, getattr(default, name), "rollout.filter.groups")
    elif s.rollout.n == 1:
        yield problem("rollout.filter.groups", True, "rollout.n = 1: a single response has no other to equal; raise it")
    if s.rollout.ahead > s.steps:
        text = f"the run has {s.steps} steps, and batches of later ones would be made for nothing; give that or fewer"
        yield problem("rollout.ahead", s.rollout.ahead, text)
    yield from _interrupts(s)
    if s.rollout.from_ is None:
        return
    for name, value in (("ahead", s.rollout.ahead), ("save", s.rollout.save)):
        if value:
            yield problem(f"rollout.{name}", value, "rollout.from is given: nothing is sampled; leave one of them out")
    if requires(s.algorithm.advantage, ESTIMATORS, "baselines"):
        text = (
            f"{s.algorithm.advantage.name} samples a baseline for each prompt; take another estimator, or leave it out"
        )
        yield problem("rollout.from", s.rollout.from_, text)


def _interrupts(s: TrainSettings) -> Problems:
    """What newer weights do not get into."""
    every, texts = s.rollout.interrupt, list[str]()
    if not every:
        return
    if not s.rollout.ahead:
        texts.append("rollout.ahead = 0: nothing is sampled while weights change; give rollout.ahead = 1 or more")
    if s.rollout.turns.respond is not None:
        texts.append("rollout.turns.respond: turns are not interrupted yet; leave one of them out")
    if requires(s.algorithm.advantage, ESTIMATORS, "baselines"):
        text = f"{s.algorithm.advantage.name} compares with a greedy response of one policy"
        texts.append(f"{text}; take another estimator, or leave it out")
    if s.algorithm.router_replay == "rollout":
        texts.append(
            'algorithm.router_replay = "rollout": each piece chooses experts anew; give "all", or leave it out'
        )
    yield from (problem("rollout.interrupt", every, text) for text in texts)
