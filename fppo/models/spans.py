"""The layers of a rank on a pipeline axis, and a model that runs these alone.

The unmodified model runs in every stage. Other stages' layers are skipped; the stage's first layer takes the output of
the stage before, and the output of its last layer is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fppo.models import flops
from fppo.models.codes import names_of_weights
from fppo.models.heads import embedding_name, vocabulary_head
from fppo.models.model import Model, Params, Span, is_trained
from fppo.models.seams import ApplyLayer
from fppo.runtime.layout import Layout
from fppo_kernels.collectives import Axis


def layer_spans(model: Model, stages: int) -> list[range]:
    """The layers of each of `stages` stages: the cut with the least maximal work per token, the head included, and
    among such cuts the least maximal number of parameters, embeddings and head included.

    The first stage has all layers after which image features are added, and one more, since stages pass on the output
    of their last layer. Raises ValueError for fewer layers than stages need.
    """
    deep = 0 if model.vision is None else model.vision.deep
    if len(model.layers) < stages + deep:
        first = f", the first {deep + 1}, as images are added after {deep} layers" if deep else ""
        raise ValueError(
            f"the model has {len(model.layers)} layers, and {stages} pipeline stages take at least one each{first}: "
            "make the pipeline axis or its virtual stages fewer"
        )
    work, head = flops.layer_weights(model), flops.head_weights(model)
    sizes, ends = [0.0] * len(work), [0.0, 0.0]  # outside the layers: on the first stage, and on the last
    for name, holders in _ends(model).items():
        number = model.layer_of(name)
        if number is not None:
            sizes[number] += model.whole_shapes[name].numel()
        for end in holders:
            ends[end] += model.whole_shapes[name].numel()
    by_work = _Costs(work, 0.0, float(head))
    least, _ = _balanced(len(work), stages, by_work.of, whole := lambda start, stop: start > 0 or stop > deep)
    _, cuts = _balanced(len(work), stages, _Costs(sizes, *ends).of, lambda *at: whole(*at) and by_work.of(*at) <= least)
    return cuts


class _Costs:
    """The costs of consecutive layers as a stage, with extra costs for the first and the last stage."""

    def __init__(self, costs: Sequence[float], first: float, last: float) -> None:
        self._before, self._first, self._last = [0.0, *accumulate(costs)], first, last

    def of(self, start: int, stop: int) -> float:
        """The cost of the layers from `start` on, before `stop`."""
        ends = self._first * (start == 0) + self._last * (stop == len(self._before) - 1)
        return self._before[stop] - self._before[start] + ends


def _balanced(
    count: int, stages: int, cost: Callable[[int, int], float], allowed: Callable[[int, int], bool]
) -> tuple[float, list[range]]:
    """The least maximal cost of a cut of `count` layers into `stages` `allowed` runs, and the cut."""
    infinite = float("inf")
    best = [0.0] + [infinite] * count  # by the number of layers that the stages so far have
    starts: list[list[int]] = []
    for stage in range(stages):
        after, chosen = [infinite] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count - (stages - stage - 1) + 1):
            for start in range(stage, stop):
                if best[start] < infinite and allowed(start, stop):
                    worst = max(best[start], cost(start, stop))
                    if worst < after[stop]:
                        after[stop], chosen[stop] = worst, start
        best, starts = after, [*starts, chosen]
    cuts, stop = [], count
    for chosen in reversed(starts):
        cuts, stop = [range(chosen[stop], stop), *cuts], chosen[stop]
    return best[count], cuts


def _ends(model: Model) -> dict[str, tuple[int, ...]]:
    """The ends of the pipeline that hold each parameter outside the layers: 0 the first stage, -1 the last."""
    children = [name for name, _ in model.skeleton.named_children()]
    place = children.index(model.layers[0].partition(".")[0])
    embeddings = embedding_name(model)
    tied, seeing = model.head == "lm" and vocabulary_head(model)[0] == embeddings, model.vision_params
    ends: dict[str, tuple[int, ...]] = {}
    for name in model.whole_shapes:
        own = name.removeprefix(model.prefix).partition(".")[0]
        if model.layer_of(name) is not None:
            ends[name] = ()
        elif name == embeddings:
            ends[name] = (0, -1) if tied else (0,)
        elif name in seeing:
            ends[name] = (0,)
        elif not name.startswith(model.prefix) or (own in children and children.index(own) > place):
            ends[name] = (-1,)
        else:  # modules are registered in the order in which they run, except some models' last norm
            ends[name] = (0, -1) if len(model.whole_shapes[name]) == 1 else (0,)
    return ends


def stage_layout(model: Model, layout: Layout | None, axis: Axis, cuts: Sequence[range]) -> Layout:
    """Extend a layout (or none) by the pipeline ranks that hold each parameter; `cuts` are the stages' layers."""
    holders = _stages(model, cuts)
    return attrs.evolve(
        layout or Layout(model.whole_shapes, {}, frozenset(), 0, 1),
        stages={name: tuple(stage % axis.size for stage in of) for name, of in holders.items()},
        stage_rank=axis.rank,
        stage_ranks=axis.size,
    )


def _stages(model: Model, cuts: Sequence[range]) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter, if `cuts` are the layers of each stage."""
    of_layer = {number: stage for stage, layers in enumerate(cuts) for number in layers}

    def stages_of(name: str, ends: Sequence[int]) -> tuple[int, ...]:
        number = model.layer_of(name)
        return tuple(end % len(cuts) for end in ends) if number is None else (of_layer[number],)

    return {name: stages_of(name, ends) for name, ends in _ends(model).items()}


def staged(model: Model, axis: Axis, *, virtual_stages: int = 1, cuts: Sequence[range] | None = None) -> Model:
    """The model of this rank of a pipeline axis, from a model that may be placed on a tensor axis: the layers of
    `virtual_stages` stages, and the parameters outside the layers on the stages that use them.

    `cuts` are the layers of each stage of all ranks; None: `layer_spans`. Raises ValueError for fewer layers than
    stages, and for a model that is placed on a pipeline axis already.
    """
    if model.spans:
        raise ValueError("the model is placed on a pipeline axis already")
    stages = axis.size * virtual_stages
    cuts = layer_spans(model, stages) if cuts is None else cuts
    placed, layout = _stages(model, cuts), stage_layout(model, model.layout, axis, cuts)
    outside = {
        f"{model.prefix}{name}": x.shape
        for name, x in model.skeleton.named_parameters()
        if model.layer_of(f"{model.prefix}{name}") is None
    }

    def span(stage: int) -> Span:
        names = tuple(name for name, of in placed.items() if stage in of)
        absent = {name: shape for name, shape in outside.items() if name not in names}
        return Span(cuts[stage], stage, stages, names, absent)

    spans = tuple(span(stage) for stage in range(axis.rank, stages, axis.size))
    on_rank = attrs.evolve(model, shapes=layout.shapes, layout=layout, spans=spans, unplaced=model.unplaced or model)
    return _with_copies(on_rank, model)


def stage_of(model: Model, number: int) -> Model:
    """This rank's `number`th stage of a placed model: its layers and parameters alone."""
    span = model.spans[number]
    shapes = {name: shape for name, shape in model.all_shapes.items() if name in set(span.names)}
    return _with_copies(attrs.evolve(with_shapes(model, shapes), spans=(span,)), model)


def unstaged(model: Model) -> Model:
    """The model on its tensor axis alone, with the layers of all stages."""
    if model.layout is None or not model.spans:
        return model
    layout = attrs.evolve(model.layout, stages={}, stage_rank=0, stage_ranks=1)
    return _with_copies(attrs.evolve(with_shapes(model, layout.shapes), layout=layout, spans=()), model)


def with_shapes(model: Model, shapes: Mapping[str, torch.Size]) -> Model:
    """The model restricted to parameters of these shapes, those of an adapted model's base included."""
    if (frozen := model.frozen) is None:
        return attrs.evolve(model, shapes=shapes)
    base = {name: shape for name, shape in shapes.items() if not is_trained(name)}
    params = {name: x for name, x in frozen.params.items() if name in base}
    weights = set(names_of_weights(base))
    places = {name: flipped for name, flipped in frozen.places.items() if name in weights}
    own = {name: shape for name, shape in shapes.items() if name not in base}
    return attrs.evolve(model, shapes=own, frozen=attrs.evolve(frozen, params=params, shapes=base, places=places))


def _with_copies(model: Model, other: Model) -> Model:
    """The model with the threads' cached skeletons of another model with the same skeleton."""
    object.__setattr__(model, "_copies", other._copies)
    return model


class Relay:
    """An `apply_layer` of a pipeline stage: applies its layers, by `apply_layer` if given, and skips all others."""

    def __init__(self, span: Span, received: Tensor | None, apply_layer: ApplyLayer | None) -> None:
        self._span, self._received, self._apply = span, received, apply_layer
        self._given: Any = None  # by the last layer

    def __call__(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        layers = self._span.layers
        if index not in layers:
            return args[0]
        if index == layers[0] and self._received is not None:
            args = (self._received, *args[1:])
        self._given = layer(*args, **kwargs) if self._apply is None else self._apply(index, layer, args, kwargs)
        return self._given

    def result(self, normed: Tensor) -> Tensor:
        """The stage's output after the model has run with this relay: `normed`, the model's own output after its last
        norm, on the last stage, else what the stage's last layer gave. Raises ValueError if that is no tensor."""
        if not isinstance(self._given, Tensor):
            raise ValueError(
                f"the layers return {type(self._given).__name__}, but only hidden states pass between stages"
            )
        return normed if self._span.ends else self._given


def absent(span: Span, like: Tensor) -> Params:
    """Expanded zeros, in the dtype and on the device of `like`, for the parameters outside the layers that a stage
    lacks; results computed from them are unused."""
    return {name: like.new_zeros(shape[-1:]).expand(shape) for name, shape in span.absent.items()}
