"""Profiles of whole steps: traces by torch's profiler, with the stages by name, and what they count."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.profiler import ProfilerActivity, profile

from fppo.pipeline.measure import GIB
from fppo.pipeline.train import StepRecord
from fppo.runtime.mesh import AXES, LOCAL, Mesh, place_on, ranks_on

PROFILES = "profiles"
# as CUDA's runtime and driver call them
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@attrs.frozen(kw_only=True)
class Profiles:
    """Writes traces of some steps to the run's directory, each from this observer's call in one step to that in the
    next. What a thread does beside the steps is not in them."""

    directory: Path  # of the run
    steps: Sequence[int]
    mesh: Mesh = LOCAL
    running: list[tuple[profile, int]] = attrs.field(factory=list)  # with the graphs compiled before it

    def __call__(self, record: StepRecord) -> Mapping[str, float]:
        step, numbers = record.run.step, {}
        for profiler, compiled in self.stop():
            if record.experience is not None:
                path = self._path(step)
                profiler.export_chrome_trace(str(path))
                numbers = counts(Counter(event.name for event in profiler.events() or ()))
                if numbers:
                    numbers |= copied(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
                numbers["perf/recompiles"] = float(_compiled() - compiled)
        self.begin(step + 1)
        return numbers

    def begin(self, step: int) -> None:
        """Starts the profile of a step that is about to begin, if it is one of those."""
        if step in self.steps:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.running.append((profile(activities=[ProfilerActivity.CPU, *gpu]), _compiled()))
            self.running[-1][0].start()

    def stop(self) -> list[tuple[profile, int]]:
        """Ends what is running, and gives it."""
        stopped = list(self.running)
        self.running.clear()
        for profiler, _ in stopped:
            profiler.stop()
        return stopped

    def _path(self, step: int) -> Path:
        (self.directory / PROFILES).mkdir(parents=True, exist_ok=True)
        rank = f"_rank_{place_on(self.mesh, AXES)}" if ranks_on(self.mesh, AXES) > 1 else ""
        return self.directory / PROFILES / f"step_{step:08d}{rank}.json.gz"


def counts(events: Mapping[str, int]) -> dict[str, float]:
    """Launches on the GPU, and waits of the host for it, among counted events; none where nothing was launched."""
    launches, syncs = (sum(events.get(name, 0) for name in names) for names in (_LAUNCHES, _SYNCS))
    return {"perf/launches": float(launches), "perf/host_syncs": float(syncs)} if launches else {}


def copied(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """GiB that went between the host and the GPU, each way, by the events of a trace: profilers give none."""
    ways = {"HtoD": "perf/to_device_gb", "DtoH": "perf/to_host_gb"}
    sizes = dict.fromkeys(ways.values(), 0.0)
    for event in events:
        way = str(event.get("name")).removeprefix("Memcpy ")[:4]
        if event.get("cat") == "gpu_memcpy" and way in ways:
            sizes[ways[way]] += event["args"]["bytes"] / GIB
    return sizes


def _compiled() -> int:
    from torch._dynamo.utils import counters  # here: it loads what only compiled functions need

    return counters["stats"]["unique_graphs"]
