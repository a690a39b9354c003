"""Names, shapes and layouts of quantised weights: a weight `W` is stored as `W.codes` and `W.scales`, which are cut,
gathered, sent and digested like any other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import Tensor

from fppo.models.quantised import BLOCK, CODES, SCALES, Form
from fppo.runtime.layout import Cut, Layout

Forms = Mapping[str, Form]
_NAMED = 3  # weights that an error lists at most


def weight_of(name: str) -> str:
    """The name of the weight behind a parameter: its own name, or that of the weight whose codes or scales it is."""
    return name.removesuffix(CODES).removesuffix(SCALES)


def is_coded(name: str) -> bool:
    """Whether a parameter is codes or scales of a weight; passes do not cast them."""
    return name.endswith((CODES, SCALES))


def names_in_codes(names: Iterable[str], forms: Forms) -> tuple[str, ...]:
    """The names under which weights are stored: a weight's own or, if it is in `forms`, those of codes and scales."""
    return tuple(kept for name in names for kept in ((name + CODES, name + SCALES) if name in forms else (name,)))


def names_of_weights(names: Iterable[str]) -> tuple[str, ...]:
    """The names of the weights stored under these names."""
    return tuple(dict.fromkeys(weight_of(name) for name in names))


def shapes_of_weights(
    shapes: Mapping[str, torch.Size], forms: Forms, layout: Layout | None = None
) -> Mapping[str, torch.Size]:
    """The shapes of weights from the stored `shapes`: whole, or of this rank's parts in a layout."""
    if not forms:
        return shapes
    parts = None if layout is None else layout_of_weights(layout, forms)
    own = {name: form.shape if parts is None else parts.shape(name) for name, form in forms.items()}
    return {name: own[name] if name in own else shapes[name] for name in names_of_weights(shapes)}


def layout_in_codes(layout: Layout, forms: Forms) -> Layout:
    """The layout of codes and scales for a layout of weights in these `forms`: cut like these, so that codes equal the
    whole weight's.

    Raises ValueError that names weights that the tensor axis would cut within a block with one scale.
    """
    whole, cuts, stages, wrong = dict[str, torch.Size](), dict(layout.cuts), dict(layout.stages), list[str]()
    for name, shape in layout.whole.items():
        form = forms.get(name)
        if form is None:
            whole[name] = shape
            continue
        kept = (name + CODES, name + SCALES)
        whole |= dict(zip(kept, form.shapes, strict=True))
        if name in stages:
            stages |= dict.fromkeys(kept, stages.pop(name))
        if (cut := layout.cuts.get(name)) is not None:
            try:
                of_both = zip(kept, _cuts(form, cut), strict=True)
                cuts |= {each: own for each, own in of_both if own is not None}
            except ValueError as error:
                wrong.append(f"{name} {error}")
    if wrong:
        more = f", and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise ValueError(
            f"a tensor axis of {layout.ranks} ranks does not go with nf4: {'; '.join(wrong[:_NAMED])}{more}"
        )
    return attrs.evolve(layout, whole=whole, cuts=cuts, stages=stages)


def layout_of_weights(layout: Layout, forms: Forms) -> Layout:
    """The layout of weights for a layout of codes and scales: the inverse of `layout_in_codes`."""
    named = {weight_of(name): name for name in layout.whole}
    whole = {name: forms[name].shape if name in forms else layout.whole[name] for name in named}
    kept = {name: cut for name, cut in layout.cuts.items() if not is_coded(name)}
    stages = {name: layout.stages[own] for name, own in named.items()} if layout.stages else {}
    return attrs.evolve(layout, whole=whole, cuts=kept, stages=stages)


def _cuts(form: Form, cut: Cut) -> tuple[Cut, Cut | None]:
    """The cuts of a weight's codes and of its scales (None: whole) that follow from a cut of the weight. Raises
    ValueError for cuts within blocks."""
    dims = len(form.shape)
    last = dims - 2 if form.turned else dims - 1
    if cut.dim < dims - 2:
        return cut, cut
    if not form.by_rows:
        raise ValueError(
            f"has rows of {form.rows[-1]} weights, not a multiple of the {BLOCK} with one scale (give int8, or no "
            "tensor axis)"
        )
    if cut.dim != last:
        along = attrs.evolve(cut, dim=dims - 2)
        return along, along
    along = attrs.evolve(cut, dim=dims - 1)
    if form.kind == "int8":
        return along, None
    if any(x % BLOCK for part in range(cut.parts) for run in cut.runs(part) for x in run):
        fitting = [n for n in range(1, cut.parts + 1) if not any(size % (n * BLOCK) for size in cut.segments)]
        raise ValueError(
            f"is cut within blocks of {BLOCK} weights with one scale, in {cut.parts} parts of {form.rows[-1]} "
            f"(give int8, or a tensor axis of one of {fitting} ranks)"
        )
    codes, scales = ([size // by for size in cut.segments] for by in (2, BLOCK))
    return attrs.evolve(along, segments=tuple(codes)), attrs.evolve(along, segments=tuple(scales))


def values(
    tensors: Mapping[str, Tensor], forms: Forms, dtype: torch.dtype | None = None, *, start: str = ""
) -> dict[str, Tensor]:
    """Replace codes and scales in `tensors`, whose names lack the prefix `start`, by `Quantised` weights in `dtype`, or
    each in its own."""
    made = {name: x for name, x in tensors.items() if not is_coded(name)}
    for name in [name.removesuffix(CODES) for name in tensors if name.endswith(CODES)]:
        made[name] = forms[start + name].value(tensors[name + CODES], tensors[name + SCALES], dtype)
    return made
