"""Where the time of an update on a GPU goes: its kernels by what they compute, beside the peak's time for its
floating-point operations."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from gpu_model import build, experience
from gpu_step import needed, updates
from gpu_tools import Plan, Record, Shape, Variant, attempt, check, once, table

from fppo.models import flops

MFU = 0.33
ROWS = 12  # of the table of single kernels
# what a kernel computes, by the first of these that its name holds
KINDS = {
    "flash": "attention",
    "fmha": "attention",
    "log_probs_": "log-probs",
    "rms_norm_": "norms",
    "rotary_": "rotary",
    "glu_": "glu",
    "nvjet": "products",
    "gemm": "products",
    "cutlass": "products",
    "adam": "optimizer",
    "multi_tensor": "lists of tensors",
    "memcpy": "copies",
    "memset": "copies",
    "copy": "copies",
    "index": "indices",
    "gather": "indices",
    "scatter": "indices",
    "embedding": "indices",
    "reduce": "reductions",
    "elementwise": "elementwise",
}


def kind_of(kernel: str) -> str:
    """What a kernel computes, by its name."""
    name = kernel.lower()
    return next((kind for part, kind in KINDS.items() if part in name), "others")


def traced(plan: Plan, shape: Shape, variant: Variant, again: Any) -> Record:
    """Milliseconds of the kernels of one update by kind, of the dearest kernels, and what is no kernel's."""
    model = build(shape, plan, recompute=again)
    update, state = updates(plan, model, variant=variant)
    batch, held = experience(plan, 0, shape.vocabulary), [state]
    del state

    def step() -> None:
        held[0] = update(held[0], batch)

    for _ in range(2):
        step()
    seconds = min(once(step, plan.device) for _ in range(3))
    gpu = plan.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        step()
        if gpu:
            torch.cuda.synchronize(plan.device)
    own = [x for x in profile.events() or () if x.device_type.name == ("CUDA" if gpu else "CPU")]
    kernels, kinds = defaultdict[str, float](float), defaultdict[str, float](float)
    for event in own:
        ms = (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3
        kernels[event.name] += ms
        kinds[kind_of(event.name)] += ms
    done = needed(model, batch)
    kinds["none"] = 1e3 * seconds - sum(kinds.values())
    return {
        "ms": 1e3 * seconds,
        "TFLOP": done / 1e12,
        "MFU": flops.mfu(done, seconds, plan.device),
        "kinds": most(kinds),
        "kernels": dict(itertools.islice(most(kernels).items(), 3 * ROWS)),
        "gaps": gaps(own),
    }


def most(times: Mapping[str, float]) -> dict[str, float]:
    """Times by name, the longest first."""
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def gaps(events: Sequence[Any]) -> list[tuple[float, str, str]]:
    """The longest times in which no kernel ran: milliseconds, the kernel before and the one after."""
    found: list[tuple[float, str, str]] = []
    ordered = sorted(events, key=lambda x: x.time_range.start)
    for before, after in itertools.pairwise(ordered):
        found.append(((after.time_range.start - before.time_range.end) / 1e3, before.name, after.name))
    return sorted(found, reverse=True)[:ROWS]


def bench_trace(plan: Plan) -> list[Record]:
    """Updates of the plan's model and of a few wide layers, with layers kept and recomputed."""
    best, verdicts, records = plan.variants[0], [], []
    cases = [
        ("model, layers kept", plan.model, False),
        ("model, layers recomputed but for attention", plan.model, "selective"),
        ("wide layers, kept", plan.wide, False),
        ("wide layers, recomputed but for attention", plan.wide, "selective"),
    ]
    for name, shape, again in cases:
        record: Record = {"name": name, **attempt(partial(traced, plan, shape, best, again))}
        records.append(record)
        if "absent" in record:
            verdicts.append({"name": f"trace: {name}", "error": record["absent"], "passed": False})
            continue
        print(table(f"trace of an update, {name}", {"ms": ".1f", "TFLOP": ".1f", "MFU": ".1%"}, [record]))
        for kind, ms in record["kinds"].items():
            print(f"  {kind:<14}{ms:>9.1f} ms {ms / record['ms']:>7.1%}")
        for kernel, ms in list(record["kernels"].items())[:ROWS]:
            print(f"    {ms:>8.2f} ms  {kernel[:90]}")
        for ms, before, after in record["gaps"]:
            print(f"    {ms:>8.2f} ms  nothing between {before[:60]} and {after[:60]}")
        if record["MFU"] is not None:
            verdicts.append(check(f"trace: MFU, {name}", record["MFU"], MFU, least=True))
    return records + verdicts
