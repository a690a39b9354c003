"""Distribution of rows over data ranks: shares, mini-batches, numbers of passes, and results in the rows' order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import batch as batches
from fppo import metrics, tree
from fppo.batch import Column
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.models import flops
from fppo.models.model import Model
from fppo.runtime.mesh import AXES, DATA_AXES, Mesh, all_reduce, gather_over, ranks_on
from fppo.shapes import RowIds
from fppo.steps.micro_batching import balance
from fppo.steps.shared import SortedRows, deal_shared

if TYPE_CHECKING:
    from fppo.steps.packed import Masks

R = TypeVar("R")


def shares(model: Model, lengths: Sequence[int], mesh: Mesh, shared_rows: SortedRows | None = None) -> list[list[int]]:
    """The row indices of each data rank's share, of rows that all ranks hold: equal work for `model`, attention
    included.

    With fewer rows than ranks some shares are empty. All ranks compute equal shares. Rows that share tokens
    (`shared_rows`) stay together.
    """
    ranks = ranks_on(mesh, DATA_AXES)
    if ranks == 1:
        return [list(range(len(lengths)))]
    sizes = {*lengths, *(() if shared_rows is None else shared_rows.depths)}
    cost = {length: round(flops.forward_flops(model, [length]) / 1e3) for length in sizes}
    if shared_rows is not None:
        return deal_shared(shared_rows, ranks, cost.__getitem__)
    groups = balance([cost[length] for length in lengths], min(ranks, len(lengths))) if len(lengths) else []
    return groups + [[] for _ in range(ranks - len(groups))]


def deal(count: int, mesh: Mesh) -> list[list[int]]:
    """Distribute `count` items of unknown cost over the data ranks, in turn."""
    ranks = ranks_on(mesh, AXES)
    return [list(range(rank, count, ranks)) for rank in range(ranks)]


def imbalance(model: Model, rows: SortedRows, shared: Sequence[Sequence[int]]) -> float:
    """The work of the rank with the most work, relative to the mean of all ranks; 1 is ideal. `shared` are the row
    indices of each rank's share."""
    parts = [rows.part(part) for part in shared]
    work = [flops.forward_flops(model, part.lengths, shared=part.depths) for part in parts]
    return max(work) * len(work) / max(sum(work), 1.0)


def saved_work(model: Model, masks: Masks, micro_batches: Sequence[Sequence[int]], role: str) -> Metrics:
    """The fractions of tokens, and of the FLOPs of forward and backward passes, that sharing common prefixes saves in
    passes over these micro-batches, as metrics of this `role`."""
    depths = [depth for part in micro_batches for depth in batches.rows(masks, part).depths]
    lengths, heads = masks.lengths, int(masks.response.sum())
    whole = flops.train_flops(model, lengths, head_tokens=heads)
    saved = whole - flops.train_flops(model, lengths, head_tokens=heads, shared=depths)
    return {
        f"perf/shared_tokens/{role}": metrics.mean(sum(depths), sum(lengths)),
        f"perf/shared_flops/{role}": metrics.mean(saved, whole),
    }


def collect(x: Tensor, shared: Sequence[Sequence[int]], mesh: Mesh, axes: Sequence[str] = DATA_AXES) -> Tensor:
    """Gather all ranks' results for their rows [b, ...] on every rank, in the rows' order [B, ...].

    `shared` are the row indices of each rank of `axes`, equal on all ranks. No gradients.
    """
    if len(shared) == 1:
        return x
    if x.dtype == torch.bool:
        return collect(x.byte(), shared, mesh, axes).bool()
    width = max(map(len, shared))
    padded = x.new_zeros(width, *x.shape[1:])
    padded[: len(x)] = x.detach()
    gathered = gather_over(padded, mesh, axes)
    order = torch.tensor([row for part in shared for row in part], device=x.device)
    joined = torch.cat([rows[: len(part)] for rows, part in zip(gathered, shared, strict=True)])
    return torch.empty_like(joined).index_copy(0, order, joined)


def mini_batches(row_ids: RowIds, size: int, *, key: Key | None = None, groups: Tensor | None = None) -> list[Tensor]:
    """The row indices of each mini-batch of `size` rows; the last may have fewer.

    Rows are ordered by a draw that depends on `key` and `row_ids` [B]; without a key they keep their order. With
    `groups` [B] int64 the draw is over groups. Rows of a group are then adjacent, ordered by their ids, and only a
    group that does not fit into a mini-batch's remaining rows is split over two.
    """
    if size < 1:
        raise ValueError(f"mini_batch_size={size}: give 1 or more")
    if key is None:
        order = torch.arange(len(row_ids))
    elif groups is None:
        order = torch.argsort(key.uniform(row_ids.cpu(), 1)[:, 0], stable=True)
    else:
        ids, (_, number) = row_ids.cpu(), groups.cpu().unique(return_inverse=True)
        first = torch.full((int(number.max()) + 1,), torch.iinfo(ids.dtype).max, dtype=ids.dtype)
        first = first.scatter_reduce(0, number, ids, "amin")[number]  # the smallest id represents the group
        order = torch.argsort(ids)
        for rank in (first, key.uniform(first, 1)[:, 0]):
            order = order[torch.argsort(rank[order], stable=True)]
    return [numbers for numbers in order.split(size) if len(numbers)]


def rounds(counts: Sequence[int], mesh: Mesh, device: torch.device) -> list[int]:
    """The number of micro-batches, at least one, that this rank runs for each mini-batch, blank ones included; `counts`
    are the numbers of its own micro-batches."""
    return [max(count, 1) for count in largest(counts, mesh, device)]


def largest(counts: Sequence[int], mesh: Mesh, device: torch.device) -> list[int]:
    """The largest of each of the counts among the ranks that share parameters.

    They run equally many passes, since every pass gathers parameters or exchanges tokens.
    """
    axes = [mesh[name] for name, together in (("shard", mesh.sharded), ("expert", True)) if together]
    if not (counts and any(axis.size > 1 for axis in axes)):
        return list(counts)
    agreed = torch.tensor(counts, device=device)
    for axis in axes:
        agreed = all_reduce(agreed, axis, dist.ReduceOp.MAX)
    return agreed.tolist()


def blank(record: R) -> R:
    """A record of one row with one token, with `record`'s columns (which may be empty) and an empty response mask."""

    def column(x: Tensor | Column) -> Tensor | Column:
        return x.new_zeros(1, *x.shape[1:]) if isinstance(x, Tensor) else Column([None])

    row: Any = pytree.tree_map(column, record)
    seen = row.attention_mask.clone()
    seen[:, -1:] = True
    return tree.replace(row, attention_mask=seen)
