"""What torch's operations cost, from their arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo.plan.values import Work

_NO_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "detach", "alias")
_PICKS = ("embedding", "index", "index_select", "gather")  # read as much as they write, not all of their first argument
_MATMULS = ("mm", "bmm", "addmm", "_linear_pointwise", "baddbmm", "_grouped_mm")
ADAMW_TRAFFIC = 7 / 4  # parameters, gradients and moments are read, all but the gradients written


class DispatchCounter(NamedTuple):
    """What is asked of an operation again and again."""

    name: str
    marks: bool  # of which each layer has its own
    attention: bool
    writes: bool  # in place, or to an argument


@functools.cache
def dispatched(func: Any) -> DispatchCounter:
    """The operation by its plain name, and what it is."""
    name = func._schema.name.rpartition("::")[2]
    attention = "attention" in name and "fused_sdp_choice" not in name
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    return DispatchCounter(name, attention, attention, writes)


def grouped_product(func: Any, args: Sequence[Any]) -> Tensor | None:
    """What experts' matrix product gives, of tensors without data in a dtype for which torch does not know its shape,
    though it computes it; None for anything else."""
    if dispatched(func).name != "_grouped_mm" or args[0].dtype == torch.bfloat16:
        return None
    left, right, offsets = args[:3]
    shape = (left.shape[-2], right.shape[-1])
    return left.new_empty((len(offsets), *shape) if left.dim() == right.dim() == 2 else shape)


def work_of(func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], fresh: bool) -> Work | None:
    """FLOPs and bytes of an operation; None for views and empty tensors. `fresh`: it has made storage."""
    name, _, attention, writes = dispatched(func)
    if name in _NO_WORK or not (fresh or writes) or not inputs:
        return None
    if name in _MATMULS:
        return Work(f"matmul {_dtype(inputs[0])}", _matmul_flops(name, inputs, outputs), 0)
    if attention:
        return Work(f"attention {_dtype(inputs[0])}", _attention_flops(name, inputs), 0)
    if name in _PICKS:
        return Work("", 0.0, 2 * _bytes(outputs))
    if name == "_fused_adamw_":
        return Work("", 0.0, int(ADAMW_TRAFFIC * _bytes(inputs)))
    return Work("", 0.0, _bytes(inputs) + _bytes(outputs))


def attention_workspace(name: str, inputs: Sequence[Tensor]) -> int:
    """Bytes that a GPU's flash attention takes inside its backward pass, which runs elsewhere show nothing of.

    FlashAttention-2 adds up the query's gradient in float32 and, where several query heads share a key head, writes
    gradients of keys and values for each query head first (torch: aten/.../flash_attn/flash_api.cpp, mha_bwd).
    """
    if "attention" not in name or not name.endswith("backward"):
        return 0
    query, key = inputs[1], inputs[2]
    expanded = 2 * query.numel() * query.element_size() if query.shape[1] != key.shape[1] else 0
    return 4 * query.numel() + expanded


def _matmul_flops(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    left, (out, *_) = inputs[1] if name in ("addmm", "baddbmm") else inputs[0], outputs
    groups = len(out) if left.dim() < out.dim() else 1  # matrices of which each has rows of its own, summed over
    return 2.0 * math.prod(out.shape) / groups * left.shape[-1]


def _attention_flops(name: str, inputs: Sequence[Tensor]) -> float:
    """FLOPs of causal attention of queries [B, H, L, D], the last of as many tokens as there are keys: of the pairs
    that see one another; 2 matmuls forward, 5 backward."""
    query, key = inputs[1:3] if name.endswith("backward") else inputs[:2]
    rows, heads, length, width = query.shape
    forward = 4.0 * rows * heads * width * (length * key.shape[2] - length * (length - 1) / 2)
    return 2.5 * forward if name.endswith("backward") else forward


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
