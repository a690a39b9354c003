"""Advantages as pure functions of rewards, values, masks and groups; no gradient passes through them.

In: token rewards [B, T] or scores [B], the response mask bool [B, T], and values, groups or baselines. Out:
`Advantages`, a pair of advantages and returns [B, T], 0 outside the mask; `whiten` gives them mean 0 and variance 1.
Begin with `grouped.grpo` and `temporal.gae`; `exact` has the true values of small games.
"""

from fppo.advantages._common import Advantages, equal_scores
from fppo.advantages.by_turn import by_turn
from fppo.advantages.distillation import mean_reverse_kl, reverse_kl
from fppo.advantages.ensemble import decisive, disagreement, undisputed
from fppo.advantages.exact import GameTree, GameValues, exact_values, game_values
from fppo.advantages.grouped import (
    SCALES,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    lite_ppo,
    maxrl,
    opo,
    pkpo,
    qae,
    reinforce_plus_plus_baseline,
    rloo,
)
from fppo.advantages.process import grpo_process
from fppo.advantages.temporal import (
    discounted_returns,
    gae,
    length_lam,
    reinforce_plus_plus,
    remax,
    td,
    token_rewards,
    turn_gae,
    turn_returns,
    vtrace,
)
from fppo.advantages.token_baseline import optimal_token_baseline
from fppo.advantages.whitening import whiten

# estimators with whitening built in, whose advantages are whitened again once rows have left the mask
WHITENED = (reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo)

__all__ = [
    "SCALES",
    "WHITENED",
    "Advantages",
    "GameTree",
    "GameValues",
    "by_turn",
    "decisive",
    "disagreement",
    "discounted_returns",
    "equal_scores",
    "exact_values",
    "gae",
    "game_values",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_process",
    "length_lam",
    "lite_ppo",
    "maxrl",
    "mean_reverse_kl",
    "opo",
    "optimal_token_baseline",
    "pkpo",
    "qae",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "reverse_kl",
    "rloo",
    "td",
    "token_rewards",
    "turn_gae",
    "turn_returns",
    "undisputed",
    "vtrace",
    "whiten",
]
