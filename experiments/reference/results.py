"""What is kept of the reference runs, and the tables and pictures of docs/reference.md that are made of it.

python experiments/reference/results.py keep runs/reference    # thins the metrics of its runs into kept/
python experiments/reference/results.py draw                   # prints the tables, writes docs/pictures/reference-*.png
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from runs import RUNS
from tyro.conf import Positional
from word_rows import HELD_OUT

from fppo.report.charts import COLORS, points
from fppo.report.compare import spread
from fppo.runs import jsonl
from fppo.runs.loggers import METRICS

HERE = Path(__file__).parent
KEPT, PICTURES = HERE / "kept", HERE.parents[1] / "docs" / "pictures"
ASKED = 93  # held-out questions
ANY_HELD_OUT = HELD_OUT.replace("regular_expression", "math_verify")
TITLES = {
    HELD_OUT: "held out: the last number is the answer, %",
    ANY_HELD_OUT: "held out: an expression equals the answer, %",
    "reward/regular_expression": "training: the last number is the answer, %",
    "reward/math_verify": "training: an expression equals the answer, %",
}
OTHERS = (
    "val-aux/environment/right",
    "val-aux/environment/right_at_once",
    "val-core/gsm8k/reward/mean@1",
    "supervised/nll_loss",
    "val-core/gsm8k/nll_loss/mean@1",
)
COLUMNS = ("step", *TITLES, *OTHERS, "reward/environment", "response_length/mean", "actor/entropy", "timing_s/step")


@attrs.frozen
class Study:
    """Runs that are compared: their names, the metrics of the picture, and the steps that all of them have."""

    runs: tuple[str, ...]
    metrics: tuple[str, ...]
    steps: int


STUDIES = {
    "words": Study(("grpo",), (HELD_OUT, "reward/regular_expression"), 30),
    "reading": Study(("grpo", "any_expression"), tuple(TITLES), 30),
    "estimators": Study(("grpo", "rloo", "ppo_hidden", "ppo_tokens"), (HELD_OUT, "reward/regular_expression"), 20),
    "distilled": Study(("grpo", "distilled"), (HELD_OUT, "reward/regular_expression"), 20),
    "loops": Study(("grpo", "tinker", "trl"), (HELD_OUT, "reward/regular_expression"), 20),
}
Line = Mapping[str, Any]


def keep(directory: Positional[Path]) -> None:
    """Copy some metrics of each run below a directory. Raises ValueError if there is none."""
    found = sorted(directory.glob(f"*/seed_*/{METRICS}"))
    if not found:
        raise ValueError(f"{directory} holds no runs: NAME/seed_N/{METRICS}")
    for file in found:
        lines = [{name: _short(line[name]) for name in COLUMNS if name in line} for line in jsonl.read(file)]
        place = KEPT / file.parent.parent.name / f"{file.parent.name}.jsonl"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _short(value: float) -> float:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def kept(study: Study) -> dict[str, dict[int, list[Line]]]:
    """The kept lines of a study's runs up to its last step, by run and seed."""
    return {
        name: {
            int(file.stem.removeprefix("seed_")): [x for x in jsonl.read(file) if x["step"] <= study.steps]
            for file in sorted((KEPT / name).glob("seed_*.jsonl"))
        }
        for name in study.runs
    }


def picture(study: Study) -> Figure:
    """Draw a panel for each metric of a study: thin lines of seeds, and their mean."""
    wide = -(-len(study.metrics) // 2)
    figure = Figure(figsize=(9, 3.1 * wide + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(wide, 2, squeeze=False).flat
    found = kept(study)
    for ax, metric in zip(panels, study.metrics, strict=True):
        for (name, seeds), color in zip(found.items(), COLORS):
            curves = [points(lines, metric) for lines in seeds.values()]
            for curve in curves:
                ax.plot(*zip(*((x, 100 * y) for x, y in curve)), color=color, linewidth=0.7, alpha=0.4)
            means = [(each[0][0], 100 * fmean(y for _, y in each)) for each in zip(*curves)]
            if means:
                ax.plot(*zip(*means), color=color, linewidth=2, label=f"{RUNS[name].label}: {means[-1][1]:.0f} %")
        ax.set_title(TITLES[metric], fontsize=9, loc="left")
        ax.set_xlabel("step", fontsize=8)
        ax.set_ylim(0, 100)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(True, color="#e5e7eb", linewidth=0.8)
        ax.tick_params(labelsize=8, length=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def table(study: Study) -> str:
    """Markdown with a row for each run: the share of held-out questions that are right, by step."""
    steps = range(0, study.steps + 1, 10)
    rows = [["run", "seeds", *(f"step {step}" for step in steps), "seconds a step"]]
    rows.append(["---"] * len(rows[0]))
    for name, seeds in kept(study).items():
        lines = [line for own in seeds.values() for line in own]
        at = [[line[HELD_OUT] for line in lines if line["step"] == step and HELD_OUT in line] for step in steps]
        seconds = median(line["timing_s/step"] for line in lines if "timing_s/step" in line)
        rows.append([RUNS[name].label, str(len(seeds)), *map(_share, at), f"{seconds:.0f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _share(right: Sequence[float]) -> str:
    """A mean over seeds in percent with its 95 % interval; of two seeds both, of one the interval of its questions."""
    if not right:
        return ""
    own = spread([100 * each for each in right])
    if not own.half:
        return f"{own.mean:.1f}"
    if len(right) == 1:
        low, high = wilson(round(right[0] * ASKED), ASKED)
        return f"{own.mean:.1f} ({100 * low:.0f} to {100 * high:.0f})"
    if len(right) == 2:
        return f"{own.mean:.1f} ({' and '.join(f'{100 * each:.0f}' for each in right)})"
    return f"{own.mean:.1f} ± {own.half:.1f}"


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a share of independent questions (Wilson, 1927, JASA 22)."""
    share, weight = right / asked, z * z / asked
    middle = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / asked + weight / asked / 4) / (1 + weight)
    return middle - half, middle + half


def draw() -> None:
    """Print the tables of all studies, and write their pictures."""
    for name, study in STUDIES.items():
        picture(study).savefig(PICTURES / f"reference-{name}.png", dpi=110, metadata={"Software": None})
        print(f"{name}\n\n{table(study)}\n")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"keep": keep, "draw": draw})
