"""An optimizer's step on the host, whose memory keeps weights and moments: the device has a copy of the weights alone,
in the dtypes of its passes (ZeRO-Offload, arXiv:2101.06840).

Gradients leave the device during the last backward pass of a mini-batch, each as soon as it is complete, if no other
rank adds to them; else once they are summed. The step waits for all of them, since their norm decides whether it is
skipped, with clipping or without. Updated weights return by bucket, while the next bucket is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import tree
from fppo.metrics import Metrics
from fppo.models.model import Params
from fppo.runtime.mesh import AXES, Mesh, ranks_on
from fppo.runtime.offload import Finish, Lane, Update, buckets_of, copied, pieces_of
from fppo.steps.optimizers import Landing, Optimizer
from fppo.steps.outputs import Forward
from fppo.steps.sharded import wire_dtypes
from fppo.tree import state

Kernel = Callable[..., None]
Make = Callable[[Callable[[Kernel], Kernel]], Optimizer]
BUCKET = 128 << 20  # bytes of a bucket's first and second moments


@state
class Masters:
    """The weights on the host, of which a state's parameters are copies on the device, and the state on the host of
    their optimizer (`inner`)."""

    params: Params
    inner: Any


@attrs.frozen
class HostStep:
    """An update of a state on the host, before and after, by `stage(state, ..., donate=)`, whose optimizer is of
    `on_host`.

    During the call the lane's device has a copy of the parameters: in the dtypes of the passes of `forward`, or, if its
    mesh shards parameters, of the shards as they are. With `donate` the new state reuses all memory of the old one.
    """

    stage: Update
    lane: Lane
    forward: Forward

    def __call__(self, state: Any, *args: Any, donate: bool = False, **keywords: Any) -> tuple[Any, Any]:
        state = tree.donate(state) if donate else copied(state)
        home: Params = state.params
        kinds = {} if self.forward.mesh.sharded else wire_dtypes(self.forward.model, home)
        begun = {name: self.lane.fetch([_cast(x, kinds.get(name, x.dtype), self.lane)]) for name, x in home.items()}
        there = {name: finish()[0] for name, finish in begun.items()}
        masters = Masters(params=home, inner=state.opt)
        after, report = self.stage(tree.replace(state, params=there, opt=masters), *args, donate=True, **keywords)
        self.lane.settle()
        return tree.replace(after, params=after.opt.params, opt=after.opt.inner), report


def on_host(make: Make, lane: Lane, *, fixed: Collection[str] = (), bucket_bytes: int = BUCKET) -> Optimizer:
    """Make an optimizer for states inside of a `HostStep`: the device's parameters, and their `Masters`.

    `make(wrap)` makes the optimizer that updates the masters on the host; `wrap` wraps an elementwise AdamW kernel, so
    that each bucket returns to the device while the next is computed. What another optimizer updates returns at its
    end. Masters in `fixed` do not change. `init(params)` is the state of that optimizer for weights on the host.
    """
    plain = make(lambda kernel: kernel)
    scale = plain.loss_scale
    return plain._replace(
        update=partial(_update, make=make, lane=lane, fixed=fixed, bucket_bytes=bucket_bytes),
        loss_scale=None if scale is None else lambda own: scale(own.inner),
        landing=lambda own: Landing(lane, {name: x.dtype for name, x in own.params.items()}),
    )


def _update(
    params: Params,
    grads: Params,
    state: Masters,
    step: float,
    *,
    mesh: Mesh,
    donate: bool = False,
    make: Make,
    lane: Lane,
    fixed: Collection[str],
    bucket_bytes: int,
) -> tuple[Params, Masters, Metrics]:
    lane.settle()  # for gradients that are under way
    take = tree.donate if donate else copied
    params, grads, state = take(params), take(grads), take(state)
    masters, landed = state.params, _landed(grads, lane)
    lane.settle()
    kept = {name: masters[name].clone() for name in fixed if name in masters}
    returning = _Returning(params, lane)
    optimizer = make(lambda kernel: returning.by_buckets(kernel, masters, bucket_bytes))
    on_wire = attrs.evolve(mesh, wire=lane.device)
    after, inner, report = optimizer.update(masters, landed, state.inner, step, mesh=on_wire, donate=True)
    for name, x in kept.items():
        after[name].copy_(x)
    returning.rest(after, also=kept)
    return params, Masters(params=after, inner=inner), report


class Leaving:
    """The gradients of a mini-batch on their way to the host, each begun when the last backward pass has made it."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._landed: Params = {}

    def watch(self, leaves: Mapping[str, Tensor], total: list[Tensor]) -> None:
        """Take the gradients of these leaves of autograd from the next backward pass, added to those before it
        (`total`, in the order of `leaves`, or empty), which are given up. The pass itself returns zeros in their place,
        which take no memory."""
        for place, (name, leaf) in enumerate(leaves.items()):
            leaf.register_hook(partial(self._take, name, place, total))

    def landed(self, grads: Mapping[str, Tensor], total: list[Tensor]) -> Params:
        """The sums on the host, which may be read once the lane has settled: those that were taken, and those of
        `grads`, the results of the last pass, that no backward pass made."""
        for place, (name, grad) in enumerate(grads.items()):
            if name not in self._landed:
                self._take(name, place, total, grad)
        return {name: self._landed[name] for name in grads}

    def _take(self, name: str, place: int, total: list[Tensor], grad: Tensor) -> Tensor:
        own = grad.detach()
        summed = own if not total else total[place] + own
        summed = summed.to(self._landing.dtypes[name])
        if total:
            total[place] = own.new_empty(0)
        home = self._landed[name] = self._landing.lane.host_like(summed)
        self._landing.lane.store([summed], [home])
        return own.new_zeros(()).expand(own.shape)


def leaves_early(mesh: Mesh) -> bool:
    """Whether the gradients of this rank's passes are complete without those of other ranks."""
    return ranks_on(mesh, AXES) == 1


def _landed(grads: Params, lane: Lane) -> Params:
    """Copy gradients to the host, but those that are there; they may be read once the lane has settled."""
    there = {name: lane.host_like(x) for name, x in grads.items() if x.device.type != "cpu"}
    if there:
        lane.store([grads[name] for name in there], list(there.values()))
    return {name: there.get(name, x) for name, x in grads.items()}


class _Returning:
    """The way of weights from the host into their copies on the device (`there`), by name. They are cast on the host,
    so that fewer bytes travel."""

    def __init__(self, there: Params, lane: Lane) -> None:
        self._there, self._lane = there, lane
        self._begun: list[Finish] = []
        self._sent: set[str] = set()

    def by_buckets(self, kernel: Kernel, home: Params, bucket_bytes: int) -> Kernel:
        """Wrap an AdamW kernel for weights of `home`: each bucket is sent while the next is computed."""
        names = {_place(x): name for name, x in home.items()}

        def adamw(
            params: list[Tensor],
            grads: list[Tensor],
            exp_avgs: list[Tensor],
            exp_avg_sqs: list[Tensor],
            steps: list[Tensor],
            **scalars: Any,
        ) -> None:
            owners = [names[_place(x)] for x in params]
            targets = [self._there[name] for name in owners]
            raised: dict[int, Tensor] = {}
            for bucket in buckets_of([params, grads, exp_avgs, exp_avg_sqs], bucket_bytes):
                counts = [steps[piece.number].clone() for piece in bucket]
                columns = (pieces_of(x, bucket) for x in (params, grads, exp_avgs, exp_avg_sqs))
                kernel(*columns, counts, **scalars)
                self._send(pieces_of(params, bucket), pieces_of(targets, bucket))
                raised |= {piece.number: count for piece, count in zip(bucket, counts, strict=True)}
            for number, count in raised.items():
                steps[number].copy_(count)
            self._sent.update(owners)

        return adamw

    def rest(self, home: Params, also: Collection[str] = ()) -> None:
        """Send the weights of `home` that no kernel has sent, and those that are named again, and wait for all."""
        for name, x in home.items():
            if name not in self._sent or name in also:
                self._send([x], [self._there[name]])
        for finish in self._begun:
            finish()

    def _send(self, weights: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        cast = [_cast(x, y.dtype, self._lane) for x, y in zip(weights, targets, strict=True)]
        self._begun.append(self._lane.send(cast, targets))


def _cast(x: Tensor, dtype: torch.dtype, lane: Lane) -> Tensor:
    return x if x.dtype == dtype else lane.host_like(x, dtype).copy_(x)


def _place(x: Tensor) -> tuple[int, int, torch.Size]:
    """An identity of a tensor, equal for tensors on the same memory."""
    return x.untyped_storage()._cdata, int(x.storage_offset()), x.shape
