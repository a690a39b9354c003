"""Drawing tokens from logits: temperature, top-k, top-p, and one uniform number per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fppo.rollout.engine import Sampling
from fppo.runtime.mesh import all_reduce
from fppo_kernels.collectives import Axis, all_gather

_BLOCK = 128
_FEW, _MORE = 256, 16  # tokens among which top-p is looked for first, and by how many times as many then


class Columns(NamedTuple):
    """Which columns of logits over a vocabulary of `size` tokens this rank of an axis has: those from `first` on."""

    axis: Axis
    first: int
    size: int


class Draws(NamedTuple):
    """Tokens, and their log-probs under two distributions; [R], log-probs in float32 (float64 from float64 logits)."""

    tokens: Tensor  # int64
    log_probs: Tensor  # under softmax(logits / temperature)
    sampling_log_probs: Tensor  # under the distribution drawn from; 0 if greedy


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits / temperature [R, V], with -inf at the tokens that top-k, then top-p, remove.

    A token as likely as the last one kept is kept as well, so the order of tokens does not matter.
    """
    return _cut(_scale(logits, sampling), sampling, Columns(Axis(), 0, logits.shape[-1]))


def _scale(logits: Tensor, sampling: Sampling) -> Tensor:
    return logits if sampling.temperature == 1.0 else logits / sampling.temperature


def _cut(scaled: Tensor, sampling: Sampling, columns: Columns) -> Tensor:
    if sampling.top_k and sampling.top_k < columns.size:
        smallest = _likeliest(scaled, sampling.top_k, columns.axis)[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if sampling.top_p < 1:
        scaled = scaled.masked_fill(scaled < _smallest_of_top_p(scaled, sampling.top_p, columns), -torch.inf)
    return scaled


def _smallest_of_top_p(scaled: Tensor, top_p: float, columns: Columns) -> Tensor:
    """The smallest value [R, 1] among each row's likeliest tokens that together hold `top_p`.

    Few tokens hold most of the mass, so they are looked for among few before all are sorted.
    """
    norm = all_gather(scaled.logsumexp(-1, keepdim=True)[None], columns.axis).logsumexp(0)
    count = min(_FEW, columns.size)
    while True:
        likeliest = _likeliest(scaled, count, columns.axis)
        probs = (likeliest - norm).double().exp()
        likelier = probs.cumsum(-1) - probs  # mass
        kept = (likelier < top_p).sum(-1, keepdim=True).clamp_(min=1)
        if count == columns.size or not (kept == count).any():
            return likeliest.gather(-1, kept - 1)
        count = min(_MORE * count, columns.size)


def _likeliest(scaled: Tensor, count: int, axis: Axis) -> Tensor:
    """The `count` largest values of each row over all ranks' columns [R, count], the largest first."""
    own = scaled.topk(min(count, scaled.shape[-1])).values
    if axis.size == 1:
        return own
    filled = F.pad(own, (0, count - own.shape[-1]), value=-torch.inf)
    return all_gather(filled, axis, dim=-1).topk(count).values


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """For each row the first token at which the cumulative sum of `weights` [R, V] (>= 0) exceeds uniform * total.

    `uniforms` is float64 [R] in [0, 1). A token of zero weight is never the result. Sums run in float64 over blocks of
    tokens first and inside one block then, so no cumulative sum over the vocabulary is formed.
    """
    rows, size = weights.shape
    if size <= 2 * _BLOCK:
        return _first_above(weights.cumsum(-1, dtype=torch.float64), uniforms[:, None])[0][:, 0]
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(rows, -1, _BLOCK).sum(-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)
    sums = sums.cumsum(-1, dtype=torch.float64)
    block, left = _first_part_above(sums, uniforms)
    place = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, place.clamp(max=size - 1)).double().where(place < size, 0.0)
    return (block * _BLOCK + _first_above(inside.cumsum(-1), left)[0])[:, 0].clamp_(max=size - 1)


def _first_part_above(sums: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first part [R, 1] of the columns, of cumulative `sums` [R, K], in which the draw of a uniform number [R] is;
    and the uniform number [R, 1] of that draw among the part's own."""
    part, target = _first_above(sums, uniforms[:, None])
    end = sums.gather(1, part)
    start = sums.gather(1, (part - 1).clamp_(min=0)).where(part > 0, 0.0)
    return part, ((target - start) / (end - start)).clamp_(0.0, 1.0)


def _first_above(cumulative: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """The first column [R, 1] at which `cumulative` [R, K] exceeds fraction * total, and fraction * total.

    The last column that adds to the total stands in where rounding leaves none above.
    """
    total = cumulative[:, -1:].contiguous()
    target = fraction * total
    above = torch.searchsorted(cumulative, target, right=True)
    # clamps, here and above: nan still gives a token, since a bad index would bring down a GPU
    return torch.minimum(above, torch.searchsorted(cumulative, total)).clamp_(max=cumulative.shape[-1] - 1), target


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling, columns: Columns | None = None) -> Draws:
    """One token per row of `logits` [R, V] (float32 or float64), by one of `uniforms` (float64 [R]) each.

    With `columns` the logits are this rank's of them, and the ranks of that axis draw together: all get the tokens that
    one process draws from the whole logits, but for the rounding of sums. Every rank must call.
    """
    columns = columns or Columns(Axis(), 0, logits.shape[-1])
    axis, scaled = columns.axis, _scale(logits, sampling)
    peak = all_reduce(scaled.amax(-1, keepdim=True), axis, dist.ReduceOp.MAX)
    weights = (scaled - peak).exp_()
    total = all_reduce(weights.sum(-1), axis)
    cut = not sampling.greedy and (bool(sampling.top_k) or sampling.top_p < 1)
    if cut:
        weights = weights.where(_cut(scaled, sampling, columns) > -torch.inf, 0.0)
    rank, places = _likeliest_places(scaled, axis) if sampling.greedy else _drawn_places(weights, uniforms, axis)
    chosen = (scaled.gather(1, places[:, None]) - peak)[:, 0]
    if axis.size > 1:  # float64 holds every token's number
        both = torch.stack([(columns.first + places).double(), chosen.double()])
        places, chosen = all_reduce(torch.where(rank == axis.rank, both, 0.0), axis).unbind()
    tokens, chosen = places.long(), chosen.to(scaled.dtype)
    log_probs = chosen - total.log()
    if sampling.greedy:
        return Draws(tokens, log_probs, torch.zeros_like(log_probs))
    return Draws(tokens, log_probs, chosen - all_reduce(weights.sum(-1), axis).log() if cut else log_probs)


def _likeliest_places(scaled: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """The rank [R] whose columns have the largest value, and where that of this rank's is among its own [R]."""
    places = scaled.argmax(-1)
    if axis.size == 1:
        return torch.zeros_like(places), places
    return all_gather(scaled.gather(1, places[:, None]), axis, dim=-1).argmax(-1), places


def _drawn_places(weights: Tensor, uniforms: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """The rank [R] whose columns have the draw, and where it is among that rank's [R]; on others any column."""
    if axis.size == 1:
        places = inverse_cdf(weights, uniforms)
        return torch.zeros_like(places), places
    sums = all_gather(weights.sum(-1, keepdim=True, dtype=torch.float64), axis, dim=-1)
    rank, left = _first_part_above(sums.cumsum(-1), uniforms)
    return rank[:, 0], inverse_cdf(weights, left[:, 0])
