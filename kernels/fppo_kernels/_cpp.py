# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Programs in C++, compiled when they are first called, by the compiler and into the cache of torch.compile."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

_HEADERS = ("_numbers.h", "_vectors.h")  # that every program begins with


@functools.cache
def _library(path: str) -> ctypes.CDLL:
    from torch._inductor.codecache import CppCodeCache  # here: it takes a second, and nothing else needs it

    folder = Path(__file__).parent
    return CppCodeCache.load("\n".join((folder / name).read_text("utf-8") for name in (*_HEADERS, path)))


@functools.cache
def _function(path: str, name: str, kinds: tuple[type, ...]) -> Callable[..., None]:
    fn = _library(path)[name]
    types = {int: ctypes.c_int64, float: ctypes.c_double}  # a tensor is a pointer
    fn.restype, fn.argtypes = None, [*(types.get(kind, ctypes.c_void_p) for kind in kinds), ctypes.c_int64]
    return fn


def call(path: str, name: str, *arguments: Tensor | int | float | None) -> None:
    """Calls a function of a file of this package: with tensors of a CPU, contiguous, as pointers, or null for None;
    whole numbers as int64_t, others as double, and the number of threads last."""
    values: list[int | float | None] = []
    for x in arguments:
        if isinstance(x, Tensor):
            assert x.is_cpu
            assert x.is_contiguous()
            values.append(x.data_ptr())
        else:
            values.append(x)
    _function(path, name, tuple(map(type, arguments)))(*values, torch.get_num_threads())


KINDS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
)


def kind_of(*tensors: Tensor) -> str:
    """The name of the dtype of tensors on a CPU, as functions in C++ end in it. Raises ValueError for others."""
    first = tensors[0].dtype
    if first not in KINDS or not all(x.is_cpu and x.dtype == first for x in tensors):
        kinds = ", ".join(f"{str(x.dtype).removeprefix('torch.')} on {x.device}" for x in tensors)
        raise ValueError(f"kernels in C++ take float32, float64 or bfloat16, of one dtype and on the CPU, got {kinds}")
    return KINDS[first]
