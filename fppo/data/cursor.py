"""The cursor of the data, and the batches drawn at it: pure functions of the cursor, so resuming is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from fppo.batch import Prompts
from fppo.data.prompts import PromptSet, collate
from fppo.key import Key
from fppo.tree import state


@state
class DataCursor:
    """The position of the next prompt to draw. Both fields are leaves, since a checkpoint holds leaves only."""

    epoch: int = 0
    position: int = 0  # prompts of this epoch drawn so far


def epoch_order(count: int, key: Key, epoch: int, *, shuffle: bool = True) -> list[int]:
    """The order of `count` prompts in an epoch: a permutation determined by the key and the epoch alone."""
    if not shuffle:
        return list(range(count))
    draws = key.fold("epoch", epoch).uniform(torch.arange(count), 1)[:, 0]
    return draws.argsort(stable=True).tolist()


Order = Callable[[int], Sequence[int]]  # from an epoch's number to indices of prompts


def checked_order(order: Sequence[int], count: int, name: str) -> list[int]:
    """An epoch's order by the function `name`, as ints. Raises ValueError if it is empty or outside 0 to count - 1."""
    indices = [int(i) for i in order]
    wrong = [i for i in indices if not 0 <= i < count]
    if wrong or not indices:
        what = f"{wrong[:3]}, which are no indices" if wrong else "no indices"
        raise ValueError(f"{name} gave {what} of {count} prompts; an epoch is one or more of 0 to {count - 1}")
    return indices


def next_indices(
    count: int, cursor: DataCursor, *, size: int, key: Key, shuffle: bool = True, order: Order | None = None
) -> tuple[list[int], DataCursor]:
    """The indices of the next `size` of `count` prompts, and the cursor after them; a batch may span epochs.

    `order` gives the indices of each epoch; by default all, shuffled or not. Raises ValueError for a cursor outside the
    data set.
    """
    if count < 1 or size < 1:
        raise ValueError(f"a batch of {size} out of {count} prompts: both must be 1 or more")
    picked: list[int] = []
    epoch, position = cursor.epoch, cursor.position
    while len(picked) < size:
        whole = epoch_order(count, key, epoch, shuffle=shuffle) if order is None else order(epoch)
        if epoch < 0 or not 0 <= position < len(whole):
            raise ValueError(
                f"the run is at prompt {position} of epoch {epoch}, but the data set has {len(whole)} "
                "prompts; resume with the data that the run was started on"
            )
        taken = whole[position : position + size - len(picked)]
        picked += taken
        position += len(taken)
        if position == len(whole):
            epoch, position = epoch + 1, 0
    return picked, DataCursor(epoch=epoch, position=position)


def next_batch(
    dataset: PromptSet,
    cursor: DataCursor,
    *,
    size: int,
    key: Key,
    shuffle: bool = True,
    width: int | None = None,
    order: Order | None = None,
) -> tuple[Prompts, DataCursor]:
    """The next `size` prompts as a record [size, P], and the cursor after them.

    Every prompt comes once per epoch, each epoch in a new order, unless `order` gives another. `key` must be the same
    for the whole run.
    """
    indices, after = next_indices(len(dataset), cursor, size=size, key=key, shuffle=shuffle, order=order)
    return collate(dataset, indices, width=width), after


def batches(dataset: PromptSet, size: int, *, width: int | None = None) -> Iterator[Prompts]:
    """All prompts once, in order, for evaluation; the last batch may be short. Row ids are unique over all batches."""
    if size < 1:
        raise ValueError(f"batches of {size} prompts: give 1 or more")
    for start in range(0, len(dataset), size):
        indices = range(start, min(start + size, len(dataset)))
        yield collate(dataset, indices, width=width, row_offset=start)
