"""Memory of a step by stage and kind, from a trace of torch's profiler, and torch's own snapshots of CUDA devices."""

from __future__ import annotations

import contextlib
import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import devices, tree
from fppo.pipeline.program import RunState
from fppo.rollout.banks import CACHE
from fppo.runtime.exports import write_whole

MEMORY = "memory"  # the directory in a run's
RANK = "_rank_"  # before the rank in the names of files, on a mesh of several
TRACED: Mapping[str, int] = MappingProxyType({"cpu": 0, "cuda": 1, "xpu": 12})  # the numbers of devices in a trace


@attrs.frozen(kw_only=True)
class StageMemory:
    """Bytes on a device at the peak of a stage: of `parameters` of all models, of `gradients` of the model that the
    stage updates, of the optimizers' `moments`, and of the engine's `cache` of keys and values. `activations` are the
    rest of `peak`."""

    stage: str
    parameters: int
    gradients: int
    moments: int
    cache: int
    activations: int
    peak: int


@attrs.frozen
class StepMemory:
    """The memory of a step's stages on a rank of the run's mesh."""

    step: int
    rank: int
    stages: Sequence[StageMemory]


@attrs.frozen(kw_only=True)
class StateBytes:
    """Bytes of a run's tensors on a device: the parameters of all models, the moments of all optimizers, and the
    gradients of each update by its stage."""

    parameters: int
    moments: int
    gradients: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes between steps."""
        return self.parameters + self.moments


def held(run: RunState, frozen: Sequence[Any], device: torch.device) -> StateBytes:
    """Bytes of a run's state on this process's `device`, with the `frozen` weights of adapters; shared memory counts
    once, and numbers of an optimizer do not count."""
    trained = {"actor": run.actor, "critic": run.critic}
    params = {role: state.params for role, state in trained.items() if state is not None}
    moments = [x for state in trained.values() if state is not None for x in tree.tensors(state.opt) if x.dim()]
    return StateBytes(
        parameters=_bytes(tree.tensors([params, run.ref, run.teacher, *frozen]), device),
        moments=_bytes(moments, device),
        gradients={f"update_{role}": _bytes(tree.tensors(each), device) for role, each in params.items()},
    )


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the distinct storages of tensors on a device of this type."""
    storages = [x.untyped_storage() for x in tensors if x.device.type == device.type]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def check_device(device: torch.device) -> None:
    """Raise ValueError for a device whose memory torch's profiler does not trace."""
    if device.type not in TRACED:
        raise ValueError(f"log.memory_steps: torch traces no memory on {device.type}; leave it out")


def stages_of(
    events: Sequence[Mapping[str, Any]], names: Collection[str], state: StateBytes, device: torch.device
) -> list[StageMemory]:
    """The memory of the stages of these `names` at their peaks, in order of their starts, from the events of a Chrome
    trace that torch's profiler wrote with `profile_memory`. A stage that ran several times has its largest peak."""
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == "user_annotation"]
    caches = sorted((start, end) for start, end, name in spans if name == CACHE)
    times, live, cache = _live(events, caches, state, device)
    found: dict[str, StageMemory] = {}
    for start, end, name in sorted(span for span in spans if span[2] in names):
        first = bisect_right(times, start) - 1  # what is live when the stage begins counts, too
        at = max(range(first, bisect_right(times, end)), key=live.__getitem__)
        rest = max(live[at] - state.total - cache[at], 0)
        gradients = min(state.gradients.get(name, 0), rest)
        if name not in found or found[name].peak < live[at]:
            found[name] = StageMemory(
                stage=name,
                parameters=state.parameters,
                gradients=gradients,
                moments=state.moments,
                cache=cache[at],
                activations=rest - gradients,
                peak=live[at],
            )
    return list(found.values())


def _live(
    events: Sequence[Mapping[str, Any]], caches: Sequence[tuple[float, float]], state: StateBytes, device: torch.device
) -> tuple[list[float], list[int], list[int]]:
    """The times of allocations on a device, the bytes that were live after each, and of these the bytes allocated
    within `caches`, spans of time in order. A CPU's trace does not hold what was allocated before: the state is."""
    ours = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == TRACED[device.type]]
    times, live, cache = [-math.inf], [state.total], [0]
    starts, blocks = [start for start, _ in caches], dict[int, tuple[int, int]]()
    for time, now in sorted(((e["ts"], e["args"]) for e in ours), key=lambda pair: pair[0]):
        size, address = now["Bytes"], now["Addr"]
        if size > 0:
            span = bisect_right(starts, time) - 1
            blocks[address] = change = size, size if span >= 0 and time <= caches[span][1] else 0
        else:
            change = tuple(-x for x in blocks.pop(address, (0, 0)))
        times.append(time)
        live.append(now["Total Allocated"] if devices.is_accelerator(device) else live[-1] + change[0])
        cache.append(cache[-1] + change[1])
    return times, live, cache


def write(path: Path, step: int, stages: Sequence[StageMemory]) -> None:
    """Write the memory of a step's stages as JSON."""
    text = json.dumps({"step": step, "stages": [attrs.asdict(stage) for stage in stages]}, indent=1)
    write_whole(path, f"{text}\n".encode())


def read(run: Path, steps: Collection[int] | None = None) -> list[StepMemory]:
    """The memory of a run's recorded steps (None: of all), by step and rank, without damaged files."""
    found = list[StepMemory]()
    for path in sorted((run / MEMORY).glob("step_*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text(encoding="utf-8"))
            stages = [StageMemory(**stage) for stage in content["stages"]]
            found.append(StepMemory(int(content["step"]), int(path.stem.partition(RANK)[2] or 0), stages))
    return [each for each in found if steps is None or each.step in steps]


def peaks(found: Iterable[StepMemory]) -> dict[str, int]:
    """The largest peak of each stage over steps and ranks."""
    largest: dict[str, int] = {}
    for looked in found:
        for each in looked.stages:
            largest[each.stage] = max(each.peak, largest.get(each.stage, 0))
    return largest


def record_history(device: torch.device, *, on: bool) -> None:
    """Begin or end to record the allocations of a CUDA device for `dump`; nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history("all" if on else None, stacks="python")


def dump(device: torch.device, path: Path) -> None:
    """Write what was recorded in torch's own format, a pickle that fppo never reads; nothing on other devices."""
    if device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(path))
