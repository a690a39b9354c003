"""The reference implementation, with all logits at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.collectives import Axis, all_gather
from fppo_kernels.shapes import Float, Int

PIECE = 256  # tokens of logits held for higher derivatives of kernels


class LogProbs(NamedTuple):
    """Moments of the next-token distributions, float32 [N] (float64 for float64 inputs); None if not requested."""

    log_probs: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"] | None = None
    sum_squared: Float[Tensor, " n"] | None = None


def compute_logits(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "v h"],
    bias: Float[Tensor, " v"] | None,
    temperature: float | Float[Tensor, ""] | Float[Tensor, " n"],
    softcap: float | None,
    scale: float,
) -> Float[Tensor, "n v"]:
    """Compute softcap * tanh((hidden @ weight.T + bias) * scale / softcap) / temperature, [N, V] in float32 or
    float64."""
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    logits = hidden.to(wide) @ weight.to(wide).T
    if bias is not None:
        logits = logits + bias.to(wide)
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature.to(wide)[:, None]
    return logits / temperature


def per_token(
    temperature: float | Float[Tensor, ""] | Float[Tensor, " n"], hidden: Float[Tensor, "n h"], dtype: torch.dtype
) -> Float[Tensor, " n"]:
    """The temperature of each token [N], without gradient. A number is filled in on the device of `hidden`, not copied
    there."""
    if not isinstance(temperature, Tensor):
        return hidden.new_full((), temperature, dtype=dtype).expand(len(hidden))
    return temperature.detach().to(hidden.device, dtype).expand(len(hidden))


def _joined(x: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """Concatenate all ranks' rows of `x`; `counts` are the numbers of rows on each rank."""
    padded = torch.cat([x, x.new_zeros(max(counts) - len(x), *x.shape[1:])])
    return torch.cat([rows[:count] for rows, count in zip(all_gather(padded[None], axis), counts, strict=True)])


def reference(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "v h"],
    labels: Int[Tensor, " n"],
    *,
    bias: Float[Tensor, " v"] | None = None,
    temperature: float | Float[Tensor, ""] | Float[Tensor, " n"] = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    entropy: bool = False,
    sum_squared: bool = False,
    axis: Axis | None = None,
) -> LogProbs:
    """`log_softmax(logits)[labels]` of hidden [N, H] and weight [V, H], and moments of that distribution.

    `temperature` is a number or one per token [N], a constant to the gradient. entropy is -sum p log p in nats,
    sum_squared is sum p^2.

    With an `axis`, all of its ranks have the same hidden states and labels, and each has one or more rows of weight and
    bias, in rank order. All ranks get all outputs. The gradient is that of the sum of all ranks' losses: whole for a
    rank's rows, and for hidden states a share, which must be summed over the ranks.
    """
    if axis is not None and axis.size > 1:
        counted: Tensor = all_gather(torch.full((1,), len(weight), device=weight.device), axis)
        counts: list[int] = counted.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        weight, bias = _joined(weight, counts, axis), None if bias is None else _joined(bias, counts, axis)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
    logits = compute_logits(hidden, weight, bias, temperature, softcap, scale)
    log_probs = torch.log_softmax(logits, -1)
    probs = log_probs.exp()
    finite = log_probs.where(probs > 0, 0.0)  # 0 * -inf
    return LogProbs(
        log_probs.gather(1, labels[:, None])[:, 0],
        -(probs * finite).sum(-1) if entropy else None,
        probs.square().sum(-1) if sum_squared else None,
    )


def every_output(
    hidden: Float[Tensor, "n h"],
    weight: Float[Tensor, "v h"],
    bias: Float[Tensor, " v"] | None,
    labels: Int[Tensor, " n"],
    temperature: Float[Tensor, " n"],
    softcap: float | None,
    scale: float,
    axis: Axis,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute all outputs of `reference`, each [N], for kernels that take their higher derivatives from it."""
    out = reference(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        scale=scale,
        entropy=True,
        sum_squared=True,
        axis=axis,
    )
    assert out.entropy is not None
    assert out.sum_squared is not None
    return out.log_probs, out.entropy, out.sum_squared
