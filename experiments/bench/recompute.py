"""An update of an actor whose layers are kept, recomputed but for their attention, or recomputed: time and memory.

    MALLOC_MMAP_THRESHOLD_=65536 python experiments/bench/recompute.py

In turn in one process, on one thread, after a warm-up of each; medians, and the quartiles of the time. Memory is beyond
parameters and moments, beside what a plan says of it. The variable has glibc map every tensor on its own, which takes
time: its usual heap keeps what is freed.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import attrs
import torch
from bench_tools import Timing, header, median, once, row
from transformers import Qwen2Config

from fppo import models, tree
from fppo.batch import Experience
from fppo.key import Key
from fppo.models.recompute import Recompute
from fppo.steps.forward import Forward
from fppo.steps.train_state import init_state
from fppo.studies.plan import passes
from fppo.studies.plan.case import Case, hardware_of
from fppo.studies.plan.track import peak_of

UPDATE = "update actor"
HOW: dict[str, Recompute] = {"kept": False, "selective": "selective", "recomputed": True}


def case_of(width: int, layers: int, rows: int, length: int) -> Case:
    """One update of one pass over so many rows."""
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    return Case(
        name="bench",
        config=config,
        hardware=hardware_of("cpu"),
        tokens=rows * length,
        length=length,
        micro_batches=1,
        compute_dtype=None,
        full=True,
    )


def rows_of(case: Case, ragged: bool) -> Experience:
    """Rows of random words, all full or each shorter than the one before."""
    batch = passes.rows_of(case, case.rows)
    words = torch.randint(2, case.config.vocab_size, batch.tokens.shape, generator=Key(0).fold("words").generator())
    batch = tree.replace(batch, tokens=words)
    if not ragged:
        return batch
    response = batch.response_mask.shape[1]
    lengths = response - torch.arange(case.rows) * (response // case.rows)
    mask = torch.arange(response) < lengths[:, None]
    attention = torch.cat([batch.attention_mask[:, : case.length - response], mask], 1)
    return tree.replace(batch, attention_mask=attention, response_mask=mask)


def planned(case: Case) -> float:
    """MiB of a pass beyond the state and the rows."""
    peak = peak_of(passes.run_stage(case, UPDATE))[1]
    return (peak.total - peak.peak["state"] - peak.peak["batch"]) / 2**20


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--ragged", action="store_true", help="rows of several lengths, which plans do not know")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = case_of(options.width, options.layers, options.rows, options.length)
    model = models.build(case.config)
    params, batch = models.init_params(model, Key(0)), rows_of(case, options.ragged)
    print(f"{sum(x.numel() for x in params.values()) / 1e6:.1f} M parameters, {int(batch.attention_mask.sum())} tokens")

    def update(how: Recompute) -> Timing:
        forward = Forward(attrs.evolve(model, checkpoint_layers=how))
        stage = passes.stage_of(case, UPDATE, batch, forward=forward)
        return once(partial(stage, init_state(tree.copy(params), passes.optimizer_of(case))), per=False)

    runs: dict[str, list[Timing]] = {name: [] for name in HOW}
    for _ in range(1 + options.repeats):
        for name, how in HOW.items():
            runs[name].append(update(how))
    print(header("layers", "processor, s", "MiB", "planned, MiB"))
    for name, how in HOW.items():
        found, (low, _, high) = median(runs[name][1:]), statistics.quantiles(x.processor for x in runs[name][1:])
        said = "-" if options.ragged else f"{planned(attrs.evolve(case, checkpoint_layers=how)):.0f}"
        print(row(name, f"{found.processor:.2f} ({low:.2f} to {high:.2f})", f"{found.peak_mib:.0f}", said), flush=True)


if __name__ == "__main__":
    main()
