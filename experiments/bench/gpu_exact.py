"""Exact rollouts on a GPU: whether rows keep their bits, whether the ratio is 1 in every step of the quickstart, and
what the exact kernels take beside the fast ones. A dry run has the exact kernels of a CPU."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
from gpu_model import build, experience, parameters, prompts
from gpu_step import kernels_of, runs
from gpu_tools import Plan, Record, attempt, check, table
from placed import settings_of

from fppo import laws, losses, metrics
from fppo.assembly.run import assemble
from fppo.key import Key
from fppo.pipeline.train import iterate
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from fppo_kernels.table import EXACT, Kernels

BATCH, STEPS = (512, 16), (20, 2)  # on a GPU, and in a dry run
DEARER = {"update": 2.0, "decode": 4.0}  # exact over fast


def exact_kernels(plan: Plan) -> Kernels:
    """The exact kernels of the plan's device."""
    names: dict[str, Any] = {**EXACT[plan.device.type]}
    return Kernels.named(**names)


def keeps_law(plan: Plan) -> Record:
    """The law of exact engines, on random prompts."""
    start, model = time.perf_counter(), build(plan.small, plan)
    engine = EmbeddedEngine(model=model, kernels=exact_kernels(plan), pad_token_id=0, exact=True)
    sizes = ((1, 3), (5, 90)) if plan.device.type == "cuda" else ((1, 3),)
    laws.check_exact(engine, parameters(model, plan.device), sizes=sizes, seeds=2)
    return {"held": 1.0, "took_s": time.perf_counter() - start}


def quickstart_run(plan: Plan, dtype: str, exact: bool) -> Record:
    """The quickstart's first steps: the least share of log-probs with equal bits, the farthest ratio, and a step's
    seconds."""
    dry = plan.device.type == "cpu"
    with TemporaryDirectory() as place:
        changes = {"rollout.exact": exact, "model.compute_dtype": dtype}
        found: list[dict[str, float]] = []
        with assemble(settings_of(Path(place), BATCH[dry], plan.device.type, changes)) as assembly:
            for run, _, report in iterate(assembly.run, program=assembly.program, draw=assembly.draw, donate=True):
                found.append(metrics.report(report))
                if run.step == STEPS[dry]:
                    break
    return {
        "a step, s": statistics.median(x["timing_s/step"] for x in found),
        "equal": min(x.get("training/rollout_equal", 0.0) for x in found),
        "ratio": max(abs(x.get("training/rollout_ratio_max", 1.0) - 1) for x in found),
    }


def work(plan: Plan, exact: bool) -> Record:
    """Milliseconds of an update of the plan's model, and of a decoded token for each row."""
    model, variant = build(plan.model, plan), plan.variants[0]
    fast = attrs.evolve(kernels_of(variant), decode_attention=Kernels.named().decode_attention)
    kernels = exact_kernels(plan) if exact else fast
    optimizer, cut = adamw(schedule("constant", 1e-5)), MicroBatching(size=variant.rows)
    loop = Loop(mini_batch_size=plan.rows[0], micro_batching=cut)
    params = parameters(model, plan.device)
    update = UpdateActor(forward=Forward(model, kernels), loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer)
    batches = [experience(plan, seed, plan.model.vocabulary) for seed in range(2 + plan.fresh)]
    state = init_state(params, optimizer)
    updates = runs([partial(update, state, batch) for batch in batches], plan.device)[2:]
    del state
    rows, longest, count = plan.decode
    engine = EmbeddedEngine(
        model=model, kernels=kernels, pad_token_id=0, max_rows=rows, exact=exact, graphs=False if exact else None
    )
    asked = [
        Ask(prompts(rows, longest, plan.model.vocabulary, n), Sampling(max_tokens=count), Key(n)) for n in range(4)
    ]
    decodes = runs([partial(engine.generate, params, ask) for ask in asked], plan.device)[1:]
    return {"update, ms": 1e3 * statistics.median(updates), "token, ms": 1e3 * statistics.median(decodes) / count}


def bench_exact(plan: Plan) -> list[Record]:
    """The law, the runs, and the costs."""
    dtypes = ("float32", "bfloat16") if plan.device.type == "cuda" else ("float32",)
    law = {"name": "exact: the law of its engine", **attempt(partial(keeps_law, plan))}
    ways = {f"{kind}, {dtype}": (dtype, kind == "exact") for dtype in dtypes for kind in ("fast", "exact")}
    made = [{"name": name, **attempt(partial(quickstart_run, plan, *how))} for name, how in ways.items()]
    print(table("quickstart", {"a step, s": ".3f", "equal": ".6f", "ratio": ".2g"}, made))
    costs = [{"name": name, **attempt(partial(work, plan, name == "exact"))} for name in ("fast", "exact")]
    print(table("the plan's model", {"update, ms": ".1f", "token, ms": ".2f"}, costs))
    verdicts: list[Record] = []
    for r in (law, *made, *costs):
        if "absent" in r:
            verdicts.append({"name": f"exact: {r['name']}", "error": r["absent"], "passed": False})
    verdicts += [check("exact: the law of its engine (1: held)", law["held"], 1.0, least=True)] if "held" in law else []
    for r in made:
        if r["name"].startswith("exact") and "equal" in r:
            verdicts.append(check(f"{r['name']}: log-probs with equal bits, of all", r["equal"], 1.0, least=True))
            verdicts.append(check(f"{r['name']}: the ratio's distance from 1", r["ratio"], 0.0))
    if all("absent" not in r for r in costs):
        for key, name in (("update, ms", "update"), ("token, ms", "decode")):
            verdicts.append(check(f"exact over fast: {name}", costs[1][key] / costs[0][key], DEARER[name]))
    return [law, *made, *costs, *verdicts]
