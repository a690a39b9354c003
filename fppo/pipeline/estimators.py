"""Advantage estimators by name, as functions of annotated rows and their token rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import attrs
import torch
from torch import Tensor

from fppo import advantages, losses
from fppo.advantages import Advantages
from fppo.batch import Annotated
from fppo.losses import Correction
from fppo_kernels.gae.scan import scan

AdvantageFn = Callable[[Annotated, Tensor], Advantages]  # of rows and their token rewards [B, T]
GroupFn = Callable[[Tensor, Tensor, Tensor], Advantages | Tensor]  # of scores [B], mask [B, T] and groups [B]
Estimator = AdvantageFn | GroupFn
CRITIC = ("gae", "turn_gae", "td", "vtrace")  # those that have a critic
NAMES = (
    *CRITIC,
    "grpo",
    "rloo",
    "opo",
    "gpg",
    "remax",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
    "gdpo",
)
GROUPED = (
    *("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline", "optimal_token_baseline", "gdpo"),
)
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")  # those that whiten what they estimate


@attrs.frozen(kw_only=True)
class Along:
    """The scalars of the estimators along the tokens of a row, each as the function of `fppo.advantages` has it."""

    gamma: float = 1.0
    lam: float = 1.0
    critic_lam: float | None = None  # of "gae"
    alpha: float | None = None  # of "gae": the policy's lam is `advantages.length_lam`
    steps: int = 1  # of "td"
    cut: float = 1.0  # of "vtrace"


PLAIN = Along()
by_token = partial(losses.rollout_correction, level="token")


def estimator(
    name: str,
    *,
    along: Along = PLAIN,
    scale: str = "std",
    leave_one_out: bool = False,
    gae: Callable[..., tuple[Tensor, Tensor]] = scan,
    weights: Mapping[str, float] | None = None,
    correct: Callable[[Tensor, Tensor, Tensor], Correction] = by_token,
) -> AdvantageFn:
    """The estimator of that name with its scalars bound: (annotated rows, token rewards [B, T]) -> Advantages.

    Group estimators compare the sums of the token rewards, so a KL penalty in the rewards reaches them too; "gdpo",
    which compares the reward's functions one by one, refuses rewards with anything else in them. `leave_one_out` is for
    "opo" and "optimal_token_baseline". `gae` is the kernel
    that "gae" calls, `weights` are those of "gdpo", and `correct` gives those of "vtrace" from the old log-probs, the
    engine's and the mask; it should be the correction of the stage, whose weights multiply the policy loss. A row that
    is alone in its group because the others have no score has an advantage of 0. Raises ValueError for a name that
    there is not; the function, for columns that it needs and lacks, for a correction without weights, and for groups of
    one row each.
    """
    if name not in NAMES:
        raise ValueError(f"unknown advantage estimator {name!r}; there are {list(NAMES)}")
    if name in CRITIC:
        return partial(_with_critic, name=name, along=along, gae=gae, correct=correct)
    bound = {"gamma": along.gamma, "scale": scale, "leave_one_out": leave_one_out, "weights": weights}
    return partial(_estimate, name=name, **bound)


def of_values(
    name: str,
    along: Along = PLAIN,
    *,
    gae: Callable[..., tuple[Tensor, Tensor]] = scan,
    weights: Tensor | None = None,
) -> Callable[[Tensor, Tensor, Tensor], Advantages]:
    """An estimator of `CRITIC` by name as a function of token rewards, values and mask [B, T]. "vtrace" takes `weights`
    [B, T], or those of tokens that the policy itself sampled, 1."""

    def estimate(rewards: Tensor, values: Tensor, mask: Tensor) -> Advantages:
        match name:
            case "turn_gae":
                return advantages.turn_gae(rewards, values, mask, gamma=along.gamma, lam=along.lam)
            case "td":
                return advantages.td(rewards, values, mask, steps=along.steps, gamma=along.gamma)
            case "vtrace":
                own = torch.ones_like(rewards) if weights is None else weights
                return advantages.vtrace(rewards, values, own, mask, gamma=along.gamma, lam=along.lam, cut=along.cut)
            case _:
                lam = along.lam if along.alpha is None else advantages.length_lam(mask, alpha=along.alpha)
                return advantages.gae(
                    rewards, values, mask, gamma=along.gamma, lam=lam, critic_lam=along.critic_lam, kernel=gae
                )

    return estimate


def _with_critic(
    rows: Annotated,
    rewards: Tensor,
    *,
    name: str,
    along: Along,
    gae: Callable[..., tuple[Tensor, Tensor]],
    correct: Callable[[Tensor, Tensor, Tensor], Correction],
) -> Advantages:
    mask, values = rows.response_mask, _required(rows.values, name, "values")
    weights = None
    if name == "vtrace":
        weights = _required(correct(rows.old_log_probs, rows.rollout_log_probs, mask).weights, name, "weights")
    return of_values(name, along, gae=gae, weights=weights)(rewards, values, mask)


def _estimate(
    rows: Annotated,
    rewards: Tensor,
    *,
    name: str,
    gamma: float,
    scale: str,
    leave_one_out: bool,
    weights: Mapping[str, float] | None,
) -> Advantages:
    mask, groups, totals = rows.response_mask, rows.groups, rewards.sum(1)
    if name in GROUPED and len(groups) == len(groups.unique()):
        text = "compares responses to one prompt, and each has one: raise Sampling.n (rollout.n) to 2 or more"
        raise ValueError(f"the estimator {name!r} {text}")
    mask = _compared(rows) if name in GROUPED else mask
    match name:
        case "grpo":
            return advantages.grpo(totals, mask, groups, scale=scale)
        case "grpo_passk":
            return advantages.grpo_passk(totals, mask, groups, scale=scale)
        case "rloo":
            return advantages.rloo(totals, mask, groups)
        case "opo":
            return advantages.opo(totals, mask, groups, leave_one_out=leave_one_out)
        case "gpg":
            return advantages.gpg(totals, mask, groups, outcomes=rows.outcome)
        case "remax":
            return advantages.remax(rewards, _required(rows.baselines, name, "baselines"), mask)
        case "reinforce_plus_plus":
            return advantages.reinforce_plus_plus(rewards, mask, gamma=gamma)
        case "reinforce_plus_plus_baseline":
            return advantages.reinforce_plus_plus_baseline(totals, mask, groups)
        case "optimal_token_baseline":
            squared = _required(rows.sum_squared_probs, name, "sum_squared_probs")
            return advantages.optimal_token_baseline(
                rewards,
                mask,
                groups,
                log_probs=rows.old_log_probs,
                sum_squared_probs=squared,
                leave_one_out=leave_one_out,
            )
        case _:
            _check_alone(name, rows, rewards)
            named = {key: x.nan_to_num(nan=0.0) for key, x in rows.named_scores.items()}  # those of weight 0
            return advantages.gdpo(named, mask, groups, weights=weights, scale=scale)


def _compared(rows: Annotated) -> Tensor:
    """The response mask without the rows that have nothing to be compared with, as the others have no score."""
    mask, (_, group) = rows.response_mask, rows.groups.unique(return_inverse=True)
    there, missing = mask.any(1), rows.scores.isnan()
    left, lost = (torch.zeros_like(group).index_add(0, group, x.long())[group] for x in (there, missing))
    return mask & ~((left == 1) & (lost > 0))[:, None]


def _check_alone(name: str, rows: Annotated, rewards: Tensor) -> None:
    """Raises ValueError for token rewards that are not the scores alone."""
    if (rewards != advantages.token_rewards(rows.scores, rows.response_mask).to(rewards)).any():
        raise ValueError(
            f"the estimator {name!r} compares the reward's functions one by one, and would not see what else the token "
            "rewards hold: leave kl_in_reward out, and put the KL into the policy's loss (PolicyTerms.kl_coef; in "
            "settings actor.kl_coef in place of algorithm.kl.coef)"
        )


def of_rows(fn: Estimator) -> AdvantageFn:
    """Any estimator as a function of annotated rows and their token rewards.

    One of three arguments, (scores, mask, groups), is what `laws.check_advantages` takes: its scores are the sums of
    the token rewards, its mask has no row without a score or without another to be compared with, and where it returns
    advantages alone the returns are those sums. Others are left as they are.
    """
    if _arguments(fn) != 3:
        return cast(AdvantageFn, fn)
    grouped = cast(GroupFn, fn)

    def estimate(rows: Annotated, rewards: Tensor) -> Advantages:
        scores, mask = rewards.sum(1), _compared(rows)
        result = grouped(scores, mask, rows.groups)
        if isinstance(result, Tensor):
            return Advantages(result, scores[:, None].where(mask, 0.0))
        return result

    return estimate


def _arguments(fn: Callable[..., object]) -> int:
    """How many positional arguments the function must have."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in inspect.signature(fn).parameters.values())


def _required(column: Tensor | None, name: str, what: str) -> Tensor:
    if column is None:
        raise ValueError(f"the estimator {name!r} needs {what} in the batch")
    return column
