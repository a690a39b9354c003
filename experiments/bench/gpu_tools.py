"""Timing on a GPU by CUDA events, with the peak of its memory; on a CPU by the clock, to try a script out."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Record = dict[str, Any]


class Shape(NamedTuple):
    """Of a Qwen2."""

    width: int
    layers: int
    heads: int
    key_heads: int
    mlp: int
    vocabulary: int


class Variant(NamedTuple):
    """A way to run an update, or to decode."""

    attention: str
    log_probs: str
    layers: str  # the kernels inside the layers: "eager", "triton", or "compiled" whole
    again: bool  # whether layers are computed again in the backward pass
    rows: int  # of a micro-batch
    recorded: bool = False  # whether passes of few tokens are CUDA graphs
    linear: str = "torch"

    @property
    def name(self) -> str:
        more = ", layers again" if self.again else ", recorded" if self.recorded else ""
        more += "" if self.linear == "torch" else f", {self.linear}"
        return f"{self.attention}, {self.log_probs}, layers {self.layers}, {self.rows} rows{more}"


class Plan(NamedTuple):
    """Sizes of everything."""

    device: torch.device
    dtype: torch.dtype
    repeats: int
    log_probs: tuple[tuple[int, int, int], ...]  # N, H, V
    attention: tuple[int, int, int, int, int]  # rows, longest, heads, key heads, head size
    gae: tuple[int, int]
    parameters: int  # of AdamW's benchmark
    model: Shape  # what is updated, and decodes
    small: Shape  # what is offloaded, and runs in vLLM
    wide: Shape  # a few layers of a larger model
    rows: tuple[int, int, int]  # of a batch, longest prompt, longest response
    variants: tuple[Variant, ...]
    decode: tuple[int, int, int]  # rows, longest prompt, new tokens
    fresh: int  # shapes that never came before
    collective: int  # elements
    held: float  # share of the GPU that the trainer beside vLLM holds


FULL = Plan(
    device=torch.device("cuda"),
    dtype=torch.bfloat16,
    repeats=6,
    log_probs=tuple((n, h, 151936) for n in (8192, 32768) for h in (896, 4096)),
    attention=(16, 4096, 16, 8, 128),
    gae=(512, 4096),
    parameters=110_000_000,
    model=Shape(1536, 28, 12, 2, 8960, 151936),  # Qwen2.5-1.5B's
    small=Shape(896, 4, 14, 2, 4864, 151936),  # four layers of Qwen2.5-0.5B's
    wide=Shape(4096, 6, 32, 8, 12288, 151936),  # six layers of Qwen3-8B's
    rows=(32, 128, 896),
    variants=(
        Variant("varlen", "triton", "triton", False, 16),
        Variant("varlen", "triton", "triton", False, 4),
        Variant("varlen", "triton", "triton", False, 4, recorded=True),
        Variant("varlen", "triton", "triton", True, 16),
        Variant("varlen", "triton", "compiled", False, 16),
        Variant("varlen", "triton", "triton", False, 16, linear="float8"),
        Variant("varlen", "triton", "compiled", False, 16, linear="float8"),
        Variant("varlen", "triton", "eager", False, 8),
        Variant("sdpa", "chunked", "eager", True, 8),
    ),
    decode=(64, 512, 128),
    fresh=4,
    collective=64 << 20,
    held=0.5,
)
TINY = Plan(
    device=torch.device("cpu"),
    dtype=torch.float32,
    repeats=2,
    log_probs=((16, 8, 100),),
    attention=(3, 8, 2, 1, 4),
    gae=(4, 16),
    parameters=10_000,
    model=Shape(64, 2, 2, 1, 64, 100),
    small=Shape(64, 2, 2, 1, 64, 100),
    wide=Shape(128, 2, 2, 1, 128, 100),
    rows=(4, 4, 8),
    variants=(
        Variant("sdpa", "chunked", "eager", False, 2),
        Variant("sdpa", "chunked", "eager", True, 4),
        Variant("sdpa", "chunked", "eager", False, 4, linear="float8"),
    ),
    decode=(4, 6, 4),
    fresh=2,
    collective=1 << 10,
    held=0.0,
)


class Skipped(Exception):
    """What this machine cannot run, and why."""


def check(name: str, value: float, limit: float, *, least: bool = False) -> Record:
    """A verdict: the number is at most the limit, or with `least` at least."""
    passed = value >= limit if least else value <= limit
    return {"name": name, "value": value, "limit": limit, "least": least, "passed": passed}


def shown(verdict: Record) -> str:
    """A verdict as a line."""
    if "error" in verdict:
        return f"FAIL  {verdict['name']}: {verdict['error']}"
    word, bound = ("PASS" if verdict["passed"] else "FAIL"), ("at least" if verdict["least"] else "at most")
    return f"{word}  {verdict['name']}: {verdict['value']:.4g} ({bound} {verdict['limit']:g})"


def count_syncs(fn: Callable[[], Any], device: torch.device) -> int:
    """How often the host waits for the device while `fn` runs; 0 on a CPU."""
    if device.type == "cpu":
        fn()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fn()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def once(fn: Callable[[], Any], device: torch.device) -> float:
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
        runs.append(once(fn, device))
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
