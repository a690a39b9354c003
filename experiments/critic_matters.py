"""Does a critic pay? PPO with critics beside estimators without one, at equal samples, on tasks of credit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import starmap
from pathlib import Path

import torch
import tyro
from credit.runs import RATES, Job, Made, run_job
from credit.table import write
from credit.tasks import TASKS

from fppo.report.compare import Comparison


def main(
    quick: bool = False, tune: bool = False, seeds: int = 5, workers: int = 2, only: str = "", out: str = "runs/critics"
) -> Comparison:
    """All methods of all tasks, or of those whose name begins with `only`, with the same seeds. With `tune` each method
    runs with each learning rate, on seeds that the comparison does not have."""
    seeds, workers = (1, 1) if quick else (seeds, workers)
    jobs: list[Job] = []
    for seed in range(100 * tune, 100 * tune + seeds):
        for name, task in TASKS.items():
            rates = {method: RATES if tune else (task.rates[method],) for method in task.methods}
            runs = [(method, lr) for method in task.methods for lr in rates[method]]
            jobs += [Job(name, seed, runs, quick)] if name.startswith(only) else []
    results: list[tuple[Job, Made]] = []
    for job, done in zip(jobs, _done(jobs, workers), strict=True):
        for made in done:
            results.append((job, made))
            print(f"{job.task}  seed {job.seed}  {made.method:<20} lr {made.lr:g}  {made.seconds:6.1f} s", flush=True)
    return write(results, Path(out), tune=tune)


def _done(jobs: Sequence[Job], workers: int) -> Iterable[list[Made]]:
    """What each job gives, in order."""
    if workers == 1:
        return starmap(run_job, jobs)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=partial(torch.set_num_threads, 1))
    return pool.map(run_job, *zip(*jobs, strict=True))


if __name__ == "__main__":
    tyro.cli(main)
