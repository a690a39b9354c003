"""Run a pipeline schedule: a function cut into stages over the ranks of an axis, and its gradient.

A stage's output is sent to the next stage, where it is a leaf. `torch.autograd.grad` of a stage's output by the
parameters and this leaf gives the vector-Jacobian product that is sent back to the stage before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from fppo.runtime.schedule import Action, Schedule
from fppo_kernels import collectives
from fppo_kernels.collectives import Axis, Transfer

# fn(params, stage, output of the stage before or None, micro-batch) returns the output, or (output, the stage's loss)
StageFn = Callable[[Any, int, Tensor | None, int], Any]


class Wire(NamedTuple):
    """A connection between two stages for one micro-batch: shape, dtype and device of the tensor and its gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


Wires = Callable[[int], Wire]  # the wires of each micro-batch


class _Mail:
    """The messages of this rank from and to others in a schedule."""

    def __init__(self, schedule: Schedule, axis: Axis, wires: Wires) -> None:
        self._schedule, self._axis, self._wires = schedule, axis, wires
        self._expected = {rank: deque(schedule.messages(rank, axis.rank)) for rank in range(axis.size)}
        self._begun: dict[int, tuple[Action, Transfer]] = {}  # receives by source rank
        self._here: dict[Action, Tensor] = {}
        self._sent: list[Transfer] = []

    def take(self, action: Action) -> Tensor:
        """Wait for the result of an action, of this rank or another, and return it."""
        source = action.stage % self._axis.size
        while action not in self._here:
            self._begin(source)
            name, transfer = self._begun.pop(source)
            self._begin(source)  # receive the next one while this rank computes
            self._here[name] = transfer.wait()
        return self._here.pop(action)

    def _begin(self, source: int) -> None:
        if source not in self._begun and self._expected[source]:
            name = self._expected[source].popleft()
            shape, dtype, device = self._wires(name.micro)
            place = torch.empty(shape, dtype=dtype, device=device)
            self._begun[source] = name, collectives.receive(place, self._axis, source=source)

    def give(self, action: Action, x: Tensor) -> None:
        """Send an action's result. Raises ValueError for a shape or dtype that the next stage does not expect."""
        wire, target = self._wires(action.micro), self._schedule.target(action)
        if (x.shape, x.dtype) != wire[:2]:
            raise ValueError(
                f"stage {action.stage} gives {x.dtype} {list(x.shape)}, but its neighbour expects {wire.dtype} "
                f"{list(wire.shape)}"
            )
        if target == self._axis.rank:
            self._here[action] = x.detach()
        elif target is not None:
            self._sent = [transfer for transfer in self._sent if not transfer.done()]  # frees memory
            self._sent.append(collectives.send(x, self._axis, target=target))

    def settle(self) -> None:
        """Wait until all messages are sent."""
        while self._sent:
            self._sent.pop(0).wait()


class _Sum:
    """A sum of lists of gradients; entry i is summed in `dtypes[i]`."""

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        self._dtypes, self._counts = dtypes, [0] * len(dtypes)
        self._total: list[Tensor | None] = [None] * len(dtypes)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients; None counts as zero."""
        own: list[tuple[Tensor, Tensor]] = []
        for place, grad in enumerate(grads):
            before = self._total[place]
            if grad is None:
                continue
            if before is None:
                self._total[place] = grad.to(self._dtypes[place])
            elif self._counts[place] == 1:  # out of place: a gradient's memory may be shared
                self._total[place] = before + grad
            else:
                own.append((before, grad))
            self._counts[place] += 1
        if own:
            before, added = zip(*own, strict=True)
            torch._foreach_add_(list(before), list(added))  # pyright: ignore[reportPrivateImportUsage]

    def totals(self, like: Sequence[Tensor]) -> list[Tensor]:
        """The sums; zeros like the tensors `like` where nothing was added."""
        pairs = zip(self._total, like, self._dtypes, strict=True)
        return [torch.zeros_like(x, dtype=kind) if total is None else total for total, x, kind in pairs]


def pipeline_value_and_grad(
    fn: StageFn,
    params: Any,
    schedule: Schedule,
    *,
    axis: Axis,
    wires: Wires,
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[list[tuple[Tensor, Any]], Any]:
    """`value_and_grad` of the last stage's losses summed over micro-batches, on this rank of the axis.

    `fn(params, stage, received, micro)` returns the output for the next stage, with the shape and dtype of
    `wires(micro)`, or (output, a 0-d loss of the stage's own), which is added to the sum; on the last stage (0-d loss,
    aux). `params` is the tree of this rank's stages. Returns (loss, aux) of each micro-batch on the last stage's rank,
    elsewhere an empty list; and the gradients, a tree like `params`, summed in `dtypes` (of its leaves; None: their
    own). All ranks of the axis must call with the same schedule.
    """
    leaves, spec = pytree.tree_flatten(params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    tree = pytree.tree_unflatten(leaves, spec)
    mail, last = _Mail(schedule, axis, wires), schedule.stages - 1
    total = _Sum([leaf.dtype for leaf in leaves] if dtypes is None else dtypes)
    kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None, GradientEdge | None]] = {}
    reports: dict[int, tuple[Tensor, Any]] = {}
    for action in schedule.actions[axis.rank]:
        kind, stage, micro = action
        schedule.began(action)
        if kind == "forward":
            received = mail.take(schedule.needs(action)[0]).requires_grad_() if stage else None
            with torch.enable_grad():
                out = fn(tree, stage, received, micro)
            own = None
            if stage == last:
                out, aux = out
                reports[micro] = pytree.tree_map_only(Tensor, Tensor.detach, (out, aux))
            else:
                out, own = out if isinstance(out, tuple) else (out, None)
                mail.give(action, out)
            # nodes instead of tensors, whose memory is free once they are sent
            kept[stage, micro] = received, _edge(out), _edge(own)
            del out, own
        else:
            received, edge, own = kept.pop((stage, micro))
            grad = None if stage == last else mail.take(schedule.needs(action)[1])
            *grads, back = _gradients([(edge, grad), (own, None)], leaves, received)
            total.add(grads)
            del grads  # else they would live through the next passes
            if received is not None:
                mail.give(action, torch.zeros_like(received) if back is None else back)
    mail.settle()
    return [reports[micro] for micro in sorted(reports)], pytree.tree_unflatten(total.totals(leaves), spec)


def _edge(x: Tensor | None) -> GradientEdge | None:
    return get_gradient_edge(x) if x is not None and x.requires_grad else None


def _gradients(
    results: Sequence[tuple[GradientEdge | None, Tensor | None]], leaves: Sequence[Tensor], received: Tensor | None
) -> Sequence[Tensor | None]:
    """The summed vector-Jacobian products of the results (gradient None for a loss) by the leaves and, last, by the
    received tensor."""
    tracked = [(edge, grad) for edge, grad in results if edge is not None]
    if not tracked:  # all tokens were masked, or no leaf was used
        return [None] * (len(leaves) + 1)
    edges, given = zip(*tracked, strict=True)
    inputs = leaves if received is None else [*leaves, received]
    grads = torch.autograd.grad(edges, inputs, given, allow_unused=True)
    return [*grads, None] if received is None else grads


@torch.no_grad()
def pipeline_forward(fn: StageFn, params: Any, schedule: Schedule, *, axis: Axis, wires: Wires) -> list[Any]:
    """The last stage's outputs for each micro-batch, on its rank; elsewhere an empty list. `fn` and `wires` are as in
    `pipeline_value_and_grad`; the schedule has forward passes alone."""
    mail, results = _Mail(schedule, axis, wires), {}
    for action in schedule.actions[axis.rank]:
        received = mail.take(schedule.needs(action)[0]) if action.stage else None
        out = fn(params, action.stage, received, action.micro)
        if action.stage == schedule.stages - 1:
            results[action.micro] = out
        else:
            mail.give(action, out)
    mail.settle()
    return [results[micro] for micro in sorted(results)]
