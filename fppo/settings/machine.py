"""Checks for the GPUs and packages that settings need and this machine lacks, as far as can be seen without torch."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from fppo.fields import MOST_WORKERS, Problems, problem_at
from fppo.settings.placement import places_of, pools_here
from fppo.settings.train import TRACKERS, TrainSettings

_DEVICES = Path("/dev")
_OTHERS = ("dxg", "kfd", "nvgpu", "nvhost-gpu", "nvmap")  # devices that do not tell how many GPUs there are


def machine_problems(settings: TrainSettings, ranks: int, *, visible: str | None, devices: Path = _DEVICES) -> Problems:
    """Yield a problem if `ranks` processes or the pools need more GPUs than this machine has, and for each package that
    is not installed.

    `visible` is the value of CUDA_VISIBLE_DEVICES; None if it is not set. `devices` has the files of devices.
    """
    most, pools = _most_gpus(visible, devices), pools_here(settings.placement)
    match = re.fullmatch(r"cuda(:(\d+))?", settings.device)
    if match and most is not None:
        if most == 0:
            yield problem_at(settings, "device", "there is no GPU here that torch could see; give cpu")
        elif int(match[2] or 0) >= most:
            yield problem_at(settings, "device", f"there are at most {most} GPUs here, cuda:0 the first")
        elif match[1] is None and ranks > most:
            text = f"{ranks} processes need as many GPUs, and this machine has {most}; give fewer, or cpu"
            yield problem_at(settings, "device", text)
    gpus, ranks_here = sum(pool.ranks * pool.gpus for pool in pools), sum(pool.ranks for pool in pools)
    if most is not None and gpus > most:
        text = f"they want {gpus:g} GPUs together, and this machine has {most}; give fewer, or shares of one"
        yield problem_at(settings, "placement.pools", text)
    if ranks_here > MOST_WORKERS:
        text = f"they have {ranks_here:,} ranks together, and one machine starts at most {MOST_WORKERS:,}; give fewer"
        yield problem_at(settings, "placement.pools", text)
    yield from _missing_packages(settings)


def _missing_packages(s: TrainSettings) -> Problems:
    """Yield a problem for each package that the settings need and that is not installed."""
    for name in TRACKERS:
        if name in s.log.loggers and not _installed(name):
            yield problem_at(s, "log.loggers", f"{name} is not installed; pip install 'fppo[{name}]'")
    judge = s.reward.judge
    for path, needed in (
        ("placement.cluster", s.placement.cluster != "processes" and bool(places_of(s.placement))),
        ("rollout.vllm.host", s.rollout.engine == "vllm" and s.rollout.vllm.host == "ray"),
        ("reward.judge.vllm.host", judge.path is not None and judge.vllm.host == "ray"),
    ):
        if needed and not _installed("ray"):
            yield problem_at(s, path, "Ray is not installed; pip install 'fppo[ray]'")
    if s.model.lora.base != "float" and not _installed("bitsandbytes"):
        yield problem_at(s, "model.lora.base", "bitsandbytes is not installed; pip install 'fppo[quantised]'")


def _installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _most_gpus(visible: str | None, devices: Path) -> int | None:
    """The largest number of GPUs that torch can see here, if CUDA_VISIBLE_DEVICES is `visible`; None if only torch can
    tell."""
    if sys.platform != "linux" or any((devices / name).exists() for name in _OTHERS):
        return None
    count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    named = None if visible is None else [x for x in visible.split(",") if x.strip() not in ("", "-1")]
    return count if named is None else min(count, len(named))
