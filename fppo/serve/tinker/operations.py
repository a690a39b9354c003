"""The operations of losses that clients send: functions and methods of tensors, and the sizes of their results.

All are pure, and as large as their arguments: elementwise with broadcasting, reductions, views, indexing. What makes
new tensors from numbers, writes, draws, converts to Python's numbers, or multiplies matrices is left out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ATTRIBUTES = ("shape", "dtype", "ndim", "T", "mT", "values", "indices")  # the last two of results like those of max
DTYPES = MappingProxyType(
    {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool")}
)
KEYWORDS = frozenset(
    (
        *("dim", "keepdim", "min", "max", "dtype", "other", "input", "exponent", "alpha", "beta", "threshold", "value"),
        *("mask", "nan", "posinf", "neginf", "correction", "unbiased", "p", "start_dim", "end_dim", "dim0", "dim1"),
        *(
            "condition",
            "tensors",
            "index",
            "negative_slope",
            "delta",
            "reduction",
            "target",
            "fill_value",
            "descending",
        ),
    )
)
# keywords with these values alone, which torch.nn.functional's functions are traced with
FIXED = MappingProxyType({"inplace": (False,), "_stacklevel": (3,), "approximate": ("none", "tanh")})
_ELEMENTWISE = (
    *("abs", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "pow"),
    *("exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "square", "reciprocal", "sign", "sigmoid"),
    *("tanh", "erf", "sin", "cos", "floor", "ceil", "round", "trunc", "clamp", "clip", "minimum", "maximum"),
    *("fmin", "fmax", "lerp", "relu", "nan_to_num", "isnan", "isinf", "isfinite", "lt", "le", "gt", "ge", "eq", "ne"),
    *("logical_and", "logical_or", "logical_not", "logical_xor", "logaddexp", "xlogy", "atan", "sinh", "cosh"),
)
_REDUCING = (
    *("sum", "mean", "prod", "std", "var", "amax", "amin", "max", "min", "all", "any", "logsumexp", "argmax"),
    *("argmin", "norm", "median", "count_nonzero", "numel"),
)
_ALONG = ("cumsum", "softmax", "log_softmax", "flip", "gather", "logcumsumexp", "diff")
_VIEWS = ("squeeze", "unsqueeze", "flatten", "transpose", "reshape", "movedim", "detach", "clone")
_BOTH = (*_ELEMENTWISE, *_REDUCING, *_ALONG, *_VIEWS)
_OF_METHODS = (
    *("view", "t", "permute", "float", "double", "bool", "long", "to", "type_as", "size", "dim", "contiguous"),
    *("masked_fill", "where", "view_as", "expand_as"),
)
_OF_TORCH = ("where", "dot", "cat", "stack", "zeros_like", "ones_like", "full_like", "masked_fill", "permute")
_OF_NN = (
    *("relu", "softplus", "logsigmoid", "softmax", "log_softmax", "gelu", "silu", "elu", "leaky_relu", "hardtanh"),
    *("smooth_l1_loss", "huber_loss", "mse_loss", "l1_loss", "tanh", "sigmoid"),
)
_OF_OPERATOR = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pos", "pow", "abs", "lt", "le", "gt", "ge", "eq"),
    *("ne", "and_", "or_", "xor", "invert", "getitem"),
)


def _flag(x: Any, name: str) -> Any:
    """An attribute, on the list `ATTRIBUTES`, of a tensor or of a result with values and indices."""
    if not isinstance(x, Tensor) and name not in ("values", "indices"):
        raise ValueError(f"attribute {name} is one of tensors")
    return getattr(x, name)


def _methods() -> dict[str, Callable[..., Any]]:
    return {name: getattr(Tensor, name) for name in (*_BOTH, *_OF_METHODS) if hasattr(Tensor, name)}


def _functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"getattr": _flag, "builtins.getattr": _flag}
    found |= {f"torch.{name}": getattr(torch, name) for name in (*_BOTH, *_OF_TORCH) if hasattr(torch, name)}
    found |= {f"torch.nn.functional.{name}": getattr(F, name) for name in _OF_NN}
    # torch.fx names functions of F that are compiled by their own module
    found |= {
        "torch._C._nn.softplus": F.softplus,
        "torch._C._nn.log_sigmoid": F.logsigmoid,
        "torch._C._nn.gelu": F.gelu,
    }
    return found | {f"operator.{name}": getattr(operator, name) for name in _OF_OPERATOR}


METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(_methods())
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(_functions())


def check_call(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Check the arguments of a call of `target`, and return the most elements that its result may have. Raises
    ValueError for arguments that the operation is not for: a high power of integers, text, lists that would be
    repeated."""
    name = target.rpartition(".")[2]
    values = [*args, *kwargs.values()]
    tensors = [x for x in values if isinstance(x, Tensor)]
    if name == "getattr":
        return 0
    if name == "getitem":
        return _item_size(*args)
    if name in ("cat", "stack"):
        parts = kwargs.get("tensors", args[0] if args else ())
        if not isinstance(parts, (list, tuple)) or not all(isinstance(x, Tensor) for x in parts):
            raise ValueError("it joins a list of tensors")
        return sum(x.numel() for x in parts)
    if not tensors:
        return _check_numbers(target, name, values)
    if any(isinstance(x, (dict, slice)) for x in values):
        raise ValueError("it takes tensors and numbers")
    if name in ("gather", "view", "reshape", "view_as"):
        return max(x.numel() for x in tensors)
    return math.prod(torch.broadcast_shapes(*(x.shape for x in tensors))) if name != "dot" else 1


def _check_numbers(target: str, name: str, values: Sequence[Any]) -> int:
    """Check arithmetic of Python's numbers, such as sizes, and return the elements of its result, 0. Raises
    ValueError."""
    if not target.startswith("operator.") or not all(isinstance(x, (bool, int, float)) for x in values):
        raise ValueError("it takes tensors")
    if name == "pow" and any(isinstance(x, int) and abs(x) > 64 for x in values):
        raise ValueError("a power of integers above 64")
    return 0


def _item_size(x: Any, index: Any) -> int:
    """The elements of x[index]: of a tensor at numbers, slices, None, a mask, or int64 [N] along the first dimension;
    or of a shape, or of a result with several tensors, at a number."""
    if isinstance(x, tuple):
        if not isinstance(index, (int, slice)):
            raise ValueError("a shape has items at numbers")
        return 0
    if not isinstance(x, Tensor):
        raise ValueError("it takes items of tensors")
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(index, Tensor):
        if index.dtype == torch.bool:
            return x.numel()
        if index.dim() > 1:
            raise ValueError("an index has one dimension: use gather")
        return index.numel() * math.prod(x.shape[1:])
    for part in parts:
        if isinstance(part, slice):
            if any(not (end is None or isinstance(end, int)) for end in (part.start, part.stop, part.step)):
                raise ValueError("slices have whole numbers")
        elif not (part is None or part is Ellipsis or isinstance(part, int)):
            raise ValueError("it takes items at numbers, slices, None and ..., or at one tensor")
    return x.numel()
