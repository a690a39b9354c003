"""The images of rows in a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from fppo import models
from fppo.batch import Column
from fppo.models.model import Model
from fppo.models.vision_pass import Images, place_images
from fppo.runtime.mesh import Mesh
from fppo_kernels.padding import Places

_CUTTING = ("sequence", "context", "tensor", "expert", "pipeline")


class _Rows(Protocol):
    @property
    def tokens(self) -> Tensor: ...
    @property
    def attention_mask(self) -> Tensor: ...


def check_axes(model: Model, mesh: Mesh) -> None:
    """Raises ValueError for a model that takes images on an axis that cuts rows or layers, and for one whose layers
    carry states on an axis that cuts rows or heads."""
    models.check_rows_whole(model.whole_config, {name: axis.size for name, axis in mesh.axes.items()})
    axes = ", ".join(f"{name} {mesh[name].size}" for name in _CUTTING if mesh[name].size > 1)
    if model.vision is not None and axes:
        raise ValueError(
            f"model type {model.whole_config.model_type!r} takes images, and fppo cannot cut rows or layers of such a "
            f"model yet (axes: {axes}): give the ranks to replicate and shard"
        )


def packed_images(
    rows: _Rows, model: Model, tokens: Tensor, positions: Tensor, lengths: Sequence[int]
) -> tuple[Images | None, Tensor]:
    """The images in the packed row [N] of `rows` of these `lengths` [B], and the positions of its tokens, [N] or
    [3, N]."""
    inputs: Column | None = getattr(rows, "inputs", None)
    if inputs is None:
        return None, positions
    return place_images(model, inputs, tokens, positions, lengths)


def padded_images(rows: _Rows, model: Model, positions: Tensor, real: Places) -> tuple[Images | None, Tensor]:
    """The images in padded rows, whose tokens are at `real` places, and the positions of their tokens; `positions` are
    [B, S], the result may be [3, B, S]."""
    if getattr(rows, "inputs", None) is None:
        return None, positions
    index, sizes, _ = real
    images, own = packed_images(rows, model, rows.tokens.flatten()[index], positions.flatten()[index], sizes)
    if images is None:
        return None, positions
    whole = positions.flatten().expand(*own.shape[:-1], -1).clone()
    whole[..., index] = own
    return images._replace(places=index[images.places]), whole.unflatten(-1, positions.shape)
