"""Several adapters of one base in one pass, in which each row uses its own adapter.

All rows share one product with a base weight; each adapter then adds its scale * B @ A to its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from fppo.models.adapted import FACTORS, Adapted, Factors, Several, add_own_
from fppo.models.codes import shapes_of_weights
from fppo.models.heads import vocabulary_head
from fppo.models.lora import frozen_of
from fppo.models.model import Model, Params, pass_dtype
from fppo.models.run import Bound


@attrs.frozen(eq=False)
class Adapter:
    """A low-rank adapter without its base: the `factors` by weight name, whether each weight is stored [in, out]
    (`flipped`), and, for passes, the factors of the vocabulary `head`."""

    factors: Mapping[str, Factors]
    flipped: Mapping[str, bool]
    head: Factors | None = None

    @staticmethod
    def of(model: Model, params: Mapping[str, Tensor]) -> Adapter:
        """The adapter in the parameters of an adapted model. Raises ValueError for a plain model."""
        if model.frozen is None:
            raise ValueError("the model has no adapter: `adapt` it first")
        scale, places = model.frozen.lora.scale, model.frozen.places
        pairs = {name: [params[name + factor].detach() for factor in FACTORS] for name in places}
        return Adapter({name: Factors(a, b, scale) for name, (a, b) in pairs.items()}, places)


class OwnRows(NamedTuple):
    """An adapter, and the `rows` of a pass that use it: a slice, or their indices, int64 [R]."""

    adapter: Adapter
    rows: slice | Tensor  # or int64 [R]


def trained_beside(model: Model, params: Params, owned: Sequence[tuple[Model, Params, slice | Tensor]]) -> Params:
    """The parameters of a plain model with several adapters that train, for one pass: each an adapted model of the
    same base, its factors, and the `rows` of the pass that use them (a slice, or their indices, int64 [R]).

    A tied or adapted vocabulary head is not among them: it is that of each adapted model (`output_head`).
    """
    tensors = dict(params)
    for name in {name for adapted, _, _ in owned for name in frozen_of(adapted).places}:
        own, flipped = list[tuple[slice | Tensor, Factors]](), False
        for adapted, factors, rows in owned:
            frozen = frozen_of(adapted)
            if name in frozen.places:
                kind, flipped = pass_dtype(model, name, params[name].dtype), frozen.places[name]
                a, b = (factors[name + factor].to(kind) for factor in FACTORS)
                own.append((rows, Factors(a, b, frozen.lora.scale)))
        tensors[name] = Adapted.of(Several(params[name], own, flipped))
    return tensors


def fitted(model: Model, adapter: Adapter, name: str, device: torch.device, head: torch.dtype) -> Adapter:
    """A copy of an adapter for passes of a plain model: on a device, in the compute dtype, and the factors of the
    vocabulary head in the dtype `head`.

    Raises ValueError, which gives the adapter's `name`, for one that does not fit, for a model that is adapted, placed
    or carries states, and for weights whose rows are not those of the pass: stacks of experts and a vision tower's.
    """
    what = f"adapter {name!r}"
    if model.frozen is not None:
        raise ValueError(f"{what}: the engine's model is adapted itself; give the engine the plain base")
    if model.layout is not None or model.spans:
        raise ValueError(f"{what}: adapters side by side run on one rank, not on parts of a model; merge the adapter")
    if model.stateful:
        raise ValueError(f"{what}: model type {model.config.model_type!r} carries states; merge the adapter")
    shapes = shapes_of_weights(model.shapes, model.forms, model.layout)
    unknown = sorted(adapter.factors.keys() - shapes.keys())
    if unknown:
        raise ValueError(f"{what}: the engine's model has no weights {unknown[:5]}: it is an adapter of another base")
    apart = sorted(n for n in adapter.factors if len(shapes[n]) != 2 or n in model.vision_params)
    if apart:
        raise ValueError(
            f"{what}: weights {apart[:5]} are of experts or of a vision tower, whose rows are not those of the pass; "
            "leave them out of the adapter's targets, or merge the adapter"
        )
    for own, (a, b, _) in adapter.factors.items():
        out, wide = reversed(shapes[own]) if adapter.flipped[own] else shapes[own]
        if a.shape[1:] != (wide,) or b.shape != (out, len(a)):
            raise ValueError(
                f"{what}: factors {[*a.shape]} and {[*b.shape]} of {own} do not fit a weight {[*shapes[own]]}"
            )
    factors = {n: _copied(x, device, pass_dtype(model, n, x.a.dtype)) for n, x in adapter.factors.items()}
    last = adapter.factors.get(vocabulary_head(model)[0])
    return Adapter(factors, adapter.flipped, None if last is None else _copied(last, device, head))


def _copied(factors: Factors, device: torch.device, dtype: torch.dtype) -> Factors:
    a, b = (x.detach().to(device, dtype, copy=True) for x in (factors.a, factors.b))
    return Factors(a, b, factors.scale)


def beside(bound: Bound, owned: Sequence[OwnRows]) -> Bound:
    """Extend a model's weights by several adapters, each with the rows of a pass that use it (`owned`); other rows use
    the base alone."""
    if not owned:
        return bound
    tensors, start = dict(bound.tensors), len(bound.model.prefix)
    names = {name for one in owned for name in one.adapter.factors if name.startswith(bound.model.prefix)}
    for name in names:
        key = f"skeleton.{name[start:]}"
        adapters = [one for one in owned if name in one.adapter.factors]
        own = [(one.rows, one.adapter.factors[name]) for one in adapters]
        tensors[key] = Adapted.of(Several(tensors[key], own, adapters[0].adapter.flipped[name]))
    return attrs.evolve(bound, tensors=tensors)


def with_own_head(product: Callable[..., Tensor], owned: Sequence[OwnRows]) -> Callable[..., Tensor]:
    """Extend `product`, of hidden states [N, H] and the vocabulary head, by the change that each adapter makes for the
    rows that use it (`owned`)."""
    own = [(one.rows, one.adapter.head) for one in owned if one.adapter.head is not None]
    if not own:
        return product

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = product(x, weight, bias)
        return add_own_(out, x.to(out.dtype), own)

    return call
