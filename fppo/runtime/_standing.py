"""Status of ranks, as JSON that they publish and as text of error messages; `standings` are by rank, None if
unknown."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import attrs

from fppo.runtime.watch import WaitingCollective, Watch

_SHOWN = 4  # the most ranks described one by one
_OUTSIDE = {*sys.stdlib_module_names, "torch"} - {"__main__"}
_HERE = ("fppo.runtime.failure", __name__)


@attrs.frozen
class Standing:
    """The status of a rank: the count of its heartbeats, its last finished step, collectives begun by axis, and the
    current line of its code. While it waits for a collective: the collective, the seconds, and the ranks of its
    group."""

    beat: int
    step: int
    calls: Mapping[str, int]
    line: str
    waiting: tuple[str, str, int] | None = None
    seconds: float = 0.0
    group: tuple[int, ...] = ()
    at: str = ""  # the rank's coordinates on the axes

    @staticmethod
    def of(watch: Watch, beat: int, thread: int) -> Standing:
        """The status of this rank at heartbeat number `beat`; its work runs in the thread with the id `thread`."""
        calls, line, waiting = watch.begun(), _line(sys._current_frames().get(thread)), watch.oldest()
        if waiting is None:
            return Standing(beat, watch.step, calls, line, at=watch.place)
        axis, op, number, since = waiting
        seconds = time.monotonic() - since
        return Standing(beat, watch.step, calls, line, (axis, op, number), seconds, watch.ranks[axis], watch.place)

    @property
    def place(self) -> str:
        """The rank's position in the program, as text."""
        if self.waiting is None:
            return f"at {self.line} after step {self.step}"
        axis, op, _ = self.waiting
        return f"in {op} {over(axis)} for {self.seconds:.0f} s after step {self.step}"

    def dumped(self) -> str:
        """The status as JSON."""
        return json.dumps(attrs.asdict(self))

    @staticmethod
    def loaded(text: bytes) -> Standing:
        """The status from JSON."""
        fields = json.loads(text)
        waiting = fields["waiting"]
        return Standing(**fields | {"waiting": waiting and tuple(waiting), "group": tuple(fields["group"])})


def over(line: str) -> str:
    """Words for where a collective runs, from its `line` of a `Watch`: an axis or, for a message, also both ranks."""
    axis, _, ends = line.partition(" ")
    return f"over the axis {axis!r}" + (f" {ends}" if ends else "")


def _line(frame: FrameType | None) -> str:
    """Describe the innermost line of code outside the standard library and torch."""
    innermost = frame
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in _HERE and name.partition(".")[0] not in _OUTSIDE:
            break
        frame = frame.f_back
    inner = frame or innermost
    if inner is None:
        return "an unknown line"
    path = "/".join(inner.f_code.co_filename.split("/")[-2:])
    return f"{path}:{inner.f_lineno} in {inner.f_code.co_name}"


def missing(axis: str, number: int, ranks: Sequence[int], standings: Mapping[int, Standing | None]) -> list[int]:
    """The ranks that have begun fewer than `number` collectives over the axis."""

    def begun(standing: Standing | None) -> bool:
        return standing is not None and standing.calls.get(axis, 0) >= number

    return [rank for rank in ranks if not begun(standings[rank])]


def causes(late: Sequence[int], standings: Mapping[int, Standing | None]) -> list[int]:
    """The ranks that the `late` ones wait for, directly or through others, and that wait for no rank themselves."""
    seen, ranks = set(), []
    ahead = list(late)
    while ahead:
        rank = ahead.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        standing = standings[rank]
        if standing is None or standing.waiting is None:
            ranks.append(rank)
        else:
            axis, _, number = standing.waiting
            ahead += missing(axis, number, standing.group, standings)
    return sorted(ranks)


def described(ranks: Sequence[int], standings: Mapping[int, Standing | None]) -> str:
    """The ranks with their positions, as text."""

    def one(rank: int) -> str:
        standing = standings[rank]
        if standing is None:
            return f"rank {rank}, which has never reported"
        return f"rank {rank}{f' ({standing.at})' if standing.at else ''}, {standing.place}"

    more = f"; and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return "; ".join(one(rank) for rank in ranks[:_SHOWN]) + more


def too_long(
    waiting: WaitingCollective,
    step: int,
    seconds: float,
    others: Sequence[int],
    standings: Mapping[int, Standing | None],
) -> str:
    """The error text for a collective that has waited too long. `others` are its other ranks."""
    late = missing(waiting.axis, waiting.number, others, standings)
    waits = f"after step {step}: {waiting.op} {over(waiting.axis)} has waited for {seconds:g} s"
    if not late:
        waits = f"{waits} although all its ranks have come to one: {described(others, standings)}"
    else:
        waits = f"{waits} for {described(late, standings)}"
        behind = [rank for rank in causes(late, standings) if rank not in late]
        if behind:
            waits = f"{waits}; that is for {described(behind, standings)}"
    return f"{waits} (mesh.timeout is the limit)"


def broken(
    waiting: WaitingCollective, step: int, error: object, gone: Sequence[int], standings: Mapping[int, Standing | None]
) -> str:
    """The error text for a failed collective. `gone` are the ranks that have stopped reporting."""
    of_whom = f"; no longer reporting: {described(gone, standings)}" if gone else ""
    return f"after step {step}: {waiting.op} {over(waiting.axis)} failed{of_whom} ({error})"
