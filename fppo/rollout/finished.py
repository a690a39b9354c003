"""Rows that the embedded engine finishes, said while others go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fppo.rollout.engine import OnFinished, Sampling


class Step(NamedTuple):
    """One token of each live row: what row rows[i] of the rollout got at one position."""

    rows: Tensor
    position: int
    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor


class FinishedRows:
    """Calls `on_finished` for rows as they finish, from the steps of all waves."""

    def __init__(self, on_finished: OnFinished, limits: Sequence[int], sampling: Sampling) -> None:
        self._on_finished = on_finished
        self._limits = [limit for limit in limits for _ in range(sampling.n)]
        self._open: dict[int, list[int]] = {row: [] for row in range(len(self._limits))}

    def __call__(self, step: Step, stops: Tensor) -> None:
        """Takes the step's tokens in, and which of them stop their rows; rows that ended before, and are still among
        the live ones, are passed over."""
        for row, token, stopped in zip(step.rows.tolist(), step.tokens.tolist(), stops.tolist(), strict=True):
            response = self._open.get(row)
            if response is None:
                continue
            response.append(token)
            if stopped or len(response) == self._limits[row]:
                del self._open[row]
                self._on_finished(row, response, "stop" if stopped else "length")
