"""Timing two ways of doing one thing, in turn, with the peak memory of each."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Timing(NamedTuple):
    """The median of a function's runs."""

    seconds: float
    peak_mib: float  # memory beyond what was in use at the call
    processor: float = 0.0  # seconds of all threads, which other programs change little


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}: peak memory can be measured on Linux only")


def empty_heap() -> None:
    """Gives memory that is not used back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def once(fn: Callable[[], Any], *, per: bool) -> Timing:
    """One run: seconds (divided by what `fn` returns, with `per`) and peak memory in MiB."""
    empty_heap()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, start, begun = _status("VmRSS"), time.perf_counter(), time.process_time()
    result = fn()
    seconds, processor = time.perf_counter() - start, time.process_time() - begun
    return Timing(seconds / (result if per else 1), _status("VmHWM") - before, processor / (result if per else 1))


def measure(
    ours: Callable[[], Any], peer: Callable[[], Any], *, repeats: int, per: bool = False
) -> tuple[Timing, Timing]:
    """Medians of both, run in turn after one warm-up of each."""
    for fn in (ours, peer):
        once(fn, per=per)
    runs: tuple[list[Timing], list[Timing]] = ([], [])
    for _ in range(repeats):
        for fn, kept in zip((ours, peer), runs, strict=True):
            kept.append(once(fn, per=per))
    return median(runs[0]), median(runs[1])


def median(runs: Sequence[Timing]) -> Timing:
    """Field by field."""
    return Timing(*(statistics.median(column) for column in zip(*runs, strict=True)))


def table(rows: Sequence[tuple[str, Timing, Timing]]) -> str:
    """One line per stage: ours, the peer, and how many times as fast ours is."""
    lines = [f"{'stage':<20}{'ours':>12}{'plain':>12}{'times as fast':>15}{'MiB':>9}{'plain MiB':>11}"]
    for name, ours, peer in rows:
        speed = peer.seconds / ours.seconds
        lines.append(
            f"{name:<20}{_seconds(ours.seconds):>12}{_seconds(peer.seconds):>12}{speed:>15.2f}"
            f"{ours.peak_mib:>9.0f}{peer.peak_mib:>11.0f}"
        )
    return "\n".join(lines)


def row(*cells: str) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def header(*cells: str) -> str:
    """The first lines of one, behind an empty line."""
    return "\n".join(("", row(*cells), "|" + "---|" * len(cells)))


def _seconds(x: float) -> str:
    return f"{x:.3f} s" if x >= 0.1 else f"{1e3 * x:.3f} ms"
