"""Responses that go on with newer weights, on a GPU: each token's log-prob is that of its version, and what pieces
cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpu_model import build, parameters, prompts
from gpu_step import kernels_of
from gpu_tools import Plan, Record, attempt, check, once, table
from torch import Tensor

from fppo.batch import Rollout
from fppo.key import Key
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Newer, Sampling
from fppo.rollout.interrupt import InterruptibleEngine
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching

PIECES = 4  # of a response
DEARER = 3.0  # at most, in pieces over at once


def coming(versions: Sequence[dict[str, Tensor]]) -> Newer:
    """A newer version each time that it is asked."""
    waiting = list(enumerate(versions))
    return lambda: (waiting[0][1], waiting.pop(0)[0]) if waiting else None


def k3(plan: Plan, rollout: Rollout, versions: Sequence[dict[str, Tensor]], forward: Forward) -> list[float]:
    """The distance of the log-probs of each version's tokens from those that a pass with its weights gives."""
    assert rollout.token_versions is not None
    found = []
    for version, params in enumerate(versions):
        own = compute_log_probs(params, rollout, forward=forward, micro_batching=MicroBatching(size=plan.decode[0]))
        gap = (own - rollout.rollout_log_probs)[rollout.response_mask & (rollout.token_versions == version)]
        found.append(float((gap.exp() - 1 - gap).mean()))
    return found


def pieces(plan: Plan) -> Record:
    """A batch at once, in pieces of one policy, and in pieces of two."""
    rows, longest, count = plan.decode
    model, kernels = build(plan.small, plan), kernels_of(plan.variants[0])
    first = parameters(model, plan.device)
    versions = [first, {name: 1.05 * x for name, x in first.items()}]
    engine = EmbeddedEngine(model=model, kernels=kernels, pad_token_id=0, max_rows=rows)
    cut = InterruptibleEngine(engine=engine, every=max(count // PIECES, 1), pad_token_id=0)
    asked = partial(
        Ask, prompts(rows, longest, plan.small.vocabulary, 0), Sampling(max_tokens=count), Key(0), version=0
    )
    got: list[Rollout] = []

    def generate(newer: Newer | None) -> None:
        got[:] = [cut.generate(first, asked(newer=newer))]

    times = []
    for newer in (None, lambda: None):
        generate(newer)  # records and compiles
        times.append(once(partial(generate, newer), plan.device))
    generate(coming(versions))
    apart = k3(plan, got[0], versions, Forward(model, kernels=kernels))
    return {"at once, s": times[0], "pieces, s": times[1], "k3 of old": apart[0], "k3 of new": apart[1]}


def bench_interrupt(plan: Plan) -> list[Record]:
    """The engine alone; `gpu_runs` has a run."""
    record: Record = {"name": "interrupt", **attempt(partial(pieces, plan))}
    columns = {"at once, s": ".2f", "pieces, s": ".2f", "k3 of old": ".2g", "k3 of new": ".2g"}
    print(table("responses that updates interrupt", columns, [record]))
    if "absent" in record:
        return [{"name": "interrupt", "error": record["absent"], "passed": False}]
    return [
        record,
        check("interrupt: k3 of the first version's tokens", record["k3 of old"], 0.05),
        check("interrupt: k3 of the newer version's tokens", record["k3 of new"], 0.05),
        check("interrupt: pieces over at once", record["pieces, s"] / record["at once, s"], DEARER),
    ]
