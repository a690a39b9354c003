"""Shapes for annotations: b rows, t positions of a response, s positions of a row; sizes are this rank's."""

from __future__ import annotations

from torch import Tensor

from fppo_kernels.shapes import Bool, Float, Int

Tokens = Float[Tensor, "b t"]
Outputs = Float[Tensor, "b t k"]  # the k numbers of a value head
Mask = Bool[Tensor, "b t"]
Rows = Float[Tensor, " b"]
RowIds = Int[Tensor, " b"]
Number = Float[Tensor, ""]
Scalar = float | Number  # as a tensor, so that a function can be vmapped over it
