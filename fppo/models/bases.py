"""Quantised bases of adapters: models whose linear layers are codes of 8 or 4 bits, the same on every mesh."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from fppo.models.codes import is_coded, layout_in_codes, names_in_codes
from fppo.models.lora import linear_weights
from fppo.models.model import Model, Params
from fppo.models.place import prepare
from fppo.models.quantised import CODES, SCALES, Form, Kind, library_needed, quantised_weight
from fppo.runtime import fsdp
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import LOCAL, Mesh


def quantised_weights(model: Model) -> dict[str, bool]:
    """The weights of a plain model to be quantised (linear layers and stacks of experts, as in "all-linear", without
    those that transformers keeps in float32), and whether each is stored [..., in, out]. Raises ValueError for a model
    without any."""
    wide = frozenset[str]().union(*model.float32_params.values())
    linear = {name: turned for name, turned in linear_weights(model.unplaced or model).items() if name not in wide}
    if not linear:
        raise ValueError(f"model.lora.base: model type {model.config.model_type!r} has no linear layer to quantise")
    return linear


def in_codes(model: Model, kind: Kind, dtype: torch.dtype) -> Model:
    """The model of `quantise` without parameters: a plain model, placed or not, whose linear layers and stacks of
    experts are stored as codes ("int8", "nf4") of weights in `dtype`.

    Raises ValueError for a model without linear layers, and, naming weights and sizes, for a tensor axis that would
    cut a block with one scale.
    """
    return _in_codes(model, _forms(model, kind, dtype), kind)


def check_cuts(model: Model, kind: Kind, mesh: Mesh) -> None:
    """Raise ValueError if a mesh of these sizes would cut the weights of a plain model within blocks of codes."""
    layout = prepare(model, mesh).layout(mesh)
    if layout is not None:
        layout_in_codes(layout, _forms(model, kind, torch.float32))


def _forms(model: Model, kind: Kind, dtype: torch.dtype) -> dict[str, Form]:
    whole = (model.unplaced or model).shapes
    return {name: Form(kind, whole[name], dtype, turned) for name, turned in quantised_weights(model).items()}


def _in_codes(model: Model, forms: Mapping[str, Form], kind: Kind) -> Model:
    try:
        layout = layout_in_codes(model.layout or Layout(model.shapes, {}, frozenset(), 0, 1), forms)
    except ValueError as error:
        raise ValueError(f"model.lora.base = {kind!r}: {error}") from error
    return attrs.evolve(
        model,
        shapes=layout.shapes,
        layout=model.layout and layout,
        spans=tuple(attrs.evolve(span, names=names_in_codes(span.names, forms)) for span in model.spans),
        unplaced=model.unplaced and _in_codes(model.unplaced, forms, kind),
        forms=forms,
    )


def quantise(
    model: Model,
    params: Mapping[str, Tensor],
    kind: Kind,
    *,
    mesh: Mesh = LOCAL,
    device: torch.device | None = None,
) -> tuple[Model, Params]:
    """Quantise the linear layers and stacks of experts of a plain model to 8 or 4 bits ("int8", "nf4"), as a base for
    `adapt`: the model and its parameters; embeddings, heads, norms and biases stay.

    On a mesh that cuts parameters, model and parameters are this rank's, as from `place`, and the codes those of whole
    weights: every rank must call, and collectives run on `device`, by default the parameters'. Raises ValueError
    without bitsandbytes, for numbers without codes (inf, nan), and as `in_codes` does.
    """
    library_needed(kind)
    dtypes = {name: x.dtype for name, x in params.items()}
    placed = in_codes(model, kind, next(iter(dtypes.values())))
    forms = {name: attrs.evolve(form, dtype=dtypes.get(name, form.dtype)) for name, form in placed.forms.items()}
    placed, made = attrs.evolve(placed, forms=forms), dict[str, Tensor]()
    for name, x in params.items():
        if name not in forms:
            made[name] = x
            continue
        try:
            made[name + CODES], made[name + SCALES] = _own_codes(placed, model, name, x, mesh, device)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return placed, {name: made[name] for name in placed.shapes}


def _own_codes(
    placed: Model, model: Model, name: str, weight: Tensor, mesh: Mesh, device: torch.device | None
) -> tuple[Tensor, Tensor]:
    """This rank's codes and scales of a weight, from its part and on the part's device. Weights are gathered first
    where rows or blocks with one scale are spread over ranks."""
    form, own, kept = placed.forms[name], weight.device, (name + CODES, name + SCALES)
    cut = [each for each in kept if placed.layout is not None and each in placed.layout.cuts]
    split = mesh.sharded and len(form.shape) == 2 and (form.turned or not form.by_rows)
    apart = len(cut) == 1  # each rank has some columns of rows with one scale
    if split:
        weight = fsdp.gather({name: weight.to(device or own)}, model.shapes, mesh, cuts=model.cuts)[name]
    if apart and model.layout is not None:
        weight = model.layout.gather(name, weight.to(device or own), mesh.__getitem__)
    stored = quantised_weight(weight.to(own), form.kind, turned=form.turned).stored
    parts = dict(zip(kept, (stored.codes, stored.scales), strict=True))
    if apart and placed.layout is not None:
        parts = {each: placed.layout.take(each, x) for each, x in parts.items()}
    parts = fsdp.shard(parts, mesh, placed.cuts) if split else parts
    codes, scales = (parts[each].contiguous() for each in kept)
    return codes, scales


def base_kind(model: Model) -> Kind | None:
    """The code ("int8", "nf4") of a model's linear layers; None for a plain one."""
    return next((form.kind for form in model.forms.values()), None)


def widened(model: Model, device: torch.device | None = None) -> Model:
    """Convert an adapted model's base to float32, as exports need it, and move it to `device` if one is given."""
    if model.frozen is None:
        return model
    base = {name: x.to(device or x.device) for name, x in model.frozen.params.items()}
    wide = {name: x if is_coded(name) else x.float() for name, x in base.items()}
    forms = {name: attrs.evolve(form, dtype=torch.float32) for name, form in model.forms.items()}
    return attrs.evolve(model, frozen=attrs.evolve(model.frozen, params=wide), forms=forms)
