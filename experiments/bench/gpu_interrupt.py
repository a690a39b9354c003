"""Responses that go on with newer weights, on a GPU: each token's log-prob is that of its version, what pieces cost,
and a run whose updates interrupt what is sampled ahead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_model import build, parameters, prompts
from gpu_step import kernels_of
from gpu_tools import Plan, Record, attempt, check, once, table
from placed import settings_of
from torch import Tensor

from fppo import metrics
from fppo.assembly.run import assemble
from fppo.batch import Rollout
from fppo.key import Key
from fppo.pipeline.train import iterate
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Newer, Sampling
from fppo.rollout.interrupt import InterruptibleEngine
from fppo.settings import files
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.micro_batching import MicroBatching

PIECES, STEPS = 4, 4  # of a response; of the run
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


def run(plan: Plan) -> Record:
    """Steps of the quickstart's run that samples a batch ahead, which every update interrupts."""
    with TemporaryDirectory() as place:
        changes = {"rollout.ahead": 1, "rollout.interrupt": 2, "algorithm.old_log_probs": "pass"}
        settings = files.check(files.replace(settings_of(Path(place), 32, plan.device.type), changes))
        with assemble(settings) as assembly:
            numbers: dict[str, float] = {}
            for state, _, report in iterate(
                assembly.run, program=assembly.program, draw=assembly.draw, ahead=1, donate=True
            ):
                for name, x in metrics.report(report).items():
                    numbers[name] = numbers.get(name, 0.0) + x
                if state.step == STEPS:
                    break
    ages = {name: x for name, x in numbers.items() if name.startswith("rollout/lag/tokens/")}
    return {"s per step": numbers["timing_s/step"] / STEPS, "aged": sum(x for n, x in ages.items() if n[-2:] != "/0")}


def bench_interrupt(plan: Plan) -> list[Record]:
    """The engine alone, and a run."""
    records = [{"name": name, **attempt(partial(fn, plan))} for name, fn in (("pieces", pieces), ("a run", run))]
    columns = {"at once, s": ".2f", "pieces, s": ".2f", "k3 of old": ".2g", "k3 of new": ".2g"}
    print(table("responses that updates interrupt", columns | {"s per step": ".2f", "aged": ".0f"}, records))
    failed = [
        {"name": f"interrupt, {r['name']}", "error": r["absent"], "passed": False} for r in records if "absent" in r
    ]
    verdicts: list[Record] = []
    for r in records:
        if "k3 of old" in r:
            verdicts.append(check("interrupt: k3 of the first version's tokens", r["k3 of old"], 0.05))
            verdicts.append(check("interrupt: k3 of the newer version's tokens", r["k3 of new"], 0.05))
            verdicts.append(check("interrupt: pieces over at once", r["pieces, s"] / r["at once, s"], DEARER))
    return [*records, *failed, *verdicts]
