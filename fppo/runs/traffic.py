"""The gauges of all ranks, with what went over the axes of their mesh in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fppo.pipeline.measure import gauges
from fppo.pipeline.train import Observe
from fppo.runtime.mesh import Mesh
from fppo.runtime.watch import Traffic, Watch


def gauged_by(mesh: Mesh, device: torch.device, traffic: Callable[[], dict[str, Traffic]]) -> Observe:
    """Adds the gauges of all ranks to a record; every rank must call."""
    return lambda record: gauges(mesh=mesh, device=device, traffic=traffic)


def traffic_since(watch: Watch | None, step: int) -> Callable[[], dict[str, Traffic]]:
    """What went over each axis since the last call, which ends a step; nothing without a watch."""
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
