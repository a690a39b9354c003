"""Parameters sharded over the ranks of an axis, as functions (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277).

A shard is a plain tensor: rows [r * c, (r + 1) * c) of dimension 0, c = ceil(rows / ranks), as DTensor's Shard(0); the
last ranks may hold fewer rows, or none. The whole shapes are in `model.shapes`. The axis depends on a parameter's cut,
if it has one (`Mesh.shard_axis`). `cuts` are those of a layout, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fppo.runtime.layout import Cut
from fppo.runtime.mesh import Mesh, Sharding
from fppo_kernels.collectives import Axis

Finish = Callable[[], tuple[Tensor, ...]]

# torch 2.13 renamed these two; the old names warn there
_gather_single: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bounds(rows: int, axis: Axis) -> tuple[int, int]:
    """The bounds [start, stop) of this rank's shard of `rows` rows."""
    size = -(-rows // axis.size)
    return min(axis.rank * size, rows), min((axis.rank + 1) * size, rows)


def axes_of(names: Iterable[str], mesh: Mesh, cuts: Mapping[str, Cut]) -> list[Axis]:
    """The axis over which each of these parameters is sharded."""
    return [mesh.shard_axis(cuts.get(name)) for name in names]


def shard_shapes(
    shapes: Mapping[str, torch.Size], mesh: Mesh, cuts: Mapping[str, Cut] = {}
) -> dict[str, tuple[int, ...]]:
    """The shapes of this rank's shards of tensors with these shapes; unchanged unless `mesh.sharded`."""
    if not mesh.sharded:
        return {name: tuple(shape) for name, shape in shapes.items()}
    own = {}
    for (name, shape), axis in zip(shapes.items(), axes_of(shapes, mesh, cuts), strict=True):
        start, stop = bounds(shape[0], axis)
        own[name] = (stop - start, *shape[1:])
    return own


def shard(params: Mapping[str, Tensor], mesh: Mesh, cuts: Mapping[str, Cut] = {}) -> dict[str, Tensor]:
    """Copy this rank's shards of whole parameters, or of its parts of parameters in `cuts`. Unless `mesh.sharded`, the
    given tensors are returned.

    Raises ValueError for a parameter without dimensions.
    """
    if not mesh.sharded:
        return dict(params)
    scalars = [name for name, x in params.items() if x.dim() == 0]
    if scalars:
        raise ValueError(f"parameters {scalars} have no dimension to cut: give them the shape [1]")
    axes = zip(params.items(), axes_of(params, mesh, cuts), strict=True)
    return {name: x[slice(*bounds(len(x), axis))].detach().clone() for (name, x), axis in axes}


def gather(
    shards: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    mesh: Mesh,
    *,
    cuts: Mapping[str, Cut] = {},
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """Gather whole parameters of these `shapes` from all ranks' shards; differentiable. Every rank that holds shards
    must call, with the same names in the same order. Without sharding the shards are whole already.

    `cuts` are the parameters' cuts over mesh axes. A cut decides over which axis a parameter is sharded
    (`Mesh.shard_axis`); a name that is not in `cuts` is not cut. `dtypes` are those of the transfer and of the result,
    by default the shards' own. There is one collective for each dtype and axis. The backward pass sums gradients by one
    reduce-scatter for each axis and dtype of the sums; parameters that take no gradient are left out.
    """
    names, tensors = list(shards), list(shards.values())
    kinds = [x.dtype if dtypes is None else dtypes.get(n, x.dtype) for n, x in shards.items()]
    if not mesh.sharded:
        return {name: x.to(kind) for name, x, kind in zip(names, tensors, kinds, strict=True)}
    axes = axes_of(names, mesh, cuts)
    finish = begin_gather(tensors, [shapes[name] for name in names], kinds, axes)
    return dict(zip(names, gathered(finish, tensors, axes, mesh.sharding or Sharding()), strict=True))


def begin_gather(
    shards: Sequence[Tensor], shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], axes: Sequence[Axis]
) -> Finish:
    """Start to gather each shard over its axis, cast to its dtype (`dtypes`); the returned function waits and returns
    the whole tensors. On an axis of one rank they are cast if needed, not copied. No gradients."""
    tensors: dict[int, Tensor] = {}
    waiting = []
    for (dtype, axis), places in _groups(dtypes, axes):
        if axis.size == 1:
            tensors |= {i: shards[i].detach().to(dtype) for i in places}
            continue
        sizes = [_width(shapes[i], axis) for i in places]
        part = _packed([shards[i].detach() for i in places], sizes, dtype)
        whole = part.new_empty(axis.size * len(part))  # gloo takes no other shape
        waiting.append((places, sizes, part, whole.view(axis.size, -1), _begun(_gather_single, whole, part, axis)))

    def finish() -> tuple[Tensor, ...]:
        while waiting:
            places, sizes, _, whole, wait = waiting.pop(0)
            wait()
            for i, x in zip(places, whole.split(sizes, 1), strict=True):
                tensors[i] = x.contiguous().view(-1, *shapes[i][1:])[: shapes[i][0]]
        every = tuple(tensors[i] for i in range(len(shards)))
        tensors.clear()
        return every

    return finish


def _begun(collective: Callable[..., Any], out: Tensor, x: Tensor, axis: Axis) -> Callable[[], Any]:
    """Begin a collective of the axis from `x` into `out`, and return what waits for it; only zeros if this rank takes
    no part in it a second time (`Calls`)."""
    if axis.calls is not None and axis.calls.begun < axis.calls.skipped:
        axis.calls.begun += 1
        return out.zero_
    work = collective(out, x, group=axis.group, async_op=True)
    if axis.calls is not None:
        axis.calls.begun += 1
    return work.wait


def _groups(dtypes: Sequence[torch.dtype], axes: Sequence[Axis]) -> list[tuple[tuple[torch.dtype, Axis], list[int]]]:
    """The indices of the tensors of each dtype and axis."""
    groups: dict[tuple[torch.dtype, Axis], list[int]] = {}
    for place, key in enumerate(zip(dtypes, axes, strict=True)):
        groups.setdefault(key, []).append(place)
    return list(groups.items())


class Sums:
    """The reduce-scatters of one backward pass; each overlaps with the pass until the next one begins."""

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def begin(
        self, grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], axes: Sequence[Axis], sharding: Sharding
    ) -> list[Tensor]:
        """Start a `reduce_scatter` and return this rank's shards of the sum, valid once `finish` was called."""
        self.finish()
        shards, self._finish = begin_reduce_scatter(grads, dtypes, axes, sharding)
        if torch.is_anomaly_enabled():  # it reads the gradients right away
            self.finish()
        return shards

    def finish(self) -> None:
        """Wait for the pending reduce-scatter."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def landing(shards: Sequence[Tensor], sums: Sums) -> list[Tensor]:
    """Prepare shards for `gathered` with `sums`, before the forward pass: their gradients are complete when the sums
    are.

    Autograd runs in reverse order of recording, so that this node waits once the rest of the backward pass has run.
    """
    wanted = [i for i, x in enumerate(shards) if x.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return list(shards)
    landed = dict(zip(wanted, _Landing.apply(sums, *(shards[i] for i in wanted)), strict=True))  # type: ignore[arg-type]
    return [landed.get(i, x) for i, x in enumerate(shards)]


def gathered(
    finish: Finish, shards: Sequence[Tensor], axes: Sequence[Axis], sharding: Sharding, *, sums: Sums | None = None
) -> tuple[Tensor, ...]:
    """The whole tensors that `finish`, from `begin_gather`, returns, as a differentiable function of their `shards`.

    With `sums` the backward pass does not wait for its reduce-scatter, and the shards must be from `landing`.
    """
    return _Gathered.apply(finish, axes, sharding, sums, *shards)  # type: ignore[return-value]


def reduce_scatter(
    grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], axes: Sequence[Axis], sharding: Sharding
) -> list[Tensor]:
    """Sum whole gradients over the ranks of their axes, and return this rank's shards in `dtypes` (the parameters'
    own).

    Sums are in the sharding's `reduce_dtype`, for float64 parameters in float64, with a collective for each dtype.
    """
    shards, finish = begin_reduce_scatter(grads, dtypes, axes, sharding)
    finish()
    return shards


def begin_reduce_scatter(
    grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], axes: Sequence[Axis], sharding: Sharding
) -> tuple[list[Tensor], Callable[[], None]]:
    """Start a `reduce_scatter`. Returns this rank's shards, and a function that waits until they hold the sums."""
    shards: dict[int, Tensor] = {}
    casts: list[tuple[Tensor, Tensor]] = []
    waiting = []
    for (kind, axis), places in _groups([reduce_dtype(dtype, sharding) for dtype in dtypes], axes):
        if axis.size == 1:
            shards |= {i: grads[i].to(dtypes[i]) for i in places}
            continue
        sizes = [_width(grads[i].shape, axis) for i in places]
        whole = grads[0].new_empty(axis.size, sum(sizes), dtype=kind)
        for i, slot in zip(places, whole.split(sizes, 1), strict=True):
            _fill_rows(slot, grads[i])
        part = whole.new_empty(whole.shape[1])
        waiting.append((_begun(_reduce_scatter_single, part, whole.view(-1), axis), whole))
        for i, x in zip(places, part.split(sizes), strict=True):
            start, stop = bounds(len(grads[i]), axis)
            rest = grads[i].shape[1:]
            summed = x[: (stop - start) * rest.numel()].view(stop - start, *rest)
            shards[i] = summed if kind == dtypes[i] else torch.empty_like(summed, dtype=dtypes[i])
            if shards[i] is not summed:
                casts.append((shards[i], summed))

    def finish() -> None:
        while waiting:
            waiting.pop(0)[0]()
        for target, summed in casts:
            target.copy_(summed)
        casts.clear()

    return [shards[i] for i in range(len(grads))], finish


def reduce_dtype(dtype: torch.dtype, sharding: Sharding) -> torch.dtype:
    """The dtype in which gradients of parameters of `dtype` are summed."""
    return dtype if dtype == torch.float64 else sharding.reduce_dtype


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, finish: Finish, axes: Sequence[Axis], sharding: Sharding, sums: Sums | None, *shards: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axes, ctx.sharding, ctx.sums, ctx.dtypes = axes, sharding, sums, [x.dtype for x in shards]
        whole = finish()
        # otherwise autograd creates the unused whole gradients of all others once one is trained
        ctx.mark_non_differentiable(*(x for x, own in zip(whole, ctx.needs_input_grad[4:], strict=True) if not own))
        ctx.set_materialize_grads(False)
        ctx.like = [(x.shape, x.dtype, x.device) for x in whole]
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        begin = reduce_scatter if ctx.sums is None else ctx.sums.begin
        every = [_zeros(*ctx.like[i]) if grads[i] is None else grads[i] for i in wanted]
        shards = begin(every, [ctx.dtypes[i] for i in wanted], [ctx.axes[i] for i in wanted], ctx.sharding)
        by_place = dict(zip(wanted, shards, strict=True))
        return (None, None, None, None, *(by_place.get(i) for i in range(len(grads))))


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class _Landing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Sums, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.sums = sums
        return tuple(x.view_as(x) for x in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.sums.finish()
        return (None, *grads)


def _width(shape: torch.Size, axis: Axis) -> int:
    """The number of elements of a parameter that each rank sends."""
    return -(-shape[0] // axis.size) * shape[1:].numel()


def _packed(tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Concatenate flattened tensors, each padded with zeros to its size."""
    flat = tensors[0].new_empty(sum(sizes), dtype=dtype)
    for slot, x in zip(flat.split(list(sizes)), tensors, strict=True):
        slot[: x.numel()].copy_(x.reshape(-1))
        slot[x.numel() :].zero_()
    return flat


def _fill_rows(slot: Tensor, grad: Tensor) -> None:
    """Copy a whole gradient [d, ...] into `slot` [ranks, c * ...], rank by rank, padded with zeros."""
    ranks, width = slot.shape
    flat = grad.reshape(-1)
    full = len(flat) // width if width else ranks
    slot[:full].copy_(flat[: full * width].view(full, width))
    if full < ranks:
        rest = flat[full * width :]
        slot[full, : len(rest)].copy_(rest)
        slot[full, len(rest) :].zero_()
        slot[full + 1 :].zero_()
