"""All responses to held-out prompts, on disk: a file for each evaluation."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fppo.assembly.run import Assembly
from fppo.batch import Scored
from fppo.metrics import Metrics
from fppo.pipeline.evaluate import EvaluateRun
from fppo.pipeline.program import RunState
from fppo.pipeline.train import Evaluate, Evaluation
from fppo.runs.jsonl import JsonLines
from fppo.runs.samples import scored_lines
from fppo.runtime.mesh import Mesh, is_first
from fppo.settings.train import TrainSettings

EVALUATIONS = "evaluations"


def kept(evaluate: EvaluateRun, run_dir: Path, tokenizer: Any, mesh: Mesh, *, anew: bool = False) -> Evaluate:
    """The evaluation of the run in a directory, with its responses kept there in the step's file; with `anew` in one
    that is not there yet."""

    def evaluation(run: RunState) -> Metrics:
        def keep(scored: Sequence[Scored]) -> None:
            if is_first(mesh):
                write(scored, _path(run_dir / EVALUATIONS, run.step, anew=anew), tokenizer=tokenizer, step=run.step)

        return evaluate(run, keep)

    return evaluation


def in_training(settings: TrainSettings, assembly: Assembly) -> Evaluation | None:
    """When a run evaluates and how, with its responses kept in its directory; None without held-out prompts."""
    if assembly.evaluate is None:
        return None
    evaluate = kept(assembly.evaluate, Path(settings.output_dir), assembly.tokenizer, assembly.mesh)
    return Evaluation(evaluate, every=settings.eval.every, before=settings.eval.before)


def write(scored: Sequence[Scored], path: Path, *, tokenizer: Any, step: int) -> None:
    """Writes all responses, a line each. The file appears whole, in place of one that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    lines = JsonLines(draft)
    try:
        for part in scored:
            lines.write(*scored_lines(part, tokenizer, step))
    finally:
        lines.close()
    os.replace(draft, path)


def _path(directory: Path, step: int, *, anew: bool) -> Path:
    if not anew:
        return directory / f"step_{step:08d}.jsonl"
    paths = (directory / f"step_{step:08d}_eval_{number}.jsonl" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
