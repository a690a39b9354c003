"""The cursor of the data, and the batches drawn at it: pure functions of the cursor, so resuming is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from fppo import metrics
from fppo.batch import Column, Prompts, Scored
from fppo.data.curriculum import Course, Curriculum
from fppo.data.earlier import with_earlier, with_responses
from fppo.data.prompts import PromptSet, collate
from fppo.episodes import joined
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.tree import replace, state


@state
class DataCursor:
    """The epoch and position of the next prompt to draw. All fields are leaves, since a checkpoint holds leaves
    only."""

    epoch: int = 0
    position: int = 0  # prompts of this epoch drawn so far; with a curriculum, which has no epochs, of all
    course: Course | None = None  # of a curriculum
    earlier: Column | None = None  # responses to draft from: see `earlier`


def epoch_order(count: int, key: Key, epoch: int, *, shuffle: bool = True) -> list[int]:
    """The order of `count` prompts in an epoch: a permutation determined by the key and the epoch alone."""
    if not shuffle:
        return list(range(count))
    draws = key.fold("epoch", epoch).uniform(torch.arange(count), 1)[:, 0]
    return draws.argsort(stable=True).tolist()


Order = Callable[[int], Sequence[int]]  # from an epoch's number to indices of prompts


def checked_order(order: Sequence[int], count: int, name: str) -> list[int]:
    """Convert an epoch's order, given by the function `name`, to ints. Raises ValueError if empty or not in 0 to count
    - 1."""
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
    return picked, replace(cursor, epoch=epoch, position=position)


def next_batch(
    dataset: PromptSet,
    cursor: DataCursor,
    *,
    size: int,
    key: Key,
    shuffle: bool = True,
    width: int | None = None,
    order: Order | None = None,
    curriculum: Curriculum | None = None,
) -> tuple[Prompts, DataCursor]:
    """The next `size` prompts as a record [size, P], and the cursor after them.

    Every prompt comes once per epoch, each epoch in a new random order, unless `order` gives another order, or a
    `curriculum` chooses the prompts: then the first cursor is that of `begin_course`. `width` is P, by default that of
    the longest prompt. `key` must be the same for the whole run.
    """
    if curriculum is None:
        indices, after = next_indices(len(dataset), cursor, size=size, key=key, shuffle=shuffle, order=order)
    else:
        indices, after = chosen_indices(curriculum, len(dataset), cursor, size=size, key=key)
    prompts = collate(dataset, indices, width=width)
    return prompts if cursor.earlier is None else with_earlier(prompts, cursor.earlier), after


def begin_course(curriculum: Curriculum, prompts: PromptSet) -> DataCursor:
    """The cursor of a run whose prompts a curriculum chooses, before the first draw."""
    return DataCursor(course=Course(known=curriculum.init(prompts)))


def at_step(cursor: DataCursor, step: int) -> DataCursor:
    """The cursor with the curriculum's step set to `step`; unchanged if there is no curriculum."""
    return cursor if cursor.course is None else replace(cursor, course=replace(cursor.course, step=step))


def chosen_indices(
    curriculum: Curriculum, count: int, cursor: DataCursor, *, size: int, key: Key
) -> tuple[list[int], DataCursor]:
    """The indices of the `size` prompts of `count` that a curriculum chooses, and the cursor after them.

    Raises ValueError for a cursor without the curriculum's state, and for a choice that is not `size` valid indices.
    """
    course = cursor.course
    if course is None:
        raise ValueError("the cursor has no state of the curriculum: begin with begin_course(curriculum, prompts)")
    chosen = torch.as_tensor(curriculum.choose(course.known, key.fold("draw", cursor.position), course.step, size))
    if chosen.shape != (size,) or chosen.dtype != torch.int64:
        words = f"{str(chosen.dtype).removeprefix('torch.')} {list(chosen.shape)}"
        raise ValueError(f"the curriculum's choose gave {words}; it must give int64 [{size}], indices of prompts")
    indices = checked_order(chosen.tolist(), count, "the curriculum's choose")
    return indices, replace(cursor, position=cursor.position + size)


@attrs.frozen(kw_only=True)
class Learn:
    """Update the cursor's curriculum with the scores of responses, and report its numbers."""

    curriculum: Curriculum
    numbers: Mapping[str, int]  # the index of each prompt by its id

    @staticmethod
    def of(curriculum: Curriculum, prompts: PromptSet) -> Learn:
        """Make a `Learn` for these prompts. Raises ValueError for ids that are not unique."""
        numbers = {name: number for number, name in enumerate(prompts.ids)}
        if len(numbers) < len(prompts.ids):
            twice = next(name for number, name in enumerate(prompts.ids) if numbers[name] != number)
            raise ValueError(f"two prompts have the id {twice!r}: a curriculum tells prompts apart by their ids")
        return Learn(curriculum=curriculum, numbers=numbers)

    def __call__(self, cursor: DataCursor, scored: Scored) -> tuple[DataCursor, Metrics]:
        """Update the curriculum by the scores of these responses. Returns the cursor with the new state, at the next
        step, and the numbers that the curriculum reports."""
        course = cursor.course
        assert course is not None
        scored = joined(scored)
        indices = torch.tensor([self.numbers[name] for name in scored.ids], dtype=torch.int64)
        known = self.curriculum.update(course.known, indices, scored.outcome.detach().cpu().double())
        numbers = self.curriculum.report(known, course.step)
        after = replace(cursor, course=Course(known=known, step=course.step + 1))
        return after, {name: metrics.mean(torch.tensor(x, dtype=torch.float64)) for name, x in numbers.items()}


@attrs.frozen
class KeepResponses:
    """Update the cursor by `learn`, and then with a batch's responses, from which later ones may be drafted."""

    learn: Callable[[DataCursor, Scored], tuple[DataCursor, Metrics]]

    def __call__(self, cursor: DataCursor, scored: Scored) -> tuple[DataCursor, Metrics]:
        """The cursor after both, and the metrics of `learn`."""
        cursor, report = self.learn(cursor, scored)
        return replace(cursor, earlier=with_responses(cursor.earlier or (), scored)), report


def batches(dataset: PromptSet, size: int, *, width: int | None = None) -> Iterator[Prompts]:
    """All prompts once, in order, for evaluation; the last batch may be short. Row ids are unique over all batches."""
    if size < 1:
        raise ValueError(f"batches of {size} prompts: give 1 or more")
    for start in range(0, len(dataset), size):
        indices = range(start, min(start + size, len(dataset)))
        yield collate(dataset, indices, width=width, row_offset=start)
