# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Attention over a packed row that is dealt to the ranks of an axis, with keys and values that travel from rank to
rank.

A rank holds the keys and values of one rank at a time (Ring Attention: Liu et al., 2023, arXiv:2310.01889).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo_kernels.collectives import Axis, permute
from fppo_kernels.context import Deal, Piece, check_dealt
from fppo_kernels.padding import Lengths
from fppo_kernels.shapes import Float

TILE = 1024  # queries, and keys, per tile of scores


class _Tile(NamedTuple):
    """Some of a rank's queries, and some keys, at least one of which a query sees."""

    queries: slice
    keys: slice
    ahead: int  # the distance from the first key to the first query
    whole: bool  # whether every query sees every key

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """The keys that each query sees, bool [Q, K]."""
        counts = (self.queries.stop - self.queries.start, self.keys.stop - self.keys.start)
        query, key = (torch.arange(count, device=device) for count in counts)
        distance = query[:, None] - key[None, :] + self.ahead
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _cut(runs: Sequence[Sequence[Piece]], size: int) -> list[tuple[slice, Piece]]:
    """Split a rank's tokens into pieces of at most `size`, each with its slice of the rank's tokens."""
    found, at = [], 0
    for piece in (piece for run in runs for piece in run):
        for start in range(piece.start, piece.stop, size):
            part = piece._replace(start=start, stop=min(start + size, piece.stop))
            found.append((slice(at, at + part.size), part))
            at += part.size
    return found


def _tiles(deal: Deal, rank: int, source: int, window: int | None, size: int) -> list[_Tile]:
    """The tiles for a rank's queries and the keys of the rank `source`, without tiles in which nothing is seen."""
    found, keys = [], _cut(deal.runs[source], size)
    for own, query in _cut(deal.runs[rank], size):
        for other, key in keys:
            ahead = query.start - key.start
            least, most = ahead - key.size + 1, ahead + query.size - 1
            if key.begin != query.begin or most < 0 or (window is not None and least >= window):
                continue
            found.append(_Tile(own, other, ahead, least >= 0 and (window is None or most < window)))
    return found


class _How(NamedTuple):
    """Arguments of a ring's computation besides tensors."""

    tiles: Callable[[int], list[_Tile]]  # for this rank's queries and another rank's keys
    axis: Axis
    scale: float
    window: int | None
    softcap: float | None

    def sources(self) -> list[int]:
        """The ranks whose keys are held at each step of the ring."""
        return [(self.axis.rank - step) % self.axis.size for step in range(self.axis.size)]

    def scores(self, tile: _Tile, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores [Hkv, G, Q, K] of a tile, the dtype's least number where a query does not see a key, and the slope
        of the soft cap at each; None without a soft cap."""
        scores = (query.flatten(1, 2) @ key.transpose(1, 2) * self.scale).unflatten(1, query.shape[1:3])
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * bent, 1 - bent.square()
        if not tile.whole:
            seen = tile.mask(self.window, scores.device)
            scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return scores, slope


def _heads(x: Tensor, key_heads: int) -> Tensor:
    """Reshape query heads [n, Hq, D] to [Hkv, G, n, D], in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide).unflatten(1, (key_heads, -1)).permute(1, 2, 0, 3)


def _tokens(x: Tensor) -> Tensor:
    """Reshape [Hkv, G, n, D] to [n, Hq, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


class _Ring(torch.autograd.Function):
    """Flash attention over the ring: partial softmaxes are merged by their maximal scores and sums.

    The backward pass recomputes the scores, from the saved arguments, the result, and the logarithm of each softmax's
    sum.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: _How) -> Tensor:
        q, both, width = _heads(query, key.shape[1]), torch.cat([key, value], -1), key.shape[-1]
        out = q.new_zeros(*q.shape[:3], value.shape[-1])
        top = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        total = torch.zeros_like(top)
        for step, source in enumerate(how.sources()):
            both = permute(both, how.axis) if step else both
            k, v = both.to(q.dtype).transpose(0, 1).split([width, value.shape[-1]], -1)
            for tile in how.tiles(source):
                own = (slice(None), slice(None), tile.queries)
                scores, _ = how.scores(tile, q[own], k[:, tile.keys])
                largest = torch.maximum(top[own], scores.amax(-1, keepdim=True))
                weights, shrink = (scores - largest).exp(), (top[own] - largest).exp()
                part = (weights.flatten(1, 2) @ v[:, tile.keys]).unflatten(1, weights.shape[1:3])
                top[own], total[own] = largest, total[own] * shrink + weights.sum(-1, keepdim=True)
                out[own] = out[own] * shrink + part
        if sinks is not None:
            sink = sinks.to(q.dtype).view(*q.shape[:2], 1, 1)
            largest = torch.maximum(top, sink)
            out, total = out * (top - largest).exp(), total * (top - largest).exp() + (sink - largest).exp()
            top = largest
        result = _tokens(out / total).to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, top + total.log())
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, sinks, result, logs = ctx.saved_tensors
        how, width = ctx.how, key.shape[-1]
        q, grad = (_heads(x, key.shape[1]) for x in (query, grads[0]))
        pull = (grad * _heads(result, key.shape[1])).sum(-1, keepdim=True)
        by_query, both = torch.zeros_like(q), torch.cat([key, value], -1)
        by_both = torch.zeros_like(both, dtype=q.dtype)  # travels with its keys and values
        for step, source in enumerate(how.sources()):
            if step:
                both, by_both = permute(both, how.axis), permute(by_both, how.axis)
            k, v = both.to(q.dtype).transpose(0, 1).split([width, value.shape[-1]], -1)
            by_key, by_value = by_both.transpose(0, 1).split([width, value.shape[-1]], -1)
            for tile in how.tiles(source):
                own = (slice(None), slice(None), tile.queries)
                scores, slope = how.scores(tile, q[own], k[:, tile.keys])
                weights = (scores - logs[own]).exp()
                rows = grad[own].flatten(1, 2)
                by_value[:, tile.keys] += weights.flatten(1, 2).transpose(1, 2) @ rows
                by_weights = (rows @ v[:, tile.keys].transpose(1, 2)).view_as(weights)
                by_scores = weights * (by_weights - pull[own]) * how.scale
                by_scores = (by_scores if slope is None else by_scores * slope).flatten(1, 2)
                by_query[own] += (by_scores @ k[:, tile.keys]).view_as(q[own])
                by_key[:, tile.keys] += by_scores.transpose(1, 2) @ q[own].flatten(1, 2)
        by_key, by_value = permute(by_both, how.axis).split([width, value.shape[-1]], -1)
        by_sinks = None
        if sinks is not None:
            share = (sinks.to(q.dtype).view(*q.shape[:2], 1, 1) - logs).exp()
            by_sinks = -(share * pull).sum((2, 3)).flatten().to(sinks.dtype)
        return _tokens(by_query).to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype), by_sinks, None


def ring_attention(deal: Deal, axis: Axis, *, tile: int = TILE) -> Callable[..., Tensor]:
    """Adapt attention to a rank's tokens [N / c, H, D] of a dealt row, with keys and values that travel around the
    ring.

    A rank holds keys and values of one rank at a time, and scores of at most `tile` queries and keys, which are
    recomputed in the backward pass. The result is called like a kernel, with the lengths of the whole row.
    """

    @functools.cache  # layers have one or two different windows
    def tiles(source: int, window: int | None) -> list[_Tile]:
        return _tiles(deal, axis.rank, source, window, tile)

    def attend(
        query: Float[Tensor, "n q d"],
        key: Float[Tensor, "n k d"],
        value: Float[Tensor, "n k e"],
        *,
        lengths: Lengths,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " q"] | None = None,
    ) -> Float[Tensor, "n q e"]:
        check_dealt(query, lengths, deal, axis)
        how = _How(functools.partial(tiles, window=window), axis, scale, window, softcap)
        return _Ring.apply(query, key, value, sinks, how)  # type: ignore[return-value]

    return attend
