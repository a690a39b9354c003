"""What the runs come to: how many samples each method needs, and which is best, as Markdown and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from credit.runs import CRITICS, Curve, Job, Made
from credit.tasks import TASKS

from fppo.report.compare import spread

NEVER = float("inf")
Runs = dict[str, dict[str, dict[int, Made]]]  # by task, method and seed


def samples_to(curve: Curve, goal: float, window: int) -> float:
    """How many samples there were when the mean of so many steps came to the goal; inf if it did not."""
    for i in range(window, len(curve) + 1):
        if fmean(score for _, score in curve[i - window : i]) >= goal:
            return curve[i - 1][0]
    return NEVER


def markdown(runs: Runs) -> str:
    """For each task and method the samples, the last scores and the time; and the best with a critic and without."""
    lines: list[str] = []
    for name, methods in runs.items():
        goal, window = TASKS[name].goal, TASKS[name].window
        lines += [f"\n### {name}\n", f"| method | samples to {goal} | last scores | seconds |", "|---|---|---|---|"]
        needed = {
            m: {seed: samples_to(x.curve, goal, window) for seed, x in made.items()} for m, made in methods.items()
        }
        for method, made in methods.items():
            last = spread([fmean(score for _, score in x.curve[-window:]) for x in made.values()])
            kind = "PPO, " if _critic(method) else ""
            seconds = fmean(x.seconds for x in made.values())
            lines.append(f"| {kind}`{method}` | {_shown(list(needed[method].values()))} | {last} | {seconds:.0f} |")
        end = max(x.curve[-1][0] for made in methods.values() for x in made.values())
        lines.append(f"\n{_best(needed, end)}")
    return "\n".join(lines).strip()


def _critic(method: str) -> bool:
    return method.split()[0] in CRITICS


def _shown(needed: Sequence[float]) -> str:
    there = [x for x in needed if x < NEVER]
    missing = f"never: {len(needed) - len(there)} of {len(needed)} seeds" if len(there) < len(needed) else ""
    some = f"{fmean(there):,.0f} ({min(there):,.0f} to {max(there):,.0f})" if there else ""
    return ", ".join(text for text in (some, missing) if text)


def _best(needed: Mapping[str, Mapping[int, float]], end: float) -> str:
    """The best of both kinds, by the mean over seeds; a seed that never came there counts as `end`, all it had."""
    kinds = [[m for m in needed if _critic(m) is kind] for kind in (True, False)]
    if not all(kinds):
        return "There are no runs yet of " + ("methods with a critic." if kinds[1] else "methods without a critic.")
    own, free = (min(kind, key=lambda m: fmean(min(x, end) for x in needed[m].values())) for kind in kinds)
    if NEVER in needed[own].values():
        return f"The best with a critic is `{own}`, without one `{free}`; not all seeds of the first came to the goal."
    pairs = [(x, min(needed[free][seed], end)) for seed, x in needed[own].items() if seed in needed[free]]
    if not pairs:
        return f"The best with a critic is `{own}`, without one `{free}`; they have no seed in common yet."
    ratio, apart = fmean(x for x, _ in pairs) / fmean(y for _, y in pairs), spread([x / y for x, y in pairs])
    most = "at most " if NEVER in needed[free].values() else ""
    return f"`{own}` needs {most}{ratio:.2f} of the samples of `{free}` (seed by seed {apart})."


def gathered(results: Sequence[tuple[Job, Made]], *, tune: bool) -> Runs:
    """The runs in the order of tasks and methods, however they came; with `tune` each rate is a method."""
    order = {name: task.methods for name, task in TASKS.items()}
    runs: Runs = {}
    for job, made in sorted(
        results, key=lambda x: ([*order].index(x[0].task), order[x[0].task].index(x[0].method), x[0].lr, x[0].seed)
    ):
        label = f"{job.method} {job.lr:g}" if tune else job.method
        runs.setdefault(job.task, {}).setdefault(label, {})[job.seed] = made
    return runs


def write(runs: Runs, out: Path) -> str:
    """The tables, which stand in `out`, too."""
    text = markdown(runs)
    (out / "critic_matters.md").write_text(text + "\n")
    return text


def draw(runs: Runs, out: Path) -> None:
    """The curves as a picture and as numbers; without matplotlib as numbers alone."""
    curves = {t: {m: {seed: x.curve for seed, x in made.items()} for m, made in ms.items()} for t, ms in runs.items()}
    (out / "critic_matters.json").write_text(json.dumps(curves))
    if find_spec("matplotlib") is None:
        print("no matplotlib here: the same command with the same --out draws the curves where it is")
        return
    from fppo.report.compare import Comparison, write_png

    write_png(Comparison(curves=curves), out / "critic_matters.png", x="samples")
