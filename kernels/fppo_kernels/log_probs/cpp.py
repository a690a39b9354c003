"""`chunked` with one pass in C++ over each slab of logits: its exponentials, sums and gradients."""

from __future__ import annotations

from torch import Tensor

from fppo_kernels._cpp import call
from fppo_kernels.collectives import Axis
from fppo_kernels.log_probs._moments import Moments
from fppo_kernels.log_probs.chunked import Coefficients, PassInputs, SlabWork, chunked
from fppo_kernels.log_probs.reference import LogProbs
from fppo_kernels.shapes import Float, Int


def _call(name: str, inputs: PassInputs, slab: Tensor, tokens: slice, vocab: slice, *more: Tensor | None) -> None:
    rule = inputs.rule
    bias = None if inputs.bias is None else inputs.bias[vocab].contiguous()
    temperature = inputs.temperature[tokens].contiguous() if rule.tempered else None
    rules = bias, temperature, float(rule.scale), float(rule.softcap or 0.0)
    kind = str(slab.dtype).removeprefix("torch.")
    call("log_probs/_epilogue.cpp", f"{name}_{kind}", slab, *slab.shape, *rules, *more)


def _measure(inputs: PassInputs, slab: Tensor, tokens: slice, vocab: slice, moments: Moments, split: int) -> None:
    asked = True, True, inputs.rule.entropy, inputs.rule.sum_squared
    outputs = [x[split, tokens] if wanted else None for x, wanted in zip(moments, asked, strict=True)]
    _call("measure", inputs, slab, tokens, vocab, *outputs)


def _differentiate(
    inputs: PassInputs,
    slab: Tensor,
    tokens: slice,
    vocab: slice,
    coefficients: Coefficients,
    share: Tensor,
    total: Moments,
) -> None:
    del share  # of the split, but the moments of the whole give probabilities at once
    columns = total.maximum, total.log_sum, *coefficients[:3]
    _call("differentiate", inputs, slab, tokens, vocab, *(None if x is None else x[tokens] for x in columns))


_WORK = SlabWork(_measure, _differentiate)


def cpp(
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
    """`chunked` on a CPU, where what follows the products takes less time. Raises ValueError for tensors elsewhere."""
    if hidden.device.type != "cpu":
        raise ValueError(f"log_probs/cpp runs on CPUs, got tensors on {hidden.device}; log_probs/chunked runs anywhere")
    return chunked(
        hidden,
        weight,
        labels,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
        scale=scale,
        entropy=entropy,
        sum_squared=sum_squared,
        axis=axis,
        work=_WORK,
    )
