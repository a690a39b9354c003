"""Whole runs of the quickstart on a GPU: actor, critic and reference in pools that share this machine's GPUs, be it
one, beside one process, and updates that interrupt what is sampled ahead."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_tools import Plan, Record, attempt, check, table
from placed import compared, in_pools, settings_of, steps_of

from fppo import metrics
from fppo.assembly.pools import groups_of
from fppo.assembly.run import assemble
from fppo.pipeline.train import iterate

BATCH, STEPS = (512, 16), (10, 1)  # on a GPU, and in a dry run
INTERRUPTED = 4  # steps of the run that samples ahead
DEARER = 3.0  # a step in pools over one of one process: on one GPU they gain nothing


def placed(plan: Plan) -> Record:
    """Seconds of a step both ways, and whether the first steps are equal."""
    dry = plan.device.type == "cpu"
    with TemporaryDirectory() as place:
        plain = settings_of(Path(place), BATCH[dry], plan.device.type)
        settings = in_pools(plain, "processes")
        with assemble(plain) as assembly:
            alone, before = steps_of(assembly, STEPS[dry])
        del assembly
        with (
            groups_of(settings.placement, settings.mesh, settings.device, settings.model_roles) as places,
            assemble(settings, places=places) as assembly,
        ):
            made, rows = steps_of(assembly, STEPS[dry])
    word = compared(alone, made)
    seconds = [statistics.median(row["a step, s"] for row in found) for found in (before, rows)]
    return {"one process, s": seconds[0], "pools, s": seconds[1], "compared": word, "differs": float("differ" in word)}


def interrupted(plan: Plan) -> Record:
    """Steps of a run that samples a batch ahead, which every update interrupts."""
    with TemporaryDirectory() as place:
        changes = {"rollout.ahead": 1, "rollout.interrupt": 2, "algorithm.old_log_probs": "pass"}
        settings = settings_of(Path(place), 32, plan.device.type, changes)
        with assemble(settings) as assembly:
            numbers: Counter[str] = Counter()
            for state, _, report in iterate(
                assembly.run, program=assembly.program, draw=assembly.draw, ahead=1, donate=True
            ):
                numbers.update(metrics.report(report))
                if state.step == INTERRUPTED:
                    break
    ages = {name: x for name, x in numbers.items() if name.startswith("rollout/lag/tokens/")}
    return {
        "a step, s": numbers["timing_s/step"] / INTERRUPTED,
        "aged": sum(x for name, x in ages.items() if not name.endswith("/0")),
    }


def bench_runs(plan: Plan) -> list[Record]:
    """Both."""
    pools: Record = {"name": "pools", **attempt(lambda: placed(plan))}
    ahead: Record = {"name": "interrupted", **attempt(lambda: interrupted(plan))}
    columns = {"one process, s": ".3f", "pools, s": ".3f", "differs": ".0f", "a step, s": ".2f", "aged": ".0f"}
    print(table("runs", columns, [pools, ahead]))
    records: list[Record] = []
    for record in (pools, ahead):
        if "absent" in record:
            records.append({"name": record["name"], "error": record["absent"], "passed": False})
        else:
            records.append(record)
    if "compared" in pools:
        print(f"the first steps beside those of one process: {pools['compared']}")
        records += [
            check("pools: the first steps differ from one process (1: yes)", pools["differs"], 0),
            check("pools: a step, by one process", pools["pools, s"] / pools["one process, s"], DEARER),
        ]
    if "aged" in ahead:
        records.append(check("interrupted: tokens of older versions", ahead["aged"], 1, least=True))
    return records
