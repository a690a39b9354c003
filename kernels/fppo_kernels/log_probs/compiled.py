# pyright: reportUnknownMemberType=false
"""`reference` compiled by torch: it holds all logits, but reads and writes them few times."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fppo_kernels.collectives import Axis
from fppo_kernels.log_probs._moments import LOWEST
from fppo_kernels.log_probs.reference import LogProbs, per_token
from fppo_kernels.shapes import Float, Int
from fppo_kernels.transforms import refuse

SPECIALISATIONS = 256  # compiled variants by shape, dtype and outputs; torch's limit of 8 is soon reached


def _program(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    softcap: float | None,
    scale: float,
    entropy: bool,
    sum_squared: bool,
) -> LogProbs:
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    narrow = hidden.dtype if hidden.dtype == weight.dtype and hidden.is_cuda else wide
    logits = (hidden.to(narrow) @ weight.to(narrow).T).to(wide)
    if bias is not None:
        logits = logits + bias.to(wide)
    if softcap is not None:
        logits = softcap * torch.tanh(logits * (scale / softcap))
        scale = 1.0
    logits = logits * (scale / temperature)[:, None]
    logits = logits - logits.detach().amax(-1, keepdim=True)
    weights = logits.exp()
    total = weights.sum(-1)
    return LogProbs(
        logits.gather(1, labels[:, None])[:, 0] - total.log(),
        total.log() - (weights * logits.clamp(min=LOWEST)).sum(-1) / total if entropy else None,
        weights.square().sum(-1) / total.square() if sum_squared else None,
    )


@functools.cache
def _compiled() -> Callable[..., LogProbs]:
    return torch.compile(_program, fullgraph=True, dynamic=True)


def compiled(
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
    """Run `reference` under torch.compile, compiled at the first call of each kind. It holds logits [N, V].

    On a GPU the logits of 16-bit hidden states and weights are rounded to their dtype. Raises ValueError for an `axis`
    of more than one rank, and under transforms of torch.func.
    """
    if axis is not None and axis.size > 1:
        raise ValueError("log_probs/compiled cannot split the vocabulary over ranks; log_probs/chunked can")
    refuse("log_probs/compiled", "torch.compile does not trace it there; log_probs/chunked has")
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    temperatures = per_token(temperature, hidden, wide)
    with torch._dynamo.config.patch(recompile_limit=SPECIALISATIONS):  # type: ignore[attr-defined]
        return _compiled()(hidden, weight, labels, bias, temperatures, softcap, scale, entropy, sum_squared)
