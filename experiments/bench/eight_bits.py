"""AdamW with moments in 8 bits beside AdamW: the error of its steps, by code, and what a small model learns.

    python experiments/bench/eight_bits.py

The error is the norm of the difference of 600 steps to float32's, relative to theirs; one moment is in 8 bits at a time
(blocks of 64, gradients over several decades that grow or shrink, by place). The model learns sums of two numbers.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from bench_tools import header, measure, row
from torch import Tensor

from fppo import models, steps
from fppo.key import Key
from fppo.quickstart import small_model
from fppo.steps.adamw_8bit import STEP, decoded, encoded, offsets_after


def dynamic(signed: bool) -> Tensor:
    """The paper's code (section 1.2): 7 decades, of which each has twice as many levels as the one below."""
    ups = []
    for decade in range(7):
        count = 2 ** (decade + (not signed))
        ups += [10.0 ** (decade - 6) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
    return torch.tensor(sorted([0.0, 1.0, *ups, *([-x for x in ups] if signed else [])]))


def papers(x: Tensor, second: bool) -> Tensor:
    """Numbers in the paper's code, in blocks of 64; no second moment above 0 becomes 0."""
    code, blocks = dynamic(not second), x.unflatten(-1, (-1, 64))
    scale = blocks.abs().amax(-1, keepdim=True)
    found = torch.bucketize(blocks / scale.clamp(min=1e-38), (code[1:] + code[:-1]) / 2)
    found = torch.where(blocks > 0, found.clamp(min=1), 0) if second else found
    return (code[found] * scale).flatten(-2)


def ours(x: Tensor, second: bool, count: int | None = None) -> Tensor:
    """Numbers in our code, by the nearest, or by the offsets after `count` updates."""
    offsets = STEP // 2 if count is None else offsets_after(torch.tensor(float(count)), 64)
    return decoded(*encoded(x, 64, signed=not second, offsets=offsets), signed=not second)


def error(coded, second: bool, turning: bool = False) -> float:
    """The relative error of steps whose first, or `second`, moment is in a code."""
    draw = torch.Generator().manual_seed(0)
    size, drift = (10 ** (0.8 * torch.randn(8, 256, generator=draw)) for _ in range(2))
    exact, own, total = torch.zeros(2, 8, 256), torch.zeros(2, 8, 256), torch.zeros(2)
    for count in range(600):
        g = 1e-3 * size * drift ** (count / 600) * torch.randn(8, 256, generator=draw)
        scale = [1 - b ** (count + 1) for b in (0.9, 0.999)]
        for m in (exact, own):
            m[0], m[1] = 0.9 * m[0] + 0.1 * g, 0.999 * m[1] + 0.001 * g * g
        moves = [(m[0] / scale[0]) / ((m[1] / scale[1]).sqrt() + 1e-8) for m in (exact, own)]
        total += torch.stack([(moves[1] - moves[0]).square().sum(), moves[0].square().sum()])
        own[int(second)] = coded(own[int(second)], second, **({"count": count} if turning else {}))
    return (total[0] / total[1]).sqrt().item()


def pace() -> str:
    """The processor time of an update of 4 M numbers, relative to AdamW's."""
    params = {"w": torch.randn(2048, 2048)}

    def call(make):
        optimizer = make(lambda step: 1e-3)
        return partial(steps.optimizer_step, steps.init_state(params, optimizer), params, optimizer=optimizer)

    ours, plain = measure(call(steps.adamw_8bit), call(steps.adamw), repeats=5)
    return f"{1e3 * ours.processor:.0f} and {1e3 * plain.processor:.0f} ms of a processor for 4 M numbers"


def sums(draw: torch.Generator, rows: int):
    """Demonstrations of sums, digit by digit."""
    a, b = torch.randint(100, (2, rows), generator=draw).tolist()
    text = [(f"{x:02}{y:02}", f"{x + y:03}") for x, y in zip(a, b, strict=True)]
    return steps.demonstrations(*([[int(c) + 2 for c in x[i]] for x in text] for i in (0, 1)), pad_token_id=0)


def learned(make, seed: int, updates: int) -> float:
    """Nats per token of held-out sums after so many updates."""
    model, draw, passes = (
        small_model(12, width=64, layers=2),
        Key(seed).generator(),
        steps.MicroBatching(token_budget=4096),
    )
    forward, batches = steps.Forward(model), (sums(draw, 64) for _ in range(updates))
    params = models.init_params(model, Key(seed))
    params = steps.imitate(params, batches, forward=forward, optimizer=make(lambda step: 2e-3), micro_batching=passes)
    held_out = sums(Key(99).generator(), 512)
    return -steps.compute_log_probs(params, held_out, forward=forward, micro_batching=passes).mean().item()


def main() -> None:
    """Prints two tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(header("code", "first moment", "second", "second, offsets that change"))
    print(row("the paper's", f"{error(papers, False):.3f}", f"{error(papers, True):.3f}", "-"))
    print(row("ours", *(f"{error(ours, *how):.3f}" for how in ((False,), (True,), (True, True)))), flush=True)
    print(pace(), flush=True)
    print(header("seed", "adamw", "adamw_8bit"))
    for seed in range(options.seeds):
        cells = [learned(make, seed, options.updates) for make in (steps.adamw, steps.adamw_8bit)]
        print(row(str(seed), *(f"{x:.4f}" for x in cells)), flush=True)


if __name__ == "__main__":
    main()
