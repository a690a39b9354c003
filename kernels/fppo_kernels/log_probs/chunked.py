"""The same as `reference` without the [N, V] logits: chunks of tokens, computed again in the backward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fppo_kernels.log_probs.reference import LogProbs

LOGITS_AT_ONCE = 1 << 24  # 64 MiB of float32


class _Shape(NamedTuple):
    """What turns hidden @ weight.T into logits, besides the tensors."""

    softcap: float | None
    scale: float
    wide: torch.dtype


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b accumulated and returned in `dtype`, whatever the operands are stored in."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, shape: _Shape) -> Tensor:
    """Logits before the temperature, [n, V]."""
    logits = _matmul(hidden, weight.T, shape.wide)
    if bias is not None:
        logits += bias.to(shape.wide)
    logits *= shape.scale
    return logits if shape.softcap is None else logits.div_(shape.softcap).tanh_().mul_(shape.softcap)


def _moments(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy and sum of squared probabilities [n] of log-probs [n, V]."""
    probs = log_probs.exp()
    return -(probs * log_probs.where(probs > 0, 0.0)).sum(-1), probs.square().sum(-1)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor,
        shape: _Shape,
        moments: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out = torch.zeros((3, len(hidden)), dtype=shape.wide, device=hidden.device)
        head = weight if hidden.is_cuda else weight.to(shape.wide)
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], head, bias, shape) / temperature[rows, None]
            log_probs = torch.log_softmax(logits, -1)
            out[0, rows] = log_probs.gather(1, labels[rows, None])[:, 0]
            if moments:
                out[1, rows], out[2, rows] = _moments(log_probs)
        ctx.save_for_backward(hidden, weight, bias, labels, temperature)
        ctx.shape, ctx.moments = shape, moments
        return out[0], out[1], out[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, temperature = ctx.saved_tensors
        shape: _Shape = ctx.shape
        head = weight if hidden.is_cuda else weight.to(shape.wide)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=shape.wide, device=weight.device) if need_weight else None
        d_bias = torch.zeros(len(weight), dtype=shape.wide, device=weight.device) if need_bias else None
        for rows in _chunks(len(hidden), len(weight)):
            d_logits = _d_logits(
                hidden[rows], head, bias, labels[rows], temperature[rows], shape, [g[rows] for g in grads], ctx.moments
            )
            narrow = d_logits.to(hidden.dtype) if hidden.is_cuda else d_logits
            if d_hidden is not None:
                d_hidden[rows] = _matmul(narrow, head, shape.wide).to(hidden.dtype)
            if d_weight is not None:
                d_weight += _matmul(narrow.T, hidden[rows], shape.wide)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _d_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: Tensor,
    shape: _Shape,
    grads: list[Tensor],
    moments: bool,
) -> Tensor:
    """The gradient [n, V] of hidden @ weight.T + bias, from those of label log-prob, entropy and sum of squares [n].

    With z the logits: d log p_y / dz = 1_y - p; d H / dz = -p (log p + H); d (sum p^2) / dz = 2 p (p - sum p^2).
    """
    capped = _logits(hidden, weight, bias, shape)
    log_probs = torch.log_softmax(capped / temperature[:, None], -1)
    probs = log_probs.exp()
    d_label, *d_moments = (g[:, None] for g in grads)
    if moments:
        d_entropy, d_squared = d_moments
        entropy, sum_squared = (x[:, None] for x in _moments(log_probs))
        finite = log_probs.where(probs > 0, 0.0)
        d_logits = probs * (d_squared * 2 * (probs - sum_squared) - d_entropy * (finite + entropy) - d_label)
    else:
        d_logits = probs * -d_label
    d_logits.scatter_add_(1, labels[:, None], d_label)
    d_logits *= shape.scale / temperature[:, None]
    return d_logits if shape.softcap is None else d_logits * (1 - (capped / shape.softcap).square())


def _chunks(tokens: int, vocab: int) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // vocab)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    entropy: bool = False,
    sum_squared: bool = False,
) -> LogProbs:
    """`reference` with memory for one chunk of logits, in both passes; logits and sums in float32 or wider.

    It has first derivatives only.
    """
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    temperatures = torch.as_tensor(temperature, dtype=wide, device=hidden.device).detach().expand(len(hidden))
    shape = _Shape(softcap, scale, wide)
    moments = entropy or sum_squared
    out = _Chunked.apply(hidden, weight, bias, labels, temperatures, shape, moments)
    return LogProbs(out[0], out[1] if entropy else None, out[2] if sum_squared else None)
