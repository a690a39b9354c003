"""Observers of a run's steps: profiles of whole steps by torch's profiler, traces of stages and calls to pools, gauges
of all ranks with their traffic, and a user's own functions."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.profiler import profile

from fppo._errors import words_of
from fppo.fleet import Call
from fppo.pipeline.measure import GIB, gauges
from fppo.pipeline.train import Observe, StepRecord
from fppo.runs import memory
from fppo.runs.jsonl import JsonLines
from fppo.runtime.mesh import AXES, LOCAL, Mesh, place_on, ranks_on
from fppo.runtime.watch import Traffic, Watch

PROFILES = "profiles"
# names of CUDA's runtime and driver calls
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@attrs.frozen(kw_only=True)
class Profiles:
    """Write traces of some steps to the run's directory, each from this observer's call in one step to that in the
    next; for `memory_steps` also the memory of their stages on `device`. Other threads are not traced.

    `frozen` are weights that the run's state does not hold.
    """

    directory: Path  # of the run
    steps: Sequence[int] = ()
    memory_steps: Sequence[int] = ()
    mesh: Mesh = LOCAL
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    frozen: Sequence[Any] = ()
    running: list[tuple[profile, int]] = attrs.field(factory=list)  # with the number of graphs compiled before

    def __call__(self, record: StepRecord) -> Mapping[str, float]:
        step, numbers = record.run.step, {}
        if self.running and record.experience is not None and step in self.memory_steps:
            memory.dump(self.device, self._path(memory.MEMORY, step, "pickle"))
        for profiler, compiled in self.stop():
            if record.experience is not None:
                trace = self._write(profiler, step)
                if step in self.steps:
                    numbers = counts(Counter(event.name for event in profiler.events() or ()))
                    if numbers:
                        numbers |= copied(_events(trace))
                    numbers["perf/recompiles"] = float(_compiled() - compiled)
                if step in self.memory_steps:
                    self._write_memory(record, _events(trace))
        self.begin(step + 1)
        return numbers

    def begin(self, step: int) -> None:
        """Start the profile of a step about to begin, if it is among `steps` or `memory_steps`."""
        if step in self.memory_steps:
            memory.record_history(self.device, on=True)
        if step in self.memory_steps or step in self.steps:
            profiler = profile(profile_memory=True) if step in self.memory_steps else profile()
            self.running.append((profiler, _compiled()))
            profiler.start()

    def stop(self) -> list[tuple[profile, int]]:
        """Stop the running profiles and return them."""
        stopped = list(self.running)
        self.running.clear()
        for profiler, _ in stopped:
            profiler.stop()
        if stopped and self.memory_steps:
            memory.record_history(self.device, on=False)
        return stopped

    def _write(self, profiler: profile, step: int) -> Path:
        """Write the trace of a step, which torch does once, to each directory that it belongs to; return a path."""
        folders = {PROFILES: self.steps, memory.MEMORY: self.memory_steps}
        first, *others = (self._path(name, step, "json.gz") for name, steps in folders.items() if step in steps)
        draft = first.with_suffix(".new")
        profiler.export_chrome_trace(str(draft))  # to .gz it would write line by line, which takes ten times as long
        with draft.open("rb") as plain, gzip.open(first, "wb") as packed:
            shutil.copyfileobj(plain, packed)
        draft.unlink()
        for other in others:
            shutil.copyfile(first, other)
        return first

    def _write_memory(self, record: StepRecord, events: Sequence[Mapping[str, Any]]) -> None:
        state, names = memory.held(record.run, self.frozen, self.device), {span.stage for span in record.spans}
        stages = memory.stages_of(events, names, state, self.device)
        memory.write(self._path(memory.MEMORY, record.run.step, "json"), record.run.step, stages)

    def _path(self, folder: str, step: int, ending: str) -> Path:
        (self.directory / folder).mkdir(parents=True, exist_ok=True)
        rank = f"{memory.RANK}{place_on(self.mesh, AXES)}" if ranks_on(self.mesh, AXES) > 1 else ""
        return self.directory / folder / f"step_{step:08d}{rank}.{ending}"


def _events(trace: Path) -> Sequence[Mapping[str, Any]]:
    return json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def counts(events: Mapping[str, int]) -> dict[str, float]:
    """The numbers of GPU launches and of host waits, from the count of each event by name; {} without launches."""
    launches, syncs = (sum(events.get(name, 0) for name in names) for names in (_LAUNCHES, _SYNCS))
    return {"perf/launches": float(launches), "perf/host_syncs": float(syncs)} if launches else {}


def copied(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """GiB copied between host and GPU, each way, summed over a trace's events."""
    ways = {"HtoD": "perf/to_device_gb", "DtoH": "perf/to_host_gb"}
    sizes = dict.fromkeys(ways.values(), 0.0)
    for event in events:
        way = str(event.get("name")).removeprefix("Memcpy ")[:4]
        if event.get("cat") == "gpu_memcpy" and way in ways:
            sizes[ways[way]] += event["args"]["bytes"] / GIB
    return sizes


def _compiled() -> int:
    from torch._dynamo.utils import counters  # imported here: slow, and needed for compiled functions alone

    return counters["stats"]["unique_graphs"]


TRACE = "trace"
KEPT = 100  # the newest steps that a file keeps when it is truncated, at twice as many


class Tracer:
    """Write a line for each step to the file `path`: the spans of its stages and its calls to pools, in seconds since
    1970.

    `calls()` returns the calls to pools since it was last called. Opening the file deletes the lines that an earlier
    run wrote for `first_step` and later steps.
    """

    def __init__(self, path: Path, calls: Callable[[], Sequence[Call]], *, first_step: int = 0) -> None:
        self._path, self._calls = path, calls
        self._began = time.time() - time.perf_counter()
        self._lines, self._room = JsonLines(path, first_step=first_step, newest=KEPT), KEPT

    def __call__(self, record: StepRecord) -> None:
        step = record.run.step
        if not self._room:
            self._lines.close()
            self._lines, self._room = JsonLines(self._path, first_step=step, newest=KEPT), KEPT
        self._room -= 1
        self._lines.write(line(record, self._calls(), self._began))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def line(record: StepRecord, calls: Sequence[Call], began: float) -> Mapping[str, Any]:
    """A trace's line for a step, with times in seconds since 1970. `began` is the time, also since 1970, at which the
    clock of `record` and `calls` was 0."""
    return {
        "step": record.run.step,
        "spans": [[span.stage, began + span.start, span.seconds] for span in record.spans],
        "calls": [
            attrs.asdict(call) | {"start": began + call.start, "ranks": [[began + x, y] for x, y in call.ranks]}
            for call in calls
        ],
    }


FAILURES = "log/observer_failures"  # the metric that counts failed calls of a user's observers


class OwnObserver:
    """A user's function of a step's record, whose exceptions are caught: the first is printed on standard error, all
    are counted.

    The numbers that it returns join the step's metrics. It is called again at the next step. A broken pipe ends the
    run, as everywhere.
    """

    def __init__(self, name: str, fn: Observe) -> None:
        self._name, self._fn = name, fn
        self.failures = 0  # calls that have failed

    def __call__(self, record: StepRecord) -> Mapping[str, float]:
        """Call the function, and return its numbers, with the number of failures if there are any."""
        numbers: dict[str, float] = {}
        try:
            numbers = {str(name): float(x) for name, x in (self._fn(record) or {}).items()}
        except BrokenPipeError:
            raise
        except (Exception, SystemExit) as error:
            self.failures += 1
            if self.failures == 1:
                text = f"log.observers: {self._name} failed at step {record.run.step}, and the run goes on: "
                print(text + words_of(error), file=sys.stderr, flush=True)
        failed = record.metrics.get(FAILURES, 0.0) + self.failures
        return numbers | ({FAILURES: failed} if failed else {})

    def close(self) -> None:
        """Print the number of failures if there were several."""
        if self.failures > 1:
            print(f"log.observers: {self._name} has failed {self.failures} times; the run is whole", file=sys.stderr)


def gauged_by(mesh: Mesh, device: torch.device, traffic: Callable[[], dict[str, Traffic]]) -> Observe:
    """An observer that adds the gauges of all ranks to a record; every rank must call it."""
    return lambda record: gauges(mesh=mesh, device=device, traffic=traffic)


def traffic_since(watch: Watch | None, step: int) -> Callable[[], dict[str, Traffic]]:
    """A function to call once a step, which returns the traffic over each axis since its last call; {} without a
    `watch`. `step` is the number of the first step, from which the watch counts on."""
    if watch is None:
        return dict
    watch.step = step
    before = {axis: Traffic() for axis in watch.traffic()}

    def since() -> dict[str, Traffic]:
        now = watch.traffic()
        changes = {axis: now[axis].since(before[axis]) for axis in now}
        before.update(now)
        watch.step += 1
        return changes

    return since
