"""Prompts that are computed once on a GPU, beside the same rows apart: seconds of a pass and an update, and how far
log-probs and gradients are from each other."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from gpu_model import build, experience, parameters
from gpu_step import kernels_of, runs
from gpu_tools import Plan, Record, attempt, check, table

from fppo import losses, tree
from fppo.batch import Experience
from fppo.models.model import Params
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.packed import masks_of
from fppo.steps.train_state import init_state

# responses to a prompt; rows, longest prompt and longest response of a batch; tokens of a micro-batch
CASES = ((8, (64, 512, 256), 16384), (16, (64, 1024, 256), 16384))
DRY = ((2, (4, 4, 8), 64),)
SHARED = 0.6  # of the time of an update of rows apart
TIMES_NOISE = 4.0  # a gap of gradients, by that of the same rows in another cut


def grouped(plan: Plan, n: int) -> Experience:
    """A batch in which each prompt stands before `n` responses."""
    batch, prompt = experience(plan, 0, plan.model.vocabulary), plan.rows[1]
    first = torch.arange(plan.rows[0], device=plan.device) // n * n
    tokens, mask = batch.tokens.clone(), batch.attention_mask.clone()
    tokens[:, :prompt], mask[:, :prompt] = tokens[first, :prompt], mask[first, :prompt]
    return tree.replace(batch, tokens=tokens, attention_mask=mask, groups=first // n)


def compared(plan: Plan, n: int, budget: int) -> list[Record]:
    """Both ways on one batch. Steps of size one from the parameters are the gradient."""
    model, batch, kernels = build(plan.model, plan), grouped(plan, n), kernels_of(plan.variants[0])
    params, optimizer = parameters(model, plan.device), sgd(lambda step: 1.0, max_grad_norm=None)
    cut = MicroBatching(token_budget=budget)

    def log_probs(forward: Forward) -> torch.Tensor:
        return compute_log_probs(params, batch, forward=forward, micro_batching=cut)

    def updated(forward: Forward, micro: MicroBatching = cut) -> Params:
        loop = Loop(mini_batch_size=plan.rows[0], micro_batching=micro)
        update = UpdateActor(forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer)
        return update(init_state(params, optimizer), batch)[0].params

    def gap(own: Params, other: Params) -> float:
        squares = [((own[k] - x).square().sum(), (x - params[k]).square().sum()) for k, x in other.items()]
        return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)

    def ms(work: Any) -> float:
        return 1e3 * statistics.median(runs([work] * (2 + plan.fresh), plan.device)[2:])

    apart, shared = (Forward(model, kernels=kernels, share_prompts=share) for share in (False, True))
    plain, plain_log_probs = updated(apart), log_probs(apart)
    rows = masks_of(batch, shared).sorted()
    found: list[Record] = []
    for name, forward in (("apart", apart), ("shared", shared)):
        made = updated(forward, MicroBatching(token_budget=budget // 2) if name == "apart" else cut)
        found.append(
            {
                "name": f"{plan.rows[1]} + {plan.rows[2]} tokens, n = {n}, {name}",
                "tokens": 1.0 if name == "apart" or rows is None else 1.0 - rows.saved,
                "gap": gap(made, plain),
                "log-probs apart": float((log_probs(forward) - plain_log_probs).abs().max()),
            }
        )
        del made
    del plain
    for record, forward in zip(found, (apart, shared), strict=True):
        record |= {"log-probs, ms": ms(partial(log_probs, forward)), "update, ms": ms(partial(updated, forward))}
    return found


def bench_shared(plan: Plan) -> list[Record]:
    """Groups of the plan's model; the gap of rows apart is that of another cut into micro-batches."""
    gpu, records, verdicts = plan.device.type == "cuda", [], []
    for n, sizes, budget in CASES if gpu else DRY:
        made = attempt(partial(lambda *case: {"records": compared(*case)}, plan._replace(rows=sizes), n, budget))
        if "absent" in made:
            verdicts.append({"name": f"shared prompts, n = {n}", "error": made["absent"], "passed": False})
            continue
        apart, shared = made["records"]
        records += [apart, shared]
        name = shared["name"]
        verdicts.append(check(f"{name}: its gap by that of a cut", shared["gap"] / apart["gap"], TIMES_NOISE))
        if gpu:
            ratio = shared["update, ms"] / apart["update, ms"]
            verdicts.append(check(f"{name}: an update, by rows apart", ratio, SHARED))
    columns = {"tokens": ".2f", "log-probs, ms": ".1f", "update, ms": ".1f", "gap": ".2g", "log-probs apart": ".2g"}
    print(table("prompts computed once", columns, records))
    return records + verdicts
