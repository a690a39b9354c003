"""Calls of parts on the smallest inputs, so that their own checks of values fail before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo.advantages.columns import WEIGHTS, columns_of
from fppo.assembly.environments import maker_of
from fppo.assembly.functions import curriculum_of, optimizer_of, policy_loss, value_head_of
from fppo.fields import Problem, problem_of
from fppo.losses import ValueHead
from fppo.settings.component import Component, Functions, bound
from fppo.settings.tables import CORRECTIONS, DIVERGENCES, ESTIMATORS
from fppo.steps.actor import LossFn, SelectiveLoss


def value_problems(parts: Iterable[tuple[str, Any, Functions]], known: Sequence[Problem]) -> list[Problem]:
    """Problems of the functions of `parts` with their keywords (see `settings.component.parts`); parts with `known`
    problems are skipped."""
    trials: dict[str, Callable[[Any], Any]] = {
        "actor.loss": lambda part: _loss(policy_loss(part)),
        "actor.distill": _divergence,
        "algorithm.advantage": _advantage,
        "algorithm.correction": _correction,
        "rollout.environment": maker_of,
        "data.curriculum": curriculum_of,
        "critic.loss": lambda part: _value_loss(value_head_of(part)),
        **{
            f"{role}.optimizer": partial(optimizer_of, updates=1, setting=f"{role}.optimizer")
            for role in ("actor", "critic", "sft")
        },
    }
    found = []
    for path, part, _ in parts:
        if not part.keywords or any(problem.path.startswith(f"{path}.") for problem in known):
            continue
        try:
            trials[path](part)
        except ValueError as error:
            keywords = ", ".join(f"{name}={value!r}" for name, value in part.keywords.items())
            problem = Problem(f"{path} = {part.name}({keywords})", attrs.NOTHING, str(error))
            found.append(problem_of(error) if str(error).startswith(f"{path}.") else problem)
    return found


def _floats(*shape: int) -> Tensor:
    return torch.zeros(shape, requires_grad=True)


_BY_TOKEN = ("rewards", "step_rewards", "values", "log_probs", "rollout_log_probs", "teacher_log_probs", WEIGHTS)
_MASK = torch.ones(2, 2, dtype=torch.bool)  # two rows of two tokens, of one group


def _loss(loss_fn: LossFn | SelectiveLoss) -> None:
    tokens = [_floats(2, 2) for _ in range(3)]
    if isinstance(loss_fn, SelectiveLoss):
        selected = loss_fn.select_fn(*tokens, _MASK, noise=torch.zeros(2, 2))
        loss_fn.loss_fn(*tokens, _MASK, selected=selected)
    else:
        loss_fn(*tokens, _MASK)


def _value_loss(head: ValueHead) -> None:
    tokens = _floats(2, 2)
    head.loss_fn(tokens if head.outputs == 1 else _floats(2, 2, head.outputs), tokens, tokens, _MASK)


def _divergence(part: Component) -> None:
    (divergence,) = bound(part, DIVERGENCES, "actor.distill")
    halves = torch.full((2, 2, 2), 0.5).log()
    divergence(halves, halves, _MASK)


def _correction(part: Component) -> None:
    for correct in bound(part, CORRECTIONS, "algorithm.correction"):
        correct(_floats(2, 2), _floats(2, 2), _MASK)


def _advantage(part: Component) -> None:
    (fn,) = bound(part, ESTIMATORS, "algorithm.advantage")
    by_row = dict.fromkeys(("scores", "baselines", "outcomes"), torch.zeros(2))
    by_token = dict.fromkeys(_BY_TOKEN, torch.zeros(2, 2))
    others = {"mask": _MASK, "groups": torch.zeros(2, dtype=torch.int64), "named_scores": {"score": torch.zeros(2)}}
    columns = {**by_row, **by_token, **others, "sum_squared_probs": torch.ones(2, 2)}
    needed, _ = columns_of(fn)
    if all(name in columns for name in needed):
        partial(fn, **{name: columns[name] for name in needed})()
