"""Distributions at each token, for divergences from a teacher: the most probable tokens, or given ones."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fppo.models.heads import Head
from fppo.models.logits import LogitForm
from fppo_kernels.shapes import Float, Int

CHUNK = 1 << 24  # logits computed at a time


def top_log_probs(
    states: Float[Tensor, "m h"], head: Head, *, temperature: float, count: int, of: int
) -> tuple[Int[Tensor, "m k"], Float[Tensor, "m k"]]:
    """The `count` most probable of the first `of` tokens after each state [m, H], and their log-probs, [m, K].

    Log-probs are of the distribution over the whole vocabulary, under logits / `temperature`. With a count of `of` or
    more they are those of the tokens 0 to `of` - 1 in that order.
    """
    parts = [_log_probs(x, head, temperature)[:, :of] for x in _chunks(states, head)]
    if count >= of:
        return torch.arange(of, device=states.device).expand(len(states), of), torch.cat(parts)
    values, ids = zip(*(x.topk(count) for x in parts), strict=True)
    return torch.cat(ids), torch.cat(values)


def listed_log_probs(
    states: Float[Tensor, "m h"], ids: Int[Tensor, "m k"], head: Head, *, temperature: float
) -> Float[Tensor, "m k"]:
    """The log-probs [m, K] of tokens `ids` [m, K] after each state [m, H], under logits / `temperature`.

    Logits of `CHUNK` numbers are there at a time; the backward pass computes them again.
    """

    def of(chunk: Tensor, ids: Tensor) -> Tensor:
        return _log_probs(chunk, head, temperature).gather(1, ids)

    again = partial(checkpoint, of, use_reentrant=False) if torch.is_grad_enabled() else of
    pairs = zip(_chunks(states, head), _chunks(ids.long(), head), strict=True)
    return torch.cat([again(chunk, own) for chunk, own in pairs])


def _chunks(x: Tensor, head: Head) -> tuple[Tensor, ...]:
    return x.split(max(1, CHUNK // len(head.weight)))


def _log_probs(states: Tensor, head: Head, temperature: float) -> Tensor:
    wide = torch.promote_types(states.dtype, torch.float32)
    products = F.linear(states.to(wide), head.weight.to(wide), None if head.bias is None else head.bias.to(wide))
    return (LogitForm(head.softcap, head.scale)(products) / temperature).log_softmax(-1)
