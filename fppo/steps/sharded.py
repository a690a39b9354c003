"""Passes of models on sharded parameters: when parameters are gathered, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fppo import models
from fppo.models.adapted import Frozen
from fppo.models.model import Model, pass_dtype
from fppo.models.recompute import recomputed
from fppo.models.seams import ApplyLayer
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.offload import Lane, OnHost, to_device
from fppo.steps.train_state import Params
from fppo.tree import state, static


@state
class Whole:
    """Sharded parameters gathered whole; for an adapter with its base (`frozen`). Steps take it in place of shards."""

    params: Params
    frozen: Frozen | None = static(default=None)


class _Root:
    """The parameters outside the layers while they are gathered: the first use waits for them, and keeps them."""

    def __init__(self, finish: fsdp.Finish) -> None:
        self._finish = finish
        self._tensors: tuple[Tensor, ...] | None = None

    def take(self) -> tuple[Tensor, ...]:
        """Wait for the gathered tensors at the first call; later calls return the same ones. Each call returns new
        tensor objects on the same memory, since autograd writes its marks on the tensors that a pass gets."""
        if self._tensors is None:
            self._tensors = self._finish()
        return tuple(x.detach() for x in self._tensors)


@state
class Rooted:
    """Sharded parameters of which those outside the layers (`root`) are gathered for several passes. Steps accept it in
    place of shards; gradients are those of the shards."""

    params: Params
    root: _Root = static()


Gathered = Whole | Rooted  # sharded parameters, all or some of them gathered for several passes


class Opened(NamedTuple):
    """Parameters ready for one pass: whole ones (`root`), and the function that applies the layers whose parameters are
    not among them."""

    root: Params
    apply_layer: ApplyLayer | None


def whole(params: Params | Whole | OnHost, model: Model, mesh: Mesh) -> Whole:
    """Gather all parameters, in their compute dtypes."""
    if isinstance(params, Whole):
        return params
    if isinstance(params, OnHost):
        params = to_device(dict(params.params), params.lane)
    every = model.joined(params)
    every = fsdp.gather(every, model.all_shapes, mesh, cuts=model.cuts, dtypes=wire_dtypes(model, every))
    own = {name: every.pop(name) for name in params}
    return Whole(params=own, frozen=model.frozen and attrs.evolve(model.frozen, params=every))


def rooted(params: Params, model: Model, mesh: Mesh) -> Params | Rooted:
    """Start to gather the parameters outside the layers (embeddings, last norm, head) for several passes. Returns the
    shards themselves on a pipeline axis, without prefetching, and for a model without parameters outside its layers."""
    if model.spans or not (mesh.sharding or Sharding()).prefetch:
        return params
    group = _groups(model, model.joined(params))[0]
    if not group:
        return params
    wire = wire_dtypes(model, group)
    shapes, dtypes = [model.all_shapes[name] for name in group], [*wire.values()]
    axes = fsdp.axes_of(group, mesh, model.cuts)
    return Rooted(params=params, root=_Root(fsdp.begin_gather(list(group.values()), shapes, dtypes, axes)))


def cast(params: Params, model: Model) -> Params:
    """Cast parameters that are not cut to their compute dtypes; tensors that have them are not copied."""
    kinds = wire_dtypes(model, params)
    return {name: x.to(kinds[name]) for name, x in params.items()}


def scattered(grads: Whole, params: Params, model: Model, mesh: Mesh) -> Params:
    """Reduce whole gradients to shards of their sum over the ranks that share a parameter, in the parameters'
    dtypes."""
    names, kinds = list(params), [x.dtype for x in params.values()]
    axes, sharding = fsdp.axes_of(names, mesh, model.cuts), mesh.sharding or Sharding()
    shards = fsdp.reduce_scatter([grads.params[name] for name in names], kinds, axes, sharding)
    return dict(zip(names, shards, strict=True))


def accumulable(grads: Whole, params: Params, mesh: Mesh) -> Whole:
    """Cast a micro-batch's whole gradients to the dtype in which they are summed."""
    sharding = mesh.sharding or Sharding()
    kinds = {name: fsdp.reduce_dtype(x.dtype, sharding) for name, x in params.items()}
    return Whole(params={name: x.to(kinds[name]) for name, x in grads.params.items()})


def opened(params: Params | Gathered | OnHost, model: Model, mesh: Mesh) -> Opened:
    """Gather the parameters outside the layers (embeddings, last norm, head) for a whole pass, unless they are gathered
    already; layers gather their own. Parameters on the host are fetched in the same way.

    All ranks that share parameters must make the same passes, forward and backward.
    """
    lane = root = None
    if isinstance(params, Whole):
        base = {} if params.frozen is None else params.frozen.params
        return Opened(_own({**base, **params.params}, model), None)
    if isinstance(params, OnHost):
        if torch.is_grad_enabled():
            raise ValueError("parameters on the host are for passes without gradients: fetch them whole for an update")
        if model.frozen is not None:
            raise ValueError("an adapter's parameters are small, and its base is no state: neither is kept on the host")
        params, lane = dict(params.params), params.lane
    elif isinstance(params, Rooted):
        params, root = params.params, params.root
    elif not mesh.sharded:
        return Opened(_own(model.joined(params), model), None)
    groups = _groups(model, model.joined(params))
    stream = _Stream(groups, model, mesh, lane, root)
    outside = dict(zip(groups[0], stream.gathered(0, 1), strict=True))
    return Opened(outside, _apply_layer(model, groups, stream, mesh.sharding or Sharding()))


def _own(params: Params, model: Model) -> Params:
    """The parameters that the model takes: those of its stage if it is a pipeline stage, else all."""
    return {name: params[name] for name in model.all_shapes} if model.spans else params


def _layers(model: Model) -> range:
    """The indices of the layers that a model applies."""
    return model.spans[0].layers if model.spans else range(len(model.layers))


def _groups(model: Model, params: Params) -> list[Params]:
    """Group parameters that are gathered together, by name: those outside the layers, then each layer's. Raises
    ValueError for missing parameters."""
    missing = [name for name in model.all_shapes if name not in params]
    if missing:
        raise ValueError(f"the model's parameters {missing} are missing")
    groups: dict[int | None, Params] = {number: {} for number in (None, *_layers(model))}
    for name in model.all_shapes:
        groups[model.layer_of(name)][name] = params[name]
    return list(groups.values())


def wire_dtypes(model: Model, params: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """The dtypes that parameters are gathered in: those that passes take them in."""
    return {name: pass_dtype(model, name, x.dtype) for name, x in params.items()}


class _Stream:
    """The gathers of one pass and its backward pass, each started while the group before is in use, and the
    reduce-scatters of its gradients, each awaited when the next group has its own.

    With a `lane` the groups are on the host: each is fetched, and then gathered if it is sharded. `root` is the first
    group if that is gathered for several passes.
    """

    def __init__(
        self, groups: Sequence[Params], model: Model, mesh: Mesh, lane: Lane | None, root: _Root | None
    ) -> None:
        self._groups, self._mesh, self._lane = groups, mesh, lane
        shapes = model.all_shapes
        self._shapes = [[shapes[name] for name in group] for group in groups]
        self._dtypes = [list(wire_dtypes(model, group).values()) for group in groups]
        self._axes = [fsdp.axes_of(group, mesh, model.cuts) for group in groups]
        self._begun: dict[int, fsdp.Finish] = {} if root is None else {0: root.take}
        self._sums = fsdp.Sums()
        self._landing = [fsdp.landing(list(group.values()), self._sums) for group in groups]

    def _begin(self, number: int) -> fsdp.Finish:
        shards = list(self._groups[number].values())
        if not shards:  # a pipeline stage may have no parameters outside its layers
            return lambda: ()
        if self._lane is not None:
            finish = self._lane.fetch(shards)
            if not self._mesh.sharded:
                return finish
            shards = finish()
        return fsdp.begin_gather(shards, self._shapes[number], self._dtypes[number], self._axes[number])

    def take(self, number: int, step: int) -> tuple[Tensor, ...]:
        """The whole tensors of group `number`; before waiting for them, starts to gather the group `step` places
        further on."""
        finish = self._begun.pop(number, None) or self._begin(number)
        after = number + step
        if (self._mesh.sharding or Sharding()).prefetch and 0 < after < len(self._groups):
            self._begun[after] = self._begin(after)
        return finish()

    def gathered(self, number: int, step: int) -> tuple[Tensor, ...]:
        """Gather a group as a differentiable function of its shards."""
        if not self._groups[number]:
            return self.take(number, step)
        axes, sharding = self._axes[number], self._mesh.sharding or Sharding()
        return fsdp.gathered(lambda: self.take(number, step), self._landing[number], axes, sharding, sums=self._sums)


def _apply_layer(model: Model, groups: Sequence[Params], stream: _Stream, sharding: Sharding) -> ApplyLayer:
    applied: set[int] = set()
    first = _layers(model)[0]

    def apply_layer(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        start, number = len(f"{model.prefix}{model.layers[index]}."), 1 + index - first
        inner = [name[start:] for name in groups[number]]

        def gathered() -> Params:
            step = -1 if index in applied else 1  # the second time is the recomputation for the backward pass
            applied.add(index)
            return dict(zip(inner, stream.gathered(number, step), strict=True))

        def call(tensors: Params, *args: Any, **kwargs: Any) -> Any:
            return models.call_layer(model, index, layer, tensors, args, kwargs)

        def gather_and_call(*args: Any, **kwargs: Any) -> Any:
            return call(gathered(), *args, **kwargs)

        if not torch.is_grad_enabled():
            return gather_and_call(*args, **kwargs)
        if sharding.stage == 3 and model.checkpoint_layers:
            return recomputed(gather_and_call, model.checkpoint_layers, *args, **kwargs)
        tensors = gathered()
        if model.checkpoint_layers:
            return recomputed(call, model.checkpoint_layers, tensors, *args, **kwargs)
        if sharding.stage < 3:
            return call(tensors, *args, **kwargs)
        with _freed(list(tensors.values()), lambda: stream.take(number, -1)):
            return call(tensors, *args, **kwargs)

    return apply_layer


class _RegatheredTensors:
    """Tensors for the backward pass: gathered again at the first request, freed after the last."""

    def __init__(self, take: Callable[[], Sequence[Tensor]]) -> None:
        self._take, self._tensors, self.waiting = take, None, 0

    def get(self, number: int) -> Tensor:
        tensors = self._take() if self._tensors is None else self._tensors
        self.waiting -= 1
        self._tensors = tensors if self.waiting > 0 else None
        return tensors[number]


class _View(NamedTuple):
    """A saved view of one of the gathered tensors, by its number."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _freed(tensors: Sequence[Tensor], take: Callable[[], Sequence[Tensor]]) -> saved_tensors_hooks:
    """A context in which operations save no views of `tensors` for their backward pass, since `take` gathers them
    again.

    All other tensors go to the enclosing hooks, because torch calls the innermost hooks alone.
    """
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    # a saved output that is not copied would hold the node that holds it
    keep, give = around or (torch.Tensor.detach, lambda kept: kept)
    # pack lives as long as its results, so it must not hold the tensors
    owners = {(x.untyped_storage()._cdata, x.dtype): number for number, x in enumerate(tensors)}
    again = _RegatheredTensors(take)

    def pack(x: Tensor) -> Any:
        number = owners.get((x.untyped_storage()._cdata, x.dtype)) if x.numel() else None
        if number is None:
            return keep(x)
        again.waiting += 1
        return _View(number, x.size(), x.stride(), int(x.storage_offset()))

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _View):
            return give(kept)
        return again.get(kept.number).as_strided(kept.size, kept.stride, kept.offset)

    return saved_tensors_hooks(pack, unpack)
