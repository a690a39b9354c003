"""`chunked` with one C++ pass over each slab of logits, for exponentials, sums and gradients."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fppo_kernels._cpp import call, check_shape, kind_of
from fppo_kernels.collectives import Axis
from fppo_kernels.log_probs._matmul import matmul
from fppo_kernels.log_probs._moments import Moments
from fppo_kernels.log_probs.chunked import Coefficients, PassInputs, SlabWork, chunked, split_range
from fppo_kernels.log_probs.reference import LogProbs
from fppo_kernels.shapes import Float, Int

_FILE = "log_probs/_epilogue.cpp"
_WIDTH = 2048  # columns of a slab forward: multiples of the program's, so that bits do not depend on the number of rows


def _rules(inputs: PassInputs, tokens: slice, vocab: slice) -> tuple[Tensor | None, Tensor | None, float, float]:
    rule = inputs.rule
    bias = None if inputs.bias is None else inputs.bias[vocab].contiguous()
    temperature = inputs.temperature[tokens].contiguous() if rule.tempered else None
    return bias, temperature, float(rule.scale), float(rule.softcap or 0.0)


def _measure(inputs: PassInputs) -> tuple[Tensor, Moments]:
    """Compute the logits of labels, and the moments of the whole vocabulary as one split."""
    *moments, label = known = inputs.temperature.new_zeros(5, len(inputs.hidden)).unbind()
    vocabulary, labels = split_range(len(inputs.weight), _WIDTH), inputs.labels.contiguous()
    width = max(1, min(len(inputs.weight), _WIDTH) * inputs.hidden.element_size())
    for tokens in split_range(len(inputs.hidden), max(1, inputs.rule.tiles.slab // width)):
        columns = [x[tokens] for x in known]
        for vocab in vocabulary:
            slab = matmul(inputs.hidden[tokens], inputs.weight[vocab].T, inputs.wide)
            given = *_rules(inputs, tokens, vocab), labels[tokens], vocab.start
            call(_FILE, f"measure_{kind_of(slab)}", slab, *slab.shape, *given, *columns)
        call(_FILE, f"conclude_{kind_of(label)}", len(columns[0]), *columns)
    return label, Moments(*(x[None] for x in moments))


def _differentiate(
    inputs: PassInputs,
    slab: Tensor,
    tokens: slice,
    vocab: slice,
    coefficients: Coefficients,
    share: Callable[[], Tensor],
    total: Moments,
) -> None:
    del share  # of the split; the moments of the whole vocabulary give probabilities at once
    columns = total.maximum, total.log_sum, *coefficients[:3]
    given = *_rules(inputs, tokens, vocab), *(None if x is None else x[tokens] for x in columns)
    call(_FILE, f"differentiate_{kind_of(slab)}", slab, *slab.shape, *given)


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
    """Compute `chunked` on a CPU, faster after the matrix products. Raises ValueError for other devices and shapes."""
    if hidden.device.type != "cpu":
        raise ValueError(f"log_probs/cpp runs on CPUs, got tensors on {hidden.device}; log_probs/chunked runs anywhere")
    check_shape("labels", labels, len(hidden))
    check_shape("bias", bias, len(weight))
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
