"""An update of one long row, with MLPs whole and in slices of tokens: memory and time.

    python experiments/bench/long_rows.py

Memory is planned for one H200, on tensors without data, so that any length fits: the peak, and what of it comes beyond
parameters and moments. Time is measured on a shorter row with equally many slices: runs in turn, on one thread, after a
warm-up of each. The ratio is the median of those to the run of `selective` just before.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import attrs
import torch
from bench_tools import header, once, row
from recompute import UPDATE, case_of, rows_of

from fppo import models, tree
from fppo.key import Key
from fppo.models.recompute import Recompute
from fppo.steps.forward import Forward
from fppo.steps.train_state import init_state
from fppo.studies.plan import passes
from fppo.studies.plan.case import Case, hardware_of
from fppo.studies.plan.track import peak_of

# checkpoint_layers, and whether MLPs are in slices; the first is what others are compared with
HOW: dict[str, tuple[Recompute, bool]] = {
    "`selective`": ("selective", False),
    "`selective`, slices": ("selective", True),
    "recomputed": (True, False),
    "recomputed, slices": (True, True),
}


def planned(case: Case) -> tuple[float, float]:
    """GiB at the peak of the update, and those beyond parameters and moments."""
    peak = peak_of(passes.run_stage(case, UPDATE))[1]
    return peak.total / 2**30, (peak.total - peak.peak["state"]) / 2**30


def timed(case: Case, tokens: int, repeats: int, ways: int) -> dict[str, list[float]]:
    """Seconds of a processor for an update in each of the first `ways`, with slices of so many tokens."""
    model, batch = models.build(case.config), rows_of(case, False)
    params = models.init_params(model, Key(0))
    found: dict[str, list[float]] = {name: [] for name in [*HOW][:ways]}
    for number in range(1 + repeats):
        for name in found:
            again, cut = HOW[name]
            which = attrs.evolve(model, checkpoint_layers=again, mlp_slice_tokens=tokens if cut else None)
            stage = passes.stage_of(case, UPDATE, batch, forward=Forward(which))
            state = init_state(tree.copy(params), passes.optimizer_of(case))
            found[name] += [once(partial(stage, state), per=False).processor] if number else []
    return found


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--slices", type=int, default=16, help="the number of slices that a row is cut into")
    parser.add_argument("--timed", type=int, default=4096, help="the length of the row that is timed")
    parser.add_argument("--repeats", type=int, default=5, help="0: memory alone")
    parser.add_argument("--ways", type=int, default=len(HOW), help="time the first so many ways alone")
    parser.add_argument("--offload", action="store_true", help="plan with activations in the host's memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = case_of(options.width, options.layers, 1, options.length)
    case = attrs.evolve(case, hardware=hardware_of("h200"), offload_activations=options.offload)
    short = case_of(options.width, options.layers, 1, options.timed)
    found = timed(short, options.timed // options.slices, options.repeats, options.ways) if options.repeats else {}
    print(header("layers", "peak, GiB", "beyond the state", "of `selective`", "processor, s", "ratio"))
    base = 0.0
    for name, (again, cut) in HOW.items():
        size = options.length // options.slices if cut else None
        total, beyond = planned(attrs.evolve(case, checkpoint_layers=again, mlp_slice_tokens=size))
        base = base or total
        cells = ["-", "-"]
        if name in found:
            first = next(iter(found.values()))
            ratios = [one / other for one, other in zip(found[name], first, strict=True)]
            cells = [f"{statistics.median(found[name]):.2f}", f"{statistics.median(ratios):.2f}"]
        print(row(name, f"{total:.2f}", f"{beyond:.2f}", f"{total / base:.2f}", *cells), flush=True)


if __name__ == "__main__":
    main()
