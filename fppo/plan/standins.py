"""Kernels that run where no GPU is, and hold what the real ones hold.

The only place where a plan does not run the code of a step:

- log_probs/triton cannot run on tensors without data: `triton_buffers` makes its buffers (see triton.py).
- log_probs/chunked is run as it is, with the tiles it takes on a GPU. There a slab of float32 logits is made at once;
  here it is in bfloat16 and widened block by block, which holds as much.
- attention is the CPU's flash attention through sdpa: the same results are kept; what a GPU's kernel takes inside its
  backward pass is `_ops.attention_workspace`. For queries that are the last tokens of their sequences the CPU's kernel
  has a mask, which `attention` leaves out.
- which experts a token goes to is a number: `sizes_of_load` says how many rows each rank of an expert axis gets.
- CPU kernels' own scratch memory, which torch does not allocate as tensors, is not seen.
"""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes otherwise than torch calls them
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fppo.models.regions import Sizes
from fppo_kernels import table
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.log_probs.chunked import CUDA_TILES, chunked
from fppo_kernels.log_probs.reference import LogProbs
from fppo_kernels.padding import Lengths

LOG_PROBS = ("reference", "chunked", "triton")
SLAB, ROWS, COLUMNS, TILE = 512 << 20, 32768, 16384, 256  # of fppo_kernels.log_probs.triton.Tiling
SPLITS = 64  # parts of the vocabulary with moments of their own: of 8 tiles each, 128k entries


def log_probs_of(name: str, *, on_gpu: bool) -> Callable[..., LogProbs]:
    """What stands for the kernel of this name. Raises ValueError for one that is not planned."""
    if name not in LOG_PROBS:
        raise ValueError(f"--model.log-probs {name!r} is not planned; there are {', '.join(LOG_PROBS)}")
    if name == "triton":
        return triton_buffers
    if name == "chunked" and on_gpu:
        return partial(chunked, tiles=CUDA_TILES)
    return table.get("log_probs", name)


def triton_buffers(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> LogProbs:
    """The shapes of log_probs/triton's results, through storages of the sizes of its own."""
    out = _StandInTriton.apply(hidden, weight)
    return LogProbs(out[0], out[1] if options.get("entropy") else None, None)


def sizes_of_load(load: float, rank: int) -> Sizes:
    """The experts of this rank of an expert axis have `load` times the mean of the ranks, of each rank's tokens; those
    of the others share the rest."""

    def sizes(counts: Tensor, others: Tensor, rows: int) -> tuple[list[int], list[int]]:
        del others
        ranks = len(counts)
        own = min(rows, round(load * rows / ranks))
        sent = [(rows - own + place) // (ranks - 1) for place in range(ranks - 1)]
        return [*sent[:rank], own, *sent[rank:]], [own] * ranks

    return sizes


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Lengths,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Lengths | None = None,
) -> Tensor:
    """attention/sdpa, or the shapes and the work of its results where a GPU's kernel has the mask built in."""
    masked = window is not None or softcap is not None or sinks is not None
    if masked or key_lengths is None or key_lengths.lengths == lengths.lengths:
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "key_lengths": key_lengths}
        return sdpa(query, key, value, lengths=lengths, scale=scale, **options)
    rows = [
        [part.transpose(0, 1)[None] for part in x.split(sizes.lengths)]
        for x, sizes in ((query, lengths), (key, key_lengths), (value, key_lengths))
    ]
    gqa = query.shape[1] != key.shape[1]
    outputs = [
        F.scaled_dot_product_attention(*row, is_causal=True, scale=scale, enable_gqa=gqa)[0].transpose(0, 1)
        for row in zip(*rows, strict=True)
    ]
    return torch.cat(outputs)


class _StandInTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        tokens = len(hidden)
        moments = hidden.new_empty(3, SPLITS, tokens, dtype=torch.float32)
        total = moments.sum(1)
        own = total[0].clone()
        ctx.save_for_backward(hidden, weight, total, own)
        return own - total[0], total[2].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, total, own = ctx.saved_tensors
        rows_of = torch.cat([total, torch.stack(grads), own[None]])
        d_hidden, d_weight = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(weight)
        height = min(len(hidden), ROWS)
        width = min(SLAB // max(1, height * weight.element_size()), COLUMNS, len(weight) + TILE - 1)
        slab = weight.new_empty(height, max(1, width // TILE) * TILE)
        for start in range(0, len(weight), slab.shape[1]):
            part = weight[start : start + slab.shape[1]]
            for begin in range(0, len(hidden), ROWS):
                rows = hidden[begin : begin + ROWS]
                used = slab[: len(rows), : len(part)]
                d_hidden[begin : begin + ROWS] += (used @ part).float()
                d_weight[start : start + slab.shape[1]] += used.T @ rows
        del rows_of
        return d_hidden.to(hidden.dtype), d_weight
