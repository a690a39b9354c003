"""Estimators of groups of responses, with a turn in the place of a response."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fppo.advantages._common import Advantages, group_rows
from fppo.losses._common import check_tokens
from fppo.shapes import Mask, RowIds, Rows, Tokens

Grouped = Callable[[Rows, Mask, RowIds], Advantages]  # of scores, mask and groups, as `grouped.grpo`


def by_turn(estimate: Grouped, rewards: Tokens, mask: Mask, groups: RowIds, turn_ids: Tensor) -> Advantages:
    """Advantages that compare each turn with those of the same number in the other responses of its group.

    The score of a turn is the sum of the row's rewards from the turn's first token on, so that a turn answers for what
    follows it. `estimate` sees one row for each turn of each response, whose mask is that turn's tokens; a response
    without the turn is an empty row. A turn that one response alone has reached is the only row of its group: the
    estimators of `grouped` give it 0, before any whitening. `turn_ids` are integers [B, T]; rewards, mask and results
    are [B, T].
    """
    check_tokens(mask, rewards=rewards)
    if turn_ids.shape != mask.shape or turn_ids.is_floating_point():
        shape = f"{turn_ids.dtype} {tuple(turn_ids.shape)}"
        raise ValueError(f"turn_ids are {shape}: give integers of the mask's shape, {tuple(mask.shape)}")
    numbers = turn_ids.where(mask, -1).long()
    count = int(numbers.max()) + 1 if mask.any() else 0
    kept = rewards.detach().where(mask, 0.0)
    if not count:
        return Advantages(torch.zeros_like(kept), torch.zeros_like(kept))
    turns = torch.arange(count, device=mask.device)[:, None, None]
    scores = kept.where(numbers >= turns, 0.0).sum(2)  # [turns, B]
    each = group_rows(groups).group_of * count + turns[:, :, 0]
    result = estimate(scores.flatten(), (numbers == turns).flatten(0, 1), each.flatten())
    shape = (count, *mask.shape)
    return Advantages(result.advantages.reshape(shape).sum(0), result.returns.reshape(shape).sum(0))
