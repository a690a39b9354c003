# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Log-probs by one fused Triton program forward, and another one with torch's matrix products backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton as _triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fppo_kernels._fixed import INTERPRETED, aligned
from fppo_kernels.collectives import Axis, all_reduce
from fppo_kernels.log_probs import _moments
from fppo_kernels.log_probs._moments import Moments
from fppo_kernels.log_probs._triton_kernels import log_probs_backward, log_probs_forward, merge_in_order
from fppo_kernels.log_probs.reference import PIECE, LogProbs, every_output, per_token
from fppo_kernels.shapes import Float, Int
from fppo_kernels.transforms import TwoPass, run

DTYPES = (torch.float32, torch.bfloat16)


class Tiling(NamedTuple):
    """Sizes of the work's parts. A tile is [tokens, vocab] logits, computed `hidden` dimensions at a time."""

    tokens: int
    vocab: int
    hidden: int
    warps: int
    stages: int
    descriptors: bool = False  # whether the tensor memory accelerator reads inputs (Hopper and later)
    group: int = 16  # blocks of tokens that run side by side
    tiles: int = 8  # tiles of the vocabulary at most, one after the other in the forward program
    instances: int = 2048  # instances of the forward program at least, with fewer tiles each
    slab: int = 512 << 20  # bytes of logit gradients at most
    rows: int = 32768  # tokens of a slab at most; beyond that the weight's gradient is summed in float32
    columns: int = 16384  # columns of a slab at most
    fixed: bool = False  # whether splits and their merging depend on the vocabulary alone, not on the tokens


class _Rule(NamedTuple):
    """Non-tensor arguments of the operation, and the tiling."""

    softcap: float | None
    scale: float
    entropy: bool
    sum_squared: bool
    axis: Axis
    tiling: Tiling


class _Inputs(NamedTuple):
    """Inputs of both passes."""

    rule: _Rule
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # int64 [N], row indices of `weight`; out of range if another rank has the row
    temperature: Tensor  # float32 [N]

    def arguments(self, rows: slice, entropy: bool, sum_squared: bool) -> dict[str, Any]:
        """Arguments of both kernels, for some tokens."""
        hidden, weight, rule, tiling = self.hidden[rows], self.weight, self.rule, self.rule.tiling
        sizes = {"tokens": len(hidden), "vocab": len(weight), "width": hidden.shape[1]}
        if tiling.descriptors:
            hidden = TensorDescriptor.from_tensor(hidden, [tiling.tokens, tiling.hidden])
            weight = TensorDescriptor.from_tensor(weight, [tiling.vocab, tiling.hidden])
        return sizes | {
            "hidden": hidden,
            "weight": weight,
            "bias": self.bias,
            "labels": self.labels[rows],
            "temperature": self.temperature[rows],
            "inner": rule.scale if rule.softcap is None else rule.scale / rule.softcap,
            "cap": 1.0 if rule.softcap is None else rule.softcap,
            "BIAS": self.bias is not None,
            "SOFTCAP": rule.softcap is not None,
            "ENTROPY": entropy,
            "SQUARED": sum_squared,
            "BM": tiling.tokens,
            "BN": tiling.vocab,
            "BK": tiling.hidden,
            "GROUP": tiling.group,
            "TMA": tiling.descriptors,
            "WIDEN": INTERPRETED,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }


def choose_tiling(hidden: Tensor, weight: Tensor) -> Tiling:
    """A tiling by dtype and device; equal for equal arguments on equal devices."""
    if not hidden.is_cuda:  # the interpreter: few large steps
        return Tiling(64, 512, 32, warps=4, stages=1)
    if hidden.dtype == torch.float32:
        return Tiling(64, 64, 32, warps=4, stages=3)
    if torch.cuda.get_device_capability(hidden.device)[0] not in (9, 10):  # others have about 100 KB of shared memory
        return Tiling(128, 128, 32, warps=8, stages=3)
    return Tiling(128, 256, 64, warps=8, stages=4, descriptors=can_describe(hidden) and can_describe(weight))


def can_describe(x: Tensor) -> bool:
    """Whether a tensor descriptor can read x [n, H]: its rows must start at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.shape[1] * x.element_size() % 16 == 0


def _split(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _forward(inputs: _Inputs) -> tuple[Tensor, Moments]:
    """Logits of the labels [N] (0 for labels on other ranks), and the moments of each split of the vocabulary."""
    rule, tiling = inputs.rule, inputs.rule.tiling
    tokens, vocab = len(inputs.hidden), len(inputs.weight)
    own = torch.zeros_like(inputs.temperature)
    blocks, columns = _triton.cdiv(tokens, tiling.tokens), _triton.cdiv(vocab, tiling.vocab)
    busy = tiling.tiles if tiling.fixed else blocks * columns // tiling.instances
    tiles = max(1, min(tiling.tiles, busy))
    splits = _triton.cdiv(columns, tiles)
    moments = own.new_empty(4 if rule.sum_squared else 3 if rule.entropy else 2, splits, tokens)
    if tokens:
        arguments = inputs.arguments(slice(None), rule.entropy, rule.sum_squared)
        with torch.cuda.device_of(own):
            log_probs_forward[(blocks * splits,)](own=own, moments=moments, splits=splits, tiles=tiles, **arguments)
    if tiling.fixed:
        moments, splits = _merged(moments, tiling.tokens, entropy=rule.entropy, squared=rule.sum_squared), 1
    nothing = own.new_zeros(()).expand(splits, tokens)
    entropy = moments[2] if rule.entropy else nothing
    return own, Moments(moments[0], moments[1], entropy, moments[3] if rule.sum_squared else nothing)


def _merged(moments: Tensor, block: int, *, entropy: bool, squared: bool) -> Tensor:
    """Merge the moments [k, splits, N] of all splits in their order, as those of one; `block` tokens an instance."""
    merged, (_, splits, tokens) = torch.empty_like(moments[:, :1]), moments.shape
    if tokens:
        with torch.cuda.device_of(moments):
            asked: dict[str, Any] = {"ENTROPY": entropy, "SQUARED": squared, "BM": block}
            merge_in_order[(_triton.cdiv(tokens, block),)](moments, merged, tokens, splits, **asked)
    return merged


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b in float32."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _write_slab(
    inputs: _Inputs, rows_of: Tensor, asked: tuple[bool, bool], rows: slice, vocab: slice, slab: Tensor
) -> None:
    """Write into `slab` the gradient of the loss by the products hidden[rows] @ weight[vocab].T. `asked`: whether
    entropy and sum_squared were requested."""
    tiling, place = inputs.rule.tiling, {"start": vocab.start, "stop": vocab.stop, "stride": slab.stride(0)}
    blocks = _triton.cdiv(len(slab), tiling.tokens) * _triton.cdiv(slab.shape[1], tiling.vocab)
    arguments: dict[str, Any] = {**inputs.arguments(rows, *asked), **place, "scale": inputs.rule.scale}
    with torch.cuda.device_of(slab):
        log_probs_backward[(blocks,)](rows_of=rows_of, slab=slab, **arguments)


def _backward(
    inputs: _Inputs, rows_of: Tensor, asked: tuple[bool, bool], needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients by hidden states, weight and bias, or None where not needed. Works slab by slab: the logits'
    gradient for some tokens and a split of the vocabulary, in the weight's dtype, and its products."""
    hidden, weight, bias, tiling = inputs.hidden, inputs.weight, inputs.bias, inputs.rule.tiling
    d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needed[0] else None
    d_weight = torch.zeros_like(weight) if needed[1] else None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needed[2] and bias is not None else None
    runs = _split(len(hidden), tiling.rows)
    height = min(len(hidden), tiling.rows)
    tiles = min(tiling.slab // max(1, height * weight.element_size()), tiling.columns, len(weight) + tiling.vocab - 1)
    width = max(1, tiles // tiling.vocab) * tiling.vocab  # whole tiles
    buffer = weight.new_empty(height, width)
    values = [rows_of[:, rows].contiguous() for rows in runs]
    for vocab in _split(len(weight), width):
        d_rows = None  # of the weight
        for rows, value in zip(runs, values, strict=True):
            slab = buffer[: rows.stop - rows.start, : vocab.stop - vocab.start]
            _write_slab(inputs, value, asked, rows, vocab, slab)
            if d_hidden is not None:
                d_hidden[rows] += _product(slab, weight[vocab])
            if d_weight is not None:
                product = _product(slab.T, hidden[rows])
                d_rows = product if d_rows is None else d_rows.add_(product)
            if d_bias is not None:
                d_bias[vocab] += slab.sum(0, dtype=torch.float32)
        if d_weight is not None and d_rows is not None:
            d_weight[vocab] = d_rows
    narrow = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
    return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, narrow


def _outputs(
    rule: _Rule, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    shifted = labels - _moments.first_row(weight, rule.axis)
    own, moments = _forward(_whole(rule, hidden, weight, bias, shifted, temperature))
    own = all_reduce(own, rule.axis)
    total = _moments.merge_ranks(moments, rule.axis)
    outputs = (own - total.maximum - total.log_sum).clamp_(max=0), total.entropy, total.sum_squared
    return outputs, (shifted, torch.stack(total), own)


def _whole(rule: _Rule, *tensors: Tensor | None) -> _Inputs:
    return _Inputs(rule, *(x if x is None else aligned(x) for x in tensors))  # pyright: ignore[reportArgumentType]


def _gradients(
    rule: _Rule,
    tensors: tuple[Tensor | None, ...],
    kept: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    shifted, total, own = kept
    inputs = _whole(rule, *tensors[:3], shifted, tensors[4])
    # all ranks of an axis get the gradients of all outputs, used there or not
    if rule.axis.size > 1:
        used = rule.entropy, rule.sum_squared
    else:
        used = grads[1] is not None, grads[2] is not None
    d_outputs = torch.stack([torch.zeros_like(total[0]) if grad is None else grad for grad in grads])
    rows_of = torch.cat([total, all_reduce(d_outputs, rule.axis), own[None]])
    return *_backward(inputs, rows_of, used, needed), None, None


def _definition(rule: _Rule, *tensors: Any) -> tuple[Tensor, ...]:
    return every_output(*tensors, softcap=rule.softcap, scale=rule.scale, axis=rule.axis)


_PASSES = TwoPass(
    forward=_outputs,
    backward=_gradients,
    definition=_definition,
    outputs=3,
    rows=(True, False, False, True, True),
    piece=PIECE,
)


def _check(hidden: Tensor, weight: Tensor) -> None:
    for name, x in (("hidden", hidden), ("weight", weight)):
        if x.dtype not in DTYPES:
            raise ValueError(
                f"log_probs/triton takes float32 and bfloat16, got {name} in {x.dtype}; "
                "log_probs/chunked and log_probs/reference take any"
            )
    if not hidden.is_cuda and not INTERPRETED:
        raise ValueError(
            f"log_probs/triton runs on a GPU, got tensors on {hidden.device}; "
            "log_probs/chunked runs there, and this one with TRITON_INTERPRET=1 in the environment"
        )


def triton(
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
    tiling: Tiling | None = None,
) -> LogProbs:
    """Compute `reference` without logits in memory forward, and with one slab of their gradients backward.

    Products add up in float32, from float32 inputs without TensorFloat-32. A slab is in the dtype of the weight; the
    products of slabs that give the gradients add up in float32. Derivatives other than the first are those of
    `reference`, some tokens at a time. Raises ValueError for dtypes other than float32 and bfloat16, and for tensors on
    a CPU without Triton's interpreter.
    """
    _check(hidden, weight)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    hidden, weight = hidden.to(dtype).contiguous(), weight.to(dtype).contiguous()
    temperatures = per_token(temperature, hidden, torch.float32)
    rule = _Rule(softcap, scale, entropy, sum_squared, axis or Axis(), tiling or choose_tiling(hidden, weight))
    out = run(_PASSES, rule, hidden, weight, bias, labels, temperatures)
    return LogProbs(out[0], out[1] if entropy else None, out[2] if sum_squared else None)
