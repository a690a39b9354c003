"""Tensors of a state on the host, where a checkpoint is written from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

STAGE_BYTES = 64 << 20  # what is copied from a device at a time


def on_host(tensors: Mapping[str, Tensor], copy: bool) -> dict[str, Tensor]:
    """The tensors on the host, contiguous, each with memory of its own: of others' too with `copy`."""
    own: dict[str, Tensor] = {}
    stage: Tensor | None = None
    taken: set[int] = set()
    for path, x in tensors.items():
        if x.is_cuda:
            stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) if stage is None else stage
            own[path] = _staged(x, stage)
        else:
            pointer = x.untyped_storage().data_ptr()
            own[path] = x.to("cpu", copy=copy or pointer in taken, memory_format=torch.contiguous_format).contiguous()
            taken.add(pointer)
    return own


def _staged(x: Tensor, stage: Tensor) -> Tensor:
    """A copy of `x` on the host by way of a piece of pinned memory [N] uint8.

    All of it pinned would take up to twice the bytes of a state, for good: torch rounds such memory up to powers of
    two, and keeps it.
    """
    copy = torch.empty(x.shape, dtype=x.dtype)
    source, target, room = x.reshape(-1), copy.view(-1), stage.view(x.dtype)
    for start in range(0, len(source), len(room)):
        piece = source[start : start + len(room)]
        target[start : start + len(room)].copy_(room[: len(piece)].copy_(piece))
    return copy
