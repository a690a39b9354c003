"""A step on a GPU: updates and their share of the peak, shapes that never repeat, decoding, and state on the host."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from gpu_model import build, experience, parameters, prompts
from gpu_tools import Plan, Record, Variant, attempt, check, count_syncs, once, table
from torch import Tensor

from fppo import losses, models, tree
from fppo.key import Key
from fppo.models import flops
from fppo.models.model import Model
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.runtime import checkpoint, offload
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.offload import Lane
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs, row_lengths
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.recorded import graphs
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo_kernels import table as kernels
from fppo_kernels.adamw import adamw_
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels

# what a run may cost, of its own time: a shape that never came before, and a batch that did not
NEW_SHAPE, NEW_BATCH = 1.5, 1.2
SYNCS = 2  # of host and device, for each micro-batch: those of a whole update, for its micro-batches have none
MFU = 0.33
EAGER_MS, GRAPHS_MS = 60, 12  # of a decoded token for each row


def runs(fns: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Seconds of each, once."""
    return [once(fn, device) for fn in fns]


def bench_ragged(plan: Plan) -> list[Record]:
    """Attention over packed rows whose lengths never came before, beside the same rows again: what plans every shape
    anew shows here alone."""
    rows, longest, heads, key_heads, size = plan.attention
    g = torch.Generator().manual_seed(0)
    sizes = [
        torch.randint(max(longest // 2, 1), longest + 1, (rows,), generator=g).tolist() for _ in range(plan.fresh + 2)
    ]

    def attend(attention: Any, lengths: list[int]) -> None:
        count = sum(lengths)
        shapes = ((count, heads, size), (count, key_heads, size), (count, key_heads, size))
        q, k, v = (torch.randn(s, dtype=plan.dtype, device=plan.device, requires_grad=True) for s in shapes)
        out = attention(q, k, v, lengths=make_lengths(lengths, plan.device), scale=size**-0.5)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    def one(name: str) -> Record:
        attention = kernels.get("attention", name)
        runs([partial(attend, attention, x) for x in sizes[:2]], plan.device)  # compiles
        fresh = runs([partial(attend, attention, x) for x in sizes[2:]], plan.device)
        again = runs([partial(attend, attention, x) for x in sizes[2:]], plan.device)
        return {"fresh, ms": 1e3 * sum(fresh), "again, ms": 1e3 * sum(again), "ratio": sum(fresh) / sum(again)}

    names = kernels.available("attention").keys() - {"flex"}  # which may compile for every shape: minutes
    records = [{"name": name, **attempt(partial(one, name))} for name in sorted(names)]
    print(
        table(f"attention, {plan.fresh} new shapes", {"fresh, ms": ".2f", "again, ms": ".2f", "ratio": ".2f"}, records)
    )
    used = {variant.attention for variant in plan.variants}
    return records + [
        check(f"{r['name']}: a new shape over one that repeats", r["ratio"], NEW_SHAPE)
        for r in records
        if "ratio" in r and r["name"] in used
    ]


def kernels_of(variant: Variant) -> Kernels:
    """The kernels of a variant."""
    layers = "triton" if variant.layers == "triton" else "eager"
    return Kernels.named(
        attention=variant.attention,
        log_probs=variant.log_probs,
        linear=variant.linear,
        rms_norm=layers,
        add_rms_norm=layers,
        rotary=layers,
        glu=layers,
    )


def updates(
    plan: Plan, model: Model, mesh: Mesh = LOCAL, variant: Variant | None = None
) -> tuple[Callable[[Any, Any], Any], Any]:
    """An update of AdamW, which gives up its state, and the first state, of what this rank of the mesh has of the
    model."""
    variant, own = variant or plan.variants[0], models.place(model, mesh)
    optimizer = adamw(schedule("constant", 1e-5))
    record = graphs(model, plan.device) if variant.recorded else None
    update = UpdateActor(
        forward=Forward(own, kernels=kernels_of(variant), mesh=mesh),
        record=record,
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=plan.rows[0], micro_batching=MicroBatching(size=variant.rows)),
        optimizer=optimizer,
    )
    params = models.own_params(own, parameters(model, plan.device), mesh)
    return lambda state, batch: update(state, batch, donate=True)[0], init_state(params, optimizer)


def needed(model: Model, batch: Any) -> float:
    """Floating-point operations of an update."""
    return flops.train_flops(model, row_lengths(batch), head_tokens=int(batch.response_mask.sum()))


def time_updates(plan: Plan, variant: Variant) -> Record:
    """Updates of ragged batches that never came before, and of the last of them again."""
    model = build(plan.model, plan, recompute=variant.again)
    model = attrs.evolve(model, compile_layers=variant.layers == "compiled")
    update, first = updates(plan, model, variant=variant)
    held = [first]
    del first
    batches = [experience(plan, seed, plan.model.vocabulary) for seed in range(2 + plan.fresh)]

    def step(batch: Any) -> None:
        held[0] = update(held[0], batch)

    runs([partial(step, batch) for batch in batches[:2]], plan.device)
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)
    fresh = runs([partial(step, batch) for batch in batches[2:]], plan.device)
    again = runs([partial(step, batches[-1])] * plan.fresh, plan.device)
    done = [needed(model, batch) for batch in batches[2:]]
    share = flops.mfu(sum(done), sum(fresh), plan.device)
    tokens = sum(int(batch.attention_mask.sum()) for batch in batches[2:])
    return {
        "ms": 1e3 * statistics.median(fresh),
        "tokens/s": tokens / sum(fresh),
        "TFLOP/s": sum(done) / sum(fresh) / 1e12,
        "MFU": share,
        "new over again": (sum(fresh) / sum(done)) / (sum(again) / (len(again) * done[-1])),
        "syncs": count_syncs(partial(step, batches[-1]), plan.device) / (plan.rows[0] / variant.rows),
        "peak, GiB": torch.cuda.max_memory_allocated(plan.device) / 2**30 if plan.device.type == "cuda" else None,
    }


def bench_update(plan: Plan) -> list[Record]:
    """Whole updates of the actor, by ways to run its layers."""
    records: list[Record] = []
    for variant in plan.variants:
        records.append({"name": variant.name, **attempt(partial(time_updates, plan, variant))})
    columns = {"ms": ".1f", "tokens/s": ".0f", "TFLOP/s": ".4g", "MFU": ".1%", "new over again": ".2f"}
    columns |= {"syncs": ".1f", "peak, GiB": ".1f"}
    size = sum(shape.numel() for shape in build(plan.model, plan).shapes.values())
    print(table(f"update_actor, {size / 1e9:.3g} B parameters, {plan.rows} rows", columns, records))
    known = [r for r in records if r.get("MFU") is not None]
    verdicts = [check("MFU of the best", max(r["MFU"] for r in known), MFU, least=True)] if known else []
    for r in records:
        if "absent" in r:
            verdicts.append({"name": f"update: {r['name']}", "error": r["absent"], "passed": False})
            continue
        verdicts.append(check(f"{r['name']}: a new batch over one that repeats", r["new over again"], NEW_BATCH))
        verdicts.append(check(f"{r['name']}: syncs in a micro-batch", r["syncs"], SYNCS))
    return records + verdicts


def time_decode(plan: Plan, layers: str, graphs: bool) -> Record:
    """The embedded engine: prompts that never came before, and the last ones again; its log-probs and the trainer's."""
    rows, longest, count = plan.decode
    model, variant = build(plan.model, plan), plan.variants[0]._replace(layers=layers)
    params = parameters(model, plan.device)
    engine = EmbeddedEngine(model=model, kernels=kernels_of(variant), pad_token_id=0, max_rows=rows, graphs=graphs)
    sampling = Sampling(max_tokens=count)
    got: list[Any] = []

    def generate(seed: int) -> None:
        asked = prompts(rows, longest, plan.model.vocabulary, seed)
        got[:] = [engine.generate(params, Ask(asked, sampling, Key(seed), version=0))]

    runs([partial(generate, 0)], plan.device)
    fresh = runs([partial(generate, 1 + seed) for seed in range(plan.fresh)], plan.device)
    again = runs([partial(generate, plan.fresh)] * plan.fresh, plan.device)
    rollout = got[0]
    forward, cut = Forward(model, kernels=kernels_of(variant)), MicroBatching(size=variant.rows)
    own = compute_log_probs(params, rollout, forward=forward, micro_batching=cut)
    gap = (own - rollout.rollout_log_probs)[rollout.response_mask]
    return {
        "tokens/s": rows * count * len(fresh) / sum(fresh),
        "ms per token": 1e3 * sum(fresh) / len(fresh) / count,
        "new over again": sum(fresh) / sum(again),
        "k3": float((gap.exp() - 1 - gap).mean()),
    }


def bench_decode(plan: Plan) -> list[Record]:
    """The embedded engine, as it is and by CUDA graphs."""
    rows, longest, count = plan.decode
    ways = [("eager", False), ("eager", True), *([("triton", True)] if plan.device.type == "cuda" else [])]
    records = [
        {
            "name": f"layers {layers}{', graphs' if graphs else ''}",
            **attempt(partial(time_decode, plan, layers, graphs)),
        }
        for layers, graphs in ways
    ]
    columns = {"tokens/s": ".0f", "ms per token": ".2f", "new over again": ".2f", "k3": ".2g"}
    print(table(f"decode, {rows} rows, prompts to {longest}, {count} tokens", columns, records))
    verdicts: list[Record] = []
    for r in records:
        name = f"decode, {r['name']}"
        if "absent" in r:
            verdicts.append({"name": name, "error": r["absent"], "passed": False})
            continue
        verdicts.append(check(f"{name}: a new batch over one that repeats", r["new over again"], NEW_BATCH))
        verdicts.append(check(f"{name}: ms per token", r["ms per token"], GRAPHS_MS if "graphs" in name else EAGER_MS))
        verdicts.append(check(f"{name}: k3 to the trainer's log-probs", r["k3"], 0.05))
    return records + verdicts


def offloaded_update(plan: Plan, how: str) -> tuple[Any, Callable[[Any, Any], Any]]:
    """A state as `model.offload` = `how` has it, and its update; "all" has the activations on the host too."""
    model, lane = build(plan.small, plan), Lane(plan.device)
    kernel = adamw_ if how == "none" else offload.offloaded_adamw(adamw_, lane)
    optimizer = adamw(schedule("constant", 1e-4), kernel=kernel)
    variant = plan.variants[0]
    update: Callable[..., Any] = UpdateActor(
        forward=Forward(model, kernels=kernels_of(variant)),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=plan.rows[0], micro_batching=MicroBatching(size=variant.rows)),
        optimizer=optimizer,
    )
    state = init_state(parameters(model, plan.device), optimizer)
    if how == "moments":
        state = tree.replace(state, opt=offload.to_host(state.opt))
    if how == "all":
        update = offload.Offloaded(offload.HostActivations(update, lane), lane)
        state = offload.to_host(state)
    return state, lambda state, batch: update(state, batch, donate=True)[0]


def bench_offload(plan: Plan) -> list[Record]:
    """Updates with state on the host: their results, time and memory beside those without, and what is pinned."""
    batch = experience(plan, 0, plan.small.vocabulary)
    cuda = plan.device.type == "cuda"
    ends: dict[str, dict[str, Tensor]] = {}
    records = []
    for how in ("none", "moments", "all"):
        held: list[Any] = [None]
        held[0], update = offloaded_update(plan, how)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(plan.device)

        def step(update: Any = update, held: list[Any] = held) -> None:
            held[0] = update(held[0], batch)

        seconds = runs([step] * 3, plan.device)[1:]
        peak = torch.cuda.max_memory_allocated(plan.device) / 2**20 if cuda else 0.0
        ends[how] = {name: x.cpu() for name, x in held[0].params.items()}
        away = [x for x in tree.tensors(held[0]) if x.device.type == "cpu" and x.dim()]
        pinned = all(x.is_pinned() for x in away) if cuda else True
        records.append({"name": how, "ms": 1e3 * min(seconds), "peak, MiB": peak, "pinned": float(pinned)})
        if how == "all":
            records.append({"name": "a checkpoint of it", **saved(held[0], plan)})
        held.clear()
    print(table("offload", {"ms": ".1f", "peak, MiB": ".0f", "pinned": ".0f"}, records))
    plain, moments, everything, stored = records
    start = {name: x.cpu() for name, x in parameters(build(plan.small, plan), plan.device).items()}
    verdicts = [
        check(
            f"offload = {r['name']}: what differs, of what changed",
            differing(start, ends["none"], ends[r["name"]]),
            0.02,
        )
        for r in (moments, everything)
    ]
    return [
        *records,
        *verdicts,
        check("offload = all: its memory over that without", everything["peak, MiB"] / max(plain["peak, MiB"], 1), 0.9),
        check("offload: what is on the host is pinned (1: yes)", min(r["pinned"] for r in records), 1, least=True),
        check("checkpoint: MiB that it pins", stored["more pinned, MiB"], 128),
    ]


def differing(start: dict[str, Tensor], a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """How much two ends of a start differ, of how much one of them does from it. Kernels may add up in any order."""
    gap, change = (sum(float((x[n] - y[n]).abs().sum()) for n in start) for x, y in ((a, b), (b, start)))
    return gap / change


def saved(state: Any, plan: Plan) -> Record:
    """What a checkpoint of a state pins while it is written, and whether it comes back as it was."""
    with tempfile.TemporaryDirectory() as directory:
        on_device = tree.map(lambda x: x.to(plan.device, copy=True), state)
        before = pinned_bytes(plan)
        seconds = once(lambda: checkpoint.begin_save(on_device, Path(directory), 1).wait(), plan.device)
        more = pinned_bytes(plan) - before
        again = checkpoint.load(state, Path(directory), 1)
        equal = all(torch.equal(x, y) for x, y in zip(tree.tensors(again), tree.tensors(state), strict=True))
        if not equal:
            raise ValueError("a checkpoint does not give back what was saved")
        alike = all(
            x.is_pinned() == y.is_pinned() for x, y in zip(tree.tensors(again), tree.tensors(state), strict=True)
        )
        return {"ms": 1e3 * seconds, "more pinned, MiB": more / 2**20, "pinned": float(alike)}


def pinned_bytes(plan: Plan) -> int:
    """What torch holds of pinned memory."""
    return torch.cuda.host_memory_stats()["allocated_bytes.current"] if plan.device.type == "cuda" else 0
