# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Differentiable collectives over one axis of a mesh; each one's backward pass is its transpose.

Every function returns a new tensor and does not change its argument; on an axis of one rank it returns `x` itself. All
ranks of the axis must call it, with tensors of one shape and dtype; if any rank needs a gradient, all must use the
result, since transposes are collectives too. Integers and bools pass without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from fppo_kernels.operation import Arguments, Drawn, Exact, Kernel, Operation, OperationCost, Shape, filled

# torch 2.13 renamed these two; the old names give a warning there
_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor  # pyright: ignore[reportDeprecated]
)
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor  # pyright: ignore[reportDeprecated]
)


@attrs.define
class Calls:
    """The gathers and reduce-scatters of sharded parameters that this rank has begun on an axis, counted from zero.

    A rank that could not end a pass, for lack of memory, makes it again over no rows so that other ranks can go on. It
    takes no part in the first `skipped` collectives a second time: their results are zeros.
    """

    skipped: int = 0
    begun: int = 0


@attrs.frozen
class Axis:
    """One axis of the mesh; without a group it has one rank, and its collectives are the identity.

    `lanes` are process groups of two ranks, this one and another, in rank order. The lane with key (i, j) carries only
    messages from i to j: with NCCL a message waits for earlier ones in its group, in both directions. Messages without
    a lane use the group. `calls` counts collectives of sharded parameters, where a pass may have to be made again.
    """

    size: int = 1
    rank: int = 0
    group: Any = None
    lanes: Mapping[tuple[int, int], Any] = attrs.field(factory=dict, eq=False, repr=False)
    calls: Calls | None = attrs.field(default=None, eq=False, repr=False)


def all_gather(x: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate all ranks' `x` along `dim` in rank order, on every rank."""
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim % x.dim())  # type: ignore[return-value]


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Sum all ranks' `x`, and return this rank's slice of the sum, one of n equal ones along `dim`.

    Raises ValueError if the ranks do not divide the dimension.
    """
    if axis.size == 1:
        return x
    _check_divides("reduce_scatter", x, dim, axis)
    return _ReduceScatter.apply(x, axis, dim % x.dim())  # type: ignore[return-value]


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum all ranks' `x`, on every rank."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)  # type: ignore[return-value]


def all_to_all(x: Tensor, axis: Axis, *, split_dim: int, concat_dim: int) -> Tensor:
    """Send slice r, of n equal ones along `split_dim`, to rank r; concatenate the received ones along `concat_dim`.

    Slices are received in rank order. Exchanging the two dimensions inverts the function. Raises ValueError if the
    ranks do not divide the dimension.
    """
    if axis.size == 1:
        return x
    _check_divides("all_to_all", x, split_dim, axis)
    return _AllToAll.apply(x, axis, split_dim % x.dim(), concat_dim % x.dim())  # type: ignore[return-value]


def exchange(x: Tensor, axis: Axis, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send the rows of `x` in runs: run r, of sent[r] rows, goes to rank r. Return the runs that arrive, received[r]
    rows from rank r, in rank order.

    Exchanging the two lists inverts the function. Rows have one shape and dtype on all ranks. Raises ValueError if `x`
    does not have sum(sent) rows.
    """
    if axis.size == 1:
        return x
    if sum(sent) != x.shape[0]:
        raise ValueError(f"exchange: x has {x.shape[0]} rows, but sent = {list(sent)} has {sum(sent)}")
    return _Exchange.apply(x, axis, tuple(sent), tuple(received))  # type: ignore[return-value]


def broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Return the `x` of rank `source` on every rank; the other ranks' gradients are zero, the source's is the sum of
    all."""
    return x if axis.size == 1 else _Broadcast.apply(x, axis, source)  # type: ignore[return-value]


def permute(x: Tensor, axis: Axis, *, shift: int = 1) -> Tensor:
    """Return the `x` of the rank `shift` places before this one around the ring: every rank sends to rank + shift."""
    return x if axis.size == 1 else _Permute.apply(x, axis, shift)  # type: ignore[return-value]


def same(x: Tensor, axis: Axis) -> Tensor:
    """Mark an `x` that is equal on all ranks, and from which all ranks compute the same. The first rank's gradient
    stands for all; the other ranks' gradients are zero."""
    return x if axis.size == 1 else _Same.apply(x, axis)  # type: ignore[return-value]


@attrs.frozen(eq=False)
class Transfer:
    """A tensor in transfer between two ranks."""

    x: Tensor
    work: Any

    def wait(self) -> Tensor:
        """Wait until the tensor is received, or may be overwritten by its sender; return it."""
        self.work.wait()
        return self.x

    def done(self) -> bool:
        """Whether `wait` would return at once; False on some backends that cannot tell."""
        return self.work.is_completed()


def send(x: Tensor, axis: Axis, *, target: int) -> Transfer:
    """Start to send `x` to another rank of the axis, which must call `receive`. No gradients.

    Messages from one rank to another arrive in the order of their sends.
    """
    group, peer = _lane(axis, axis.rank, target)
    x = x.detach().contiguous()
    return Transfer(x, dist.isend(x, group=group, group_dst=peer))


def receive(place: Tensor, axis: Axis, *, source: int) -> Transfer:
    """Start to receive the next message from rank `source` of the axis, with the shape and dtype of the contiguous
    `place`. No gradients."""
    group, peer = _lane(axis, source, axis.rank)
    return Transfer(place, dist.irecv(place, group=group, group_src=peer))


def _lane(axis: Axis, source: int, target: int) -> tuple[Any, int]:
    """The group for messages from one rank to another, and the other rank's index in it."""
    peer = target if axis.rank == source else source
    lane = axis.lanes.get((source, target))
    return (axis.group, peer) if lane is None else (lane, int(peer > axis.rank))


def _check_divides(name: str, x: Tensor, dim: int, axis: Axis) -> None:
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"{name}: dimension {dim} of a tensor {list(x.shape)} has the size {x.shape[dim]}, which {axis.size} ranks "
            f"do not divide: pad it to a multiple of {axis.size}"
        )


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.where = axis, dim
        shard = x.movedim(dim, 0).contiguous()
        whole = shard.new_empty(shard.shape[0] * axis.size, *shard.shape[1:])
        _gather_single(whole, shard, group=axis.group)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ReduceScatter.apply(grads[0], *ctx.where), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.where = axis, dim
        whole = x.movedim(dim, 0).contiguous()
        shard = whole.new_empty(whole.shape[0] // axis.size, *whole.shape[1:])
        _reduce_scatter_single(shard, whole, group=axis.group)
        return shard.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllGather.apply(grads[0], *ctx.where), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllReduce.apply(grads[0], ctx.axis), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        ctx.axis, ctx.dims = axis, (split_dim, concat_dim)
        sent = x.unflatten(split_dim, (axis.size, x.shape[split_dim] // axis.size)).movedim(split_dim, 0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=axis.group)
        return received.flatten(0, 1) if concat_dim == 0 else torch.cat(received.unbind(0), concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        split_dim, concat_dim = ctx.dims
        return _AllToAll.apply(grads[0], ctx.axis, concat_dim, split_dim), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        ctx.where = axis, received, sent
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=axis.group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.where), None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, source: int) -> Tensor:
        ctx.where = axis, source
        out = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(out, group=axis.group, group_src=source)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Reduce.apply(grads[0], *ctx.where), None, None


class _Reduce(torch.autograd.Function):
    """Sum all ranks' `x` on the source; zeros on the other ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, source: int) -> Tensor:
        ctx.where = axis, source
        total = x.clone(memory_format=torch.contiguous_format)
        dist.reduce(total, group=axis.group, group_dst=source)
        return total if axis.rank == source else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Broadcast.apply(grads[0], *ctx.where), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, shift: int) -> Tensor:
        ctx.where = axis, shift
        sent = x.contiguous().view(-1)
        received = torch.empty_like(sent)
        to, source = (axis.rank + shift) % axis.size, (axis.rank - shift) % axis.size
        sends, receives = ([len(sent) if r == peer else 0 for r in range(axis.size)] for peer in (to, source))
        dist.all_to_all_single(received, sent, receives, sends, group=axis.group)
        return received.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, shift = ctx.where
        return _Permute.apply(grads[0], axis, -shift), None, None


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] if ctx.axis.rank == 0 else torch.zeros_like(grads[0])), None


# from a slice of the tokens with all heads to all tokens with a slice of the heads


def _call_all_to_all(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"exchanged": kernel(x["x"], keywords["axis"], split_dim=1, concat_dim=0)}


def _sized_all_to_all(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    size = shape["N"], shape["heads"], shape["head_dim"]
    return filled(device, dtype, size, {}, x=size)


def _exact_all_to_all(drawn: Drawn) -> Exact:
    x: Tensor = drawn.inputs["x"]
    return Exact({"exchanged": x.double()}, {("exchanged", "x"): drawn.weights.to(x.dtype).double()})


def _cost_all_to_all(shape: Shape, itemsize: int) -> OperationCost:
    size = 2 * shape["N"] * shape["heads"] * shape["head_dim"] * itemsize
    words = f"bytes: all read and written once, by {OPERATION.ranks} ranks, threads here, whose start is in the time"
    return OperationCost(bytes_forward=size, bytes_total=2 * size, words=words)


OPERATION = Operation(
    name="all_to_all",
    call=_call_all_to_all,
    reference=all_to_all,
    outputs=("exchanged",),
    leaves=("x",),
    sloped=("exchanged",),
    shape={"N": 4096, "heads": 16, "head_dim": 64},
    sized=_sized_all_to_all,
    cost=_cost_all_to_all,
    multiples={"N": 2, "heads": 2},
    ranks=2,
    transforms=(),
    exact=_exact_all_to_all,
)
