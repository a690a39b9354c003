"""Seams (modules in place of a model's) on a tensor or expert axis: gather a slice of the tokens, scatter it again.

Between blocks (attention, MLP) the packed row is cut over the axis. A block gathers it, computes on its cut of the
parameters, and scatters the sum of all ranks' outputs: two collectives, and none inside. Hence every rank's gradient of
an uncut parameter is a share of the sum (Korthikanti et al., 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fppo.models.seams import take_place
from fppo.runtime.layout import Cut
from fppo_kernels import collectives
from fppo_kernels.collectives import Axis


class Region:
    """The axis of a seam, shared by copies of a skeleton."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Region:
        return self

    def enter(self, x: Tensor) -> Tensor:
        """Gather all tokens [B, S, H] from the ranks' slices."""
        return collectives.all_gather(x, self.axis, dim=1)

    def leave(self, x: Tensor) -> Tensor:
        """Sum all ranks' `x` [B, S, H] and return this rank's slice of the tokens."""
        return collectives.reduce_scatter(x, self.axis, dim=1)


class _Seam(nn.Module):
    """Replaces a module and keeps its parameter names."""

    def __init__(self, inner: nn.Module, region: Region) -> None:
        super().__init__()
        take_place(self, inner)
        self._inner = (inner,)  # in a tuple, it is no child
        self.region = region


def replace(skeleton: nn.Module, path: str, seam: Callable[[Any], nn.Module]) -> None:
    """Replace a module by a seam; a layer's seam shares the layer's modules."""
    parent, _, child = path.rpartition(".")
    modules = skeleton.get_submodule(parent)._modules
    modules[child] = seam(modules[child])


class BlockSeam(_Seam):
    """A block with cut parameters: gathers all ranks' tokens, and returns this rank's slice of the sum."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (block,), region = self._inner, self.region
        if args:
            args = (region.enter(args[0]), *args[1:])
        else:
            kwargs["hidden_states"] = region.enter(kwargs["hidden_states"])
        out = block(*args, **kwargs)
        return (region.leave(out[0]), *out[1:]) if isinstance(out, tuple) else region.leave(out)


class EmbeddingSeam(_Seam):
    """An embedding cut by rows, this rank's from `first` on; its output is this rank's slice of the tokens."""

    def __init__(self, inner: nn.Embedding, region: Region, first: int) -> None:
        super().__init__(inner, region)
        # torch's padding_idx is a row of the whole weight: of a cut it would be another token's
        self._first, self._pad, inner.padding_idx = first, inner.padding_idx, None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.region.leave(self.share(tokens))

    def share(self, tokens: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens among this rank's rows, zeros for others; their sum over ranks is
        complete."""
        (embedding,), rows = self._inner, len(self._parameters["weight"])  # type: ignore[arg-type]
        places = tokens - self._first
        own = (places >= 0) & (places < rows)
        out = embedding(places.clamp(0, rows - 1))
        if self._pad is not None:  # torch gives that row no gradient
            out = torch.where((tokens == self._pad)[..., None], out.detach(), out)
        return torch.where(own[..., None], out, 0.0)


class WidthSeam(_Seam):
    """A norm over a width that the axis cuts by `cut`: gathers the whole width, and returns this rank's part."""

    def __init__(self, inner: nn.Module, region: Region, cut: Cut) -> None:
        super().__init__(inner, region)
        self._cut = cut

    def forward(self, x: Tensor) -> Tensor:
        (norm,), axis, cut = self._inner, self.region.axis, self._cut
        pieces = collectives.all_gather(x, axis, dim=-1).split(x.shape[-1], -1)
        out = norm(torch.cat([pieces[cut.first(part, axis.size)] for part in range(cut.parts)], -1))
        return out.narrow(-1, cut.part(axis.rank, axis.size) * x.shape[-1], x.shape[-1])


# (rows to each rank's experts [R, E / R], rows from each rank to this rank's experts [R, E / R], rows in total) -> the
# numbers of rows sent to and received from each rank
Sizes = Callable[[Tensor, Tensor, int], tuple[list[int], list[int]]]


def exchanged_rows(counts: Tensor, others: Tensor, rows: int) -> tuple[list[int], list[int]]:
    """The numbers of rows sent to each rank and received from it, from `counts` [ranks, experts] of this rank's rows,
    and `others` of all ranks' rows for this rank's experts. Here alone the host waits for the device."""
    del rows
    sent, received = torch.stack([counts.sum(1), others.sum(1)]).tolist()
    return sent, received


class ExpertsSeam(_Seam):
    """The experts of this rank of an expert axis, equally many on every rank: tokens are sent to the ranks of their
    experts, and the results are sent back, weighted and summed.

    Inside a block on a tensor axis, where every rank has all tokens, a rank sends its slice; the output is its share of
    the sum over the tensor ranks.
    """

    def __init__(
        self, inner: nn.Module, region: Region, sizes: Sizes = exchanged_rows, block: Region | None = None
    ) -> None:
        super().__init__(inner, region)
        self._sizes, self._block = sizes, Region(Axis()) if block is None else block

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        axis, count = self._block.axis, len(hidden)
        if axis.size == 1:
            return self._dispatched(hidden, chosen, weights)
        before, own = axis.rank * (count // axis.size), count // axis.size
        out = self._dispatched(*(x.narrow(0, before, own) for x in (hidden, chosen, weights)))
        return F.pad(out, (0, 0, before, count - before - own))

    def _dispatched(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The outputs of the `chosen` experts, of all ranks, for these tokens, summed with `weights`."""
        (experts,), axis = self._inner, self.region.axis
        own: int = experts.num_experts  # type: ignore[assignment]
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(own * axis.size).scatter_add(0, flat, torch.ones_like(flat)).view(axis.size, own)
        others = collectives.all_to_all(counts, axis, split_dim=0, concat_dim=0)
        sent, received = self._sizes(counts, others, len(flat))
        rows = collectives.exchange(hidden[order // chosen.shape[1]], axis, sent=sent, received=received)
        every = torch.arange(own, device=flat.device).repeat(axis.size)
        numbers = every.repeat_interleave(others.flatten(), output_size=len(rows))
        out = self._of(rows, numbers)
        back = collectives.exchange(out, axis, sent=received, received=sent)[order.argsort()]
        return (back.view(*weights.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)

    def _of(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """The outputs of this rank's experts for `rows`; `numbers` are the local indices of the rows' experts."""
        (experts,) = self._inner
        if len(rows):
            return experts(rows, numbers[:, None], rows.new_ones(len(rows), 1))
        # a row of zeros with its result dropped keeps parameters and received rows in the graph, for its collectives
        nothing = experts(rows.new_zeros(1, rows.shape[1]), numbers.new_zeros(1, 1), rows.new_ones(1, 1))
        return nothing[:0] + rows * 0.0
