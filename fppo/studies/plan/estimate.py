"""Estimates of a stage's time from its computation and traffic, and of a step's time and memory by formulas alone, good
enough to choose which of many meshes to plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs

from fppo.models import experts, flops
from fppo.models.model import Model
from fppo.models.slices import find_mlps
from fppo.runtime.mesh import AXES, DENSE, SHARD_AXES
from fppo.runtime.offload import WINDOW
from fppo.settings.model import params_on_host
from fppo.studies.plan import passes
from fppo.studies.plan.case import TRAINED, Case, Hardware, Pace, overhead
from fppo.studies.plan.passes import STAGES
from fppo.studies.plan.track import Cost, Phase

# Fractions of the peak that large operations reach, and the cost of small ones: rough, not measured on the machine at
# hand.
MATMUL_SHARE = 0.7  # large bfloat16 products on Hopper; training runs report 0.35 to 0.5 for everything
ATTENTION_SHARE = 0.35  # FlashAttention-2 on Hopper (arXiv:2407.08608, figure 5)
COPY_SHARE = 0.8  # fraction of memory bandwidth, for elementwise operations
LINK_SHARE = 0.8  # fraction of a link's bandwidth, links to the host included
LAUNCH = 6e-6  # seconds that torch needs to start an operation outside passes
# and inside a pass, with the modules, seams and graph around it: 3.0e-5 to 5.5e-5 were measured on three hosts of an
# H100 (docs/results/measurements.md, "On a GPU"), as milliseconds divided by the number of planned operations
PASS_LAUNCH = 4e-5
LATENCY = {False: 2e-5, True: 5e-5}  # seconds of a collective without data, inside a node and between nodes
ORDER = AXES  # ranks of the last axis are neighbours


class Seconds(NamedTuple):
    """A stage's time in seconds, and its parts."""

    compute: float
    communication: float  # all of it
    exposed: float  # communication that nothing is computed during
    idle: float = 0.0  # waiting for other pipeline stages
    launching: float = 0.0  # the part of `compute` by which launches on the host take longer than the operations

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.idle


class WireTraffic(NamedTuple):
    """One rank's traffic over one axis."""

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

    and `launching` is how much more the first of these is than the second. On a CPU, which launches nothing ahead, the
    two are added, and multiplied by the machine's pace. The time is the sum of compute and exposed over all phases. On
    a pipeline the passes of all ranks take as long as the slowest one's, and (p - 1) / (v m) of that longer; `idle` is
    the difference. A collective takes its latency and its bytes over the link of its axis: see `link`. Copies to and
    from the host count as collectives that are waited for, except in passes, which fetch layers and activations ahead.
    FLOPs include recomputation.
    """
    compute = communication = exposed = in_passes = launching = 0.0
    for phase, times in _repeated(phases, case):
        passes = phase.name.startswith(("forward", "backward"))
        busy = busy_seconds(phase.cost, case.hardware)
        begins = 0.0 if passes and recorded else phase.cost.other["launches"] * (PASS_LAUNCH if passes else LAUNCH)
        work = max(busy, begins) if case.hardware.on_gpu else (busy + begins) * _pace(phases, phase, case.pace)
        launching += times * (work - busy) if case.hardware.on_gpu else 0.0
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


def _pace(phases: Sequence[Phase], phase: Phase, pace: Pace) -> float:
    """The factor in `pace` for one of a stage's phases: a forward pass alone, an update's passes, or the optimizer."""
    if not any(x.name.startswith("backward") for x in phases):
        return pace.forward
    return pace.update if phase.name.startswith(("forward", "backward")) else pace.optimizer


def busy_seconds(cost: Cost, hardware: Hardware) -> float:
    """Seconds of computation alone: FLOPs and memory traffic at the hardware's rates, without the launches that
    `seconds_of` also considers."""
    busy = cost.other["traffic"] / (hardware.bandwidth * COPY_SHARE)
    for kind, count in cost.flops.items():
        peak = hardware.flops if kind.endswith("float16") else hardware.flops_float32
        busy += count / (peak * (ATTENTION_SHARE if kind.startswith("attention") else MATMUL_SHARE))
    return busy


def wires(phases: Sequence[Phase], case: Case) -> dict[str, WireTraffic]:
    """A rank's traffic in a stage with all of its passes, by axis."""
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
    """Whether an axis, one of `ORDER` or `DENSE`, spans nodes, and the bytes per second of a rank in a ring and in an
    all-to-all over it.

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
    alone = ("all_to_all", "send", "receive", "broadcast")  # that one link carries
    busy = sent * _crowding(case) if (axis, op) == ("expert", "all_to_all") else sent
    return calls * LATENCY[spans] + busy / ((direct if op in alone else ring) * LINK_SHARE)


def _crowding(case: Case) -> float:
    """How much more a rank receives than it sends in exchanges, if its experts have `load` times the mean.

    There are r ranks. Of each rank's choices, a fraction load / r falls to this rank's experts. So this rank sends 1 -
    load / r of its own choices to other ranks, and receives load (r - 1) / r; on the way back it is the other way
    round. An exchange takes as long as the larger of both, which for loads of 1 or more is the received part.
    """
    ranks, load = case.size("expert"), case.load
    comes, goes = load * (ranks - 1) / ranks, 1 - load / ranks
    return 2 * max(comes, goes) / (comes + goes)


def _repeated(phases: Sequence[Phase], case: Case) -> list[tuple[Phase, float]]:
    """Pair each tracked phase with the number of times that it happens in the whole stage.

    Two passes were tracked, and the first stands for all but the last. On a pipeline, where passes overlap, the tracked
    passes together stand for all, and the phases before and after them happen once.
    """
    passes = case.micro_batches
    if case.size("pipeline") == 1:
        again = ("forward 1", "backward 1", "after 1")
        return [(phase, passes - 1 if phase.name in again and passes > 2 else 1) for phase in phases]
    ran = sum(phase.name.startswith("forward") for phase in phases) / case.virtual_stages
    once = (phases[0].name, *(phase.name for phase in phases[-1:] if phase.name.startswith("after")))
    return [(phase, 1 if phase.name in once else max(1.0, passes / ran)) for phase in phases]


ROOM = 1.15  # a case is too large if the formula's bytes are over this multiple of a GPU's memory
_KEPT_LAYER = 10.0  # elements that a layer keeps for its backward pass, per token and width, without the MLP's
_KEPT_ROWS = 4.0  # and for each chosen expert
ATTENTION_BACKWARD = 2.5  # FLOPs relative to the forward pass
_LAUNCHES = 40  # operations of a layer's forward pass


class Rough(NamedTuple):
    """A rank's needs by the formula: seconds of a step without its rollout, and peak bytes."""

    seconds: float
    memory: float


@attrs.frozen
class Facts:
    """Sizes of a model that do not depend on the mesh."""

    layers: int
    dense: float  # parameters of the layers, without experts
    experts: float  # parameters of experts
    outside: float  # parameters of the embeddings or the head, whichever is larger
    products: float  # FLOPs of a forward pass over one sequence in the layers, without attention
    last: float  # the part that is not recomputed for the backward pass: the product at the end of a layer
    sliced: float  # the part in MLPs that are cut into slices, and computed again for the backward pass
    attention: float  # FLOPs of attention
    head: float  # FLOPs of the head, over a response
    hidden: int
    inner: float  # elements per token inside the MLP, or inside a token's chosen experts
    chosen: int  # experts per token; 0 without any
    keys: float  # elements of a token's keys and values relative to its width
    moments: float  # bytes of the optimizer's state per parameter


def facts_of(case: Case, model: Model) -> Facts:
    """Compute the `Facts` of a model that no axis cuts, and of the case's optimizer (`Case.at_rest`)."""
    config, routed = model.config, frozenset(experts.expert_names(model))
    inside = {name: shape.numel() for name, shape in model.shapes.items() if model.layer_of(name) is not None}
    others = [shape.numel() for name, shape in model.shapes.items() if name not in inside]
    chosen = (getattr(config, "num_experts_per_tok", None) or 1) if routed else 0
    width = (
        (getattr(config, "moe_intermediate_size", None) if routed else None)
        or getattr(config, "intermediate_size", None)
        or 0
    )
    heads = getattr(config, "num_attention_heads", None) or 1  # Mamba has none
    responses = case.response_tokens
    row = flops.forward_flops(model, [case.length], head_tokens=responses)
    attention, head = flops.attention_flops(model, [case.length]), 2.0 * flops.head_weights(model) * responses
    return Facts(
        layers=len(model.layers),
        dense=float(sum(count for name, count in inside.items() if name not in routed)),
        experts=float(sum(inside[name] for name in routed)),
        outside=float(max(others, default=0)),
        products=row - attention - head,
        sliced=0.0 if case.mlp_slice_tokens is None else 2.0 * _in_mlps(model) * case.length,
        last=0.0 if routed else 2.0 * width * config.hidden_size * case.length * len(model.layers),
        attention=attention,
        head=head,
        hidden=config.hidden_size,
        inner=float(width * max(1, chosen)),
        chosen=chosen,
        keys=2 * (getattr(config, "num_key_value_heads", None) or heads) / heads,
        moments=sum(passes.moments(case, model.shapes)) / sum(inside.values(), sum(others)),
    )


def _in_mlps(model: Model) -> int:
    """The number of weights in MLPs that can be computed in slices."""
    skeleton = model.plain.skeleton
    try:
        mlps = [skeleton.get_submodule(path) for path in find_mlps(skeleton)]
    except ValueError:  # the model of another role
        return 0
    return sum(x.numel() for mlp in mlps for x in mlp.parameters() if x.dim() > 1)


def flops_of(case: Case, name: str, facts: Facts) -> tuple[float, float]:
    """FLOPs of a stage's pass on all ranks that share its rows, recomputation included: of attention, and of everything
    else."""
    if not name.startswith("update"):
        return case.rows * facts.attention, case.rows * (facts.products + facts.head)
    last = 0.0 if facts.sliced else facts.last
    again = facts.products - last if case.checkpoint_layers else facts.sliced
    attention = facts.attention * (1.0 + ATTENTION_BACKWARD + (case.checkpoint_layers is True))
    heads = 3 if case.log_probs == "reference" else 4  # other kernels compute logits again
    return case.rows * attention, case.rows * (3 * facts.products + again + heads * facts.head)


def rough(case: Case, facts: Mapping[str, Facts]) -> Rough:
    """Estimate a whole step; `facts` are those of the case's models (`models_of`)."""
    seconds = sum(_seconds(case.at(name), name, facts[STAGES[name]]) for name in passes.stages_of(case))
    rest = sum(_rest(case, name, each) for name, each in facts.items())
    if case.reference:
        rest += _own(case, facts["actor"]) * case.at("reference").dtype.itemsize
    moving = max(_moving(case.at(name), name, facts[STAGES[name]]) for name in passes.stages_of(case))
    return Rough(seconds, rest + moving + overhead(case.hardware, case.groups, moving))


def _own(case: Case, facts: Facts, *, shards: bool = True) -> float:
    """The number of a model's parameters on the fullest rank, which on a pipeline has the embeddings or the head.
    Without `shards`, as if the shard axes cut nothing."""
    tensor, expert, pipeline = (case.size(axis) for axis in ("tensor", "expert", "pipeline"))
    dense = facts.dense / tensor / pipeline + (1 if pipeline > 1 else 2) * facts.outside / tensor
    of_experts = facts.experts / (expert if expert > 1 else tensor) / pipeline
    return dense / case.shards + of_experts / case.size("shard") if shards else dense + of_experts


def _rest(case: Case, name: str, facts: Facts) -> float:
    at = case.at_rest(name)
    each = 0.0 if params_on_host(at.offload) else at.dtype.itemsize
    if name in TRAINED and at.offload == "none":
        each += facts.moments
    return each * _own(case, facts)


def _moving(case: Case, name: str, facts: Facts) -> float:
    """Bytes of temporary tensors in a stage."""
    width = 4 if case.compute_dtype is None else case.compute_dtype.itemsize
    layers = facts.layers / case.size("pipeline")
    whole = _own(case, facts, shards=False)
    dense = _own(case, attrs.evolve(facts, experts=0.0), shards=False)
    cut = (dense if case.shards > 1 else 0.0) + (whole - dense if case.size("shard") > 1 else 0.0)
    copied = cut if case.compute_dtype is None else whole  # gathered or cast parameters
    gathered = width * (copied if case.sharding.stage < 3 else copied * min(1.0, 3 / layers))
    if not name.startswith("update"):
        return gathered + 4 * width * _tokens(case) * facts.hidden
    grads = 4 * (_own(case, facts) if case.sharding.stage > 1 else whole)
    grads += 8 * cut / layers  # a layer's whole gradients, and the packed copy for their sum
    sliced = 1.0 if case.mlp_slice_tokens is None else min(1.0, case.mlp_slice_tokens / _tokens(case))
    inside = _KEPT_LAYER * facts.hidden + 4.0 * sliced * facts.inner + _KEPT_ROWS * facts.chosen * facts.hidden
    of_layer = 2.0 * facts.hidden + inside / case.size("tensor")
    again = facts.hidden * (1.0 + (case.checkpoint_layers == "selective") / case.size("tensor"))  # attention's output
    kept = layers * (again if case.checkpoint_layers else of_layer) * case.in_flight / case.virtual_stages
    waiting = width * _tokens(case) * kept
    if case.offload_activations:
        waiting = min(waiting, WINDOW)
    return gathered + grads + waiting + width * _tokens(case) * (of_layer if case.checkpoint_layers else 0.0)


def _tokens(case: Case) -> float:
    """The number of a pass's tokens that a rank holds between blocks, before the tensor axis cuts them."""
    return case.tokens / (case.size("sequence") * case.size("context"))


def _seconds(case: Case, name: str, facts: Facts) -> float:
    """Seconds of a stage with all of its passes."""
    hardware, trains = case.hardware, name.startswith("update")
    parts = case.world // case.data_ranks
    times = (4 if case.checkpoint_layers else 3) if trains else 1
    narrow = case.compute_dtype is not None
    peak = hardware.flops if narrow else hardware.flops_float32
    attention, others = flops_of(case, name, facts)
    busy = (attention / ATTENTION_SHARE + others / MATMUL_SHARE) / parts / peak
    launches = times * _LAUNCHES * facts.layers / case.size("pipeline")
    compute = max(busy, launches * PASS_LAUNCH)
    width = case.compute_dtype.itemsize if narrow and case.compute_dtype is not None else 4
    dense = _own(case, attrs.evolve(facts, experts=0.0), shards=False)
    often = (1 / max(1, case.micro_batches)) if case.sharding.stage == 1 else 1.0
    rounds = {1: 1, 2: 1, 3: 2}[case.sharding.stage] if trains else 1
    of_experts, times_sent = _own(case, facts, shards=False) - dense, often * (rounds * width + 4 * trains)
    gathers = _over(case, DENSE, dense * times_sent) + _over(case, "shard", of_experts * times_sent)
    each = compute + max(0.0, gathers - compute) + _exchanges(case, facts, times if trains else 1, width)
    return each * case.micro_batches * (1 + case.bubble) + (_sums(case, facts) if trains else 0.0)


def _exchanges(case: Case, facts: Facts, times: int, width: int) -> float:
    """Seconds in which ranks exchange tokens during a pass that runs each layer `times` times in all, where a backward
    run counts as two. `width` is the bytes of an element."""
    tensor, layers = case.size("tensor"), facts.layers / case.size("pipeline")
    hidden, blocks = _tokens(case) * facts.hidden * width, layers * min(2, times)
    seconds = 4 * blocks * _over(case, "tensor", hidden)
    seconds += 4 * blocks * _over(case, "sequence", hidden / tensor)
    seconds += blocks * _over(case, "context", facts.keys * hidden * case.size("context") / tensor)
    if (ranks := case.size("expert")) > 1:
        sent = 2 * facts.chosen * hidden / tensor * (ranks - 1) / ranks * case.load
        seconds += layers * max(1, times - 1) * sent / (link(case, "expert")[2] * LINK_SHARE)
    if case.size("pipeline") > 1:
        per_second = link(case, "pipeline")[2] * LINK_SHARE
        seconds += min(2, times) * case.virtual_stages * hidden / tensor / per_second
    return seconds


def _sums(case: Case, facts: Facts) -> float:
    """Seconds of the sum of gradients over replicas, once per update."""
    return 2 * _over(case, "replicate", 4 * _own(case, facts))


def _over(case: Case, axis: str, size: float) -> float:
    """Seconds in which the ranks of an axis, as a ring, gather or scatter a tensor of `size` bytes in whole."""
    ranks = case.shards if axis == DENSE else case.size(axis)
    return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / (link(case, axis)[1] * LINK_SHARE)
