"""The environment of fppo on this machine, for reports of problems."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

import fppo
from fppo import devices
from fppo.commands import output
from fppo.commands.options import EnvOptions
from fppo.runs import bits, origins
from fppo_kernels import prebuilt
from fppo_kernels.table import BUILTIN, lacks_cpp_compiler, needs_compiler

_NOT_FOR_USERS = ("test", "docs")  # extras
_COLUMNS, _INDENT = 100, 12


def found() -> dict[str, Any]:
    """Versions, machine, kernels and extras, as values of JSON. There is no name of a user or a host, no path, and no
    value of an environment variable; of those on which bits depend there are the names."""
    ground = bits.ground()
    return {
        "fppo": fppo.__version__,
        "commit": origins.commit_of(Path(fppo.__file__).resolve()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": dict(origins.installed()),
        "untested": origins.untested_here(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "devices": _devices(),
        "computes": {name: text for name, text in ground.items() if name not in os.environ},
        "variables": [name for name in ground if name in os.environ],
        "compiler": lacks_cpp_compiler() or _compiler(),
        "built_in": str(prebuilt.here()),
        "compile": needs_compiler() or "runs",
        "kernels": {op: {name: x.refuse() or "runs" for name, x in each.items()} for op, each in BUILTIN.items()},
        "extras": _extras(),
    }


def _devices() -> list[str]:
    """The accelerators that torch sees, with their memory where it says how much."""
    kind = devices.named("auto", "device").type
    if kind == "cpu":
        return []
    module = torch.get_device_module(kind)
    each = [torch.device(kind, number) for number in range(module.device_count())]
    sizes = getattr(module, "get_device_properties", None)
    memory = [getattr(sizes(x), "total_memory", 0) if sizes else 0 for x in each]
    return [f"{x}: {devices.title(x)}" + f", {size / 1e9:.1f} GB" * bool(size) for x, size in zip(each, memory)]


def _compiler() -> str:
    """The first line of the C++ compiler's version."""
    for name in ("g++", "clang++"):
        try:
            done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        return next(iter(done.stdout.splitlines()), name)
    return "does not run"


def _extras() -> dict[str, str]:
    """The extras of fppo, each with the packages that it lacks."""
    required = [Requirement(line) for line in importlib.metadata.requires("fppo") or ()]
    lacking: dict[str, str] = {}
    for extra in importlib.metadata.metadata("fppo").get_all("Provides-Extra") or ():
        own = [x for x in required if "extra" in str(x.marker) and x.marker and x.marker.evaluate({"extra": extra})]
        absent = sorted({x.name for x in own} - {"fppo", *origins.installed()})
        lacking[extra] = f"lacks {', '.join(absent)}" if absent else "installed"
    return {name: text for name, text in lacking.items() if name not in _NOT_FOR_USERS}


def show(asked: EnvOptions) -> None:
    """Print the environment, as the options say."""
    with output.shown(asked.json) as show:
        values = found()
        show(words(values), values)


def words(values: dict[str, Any]) -> str:
    """Lines for people of the values that were `found`."""
    return "\n".join(_line(name, x) for name, x in values.items())


def _line(name: str, value: Any) -> str:
    """A value with its name; of kernels, those that run, and why others do not."""
    if name == "kernels":
        runs = {op: ", ".join(x for x, why in each.items() if why == "runs") for op, each in value.items()}
        reasons: dict[str, list[str]] = {}
        for op, kernel, why in ((op, x, why) for op, each in value.items() for x, why in each.items() if why != "runs"):
            reasons.setdefault(why, []).append(f"{op}/{kernel}")
        refused = [f"{', '.join(which)}: {why}" for why, which in reasons.items()]
        value = [*(f"{op} {names}" for op, names in runs.items()), *refused]
    elif isinstance(value, dict):
        value = [f"{key} {text}" for key, text in value.items()]
    text = "; ".join(value) if isinstance(value, list) else str(value or "")
    wide = {"width": _COLUMNS, "initial_indent": f"{name:<{_INDENT}}", "subsequent_indent": " " * _INDENT}
    return textwrap.fill(text or "none", **wide, break_on_hyphens=False)
