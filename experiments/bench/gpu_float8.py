"""Products of 8 bits on a GPU: whether they keep their law, what they take beside those of 16 bits, and how far the
gradient of a model on them is from one that is not rounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_kernels import operation
from gpu_model import build, experience, parameters
from gpu_step import kernels_of
from gpu_tools import Plan, Record, attempt, check, measure, table
from torch import Tensor

from fppo import laws, losses
from fppo.models.model import Params
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.train_state import init_state
from fppo_kernels import table as kernels

FASTER = 1.0  # of the time of 16 bits, forward and backward, of the largest product, compiled
GAP = 0.3  # between gradients, of their size


def held(plan: Plan) -> Record:
    """The law, and whether scales inside a product give the bits of scales after it."""
    from fppo_kernels.linear import float8
    from fppo_kernels.linear.float8_reference import reference

    start = time.perf_counter()
    dtypes = tuple({torch.float32, plan.dtype})
    laws.check_kernel(operation("linear", plan), float8.float8, dtypes=dtypes, device=plan.device, reference=reference)
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 128, generator=g).to(plan.device, torch.bfloat16) for _ in range(2))
    codes = float8.coded(a), float8.coded(b)
    inside, after = (fn(*codes, torch.bfloat16) for fn in (float8._scaled, float8._scaled_after))
    return {"took_s": time.perf_counter() - start, "apart": float((inside - after).abs().max() / after.abs().max())}


def products(plan: Plan) -> dict[str, tuple[int, int]]:
    """The linear layers of the plan's model by name: from so many numbers to so many."""
    width, head = plan.model.width, plan.model.width // plan.model.heads
    return {
        "q, o": (width, width),
        "k, v": (width, plan.model.key_heads * head),
        "gate, up": (width, plan.model.mlp),
        "down": (plan.model.mlp, width),
    }


def ways(plan: Plan) -> dict[str, Callable[..., Tensor]]:
    """The kernels to time. A compiler is asked on a GPU alone: on a CPU it takes longer than all the rest."""
    linear, float8 = (kernels.get("linear", name) for name in ("torch", "float8"))
    found = {"torch": linear, "float8": float8}
    return found | ({"float8, compiled": torch.compile(float8, dynamic=True)} if plan.device.type == "cuda" else {})


def timed(plan: Plan, fn: Callable[..., Tensor], sides: tuple[int, int]) -> Record:
    """A product of as many rows as the first of the log-probs', forward, and forward and backward."""
    rows, (width, out) = plan.log_probs[0][0], sides
    drawn = partial(torch.randn, dtype=plan.dtype, device=plan.device)
    x, weight, grad = drawn(rows, width), drawn(out, width).mul_(width**-0.5), drawn(rows, out)
    leaves = x.requires_grad_(), weight.requires_grad_()

    @torch.no_grad()
    def forward() -> Tensor:
        return fn(x, weight)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(fn(x, weight), leaves, grad)

    one, all_ = (measure(run, plan.device, repeats=4 * plan.repeats) for run in (forward, both))
    rate = 6 * rows * width * out / all_["seconds"] / 1e12
    return {"forward, ms": 1e3 * one["seconds"], "both, ms": 1e3 * all_["seconds"], "TFLOP/s": rate}


def gap(plan: Plan) -> Record:
    """Between the gradients of one update of the small model, by float8 and by torch: steps of size one are these."""
    model, batch = build(plan.small, plan), experience(plan, 0, plan.small.vocabulary)
    params, optimizer = parameters(model, plan.device), sgd(lambda step: 1.0, max_grad_norm=None)
    cut = MicroBatching(size=plan.variants[0].rows)

    def gradient(linear: str) -> Params:
        forward = Forward(model, kernels=kernels_of(plan.variants[0]._replace(linear=linear)))
        arguments: dict[str, Any] = {"loss_fn": losses.gpg, "optimizer": optimizer}
        loop = Loop(mini_batch_size=plan.rows[0], micro_batching=cut)
        after = UpdateActor(forward=forward, loop=loop, **arguments)(init_state(params, optimizer), batch)[0].params
        return {name: params[name] - x for name, x in after.items()}

    plain, rounded = gradient("torch"), gradient("float8")
    squares = [((rounded[n] - x).square().sum(), x.square().sum()) for n, x in plain.items()]
    return {"gap": float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)}


def bench_float8(plan: Plan) -> list[Record]:
    """The law; the products of the plan's model by each way; the gap."""
    own = {"name": "float8: its law", **attempt(partial(held, plan))}
    records: list[Record] = [own]
    if "absent" in own:
        return [{"name": own["name"], "error": own["absent"], "passed": False}]
    for layer, sides in products(plan).items():
        new = [{"name": f"{layer}: {n}", **attempt(partial(timed, plan, fn, sides))} for n, fn in ways(plan).items()]
        columns = {"forward, ms": ".3f", "both, ms": ".3f", "TFLOP/s": ".4g"}
        print(table(f"{layer} {list(sides)}, {plan.log_probs[0][0]} rows", columns, new), flush=True)
        records += new
    verdicts = [check("float8: scales inside a product, of those after it", own["apart"], 1e-2)]
    times = {r["name"]: r["both, ms"] for r in records if "both, ms" in r}
    for name in ("gate, up: float8, compiled", "down: float8, compiled"):
        if name in times:
            ratio = times[name] / times[name.partition(":")[0] + ": torch"]
            verdicts.append(check(f"{name}, by 16 bits", ratio, FASTER))
    apart = {"name": "float8: gap of gradients", **attempt(partial(gap, plan))}
    if "absent" in apart:
        verdicts.append({"name": apart["name"], "error": apart["absent"], "passed": False})
    else:
        verdicts.append(check(apart["name"], apart["gap"], GAP))
    return [*records, apart, *verdicts]
