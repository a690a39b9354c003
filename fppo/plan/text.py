"""A plan as text, and as what JSON holds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fppo.plan.case import Case
from fppo.plan.estimate import ORDER, link
from fppo.plan.plan import Plan
from fppo.plan.remedies import Remedy, seconds_per_token
from fppo.plan.text_rollout import host_lines, host_summary, rollout_lines, rollout_summary
from fppo.plan.text_values import gib, seconds, table
from fppo.plan.values import GIB
from fppo.runtime.mesh import DENSE

MEMORY = (
    "Memory is that of the real steps, run on tensors without data on the rank that holds most; gathered are "
    "parameters in use, whole or from the host, and gradients before they are added up. What is outside of tensors, "
    "and all seconds, are estimates from constants (fppo/plan/hardware.py, estimate.py)."
)
HEAP = (
    "A process on a CPU takes that with MALLOC_MMAP_THRESHOLD_=65536 in its environment; else glibc's heap keeps freed "
    "memory, up to 1.8 times as much where it was measured. "
)
LAUNCHES = (
    "These passes have so few tokens that the host launches operations more slowly than the GPU runs them. Give passes "
    "of more tokens, or, on one GPU and where layers are kept, model.graphs."
)
GRAPHS = (
    "Recorded as CUDA graphs (model.graphs): the passes of {stages}. Their memory is planned as if they were not; what "
    "was measured was less."
)
JUDGE = "A judge is not planned."
# of a case, what the JSON has by the same name
_AS_IT_IS = (
    *("tokens", "length", "micro_batches", "checkpoint_layers", "log_probs"),
    *("offload", "offload_activations", "forward_tokens"),
)
RECOMPUTED = {False: "layers kept", True: "layers recomputed", "selective": "layers recomputed but for attention"}
NO_ROLLOUT = "Neither the rollout is planned (--no-sampling) nor a judge."


def report(plan: Plan, helping: Sequence[Remedy] | None, *, width: int = 100) -> str:
    """Everything, for a terminal."""
    lines = [*_head(plan, width), "", *_memory(plan, width), "", *_verdict(plan, helping, width), ""]
    lines += [*_wire(plan), "", *_time(plan, width), ""]
    for part in (rollout_lines(plan, width=width), host_lines(plan.host, width=width)):
        lines += [*part, ""] if part else []
    return "\n".join([*lines, *_notes(plan, width)])


def _dtype_of_passes(case: Case) -> str:
    return str(case.compute_dtype or torch.float32).removeprefix("torch.")


def _head(plan: Plan, width: int) -> list[str]:
    case, hardware = plan.case, plan.case.hardware
    models = ", ".join(f"{role} {count / 1e9:,.2f} B" for role, count in plan.parameters.items())
    axes = " x ".join(f"{name} {case.size(name)}" for name in ORDER)
    passes = _dtype_of_passes(case)
    sharded = f", stage {case.sharding.stage}" if case.shards > 1 else ""
    sharded += f", {case.virtual_stages} stages on each rank" if case.virtual_stages > 1 else ""
    again = f", {RECOMPUTED[case.checkpoint_layers]}" if case.checkpoint_layers else ""
    again += {"none": "", "moments": ", moments on the host", "all": ", state on the host"}[case.offload]
    again += ", activations on the host" * case.offload_activations
    base = passes if case.lora_base is None else f"{case.lora_base} and {passes}"
    nodes = f", {hardware.per_node} to a node" if case.world > 1 and hardware.on_gpu else ""
    return [
        *textwrap.wrap(f"{case.name}: {models} parameters; {passes} passes on float32 state{again}", width),
        *_own(case),
        *([f"adapters of rank {case.lora.rank} on a frozen base in {base}"] if case.lora is not None else []),
        *textwrap.wrap(
            f"{case.world:,} x {hardware.name}, {hardware.memory / GIB:,.1f} GiB each{nodes}: {axes}{sharded}", width
        ),
        *textwrap.wrap(
            f"a pass of a data rank: {case.rows:,} x {case.length:,} tokens ({case.response_tokens:,} response); "
            f"{case.micro_batches} passes, {case.mini_batch:,} sequences to an update",
            width,
        ),
    ]


def _own(case: Case) -> list[str]:
    """What differs between the roles, a line each."""
    places = {"none": "on the device", "moments": "moments on the host", "all": "on the host"}
    lines = []
    for name, role in case.roles.items():
        words = [f"passes of {role.tokens:,} tokens"] if role.tokens else []
        words += [f"{role.compute_dtype} passes"] if role.compute_dtype else []
        words += [] if role.checkpoint_layers is None else [RECOMPUTED[role.checkpoint_layers]]
        words += [places[role.offload]] if role.offload else []
        words += ["kept in bfloat16"] if role.dtype == torch.bfloat16 else []
        lines.append(f"{name}: {', '.join(words)}")
    if case.size("expert") > 1:
        lines.append(f"experts: the planned rank's have {case.load:,.2f} times the mean of the ranks' tokens")
    if case.forward_tokens:
        lines.append(f"without a gradient: passes of {case.forward_tokens:,} tokens")
    return lines


def _memory(plan: Plan, width: int) -> list[str]:
    del width
    kinds = list(plan.stages[0].memory)
    rows = []
    for kind in kinds:
        cells = [gib(stage.memory[kind]) for stage in plan.stages]
        rest = plan.rest.get(kind)
        rows.append((kind, ["" if rest is None else gib(rest), *cells]))
    totals = [gib(sum(plan.rest.values())), *(gib(stage.total) for stage in plan.stages)]
    title = "memory of a rank, GiB, at the peak of each stage"
    return [title, *table(["at rest", *(s.name for s in plan.stages)], rows, ("together", totals))]


def _verdict(plan: Plan, helping: Sequence[Remedy] | None, width: int) -> list[str]:
    memory = plan.case.hardware.memory
    where, beside = _where(plan)
    if plan.fits:
        share = plan.needs / memory
        return [f"It fits: {plan.needs / GIB:,.1f} of {memory / GIB:,.1f} GiB ({share:.0%}), in {where}."]
    lines = textwrap.wrap(
        f"It does not fit: {where} needs {plan.needs / GIB:,.1f} GiB{beside}, and there are {memory / GIB:,.1f}. "
        f"Most of it: {_most(plan)}.",
        width,
    )
    if helping is None:
        return lines
    if not helping:
        return [*lines, "None of the settings tried makes it fit, together neither, on up to 64 times as many GPUs."]
    lines += ["", "What would make it fit, by GPU time for a token:"]
    base = seconds_per_token(plan)
    for remedy in helping:
        cost = remedy.seconds_per_token / base
        total = remedy.plan.peak.total / GIB
        lines.append(f"  {cost:>5.2f}x  {total:>7,.1f} GiB  {remedy.words}")
    return lines


def _where(plan: Plan) -> tuple[str, str]:
    """Where most is held, and what of it an engine holds beside an update, in words."""
    rollout = plan.rollout
    if rollout is not None and rollout.total == plan.needs:
        return "the rollout", ""
    stays = 0.0 if rollout is None else rollout.stays
    return plan.peak.name, f", with the {stays / GIB:,.1f} GiB that vLLM keeps" if stays else ""


def _most(plan: Plan) -> str:
    where = plan.rollout.memory if plan.rollout and _where(plan)[0] == "the rollout" else plan.peak.memory
    kinds = sorted(where.items(), key=lambda item: -item[1])[:2]
    return " and ".join(f"{kind} {size / GIB:,.1f}" for kind, size in kinds)


def _wire(plan: Plan) -> list[str]:
    axes = [axis for axis in ORDER if plan.case.size(axis) > 1]
    axes += [DENSE] if plan.case.size("expert") > 1 else []
    if not axes:
        return ["one rank sends nothing"]
    rows = []
    for axis in axes:
        spans, ring, _ = link(plan.case, axis)
        name = f"{axis} ({'between' if spans else 'inside'} nodes, {ring / 1e9:,.3g} GB/s)"
        rows.append((name, [gib(s.wire[axis].sent) if axis in s.wire else "" for s in plan.stages]))
    totals = [gib(sum(w.sent for w in s.wire.values())) for s in plan.stages]
    return ["a rank sends, GiB", *table([s.name for s in plan.stages], rows, ("together", totals))]


def _time(plan: Plan, width: int) -> list[str]:
    names, piped = [stage.name for stage in plan.stages], plan.case.size("pipeline") > 1
    rows = [
        ("computing", [seconds(s.seconds.compute) for s in plan.stages]),
        *([("of that for launches", [seconds(s.seconds.launching) for s in plan.stages])] if _waits(plan) else []),
        ("waiting for ranks and host", [seconds(s.seconds.exposed) for s in plan.stages]),
        *([("waiting for other stages", [seconds(s.seconds.idle) for s in plan.stages])] if piped else []),
        ("sent while computing", [seconds(s.seconds.communication - s.seconds.exposed) for s in plan.stages]),
        ("PFLOPs a rank needs", [f"{s.model_flops / 1e15:,.3g}" for s in plan.stages]),
        ("MFU", [f"{plan.mfu(s.name):.0%}" for s in plan.stages]),
    ]
    updates = [name for name in names if name.startswith("update")]
    speed = plan.tokens / plan.seconds / plan.case.world
    mfu = f", MFU of the updates {plan.mfu(*updates):.0%}" if updates else ""
    title = f"estimated: {seconds(plan.seconds)} s for a step, {speed:,.0f} tokens/s on each GPU{mfu}"
    lines = [title, *_pipeline(plan, width), "seconds", *table(names, rows, None)]
    lines += textwrap.wrap(LAUNCHES, width) if _waits(plan) else []
    if names := [stage.name for stage in plan.stages if stage.recorded]:
        lines += textwrap.wrap(GRAPHS.format(stages=", ".join(names)), width)
    return lines


def _waits(plan: Plan) -> bool:
    """Whether passes wait for the host to launch their operations."""
    return plan.case.hardware.on_gpu and sum(x.seconds.launching for x in plan.stages) > 0.01 * plan.seconds


def _pipeline(plan: Plan, width: int) -> list[str]:
    """What a pipeline costs, in words."""
    case = plan.case
    if case.size("pipeline") == 1:
        return []
    rank, bubble = "last" if case.pipeline_rank else "first", case.at("update actor").bubble
    return textwrap.wrap(
        f"the pipeline's {rank} rank is planned, which holds more; the actor's update has a bubble of {bubble:.0%}, "
        f"and the rank with most work {plan.imbalance:.2f} of the mean",
        width,
    )


def _notes(plan: Plan, width: int) -> list[str]:
    heap = "" if plan.case.hardware.on_gpu else HEAP
    samples = plan.rollout is None and plan.case.only is None and plan.case.has("actor")
    return textwrap.wrap(f"{MEMORY} {heap}{NO_ROLLOUT if samples else JUDGE}", width)


def summary(plan: Plan, helping: Sequence[Remedy] | None) -> dict[str, Any]:
    """Everything, for machines: bytes and seconds."""
    case, hardware = plan.case, plan.case.hardware
    return {
        "estimate": True,
        "model": case.name,
        "parameters": plan.parameters,
        "gpu": hardware,
        "mesh": {axis: case.size(axis) for axis in ORDER},
        "virtual_stages": case.virtual_stages,
        "pipeline_rank": case.pipeline_rank,
        "pipeline_imbalance": plan.imbalance,
        "stage": case.sharding.stage,
        "expert_load": case.load,
        **{name: getattr(case, name) for name in _AS_IT_IS},
        "mini_batch_size": case.mini_batch,
        "compute_dtype": _dtype_of_passes(case),
        "roles": {
            name: {**attrs.asdict(role), "dtype": str(role.dtype).removeprefix("torch.")}
            for name, role in case.roles.items()
        },
        "fits": plan.fits,
        "peak_bytes": plan.peak.total,
        "peak_stage": plan.peak.name,
        "rest_bytes": plan.rest,
        "stages": [
            {
                "name": s.name,
                "where": s.where,
                "memory_bytes": s.memory,
                "total_bytes": s.total,
                "wire": s.wire,
                "seconds": {**s.seconds._asdict(), "total": s.seconds.total},
                "model_flops": s.model_flops,
                "mfu": plan.mfu(s.name),
                "recorded": s.recorded,
            }
            for s in plan.stages
        ],
        "rollout": rollout_summary(plan.rollout),
        "host": host_summary(plan.host),
        "seconds": plan.seconds,
        "mfu": plan.mfu(),
        "remedies": None
        if helping is None
        else [
            {
                "flags": r.flags,
                "peak_bytes": r.plan.peak.total,
                "relative_cost": r.seconds_per_token / seconds_per_token(plan),
            }
            for r in helping
        ],
    }
