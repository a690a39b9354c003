"""Advantage estimators as functions of annotated rows: each parameter is a column of the rows, by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import advantages, losses
from fppo.advantages import Advantages
from fppo.advantages._common import group_rows
from fppo.batch import Annotated
from fppo.losses import Correction

Estimator = Callable[..., Advantages | Tensor]  # of columns by their names
AdvantageFn = Callable[[Annotated, Tensor], Advantages]  # of rows and their token rewards [B, T]
by_token = partial(losses.rollout_correction, level="token")


def _taught(rows: Annotated) -> Tensor | None:
    """A teacher's log-probs; those of the policy itself in rows that it has nothing to say about."""
    found, taught = rows.teacher_log_probs, rows.taught
    return found if found is None or taught is None else found.where(taught[:, None], rows.old_log_probs)


COLUMNS: dict[str, Callable[[Annotated, Tensor], Any]] = {  # of rows and their token rewards [B, T]
    "rows": lambda rows, rewards: rows,
    "rewards": lambda rows, rewards: rewards,
    "scores": lambda rows, rewards: rewards.sum(1),  # a KL penalty in the rewards reaches groups, too
    "named_scores": lambda rows, rewards: {k: x.nan_to_num(nan=0.0) for k, x in rows.named_scores.items()},
    "outcomes": lambda rows, rewards: rows.outcome,
    "step_rewards": lambda rows, rewards: rows.step_rewards,
    "mask": lambda rows, rewards: rows.response_mask,
    "groups": lambda rows, rewards: rows.groups,
    "values": lambda rows, rewards: rows.values,
    "baselines": lambda rows, rewards: rows.baselines,
    "log_probs": lambda rows, rewards: rows.old_log_probs,
    "rollout_log_probs": lambda rows, rewards: rows.rollout_log_probs,
    "teacher_log_probs": lambda rows, rewards: _taught(rows),
    "sum_squared_probs": lambda rows, rewards: rows.sum_squared_probs,
    "turn_ids": lambda rows, rewards: rows.turn_ids,
}
_OF_REWARDS = frozenset({"rows", "rewards", "scores", "named_scores", "outcomes"})
WEIGHTS = "correction_weights"  # the column that a correction makes


@attrs.frozen
class OfRows:
    """An estimator as a function of annotated rows and their token rewards [B, T].

    `fn` is called with the columns that its parameters name, of `COLUMNS` and "correction_weights"; those without a
    default must be in the rows. One that reads "groups" gets a mask without rows that have nothing to be compared with,
    since all others of their group lack a score. If it returns advantages alone, the returns are the sums of the token
    rewards. With `by_turn` turns are compared in place of responses (`advantages.by_turn`).

    Raises ValueError for a parameter that is no column, a column that the rows lack, a correction without weights,
    groups of one row each, token rewards with a KL penalty in them where `fn` reads "named_scores" or no rewards at
    all, and, with `by_turn`, a function of other columns than scores, mask and groups.
    """

    fn: Estimator
    correct: Callable[[Tensor, Tensor, Tensor], Correction] = by_token  # of old log-probs, the engine's, and the mask
    by_turn: bool = False

    def __call__(self, rows: Annotated, rewards: Tensor) -> Advantages:
        name, (needed, optional) = name_of(self.fn), columns_of(self.fn)
        if "groups" in needed and len(rows.groups) == len(group_rows(rows.groups).lengths):
            text = "compares responses to one prompt, and each has one: raise Sampling.n (rollout.n) to 2 or more"
            raise ValueError(f"the estimator {name!r} {text}")
        if "named_scores" in needed:
            _check_alone(name, rows, rewards, "compares the reward's functions one by one, and")
        if not _OF_REWARDS & {*needed}:
            _check_alone(name, rows, rewards, "reads no token rewards, and")
        if "groups" in needed:
            rows = attrs.evolve(rows, response_mask=_compared(rows))
        if self.by_turn:
            return self._by_turn(name, rows, rewards, needed)
        columns = {column: COLUMNS[column](rows, rewards) for column in (*needed, *optional) if column != WEIGHTS}
        if WEIGHTS in needed:
            columns[WEIGHTS] = self.correct(rows.old_log_probs, rows.rollout_log_probs, rows.response_mask).weights
        if missing := [column for column in needed if columns[column] is None]:
            raise ValueError(f"the estimator {name!r} needs {', '.join(missing)} in the batch")
        result = self.fn(**columns)
        if isinstance(result, Tensor):
            return Advantages(result, rewards.sum(1)[:, None].where(rows.response_mask, 0.0))
        return result

    def _by_turn(self, name: str, rows: Annotated, rewards: Tensor, needed: list[str]) -> Advantages:
        if set(needed) != {"scores", "mask", "groups"}:
            raise ValueError(
                f"the estimator {name!r} does not go by turns: it reads {needed}, not a score for each row"
            )
        if rows.turn_ids is None:
            raise ValueError(f"the estimator {name!r} goes by turns, and the batch has no turn_ids")

        def estimate(scores: Tensor, mask: Tensor, groups: Tensor) -> Advantages:
            result = self.fn(scores=scores, mask=mask, groups=groups)
            return result if isinstance(result, Advantages) else Advantages(result, scores[:, None].where(mask, 0.0))

        return advantages.by_turn(estimate, rewards, rows.response_mask, rows.groups, rows.turn_ids)


def of_rows(fn: Estimator) -> AdvantageFn:
    """The estimator as a function of annotated rows and their token rewards."""
    return fn if isinstance(fn, OfRows) else OfRows(fn)


def columns_of(fn: Estimator) -> tuple[list[str], list[str]]:
    """The columns that an estimator's parameters name: those without a default, and those with one.

    Raises ValueError for a parameter that must be given and is no column.
    """
    parameters = inspect.signature(fn).parameters.values()
    named = [x for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    needed = [x.name for x in named if x.default is x.empty]
    if unknown := [name for name in needed if name not in COLUMNS and name != WEIGHTS]:
        raise ValueError(
            f"the estimator {name_of(fn)!r} has parameters {unknown}, which are no columns of the batch; there are "
            f"{', '.join([*COLUMNS, WEIGHTS])}, and a number of its own is a keyword with a default"
        )
    return needed, [x.name for x in named if x.default is not x.empty and x.name in COLUMNS]


def reads(fn: Estimator, column: str) -> bool:
    """Whether an estimator needs a column, by its name: "values" need a critic, "groups" several responses each."""
    return column in columns_of(fn.fn if isinstance(fn, OfRows) else fn)[0]


def whitens(fn: Estimator) -> bool:
    """True if an estimator's advantages are whitened once rows have left the mask: if it reads values, or is one of
    `advantages.WHITENED`, whose own formula whitens."""
    plain = fn.fn if isinstance(fn, OfRows) else fn
    plain = plain.func if isinstance(plain, partial) else plain
    return reads(fn, "values") or plain in advantages.WHITENED


def of_values(fn: Estimator) -> Callable[[Tensor, Tensor, Tensor], Advantages]:
    """An estimator with a critic as a function of token rewards, values and mask [B, T], for tokens that the policy
    itself has sampled: correction weights are 1. Raises ValueError for one that reads other columns."""
    plain = fn.fn if isinstance(fn, OfRows) else fn

    def estimate(rewards: Tensor, values: Tensor, mask: Tensor) -> Advantages:
        columns = {"rewards": rewards, "values": values, "mask": mask, WEIGHTS: torch.ones_like(rewards)}
        needed, _ = columns_of(plain)
        if missing := [name for name in needed if name not in columns]:
            raise ValueError(f"the estimator {name_of(plain)!r} needs {', '.join(missing)} beside rewards and values")
        result = plain(**{name: columns[name] for name in needed})
        return Advantages(result, result) if isinstance(result, Tensor) else result

    return estimate


def name_of(fn: Any) -> str:
    """The name of an estimator, as messages give it."""
    fn = fn.func if isinstance(fn, partial) else fn
    return getattr(fn, "__name__", None) or type(fn).__name__


def _compared(rows: Annotated) -> Tensor:
    """The response mask without the rows that have nothing to be compared with, because all other rows of their group
    lack a score."""
    mask, group = rows.response_mask, group_rows(rows.groups).group_of
    there, missing = mask.any(1), rows.scores.isnan()
    left, lost = (torch.zeros_like(group).index_add(0, group, x.long())[group] for x in (there, missing))
    return mask & ~((left == 1) & (lost > 0))[:, None]


def _check_alone(name: str, rows: Annotated, rewards: Tensor, why: str) -> None:
    """Raise ValueError if token rewards hold more than the rows' scores, such as a KL penalty; `name` is the
    estimator's, and `why` says why it needs the scores alone."""
    alone = advantages.token_rewards(rows.scores, rows.response_mask, turns=rows.rewards_within)
    if (rewards != alone.to(rewards)).any():
        raise ValueError(
            f"the estimator {name!r} {why} would not see what else the token "
            "rewards hold: leave kl_in_reward out, and put the KL into the policy's loss (PolicyTerms.kl_coef; in "
            "settings actor.kl_coef in place of algorithm.kl.coef)"
        )
