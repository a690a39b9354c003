# pyright: reportUnknownMemberType=false
"""Packed attention by FlexAttention: one compiled kernel that skips blocks of other sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fppo_kernels.padding import Lengths, sent
from fppo_kernels.shapes import Bool, Float, Int


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@functools.lru_cache(maxsize=8)  # all layers of a model need the same one or two
@torch.inference_mode(False)  # masks made during rollouts are reused in training
def _mask(
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    window: int | None,
    device: torch.device,
    block: int = 128,
) -> BlockMask:
    """Build a block mask from the range of keys that each query sees, without an [N, M] tensor."""
    total, count = sum(lengths), sum(key_lengths)
    sizes, keys = torch.tensor(lengths), torch.tensor(key_lengths)
    own = torch.arange(total) + (keys.cumsum(0) - sizes.cumsum(0)).repeat_interleave(sizes)  # the last key each sees
    first = (keys.cumsum(0) - keys).repeat_interleave(sizes)  # and the first; both ascend
    if window is not None:
        first = first.maximum(own - window + 1)
    low, number = torch.arange(total)[::block], torch.arange(-(-count // block))
    high = (low + block - 1).clamp(max=total - 1)
    seen_by_all = (number * block >= first[high, None]) & ((number + 1) * block <= own[low, None] + 1)
    full = seen_by_all & (low + block <= total)[:, None]
    partial = (number >= first[low, None] // block) & (number <= own[high, None] // block) & ~full
    last, limit = sent(own, device), sent(first, device)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= last[query]) & (key >= limit[query])

    blocks = [sent(x, device) for each in (partial, full) for x in _counted(each)]
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=block, mask_mod=seen, seq_lengths=(total, count))


def _counted(chosen: Bool[Tensor, "r c"]) -> tuple[Int[Tensor, "1 1 r"], Int[Tensor, "1 1 r c"]]:
    """For each row of `chosen` [R, C], the number of chosen columns, int32 [1, 1, R], and all columns with the chosen
    ones first, int32 [1, 1, R, C]."""
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def flex(
    query: Float[Tensor, "n q d"],
    key: Float[Tensor, "m k d"],
    value: Float[Tensor, "m k e"],
    *,
    lengths: Lengths,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
    key_lengths: Lengths | None = None,
) -> Float[Tensor, "n q e"]:
    """Compute `sdpa` by FlexAttention, in bfloat16, float16 and float32 on CUDA; the block mask is built on the host.

    On a CPU it runs uncompiled and without a backward pass, to inspect values. Raises ValueError for float64 on CUDA,
    and for calls that torch does not support.
    """
    if query.is_cuda and query.dtype == torch.float64:
        raise ValueError("attention/flex does not compute in float64 on CUDA; attention/sdpa does")
    if not len(query):
        return query.new_zeros(0, query.shape[1], value.shape[2]) + (query.sum() + key.sum() + value.sum()) * 0
    keys = lengths if key_lengths is None else key_lengths
    mask = _mask(lengths.lengths, keys.lengths, window, query.device)

    dtype = torch.promote_types(query.dtype, torch.float32)
    limit = (
        None if softcap is None else torch.full((), softcap, dtype=dtype, device=query.device)
    )  # torch 2.11 takes no float

    def cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)  # type: ignore[operator]

    attend: Callable[..., Any] = _compiled() if query.is_cuda else flex_attention
    try:
        out, aux = attend(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            score_mod=None if softcap is None else cap,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    except NotImplementedError as error:
        raise ValueError(f"attention/flex cannot do this here: {error} attention/sdpa can") from error
    if sinks is not None:  # exp(sink) is added to the sum of exponentials
        out = out * torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse)).to(out.dtype)[..., None]  # type: ignore[operator]
    return out[0].transpose(0, 1)
