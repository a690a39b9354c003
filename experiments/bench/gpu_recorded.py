"""Passes of few tokens on a GPU, launched operation by operation and recorded as CUDA graphs: times, and how far the
gradients are from each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_model import build, experience, parameters
from gpu_step import kernels_of, runs
from gpu_tools import Plan, Record, attempt, check, table

from fppo import losses
from fppo.models.model import Params
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.recorded import Recorder, graphs
from fppo.steps.train_state import init_state

ROWS, PASSES = (64, 64, 256), 4  # of a batch, longest prompt, longest response; passes of a batch
TIMES_NOISE = 4.0  # a gap of gradients, by that of the same passes done twice


def compared(plan: Plan) -> list[Record]:
    """Log-probs and an update whose new parameters are the old ones less the gradient, both ways."""
    gpu = plan.device.type == "cuda"
    shape = plan.small._replace(layers=6 * plan.small.layers)
    plan = plan._replace(rows=ROWS) if gpu else plan
    model, kernels = build(shape, plan), kernels_of(plan.variants[0])
    params, micro = parameters(model, plan.device), MicroBatching(size=plan.rows[0] // PASSES)
    forward, ways = Forward(model, kernels=kernels), dict[str, Recorder | None](launched=None)
    if gpu:
        ways["recorded"] = graphs(model, plan.device)
    batches = [experience(plan, seed, shape.vocabulary) for seed in range(3 + plan.fresh)]
    optimizer = sgd(lambda step: 1.0, max_grad_norm=None)
    loop = Loop(mini_batch_size=plan.rows[0], micro_batching=micro)

    def log_probs(record: Recorder | None, batch: Any) -> None:
        compute_log_probs(params, batch, forward=forward, micro_batching=micro, record=record)

    def updated(record: Recorder | None, batch: Any) -> Params:
        arguments = {"loss_fn": losses.ppo_clip, "loop": loop, "optimizer": optimizer, "record": record}
        return UpdateActor(forward=forward, **arguments)(init_state(params, optimizer), batch)[0].params

    def ms(work: Callable[[Recorder | None, Any], Any], record: Recorder | None) -> float:
        times = runs([partial(work, record, batch) for batch in batches], plan.device)
        return 1e3 * statistics.median(times[3:])  # the first ones compile and record

    def gap(own: Params, other: Params) -> float:
        squares = [((own[n] - x).square().sum(), (own[n] - params[n]).square().sum()) for n, x in other.items()]
        return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)

    first, last = ways["launched"], batches[-1]
    return [
        {
            "name": name,
            "log-probs, ms": ms(log_probs, record),
            "update, ms": ms(updated, record),
            "gap": gap(updated(first, last), updated(record, last)),
        }
        for name, record in ways.items()
    ]


def bench_recorded(plan: Plan) -> list[Record]:
    """Passes of some 4,200 tokens of a model of 0.5 B."""
    found = attempt(lambda: {"records": compared(plan)})
    if "absent" in found:
        return [{"name": "recorded passes", "error": found["absent"], "passed": False}]
    records: list[Record] = found["records"]
    title = f"{PASSES} passes a batch, launched and recorded; the gap of gradients to those of launched passes"
    print(table(title, {"log-probs, ms": ".1f", "update, ms": ".1f", "gap": ".2g"}, records))
    verdicts: list[Record] = []
    if plan.device.type == "cuda":
        launched, recorded = records
        verdicts.append(check("recorded: its gap by that of noise", recorded["gap"] / launched["gap"], TIMES_NOISE))
        verdicts.append(check("recorded: update, by launched", recorded["update, ms"] / launched["update, ms"], 1.0))
    return records + verdicts
