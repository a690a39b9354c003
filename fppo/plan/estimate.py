"""How long a stage takes, estimated from what it computes and sends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fppo.plan.case import Case
from fppo.plan.hardware import Hardware
from fppo.plan.values import Cost, Phase
from fppo.runtime.mesh import AXES, DENSE, SHARD_AXES

# Shares of the peak that large operations reach, and what small ones cost: rough, and not measured on the machine at
# hand.
MATMUL_SHARE = 0.7  # of large bfloat16 products on Hopper; training runs report 0.35 to 0.5 for everything together
ATTENTION_SHARE = 0.35  # FlashAttention-2 on Hopper (arXiv:2407.08608, figure 5)
COPY_SHARE = 0.8  # of memory bandwidth, element by element
LINK_SHARE = 0.8  # of links, those to the host among them
LAUNCH = 6e-6  # seconds that torch needs to begin an operation outside of passes
# and inside of one, forward or backward, with the modules, seams and graph around it: 3.0e-5 to 5.5e-5 were measured on
# three hosts of an H100 (docs/measurements.md, "On a GPU"), their milliseconds over the operations that a plan counts
PASS_LAUNCH = 4e-5
LATENCY = {False: 2e-5, True: 5e-5}  # seconds of a collective without data, inside a node and between nodes
ORDER = AXES  # ranks of the last axis are neighbours


class Seconds(NamedTuple):
    """What a stage's time consists of."""

    compute: float
    communication: float  # all of it
    exposed: float  # that nothing is computed during
    idle: float = 0.0  # that the rank waits for other stages of a pipeline
    launching: float = 0.0  # of `compute`: that the host needs longer to launch operations than they take

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.idle


class WireTraffic(NamedTuple):
    """What a rank sends over an axis."""

    sent: float  # bytes
    calls: float
    seconds: float


def seconds_of(phases: Sequence[Phase], case: Case, *, slowest: float = 1.0, recorded: bool = False) -> Seconds:
    """The time of a stage with all of its passes, each launched at once if `recorded`. On a pipeline the rank with most
    work has `slowest` times this one's.

    For each phase, forward or backward:

        compute = max(launches * PASS_LAUNCH, or LAUNCH outside of passes, and nothing for those that are recorded,
                      matmul FLOPs / (peak * MATMUL_SHARE) + attention FLOPs / (peak * ATTENTION_SHARE)
                      + bytes read and written by other operations / (memory bandwidth * COPY_SHARE))
        exposed = collectives that the code waits for + what those it does not wait for take longer than `compute`

    and `launching` is how much more the first of these is than the second. The time is the sum of compute and exposed
    over all phases; on a pipeline, where the passes of all ranks take as long as the slowest one's, and (p - 1) / (v m)
    of that longer, `idle` is the rest. A collective takes its latency and its bytes over the link of its axis: see
    `link`. Copies to and from the host count as collectives that are waited for, except in passes, which fetch
    layers and activations ahead. FLOPs are all that are computed, again or not.
    """
    compute = communication = exposed = in_passes = launching = 0.0
    for phase, times in _repeated(phases, case):
        passes = phase.name.startswith(("forward", "backward"))
        busy = busy_seconds(phase.cost, case.hardware)
        begins = 0.0 if passes and recorded else phase.cost.other["launches"] * (PASS_LAUNCH if passes else LAUNCH)
        work = max(busy, begins)
        launching += times * (work - busy)
        waited, hidden = (
            sum(
                _collective(case, axis, op, phase.cost.sent[axis, op, wait], calls)
                for (axis, op, wait), calls in phase.cost.calls.items()
                if wait is waits
            )
            for waits in (True, False)
        )
        host = phase.cost.other["host"] / (case.hardware.host_bandwidth * LINK_SHARE)
        waited, hidden = (waited, hidden + host) if passes else (waited + host, hidden)
        compute += times * work
        communication += times * (waited + hidden)
        exposed += times * (waited + max(0.0, hidden - work))
        if passes:
            in_passes += times * (work + waited + max(0.0, hidden - work))
    return Seconds(compute, communication, exposed, in_passes * (slowest * (1 + case.bubble) - 1), launching)


def busy_seconds(cost: Cost, hardware: Hardware) -> float:
    """The `compute` of `seconds_of` without what launching takes."""
    busy = cost.other["traffic"] / (hardware.bandwidth * COPY_SHARE)
    for kind, flops in cost.flops.items():
        peak = hardware.flops if kind.endswith("float16") else hardware.flops_float32
        busy += flops / (peak * (ATTENTION_SHARE if kind.startswith("attention") else MATMUL_SHARE))
    return busy


def wires(phases: Sequence[Phase], case: Case) -> dict[str, WireTraffic]:
    """What a rank sends in a stage with all of its passes, by axis."""
    by_axis: dict[str, Counter] = {}
    for phase, times in _repeated(phases, case):
        for (axis, op, wait), calls in phase.cost.calls.items():
            sent = phase.cost.sent[axis, op, wait]
            counts = by_axis.setdefault(axis, Counter())
            counts["sent"] += times * sent  # type: ignore[assignment]
            counts["calls"] += times * calls  # type: ignore[assignment]
            counts["seconds"] += times * _collective(case, axis, op, sent, calls)  # type: ignore[assignment]
    return {axis: WireTraffic(**by_axis[axis]) for axis in (*ORDER, DENSE) if axis in by_axis}


def link(case: Case, axis: str) -> tuple[bool, float, float]:
    """Whether an axis, one of `ORDER` or `DENSE`, spans nodes, and the bytes per second of a rank in a ring over it and
    in an all-to-all.

    Ranks are counted with the last axis fastest, a node's ranks in a row. An axis inside a node has the node's links.
    One that spans nodes has g of its ranks in each; a ring that visits them one after the other leaves a node over g
    network links at once, so it has g times a rank's, and at most the node's. In an all-to-all each rank sends over
    its own link what is for other nodes.
    """
    own = SHARD_AXES if axis == DENSE else (axis,)
    inner = math.prod(map(case.size, ORDER[ORDER.index(own[-1]) + 1 :]))
    hardware, size = case.hardware, math.prod(map(case.size, own))
    together = min(size, max(1, hardware.per_node // inner))
    if together == size:
        return False, hardware.node_bandwidth, hardware.node_bandwidth
    ring = min(hardware.node_bandwidth, together * hardware.network_bandwidth)
    outside = (size - together) / (size - 1)
    return True, ring, min(hardware.node_bandwidth, hardware.network_bandwidth / outside)


def _collective(case: Case, axis: str, op: str, sent: float, calls: float) -> float:
    spans, ring, direct = link(case, axis)
    alone = ("all_to_all", "send", "receive", "broadcast")  # which one link carries
    busy = sent * _crowding(case) if (axis, op) == ("expert", "all_to_all") else sent
    return calls * LATENCY[spans] + busy / ((direct if op in alone else ring) * LINK_SHARE)


def _crowding(case: Case) -> float:
    """How much more comes in the exchanges of a rank whose experts have `load` times the mean than it sends.

    Of r ranks that choose alike each has a part load / r of its tokens' choices for this rank. So of what a rank's
    tokens are in all, it sends 1 - load / r to other ranks' experts and gets load (r - 1) / r, and the other way round
    on the way back; each exchange lasts as long as the more of both, which for loads from 1 on is what comes there.
    """
    ranks, load = case.size("expert"), case.load
    comes, goes = load * (ranks - 1) / ranks, 1 - load / ranks
    return 2 * max(comes, goes) / (comes + goes)


def _repeated(phases: Sequence[Phase], case: Case) -> list[tuple[Phase, float]]:
    """Each phase and how often it happens: of two passes that were run, the first stands for all but the last. On a
    pipeline, where passes overlap, all of those that were run stand for all, and what comes last is there once."""
    passes = case.micro_batches
    if case.size("pipeline") == 1:
        again = ("forward 1", "backward 1", "after 1")
        return [(phase, passes - 1 if phase.name in again and passes > 2 else 1) for phase in phases]
    ran = sum(phase.name.startswith("forward") for phase in phases) / case.virtual_stages
    once = (phases[0].name, *(phase.name for phase in phases[-1:] if phase.name.startswith("after")))
    return [(phase, 1 if phase.name in once else max(1.0, passes / ran)) for phase in phases]
