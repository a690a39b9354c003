"""The kernels on a GPU, checked and timed: log-probs, attention, GAE, AdamW, and the laws of all of them.

Every implementation in the kernel table that runs here is measured; peers (Liger, verl) where they are installed. The
matrix products of the log-probs are measured by torch.mm at the same shapes in the same run: "of matmul" is the time
of those that the work cannot do without (one forward, four in both directions) over the time taken.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import attrs
import torch
from gpu_tools import Plan, Record, attempt, check, measure, table
from torch import Tensor

from fppo import laws
from fppo_kernels import table as kernels
from fppo_kernels.operation import Operation, operation_of
from fppo_kernels.padding import make_lengths


def loadable(op: str) -> dict[str, str | None]:
    """The implementations of an operation and why they cannot run; none for an operation that is not there."""
    return kernels.available(op) if op in kernels.BUILTIN else {}


def operation(op: str, plan: Plan) -> Operation:
    """The record of an operation; in a dry run, which tries the script out, of the smallest size."""
    record = operation_of(op)
    return attrs.evolve(record, sizes=record.sizes[:1]) if plan.device.type == "cpu" else record


def check_laws(plan: Plan) -> list[Record]:
    """Whether the kernels keep their laws on this device; the Triton one compiles for a minute or two."""
    checks: list[tuple[str, str, dict[str, Any]]] = []
    for name in ("triton", "chunked"):
        for dtype, width in ((torch.float32, 2), (plan.dtype, 64)):  # 64: rows that tensor descriptors can read
            checks.append(("log_probs", name, {"dtypes": (dtype,), "wide": width}))
    for name in sorted(loadable("attention").keys() - {"flex"}):  # which compiles for every shape of the laws: minutes
        lacks = kernels.BUILTIN["attention"][name].lacks
        settings = {"dtypes": (plan.dtype,), "wide": plan.attention[-1], "lacks": lacks}
        checks.append(("attention", name, settings))
    others = [op for op, name in kernels.EXACT["cuda"].items() if name == "fixed" and op != "attention"]
    checks += [(op, "fixed", {"dtypes": tuple({plan.dtype, torch.float32})}) for op in others]
    checks += [("adamw", name, {"dtypes": (torch.float32,)}) for name in loadable("adamw")]
    layers = [op for op in kernels.INSIDE if "triton" in kernels.BUILTIN[op]]
    checks += [(op, "triton", {"dtypes": (x,)}) for op in layers for x in (torch.float32, plan.dtype)]
    records = []
    for op, name, settings in checks:

        def one(op: str = op, name: str = name, settings: Any = settings) -> Record:
            start = time.perf_counter()
            laws.check_kernel(operation(op, plan), kernels.get(op, name), device=plan.device, **settings)
            return {"held": "yes", "took_s": time.perf_counter() - start}

        label = " ".join([op, name, *(str(x) for x in settings.get("dtypes", ()))])
        result = attempt(one)
        records.append({"name": label, **result})
        if loadable(op)[name] is None:  # it is to run here
            records.append(check(f"{label} keeps its law (1: yes)", float("held" in result), 1.0, least=True))
        print(f"  {label}: {result.get('held') or result['absent']}", flush=True)
    return records


class Case(NamedTuple):
    """Inputs of log-probs, and gradients by the outputs."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    grads: tuple[Tensor, Tensor]


def make_case(plan: Plan, n: int, h: int, v: int) -> Case:
    """Logits of standard deviation 2."""
    g = torch.Generator(plan.device).manual_seed(0)
    drawn = {"generator": g, "device": plan.device}
    hidden = torch.randn(n, h, dtype=plan.dtype, **drawn).requires_grad_()
    weight = torch.randn(v, h, dtype=plan.dtype, **drawn).mul_(2 / math.sqrt(h)).requires_grad_()
    labels = torch.randint(v, (n,), **drawn)
    return Case(hidden, weight, labels, (torch.randn(n, **drawn), torch.randn(n, **drawn)))


@torch.no_grad()
def matmuls(case: Case, plan: Plan) -> tuple[float, float]:
    """Seconds of one product, and of the four."""
    hidden, weight = case.hidden.detach(), case.weight.detach()

    def once() -> Tensor:
        return hidden @ weight.T

    logits = once()

    def gradients() -> tuple[Tensor, Tensor]:
        return logits @ weight, logits.T @ hidden

    one = measure(once, plan.device, repeats=plan.repeats)["seconds"]
    return one, 2 * one + measure(gradients, plan.device, repeats=plan.repeats)["seconds"]


def liger() -> Callable[..., tuple[Tensor, ...]]:
    """The sum of the log-probs: Liger's fused loss has no value per token with a gradient."""
    fused = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda hidden, weight, labels: (fused(hidden, weight, labels, reduction="sum"),)


def verl() -> Callable[..., tuple[Tensor, ...]]:
    """Log-probs and entropy by verl's Triton kernels."""
    fused = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, labels: fused(hidden, weight, labels, 1.0, "none")


def ours(name: str, **settings: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Log-probs and, unless it lacks that, entropy by an implementation of the table."""
    entropy = "entropy" not in kernels.BUILTIN["log_probs"][name].lacks
    fn = functools.partial(kernels.get("log_probs", name), entropy=entropy, **settings)
    return lambda hidden, weight, labels: tuple(x for x in fn(hidden, weight, labels) if x is not None)


def time_log_probs(
    name: str, load: Callable[[], Callable[..., tuple[Tensor, ...]]], case: Case, plan: Plan, best: tuple[float, float]
) -> Record:
    """Forward, and forward and backward."""

    def both() -> Record:
        fn = load()

        @torch.no_grad()
        def forward() -> Any:
            return fn(case.hidden, case.weight, case.labels)

        def backward() -> Any:
            out = fn(case.hidden, case.weight, case.labels)
            grads = [d.to(x.dtype) if x.ndim else torch.ones_like(x) for d, x in zip(case.grads, out, strict=False)]
            return torch.autograd.grad(out, (case.hidden, case.weight), grads)

        one = measure(forward, plan.device, repeats=plan.repeats)
        all_ = measure(backward, plan.device, repeats=plan.repeats)
        return {
            "forward, ms": 1e3 * one["seconds"],
            "of matmul": best[0] / one["seconds"],
            "peak, MiB": one["peak_mib"],
            "both, ms": 1e3 * all_["seconds"],
            "both of matmul": best[1] / all_["seconds"],
            "both peak, MiB": all_["peak_mib"],
        }

    return {"name": name, **attempt(both)}


def tilings() -> dict[str, dict[str, Any]]:
    """Other ways to cut the work of the Triton log-probs, by name."""
    module = import_module("fppo_kernels.log_probs.triton")
    base = module.Tiling(128, 256, 64, warps=8, stages=4, descriptors=True)
    changes = {
        "pointers": {"descriptors": False, "stages": 3},
        "128x128, 4 warps, 2 at once": {"vocab": 128, "warps": 4, "stages": 3},
        "256x128": {"tokens": 256, "vocab": 128},
        "3 stages": {"stages": 3},
        "groups of 8": {"group": 8},
        "groups of 32": {"group": 32},
        "4 tiles": {"tiles": 4},
        "16 tiles": {"tiles": 16},
        "slabs of 256 MiB": {"slab": 256 << 20},
    }
    return {f"triton, {name}": {"tiling": base._replace(**change)} for name, change in changes.items()}


def bench_log_probs(plan: Plan, tune: bool) -> list[Record]:
    columns = {
        "forward, ms": ".2f", "of matmul": ".1%", "peak, MiB": ".0f",
        "both, ms": ".2f", "both of matmul": ".1%", "both peak, MiB": ".0f",
    }  # fmt: skip
    records: list[Record] = []
    loaders: dict[str, Callable[[], Callable[..., tuple[Tensor, ...]]]] = {}
    compiles = plan.device.type != "cpu"  # there a compiler takes longer than all the rest
    for name in loadable("log_probs"):
        if compiles or name != "compiled":
            loaders[f"fppo {name}"] = functools.partial(ours, name)
    loaders |= {"liger": liger, "verl": verl}
    if tune:
        loaders |= {name: functools.partial(ours, "triton", **settings) for name, settings in tilings().items()}
    for n, h, v in plan.log_probs:
        case = make_case(plan, n, h, v)
        best = matmuls(case, plan)
        rate = 2 * n * h * v / best[0] / 1e12, 8 * n * h * v / best[1] / 1e12
        new = [time_log_probs(name, load, case, plan, best) for name, load in loaders.items()]
        title = f"log-probs and entropy, N={n} H={h} V={v}: matmul {rate[0]:.4g} TFLOP/s, the four {rate[1]:.4g}"
        print(table(title, columns, new), flush=True)
        records += [{"shape": [n, h, v], "matmul_tflops": rate[0], "matmuls_tflops": rate[1], **r} for r in new]
        for r in new:
            if r["name"] == "fppo triton" and "of matmul" in r:
                records.append(check(f"log-probs, N={n} H={h}, of matmul", r["of matmul"], 0.4, least=True))
        del case
    return records


def bench_attention(plan: Plan) -> list[Record]:
    """Packed rows of lengths from an eighth of the longest to all of it, forward and backward."""
    rows, longest, heads, key_heads, size = plan.attention
    sizes = [max(1, longest * (1 + i % 8) // 8) for i in range(rows)]
    lengths, count = make_lengths(sizes, plan.device), sum(sizes)
    shapes = ((count, heads, size), (count, key_heads, size), (count, key_heads, size))
    q, k, v = (torch.randn(s, dtype=plan.dtype, device=plan.device, requires_grad=True) for s in shapes)
    flops = sum(2 * length * length * heads * size for length in sizes)  # half of the square, two products

    def one(name: str) -> Record:
        attention = functools.partial(kernels.get("attention", name), lengths=lengths, scale=size**-0.5)
        grad = torch.randn(shapes[0], dtype=plan.dtype, device=plan.device)

        @torch.no_grad()
        def forward() -> Tensor:
            return attention(q, k, v)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attention(q, k, v), (q, k, v), grad)

        a = measure(forward, plan.device, repeats=plan.repeats, seconds=2.0)
        b = measure(backward, plan.device, repeats=plan.repeats, seconds=2.0)
        return {
            "forward, ms": 1e3 * a["seconds"],
            "both, ms": 1e3 * b["seconds"],
            "TFLOP/s": flops / a["seconds"] / 1e12,
            "both TFLOP/s": 3.5 * flops / b["seconds"] / 1e12,  # five products backward
            "both peak, MiB": b["peak_mib"],
        }

    records = [{"name": name, **attempt(functools.partial(one, name))} for name in loadable("attention")]
    columns = {"forward, ms": ".2f", "both, ms": ".2f", "TFLOP/s": ".4g", "both TFLOP/s": ".4g"}
    print(table(f"attention, {rows} rows, {count} tokens, {heads}/{key_heads} heads of {size}", columns, records))
    return records


def bench_gae(plan: Plan) -> list[Record]:
    """Ragged rows in float32."""
    rows, length = plan.gae
    g = torch.Generator(plan.device).manual_seed(0)
    rewards, values = torch.randn(2, rows, length, generator=g, device=plan.device).unbind()
    ends = torch.randint(1, length + 1, (rows, 1), generator=g, device=plan.device)
    mask = torch.arange(length, device=plan.device) < ends

    def one(name: str) -> Record:
        fn = functools.partial(kernels.get("gae", name), rewards, values, mask, gamma=1.0, lam=0.95)
        results = measure(fn, plan.device, repeats=plan.repeats)
        return {"ms": 1e3 * results["seconds"], "peak, MiB": results["peak_mib"]}

    records = [{"name": name, **attempt(functools.partial(one, name))} for name in loadable("gae")]
    slow = next((r["ms"] for r in records if r["name"] == "loop" and "ms" in r), None)
    records = [r | ({"times the loop": slow / r["ms"]} if slow and "ms" in r else {}) for r in records]
    print(table(f"GAE [{rows}, {length}]", {"ms": ".3f", "peak, MiB": ".0f", "times the loop": ".1f"}, records))
    scan = [r["times the loop"] for r in records if r["name"] == "scan" and "times the loop" in r]
    return records + [check("GAE: times faster than the loop", x, 3, least=True) for x in scan]


def _leaves(plan: Plan) -> list[Tensor]:
    """Float32 parameters of a few large and many small leaves."""
    sizes = [plan.parameters // 4] + [plan.parameters // 160] * 120
    return [torch.randn(n, device=plan.device) for n in sizes]


def bench_adamw(plan: Plan) -> list[Record]:
    """One step; peak memory is beyond parameters, gradients and moments."""

    def torchs() -> Record:
        leaves = [x.requires_grad_() for x in _leaves(plan)]
        for x in leaves:
            x.grad = torch.full_like(x, 1e-3)
        step = torch.optim.AdamW(leaves, lr=1e-4, fused=True).step
        return measure(step, plan.device, repeats=4 * plan.repeats)

    def ours(name: str) -> Record:
        params = _leaves(plan)
        grads, first, second = ([torch.full_like(x, a) for x in params] for a in (1e-3, 0.0, 0.0))
        steps = [torch.zeros((), device=plan.device) for _ in params]
        fn = functools.partial(kernels.get("adamw", name), params, grads, first, second, steps, lr=1e-4)
        return measure(fn, plan.device, repeats=4 * plan.repeats)

    records = [{"name": f"fppo {name}", **attempt(functools.partial(ours, name))} for name in loadable("adamw")]
    records.insert(0, {"name": "torch.optim fused", **attempt(torchs)})
    base = records[0].get("seconds")
    for r in records:
        if "seconds" in r:
            r |= {"ms": 1e3 * r["seconds"], "of torch": r["seconds"] / base if base else None}
    columns = {"ms": ".3f", "of torch": ".3f", "peak_mib": ".0f"}
    print(table(f"AdamW, {plan.parameters / 1e6:.3g} M parameters", columns, records))
    ours_ = [r["of torch"] for r in records if r["name"] == "fppo torch" and r.get("of torch")]
    return records + [check("AdamW: its time over torch.optim's", x, 1.2) for x in ours_]
