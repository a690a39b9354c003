"""Packed attention and the packed model step beside padded ones: seconds and peak memory at 30, 50 and 70 % padding.

    python experiments/bench/packed.py

A Qwen2 of 5 M parameters, 16 rows of at most 512 tokens; forward and backward. The peer runs the same rows as they are:
padded rows through torch's scaled_dot_product_attention with a mask, and fppo's own step without removing the padding,
also beside a packed step by kernels in C++ (`model.cpp`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from bench_tools import Timing, measure
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2Config

from fppo import models
from fppo.batch import Column, Rollout
from fppo.key import Key
from fppo.steps.forward import Forward, forward_micro_batch
from fppo_kernels import table
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Kernels, needs_cpp

IN_CPP = ("attention", "log_probs", "rms_norm", "add_rms_norm", "rotary", "glu")
ROWS, WIDTH, PROMPT, HEADS, KV_HEADS, HEAD_DIM = 16, 512, 64, 4, 2, 64


def draw_lengths(padding: float, generator: torch.Generator) -> list[int]:
    """Lengths of prompt and response, one of them the longest, with this share of padding."""
    longest = WIDTH - PROMPT
    lengths = torch.rand(ROWS - 1, generator=generator) ** (padding / (1 - padding))  # a mean of 1 - padding
    wanted = (1 - padding) * ROWS * WIDTH - WIDTH - PROMPT * (ROWS - 1)
    lengths = (lengths * wanted / lengths.sum()).clamp(1, longest).long()
    return [WIDTH, *(PROMPT + lengths).tolist()]


def attention(lengths: list[int], kernel: Callable, repeats: int) -> tuple[Timing, Timing]:
    """The kernel on the packed tokens, and padded attention with a mask on all rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM)]
    padded = [torch.randn(ROWS, WIDTH, *shape, generator=generator).requires_grad_() for shape in shapes]
    real = torch.arange(WIDTH) < torch.tensor(lengths)[:, None]
    packed = [x.detach()[real].requires_grad_() for x in padded]
    place = torch.arange(WIDTH)
    mask = (place[:, None] >= place) & real[:, None, None, :]

    def ours() -> None:
        out = kernel(*packed, lengths=make_lengths(lengths), scale=HEAD_DIM**-0.5)
        torch.autograd.grad(out.sum(), packed)

    def peer() -> None:
        query, key, value = (x.transpose(1, 2) for x in padded)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        torch.autograd.grad(out.transpose(1, 2)[real].sum(), padded)

    return measure(ours, peer, repeats=repeats)


def step(lengths: list[int], kernels: Kernels, repeats: int) -> tuple[Timing, Timing]:
    """Log-probs of the responses and their gradient through the model, packed by these kernels and padded by others."""
    model = models.build(
        Qwen2Config(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            tie_word_embeddings=True,
        )
    )
    params = {name: x.requires_grad_() for name, x in models.init_params(model, Key(0)).items()}
    real = torch.arange(WIDTH) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(4096, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
    response = real[:, PROMPT:]
    nothing = torch.zeros(response.shape)
    rows = Rollout(
        tokens=tokens * real,
        attention_mask=real,
        row_ids=torch.arange(ROWS),
        ids=Column([""] * ROWS),
        ground_truth=Column([""] * ROWS),
        source=Column([""] * ROWS),
        extras=Column([{}] * ROWS),
        response_mask=response,
        rollout_log_probs=nothing,
        sampling_log_probs=nothing,
        groups=torch.arange(ROWS),
        versions=torch.zeros(ROWS, dtype=torch.int64),
        finish=Column(["stop"] * ROWS),
    )

    def run(remove_padding: bool) -> Tensor:
        forward = Forward(model, kernels if remove_padding else Kernels.named(), remove_padding=remove_padding)
        out = forward_micro_batch(params, rows, forward=forward)
        assert out.log_probs is not None
        torch.autograd.grad(out.log_probs.sum(), list(params.values()))
        return out.log_probs.detach()

    torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-4)
    return measure(partial(run, True), partial(run, False), repeats=repeats)


def main() -> None:
    """Print a line for each share of padding and each thing measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = [name for name, reason in table.available("attention").items() if reason is None and name != "eager"]
    steps = {"model step": Kernels.named()}
    if needs_cpp() is None:
        steps["model step, C++"] = Kernels.named(**dict.fromkeys(IN_CPP, "cpp"))
    print(
        f"{'padding':<9}{'what':<22}{'packed s':>10}{'padded s':>10}{'packed / padded':>17}{'MiB':>7}{'padded MiB':>12}"
    )
    for padding in (0.3, 0.5, 0.7):
        lengths = draw_lengths(padding, torch.Generator().manual_seed(0))
        share = 1 - sum(lengths) / (ROWS * WIDTH)
        rows = {f"attention/{name}": partial(attention, lengths, table.get("attention", name)) for name in names}
        rows |= {name: partial(step, lengths, kernels) for name, kernels in steps.items()}
        for name, fn in rows.items():
            ours, peer = fn(repeats=args.repeats)
            ratio = ours.seconds / peer.seconds
            print(
                f"{share:<9.2f}{name:<22}{ours.seconds:>10.3f}{peer.seconds:>10.3f}{ratio:>17.2f}"
                f"{ours.peak_mib:>7.0f}{peer.peak_mib:>12.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
