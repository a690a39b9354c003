"""Rows over data ranks: who takes which, which make a mini-batch, how many passes there are, and results in order."""

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


def shares(model: Model, lengths: Sequence[int], mesh: Mesh, alike: SortedRows | None = None) -> list[list[int]]:
    """The rows that each data rank takes of rows that all of them hold: equal work for `model`, its attention counted.

    With fewer rows than ranks some take none. All ranks find the same. Of rows that share tokens (`alike`) those that
    do so stay together.
    """
    ranks = ranks_on(mesh, DATA_AXES)
    if ranks == 1:
        return [list(range(len(lengths)))]
    sizes = {*lengths, *(() if alike is None else alike.depths)}
    cost = {length: round(flops.forward_flops(model, [length]) / 1e3) for length in sizes}
    if alike is not None:
        return deal_shared(alike, ranks, cost.__getitem__)
    groups = balance([cost[length] for length in lengths], min(ranks, len(lengths))) if len(lengths) else []
    return groups + [[] for _ in range(ranks - len(groups))]


def deal(count: int, mesh: Mesh) -> list[list[int]]:
    """Which of `count` things of unknown cost each rank takes: like a deck of cards."""
    ranks = ranks_on(mesh, AXES)
    return [list(range(rank, count, ranks)) for rank in range(ranks)]


def imbalance(model: Model, rows: SortedRows, shared: Sequence[Sequence[int]]) -> float:
    """The work of the rank that has most of these rows, over the mean of all ranks: 1 is ideal."""
    parts = [rows.part(part) for part in shared]
    work = [flops.forward_flops(model, part.lengths, shared=part.depths) for part in parts]
    return max(work) * len(work) / max(sum(work), 1.0)


def saved_work(model: Model, masks: Masks, micro_batches: Sequence[Sequence[int]], role: str) -> Metrics:
    """The shares of tokens, and of the FLOPs of forward and backward pass, that passes over micro-batches of rows with
    these masks do without, since rows share tokens."""
    depths = [depth for part in micro_batches for depth in batches.rows(masks, part).depths]
    lengths, heads = masks.lengths, int(masks.response.sum())
    whole = flops.train_flops(model, lengths, head_tokens=heads)
    saved = whole - flops.train_flops(model, lengths, head_tokens=heads, shared=depths)
    return {
        f"perf/shared_tokens/{role}": metrics.mean(sum(depths), sum(lengths)),
        f"perf/shared_flops/{role}": metrics.mean(saved, whole),
    }


def collect(x: Tensor, shared: Sequence[Sequence[int]], mesh: Mesh, axes: Sequence[str] = DATA_AXES) -> Tensor:
    """The results of all ranks for their rows [b, ...], on every rank and in the order of the rows [B, ...].

    `shared` are the rows of each rank of `axes`, in their order, on all ranks the same. No gradients.
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
    """The numbers of the rows in each mini-batch of `size` rows; the last may have fewer.

    They are ordered by a draw that depends on `key` and `row_ids` [B], or taken as they come without a key. With
    `groups` [B] int64 it is the groups that are drawn: rows of one stand together, by their ids, and only one that does
    not fit into what a mini-batch has left is in two.
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
        first = first.scatter_reduce(0, number, ids, "amin")[number]  # the least id stands for the group
        order = torch.argsort(ids)
        for rank in (first, key.uniform(first, 1)[:, 0]):
            order = order[torch.argsort(rank[order], stable=True)]
    return [numbers for numbers in order.split(size) if len(numbers)]


def rounds(counts: Sequence[int], mesh: Mesh, device: torch.device) -> list[int]:
    """How many micro-batches this rank runs of each mini-batch, of which it has `counts`: at least one.

    Ranks that share their parameters run equally many, since every pass gathers them, or exchanges tokens.
    """
    axes = [mesh[name] for name, together in (("shard", mesh.sharded), ("expert", True)) if together]
    if not (counts and any(axis.size > 1 for axis in axes)):
        return [max(count, 1) for count in counts]
    agreed = torch.tensor(counts, device=device)
    for axis in axes:
        agreed = all_reduce(agreed, axis, dist.ReduceOp.MAX)
    return agreed.clamp(min=1).tolist()


def blank(record: R) -> R:
    """One row of one token like the rows of `record` (which may have none), with nothing in the response mask.

    It adds nothing to losses, gradients and metrics.
    """

    def column(x: Tensor | Column) -> Tensor | Column:
        return x.new_zeros(1, *x.shape[1:]) if isinstance(x, Tensor) else Column([None])

    row: Any = pytree.tree_map(column, record)
    seen = row.attention_mask.clone()
    seen[:, -1:] = True
    return tree.replace(row, attention_mask=seen)
