"""Layers that are computed again in the backward pass, whole or but for their attention.

torch's own selective checkpoints keep the results of single operations, by name, and fail where a layer does not run
the same operations twice, as one that gathers its shards does. Attention here is any function: several operations, a
ring with collectives, a kernel of one's own. So it is the call of attention that is kept, whatever it is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fppo.models.rows import RowWise
from fppo.models.seams import Attend, AttentionLayer

Recompute = Literal["selective"] | bool
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def recomputed(call: Callable[..., Any], how: Recompute, /, *args: Any, **kwargs: Any) -> Any:
    """`call(*args, **kwargs)`, of which only the arguments are kept for the backward pass, where it runs again; if
    "selective", with all that its attention keeps but queries, keys and values, and attention runs once."""
    attend = kwargs.get("attend")
    if how == "selective" and attend is not None and torch.is_grad_enabled():
        kwargs["attend"], call = None, partial(_Calls().run, call, attend)
    # deterministic: dropout is off, so there is no random state to keep
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _Layout(NamedTuple):
    """Where a tensor's numbers are in its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> _Layout:
        return cls(x.size(), x.stride(), int(x.storage_offset()))


class _AttentionView(NamedTuple):
    """What attention saved of one of its inputs."""

    number: int
    layout: _Layout


class _OuterTensor(NamedTuple):
    """In the place of a saved tensor: what the checkpoint around has in its place."""

    holder: Any


class _AttentionCall(NamedTuple):
    """A call of attention, as its recomputation needs it."""

    output: Any
    trains: bool
    inputs: list[_Layout]
    views: list[_AttentionView]


class _Calls:
    """The calls of attention in one layer of one pass: made when it first runs, and afterwards given back."""

    def __init__(self) -> None:
        # outside the checkpoint; a saved output that is no copy holds the node that holds it
        self._keep, self._give = _hooks() or (Tensor.detach, lambda kept: kept)
        self._calls: list[_AttentionCall] = []
        self._made = False

    def run(self, call: Callable[..., Any], attend: Attend, /, *args: Any, **kwargs: Any) -> Any:
        """`call` with an `attend` that is called once."""
        if self._made:
            return call(*args, **{**kwargs, "attend": _over(attend, partial(self._again, iter(self._calls)))})
        outputs: list[tuple[Tensor, int]] = []
        out = call(*args, **{**kwargs, "attend": _over(attend, partial(self._first, attend, outputs))})
        if any(x._version != version for x, version in outputs):
            raise ValueError(
                "this model changes the output of its attention in place, so it cannot be kept: give "
                "checkpoint_layers = true in place of selective"
            )
        self._made = True
        return out

    def _first(
        self,
        attend: Attend,
        outputs: list[tuple[Tensor, int]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: AttentionLayer,
    ) -> Tensor:
        inputs = _inputs(query, key, value, layer)
        owners = {(x.untyped_storage()._cdata, x.dtype): number for number, x in enumerate(inputs)}
        keep, give = self._keep, self._give
        pack_again, unpack_again = cast(Hooks, _hooks())
        views: list[_AttentionView] = []

        def pack(x: Tensor) -> Any:
            number = owners.get((x.untyped_storage()._cdata, x.dtype)) if x.numel() else None
            if number is None:
                return keep(x)
            views.append(_AttentionView(number, _Layout.of(x)))
            return _OuterTensor(pack_again(x))

        def unpack(kept: Any) -> Tensor:
            return unpack_again(kept.holder) if isinstance(kept, _OuterTensor) else give(kept)

        with saved_tensors_hooks(pack, unpack):
            out = attend(query, key, value, layer)
        own = out.detach()
        outputs.append((own, own._version))
        self._calls.append(_AttentionCall(keep(own), out.requires_grad, [_Layout.of(x) for x in inputs], views))
        return out

    def _again(
        self, calls: Iterator[_AttentionCall], query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer
    ) -> Tensor:
        """What the checkpoint around is to have of the inputs, and the output that was kept."""
        inputs, call = _inputs(query, key, value, layer), next(calls)
        if [_Layout.of(x) for x in inputs] != call.inputs:
            raise RuntimeError("a layer that was computed again gave attention inputs of another layout")
        pack_again, _ = cast(Hooks, _hooks())
        for number, layout in call.views:
            pack_again(inputs[number].detach().as_strided(*layout))
        return self._give(call.output).detach().requires_grad_(call.trains)


def _inputs(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> list[Tensor]:
    return [query, key, value, *([] if layer.sinks is None else [layer.sinks])]


def _over(attend: Attend, own: Attend) -> Attend:
    """`own`, which knows the rows that `attend` knows."""
    return attrs.evolve(attend, attend=own) if isinstance(attend, RowWise) else own


def _hooks() -> Hooks | None:
    """What torch does with saved tensors just now: it calls the innermost hooks alone."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
