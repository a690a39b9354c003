"""What ranks that hold different rows must agree on: which rows make a mini-batch, and how many passes there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import tree
from fppo.batch import Column
from fppo.key import Key
from fppo.runtime.mesh import DATA_AXES, Mesh, all_reduce
from fppo_kernels import collectives

R = TypeVar("R")


def mini_batches(row_ids: Tensor, size: int, mesh: Mesh, *, key: Key | None = None) -> list[Tensor]:
    """The numbers of this rank's rows in each mini-batch of `size` rows of all data ranks, in order; some may be empty.

    The rows of all ranks are ordered by a draw that depends on `key` and `row_ids` [B]. Without a key one rank takes
    its rows as they come, and several take theirs in the order of `row_ids`, however they are spread.
    """
    if size < 1:
        raise ValueError(f"mini_batch_size={size}: give 1 or more")
    ids, first = _all_row_ids(row_ids, mesh)
    if key is not None:
        place = key.uniform(ids, 1)[:, 0]
    else:
        place = torch.arange(len(ids)) if len(ids) == len(row_ids) else ids
    order = torch.argsort(place, stable=True)
    own = (order >= first) & (order < first + len(row_ids))
    return [part[mine] - first for part, mine in zip(order.split(size), own.split(size), strict=True) if len(part)]


def _all_row_ids(row_ids: Tensor, mesh: Mesh) -> tuple[Tensor, int]:
    """The row ids of all data ranks, rank after rank, on the host; and the place of this rank's first."""
    if all(mesh[name].size == 1 for name in DATA_AXES):
        return row_ids.cpu(), 0
    counts = _data_gather(torch.tensor([len(row_ids)], device=row_ids.device), mesh).flatten().tolist()
    padded = row_ids.new_zeros(max(counts))
    padded[: len(row_ids)] = row_ids
    found = _data_gather(padded, mesh).cpu()
    replicate, shard = (mesh[name] for name in DATA_AXES)
    number = replicate.rank * shard.size + shard.rank
    return torch.cat([ids[:count] for ids, count in zip(found, counts, strict=True)]), sum(counts[:number])


def _data_gather(x: Tensor, mesh: Mesh) -> Tensor:
    """`x` [k] of all data ranks [ranks, k]."""
    gathered = x[None]
    for name in reversed(DATA_AXES):
        gathered = collectives.all_gather(gathered, mesh[name])
    return gathered


def rounds(counts: Sequence[int], mesh: Mesh, device: torch.device) -> list[int]:
    """How many micro-batches this rank runs of each mini-batch, of which it has `counts`: at least one.

    Ranks that share their parameters run equally many, since every pass gathers.
    """
    if not (mesh.sharded and counts):
        return [max(count, 1) for count in counts]
    agreed = all_reduce(torch.tensor(counts, device=device), mesh["shard"], dist.ReduceOp.MAX)
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
