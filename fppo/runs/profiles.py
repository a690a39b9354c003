"""Profiles of whole steps: traces by torch's profiler, with named stages, and counts from them."""

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
# names of CUDA's runtime and driver calls
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


@attrs.frozen(kw_only=True)
class Profiles:
    """Write traces of some steps to the run's directory, each from this observer's call in one step to that in the
    next. Other threads are not traced."""

    directory: Path  # of the run
    steps: Sequence[int]
    mesh: Mesh = LOCAL
    running: list[tuple[profile, int]] = attrs.field(factory=list)  # with the number of graphs compiled before

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
        """Start the profile of a step about to begin, if it is among `steps`."""
        if step in self.steps:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.running.append((profile(activities=[ProfilerActivity.CPU, *gpu]), _compiled()))
            self.running[-1][0].start()

    def stop(self) -> list[tuple[profile, int]]:
        """Stop the running profiles and return them."""
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
    """The counts of GPU launches and of host waits among events; empty without launches."""
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
