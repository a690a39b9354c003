# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""`reference` without logits [N, V]: slabs of logits are computed, and recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo_kernels.collectives import Axis, all_reduce
from fppo_kernels.log_probs import _moments
from fppo_kernels.log_probs._matmul import matmul
from fppo_kernels.log_probs._moments import Moments
from fppo_kernels.log_probs.reference import PIECE, LogProbs, every_output, per_token
from fppo_kernels.shapes import Float, Int
from fppo_kernels.transforms import TwoPass, run


class Tiles(NamedTuple):
    """Sizes of the work in one step. A slab is the product of hidden states and a split of the weight."""

    tokens: int  # tokens of a slab at most; beyond that the weight's gradient is summed in float32
    slab: int  # bytes of a slab
    block: int  # logits of a slab per elementwise step, so that they stay in a cache


CPU_TILES = Tiles(8192, 6 << 20, 1 << 17)
CUDA_TILES = Tiles(8192, 256 << 20, 1 << 26)


class SlabWork(NamedTuple):
    """The two functions that work on slabs of raw logits [n, v]: `measure` in the forward pass, `differentiate` in the
    backward pass."""

    # the logits of labels [N], 0 for labels on other ranks, and the moments of each split of the vocabulary
    measure: Callable[[PassInputs], tuple[Tensor, Moments]]
    # (inputs, slab, tokens, vocab, coefficients, share, total): overwrites raw logits by their gradient,
    # without the terms at the labels; `share()` [N] is the split's probability, `total` the whole vocabulary's moments
    differentiate: Callable[[PassInputs, Tensor, slice, slice, Coefficients, Callable[[], Tensor], Moments], None]


class Rule(NamedTuple):
    """Non-tensor arguments of the operation, and how its outputs are computed."""

    softcap: float | None
    scale: float
    tempered: bool  # False: every temperature is 1
    entropy: bool
    sum_squared: bool
    axis: Axis
    tiles: Tiles
    work: SlabWork


class PassInputs(NamedTuple):
    """Inputs of both passes."""

    rule: Rule
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # wide [V]
    labels: Tensor  # int64 [N], row indices of `weight`; out of range if another rank has the row
    temperature: Tensor  # wide [N]

    @property
    def wide(self) -> torch.dtype:
        return self.temperature.dtype

    def finish(self, raw: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
        """Turn hidden @ weight.T into logits, in place; bias and temperature are broadcast."""
        if bias is not None:
            raw += bias
        if self.rule.scale != 1.0:
            raw *= self.rule.scale
        if self.rule.softcap is not None:
            raw.div_(self.rule.softcap).tanh_().mul_(self.rule.softcap)
        return raw.div_(temperature) if self.rule.tempered else raw

    def logits(self, raw: Tensor, tokens: slice, vocab: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[vocab].clamp(min=_moments.LOWEST)
        return self.finish(raw.to(self.wide), bias, self.temperature[tokens, None])

    def find(self, tokens: slice, vocab: slice) -> tuple[Tensor, Tensor]:
        """Whether each label is in this split of the vocabulary, bool [n, 1], and its index there, int64 [n, 1],
        clamped to the split for the others."""
        places = self.labels[tokens, None] - vocab.start
        last = vocab.stop - vocab.start - 1
        return (places >= 0) & (places <= last), places.clamp(0, last)


def split_range(length: int, size: int) -> list[slice]:
    """Split a range into parts of `size`; the last may be smaller."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _slabs(inputs: PassInputs) -> tuple[list[slice], list[slice]]:
    """The parts of the vocabulary, and those of the tokens. A slab is one part of the tokens with one of the
    vocabulary."""
    tokens = max(1, min(len(inputs.hidden), inputs.rule.tiles.tokens))
    width = max(1, inputs.rule.tiles.slab // (tokens * inputs.hidden.element_size()))
    return split_range(len(inputs.weight), width), split_range(len(inputs.hidden), tokens)


def _blocks(slab: Tensor, tokens: slice, tiles: Tiles) -> Iterator[tuple[Tensor, slice]]:
    """Yield blocks of a slab's rows, each with the slice of its tokens."""
    for block in split_range(len(slab), max(1, tiles.block // slab.shape[1])):
        yield slab[block], slice(tokens.start + block.start, tokens.start + block.stop)


def _measure(inputs: PassInputs) -> tuple[Tensor, Moments]:
    splits, runs = _slabs(inputs)
    moments = _moments.empty(len(splits), inputs.temperature)
    own = torch.zeros_like(inputs.temperature)[:, None]
    for split, vocab in enumerate(splits):
        for tokens in runs:
            slab = matmul(inputs.hidden[tokens], inputs.weight[vocab].T, inputs.wide)
            inside, places = inputs.find(tokens, vocab)
            own[tokens] += torch.where(inside, slab.gather(1, places).to(inputs.wide), 0.0)
            for raw, rows in _blocks(slab, tokens, inputs.rule.tiles):
                logits = inputs.logits(raw, rows, vocab)
                _moments.put(moments, split, rows, logits, inputs.rule.entropy, inputs.rule.sum_squared)
    inside, places = inputs.find(slice(None), slice(0, len(inputs.weight)))
    bias = None if inputs.bias is None else inputs.bias[places]
    return torch.where(inside, inputs.finish(own, bias, inputs.temperature[:, None]), 0.0)[:, 0], moments


class Coefficients(NamedTuple):
    """Coefficients of the gradient by raw = hidden @ weight.T: p * (constant + linear * (z - maximum) + squared * p),
    plus `label` at the label. z are the logits, `maximum` is the largest of them, and p their probabilities."""

    constant: Tensor  # wide [N] each
    linear: Tensor | None
    squared: Tensor | None
    label: Tensor  # added at the label

    def at(self, rows: slice, share: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Constant, linear and squared coefficients of the tokens `rows`, as columns [n, 1], for one split of the
        vocabulary. `share` [N] is the split's total probability. The results are scaled for a formula with p / share,
        the probabilities normalised within the split, in the place of p."""
        linear = None if self.linear is None else (self.linear[rows] * share[rows])[:, None]
        squared = None if self.squared is None else (self.squared[rows] * share[rows].square())[:, None]
        return (self.constant[rows] * share[rows])[:, None], linear, squared


def _coefficients(
    inputs: PassInputs, label_logits: Tensor, total: Moments, grads: tuple[Tensor, Tensor | None, Tensor | None]
) -> Coefficients:
    """Compute the coefficients of the logits' gradient, given `grads` by log-probs, entropies and sums of squares (None
    if not needed). With z the logits: d log p_y / dz = 1_y - p; d H / dz = -p (log p + H); d (sum p^2) / dz = 2 p (p -
    sum p^2)."""
    d_label, d_entropy, d_squared = grads
    slope = inputs.rule.scale / inputs.temperature
    constant = -d_label
    if d_entropy is not None:
        constant = constant - d_entropy * (total.entropy - total.log_sum)  # log p = z - maximum - log_sum
    if d_squared is not None:
        constant = constant - 2 * d_squared * total.sum_squared
    label = d_label * slope
    if inputs.rule.softcap is not None:
        label = label * (1 - (label_logits * inputs.temperature / inputs.rule.softcap).square())
    return Coefficients(
        constant * slope,
        None if d_entropy is None else -d_entropy * slope,
        None if d_squared is None else 2 * d_squared * slope,
        label,
    )


def _write_d_raw(
    inputs: PassInputs,
    logits: Tensor,
    rows: slice,
    coefficients: Coefficients,
    share: Tensor,
    maximum: Tensor,
    out: Tensor,
) -> None:
    """Write the gradient by hidden @ weight.T for the tokens `rows` and one split of the vocabulary to `out`, without
    the terms at labels. `share` [N] is the split's total probability, `maximum` [N] each token's greatest logit.
    Overwrites `logits`."""
    constant, linear, squared = coefficients.at(rows, share)
    probs = torch.softmax(logits, -1)
    bend = None
    if inputs.rule.softcap is not None:
        bend = 1 - (logits * (inputs.temperature[rows, None] / inputs.rule.softcap)).square()
    factor = constant
    if linear is not None:
        factor = logits.sub_(maximum[rows, None]).mul_(linear).add_(constant)
    if squared is not None:
        factor = torch.addcmul(factor, probs, squared)
    torch.mul(probs if bend is None else probs.mul_(bend), factor, out=out)


def _differentiate(
    inputs: PassInputs,
    slab: Tensor,
    tokens: slice,
    vocab: slice,
    coefficients: Coefficients,
    share: Callable[[], Tensor],
    total: Moments,
) -> None:
    own = share()
    for raw, rows in _blocks(slab, tokens, inputs.rule.tiles):
        logits = inputs.logits(raw, rows, vocab)
        _write_d_raw(inputs, logits, rows, coefficients, own, total.maximum, out=raw)


BLOCKS = SlabWork(_measure, _differentiate)


def _outputs(
    rule: Rule, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    wide_bias = None if bias is None else bias.to(temperature)
    own = labels - _moments.first_row(weight, rule.axis)
    inputs = PassInputs(rule, hidden, weight, wide_bias, own, temperature)
    label_logits, moments = rule.work.measure(inputs)
    label_logits = all_reduce(label_logits, rule.axis)
    total = _moments.merge_ranks(moments, rule.axis)
    outputs = (label_logits - total.maximum - total.log_sum).clamp_(max=0), total.entropy, total.sum_squared
    return outputs, (own, label_logits, total.maximum, total.log_sum, *moments)


def _gradients(
    rule: Rule,
    tensors: tuple[Tensor | None, ...],
    kept: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, _, temperature = tensors
    entropy, sum_squared, own, label_logits, maximum, log_sum, *moments = kept
    assert hidden is not None
    assert weight is not None
    assert temperature is not None
    inputs = PassInputs(rule, hidden, weight, None if bias is None else bias.to(temperature), own, temperature)
    shared = rule.axis.size > 1  # all ranks get the gradients of all outputs, used there or not
    d_outputs = [torch.zeros_like(label_logits) if grad is None else grad for grad in grads]
    d_label, d_entropy, d_squared = (all_reduce(x, rule.axis) for x in d_outputs)
    used = (
        d_label,
        d_entropy if rule.entropy and (shared or grads[1] is not None) else None,
        d_squared if rule.sum_squared and (shared or grads[2] is not None) else None,
    )
    total = Moments(maximum, log_sum, entropy, sum_squared)
    coefficients = _coefficients(inputs, label_logits, total, used)
    d_hidden, d_weight, d_bias = _backward(inputs, coefficients, Moments(*moments), total, needed)
    return d_hidden, d_weight, d_bias if d_bias is None or bias is None else d_bias.to(bias.dtype), None, None


def _definition(rule: Rule, *tensors: Any) -> tuple[Tensor, ...]:
    return every_output(*tensors, softcap=rule.softcap, scale=rule.scale, axis=rule.axis)


_PASSES = TwoPass(
    forward=_outputs,
    backward=_gradients,
    definition=_definition,
    outputs=3,
    reads=(1, 2),
    rows=(True, False, False, True, True),
    piece=PIECE,
)


def _backward(
    inputs: PassInputs, coefficients: Coefficients, moments: Moments, total: Moments, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    hidden, weight, wide = inputs.hidden, inputs.weight, inputs.wide
    d_hidden = torch.zeros_like(hidden, dtype=wide) if needed[0] else None
    d_weight = torch.zeros_like(weight) if needed[1] else None
    d_bias = torch.zeros_like(inputs.bias) if needed[2] and inputs.bias is not None else None
    splits, runs = _slabs(inputs)
    for split, vocab in enumerate(splits):
        share = partial(_moments.share, moments, split, total)
        d_rows = None  # of the weight
        for tokens in runs:
            slab = matmul(hidden[tokens], weight[vocab].T, wide)
            inputs.rule.work.differentiate(inputs, slab, tokens, vocab, coefficients, share, total)
            inside, places = inputs.find(tokens, vocab)
            at_labels = torch.arange(len(slab), device=slab.device), places[:, 0]
            slab[at_labels] += torch.where(inside[:, 0], coefficients.label[tokens], 0.0).to(slab.dtype)
            if d_bias is not None:
                d_bias[vocab] += slab.sum(0, dtype=wide)
            slab = slab.to(weight.dtype) if slab.is_cuda or weight.dtype == torch.bfloat16 else slab
            if d_hidden is not None:
                # += would also write the sum into itself
                d_hidden[tokens].add_(matmul(slab, weight[vocab], wide, rounds=True))
            if d_weight is not None:
                product = _weight_gradient(slab, hidden[tokens], wide)
                d_rows = product if d_rows is None else d_rows.to(wide) + product
        if d_weight is not None and d_rows is not None:
            d_weight[vocab] = d_rows
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias


def _weight_gradient(slab: Tensor, hidden: Tensor, wide: torch.dtype) -> Tensor:
    """Compute slab.T @ hidden. On a CPU the first operand is copied, so it should be the narrower one."""
    if not slab.is_cuda and slab.shape[1] > 2 * hidden.shape[1]:
        return matmul(hidden.T, slab, wide, rounds=True).T
    return matmul(slab.T, hidden, wide, rounds=True)


def chunked(
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
    tiles: Tiles | None = None,
    work: SlabWork = BLOCKS,
) -> LogProbs:
    """Compute `reference` with memory for one slab of logits, in both passes, with sums in float32 or wider.

    The derivatives by logits of bfloat16 hidden states and weights are rounded to bfloat16 before they are multiplied.
    Derivatives other than the first are those of `reference`, some tokens at a time. `work` computes with each slab, by
    default in torch's operations on a block of it at a time.
    """
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    temperatures = per_token(temperature, hidden, wide)
    tempered = isinstance(temperature, Tensor) or temperature != 1.0
    tiles = tiles or (CUDA_TILES if hidden.is_cuda else CPU_TILES)
    rule = Rule(softcap, scale, tempered, entropy, sum_squared, axis or Axis(), tiles, work)
    out = run(_PASSES, rule, hidden, weight, bias, labels, temperatures)
    return LogProbs(out[0], out[1] if entropy else None, out[2] if sum_squared else None)
