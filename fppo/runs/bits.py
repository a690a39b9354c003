"""Dependencies of a run's bits besides its settings and code: threads, processor, builds, environment variables."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from fppo import devices
from fppo_kernels import prebuilt

THREADS = "threads"
_VARIABLES = re.compile(
    r"(MKL|ONEDNN|DNNL|CUBLAS|CUDNN|ATEN)_\w+|(OMP|OPENBLAS|BLIS)_(DYNAMIC|THREAD_LIMIT|CORETYPE)|NVIDIA_TF32_OVERRIDE"
)
_BUILDS = re.compile(r"oneAPI Math Kernel Library Version ([\d.]+)|MKL-DNN v([\d.]+)|BLAS_INFO=(\w+)")


def ground() -> dict[str, str]:
    """Describe how this process computes: threads of an operation, instruction set, processor, builds, switches,
    kernels that are built in, and variables of the environment.

    The number of operations at a time (inter-op threads) is left out: no bits depend on it.
    """
    backends = torch.backends
    found = {
        THREADS: str(torch.get_num_threads()),
        "instruction set": backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "torch build": f"{torch.__version__} {(torch.version.git_version or '')[:10]}".strip(),
        "libraries": " ".join(dict.fromkeys(x[0] for x in _BUILDS.finditer(torch.__config__.show()))),
        "oneDNN": "on" if backends.mkldnn.is_available() and backends.mkldnn.enabled else "off",
        "float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": "on" if torch.are_deterministic_algorithms_enabled() else "off",
    }
    accelerator = devices.named("auto", "device")
    if isinstance(built := prebuilt.here(), prebuilt.Build) and not devices.is_accelerator(accelerator):
        found["kernels in C++"] = str(built)
    if devices.is_accelerator(accelerator):
        found["GPU"] = devices.title(accelerator)
    if accelerator.type == "cuda":
        found["CUDA"] = f"{torch.version.cuda}, cuDNN {backends.cudnn.version()}"
        found["TF32"] = f"products {backends.cuda.matmul.allow_tf32}, cuDNN {backends.cudnn.allow_tf32}"
    return found | {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}


def _processor() -> str:
    """The name of the processor."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        named = None
    return named[1].strip() if named else platform.processor() or platform.machine()


def unlike(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Lines on the entries that differ between `before` and `now`; none if nothing was recorded of `before`."""
    names = {**before, **now} if before else {}
    return [
        f"{name} {before.get(name, 'not set')} -> {now.get(name, 'not set')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def take_threads(recorded: Mapping[str, str]) -> str | None:
    """From here on, compute on as many threads as recorded. Returns a line if the number changes, else None."""
    wanted, had = recorded.get(THREADS, ""), torch.get_num_threads()
    if not wanted.isdecimal() or int(wanted) in (0, had):
        return None
    torch.set_num_threads(int(wanted))
    return f"computing on {wanted} thread(s), as the run did, and not on {had}: bits depend on the number"
