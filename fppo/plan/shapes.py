"""Which numbers of a case's models a rank has."""

from __future__ import annotations

from fppo.models.model import is_trained
from fppo.plan import passes
from fppo.plan.built import Built
from fppo.plan.case import Case
from fppo.runtime import fsdp


def shard_shapes(case: Case, name: str, built: Built) -> dict[str, tuple[int, ...]]:
    """What the rank with most of a model has of each trained parameter."""
    every, model = every_shape(case, name, built), built.model(case, name)
    return every if model.frozen is None else {name: shape for name, shape in every.items() if is_trained(name)}


def every_shape(case: Case, name: str, built: Built) -> dict[str, tuple[int, ...]]:
    """What it has of each parameter, and of the weights of a base."""
    mesh = passes.mesh_of(case, lambda *_: None)
    layout = built.layout(case, name, mesh)
    shapes = built.model(case, name).all_shapes if layout is None else layout.shapes
    return fsdp.shard_shapes(shapes, mesh, {} if layout is None else layout.cuts)
