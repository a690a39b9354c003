"""The values that losses of critics settle on, where returns vary from one sample to the next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fppo.losses import ValueHead

ROUNDS = 40  # updates at most, each from the value of the one before
STEADY = 1e-7


def fixed_point(head: ValueHead, returns: Sequence[float], chances: Sequence[float]) -> float:
    """The value of a head's outputs where its expected loss over returns with these chances is least.

    `head` is one of `fppo.losses`, as `losses.mse_head()`. A loss that is clipped around the old value is made least
    again and again, each time with the value before as the old one, until the value stays. The mean of the returns is
    what a critic should say. Raises ValueError for chances that are no distribution.
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


def _read(head: ValueHead, outputs: Tensor) -> Tensor:
    return head.read(outputs[None] if head.outputs == 1 else outputs)


def _expected_loss(head: ValueHead, old: Tensor, goals: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
    """The expected loss of outputs [] or [K] over the returns, 0-d."""
    rows = outputs.expand(len(goals), 1, *outputs.shape)
    mask = torch.ones(len(goals), 1, dtype=torch.bool)
    loss, _ = head.loss_fn(rows, old.expand(len(goals), 1), goals[:, None], mask)
    return (weights * loss[:, 0]).sum()


def _least(head: ValueHead, start: Tensor, old: Tensor, goals: Tensor, weights: Tensor) -> Tensor:
    """The outputs of least expected loss, by L-BFGS from `start`."""
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
