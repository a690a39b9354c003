"""Results of the embedded engine's steps: rows, reported as they finish, and the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.batch import Rollout
from fppo.rollout.engine import Ask, OnFinished, Sampling
from fppo.rollout.records import rollout_of
from fppo.rollout.routed import Fed, column


class DrawnStep(NamedTuple):
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

    def __call__(self, step: DrawnStep, stops: Tensor) -> None:
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


def assemble(
    steps: Sequence[DrawnStep],
    fed: Sequence[Fed],
    ask: Ask,
    row_ids: Tensor,
    *,
    limits: Sequence[int],
    pad_token_id: int,
) -> Rollout:
    """The rollout of all steps of all waves, and the experts of the tokens that went through the model."""
    batch, length = len(row_ids), 1 + max(step.position for step in steps)
    place = torch.cat([step.rows * length + step.position for step in steps])

    def lay_out(columns: Sequence[Tensor], fill: float) -> Tensor:
        x = torch.cat(list(columns))
        return x.new_full((batch * length,), fill).index_copy(0, place, x).view(batch, length)

    tokens = lay_out([step.tokens for step in steps], pad_token_id)
    log_probs = lay_out([step.log_probs for step in steps], 0.0)
    sampling_log_probs = lay_out([step.sampling_log_probs for step in steps], 0.0)
    most = torch.tensor(limits, device=place.device).repeat_interleave(ask.sampling.n)
    drawn = lay_out([step.position < most[step.rows] for step in steps], False)
    routed = column(fed, batch, ask.prompts.tokens.shape[1], length) if fed else None
    return rollout_of(
        ask,
        tokens,
        drawn,
        log_probs,
        sampling_log_probs,
        row_ids=row_ids,
        pad_token_id=pad_token_id,
        routed=routed,
    )
