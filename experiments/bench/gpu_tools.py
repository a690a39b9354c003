"""Timing on a GPU by CUDA events, with the peak of its memory; on a CPU by the clock, to try a script out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Record = dict[str, Any]


def _once(fn: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run."""
    if device.type == "cpu":
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3


def measure(fn: Callable[[], Any], device: torch.device, *, repeats: int, seconds: float = 4.0) -> Record:
    """Median seconds of at most so many runs in this time, after a first one; the peak is beyond what was held."""
    gc.collect()
    fn()  # compiles
    peak = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    runs: list[float] = []
    while len(runs) < repeats and sum(runs) < seconds:
        runs.append(_once(fn, device))
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    runs = runs[1:] if len(runs) > 1 else runs  # the first gets its memory from the system
    return {"seconds": statistics.median(runs), "peak_mib": peak, "runs": len(runs)}


def attempt(fn: Callable[[], Record]) -> Record:
    """What `fn` gives, or why it gives nothing: a benchmark goes on with the others."""
    try:
        return fn()
    except torch.cuda.OutOfMemoryError:
        return {"absent": "out of memory"}
    except Exception as error:
        return {"absent": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def table(title: str, columns: Mapping[str, str], records: Sequence[Record]) -> str:
    """Records by their `name`; `columns` gives keys and formats. What is absent says why."""
    width = max([len(r["name"]) for r in records] + [12]) + 2
    lines = ["", title, " " * width + "".join(f"{key:>18}" for key in columns)]
    for r in records:
        cells = (f"{'-':>18}" if r.get(key) is None else f"{r[key]:>18{spec}}" for key, spec in columns.items())
        lines.append(f"{r['name']:<{width}}" + (f"  {r['absent']}" if "absent" in r else "".join(cells)))
    return "\n".join(lines)
