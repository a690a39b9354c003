"""Losses of critics, of one value or of several outputs per token, as loops over tokens.

Signatures, defaults and sources are those of `fppo.losses`; a loss returns (loss per token [B, T], no metrics).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fppo.laws.references.losses import Result


def _by_token(of_token: Callable[[Tensor, Tensor, float], Tensor], *batch: Tensor) -> Result:
    """The loss [B, T], without metrics, of `of_token(outputs [K], old value, return)`, called for each token."""
    outputs, old_values, returns, mask = batch
    rows = [[outputs.new_zeros(())] * mask.shape[1] for _ in mask]
    for b, t in mask.nonzero().tolist():
        rows[b][t] = of_token(outputs[b, t].reshape(-1), old_values[b, t].detach(), returns[b, t].item())
    empty = outputs.new_zeros(mask.shape)
    return torch.stack([torch.stack(row) for row in rows]) if mask.numel() else empty, {}


def _near(value: Tensor, old: Tensor, clip: float | None) -> Tensor:
    return value if clip is None else torch.minimum(torch.maximum(value, old - clip), old + clip)


def huber(error: Tensor, delta: float) -> Tensor:
    """error^2 / 2 where |error| <= delta, else delta (|error| - delta / 2)."""
    return error * error / 2 if error.abs() <= delta else delta * (error.abs() - delta / 2)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = 0.5
) -> Result:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2, with the value v and the return R."""

    def of_token(outputs: Tensor, old: Tensor, goal: float) -> Tensor:
        plain, near = ((x - goal) ** 2 / 2 for x in (outputs[0], _near(outputs[0], old, clip)))
        return near if near > plain else plain

    return _by_token(of_token, values, old_values, returns, mask)


def huber_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    delta: float = 1.0,
    clip: float | None = 0.5,
) -> Result:
    """`value_loss` with Huber's function in place of half the square."""

    def of_token(outputs: Tensor, old: Tensor, goal: float) -> Tensor:
        plain, near = (huber(x - goal, delta) for x in (outputs[0], _near(outputs[0], old, clip)))
        return near if near > plain else plain

    return _by_token(of_token, values, old_values, returns, mask)


def _cross_entropy(logits: Tensor, target: Sequence[float]) -> Tensor:
    total = logits.exp().sum().log()
    return torch.stack([share * (total - x) for share, x in zip(target, logits, strict=True)]).sum()


def hl_gauss(
    outputs: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    sigma: float = 0.75,
) -> Result:
    """The cross-entropy of softmax(outputs) to the masses that a normal distribution has in K equal bins from `low` to
    `high`. Its mean is the return, its deviation the width of `sigma` bins."""

    def of_token(logits: Tensor, old: Tensor, goal: float) -> Tensor:
        goal, count = min(max(goal, low), high), len(logits)
        size = (high - low) / count
        edges = [low + i * size for i in range(count + 1)]
        below = [0.5 * (1 + math.erf((x - goal) / (sigma * size * math.sqrt(2)))) for x in edges]
        parts = [b - a for a, b in pairwise(below)]
        return _cross_entropy(logits, [x / sum(parts) for x in parts])

    return _by_token(of_token, outputs, old_values, returns, mask)


def two_hot(outputs: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, low: float, high: float) -> Result:
    """The cross-entropy of softmax(outputs) to weights of the two of K atoms (from `low` to `high`) around the return,
    whose weighted mean is the return."""

    def of_token(logits: Tensor, old: Tensor, goal: float) -> Tensor:
        goal, count = min(max(goal, low), high), len(logits)
        places = [low + i * (high - low) / (count - 1) for i in range(count)]
        upper = next(i for i in range(1, count) if goal <= places[i] or i == count - 1)
        share = (goal - places[upper - 1]) / (places[upper] - places[upper - 1])
        target = [0.0] * (upper - 1) + [1 - share, share] + [0.0] * (count - upper - 1)
        return _cross_entropy(logits, target)

    return _by_token(of_token, outputs, old_values, returns, mask)


def quantile_loss(outputs: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, delta: float = 1.0) -> Result:
    """The sum over K quantiles q_i of |t_i - [R < q_i]| huber(R - q_i) / delta, with t_i = (i - 1/2) / K and R the
    return; [R < q_i] is 1 if that holds, else 0."""

    def of_token(quantiles: Tensor, old: Tensor, goal: float) -> Tensor:
        total = quantiles.sum() * 0.0
        for i, q in enumerate(quantiles):
            share = (i + 0.5) / len(quantiles)
            total = total + abs(share - float(goal < q)) * huber(goal - q, delta) / delta
        return total

    return _by_token(of_token, outputs, old_values, returns, mask)
