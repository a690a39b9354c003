"""Matrix products by torch's fastest function that accumulates in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels.linear.onednn import product
from fppo_kernels.shapes import Float

HALVES = (torch.bfloat16, torch.float16)


def matmul(
    a: Float[Tensor, "n h"], b: Float[Tensor, "h m"], wide: torch.dtype, *, rounds: bool = False
) -> Float[Tensor, "n m"]:
    """Compute a @ b in `wide`. With `rounds` the product of bfloat16 operands on a CPU is rounded to bfloat16.

    There, torch has no bfloat16 product with float32 results, and its float32 product takes twice as long.
    """
    if a.dtype == b.dtype and a.is_cuda and a.dtype in HALVES and wide == torch.float32:
        return torch.mm(a, b, out_dtype=wide)
    if rounds and a.dtype == b.dtype and not a.is_cuda and a.dtype == torch.bfloat16 and wide == torch.float32:
        return torch.mm(a, b)
    a, b = a.to(wide), b.to(wide)
    if wide == torch.float32 and a.device.type == "cpu" and torch.backends.mkldnn.is_available() and a.numel():
        # torch.compile calls it for linear layers: twice as fast as torch.mm on the AMD CPUs tried, as fast elsewhere
        return product(a, b.T)
    return a @ b
