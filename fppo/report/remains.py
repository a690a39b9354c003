"""Steps of a run by its files other than metrics.jsonl, for a report of a run whose metrics are lost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fppo.runs import jsonl

DIGESTS, CHECKPOINTS, EVALUATIONS = "digests.jsonl", "checkpoints", "evaluations"
_STEP = re.compile(r"step_(\d+)(\.jsonl)?")


def remains(run_dir: Path, sampled: Iterable[int], *, on_damage: Callable[[str], None]) -> list[dict[str, Any]]:
    """A record of each step that is `sampled`, or has digests, a checkpoint or an evaluation. Evaluations give the mean
    reward by source, as in the metrics; the other records hold the step alone."""
    digests = jsonl.read(run_dir / DIGESTS, on_damage=on_damage)
    steps = [*(line.get("step") for line in digests), *sampled]
    steps += [_step(path) for path in run_dir.glob(f"{CHECKPOINTS}/*")]
    records: list[dict[str, Any]] = [{"step": step} for step in steps if isinstance(step, int)]
    for path in run_dir.glob(f"{EVALUATIONS}/*"):
        if (step := _step(path)) is not None:
            records.append({"step": step, **_means(jsonl.read(path, on_damage=on_damage))})
    return records


def _step(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return None if match is None else int(match[1])


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean reward of each source, by the metric's name in an evaluation."""
    scores: dict[str, list[float]] = defaultdict(list)
    prompts: dict[str, set[Any]] = defaultdict(set)
    for line in lines:
        if isinstance(line.get("score"), int | float):
            source = str(line.get("source"))
            scores[source].append(line["score"])
            prompts[source].add(line.get("id"))
    counts = {source: len(x) // len(prompts[source]) for source, x in scores.items()}
    return {f"val-core/{source}/reward/mean@{counts[source]}": sum(x) / len(x) for source, x in scores.items()}
