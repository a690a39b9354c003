"""Plans as text for a terminal (sections of sentences and tables) and as JSON values."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from transformers import PreTrainedConfig

from fppo.runtime.mesh import DENSE
from fppo.studies.plan.case import GIB, Case
from fppo.studies.plan.columns import ColumnCall
from fppo.studies.plan.estimate import ORDER, link
from fppo.studies.plan.host import HostMemory
from fppo.studies.plan.plan import Engines, Plan
from fppo.studies.plan.search import UNTRIED, Candidate, Remedy, SearchResult, seconds_per_token

MIB = 1 << 20
MEMORY = (
    "Memory is counted by running the real steps on tensors without data, on the fullest rank. Gathered are parameters "
    "in use (whole, or fetched from the host) and gradients before their sum. Memory outside tensors, and all seconds, "
    "are estimates from constants (fppo/studies/plan/case.py, estimate.py)."
)
HEAP = (
    " This holds for a process on a CPU with MALLOC_MMAP_THRESHOLD_=65536 in its environment; without it glibc's heap "
    "keeps freed memory, up to 1.8 times as much in measurements."
)
LAUNCHES = (
    "These passes have so few tokens that the GPU waits for the host to launch operations. Give passes of more tokens; "
    "or, on one GPU without recomputed layers, model.graphs."
)
GRAPHS = (
    "Recorded as CUDA graphs (model.graphs): the passes of {stages}. Their memory is planned as if they were not; "
    "measured memory was less."
)
JUDGE, NO_ROLLOUT = "A judge is not planned.", "Neither the rollout is planned (--no-sampling) nor a judge."
ROLLOUT = (
    "Estimates for responses of maximal length, steps that are launched at once, and decoding at the rate at which "
    "memory delivers weights, keys and values."
)
HOST = (
    "Weights in transfer and copies for the checkpoint may exist at the same time. The process itself is a usual size. "
    "A node has a process for each GPU; its controller holds the columns of a batch as well."
)
COLUMNS = (
    "Columns have their maximal width, and count once, however many ranks read them; `fppo trace` shows what a run "
    "sent and got back. Images, objects of rows, metrics and weights are not counted, nor are held-out prompts and "
    "prompts that are drawn again."
)
ROUGH = (
    "A formula estimates time and memory of every mesh (fppo/studies/plan/estimate.py). The fastest that may fit are "
    "then planned as by `fppo plan` for a single mesh."
)
RECOMPUTED = {False: "layers kept", True: "layers recomputed", "selective": "layers recomputed but for attention"}


@attrs.frozen
class Table:
    """A table of cells in columns, to the right of the rows' labels; the total is below a line."""

    title: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    total: Sequence[str] | None = None


Section = Sequence[str | Table]  # a text that begins with spaces is indented


def rendered(sections: Iterable[Section], width: int = 100) -> str:
    """Render sections with an empty line between them, texts wrapped to `width`."""
    return "\n\n".join(
        "\n".join(line for part in section for line in _lines(part, width)) for section in sections if section
    )


def _lines(part: str | Table, width: int) -> list[str]:
    if isinstance(part, str):
        indent = " " * (len(part) - len(part.lstrip()))
        return textwrap.wrap(
            part.lstrip(), width, initial_indent=indent, subsequent_indent=indent * 2, break_on_hyphens=False
        )
    every = [*part.rows, *([] if part.total is None else [("together", part.total)])]
    label = max((len(name) for name, _ in every), default=0)
    widths = [max(len(head), *(len(cells[i]) for _, cells in every)) for i, head in enumerate(part.heads)]
    lines = [
        f"  {name:<{label}}{''.join(f'  {cell:>{size}}' for cell, size in zip(cells, widths, strict=True))}".rstrip()
        for name, cells in [("", part.heads), *every]
    ]
    if part.total is not None:
        lines.insert(-1, "  " + "-" * (label + sum(widths) + 2 * len(widths)))
    return [part.title, *lines]


def amount(count: float) -> str:
    """A number of parameters in the unit that fits: 7.62 B, 0.49 B, 2.62 k."""
    size, name = next(
        ((size, name) for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= size / 10), (1, "")
    )
    return f"{count / size:,.2f} {name}" if name else f"{count:,.0f}"


def gib(size: float) -> str:
    """Bytes as GiB."""
    value = size / GIB
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 0.01:
        return f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return "0" if size < 1 else f"{value:.1g}" if value >= 0.001 else "<0.001"


def _mib(size: float) -> str:
    value = size / MIB
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else f"{value:.1g}"


def _sizes(
    title: str,
    columns: Sequence[tuple[str, Mapping[str, float]]],
    form: Callable[[float], str] = gib,
    kinds: Iterable[str] | None = None,
) -> Table:
    """A table of sizes by kind, with their sum; without `kinds` in the columns' order."""
    kinds = dict.fromkeys(kind for _, each in columns for kind in each) if kinds is None else kinds
    rows = [(kind, [form(each[kind]) if kind in each else "" for _, each in columns]) for kind in kinds]
    return Table(title, [name for name, _ in columns], rows, [form(sum(each.values())) for _, each in columns])


def of_peaks(rows: Mapping[str, tuple[float, float | None]]) -> Table:
    """A table of planned bytes by name, beside those of a run (None: not measured)."""
    large = max(planned for planned, _ in rows.values()) >= 0.1 * GIB
    form, unit = (gib, "GiB") if large else (_mib, "MiB")
    cells = {
        name: [form(x), "" if y is None else form(y), "" if y is None else f"{y / x:.2f}"]
        for name, (x, y) in rows.items()
    }
    title = (
        f"tensors of a rank at the peak of each stage, {unit}, as fppo check and fppo plan count them and as they were"
    )
    return Table(title, ("planned", "this run", "ratio"), list(cells.items()))


def of_plan(plan: Plan, helping: Sequence[Remedy] | None) -> list[Section]:
    """Sections on a plan, and on the changes with which it would fit."""
    title = "memory of a rank, GiB, at the peak of each stage"
    memory = _sizes(title, [("at rest", plan.rest), *((stage.name, stage.memory) for stage in plan.stages)])
    stages = [_head(plan.case, plan.parameters), [memory], _verdict(plan, helping), [_wire(plan)], _time(plan)]
    sampled = plan.rollout is not None or plan.case.only is not None or not plan.case.has("actor")
    heap = "" if plan.case.hardware.on_gpu else HEAP
    return [*stages, _rollout(plan), _host(plan.host), [f"{MEMORY}{heap} {JUDGE if sampled else NO_ROLLOUT}"]]


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.float32).removeprefix("torch.")


def _head(case: Case, parameters: Mapping[str, int]) -> Section:
    hardware, passes = case.hardware, _name(case.compute_dtype)
    models = ", ".join(f"{role} {amount(count)}" for role, count in parameters.items())
    axes = " x ".join(f"{name} {case.size(name)}" for name in ORDER)
    sharded = f", stage {case.sharding.stage}" if case.shards > 1 else ""
    sharded += f", {case.virtual_stages} stages on each rank" if case.virtual_stages > 1 else ""
    again = f", {RECOMPUTED[case.checkpoint_layers]}" if case.checkpoint_layers else ""
    again += {
        "none": "",
        "moments": ", moments on the host",
        "all": ", state on the host",
        "optimizer_step": ", state and optimizer on the host",
    }[case.offload]
    again += ", activations on the host" * case.offload_activations
    again += "" if case.mlp_slice_tokens is None else f", MLPs in slices of {case.mlp_slice_tokens:,} tokens"
    base = passes if case.lora_base is None else f"{case.lora_base} and {passes}"
    nodes = f", {hardware.per_node} to a node" if case.world > 1 and hardware.on_gpu else ""
    return [
        f"{case.name}: {models} parameters; {passes} passes on float32 state{again}",
        *_differences(case),
        *([f"adapters of rank {case.lora.rank} on a frozen base in {base}"] if case.lora is not None else []),
        f"{case.world:,} x {hardware.name}, {hardware.memory / GIB:,.1f} GiB each{nodes}: {axes}{sharded}",
        f"a pass of a data rank: {case.rows:,} x {case.length:,} tokens ({case.response_tokens:,} response); "
        f"{case.micro_batches} passes, {case.mini_batch:,} sequences to an update",
        *_shared(case),
    ]


def _shared(case: Case) -> list[str]:
    """A line on the tokens that passes compute if rows share prompts; none otherwise."""
    if case.together == case.forward_together == 1:
        return []
    update, forward = (
        f"{x.distinct(x.rows):,} tokens ({x.computed:.0%})" for x in map(case.at, ("update actor", "log-probs"))
    )
    return [f"prompts are computed once: {update} of a pass of the update, {forward} of one without a gradient"]


def _differences(case: Case) -> list[str]:
    """Lines on the roles' overrides, the load of experts, and passes without gradients."""
    places = {
        "none": "on the device",
        "moments": "moments on the host",
        "all": "on the host",
        "optimizer_step": "on the host with its optimizer",
    }
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


def _verdict(plan: Plan, helping: Sequence[Remedy] | None) -> Section:
    have, rollout = plan.case.hardware.memory, plan.rollout
    if rollout is not None and rollout.total == plan.needs:
        where, memory, beside = "the rollout", rollout.memory, ""
    else:
        where, memory, stays = plan.peak.name, plan.peak.memory, 0.0 if rollout is None else rollout.stays
        beside = f", with the {stays / GIB:,.1f} GiB that vLLM keeps" if stays else ""
    if plan.fits:
        return [f"It fits: {plan.needs / GIB:,.1f} of {have / GIB:,.1f} GiB ({plan.needs / have:.0%}), in {where}."]
    most = " and ".join(f"{k} {x / GIB:,.1f}" for k, x in sorted(memory.items(), key=lambda item: -item[1])[:2])
    said = f"It does not fit: {where} needs {plan.needs / GIB:,.1f} GiB{beside}, and there are {have / GIB:,.1f}. "
    said += f"Most of it: {most}."
    if helping is None:
        return [said]
    if not helping:
        return [
            said,
            "None of the settings that were tried makes it fit, alone or together, on up to 64 times as many GPUs.",
            UNTRIED,
        ]
    base = seconds_per_token(plan)
    rows = [
        (remedy.words, [f"{remedy.seconds_per_token / base:.2f}x", f"{remedy.plan.peak.total / GIB:,.1f}"])
        for remedy in helping
    ]
    return [said, Table("What would make it fit, by GPU time for a token:", ["time", "GiB"], rows), UNTRIED]


def _wire(plan: Plan) -> str | Table:
    case = plan.case
    axes = [axis for axis in ORDER if case.size(axis) > 1] + ([DENSE] if case.size("expert") > 1 else [])
    if not axes:
        return "one rank sends nothing"
    names = {}
    for axis in axes:
        spans, ring, _ = link(case, axis)
        names[axis] = f"{axis} ({'between' if spans else 'inside'} nodes, {ring / 1e9:,.3g} GB/s)"
    sent = [(x.name, {names[axis]: wire.sent for axis, wire in x.wire.items()}) for x in plan.stages]
    return _sizes("a rank sends, GiB", sent, kinds=names.values())


def _time(plan: Plan) -> Section:
    stages, case = plan.stages, plan.case
    waits = case.hardware.on_gpu and sum(x.seconds.launching for x in stages) > 0.01 * plan.seconds
    rows = {
        "computing": [x.seconds.compute for x in stages],
        **({"of that for launches": [x.seconds.launching for x in stages]} if waits else {}),
        "waiting for ranks and host": [x.seconds.exposed for x in stages],
        **({"waiting for other stages": [x.seconds.idle for x in stages]} if case.size("pipeline") > 1 else {}),
        "sent while computing": [x.seconds.communication - x.seconds.exposed for x in stages],
    }
    cells = [(name, list(map(_seconds, values))) for name, values in rows.items()]
    cells.append(("PFLOPs a rank needs", [f"{x.model_flops / 1e15:,.3g}" for x in stages]))
    cells.append(("MFU", [f"{plan.mfu(x.name):.0%}" for x in stages]))
    updates = [x.name for x in stages if x.name.startswith("update")]
    speed, mfu = plan.tokens / plan.seconds / case.world, f", MFU of the updates {plan.mfu(*updates):.0%}"
    section: list[str | Table] = [
        f"estimated: {_seconds(plan.seconds)} s for {_updated(case)}, {speed:,.0f} tokens/s on each GPU"
        f"{mfu if updates else ''}"
    ]
    if case.size("pipeline") > 1:
        rank, bubble = "last" if case.pipeline_rank else "first", case.at("update actor").bubble
        section.append(
            f"the pipeline's {rank} rank is planned, which holds more; the actor's update has a bubble of "
            f"{bubble:.0%}, and the rank with most work {plan.imbalance:.2f} of the mean"
        )
    section += [Table("seconds", [x.name for x in stages], cells), *([LAUNCHES] if waits else [])]
    recorded = ", ".join(x.name for x in stages if x.recorded)
    return [*section, GRAPHS.format(stages=recorded)] if recorded else section


def _updated(case: Case) -> str:
    """The part of a step that the planned stages cover, in words: all of it but the rollout or, if a step has several
    mini-batches, the part of one mini-batch."""
    rows, sampled = case.mini_batch, None if case.sampling is None else case.sampling.sequences
    if sampled is None or sampled <= rows:
        return "a step without the rollout"
    return f"{rows:,} of the {sampled:,} sequences of a step, without the rollout"


def _rollout(plan: Plan | Engines) -> Section:
    """The section on an engine: its rows, memory, time and weights."""
    sampling, rollout = plan.case.sampling, plan.rollout
    if sampling is None or rollout is None:
        return []
    kind = "vLLM" if sampling.engine == "vllm" else "the embedded engine"
    gpus = f" on {rollout.gpus} GPUs each" if rollout.gpus > 1 else ""
    each = "the engine has" if rollout.engines == 1 else f"each of {rollout.engines:,} engines{gpus} has"
    gathered = f"a rank sends others {gib(rollout.gathered)} GiB" if rollout.gathered else ""
    sent = f"an engine is sent {gib(rollout.sent)} GiB" if rollout.sent else ""
    weights = " and ".join(x for x in (gathered, sent) if x) or "the engine has those that are trained"
    took = f" ({_seconds(rollout.sending)} s)" if rollout.sending else ""
    return [
        f"rollout by {kind}: {each} {rollout.rows:,} rows, of which {rollout.together:,} decode together",
        _sizes("memory of a GPU that samples, GiB", [("rollout", rollout.memory)]),
        *([f"{gib(rollout.stays)} GiB of it stay beside updates"] if rollout.stays else []),
        f"estimated: prompts {_seconds(rollout.prefill)} s, responses {_seconds(rollout.decode)} s; "
        f"weights: {weights}{took}. {ROLLOUT}",
    ]


def _host(host: HostMemory | None) -> Section:
    if host is None:
        return []
    columns = {"at rest": {}, "starting": host.starting, "saving": host.meanwhile}
    held = [(name, {k: size for k, size in {**host.rest, **more}.items() if size}) for name, more in columns.items()]
    away = f"{gib(host.files)} GiB of optimizers are in files, and while a checkpoint is written as much again"
    return [_sizes("host memory of a rank's process, GiB", held), HOST, *([away] if host.files else [])]


def of_engines(engines: Engines) -> list[Section]:
    """Sections on the engines of a pool: rows, memory, time and weights, and the memory of their host."""
    rollout, memory = engines.rollout, engines.case.hardware.memory
    fits = f"It {'fits' if engines.fits else 'does not fit'}: {rollout.total / GIB:,.1f} of {memory / GIB:,.1f} GiB."
    sent = f"{rollout.engines:,} engines {engines.sent / GIB:,.1f} GiB."
    sending = f"The controller sends the policy after each update: to {sent}"
    return [[*_rollout(engines), fits, sending], _host(engines.host)]


def of_columns(calls: Sequence[ColumnCall]) -> list[Section]:
    """Write the section on the bytes that the calls of one step send to one pool and get back, in MiB. Returns a list
    of this one section, empty without `calls`. The table of what comes back is left out if nothing does."""
    if not calls:
        return []
    sent, given = [(x.call, x.there) for x in calls], [(x.call, x.back) for x in calls if x.back]
    tables = [[_sizes("columns of a step's batch to this pool, MiB", sent, _mib)]]
    tables += [[_sizes("and from it", given, _mib)]] if given else []
    return [*tables, [COLUMNS]]


def of_search(found: SearchResult) -> list[Section]:
    """Sections on the meshes that a search found, and the reasons against the others."""
    if not found.count:
        return [["there is no mesh of so many GPUs"]]
    rows = []
    for candidate, plan in found.best:
        updates = [stage.name for stage in plan.stages if stage.name.startswith("update")]
        speed, memory = plan.tokens / plan.seconds / plan.case.world, plan.peak.total / GIB
        cells = [f"{plan.seconds:,.4g}", f"{speed:,.0f}", f"{plan.mfu(*updates):.0%}", f"{memory:,.1f}"]
        rows.append((candidate.words, cells))
    best = Table("planned, and fit:", ["step s", "tokens/s each", "MFU", "GiB each"], rows)
    head = best if rows else "None of those that were planned fits."
    return [[f"{found.count:,} meshes"], [head], ["the others:", *_others(found)], [ROUGH]]


def _others(found: SearchResult) -> list[str]:
    lines = [
        f"1 needs {plan.needs / GIB:,.1f} of {plan.case.hardware.memory / GIB:,.1f} GiB, planned: {candidate.words}"
        for candidate, plan in found.failed
    ]
    if found.too_large:
        smallest, count = found.too_large[0], len(found.too_large)
        have, needs = smallest.case.hardware.memory / GIB, smallest.rough.memory / GIB
        said = f"too large for {have:,.1f} GiB by the formula; the smallest takes {needs:,.1f}"
        lines.append(f"{count:,} {said}: {smallest.words}")
    if found.slower:
        first, took = found.slower[0], found.slower[0].rough.seconds
        times = f"{took:,.3g} s"
        if found.best:
            times = f"{took / found.best[0][0].rough.seconds:.2f} times the best one's time"
        said = "slower by the formula, not planned; the next takes"
        lines.append(f"{len(found.slower):,} {said} {times}: {first.words}")
    lines += [f"{count:,} impossible: {reason}" for reason, count in found.refused.items()]
    return [f"  {line}" for line in lines]


def numbers_of_plan(plan: Plan, helping: Sequence[Remedy] | None) -> dict[str, Any]:
    """A plan, and the changes with which it would fit, as JSON values: bytes and seconds."""
    base = seconds_per_token(plan)
    helps = [
        {"flags": x.flags, "total": x.plan.peak.total, "relative_cost": x.seconds_per_token / base}
        for x in helping or ()
    ]
    mfu = {stage.name: plan.mfu(stage.name) for stage in plan.stages} | {"step": plan.mfu()}
    more = {"peak_stage": plan.peak.name, "mfu": mfu, "remedies": None if helping is None else helps}
    return {"estimate": True, **plain(plan), **more}


def numbers_of_search(found: SearchResult) -> dict[str, Any]:
    """The result of a search as JSON values: bytes and seconds."""

    def rough(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
        return [{"mesh": c.case.mesh, "virtual_stages": c.case.virtual_stages, "rough": c.rough} for c in candidates]

    def planned(pairs: Sequence[tuple[Candidate, Plan]]) -> list[dict[str, Any]]:
        return [
            {**rough([c])[0], "needs": p.needs, **({"seconds": p.seconds, "mfu": p.mfu()} if p.fits else {})}
            for c, p in pairs
        ]

    return {
        "estimate": True,
        "meshes": found.count,
        "best": planned(found.best),
        "failed": planned(found.failed),
        "slower": rough(found.slower),
        "too_large": rough(found.too_large),
        "impossible": found.refused,
    }


def plain(value: Any) -> Any:
    """A value as JSON can hold it: a record as its fields and its numeric properties, a model's config as its type."""
    cls = type(value)
    if attrs.has(cls) or hasattr(value, "_fields"):
        names = [field.name for field in attrs.fields(cls)] if attrs.has(cls) else value._fields
        follow = {name: getattr(value, name) for name, x in vars(cls).items() if isinstance(x, property)}
        numbers = {name: x for name, x in follow.items() if isinstance(x, int | float)}
        return {name: plain(getattr(value, name)) for name in names} | numbers
    if isinstance(value, Mapping):
        return {str(name): plain(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, torch.dtype):
        return _name(value)
    return value.model_type if isinstance(value, PreTrainedConfig) else value
