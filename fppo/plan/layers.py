"""From few layers to many: where all layers are alike, what each place of a pass holds is linear in their number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fppo.models.model import Model
from fppo.plan.values import Cost, Phase, Segment

FEW, MORE = 4, 5  # two at either end differ from those between: their neighbours are gathered otherwise


def alike(model: Model) -> bool:
    """Whether all layers have the same shapes and the same kind of attention."""
    kinds = {str(kind) for kind in getattr(model.config, "layer_types", None) or ()}
    starts = [f"{model.prefix}{path}." for path in model.layers]
    shapes = [{n[len(s) :]: x for n, x in model.shapes.items() if n.startswith(s)} for s in starts]
    return len(kinds) <= 1 and all(each == shapes[0] for each in shapes)


def extrapolated(few: Sequence[Phase], more: Sequence[Phase], layers: int) -> list[Phase] | None:
    """The phases of a model of `layers` layers, from those of models of FEW and of MORE.

    Of the segments only those near the first and the last layer are there: between them lies no peak, as what is held
    rises or falls evenly from layer to layer. None if the phases do not match.
    """
    if [p.name for p in few] != [p.name for p in more]:
        return None
    phases = []
    for a, b in zip(few, more, strict=True):
        extra = (len(b.segments) - len(a.segments)) / (MORE - FEW)
        if extra != int(extra) or extra < 0:
            return None
        half = (len(a.segments) + 1) // 2
        rest = len(a.segments) - half
        pairs = [*zip(a.segments[:half], b.segments[:half], strict=True)]
        if rest:
            pairs += zip(a.segments[-rest:], b.segments[-rest:], strict=True)
        segments = tuple(Segment(_linear(x.peak, y.peak, layers)) for x, y in pairs)
        phases.append(Phase(a.name, segments, _cost(a.cost, b.cost, layers), _linear(a.start, b.start, layers)))
    return phases


def _cost(few: Cost, more: Cost, layers: int) -> Cost:
    return Cost(*(Counter(_linear(getattr(few, n), getattr(more, n), layers)) for n in Cost.__match_args__))


def _linear(few: Mapping[Any, float], more: Mapping[Any, float], layers: int) -> dict[Any, float]:
    values = {}
    for key in dict.fromkeys([*few, *more]):
        a, b = few.get(key, 0), more.get(key, 0)
        values[key] = a + (b - a) * (layers - FEW) / (MORE - FEW)
    return values
