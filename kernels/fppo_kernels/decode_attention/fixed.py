# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Decode attention by the program of `attention/fixed`, with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from fppo_kernels._fixed import aligned, check_tensors
from fppo_kernels.attention.fixed import DTYPES, HeadRule, PlacedKeys, attend, key_table
from fppo_kernels.shapes import Float


def fixed(
    query: Float[Tensor, "r q d"],
    keys: Float[Tensor, "r k c d"],
    values: Float[Tensor, "r k c e"],
    bias: Float[Tensor, "r c"] | None = None,
    *,
    start: int,
    end: int,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " q"] | None = None,
) -> Float[Tensor, "r q e"]:
    """Compute `eager` with the bits that `attention/fixed` gives the last token of a sequence, without a gradient.

    The sequence begins at the first column that `bias` does not hide, before `start` too (a window hides what is before
    `start`); without a bias it begins at `start`. Raises ValueError as `attention/fixed` does.
    """
    check_tensors("decode_attention/fixed", DTYPES, query, keys, values)
    rows, columns = torch.arange(len(query), device=query.device), keys.shape[2]
    if bias is None:
        seen, step, pads = torch.ones(1, dtype=torch.uint8, device=query.device), 0, torch.full_like(rows, start)
    else:
        seen, step = aligned(bias == 0).view(torch.uint8), 1
        pads = seen[:, :end].int().argmax(1)
    tables = key_table(keys), key_table(values)
    firsts = [rows * table.steps[0] + pads * table.steps[2] for table in tables]
    places = torch.stack([rows, torch.ones_like(rows), *firsts, end - pads, (rows * columns + pads) * step])
    (_, key_head, key_step), (_, value_head, value_step) = (table.steps for table in tables)
    placed = PlacedKeys(
        places, 1, end - start, tables[0], (key_step, key_head), tables[1], (value_step, value_head), seen,
        step,
    )  # fmt: skip
    return attend(HeadRule(scale, softcap), query, placed, sinks)[0]
