"""Parameters cut over the shard axis, as functions (ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277).

A shard is a plain tensor: rows [r * c, (r + 1) * c) of dimension 0, c = ceil(rows / ranks), as DTensor's Shard(0) has
them; the last ranks may hold fewer rows, or none. The whole shapes are in `model.shapes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fppo.runtime.mesh import Mesh, Sharding
from fppo_kernels.collectives import Axis

Finish = Callable[[], tuple[Tensor, ...]]

# torch 2.13 renamed these two; the old names warn there
_gather_single: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bounds(rows: int, axis: Axis) -> tuple[int, int]:
    """The first row of this rank's shard of `rows` rows, and the one after its last."""
    size = -(-rows // axis.size)
    return min(axis.rank * size, rows), min((axis.rank + 1) * size, rows)


def shard_shape(shape: torch.Size, mesh: Mesh) -> tuple[int, ...]:
    """That of this rank's shard of a tensor of this shape; the shape itself if not `mesh.sharded`."""
    if not mesh.sharded:
        return tuple(shape)
    start, stop = bounds(shape[0], mesh["shard"])
    return (stop - start, *shape[1:])


def shard(params: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """This rank's shards of whole parameters, in memory of their own; the parameters themselves if not `mesh.sharded`.

    Raises ValueError for a parameter without dimensions.
    """
    if not mesh.sharded:
        return dict(params)
    scalars = [name for name, x in params.items() if x.dim() == 0]
    if scalars:
        raise ValueError(f"parameters {scalars} have no dimension to cut: give them the shape [1]")
    axis = mesh["shard"]
    return {name: x[slice(*bounds(len(x), axis))].detach().clone() for name, x in params.items()}


def gather(
    shards: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    mesh: Mesh,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """Whole parameters from all ranks' shards, by one collective for each dtype among them.

    `dtypes` are those to send and to give, where they are not the shards' own. The backward pass is one
    reduce-scatter for each dtype gradients are added up in. Parameters that take no gradient cost it nothing.
    """
    names, tensors = list(shards), list(shards.values())
    kinds = [x.dtype if dtypes is None else dtypes.get(n, x.dtype) for n, x in shards.items()]
    if not mesh.sharded:
        return {name: x.to(kind) for name, x, kind in zip(names, tensors, kinds, strict=True)}
    finish = begin_gather(tensors, [shapes[name] for name in names], kinds, mesh["shard"])
    return dict(zip(names, gathered(finish, tensors, mesh), strict=True))


def begin_gather(
    shards: Sequence[Tensor], shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], axis: Axis
) -> Finish:
    """Starts to gather; the function it returns waits for that, and gives the whole tensors. No gradients."""
    waiting = []
    for dtype in dict.fromkeys(dtypes):
        places = [i for i, kind in enumerate(dtypes) if kind == dtype]
        sizes = [_width(shapes[i], axis) for i in places]
        part = _packed([shards[i].detach() for i in places], sizes, dtype)
        whole = part.new_empty(axis.size * len(part))  # gloo takes it in no other shape
        work = _gather_single(whole, part, group=axis.group, async_op=True)
        waiting.append((places, sizes, part, whole, work))

    def finish() -> tuple[Tensor, ...]:
        tensors: dict[int, Tensor] = {}
        while waiting:
            places, sizes, _, whole, work = waiting.pop(0)
            work.wait()
            for i, x in zip(places, whole.view(axis.size, -1).split(sizes, 1), strict=True):
                tensors[i] = x.contiguous().view(-1, *shapes[i][1:])[: shapes[i][0]]
        return tuple(tensors[i] for i in range(len(shards)))

    return finish


class Sums:
    """The reduce-scatters of one backward pass: each goes on while the pass does, until the next one begins."""

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def begin(self, grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], mesh: Mesh) -> list[Tensor]:
        """This rank's shards of the sum, which hold it once `finish` was called."""
        self.finish()
        shards, self._finish = begin_reduce_scatter(grads, dtypes, mesh)
        if torch.is_anomaly_enabled():  # it reads gradients at once
            self.finish()
        return shards

    def finish(self) -> None:
        """Waits for what is under way."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def landing(shards: Sequence[Tensor], sums: Sums) -> list[Tensor]:
    """The shards for `gathered` with `sums`: where their gradients land. It is to be called before the pass.

    For autograd runs what was recorded first last: it waits for the sums when the rest of the backward pass has run.
    """
    wanted = [i for i, x in enumerate(shards) if x.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return list(shards)
    landed = dict(zip(wanted, _Landing.apply(sums, *(shards[i] for i in wanted)), strict=True))  # type: ignore[arg-type]
    return [landed.get(i, x) for i, x in enumerate(shards)]


def gathered(finish: Finish, shards: Sequence[Tensor], mesh: Mesh, *, sums: Sums | None = None) -> tuple[Tensor, ...]:
    """What `finish` gives, whole tensors, as a differentiable function of the shards it was gathered from.

    With `sums` the backward pass does not wait for its reduce-scatter: the shards are to come from `landing`.
    """
    return _Gathered.apply(finish, mesh, sums, *shards)  # type: ignore[return-value]


def reduce_scatter(grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], mesh: Mesh) -> list[Tensor]:
    """This rank's shards of the sum over ranks of whole gradients, as `dtypes` (the parameters' own).

    They are added up in the sharding's `reduce_dtype`, those of float64 parameters in float64: a collective for each.
    """
    shards, finish = begin_reduce_scatter(grads, dtypes, mesh)
    finish()
    return shards


def begin_reduce_scatter(
    grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], mesh: Mesh
) -> tuple[list[Tensor], Callable[[], None]]:
    """Starts a `reduce_scatter`: the shards, and the function that waits for their numbers."""
    axis, sharding = mesh["shard"], mesh.sharding or Sharding()
    kinds = [reduce_dtype(dtype, sharding) for dtype in dtypes]
    shards: dict[int, Tensor] = {}
    casts: list[tuple[Tensor, Tensor]] = []
    waiting = []
    for kind in dict.fromkeys(kinds):
        places = [i for i, k in enumerate(kinds) if k == kind]
        sizes = [_width(grads[i].shape, axis) for i in places]
        whole = grads[0].new_empty(axis.size, sum(sizes), dtype=kind)
        for i, slot in zip(places, whole.split(sizes, 1), strict=True):
            _fill_rows(slot, grads[i])
        part = whole.new_empty(whole.shape[1])
        waiting.append((_reduce_scatter_single(part, whole.view(-1), group=axis.group, async_op=True), whole))
        for i, x in zip(places, part.split(sizes), strict=True):
            start, stop = bounds(len(grads[i]), axis)
            rest = grads[i].shape[1:]
            summed = x[: (stop - start) * rest.numel()].view(stop - start, *rest)
            shards[i] = summed if kind == dtypes[i] else torch.empty_like(summed, dtype=dtypes[i])
            if shards[i] is not summed:
                casts.append((shards[i], summed))

    def finish() -> None:
        while waiting:
            waiting.pop(0)[0].wait()
        for target, summed in casts:
            target.copy_(summed)
        casts.clear()

    return [shards[i] for i in range(len(grads))], finish


def reduce_dtype(dtype: torch.dtype, sharding: Sharding) -> torch.dtype:
    """The dtype in which gradients of parameters of `dtype` are added up."""
    return dtype if dtype == torch.float64 else sharding.reduce_dtype


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, finish: Finish, mesh: Mesh, sums: Sums | None, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.sums, ctx.dtypes = mesh, sums, [x.dtype for x in shards]
        whole = finish()
        # or autograd, once one is trained, makes whole gradients of all the others, which nobody takes
        ctx.mark_non_differentiable(*(x for x, own in zip(whole, ctx.needs_input_grad[3:], strict=True) if not own))
        ctx.set_materialize_grads(False)
        ctx.like = [(x.shape, x.dtype, x.device) for x in whole]
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        begin = reduce_scatter if ctx.sums is None else ctx.sums.begin
        every = [_zeros(*ctx.like[i]) if grads[i] is None else grads[i] for i in wanted]
        shards = begin(every, [ctx.dtypes[i] for i in wanted], ctx.mesh)
        by_place = dict(zip(wanted, shards, strict=True))
        return (None, None, None, *(by_place.get(i) for i in range(len(grads))))


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
    """How many numbers of a parameter each rank sends."""
    return -(-shape[0] // axis.size) * shape[1:].numel()


def _packed(tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensors one after the other, each filled up with zeros to its size."""
    flat = tensors[0].new_empty(sum(sizes), dtype=dtype)
    for slot, x in zip(flat.split(list(sizes)), tensors, strict=True):
        slot[: x.numel()].copy_(x.reshape(-1))
        slot[x.numel() :].zero_()
    return flat


def _fill_rows(slot: Tensor, grad: Tensor) -> None:
    """Writes a whole gradient [d, ...] into `slot` [ranks, c * ...], rank by rank, and zeros into what is left over."""
    ranks, width = slot.shape
    flat = grad.reshape(-1)
    full = len(flat) // width if width else ranks
    slot[:full].copy_(flat[: full * width].view(full, width))
    if full < ranks:
        rest = flat[full * width :]
        slot[full, : len(rest)].copy_(rest)
        slot[full, len(rest) :].zero_()
        slot[full + 1 :].zero_()
