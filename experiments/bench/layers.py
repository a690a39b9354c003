"""Kernels inside the layers beside the model's own code: CPU time of one thread, in turn, as ratios.

    python experiments/bench/layers.py linear=onednn rms_norm=torch compiled compiled,linear=onednn

A Qwen2 of 1 M and of 13 M parameters, 64 prompts of 6 tokens and 64 new tokens: decoding, log-probs, and log-probs with
their gradient, of 16 rows at a time. A ratio is the kernel's time over that of the model's own code right before; the
line shows the median of the ratios and their quartiles. "compiled" is a model with compiled layers; its programs are
made before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import attrs
import torch
from torch import Tensor
from transformers import Qwen2Config

from fppo import batch, models
from fppo.batch import Column, Prompts, Rollout
from fppo.key import Key
from fppo.models.model import Model, Params
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels import table
from fppo_kernels.table import Kernels

SIZES = {"1M": (128, 512, 4, 4), "13M": (384, 1536, 6, 6)}  # width, inner width, layers, heads
VOCABULARY, ROWS, PROMPT, NEW, MICRO = 512, 64, 6, 64, 16


def make(size: str) -> tuple[Model, Params]:
    """The model of that size, at random."""
    width, inner, layers, heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = models.build(config)
    return model, models.init_params(model, Key(0))


def prompts() -> Prompts:
    """Random prompts."""
    tokens = torch.randint(3, VOCABULARY, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    blank = Column([None] * ROWS)
    return Prompts(
        tokens=tokens,
        attention_mask=torch.ones_like(tokens, dtype=torch.bool),
        row_ids=torch.arange(ROWS),
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
    )


class Choice(NamedTuple):
    """What a stage runs on."""

    model: Model
    kernels: Kernels


def decode(params: Params, choice: Choice) -> Rollout:
    """Responses that are all of one length."""
    engine = EmbeddedEngine(model=choice.model, kernels=choice.kernels, pad_token_id=0)
    return engine.generate(params, Ask(prompts=prompts(), sampling=Sampling(max_tokens=NEW), key=Key(1)))


def log_probs(params: Params, rows: Rollout, choice: Choice) -> Tensor:
    out = forward_micro_batch(params, rows, forward=Forward(choice.model, choice.kernels)).log_probs
    assert out is not None
    return out


@torch.no_grad()
def forward(params: Params, rows: Rollout, choice: Choice) -> None:
    log_probs(params, rows, choice)


def gradient(params: Params, rows: Rollout, choice: Choice) -> None:
    leaves = {name: x.detach().requires_grad_() for name, x in params.items()}
    torch.autograd.grad(log_probs(leaves, rows, choice).sum(), list(leaves.values()))


def seconds(fn: Callable[[], object]) -> float:
    """This thread's time on the processor, whoever else runs."""
    start = time.thread_time()
    fn()
    return time.thread_time() - start


def ratios(
    stage: Callable[[Choice], object], own: Choice, choices: dict[str, Choice], repeats: int
) -> dict[str, list[float]]:
    """By choice, its times over those of the model's own code right before."""
    for choice in choices.values():
        stage(choice)
    found: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(repeats):
        for name, choice in choices.items():
            before = seconds(partial(stage, own))
            found[name].append(seconds(partial(stage, choice)) / before)
    return found


def choice_of(text: str, model: Model) -> Choice:
    """As compiled,linear=onednn."""
    pairs = [pair.split("=", 1) for pair in text.split(",") if pair != "compiled"]
    model = attrs.evolve(model, compile_layers="compiled" in text.split(","))
    return Choice(model, attrs.evolve(Kernels.named(), **{op: table.get(op, name) for op, name in pairs}))


def main() -> None:
    """Print a line for each size, stage and choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="+", help="a kernel, as linear=onednn, or compiled; with commas")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in args.sizes:
        model, params = make(size)
        own = Choice(model, Kernels.named())
        choices = {text: choice_of(text, model) for text in args.choices}
        rows = batch.rows(decode(params, own), list(range(MICRO)))
        stages = {
            "decode": partial(decode, params),
            "log-probs": partial(forward, params, rows),
            "gradient": partial(gradient, params, rows),
        }
        for stage, fn in stages.items():
            for name, values in ratios(fn, own, choices, args.repeats).items():
                low, middle, high = statistics.quantiles(values, n=4)
                print(f"{size:<5}{stage:<11}{name:<40}{middle:6.2f}   ({low:.2f} to {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
