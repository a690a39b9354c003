"""Advantage estimators by name, as functions of annotated rows and their token rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from torch import Tensor

from fppo import advantages
from fppo.advantages import Advantages
from fppo.batch import Annotated
from fppo_kernels.gae.scan import scan

AdvantageFn = Callable[[Annotated, Tensor], Advantages]  # of rows and their token rewards [B, T]
GroupFn = Callable[[Tensor, Tensor, Tensor], Advantages | Tensor]  # of scores [B], mask [B, T] and groups [B]
Estimator = AdvantageFn | GroupFn
NAMES = (
    "gae",
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


def estimator(
    name: str,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    scale: str = "std",
    gae: Callable[..., tuple[Tensor, Tensor]] = scan,
    weights: Mapping[str, float] | None = None,
) -> AdvantageFn:
    """The estimator of that name with its scalars bound: (annotated rows, token rewards [B, T]) -> Advantages.

    Group estimators compare the sums of the token rewards, so a KL penalty in the rewards reaches them too. `gae` is
    the kernel that "gae" calls, and `weights` are those of "gdpo". Raises ValueError for a name that there is not; the
    function, for columns that it needs and lacks, and for groups of one row each.
    """
    if name not in NAMES:
        raise ValueError(f"unknown advantage estimator {name!r}; there are {list(NAMES)}")
    return partial(_estimate, name=name, gamma=gamma, lam=lam, scale=scale, gae=gae, weights=weights)


def _estimate(
    rows: Annotated,
    rewards: Tensor,
    *,
    name: str,
    gamma: float,
    lam: float,
    scale: str,
    gae: Callable[..., tuple[Tensor, Tensor]],
    weights: Mapping[str, float] | None,
) -> Advantages:
    mask, groups, totals = rows.response_mask, rows.groups, rewards.sum(1)
    if name in GROUPED and len(groups) == len(groups.unique()):
        text = "compares responses to one prompt, and each has one: raise Sampling.n (rollout.n) to 2 or more"
        raise ValueError(f"the estimator {name!r} {text}")
    match name:
        case "gae":
            values = _required(rows.values, name, "values")
            return advantages.gae(rewards, values, mask, gamma=gamma, lam=lam, kernel=gae)
        case "grpo":
            return advantages.grpo(totals, mask, groups, scale=scale)
        case "grpo_passk":
            return advantages.grpo_passk(totals, mask, groups, scale=scale)
        case "rloo":
            return advantages.rloo(totals, mask, groups)
        case "opo":
            return advantages.opo(totals, mask, groups)
        case "gpg":
            return advantages.gpg(totals, mask, groups)
        case "remax":
            return advantages.remax(rewards, _required(rows.baselines, name, "baselines"), mask)
        case "reinforce_plus_plus":
            return advantages.reinforce_plus_plus(rewards, mask, gamma=gamma)
        case "reinforce_plus_plus_baseline":
            return advantages.reinforce_plus_plus_baseline(totals, mask, groups)
        case "optimal_token_baseline":
            squared = _required(rows.sum_squared_probs, name, "sum_squared_probs")
            return advantages.optimal_token_baseline(
                rewards, mask, groups, log_probs=rows.old_log_probs, sum_squared_probs=squared
            )
        case _:
            return advantages.gdpo(rows.named_scores, mask, groups, weights=weights, scale=scale)


def of_rows(fn: Estimator) -> AdvantageFn:
    """Any estimator as a function of annotated rows and their token rewards.

    One of three arguments, (scores, mask, groups), is what `laws.check_advantages` takes: its scores are the sums of
    the token rewards, and where it returns advantages alone the returns are those sums. Others are left as they are.
    """
    if _arguments(fn) != 3:
        return cast(AdvantageFn, fn)
    grouped = cast(GroupFn, fn)

    def estimate(rows: Annotated, rewards: Tensor) -> Advantages:
        scores, mask = rewards.sum(1), rows.response_mask
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
