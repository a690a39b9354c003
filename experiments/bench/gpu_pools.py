"""Actor, critic and reference in pools that share this machine's GPUs, be it one, beside one process."""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpu_tools import Plan, Record, attempt, check, table
from placed import compared, in_pools, settings_of, steps_of

from fppo.assembly.pools import groups_of
from fppo.assembly.run import assemble

BATCH, STEPS = (512, 16), (10, 1)  # on a GPU, and in a dry run
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
        with groups_of(settings) as places, assemble(settings, groups=places.roles) as assembly:
            made, rows = steps_of(assembly, STEPS[dry])
    word = compared(alone, made)
    seconds = [statistics.median(row["a step, s"] for row in found) for found in (before, rows)]
    return {"one process, s": seconds[0], "pools, s": seconds[1], "compared": word, "differs": float("differ" in word)}


def bench_pools(plan: Plan) -> list[Record]:
    """The quickstart's steps."""
    record: dict[str, Any] = {"name": "pools", **attempt(lambda: placed(plan))}
    print(table("three pools", {"one process, s": ".3f", "pools, s": ".3f", "differs": ".0f"}, [record]))
    if "absent" in record:
        return [{"name": "pools", "error": record["absent"], "passed": False}]
    print(f"the first steps beside those of one process: {record['compared']}")
    return [
        record,
        check("pools: the first steps differ from one process (1: yes)", record["differs"], 0),
        check("pools: a step, by one process", record["pools, s"] / record["one process, s"], DEARER),
    ]
