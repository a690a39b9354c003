# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Parts of the kernels named "fixed": Triton programs with fixed tiles and a fixed order of sums, so that the bits of a
row do not depend on other rows.

Triton compiles programs anew for pointers that are not multiples of 16 bytes, and such a program may add in another
order. So tensors are laid out by `aligned` before a launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from fppo_kernels import _triton_kernels

INTERPRETED = isinstance(_triton_kernels.multiply_add, InterpretedFunction)
_BYTES = 16


def is_aligned(x: Tensor) -> bool:
    """Whether a tensor starts at a multiple of 16 bytes."""
    return x.data_ptr() % _BYTES == 0


def aligned(x: Tensor) -> Tensor:
    """Lay out a tensor contiguously from a multiple of 16 bytes on."""
    x = x.contiguous()
    return x if is_aligned(x) else x.clone()


def wide_of(dtype: torch.dtype) -> tuple[torch.dtype, Any]:
    """The dtype in which sums of numbers of `dtype` are taken, float32 or wider, in torch and in Triton."""
    return (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)


def check_tensors(kernel: str, dtypes: tuple[torch.dtype, ...], *tensors: Tensor | None) -> None:
    """Raise ValueError for tensors that are not of one of the `dtypes`, for mixed ones, and for tensors on a CPU
    without Triton's interpreter."""
    given = [x for x in tensors if x is not None]
    if given[0].dtype not in dtypes or any(x.dtype != given[0].dtype for x in given):
        raise ValueError(f"{kernel} takes tensors of one of {[*map(str, dtypes)]}, got {[str(x.dtype) for x in given]}")
    if not (INTERPRETED or all(x.is_cuda for x in given)):
        raise ValueError(
            f"{kernel} runs on a GPU, got tensors on {[str(x.device) for x in given]}; on a CPU it runs with "
            "TRITON_INTERPRET=1 in the environment"
        )
