"""Fixed points of critic losses: the values that minimise them where returns vary between samples."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fppo.laws._search import LawViolation
from fppo.losses import ValueHead

ROUNDS = 40  # updates at most, each from the value of the one before
STEADY = 1e-7
# returns and their probabilities
SAMPLES = (
    ((0.0, 1.0), (0.95, 0.05)),
    ((0.0, 1.0), (0.4, 0.6)),
    ((0.0, 0.13, 1.0), (0.5, 0.3, 0.2)),
)


def fixed_point(head: ValueHead, returns: Sequence[float], chances: Sequence[float]) -> float:
    """The value of the outputs that minimise a head's expected loss, over returns with these probabilities.

    `head` is one of `fppo.losses`, as `losses.mse_head()`. A loss that is clipped around the old value is minimised
    repeatedly, each time with the previous value as the old one, until the value stays. A critic should predict the
    mean of the returns. Raises ValueError for `chances` that are no distribution.
    """
    goals, weights = (torch.tensor(list(x), dtype=torch.float64) for x in (returns, chances))
    if goals.shape != weights.shape or bool((weights < 0).any()) or abs(float(weights.sum()) - 1) > 1e-9:
        raise ValueError(f"chances={list(chances)}: give one for each of the {len(goals)} returns, 1 in all")
    outputs = torch.zeros(() if head.outputs == 1 else (head.outputs,), dtype=torch.float64)
    value = _read(head, outputs)
    for _ in range(ROUNDS):
        outputs = _least(head, outputs, value.detach(), goals, weights)
        before, value = value, _read(head, outputs)
        if float((value - before).abs()) < STEADY:
            break
    return float(value)


def check_fixed_point(head: ValueHead, *, tolerance: float = 1e-3) -> None:
    """Check the fixed point of a critic's head: `laws.check_fixed_point(losses.two_hot_head())`.

    Where returns vary, between 0 and 1, the value of least expected loss must be their mean, to `tolerance`. Raises
    LawViolation with the returns and chances for which it is not.
    """
    for returns, chances in SAMPLES:
        mean = sum(x * p for x, p in zip(returns, chances, strict=True))
        found = fixed_point(head, returns, chances)
        if not abs(found - mean) <= tolerance:
            lines = [
                'the head breaks the law "fixed point": the value of least expected loss is the mean of the returns.',
                f"  of the returns {list(returns)} with the chances {list(chances)} it is {found:.6g}, not {mean:.6g}",
            ]
            shown = {"returns": torch.tensor(returns), "chances": torch.tensor(chances)}
            raise LawViolation("\n".join(lines), "fixed point", shown)


def _read(head: ValueHead, outputs: Tensor) -> Tensor:
    return head.read(outputs[None] if head.outputs == 1 else outputs)


def _expected_loss(head: ValueHead, old: Tensor, goals: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
    """The expected loss, 0-d, of a head's outputs ([], or [K]) over the returns `goals`, whose probabilities are
    `weights`; `old` is the old value."""
    rows = outputs.expand(len(goals), 1, *outputs.shape)
    mask = torch.ones(len(goals), 1, dtype=torch.bool)
    loss, _ = head.loss_fn(rows, old.expand(len(goals), 1), goals[:, None], mask)
    return (weights * loss[:, 0]).sum()


def _least(head: ValueHead, start: Tensor, old: Tensor, goals: Tensor, weights: Tensor) -> Tensor:
    """The outputs that minimise `_expected_loss`, with its arguments, found by L-BFGS from `start`."""
    leaf = start.clone().requires_grad_()
    of = partial(_expected_loss, head, old, goals, weights)
    search = torch.optim.LBFGS(
        [leaf], max_iter=300, tolerance_grad=1e-11, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def slope() -> float:
        loss = of(leaf)
        leaf.grad = torch.autograd.grad(loss, leaf)[0]
        return float(loss.detach())

    search.step(slope)
    return leaf.detach()
