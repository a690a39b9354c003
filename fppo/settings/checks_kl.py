"""What is wrong with the settings of KL terms, in the rewards and in the policy's loss."""

from __future__ import annotations

from fppo.settings.algorithm import KlRewardSettings
from fppo.settings.component import requires
from fppo.settings.problems import Problems, problem, unread
from fppo.settings.tables import ESTIMATORS
from fppo.settings.train import ActorSettings, TrainSettings


def kl_problems(s: TrainSettings) -> Problems:
    """The conflicts of algorithm.kl, actor.kl_coef and actor.kl_kind."""
    kl, default = s.algorithm.kl, KlRewardSettings()
    if kl.controller == "adaptive" and kl.coef == 0:
        text = "the adaptive controller multiplies coef, which is 0; give a first algorithm.kl.coef"
        yield problem("algorithm.kl.controller", kl.controller, text)
    if kl.controller == "fixed":
        yield from unread("algorithm.kl.target", kl.target, default.target, "the adaptive controller")
        yield from unread("algorithm.kl.horizon", kl.horizon, default.horizon, "the adaptive controller")
    if kl.coef == 0:
        yield from unread("algorithm.kl.kind", kl.kind, default.kind, "algorithm.kl.coef > 0")
    elif kl.kind not in ("k1", "k1+"):
        text = "is for losses: penalties of its value do not add up to the divergence's gradient; give k1"
        yield problem("algorithm.kl.kind", kl.kind, text)
    if kl.coef > 0 and requires(s.algorithm.advantage, ESTIMATORS, "named_scores"):
        text = "compares the reward's functions one by one, and would not see it; give actor.kl_coef in its place"
        text = f"{s.algorithm.advantage.name} {text}"
        yield problem("algorithm.kl.coef", kl.coef, text)
    if s.actor.kl_coef == 0:
        yield from unread("actor.kl_kind", s.actor.kl_kind, ActorSettings().kl_kind, "actor.kl_coef > 0")
    elif s.actor.kl_kind == "k1":
        text = "its expected gradient is 0, which makes it no KL term; give k3, or k2, whose is the divergence's"
        yield problem("actor.kl_kind", s.actor.kl_kind, text)
