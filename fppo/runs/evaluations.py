"""Responses to held-out prompts on disk: a file for each evaluation."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fppo import metrics
from fppo._errors import printable
from fppo.assembly.run import Assembly
from fppo.batch import Scored
from fppo.metrics import Mean, Metrics
from fppo.pipeline.evaluate import FAILED, EvaluateRun
from fppo.pipeline.program import RunState
from fppo.pipeline.train import Evaluate, Evaluation
from fppo.pipeline.truth import Compared
from fppo.runs.jsonl import JsonLines
from fppo.runs.samples import scored_lines, truth_lines
from fppo.runtime.mesh import Mesh, is_first
from fppo.settings.train import TrainSettings

EVALUATIONS, TRUTH = "evaluations", "truth"
_NAME = re.compile(r"val-(?:core|aux)/(.+)/(mean@\d+|(?:best|maj)@\d+/mean)")


def kept(
    evaluate: EvaluateRun, file_of: Callable[[int], Path], tokenizer: Any, mesh: Mesh, *, truth: Path | None = None
) -> Evaluate:
    """Extend an evaluation to write its responses to the file `file_of(step)`. If exact values are known, some
    responses are written with these to a file of the directory `truth`."""

    def evaluation(run: RunState) -> Metrics:
        def keep(scored: Sequence[Scored]) -> None:
            if is_first(mesh):
                write(scored, file_of(run.step), tokenizer=tokenizer, step=run.step)

        def keep_compared(compared: Compared) -> None:
            if is_first(mesh) and truth is not None:
                lines = truth_lines(compared, tokenizer, run.step)
                write_lines(lines, truth / f"step_{run.step:08d}.jsonl")

        return evaluate(run, keep, keep_compared)

    return evaluation


def in_training(settings: TrainSettings, assembly: Assembly) -> Evaluation | None:
    """A run's evaluation, with its schedule, whose responses are written to the run's directory; None without held-out
    prompts."""
    if assembly.evaluate is None:
        return None
    directory = Path(settings.output_dir) / EVALUATIONS
    evaluate = kept(
        assembly.evaluate,
        lambda step: directory / f"step_{step:08d}.jsonl",
        assembly.inputs.tokenizer,
        assembly.mesh,
        truth=Path(settings.output_dir) / TRUTH,
    )
    return Evaluation(evaluate, every=settings.eval.every, before=settings.eval.before)


def write(scored: Sequence[Scored], path: Path, *, tokenizer: Any, step: int) -> None:
    """Write all responses, a line each, as `write_lines` does."""
    write_lines((line for part in scored for line in scored_lines(part, tokenizer, step)), path)


def write_lines(lines: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write objects, a line each. The file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    file = JsonLines(draft)
    try:
        for line in lines:
            file.write(line)
    finally:
        file.close()
    os.replace(draft, path)


def write_numbers(report: Metrics, path: Path) -> dict[str, float]:
    """Write all metrics as one object of JSON, and return them."""
    numbers = metrics.report(report)
    path.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return numbers


def new_place(run_dir: Path, step: int) -> Path:
    """The first unused file name for an evaluation of a run's step."""
    paths = (run_dir / EVALUATIONS / f"step_{step:08d}_eval_{number}.jsonl" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def table(report: Metrics) -> list[str]:
    """An evaluation in lines of at most 80 columns: for each source its prompts, and the means of the reward and its
    terms; for several responses per prompt also best and majority of all.

    A single term that equals the reward is left out.
    """
    found = {(match[1], match[2]): name for name in report if (match := _NAME.fullmatch(name))}
    cores = [name for name in report if name.startswith("val-core/") and _NAME.fullmatch(name)]
    kinds = list(dict.fromkeys(_NAME.fullmatch(name)[2] for name in cores))  # type: ignore[index]
    means = [place for place, kind in found if kind == kinds[0] and found[place, kind] in cores]
    sources = [place.removesuffix("/reward") for place in means]
    numbers = metrics.report(report)
    rows = [["source", "prompts", "", *(kind.removesuffix("/mean") for kind in kinds)]]
    for source in sources:
        inside = [place for place, kind in found if kind == kinds[0] and _source(place, sources) == source]
        parts = [place for place in inside if place != f"{source}/reward"]
        if len(parts) == 1 and numbers[found[parts[0], kinds[0]]] == numbers[found[f"{source}/reward", kinds[0]]]:
            parts = []
        count = report[found[f"{source}/reward", kinds[0]]]
        prompts = f"{int(count.count):,}" if isinstance(count, Mean) else ""
        for number, place in enumerate([f"{source}/reward", *parts]):
            values = [f"{numbers[name]:.4f}" if (name := found.get((place, kind))) else "" for kind in kinds]
            label = printable(place.removeprefix(f"{source}/"))
            rows.append([_clipped(source, 22) if not number else "", prompts if not number else "", label, *values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[2] = min(widths[2], 20)
    lines = []
    for row in rows:
        cells = [_clipped(x, w).ljust(w) if i in (0, 2) else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    failed = {what: numbers.get(f"val-aux/{what}", 0.0) for what in FAILED}
    missing = ", ".join(f"{number:.0f} {what}" for what, number in failed.items() if number)
    return [*lines, *([f"responses without a score: {missing}"] if missing else [])]


def _source(name: str, sources: Sequence[str]) -> str:
    """The source of SOURCE/NAME, the longest that fits: both may have slashes."""
    return max((source for source in sources if name.startswith(f"{source}/")), key=len, default="")


def _clipped(text: str, width: int) -> str:
    text = printable(text)
    return text if len(text) <= width else f"{text[: width - 3]}..."
