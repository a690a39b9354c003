"""Does a critic pay? PPO with each critic beside estimators without one, at equal samples, on two tasks of credit."""

import json
import time
from pathlib import Path
from statistics import fmean

import tyro
from credit.runs import CRITICS, METHODS, curve_of, warmed_up
from credit.tasks import TASKS

from fppo.key import Key
from fppo.report.compare import Comparison, write_png


def samples_to(curve: list[tuple[float, float]], goal: float) -> float | None:
    """How many samples there were when the mean of three steps came to the goal."""
    for i in range(2, len(curve)):
        if fmean(score for _, score in curve[i - 2 : i + 1]) >= goal:
            return curve[i][0]
    return None


def main(
    quick: bool = False, seeds: int = 5, steps: int = 40, batch: int = 256, out: str = "runs/critics"
) -> Comparison:
    seeds, steps, batch = (1, 2, 16) if quick else (seeds, steps, batch)
    curves = {task: {method: {} for method in METHODS} for task in TASKS}
    seconds = {method: [] for method in METHODS}
    for name, task in TASKS.items():
        for seed in range(seeds):
            start = warmed_up(task, Key(seed).fold(name), 2 if quick else task.warm_up)
            for method in METHODS:
                began = time.monotonic()
                curves[name][method][seed] = curve_of(task, start, method, Key(seed), steps=steps, batch=batch)
                seconds[method].append(time.monotonic() - began)
                print(f"{name}  seed {seed}  {method:<20} {seconds[method][-1]:6.1f} s", flush=True)
    comparison = Comparison(curves=curves)
    print(f"\n{comparison.table()}\n")
    for name, task in TASKS.items():
        for method in METHODS:
            needed = [samples_to(curve, task.goal) for curve in curves[name][method].values()]
            there = [x for x in needed if x is not None]
            mean = f"{fmean(there):8,.0f}" if there else "       -"
            kind = "critic" if method in CRITICS else ""
            print(
                f"{name}  {method:<20} {kind:<7} samples to {task.goal}: {mean}  ({len(there)} of {len(needed)} seeds)"
            )
    Path(out).mkdir(parents=True, exist_ok=True)
    write_png(comparison, Path(out) / "critic_matters.png")
    (Path(out) / "critic_matters.json").write_text(json.dumps({"curves": curves, "seconds": seconds}))
    return comparison


if __name__ == "__main__":
    tyro.cli(main)
