"""Do alarms find planted faults, and leave clean runs alone? 40 clean and 40 faulty runs of faults/cases.py.

Each run is a line of the file `out`, with its metrics; what is there is not run again.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from faults.cases import FAULTS, Case, Start, run

from fppo.pipeline.train import StepRecord
from fppo.runs import jsonl
from fppo.runs.alarms import ring


def cases(first: int, rounds: int) -> list[Case]:
    """In each round every fault once, and five clean runs, so that an early end leaves both."""
    found = list[Case]()
    for number in range(rounds):
        found += [Case(fault, first + number) for fault in FAULTS]
        found += [Case(None, first + 5 * number + i) for i in range(5)]
    return found


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Runs, and those with an alarm, by fault; the median step of the first alarm, and how often each alarm rang."""
    rows = ["| planted | runs | with an alarm | median first step | alarms |", "|---|---|---|---|---|"]
    for fault in (None, *FAULTS):
        rung = [ring(line["records"]) for line in lines if line["fault"] == fault]
        first = [found[0].step for found in rung if found]
        names = Counter(each.alarm for found in rung for each in found)
        often = ", ".join(f"{name} {count}" for name, count in names.most_common())
        when = f"{median(first):g}" if first else ""
        rows.append(f"| {fault or 'nothing'} | {len(rung)} | {len(first)} | {when} | {often} |")
    return "\n".join(rows)


def main(out: str = "alarms.jsonl", first: int = 0, rounds: int = 8, warm_up: int = 700) -> None:
    start, path = None, Path(out)
    done = [(line["fault"], line["number"]) for line in jsonl.read(path)]
    for case in (case for case in cases(first, rounds) if (case.fault, case.number) not in done):
        start, records = start or Start.after(warm_up), list[dict[str, Any]]()

        def observe(record: StepRecord, records: list[dict[str, Any]] = records) -> None:
            records.append({"step": record.run.step, **record.metrics})

        run(case, start, observe)
        with path.open("a") as file:
            line = {"fault": case.fault, "number": case.number, "records": records}
            file.write(json.dumps(jsonl.plain(line)) + "\n")
    print(table(jsonl.read(path)))


if __name__ == "__main__":
    tyro.cli(main)
