"""Where the data stands, and the batches drawn from there: a function of the cursor, so resuming is exact."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fppo.batch import Prompts
from fppo.data.prompt_set import PromptSet, collate
from fppo.key import Key
from fppo.tree import state


@state
class DataCursor:
    """How far the prompts have been drawn. Both are leaves, since a checkpoint holds leaves only."""

    epoch: int = 0
    position: int = 0  # prompts of this epoch that are done


def epoch_order(count: int, key: Key, epoch: int, *, shuffle: bool = True) -> list[int]:
    """The order of `count` prompts in an epoch: a permutation that depends on the key and the epoch alone."""
    if not shuffle:
        return list(range(count))
    draws = key.fold("epoch", epoch).uniform(torch.arange(count), 1)[:, 0]
    return draws.argsort(stable=True).tolist()


def next_indices(
    count: int, cursor: DataCursor, *, size: int, key: Key, shuffle: bool = True
) -> tuple[list[int], DataCursor]:
    """The next `size` of `count` prompts, and the cursor behind them. A batch goes on into the next epoch."""
    if count < 1 or size < 1:
        raise ValueError(f"a batch of {size} out of {count} prompts: both must be 1 or more")
    if cursor.epoch < 0 or not 0 <= cursor.position < count:
        raise ValueError(
            f"the run stands at prompt {cursor.position} of epoch {cursor.epoch}, but the data set has {count} "
            "prompts; resume with the data that the run was started on"
        )
    picked: list[int] = []
    epoch, position = cursor.epoch, cursor.position
    while len(picked) < size:
        order = epoch_order(count, key, epoch, shuffle=shuffle)
        taken = order[position : position + size - len(picked)]
        picked += taken
        position += len(taken)
        if position == count:
            epoch, position = epoch + 1, 0
    return picked, DataCursor(epoch=epoch, position=position)


def next_batch(
    dataset: PromptSet, cursor: DataCursor, *, size: int, key: Key, shuffle: bool = True, width: int | None = None
) -> tuple[Prompts, DataCursor]:
    """The next `size` prompts [size, P], and the cursor behind them.

    Every prompt comes once per epoch, in an order of that epoch's own. `key` must be the same for the whole run.
    """
    indices, after = next_indices(len(dataset), cursor, size=size, key=key, shuffle=shuffle)
    return collate(dataset, indices, width=width), after


def batches(dataset: PromptSet, size: int, *, width: int | None = None) -> Iterator[Prompts]:
    """All prompts once, in order, for evaluation; the last batch may be short. Row ids are unique over all of them."""
    if size < 1:
        raise ValueError(f"batches of {size} prompts: give 1 or more")
    for start in range(0, len(dataset), size):
        indices = range(start, min(start + size, len(dataset)))
        yield collate(dataset, indices, width=width, row_offset=start)
