"""Laws of pipeline schedules, also of the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from fppo.laws._search import LawViolation
from fppo.runtime.schedule import Action, Clocked, Schedule, clocked


def _stages(schedule: Schedule) -> str | None:
    ranks, stages = schedule.ranks, schedule.stages
    if not stages or stages % ranks:
        return f"it has {stages} stages, which is no multiple of its {ranks} ranks"
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind not in ("forward", "backward") or min(action[1:]) < 0:
                return f"rank {rank} has {action}, which is no action"
            if action.stage % ranks != rank:
                return f"rank {rank} runs stage {action.stage}, which is rank {action.stage % ranks}'s"
    return None


def _once(schedule: Schedule) -> str | None:
    counts = Counter(action for actions in schedule.actions for action in actions)
    kinds = ("forward", "backward") if any(action.kind == "backward" for action in counts) else ("forward",)
    every = [Action(k, s, m) for k in kinds for s in range(schedule.stages) for m in range(schedule.micros)]
    wrong = next((action for action in every if counts[action] != 1), None)
    if wrong is None:
        return None
    times = f"{counts[wrong]} times" if counts[wrong] else "never"
    return f"the {wrong.kind} pass of micro-batch {wrong.micro} through stage {wrong.stage} runs {times}"


def _order(schedule: Schedule) -> str | None:
    for rank, actions in enumerate(schedule.actions):
        seen: set[Action] = set()
        for action in actions:
            first = Action("forward", action.stage, action.micro)
            if action.kind == "backward" and first not in seen:
                return (
                    f"rank {rank} runs micro-batch {action.micro} through stage {action.stage} backward before forward"
                )
            seen.add(action)
    return None


def _deadlock(schedule: Schedule) -> str | None:
    try:
        clocked(schedule)
    except ValueError as error:
        return str(error)
    return None


_LAWS: Mapping[str, tuple[str, Callable[[Schedule], str | None]]] = MappingProxyType(
    {
        "stages": ("every rank has the stages whose number modulo the ranks is its own", _stages),
        "once": ("every micro-batch passes each stage once forward and, where any does, once backward", _once),
        "order": ("a stage runs a micro-batch forward before it runs it backward", _order),
        "deadlock": ("no rank waits for what cannot come, if nobody waits for what it sends to arrive", _deadlock),
    }
)


def check_schedule(schedule: Schedule, *, backward: float = 2.0) -> Clocked:
    """Check a schedule: `laws.check_schedule(my_schedule(4, 8))`. Raises LawViolation for the first broken law.

    The laws: every rank runs its own stages, each of them once on every micro-batch, forward before backward, or
    forward alone; no rank waits for a message that cannot come; and ranks receive messages in the order in which they
    are sent. Returns the time, the bubble and the results kept by each rank, if the forward pass of a stage takes a
    time of 1 and its backward pass a time of `backward`.
    """
    for name, (statement, breach) in _LAWS.items():
        if reason := breach(schedule):
            raise LawViolation(f'the schedule breaks the law "{name}": {statement}.\n  {reason}', name, {})
    return clocked(schedule, backward=backward)
