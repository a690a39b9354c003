# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Packed attention by Triton programs with which the bits of a row do not depend on other rows; decoding runs them
too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton as _triton
from torch import Tensor

from fppo_kernels._fixed import INTERPRETED, aligned, check_tensors, is_aligned, wide_of
from fppo_kernels.attention._triton_kernels import (
    attention_backward_keys,
    attention_backward_queries,
    attention_forward,
)
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.padding import Lengths
from fppo_kernels.shapes import Float
from fppo_kernels.transforms import TwoPass, run

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_ANY = 1 << 30  # a window that is none
_LEAST = 16  # the least side of a product in Triton
_WIDE_HEAD = 128  # wider heads take smaller tiles, to fit the shared memory


class HeadRule(NamedTuple):
    """Numbers of an attention layer that are constants of its programs."""

    scale: float
    softcap: float | None

    def settings(self, query: Tensor, value_width: int, *, stages: int = 2) -> dict[str, Any]:
        """The compile-time constants of the programs; they depend on dtype and widths alone. With two `stages` the next
        block is loaded during the work on this one."""
        dtype, width = query.dtype, query.shape[-1]
        side = 64 if dtype == torch.bfloat16 else 32 if dtype == torch.float32 else 16
        side = side if width <= _WIDE_HEAD or side == _LEAST else side // 2
        blocks = {n: max(_LEAST, _triton.next_power_of_2(x)) for n, x in (("BD", width), ("BE", value_width))}
        constants = {"D": width, "E": value_width, "BM": side, "BN": side, **blocks}
        rule = {"SCALE": float(self.scale), "CAP": float(self.softcap or 0.0)}
        kinds = {"WIDE": wide_of(dtype)[1], "WIDEN": INTERPRETED, "num_warps": 4, "num_stages": stages}
        return {**rule, **constants, **kinds}


class KeyTable(NamedTuple):
    """Keys or values [*, D] as rows of D numbers: the tensor, and the steps between rows of its other dimensions."""

    rows: Tensor
    steps: tuple[int, ...]


def key_table(x: Tensor) -> KeyTable:
    """Lay out keys or values, which are copied only where programs could not address them."""
    width, stride = x.shape[-1], x.stride()
    if stride[-1] != 1 or any(step % width for step in stride[:-1]) or not is_aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    return KeyTable(x, tuple(step // width for step in x.stride()[:-1]))


class PlacedKeys(NamedTuple):
    """Queries and the keys that they see: `places` int64 [6, S] as in `_triton_kernels`, steps between keys and between
    heads of keys, and `seen` uint8, 0 for hidden keys, in which keys are `step` apart. `most` is the largest number of
    queries of a sequence."""

    places: Tensor
    most: int
    window: int | None
    key: KeyTable
    key_steps: tuple[int, int]
    value: KeyTable
    value_steps: tuple[int, int]
    seen: Tensor
    step: int


def attend(rule: HeadRule, query: Tensor, placed: PlacedKeys, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention [N, Hq, Dv] of queries [N, Hq, D], and the logarithms of the softmax's denominators [N, Hq]."""
    query, key, value = aligned(query), placed.key.rows, placed.value.rows
    (count, heads, _), key_heads, sequences = query.shape, placed.key.rows.shape[1], placed.places.shape[1]
    out = query.new_empty(count, heads, value.shape[-1])
    log_sums = query.new_empty(count, heads, dtype=wide_of(query.dtype)[0])
    if not count:
        return out, log_sums
    groups, settings = heads // key_heads, rule.settings(query, value.shape[-1])
    tiles = _triton.cdiv(placed.most * groups, settings["BM"])
    tensors = query, key, value, placed.seen, None if sinks is None else aligned(sinks), out, log_sums, placed.places
    numbers = sequences, tiles, groups, heads, placed.window or _ANY
    steps = *placed.key_steps, *placed.value_steps, placed.step
    constants: dict[str, Any] = {"SINKS": sinks is not None, **settings}
    with torch.cuda.device_of(query):
        attention_forward[(sequences * tiles, key_heads)](*tensors, *numbers, *steps, **constants)
    return out, log_sums


class _Options(NamedTuple):
    """Arguments of packed attention that are no tensors."""

    rule: HeadRule
    window: int | None
    lengths: Lengths
    key_lengths: Lengths


def _places(options: _Options, key_step: int, value_step: int) -> Tensor:
    queries, keys = (x.cu_seqlens.long() for x in (options.lengths, options.key_lengths))
    first = keys[:-1]
    return torch.stack(
        [queries[:-1], queries.diff(), first * key_step, first * value_step, keys.diff(), torch.zeros_like(first)]
    )


def _forward(
    options: _Options, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[tuple[Tensor], tuple[Tensor]]:
    keys, values = key_table(key), key_table(value)
    (key_step, key_head), (value_step, value_head) = keys.steps, values.steps
    placed = PlacedKeys(
        _places(options, key_step, value_step),
        options.lengths.max_length,
        options.window,
        keys,
        (key_step, key_head),
        values,
        (value_step, value_head),
        torch.ones(1, dtype=torch.uint8, device=key.device),
        0,
    )
    out, log_sums = attend(options.rule, query, placed, sinks)
    return (out,), (log_sums,)


def _backward(
    options: _Options,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    kept: tuple[Tensor, Tensor],
    grads: tuple[Tensor],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    (out, log_sums), sinks = kept, tensors[3]
    query, key, value, grad = (aligned(x) for x in (*tensors[:3], grads[0]))
    dots = (grad.to(log_sums.dtype) * out.to(log_sums.dtype)).sum(-1)
    slopes = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    heads, key_heads, sequences = query.shape[1], key.shape[1], len(options.lengths.lengths)
    settings, groups = options.rule.settings(query, value.shape[2], stages=1), heads // key_heads
    tensors_of, places = (query, key, value, grad, log_sums, dots), _places(options, key_heads, key_heads)
    sides = (options.lengths.max_length * groups, "BM"), (options.key_lengths.max_length, "BN")
    programs: Any = (attention_backward_queries, slopes[:1]), (attention_backward_keys, slopes[1:])
    with torch.cuda.device_of(query):
        for (size, side), (program, targets) in zip(sides, programs, strict=True):
            tiles = _triton.cdiv(size, settings[side])
            numbers = sequences, tiles, groups, heads, options.window or _ANY
            if sequences:
                program[(sequences * tiles, key_heads)](*tensors_of, *targets, places, *numbers, **settings)
    of_sinks = None if sinks is None else -((sinks - log_sums).exp() * dots).sum(0).to(sinks.dtype)
    return *slopes, of_sinks


def _definition(options: _Options, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor]:
    keywords: dict[str, Any] = {**options.rule._asdict(), "window": options.window, "sinks": sinks}
    return (sdpa(query, key, value, lengths=options.lengths, key_lengths=options.key_lengths, **keywords),)


_PASSES = TwoPass(forward=_forward, backward=_backward, definition=_definition, reads=(0,))


def fixed(
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
    """Compute `eager` block by block of keys, as FlashAttention-2 does (Dao, 2023, arXiv:2307.08691), in float32 or
    wider without TensorFloat-32. Blocks begin at the first key of a sequence.

    A query's result has the same bits beside any other queries, and those of `decode_attention/fixed`. The backward
    pass adds in a fixed order too. Derivatives beyond the first are those of `sdpa`. Raises ValueError for mixed
    dtypes, for others than float32, bfloat16 and float64, and for tensors on a CPU without Triton's interpreter.
    """
    check_tensors("attention/fixed", DTYPES, query, key, value)
    options = _Options(HeadRule(scale, softcap), window, lengths, key_lengths or lengths)
    return run(_PASSES, options, query, key, value, sinks)[0]
