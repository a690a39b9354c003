"""Drawing tokens from logits: temperature, top-k, top-p, and one uniform number per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo.rollout.engine import Sampling

_BLOCK = 128


class Draws(NamedTuple):
    """Tokens, and their log-probs under two distributions; [R], log-probs in float32 (float64 from float64 logits)."""

    tokens: Tensor  # int64
    log_probs: Tensor  # under softmax(logits / temperature)
    sampling_log_probs: Tensor  # under the distribution drawn from; 0 if greedy


def process_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits / temperature [R, V], with -inf at the tokens that top-k, then top-p, remove.

    A token as likely as the last one kept is kept as well, so the order of tokens does not matter.
    """
    return _cut(_scale(logits, sampling), sampling)


def _scale(logits: Tensor, sampling: Sampling) -> Tensor:
    return logits if sampling.temperature == 1.0 else logits / sampling.temperature


def _cut(scaled: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_k and sampling.top_k < scaled.shape[-1]:
        smallest = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if sampling.top_p < 1:
        scaled = scaled.masked_fill(scaled < _smallest_of_top_p(scaled, sampling.top_p), -torch.inf)
    return scaled


def _smallest_of_top_p(scaled: Tensor, top_p: float) -> Tensor:
    """The smallest value [R, 1] among each row's likeliest tokens that together hold `top_p`.

    Few tokens hold most of the mass, so they are looked for among the 256 likeliest before all are sorted.
    """
    norm = scaled.logsumexp(-1, keepdim=True)
    count = min(256, scaled.shape[-1])
    while True:
        likeliest = scaled.topk(count).values
        probs = (likeliest - norm).double().exp()
        likelier = probs.cumsum(-1) - probs  # mass
        kept = (likelier < top_p).sum(-1, keepdim=True).clamp_(min=1)
        if count == scaled.shape[-1] or not (kept == count).any():
            return likeliest.gather(-1, kept - 1)
        count = scaled.shape[-1]


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
    block, target = _first_above(sums, uniforms[:, None])
    end = sums.gather(1, block)
    start = sums.gather(1, (block - 1).clamp_(min=0)).where(block > 0, 0.0)
    left = ((target - start) / (end - start)).clamp_(0.0, 1.0)
    place = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, place.clamp(max=size - 1)).double().where(place < size, 0.0)
    return (block * _BLOCK + _first_above(inside.cumsum(-1), left)[0])[:, 0].clamp_(max=size - 1)


def _first_above(cumulative: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """The first column [R, 1] at which `cumulative` [R, K] exceeds fraction * total, and fraction * total.

    The last column that adds to the total stands in where rounding leaves none above.
    """
    total = cumulative[:, -1:].contiguous()
    target = fraction * total
    above = torch.searchsorted(cumulative, target, right=True)
    # clamps, here and above: nan still gives a token, since a bad index would bring down a GPU
    return torch.minimum(above, torch.searchsorted(cumulative, total)).clamp_(max=cumulative.shape[-1] - 1), target


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Draws:
    """One token per row of `logits` [R, V] (float32 or float64), by one of `uniforms` (float64 [R]) each."""
    scaled = _scale(logits, sampling)
    peak = scaled.amax(-1, keepdim=True)
    weights = (scaled - peak).exp_()
    total = weights.sum(-1)
    cut = not sampling.greedy and (bool(sampling.top_k) or sampling.top_p < 1)
    if cut:
        weights = weights.where(_cut(scaled, sampling) > -torch.inf, 0.0)
    tokens = scaled.argmax(-1) if sampling.greedy else inverse_cdf(weights, uniforms)
    chosen = (scaled.gather(1, tokens[:, None]) - peak)[:, 0]
    log_probs = chosen - total.log()
    if sampling.greedy:
        return Draws(tokens, log_probs, torch.zeros_like(log_probs))
    return Draws(tokens, log_probs, chosen - weights.sum(-1).log() if cut else log_probs)
