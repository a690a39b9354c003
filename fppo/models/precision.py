"""Contexts in which passes stay in float64, and in which modules are built as for 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_GROUPED = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
# the functions that change; others return after one look-up, since a pass has thousands of calls
_CHANGED = frozenset({Tensor.float, Tensor.to, Tensor.type, F.softmax, torch.softmax, Tensor.softmax, _GROUPED})


class KeepDouble(TorchFunctionMode):
    """A context in which conversions of float64 tensors to float32 keep float64.

    transformers' norms and softmax go through float32 whatever the parameters are, which would round a float64 pass to
    float32's precision; float64 is for checks of invariance, which need more. torch's grouped product of experts lacks
    float64: it is computed expert by expert.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CHANGED or not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0]
        if func is _GROUPED:
            return _grouped_product(*args, **kwargs)
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        return func(*args, **{name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()})


def _grouped_product(x: Tensor, weights: Tensor, *, offs: Tensor, **_: None) -> Tensor:
    """torch's grouped_mm of `x` [M, K] and `weights` [E, K, N]: rows up to `offs[e]` with expert e's weight; rows
    beyond the last give zeros."""
    ends = offs.tolist()
    products = [x[start:end] @ w for start, end, w in zip([0, *ends[:-1]], ends, weights, strict=True)]
    return torch.cat([*products, x.new_zeros(len(x) - ends[-1], weights.shape[-1])])


class NarrowDefault(TorchFunctionMode):
    """A context in which new tensors are in bfloat16 unless float32 is asked for. It acts on this thread alone, whereas
    torch's default dtype would change the passes of all threads.

    A float32 result is new if neither a float32 tensor nor the dtype is among the arguments.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor) or out.dtype != torch.float32 or func is Tensor.float:
            return out
        given = (*args, *(kwargs or {}).values())
        wide = (x is torch.float32 or (isinstance(x, Tensor) and x.dtype == torch.float32) for x in given)
        return out if any(wide) else out.bfloat16()
