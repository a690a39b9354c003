"""Time, memory and the rates of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from fppo import devices
from fppo.laws._kernels import words
from fppo.studies.ablate.result import HostRates

COPIED = 1 << 26  # float32 numbers
WIDTH = {"cpu": 2048, "cuda": 8192}  # of the square matmul


def synchronize(device: torch.device) -> None:
    """Waits for the work on the device."""
    if devices.is_accelerator(device):
        torch.accelerator.synchronize(device)


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """The time of one call, its work on the device included."""
    synchronize(device)
    start = time.perf_counter()
    fn()
    synchronize(device)
    return time.perf_counter() - start


def peak_bytes(fn: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that a call holds beyond what was in use before; on a CPU of the process, on Linux only."""
    gc.collect()
    if devices.is_accelerator(device):
        synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        fn()
        synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that was freed but kept would hide what the call takes
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
        fn()
        return max(_status("VmHWM") - before, 0)
    except OSError:
        return None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def matmul_rate(dtype: torch.dtype, device: torch.device, *, repeats: int = 5) -> float:
    """FLOP/s of a square matmul by the faster of torch's ways: the median after a warm-up."""
    width = WIDTH.get(device.type, WIDTH["cpu"])
    a, b = (torch.ones(width, width, dtype=dtype, device=device) for _ in range(2))
    ways: list[Callable[[], Any]] = [lambda: a @ b]
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        # what torch.compile calls for linear layers: on some CPUs much faster than torch.mm
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
    medians = [statistics.median([seconds(way, device) for _ in range(repeats + 1)][1:]) for way in ways]
    return 2 * width**3 / min(medians)


def copy_rate(device: torch.device, *, repeats: int = 5) -> float:
    """Bytes/s, read and written, of a copy of 256 MiB: the median after a warm-up."""
    source = torch.ones(COPIED, device=device)
    target = torch.zeros_like(source)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(repeats + 1)][1:]
    return 2 * source.nbytes / statistics.median(times)


def with_rates(machine: HostRates, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> HostRates:
    """The machine with the rates of copying, and of a matmul in each of `dtypes`."""
    matmul = {words(dtype): matmul_rate(dtype, device) for dtype in dtypes}
    return attrs.evolve(machine, matmul=matmul, copy=copy_rate(device))


def host_of(device: torch.device) -> HostRates:
    """The model of the processor or accelerator, with torch's threads and version, and no rates yet."""
    name = devices.title(device) if devices.is_accelerator(device) else _processor()
    return HostRates(device=name, threads=torch.get_num_threads(), torch=torch.__version__)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
