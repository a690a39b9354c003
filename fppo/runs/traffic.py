"""Gauges of all ranks, with the traffic over the axes of their mesh in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fppo.pipeline.measure import gauges
from fppo.pipeline.train import Observe
from fppo.runtime.mesh import Mesh
from fppo.runtime.watch import Traffic, Watch


def gauged_by(mesh: Mesh, device: torch.device, traffic: Callable[[], dict[str, Traffic]]) -> Observe:
    """An observer that adds the gauges of all ranks to a record; every rank must call it."""
    return lambda record: gauges(mesh=mesh, device=device, traffic=traffic)


def traffic_since(watch: Watch | None, step: int) -> Callable[[], dict[str, Traffic]]:
    """A function that returns the traffic over each axis since its last call, once a step; empty without a watch."""
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
