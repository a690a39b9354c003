"""Rollouts without training: a policy's responses and their scores on disk, to read or train on later."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from fppo import metrics
from fppo.assembly.program import ROLLOUTS
from fppo.assembly.run import Assembly
from fppo.batch import Scored
from fppo.episodes import num_episodes
from fppo.pipeline.step import sample
from fppo.pipeline.timing import now
from fppo.rollout import saved
from fppo.runs import session
from fppo.runs.jsonl import JsonLines
from fppo.runs.samples import scored_lines
from fppo.runtime.mesh import any_rank, device_of, is_first
from fppo.settings import files
from fppo.settings.train import TrainSettings
from fppo.tree import replace

ROWS = "samples.jsonl"
STOPPING = "finishing this batch; ctrl-C again abandons it"


def run_sampling(settings: TrainSettings, assembly: Assembly) -> int:
    """Sample `settings.steps` batches of the policy in the run's newest checkpoint, else the initial one, and return
    their number, which is lower after a stop request.

    Each batch is a file for `rollout.from`, and all rows are written as text to samples.jsonl next to them. Raises
    ValueError if the directory holds rollouts already.
    """
    directory, mesh = Path(settings.output_dir) / ROLLOUTS, assembly.mesh
    if saved.steps(directory):
        raise ValueError(f"{directory} holds rollouts already: give another output_dir, or remove them")
    run, first = session.at(settings, assembly), is_first(mesh)
    cursor = run.cursor
    with contextlib.ExitStack() as opened:
        lines = None
        if first:
            directory.mkdir(parents=True, exist_ok=True)
            opened.enter_context(session.alone_in(directory))
            files.save(settings, directory / session.SETTINGS)
            lines = opened.enter_context(contextlib.closing(JsonLines(directory / ROWS)))
        asked = opened.enter_context(session.stop_requests(announce=STOPPING if first else ""))
        for number in range(settings.steps):
            start = now()
            scored, cursor, report = sample(
                replace(run, step=number, cursor=cursor), program=assembly.program, draw=assembly.draw
            )
            if lines is not None:
                saved.write(scored, directory, number + 1)
                lines.write(*scored_lines(scored, assembly.inputs.tokenizer, number + 1))
                print(_summary(settings, number + 1, scored, metrics.report(report), now() - start), flush=True)
            if any_rank(bool(asked), mesh, device_of(run.actor.params)):
                return number + 1
    return settings.steps


def _summary(settings: TrainSettings, step: int, scored: Scored, numbers: Mapping[str, float], seconds: float) -> str:
    tokens = int(scored.response_mask.sum())
    return (
        f"batch {step:>{len(str(settings.steps))}}/{settings.steps}  score {numbers['critic/score/mean']:.3f}  "
        f"length {tokens / num_episodes(scored):.1f}  tok/s {tokens / seconds:,.0f}"
    )
