"""Losses of the critic: on one value per token, and on K outputs per token, a distribution with the value as mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.losses._common import check_tokens, clean, positive, scalar
from fppo.losses._common import clip as bounded
from fppo.metrics import Metrics, masked_mean
from fppo.shapes import Mask, Outputs, Scalar, Tokens

Errors = Callable[[Tensor], Tensor]  # the loss of an error, elementwise


def value_loss(
    values: Tokens, old_values: Tokens, returns: Tokens, mask: Mask, *, clip: Scalar | None = 0.5
) -> tuple[Tokens, Metrics]:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2 per token, [B, T]; 0 where `mask` is False.

    PPO's clipped value loss of the value v and the return R; `clip=None` is half the squared error. `old_values` and
    `returns` are constants to the gradient. All floating [B, T], the mask bool, else ValueError; also for a clip <= 0.
    """
    loss, metrics = _clipped(torch.square, values, old_values, returns, mask, clip)
    return (0.5 * loss).where(mask, 0.0), metrics


def huber_value_loss(
    values: Tokens,
    old_values: Tokens,
    returns: Tokens,
    mask: Mask,
    *,
    delta: float = 1.0,
    clip: Scalar | None = 0.5,
) -> tuple[Tokens, Metrics]:
    """max(h(v - R), h(clip(v, v_old - clip, v_old + clip) - R)) per token, [B, T], with Huber's h; 0 outside the mask.

    h(e) = e^2 / 2 where |e| <= delta, delta (|e| - delta / 2) elsewhere: the gradient of errors beyond delta is
    constant (Huber, Annals of Mathematical Statistics 35, 1964). Arguments are those of `value_loss`. Raises ValueError
    as it does, and for a delta <= 0.
    """
    positive("delta", delta)
    loss, metrics = _clipped(partial(_huber, delta=delta), values, old_values, returns, mask, clip)
    return loss.where(mask, 0.0), metrics


def hl_gauss(
    outputs: Outputs,
    old_values: Tokens,
    returns: Tokens,
    mask: Mask,
    *,
    low: float,
    high: float,
    sigma: float = 0.75,
) -> tuple[Tokens, Metrics]:
    """The cross-entropy of softmax(outputs) over K bins to a normal about the return, per token, [B, T].

    `outputs` [B, T, K] are logits of K equal bins from `low` to `high`. The target of a bin is its mass under the
    normal of mean R (clamped to the range) and deviation `sigma` bins, renormalised over the range. The value is the
    mean of the bins' centres (`binned_values`). HL-Gauss: Farebrother et al., arXiv:2403.03950, 3.1, with sigma 0.75.
    The mask is bool [B, T], and the loss 0 where it is False; `returns` are constants to the gradient, and
    `old_values` are not read. Raises ValueError for other shapes, an empty range, and a sigma <= 0.
    """
    positive("sigma", sigma)
    _check_outputs(outputs, old_values, returns, mask, low, high)
    count = outputs.shape[-1]
    edges = torch.linspace(low, high, count + 1, dtype=outputs.dtype, device=outputs.device)
    goals = returns.detach().where(mask, low).clamp(low, high).to(outputs.dtype)
    width = sigma * (high - low) / count
    below = torch.erf((edges - goals[..., None]) / (width * 2**0.5))
    targets = below.diff(dim=-1) / (below[..., -1:] - below[..., :1])
    loss, metrics = _cross_entropy(outputs, targets, mask, partial(binned_values, low=low, high=high))
    return loss, metrics | _outside(returns, mask, low, high)


def two_hot(
    outputs: Outputs, old_values: Tokens, returns: Tokens, mask: Mask, *, low: float, high: float
) -> tuple[Tokens, Metrics]:
    """The cross-entropy of softmax(outputs) over K atoms to the two atoms around the return, per token, [B, T].

    `outputs` [B, T, K] are logits of K equidistant atoms from `low` to `high`, both included. The two atoms around the
    return (clamped to the range) are weighted so that their mean is the return, all others by 0; the value is the mean
    of the atoms (`placed_values`). Farebrother et al., arXiv:2403.03950, 3.1, as in MuZero. Otherwise as `hl_gauss`.
    """
    _check_outputs(outputs, old_values, returns, mask, low, high)
    count = outputs.shape[-1]
    goals = returns.detach().where(mask, low).clamp(low, high).to(outputs.dtype)
    place = (goals - low) * ((count - 1) / (high - low))
    numbers = torch.arange(count, dtype=outputs.dtype, device=outputs.device)
    targets = (1 - (place[..., None] - numbers).abs()).clamp(min=0.0)
    loss, metrics = _cross_entropy(outputs, targets, mask, partial(placed_values, low=low, high=high))
    return loss, metrics | _outside(returns, mask, low, high)


def quantile_loss(
    outputs: Outputs, old_values: Tokens, returns: Tokens, mask: Mask, *, delta: float = 1.0
) -> tuple[Tokens, Metrics]:
    """The sum over K quantiles q_i of |t_i - [R < q_i]| h(R - q_i) / delta per token, [B, T], with t_i = (i - 1/2) / K.

    `outputs` [B, T, K] are the quantiles of the return at the levels t_1 to t_K; R is the return, [R < q_i] is 1 or 0,
    h is Huber's function (`huber_value_loss`), and the value is the mean of the quantiles (`mean_of_quantiles`). QR-DQN
    (Dabney et al., arXiv:1710.10044) with one sample of the target, divided by delta as in arXiv:1806.06923. Otherwise
    as `hl_gauss`.
    """
    positive("delta", delta)
    _check_outputs(outputs, old_values, returns, mask, 0.0, 1.0)
    count = outputs.shape[-1]
    inside = outputs.where(mask[..., None], 0.0)
    error = returns.detach().where(mask, 0.0).to(outputs.dtype)[..., None] - inside
    shares = (torch.arange(count, dtype=outputs.dtype, device=outputs.device) + 0.5) / count
    weights = (shares - (error < 0).to(outputs.dtype)).abs().detach()
    loss = (weights * _huber(error, delta=delta) / delta).sum(-1)
    return loss.where(mask, 0.0), {"critic/vpred_mean": masked_mean(inside.mean(-1), mask)}


def first_output(outputs: Tensor) -> Tensor:
    """The value of a head of one output: [..., 1] to [...]."""
    return outputs[..., 0]


def binned_values(outputs: Tensor, *, low: float, high: float) -> Tensor:
    """The mean of the centres of K equal bins from `low` to `high` under softmax(outputs): [..., K] to [...]."""
    half = (high - low) / (2 * outputs.shape[-1])
    return placed_values(outputs, low=low + half, high=high - half)


def placed_values(outputs: Tensor, *, low: float, high: float) -> Tensor:
    """The mean of K equidistant atoms from `low` to `high` under softmax(outputs): [..., K] to [...]."""
    places = torch.linspace(low, high, outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
    return (outputs.softmax(-1) * places).sum(-1)


def mean_of_quantiles(outputs: Tensor) -> Tensor:
    """The mean of K quantiles: [..., K] to [...]."""
    return outputs.mean(-1)


@attrs.frozen(kw_only=True)
class ValueHead:
    """A critic's output per token: its width, the function from outputs to values, and the loss against the returns.

    `loss_fn(values, old_values, returns, mask)` takes values [B, T] of a head of one output, else `outputs` [B, T, K].
    """

    outputs: int = 1
    read: Callable[[Tensor], Tensor] = first_output  # [..., K] to the values [...]
    loss_fn: Callable[..., tuple[Tensor, Metrics]] = value_loss


def mse_head(*, clip: float | None = 0.5) -> ValueHead:
    """A head of one output with `value_loss`; a value may move by `clip` from the old one (None: freely)."""
    return ValueHead(loss_fn=partial(value_loss, clip=clip))


def huber_head(*, delta: float = 1.0, clip: float | None = 0.5) -> ValueHead:
    """A head of one output with `huber_value_loss`."""
    return ValueHead(loss_fn=partial(huber_value_loss, delta=delta, clip=clip))


def hl_gauss_head(*, bins: int = 51, low: float = -0.1, high: float = 1.1, sigma: float = 0.75) -> ValueHead:
    """A head of `bins` outputs with `hl_gauss`; leave a margin between scores and the bins' ends `low` and `high`."""
    read, loss_fn = partial(binned_values, low=low, high=high), partial(hl_gauss, low=low, high=high, sigma=sigma)
    return ValueHead(outputs=_several(bins), read=read, loss_fn=loss_fn)


def two_hot_head(*, bins: int = 51, low: float = -0.1, high: float = 1.1) -> ValueHead:
    """A head of `bins` outputs, one for each atom from `low` to `high`, with `two_hot`."""
    read, loss_fn = partial(placed_values, low=low, high=high), partial(two_hot, low=low, high=high)
    return ValueHead(outputs=_several(bins), read=read, loss_fn=loss_fn)


def quantile_head(*, bins: int = 51, delta: float = 1.0) -> ValueHead:
    """A head of `bins` quantiles with `quantile_loss`."""
    return ValueHead(outputs=_several(bins), read=mean_of_quantiles, loss_fn=partial(quantile_loss, delta=delta))


def _several(bins: int) -> int:
    if bins < 2:
        raise ValueError(f"bins must be 2 or more, got {bins}")
    return bins


def _clipped(
    cost: Errors, values: Tokens, old_values: Tokens, returns: Tokens, mask: Mask, clip: Scalar | None
) -> tuple[Tokens, Metrics]:
    """The larger loss per token [B, T]: that of the value, or that of the value clipped to `clip` around the old one
    (None: not clipped); with metrics."""
    check_tokens(mask, values=values, old_values=old_values, returns=returns)
    values, old_values, returns = clean(mask, values, old_values.detach(), returns.detach())
    plain = cost(values - returns)
    metrics: Metrics = {"critic/vpred_mean": masked_mean(values, mask)}
    if clip is None:
        return plain, metrics
    positive("clip", clip)
    margin = scalar(clip, values)
    clipped = cost(bounded(values, old_values - margin, old_values + margin) - returns)
    metrics["critic/vf_clipfrac"] = masked_mean(clipped > plain, mask)
    return torch.maximum(plain, clipped), metrics


def _huber(error: Tensor, *, delta: float) -> Tensor:
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def _cross_entropy(
    outputs: Outputs, targets: Outputs, mask: Mask, read: Callable[[Tensor], Tensor]
) -> tuple[Tokens, Metrics]:
    inside = outputs.where(mask[..., None], 0.0)
    loss = -(targets * F.log_softmax(inside, -1)).sum(-1)
    return loss.where(mask, 0.0), {"critic/vpred_mean": masked_mean(read(inside), mask)}


def _outside(returns: Tokens, mask: Mask, low: float, high: float) -> Metrics:
    return {"critic/vf_outside": masked_mean((returns < low) | (returns > high), mask)}


def _check_outputs(outputs: Outputs, old_values: Tokens, returns: Tokens, mask: Mask, low: float, high: float) -> None:
    check_tokens(mask, old_values=old_values, returns=returns)
    if (
        outputs.dim() != 3
        or outputs.shape[:2] != mask.shape
        or outputs.shape[-1] < 2
        or not outputs.is_floating_point()
    ):
        wanted = f"[B, T, K] = [{mask.shape[0]}, {mask.shape[1]}, 2 or more]"
        raise ValueError(f"outputs must be floating {wanted}, got {outputs.dtype} {list(outputs.shape)}")
    if not low < high:
        raise ValueError(f"low={low}, high={high}: low must be less than high")
