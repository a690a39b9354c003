"""Low-rank adapters as trees (arXiv:2106.09685): a frozen base, and trained factors of its weights.

    model, adapter = adapt(model, params, Lora(rank=8, alpha=16.0), key=Key(0))

A weight W [..., out, in] (or [..., in, out]: GPT-2, GPT-OSS's experts) has A [..., r, in] and B [..., out, r], named
W.lora_A and W.lora_B. The adapter is the parameters of the train state; the base is a field of the model.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping

import attrs
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fppo import tree
from fppo._errors import nearest
from fppo.key import Key
from fppo.models import probe as probes
from fppo.models.adapted import FACTORS, Frozen, Lora, Parts, merged_weight
from fppo.models.codes import (
    is_coded,
    layout_in_codes,
    layout_of_weights,
    names_of_weights,
    shapes_of_weights,
    values,
    weight_of,
)
from fppo.models.heads import VOCABULARY_HEADS, embedding_name
from fppo.models.model import Model, Params, is_trained
from fppo.models.place import own_params
from fppo.models.quantised import CODES, SCALES, plain
from fppo.models.routing import RouterSeam
from fppo.runtime import digests, fsdp
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import LOCAL, Mesh, device_of

__all__ = [
    "Lora",
    "adapt",
    "base_of",
    "check_adapted",
    "linear_weights",
    "merged",
    "places_of",
    "same_base",
]

ALL_LINEAR = "all-linear"
_NAMED = 20  # weights that an error lists at most


def linear_weights(model: Model) -> dict[str, bool]:
    """The weights of "all-linear", and whether each is stored [in, out]: linear layers and stacks of experts inside the
    model, without routers and without a vision tower that is not trained."""
    modules = dict(model.skeleton.named_modules())
    routers = tuple(f"{path}." for path, module in modules.items() if isinstance(module, RouterSeam))
    flips: dict[str, bool] = {}
    for path, module in modules.items():
        if f"{path}.".startswith(routers):
            continue
        if isinstance(module, (nn.Linear, Conv1D)):
            flips[f"{model.prefix}{path}.weight"] = isinstance(module, Conv1D)
        elif type(module).__name__.endswith("Experts"):
            stacks = [name for name, x in module._parameters.items() if x is not None and x.dim() == 3]
            flipped = bool(getattr(module, "is_transposed", False))
            flips |= {f"{model.prefix}{path}.{name}": flipped for name in stacks}
    weights = set(names_of_weights(model.shapes))
    return {name: flip for name, flip in flips.items() if name in weights and name not in model.untrained_params}


def places_of(model: Model, targets: tuple[str, ...], exclude: tuple[str, ...] = ()) -> dict[str, bool]:
    """The weights of a plain model that match the targets and no name in `exclude`, and whether each is stored
    [in, out].

    Raises ValueError that names the targets without a match, and names in `exclude` that match no target's weight. A
    value model ignores the name of a vocabulary head.
    """
    linear = linear_weights(model)
    others = [embedding_name(model), *(name for name in VOCABULARY_HEADS if name in model.shapes)]
    known = linear | dict.fromkeys(others, False)
    absent = VOCABULARY_HEADS if model.head == "value" else ()
    missed = [t for t in targets if t != ALL_LINEAR and not any(_names(t, n) for n in (*known, *absent))]
    if missed:
        listed = sorted(known)
        more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
        raise ValueError(f"targets {missed} name no weight that can be adapted; there are {listed[:_NAMED]}{more}")
    chosen = {
        name: flipped
        for name, flipped in known.items()
        if any(name in linear if target == ALL_LINEAR else _names(target, name) for target in targets)
    }
    if idle := [each for each in exclude if not any(_names(each, name) for name in (*chosen, *absent))]:
        paths = [name.removesuffix(".weight") for name in chosen]
        ends = dict.fromkeys(path.rpartition(".")[2] for path in paths)
        near = nearest(idle[0], [*ends, *paths])
        hint = f"; did you mean {near!r}?" if near else f"; their names end in {sorted(ends)}"
        raise ValueError(f"exclude {idle} names no weight that targets name{hint}")
    return {name: flipped for name, flipped in chosen.items() if not any(_names(each, name) for each in exclude)}


def _names(target: str, name: str) -> bool:
    path = name.removesuffix(".weight")
    return path == target or path.endswith(f".{target}") or fnmatch.fnmatchcase(path, target)


def adapt(
    model: Model,
    params: Mapping[str, Tensor],
    lora: Lora,
    *,
    key: Key,
    dtype: torch.dtype = torch.float32,
    mesh: Mesh = LOCAL,
) -> tuple[Model, Params]:
    """Adapt a model: `params` become its frozen base, not copied, with a fresh adapter, A drawn as by PEFT, B zero.
    Model and parameters are plain, or from `quantise`.

    A value head is trained whole, besides the factors. On a mesh that cuts parameters, pass this rank's model and
    parameters (`place`); every rank must call. Raises ValueError for targets that match nothing, or nothing in some
    layers of a pipeline, and for a model that is adapted already.
    """
    shaped = without_base(model, lora)
    frozen, head = frozen_of(shaped), {name: params[name] for name in params if is_trained(name)}
    # no copies: if they are donated elsewhere, this base becomes empty, not overwritten
    base = {name: x.detach() if x.requires_grad else x for name, x in params.items() if name not in head}
    factors: Params = {}
    for name in frozen.places.keys() & set(names_of_weights(frozen.shapes)):  # on a pipeline this rank's
        a, b = (shaped.whole_shapes[name + factor] for factor in FACTORS)
        generator = key.fold("lora", name).generator()
        drawn = torch.rand(a, generator=generator, dtype=torch.float64) * 2 - 1
        factors[f"{name}.lora_A"] = drawn.div(math.sqrt(a[-1])).to(dtype)  # kaiming_uniform, a = sqrt(5)
        factors[f"{name}.lora_B"] = torch.zeros(b, dtype=dtype)
    frozen = attrs.evolve(frozen, params=base, digest=_digest(shaped, base, mesh))
    device, own = device_of(base), own_params(shaped, factors, mesh) | head
    return attrs.evolve(shaped, frozen=frozen), {name: own[name].to(device) for name in shaped.shapes}


def without_base(model: Model, lora: Lora) -> Model:
    """An adapted model whose base has shapes without tensors. Raises ValueError as `adapt` does, and for a rank above
    those of all weights."""
    if model.frozen is not None:
        raise ValueError("the model is adapted already: merge it first, and adapt the plain model")
    whole = model.unplaced or model
    places = places_of(whole, lora.targets, lora.exclude)
    if not places and lora.exclude:
        raise ValueError(f"exclude {list(lora.exclude)} leaves none of the weights that targets name")
    if not places:
        raise ValueError(f"model type {model.config.model_type!r} has no linear layer to adapt: name other targets")
    if model.spans and (bare := set(range(len(model.layers))) - {model.layer_of(name) for name in places}):
        raise ValueError(
            f"adapters on a pipeline axis: targets {list(lora.targets)} name nothing in layers {sorted(bare)}, and "
            "every stage needs something to train: name weights of all layers"
        )
    shapes = model.plain.whole_shapes
    most = max(min(shapes[name][-2:]) for name in places if name in shapes)
    if lora.rank > most:
        raise ValueError(f"rank={lora.rank}: no weight that is adapted has a rank above {most}; give at most that")
    layout = layout_of_weights(model.layout or Layout(model.shapes, {}, frozenset(), 0, 1), model.forms)
    layout = layout_in_codes(with_factors(layout, places, lora.rank), model.forms)
    shapes = layout.shapes
    own = {name: shape for name, shape in shapes.items() if name.endswith(FACTORS)}
    own |= {name: shape for name, shape in shapes.items() if name not in own and is_trained(name)}
    base = {name: shape for name, shape in shapes.items() if name not in own}
    frozen = Frozen(params={}, shapes=base, digest="", lora=lora, places=places)
    own_of = [[n + x for n in names_of_weights(span.names) if n in places for x in FACTORS] for span in model.spans]
    return attrs.evolve(
        model,
        shapes=own,
        layout=model.layout and layout,
        spans=tuple(attrs.evolve(x, names=(*x.names, *new)) for x, new in zip(model.spans, own_of, strict=True)),
        unplaced=model.unplaced and without_base(model.unplaced, lora),
        frozen=frozen,
    )


def _factors(
    shapes: Mapping[str, torch.Size], name: str, places: Mapping[str, bool], rank: int
) -> tuple[tuple[str, torch.Size], ...]:
    """The names and shapes of a weight's factors A and B, of this rank. `places` says of each adapted weight whether it
    is stored transposed, [..., in, out]."""
    *stack, rows, columns = shapes[name]
    wide, out = (rows, columns) if places[name] else (columns, rows)
    return (f"{name}.lora_A", torch.Size((*stack, rank, wide))), (f"{name}.lora_B", torch.Size((*stack, out, rank)))


def with_factors(layout: Layout, places: Mapping[str, bool], rank: int) -> Layout:
    """A layout with factors A [rank, in] and B [out, rank] of the weights W that `places` names, with True for those
    stored as [in, out]: a cut of W along inputs cuts A, along outputs B, along experts both. Uncut factors are whole on
    every rank of the mesh, each with a share of the gradient."""
    whole, cuts, stages = dict(layout.whole), dict(layout.cuts), dict(layout.stages)
    for name, flipped in places.items():
        cut, (wide, out) = cuts.get(name), (-2, -1) if flipped else (-1, -2)
        for (factor, shape), dim, own in zip(
            _factors(layout.whole, name, places, rank), (wide, out), (-1, -2), strict=True
        ):
            whole[factor] = shape
            if layout.stages:
                stages[factor] = layout.stages[name]
            if cut is not None and cut.dim in (len(shape) + dim, *range(len(shape) - 2)):
                cuts[factor] = cut if cut.dim < len(shape) - 2 else attrs.evolve(cut, dim=len(shape) + own)
    return attrs.evolve(layout, whole=whole, cuts=cuts, stages=stages)


def _digest(model: Model, base: Params, mesh: Mesh) -> str:
    layout = model.layout
    whole = frozen_of(model).shapes if layout is None else {n: layout.extent(n) for n in layout.whole}
    paths = {f"[{name!r}]": extent for name, extent in whole.items()}
    return tree.combine(digests.digest(base, "sums", device=device_of(base), mesh=mesh, shapes=paths))


def same_base(model: Model, other: Model) -> bool:
    """Whether the base weights that two adapted models both have are the same tensors."""
    one, two = frozen_of(model).params, frozen_of(other).params
    return all(one[name] is two[name] for name in one.keys() & two.keys())


def frozen_of(model: Model) -> Frozen:
    """The frozen base of an adapted model. Raises ValueError for a plain one."""
    if model.frozen is None:
        raise ValueError("the model has no adapter: `adapt` it first")
    return model.frozen


def base_of(model: Model) -> Model:
    """The base as a model with frozen parameters alone, to be called with {}; it takes no further memory."""
    frozen, layout = attrs.evolve(frozen_of(model), places={}), model.layout
    layout = layout and layout.only(lambda name: not name.endswith(FACTORS))
    return attrs.evolve(model, shapes={}, layout=layout, frozen=frozen)


@torch.no_grad()
def merged(model: Model, adapter: Mapping[str, Tensor], *, mesh: Mesh = LOCAL) -> Params:
    """Merge an adapter into its base: the plain model's parameters W + scale * B @ A, summed in float32 or wider, in
    the dtypes of the base, dequantised if quantised. Weights without factors or codes are not copied.

    On a mesh that cuts parameters they are this rank's parts, like the adapter's, and every rank must call. Raises
    ValueError for a model without an adapter.
    """
    frozen = frozen_of(model)
    factors = {name: x for name, x in adapter.items() if name.endswith(FACTORS)}
    whole = fsdp.gather(factors, model.shapes, mesh, cuts=model.cuts)
    wide = functools.reduce(torch.promote_types, (x.dtype for x in factors.values()), torch.float32)
    params = base_weights(model, mesh=mesh, dtype=wide) | {n: x for n, x in adapter.items() if n not in factors}
    for name, flipped in frozen.places.items():
        if name not in params:  # another stage's
            continue
        a, b = (whole[name + factor] for factor in FACTORS)
        if mesh.sharded:
            rows = shapes_of_weights(frozen.shapes, model.forms, model.layout)[name][0]
            a, b = _rows(a, b, flipped, slice(*fsdp.bounds(rows, mesh.shard_axis(model.cuts.get(name)))))
        params[name] = merged_weight(Parts(params[name], a, b, frozen.lora.scale, flipped))
    return {name: x.to(model.forms[name].dtype) if name in model.forms else x for name, x in params.items()}


@torch.no_grad()
def base_weights(model: Model, *, mesh: Mesh = LOCAL, dtype: torch.dtype | None = None) -> Params:
    """The base of an adapted model as plain parameters, dequantised into its dtype or another. On a mesh that cuts
    parameters they are this rank's parts, and every rank must call."""
    frozen, made = frozen_of(model), dict[str, Tensor]()
    for name, x in frozen.params.items():
        if not is_coded(name):
            made[name] = x
        elif name.endswith(CODES):  # rows of codes may not be rows of the weight
            kept = {own: frozen.params[own] for own in (name, weight_of(name) + SCALES)}
            whole = values(fsdp.gather(kept, frozen.shapes, mesh, cuts=model.cuts), model.forms, dtype)
            made |= fsdp.shard({weight: plain(value) for weight, value in whole.items()}, mesh, model.cuts)
    return made


def decodes_merged(model: Model) -> bool:
    """True if an adapted model is merged for decoding: if its base is not quantised, which would be copied dequantised,
    and passes are in float32 or wider. In 16 bits the sum rounds away changes below about 1/256 of a weight."""
    return not model.forms and model.compute_dtype in (None, torch.float32, torch.float64)


def decoded(
    model: Model, params: Mapping[str, Tensor], *, mesh: Mesh = LOCAL, merges: bool | None = None
) -> tuple[Model, Params]:
    """Model and parameters for decoding an adapted model: with `merges` (None: `decodes_merged`) the factors merged,
    else separate from the base. A plain model is returned as it is."""
    if model.frozen is None:
        return model, dict(params)
    if decodes_merged(model) if merges is None else merges:
        return model.plain, merged(model, params, mesh=mesh)
    return model, model.joined(params)


def kept(model: Model) -> frozenset[str]:
    """The names of the base weights that have no LoRA factors and so never change; empty for a model without LoRA."""
    frozen = model.frozen
    return frozenset() if frozen is None else frozenset(names_of_weights(frozen.shapes)) - frozen.places.keys()


def _rows(a: Tensor, b: Tensor, flipped: bool, rows: slice) -> tuple[Tensor, Tensor]:
    """Cut factors A and B to some `rows` of their weight, [in, out] if `flipped`; of a stack, to these experts."""
    if a.dim() == 3:
        return a[rows], b[rows]
    return (a[:, rows], b) if flipped else (a, b[rows])


def adapted_probe(
    model: Model,
    probe: probes.Probe,
    lora: Lora,
    *,
    dtype: torch.dtype = torch.float32,
    as_base: Callable[[Model, Params], tuple[Model, Params]] | None = None,
) -> tuple[Model, Params]:
    """The probe's model with a low-rank adapter of nonzero factors on the targets of `lora`. Its base is the probe's
    weights in `dtype`, or what `as_base` makes of them."""
    small, params = probe.model, {name: x.to(dtype, copy=True) for name, x in probe.params.items()}
    if model.vision is not None and small.vision is not None:
        small = attrs.evolve(small, vision=attrs.evolve(small.vision, trains=model.vision.trains))
    targets = tuple(t for t in lora.targets if t == ALL_LINEAR or any(_names(t, n) for n in small.shapes))
    targets = targets or (ALL_LINEAR,)
    exclude = tuple(e for e in lora.exclude if any(_names(e, name) for name in places_of(small, targets)))
    spec = Lora(2, 4.0, targets, exclude=exclude if places_of(small, targets, exclude) else ())
    small, params = (small, params) if as_base is None else as_base(small, params)
    adapted, adapter = adapt(small, params, spec, key=Key(0), dtype=dtype)
    return adapted, {n: x + 0.1 * torch.cos(torch.arange(x.numel())).view(x.shape) for n, x in adapter.items()}


@torch.no_grad()
def check_adapted(model: Model, lora: Lora) -> None:
    """Compare factored products with merged weights on a small random instance of a plain model's architecture.

    Raises ValueError that names the model type if hidden states differ, or if its code uses an adapted weight in an
    unsupported way.
    """
    kind, probe = model.whole_config.model_type, probes.make_probe(model.unplaced or model)
    rows = probes.probe_rows(probe)
    inputs = [probe.inputs_of(row) for row in rows]
    adapted, adapter = adapted_probe(model, probe, lora, dtype=torch.float64)
    try:
        got = probes.packed_hidden(adapted, adapter, rows, inputs=inputs)
    except Exception as error:  # a class may raise any exception
        raise ValueError(f"fppo cannot adapt model type {kind!r}: {type(error).__name__}: {error}") from error
    expected = probes.packed_hidden(adapted.plain, merged(adapted, adapter), rows, inputs=inputs)
    if (wrong := probes.difference(got, expected)) is not None:
        raise ValueError(
            f"fppo cannot adapt model type {kind!r}: with factors, a small random model of this kind gives hidden "
            f"states that differ by {wrong:.2g} from those with merged weights"
        )
