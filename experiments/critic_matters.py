"""Does a critic pay? PPO with critics beside estimators without one, at equal samples, on tasks of credit.

It needs torch, transformers, tokenizers, safetensors and attrs, and for the picture matplotlib.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from credit import jobs
from credit.runs import RATES, Job, Made, prepare, run_job
from credit.table import Runs, draw, gathered, write
from credit.tasks import TASKS


def main(
    quick: bool = False, tune: bool = False, seeds: int = 5, workers: int = 2, only: str = "", out: str = "runs/critics"
) -> Runs:
    """All methods of all tasks, or of those whose name begins with `only`, with the same seeds. With `tune` each method
    runs with each learning rate, on seeds that the comparison does not have.

    Each run, in one of `workers` processes of one thread (1: in this one), is kept below `out` as soon as it is done:
    who is stopped goes on from there with the same call. `quick` is two steps of one seed: that all of it runs.
    """
    seeds = 1 if quick else seeds
    todo = [
        Job(name, seed, method, lr, quick)
        for seed in range(100 * tune, 100 * tune + seeds)
        for name, task in TASKS.items()
        if name.startswith(only)
        for method in task.methods
        for lr in (RATES if tune else (task.rates[method],))
    ]
    if not todo:
        raise SystemExit(f"--only {only}: no task's name begins so; there are {list(TASKS)}")
    place, starts = Path(out), Path(out) / "starts"
    for job in jobs.each(
        list({job.start(): job for job in todo}.values()), partial(prepare, directory=starts), workers=workers
    ):
        print(f"{job.task}  seed {job.seed}  is warmed up", flush=True)
    results: list[tuple[Job, Made]] = []
    text, run = "", partial(run_job, directory=starts)
    for job, fields in jobs.results(todo, run, say=Job.said, workers=workers, directory=place / "runs"):
        made = Made(**fields)
        results.append((job, made))
        print(f"{job.task}  seed {job.seed}  {job.method:<20} lr {job.lr:g}  {made.seconds:6.1f} s", flush=True)
        text = write(gathered(results, tune=tune), place)
    print(f"\n{text}")
    runs = gathered(results, tune=tune)
    draw(runs, place)
    return runs


if __name__ == "__main__":
    jobs.command(main)
