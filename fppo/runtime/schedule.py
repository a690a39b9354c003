"""Pipeline schedules as data: the sequence of actions of each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple

import attrs


class Action(NamedTuple):
    """A forward or backward pass of one stage on one micro-batch."""

    kind: Literal["forward", "backward"]
    stage: int
    micro: int


@attrs.frozen(slots=False)
class Schedule:
    """The actions of each rank, in order. Stage s belongs to rank s % ranks.

    A rank waits for the inputs of an action, not for its sends to arrive. Messages from one rank to another arrive in
    the order of the sender's actions, whatever the order of use. `began` is called with each action that this rank
    begins.
    """

    actions: tuple[tuple[Action, ...], ...]
    began: Callable[[Action], None] = attrs.field(default=lambda action: None, eq=False)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.actions)

    @cached_property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return 1 + max((action.stage for actions in self.actions for action in actions), default=-1)

    @cached_property
    def micros(self) -> int:
        """The number of micro-batches."""
        return 1 + max((action.micro for actions in self.actions for action in actions), default=-1)

    def needs(self, action: Action) -> list[Action]:
        """The actions whose results are inputs of an action."""
        kind, stage, micro = action
        if kind == "forward":
            return [Action("forward", stage - 1, micro)] if stage else []
        after = [Action("backward", stage + 1, micro)] if stage < self.stages - 1 else []
        return [Action("forward", stage, micro), *after]

    def target(self, action: Action) -> int | None:
        """The rank that receives an action's result; None for the last stage forward and the first one backward."""
        stage = action.stage + (1 if action.kind == "forward" else -1)
        return stage % self.ranks if 0 <= stage < self.stages else None

    def messages(self, source: int, target: int) -> list[Action]:
        """The messages from one rank to another, in order, each by the action whose result it is."""
        return [action for action in self.actions[source] if source != target and self.target(action) == target]


# make(ranks, micros, virtual_stages) -> a schedule for as many micro-batches, over virtual_stages stages on each rank
MakeSchedule = Callable[[int, int, int], Schedule]


def one_f_one_b(ranks: int, micros: int, virtual_stages: int = 1) -> Schedule:
    """One forward, one backward (1F1B), which keeps few activations at a time. Several stages on each rank are
    interleaved, with a bubble shorter by that factor: figure 4 of Narayanan et al. (2021, arXiv:2104.04473).

    Raises ValueError for an interleaved schedule if the ranks do not divide the micro-batches.
    """
    if virtual_stages > 1 and micros % ranks:
        raise ValueError(
            f"{virtual_stages} stages on each of {ranks} ranks take a multiple of {ranks} micro-batches, not {micros}"
        )
    return Schedule(tuple(_one_f_one_b(rank, ranks, micros, virtual_stages) for rank in range(ranks)))


def _one_f_one_b(rank: int, ranks: int, micros: int, chunks: int) -> tuple[Action, ...]:
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    forwards = [Action("forward", chunk * ranks + rank, micro) for chunk, micro in _turns(ranks, micros, chunks)]
    backwards = [
        Action("backward", (chunks - 1 - chunk) * ranks + rank, micro) for chunk, micro in _turns(ranks, micros, chunks)
    ]
    warm = min(ahead, len(forwards))
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return (*forwards[:warm], *steady, *backwards[len(forwards) - warm :])


def _turns(ranks: int, micros: int, chunks: int) -> list[tuple[int, int]]:
    """The chunks and micro-batches of a rank's passes: as many micro-batches as ranks through each chunk in turn."""
    groups = [range(first, min(first + ranks, micros)) for first in range(0, micros, ranks)]
    return [(chunk, micro) for group in groups for chunk in range(chunks) for micro in group]


def all_forward(ranks: int, micros: int, virtual_stages: int = 1) -> Schedule:
    """The schedule of passes without gradients."""
    return Schedule(
        tuple(
            tuple(
                Action("forward", chunk * ranks + rank, micro) for chunk, micro in _turns(ranks, micros, virtual_stages)
            )
            for rank in range(ranks)
        )
    )


class Clocked(NamedTuple):
    """The time and memory of a schedule, in units of a stage's forward pass."""

    time: float
    bubble: float  # the share of all ranks' time spent waiting
    kept: tuple[int, ...]  # by rank, the most forward passes whose backward passes are pending


def clocked(schedule: Schedule, *, backward: float = 2.0) -> Clocked:
    """Simulate a schedule's timing; a stage's backward pass takes `backward` forward ones. Raises ValueError for a
    deadlock."""
    ranks = range(schedule.ranks)
    trains = any(action.kind == "backward" for actions in schedule.actions for action in actions)
    done: dict[Action, float] = {}
    clock, place, kept, most = [0.0] * len(ranks), [0] * len(ranks), [0] * len(ranks), [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            for action in schedule.actions[rank][place[rank] :]:
                needed = schedule.needs(action)
                if any(other not in done for other in needed):
                    break
                start = max([clock[rank], *(done[other] for other in needed)])
                clock[rank] = done[action] = start + (1.0 if action.kind == "forward" else backward)
                kept[rank] += trains if action.kind == "forward" else -1
                most[rank] = max(most[rank], kept[rank])
                place[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {_words(schedule.actions[rank][place[rank]])}"
        for rank in ranks
        if place[rank] < len(schedule.actions[rank])
    ]
    if stuck:
        raise ValueError(f"no rank can go on: {'; '.join(stuck)}")
    work = sum(1.0 if a.kind == "forward" else backward for actions in schedule.actions for a in actions)
    time = max(clock, default=0.0)
    return Clocked(time, 1 - work / (time * len(ranks)) if time else 0.0, tuple(most))


def _words(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.micro} through stage {action.stage}"
