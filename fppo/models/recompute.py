"""Recompute layers in the backward pass, whole or all but their attention.

torch's selective checkpoints keep results of single operations by name. They fail for layers whose two runs differ in
operations, such as those that gather shards. Attention is any function here: several operations, a ring with
collectives, a user's kernel. So the result of the whole call is kept.
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


def recomputed(call: Callable[..., Any], mode: Recompute, /, *args: Any, **kwargs: Any) -> Any:
    """Run `call(*args, **kwargs)` as a checkpoint: only its arguments are saved, and the backward pass runs it again.
    If "selective", attention runs once: its output and saved tensors are kept too, except queries, keys and values."""
    attend = kwargs.get("attend")
    if mode == "selective" and attend is not None and torch.is_grad_enabled():
        kwargs["attend"], call = None, partial(_Calls().run, call, attend)
    # deterministic: dropout is off, so there is no random state to keep
    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class _Layout(NamedTuple):
    """A tensor's view of its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> _Layout:
        return cls(x.size(), x.stride(), int(x.storage_offset()))


class _AttentionView(NamedTuple):
    """A view of an input, by its `number` among attention's inputs, that attention saved for its backward pass."""

    number: int
    layout: _Layout


class _OuterTensor(NamedTuple):
    """The handle of a saved tensor that the enclosing checkpoint holds."""

    holder: Any


class _AttentionCall(NamedTuple):
    """The record of a call of attention, from which a recomputed layer repeats it without computing it. `trains`:
    whether the output takes a gradient."""

    output: Any
    trains: bool
    inputs: list[_Layout]
    views: list[_AttentionView]


class _Calls:
    """The calls of attention in one layer of one pass: recorded in the first run, replayed in later ones."""

    def __init__(self) -> None:
        # the hooks outside the checkpoint; a saved output must be a copy, or it forms a cycle with its node
        self._keep, self._give = saved_hooks() or (Tensor.detach, lambda kept: kept)
        self._calls: list[_AttentionCall] = []
        self._made = False

    def run(self, call: Callable[..., Any], attend: Attend, /, *args: Any, **kwargs: Any) -> Any:
        """Run `call` with an `attend` that computes in the first run and replays its results afterwards."""
        if self._made:
            return call(*args, **{**kwargs, "attend": _over(attend, partial(self._repeat, iter(self._calls)))})
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
        pack_again, unpack_again = cast(Hooks, saved_hooks())
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

    def _repeat(
        self, calls: Iterator[_AttentionCall], query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer
    ) -> Tensor:
        """Repeat a recorded call of attention without computing it: save the recorded views of its inputs to the
        enclosing checkpoint, and return the recorded output."""
        inputs, call = _inputs(query, key, value, layer), next(calls)
        if [_Layout.of(x) for x in inputs] != call.inputs:
            raise RuntimeError("a recomputed layer called attention with inputs of another layout")
        pack_again, _ = cast(Hooks, saved_hooks())
        for number, layout in call.views:
            pack_again(inputs[number].detach().as_strided(*layout))
        return self._give(call.output).detach().requires_grad_(call.trains)


def _inputs(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> list[Tensor]:
    return [query, key, value, *([] if layer.sinks is None else [layer.sinks])]


def _over(attend: Attend, own: Attend) -> Attend:
    """Make an `attend` that calls `own`, and keeps the `carry` of recurrent states of `attend` if it has one."""
    return attrs.evolve(attend, attend=own) if isinstance(attend, RowWise) else own


def saved_hooks() -> Hooks | None:
    """The innermost saved-tensor hooks, which are the only ones that torch calls; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
