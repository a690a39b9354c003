"""The reference runs: what is kept of them, their table, and their picture in the documentation.

    python experiments/reference/results.py keep runs/reading      # a comparison's directory, as fppo compare writes it
    python experiments/reference/results.py draw                   # the tables; docs/pictures/reference-reading.png

`keep` puts some metrics of each finished run into `experiments/reference/kept/reading`. Give it once more after more
seeds or variants.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import attrs
import tyro

from fppo.report.compare import collect, spread, write_png
from fppo.runs import jsonl
from fppo.runs.loggers import METRICS

HERE = Path(__file__).parent
KEPT, PICTURES = HERE / "kept", HERE.parent.parent / "docs" / "pictures"
HELD_OUT = "val-aux/word problems/regular_expression/mean@1"
ASKED = 93  # held-out questions


@attrs.frozen
class Study:
    """Runs that are compared: what a page calls each variant, by its directory, and the metrics of the picture."""

    variants: dict[str, str]
    metrics: tuple[str, ...]


STUDIES = {
    "reading": Study(
        {
            "the last number": "reward.weights-_1_0_",
            "any expression": "reward.weights-_0_1_",
        },
        ("reward/regular_expression", "reward/math_verify"),
    ),
}
COLUMNS = (
    "step",
    "reward/regular_expression",
    "reward/math_verify",
    "val-aux/word problems/regular_expression/mean@1",
    "val-aux/word problems/math_verify/mean@1",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/entropy",
    "timing_s/step",
)


def keep(comparison: Path) -> None:
    """Copy some metrics of each run under a comparison's directory. Raises ValueError if there is none."""
    found = sorted(comparison.glob(f"*/seed_*/{METRICS}"))
    if not found:
        raise ValueError(f"{comparison} holds no runs of fppo compare")
    for file in found:
        lines = [{k: _short(line[k]) for k in COLUMNS if k in line} for line in jsonl.read(file)]
        place = KEPT / comparison.name / file.relative_to(comparison)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{place}: {len(lines)} lines")


def _short(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def table(study: str) -> str:
    """The table of a study as Markdown: a row for each variant."""
    head = ["variant", "seeds", "held out before", "after", "of all answers after", "a step"]
    rows = [head, ["---"] * len(head)]
    for label, runs in _runs(study).items():
        lines = [jsonl.read(file / METRICS) for file in runs.values()]
        held = [[line[HELD_OUT] for line in each if HELD_OUT in line] for each in lines]
        first, last = [each[0] for each in held], [each[-1] for each in held]
        right, asked = round(sum(last) * ASKED), ASKED * len(last)
        seconds = median(line["timing_s/step"] for each in lines for line in each if "timing_s/step" in line)
        low, high = wilson(right, asked)
        share = f"{right} of {asked}, {100 * low:.0f} to {100 * high:.0f} %"
        rows.append([label, str(len(runs)), _percent(first), _percent(last), share, f"{seconds:.0f} s"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _runs(study: str) -> dict[str, dict[int, Path]]:
    """The directories of a study's kept runs, by the name of the variant and seed."""
    places = {label: KEPT / study / name for label, name in STUDIES[study].variants.items()}
    found = {
        label: {int(run.name.removeprefix("seed_")): run for run in sorted(place.glob("seed_*"))}
        for label, place in places.items()
    }
    return {label: runs for label, runs in found.items() if runs}


def _percent(shares: Sequence[float]) -> str:
    own = spread([100 * share for share in shares])
    return f"{own.mean:.1f} %" if math.isnan(own.half) or not own.half else f"{own.mean:.1f} ± {own.half:.1f} %"


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a share, of independent questions (Wilson, 1927, JASA 22)."""
    share, weight = right / asked, z * z / asked
    middle = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / asked + weight / asked / 4) / (1 + weight)
    return middle - half, middle + half


def draw() -> None:
    """Print the tables of all studies, and write their pictures."""
    for name, study in STUDIES.items():
        write_png(collect(_runs(name), study.metrics), PICTURES / f"reference-{name}.png")
        print(f"{name}\n\n{table(name)}\n")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"keep": keep, "draw": draw})
