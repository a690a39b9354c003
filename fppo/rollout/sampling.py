"""Drawing of tokens from logits by the options of `Sampling`, with one uniform number per token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from fppo import devices
from fppo.rollout.engine import Sampling
from fppo.runtime.mesh import all_reduce
from fppo_kernels.collectives import Axis, all_gather

_BLOCK = 128
_FEW, _MORE = 256, 16  # the number of tokens in which top-p is first searched, and the factor by which it grows


class Columns(NamedTuple):
    """A rank's columns of logits, those from `first` on; the vocabulary of `size` tokens is cut over `axis`."""

    axis: Axis
    first: int
    size: int


class Draws(NamedTuple):
    """Drawn tokens [R], and their log-probs [R] under two distributions, in float32 (float64 for float64 logits)."""

    tokens: Tensor  # int64
    log_probs: Tensor  # under softmax(logits / temperature)
    sampling_log_probs: Tensor  # under the distribution of the draw; 0 if greedy


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Compute logits / temperature [R, V], with -inf at tokens that are never drawn.

    Ties with the last kept token are kept, so the order of tokens does not matter.
    """
    return _cut(_scale(logits, sampling), sampling, Columns(Axis(), 0, logits.shape[-1]))


def _scale(logits: Tensor, sampling: Sampling) -> Tensor:
    return logits if sampling.temperature == 1.0 else logits / sampling.temperature


def _cut(scaled: Tensor, sampling: Sampling, columns: Columns) -> Tensor:
    """Put -inf at tokens that are never drawn; `scaled` itself if there are none."""
    if sampling.top_k and sampling.top_k < columns.size:
        smallest = _likeliest(scaled, sampling.top_k, columns.axis)[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if sampling.top_p < 1:
        scaled = scaled.masked_fill(scaled < _smallest_of_top_p(scaled, sampling.top_p, columns), -torch.inf)
    if sampling.min_p > 0:
        largest = _likeliest(scaled, 1, columns.axis)
        scaled = scaled.masked_fill(scaled < largest + math.log(sampling.min_p), -torch.inf)
    return scaled


def _smallest_of_top_p(scaled: Tensor, top_p: float, columns: Columns) -> Tensor:
    """The smallest of the `scaled` logits [R, 1] among each row's likeliest tokens that together hold `top_p`.

    Few tokens hold most of the mass, so a few are searched before all are sorted.
    """
    norm = all_gather(scaled.logsumexp(-1, keepdim=True)[None], columns.axis).logsumexp(0)
    count = min(_FEW, columns.size)
    while True:
        likeliest = _likeliest(scaled, count, columns.axis)
        probs = (likeliest - norm).to(devices.widest(norm.device)).exp()
        likelier = probs.cumsum(-1) - probs  # probability mass
        kept = (likelier < top_p).sum(-1, keepdim=True).clamp_(min=1)
        if count == columns.size or not (kept == count).any():
            return likeliest.gather(-1, kept - 1)
        count = min(_MORE * count, columns.size)


def _likeliest(scaled: Tensor, count: int, axis: Axis) -> Tensor:
    """The `count` largest values of each row over all ranks' columns [R, count], in descending order."""
    own = scaled.topk(min(count, scaled.shape[-1])).values
    if axis.size == 1:
        return own
    filled = F.pad(own, (0, count - own.shape[-1]), value=-torch.inf)
    return all_gather(filled, axis, dim=-1).topk(count).values


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row at which the cumulative sum of `weights` [R, V] (>= 0) exceeds uniform * total: int64
    [R].

    `uniforms` is float64 [R] in [0, 1), or float32 where a device has no more. A token of zero weight is never
    returned. Sums are in its dtype, first over blocks of tokens and then inside one block, so that no cumulative sum
    over the vocabulary is formed.
    """
    rows, size = weights.shape
    if size <= 2 * _BLOCK:
        return _first_above(weights.cumsum(-1, dtype=uniforms.dtype), uniforms[:, None])[0][:, 0]
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(rows, -1, _BLOCK).sum(-1)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)
    sums = sums.cumsum(-1, dtype=uniforms.dtype)
    block, left = _first_part_above(sums, uniforms)
    place = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, place.clamp(max=size - 1)).to(left.dtype).where(place < size, 0.0)
    return (block * _BLOCK + _first_above(inside.cumsum(-1), left)[0])[:, 0].clamp_(max=size - 1)


def _first_part_above(sums: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Locate a draw, given cumulative `sums` [R, K] of K parts and uniform numbers [R]: the part's index [R, 1], and
    the uniform number [R, 1] of the draw within the part."""
    part, target = _first_above(sums, uniforms[:, None])
    end = sums.gather(1, part)
    start = sums.gather(1, (part - 1).clamp_(min=0)).where(part > 0, 0.0)
    return part, ((target - start) / (end - start)).clamp_(0.0, 1.0)


def _first_above(cumulative: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """The first column [R, 1] at which `cumulative` [R, K] exceeds fraction * total, and fraction * total [R, 1].

    If rounding leaves no such column, the last one that adds to the total.
    """
    total = cumulative[:, -1:].contiguous()
    target = fraction * total
    above = torch.searchsorted(cumulative, target, right=True)
    # clamped here and above: nan still gives a token, since an invalid index would crash a GPU
    return torch.minimum(above, torch.searchsorted(cumulative, total)).clamp_(max=cumulative.shape[-1] - 1), target


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling, columns: Columns | None = None) -> Draws:
    """Draw one token per row of `logits` [R, V] (float32 or float64), each by one of `uniforms` (float64 [R]).

    With `columns` the logits are this rank's columns, and the ranks of the axis draw together: all get the tokens that
    one process draws from the whole logits, up to rounding of sums. Every rank must call.
    """
    columns = columns or Columns(Axis(), 0, logits.shape[-1])
    axis, scaled = columns.axis, _scale(logits, sampling)
    peak = all_reduce(scaled.amax(-1, keepdim=True), axis, dist.ReduceOp.MAX)
    weights = (scaled - peak).exp_()
    total = all_reduce(weights.sum(-1), axis)
    kept = scaled if sampling.greedy else _cut(scaled, sampling, columns)
    cut = kept is not scaled
    if cut:
        weights = weights.where(kept > -torch.inf, 0.0)
    rank, places = _likeliest_places(scaled, axis) if sampling.greedy else _drawn_places(weights, uniforms, axis)
    chosen = (scaled.gather(1, places[:, None]) - peak)[:, 0]
    if axis.size > 1:  # float64 represents every token's index
        both = torch.stack([(columns.first + places).double(), chosen.double()])
        places, chosen = all_reduce(torch.where(rank == axis.rank, both, 0.0), axis).unbind()
    tokens, chosen = places.long(), chosen.to(scaled.dtype)
    log_probs = chosen - total.log()
    if sampling.greedy:
        return Draws(tokens, log_probs, torch.zeros_like(log_probs))
    return Draws(tokens, log_probs, chosen - all_reduce(weights.sum(-1), axis).log() if cut else log_probs)


def draw_each(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Draw tokens int64 [R, k] with replacement from softmax(logits / temperature) of whole `logits` [R, V], each by
    one of `uniforms` (float64 [R, k]); a greedy sampling has the likeliest token k times. Other options are not
    read."""
    if sampling.greedy:
        return logits.argmax(-1, keepdim=True).expand_as(uniforms)
    scaled = _scale(logits, sampling)
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    return torch.stack([inverse_cdf(weights, column.contiguous()) for column in uniforms.unbind(1)], 1)


def _likeliest_places(scaled: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """The rank [R] whose columns have the largest value, and the index of this rank's own largest value [R]."""
    places = scaled.argmax(-1)
    if axis.size == 1:
        return torch.zeros_like(places), places
    return all_gather(scaled.gather(1, places[:, None]), axis, dim=-1).argmax(-1), places


def _drawn_places(weights: Tensor, uniforms: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """The rank [R] whose columns have the draw, and the draw's index on that rank [R]; any index on others."""
    if axis.size == 1:
        places = inverse_cdf(weights, uniforms)
        return torch.zeros_like(places), places
    sums = all_gather(weights.sum(-1, keepdim=True, dtype=torch.float64), axis, dim=-1)
    rank, left = _first_part_above(sums.cumsum(-1), uniforms)
    return rank[:, 0], inverse_cdf(weights, left[:, 0])
