"""Passes over the data of a request: log-probs of every target, the loss, and its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo import batch as batches
from fppo.grad import value_and_grad
from fppo.models.model import Params
from fppo.serve.tinker.data import DataRows, Datum, TargetedRows
from fppo.serve.tinker.graphs import run_custom
from fppo.serve.tinker.losses import Columns, Loss
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.outputs import Forward
from fppo.steps.packed import MicroBatch, cut, indexed, masks_of
from fppo.steps.recorded import ready
from fppo.steps.targets import forward_targets


class PassResult(NamedTuple):
    """The loss of a pass over some rows, 0-d, and what it was computed from; detached."""

    loss: Tensor
    log_probs: Tensor  # [b, S, K]
    per_token: Tensor | None  # [b, S, K], of losses of the table
    sums: Mapping[str, Tensor]  # of a custom loss's metrics over the data, 0-d each


def run_data(
    params: Params,
    data: Sequence[Datum],
    rows: DataRows,
    loss: Loss,
    *,
    forward: Forward,
    micro_batching: MicroBatching,
    grads: Params | None = None,
    backward: bool = True,
) -> tuple[PassResult, Params | None]:
    """Run all data in micro-batches, in a fixed order. Returns the results in the data's order, and the sum of `grads`
    and the gradient of the loss; without `backward`, `grads` unchanged."""
    masks = masks_of(rows.rows, forward)
    inputs, kinds = ready(params, forward, None), {name: x.dtype for name, x in params.items()}
    results, order, total = list[PassResult](), list[int](), grads
    for numbers in cut(masks, micro_batching):
        own, columns, masks_of_own = batches.rows((rows.rows, dict(rows.columns), masks), numbers)
        micro, chosen = indexed(own, masks_of_own, forward), [data[i] for i in numbers]
        if backward:
            (_, result), new = value_and_grad(_loss_of, has_aux=True)(inputs, micro, columns, chosen, loss, forward)
            total = added(total, {name: x.to(kinds[name]) for name, x in new.items()}, own=bool(results))
        else:
            with torch.no_grad():
                result = _loss_of(inputs, micro, columns, chosen, loss, forward)[1]
        results.append(result)
        order += numbers
    return joined(results, order), total


def _loss_of(
    params: Params, micro: MicroBatch, columns: Columns, data: Sequence[Datum], loss: Loss, forward: Forward
) -> tuple[Tensor, PassResult]:
    """The loss of some rows, 0-d, and the pass's result."""
    rows: TargetedRows = micro.rows
    log_probs = forward_targets(params, rows, forward=forward, indices=micro.indices)
    return loss_of(log_probs, rows, columns, data, loss)


def loss_of(
    log_probs: Tensor, rows: TargetedRows, columns: Columns, data: Sequence[Datum], loss: Loss
) -> tuple[Tensor, PassResult]:
    """The loss of some rows, 0-d, from the log-probs [b, S, K] of their targets, and the pass's result."""
    if loss.graph is not None:
        each = DataRows(rows, {}).of(log_probs, data)
        own = [{name: d.inputs[name].to(log_probs.device) for name in loss.needs} for d in data]
        total, sums = run_custom(loss.graph, each, own)
        return total, PassResult(total.detach(), log_probs.detach(), None, sums)
    wide = {name: x.to(log_probs.dtype) for name, x in columns.items()}
    per_token = loss.per_token(log_probs.flatten(1), wide, rows.real.flatten(1)).view(log_probs.shape)
    total = per_token.sum()
    return total, PassResult(total.detach(), log_probs.detach(), per_token.detach(), {})


def added(total: Params | None, new: Params, *, own: bool) -> Params:
    """The sum of two trees of gradients; with `own` in the memory of `total`, which the caller gives up."""
    if total is None:
        return new
    if not own:
        return {name: total[name] + x for name, x in new.items()}
    torch._foreach_add_(list(total.values()), [new[name] for name in total])  # pyright: ignore[reportPrivateImportUsage]
    return total


def joined(results: Sequence[PassResult], order: Sequence[int]) -> PassResult:
    """The results of all rows, in the data's order."""
    back = batches.inverse(list(order))
    each = [torch.cat([x.log_probs for x in results])[back.to(results[0].log_probs.device)]]
    if results[0].per_token is not None:
        joined = torch.cat([x.per_token for x in results if x.per_token is not None])
        each.append(joined[back.to(joined.device)])
    loss = torch.stack([x.loss for x in results]).sum()
    sums = {key: torch.stack([x.sums[key] for x in results]).sum() for key in results[0].sums}
    return PassResult(loss, each[0], each[1] if len(each) > 1 else None, sums)
