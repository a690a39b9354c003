"""The operations inside a model: log-probs from hidden states, attention over packed rows and over a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.ablate.cases import FLOATS, Drawn, Exact, OperationCase, Shape, differentiate, exact_by, normal, widened
from fppo.ablate.result import OperationCost
from fppo.laws import attention as attention_laws
from fppo.laws.decoding import check_decode_attention
from fppo.laws.kernels import check_log_probs
from fppo_kernels.attention.eager import eager
from fppo_kernels.decode_attention.eager import eager as decode_eager
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import Implementation

CHUNK = 256  # tokens for which the float64 reference holds logits
OUTPUTS = ("log_probs", "entropy", "sum_squared")
READ_BY_THE_LAWS = frozenset({"bias", "temperature", "softcap", "scale", "entropy", "sum_squared"})


def _draw_log_probs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    """Logits are normal with a standard deviation of 3."""
    rows, width, vocabulary = shape["N"], shape["H"], shape["V"]
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden": normal(generator, rows, width).to(device, dtype),
        "weight": normal(generator, vocabulary, width, scale=3.0 * width**-0.5).to(device, dtype),
        "labels": torch.randint(vocabulary, (rows,), generator=generator).to(device),
    }
    return Drawn(inputs, {name: normal(generator, rows).to(device) for name in OUTPUTS})


def _call_log_probs(fn: Callable, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Tensor]:
    asked = {name: True for name in ("entropy", "sum_squared") if name in outputs}
    result = fn(inputs["hidden"], inputs["weight"], inputs["labels"], **asked)
    return {name: getattr(result, name) for name in outputs}


def _exact_log_probs(drawn: Drawn, outputs: Sequence[str]) -> Exact:
    """By chunks of tokens, whose gradients by weight are summed."""
    weight, pieces = drawn.inputs["weight"].double(), []
    for start in range(0, len(drawn.inputs["hidden"]), CHUNK):
        rows = slice(start, start + CHUNK)
        inputs = {"hidden": drawn.inputs["hidden"][rows], "weight": weight, "labels": drawn.inputs["labels"][rows]}
        cotangents = {name: x[rows] for name, x in drawn.cotangents.items()}
        pieces.append(exact_by(_EVALUATE_LOG_PROBS, reference, Drawn(inputs, cotangents), outputs))
    if not pieces:
        return exact_by(_EVALUATE_LOG_PROBS, reference, drawn, outputs)
    values = {name: torch.cat([piece.values[name] for piece in pieces]) for name in outputs}
    gradients = {}
    for place in pieces[0].gradients:
        grads = [piece.gradients[place] for piece in pieces]
        gradients[place] = torch.cat(grads) if place[1] == "hidden" else sum(grads[1:], grads[0])
    return Exact(values, gradients)


def _cost_log_probs(shape: Shape, itemsize: int) -> OperationCost:
    rows, width, vocabulary = shape["N"], shape["H"], shape["V"]
    tensors, outputs = (rows + vocabulary) * width * itemsize, 4 * 2 * rows
    matmul = 2 * rows * width * vocabulary
    return OperationCost(
        bytes_forward=tensors + 8 * rows + outputs,
        bytes_total=3 * tensors + 8 * rows + 2 * outputs,
        flops_forward=matmul,
        flops_total=3 * matmul,
        words="bytes: hidden and weight read, with backward again, their gradients written; work: 2 N H V, with "
        "backward 6 N H V, so what computes the logits twice can reach 75 %",
    )


def _check_log_probs(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    if chosen.lacks & READ_BY_THE_LAWS:
        return False
    check_log_probs(fn, dtypes=(dtype,), device=device, **({} if device.type == "cpu" else {"hidden_size": 16}))
    return True


_EVALUATE_LOG_PROBS = differentiate(_call_log_probs, ("hidden", "weight"))

LOG_PROBS = OperationCase(
    op="log_probs",
    shape={"N": 256, "H": 512, "V": 32_000},
    dtypes=FLOATS,
    bound="matmul",
    outputs=OUTPUTS,
    timed=OUTPUTS[:2],
    leaves=("hidden", "weight"),
    draw=_draw_log_probs,
    evaluate=_EVALUATE_LOG_PROBS,
    exact=_exact_log_probs,
    cost=_cost_log_probs,
    check=_check_log_probs,
)


def sequence_lengths(shape: Shape) -> list[int]:
    """R lengths, evenly from L / R up to L."""
    count, longest = shape["R"], shape["L"]
    return [max(longest * (i + 1) // count, 1) for i in range(count)]


def _draw_attention(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    sizes, generator = sequence_lengths(shape), torch.Generator().manual_seed(0)
    heads = {"query": shape["heads"], "key": shape["kv_heads"], "value": shape["kv_heads"]}
    inputs: dict[str, Any] = {
        name: normal(generator, sum(sizes), count, shape["head_dim"]).to(device, dtype) for name, count in heads.items()
    }
    inputs["lengths"] = make_lengths(sizes, device)
    cotangent = normal(generator, sum(sizes), shape["heads"], shape["head_dim"]).to(device)
    return Drawn(inputs, {"result": cotangent})


def _call_attention(fn: Callable, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Tensor]:
    scale = inputs["query"].shape[-1] ** -0.5
    out = fn(inputs["query"], inputs["key"], inputs["value"], lengths=inputs["lengths"], scale=scale)
    return {"result": out}


def _exact_attention(drawn: Drawn, outputs: Sequence[str]) -> Exact:
    """Sequence by sequence, so that no mask of all tokens is held."""
    sizes, pieces, names = drawn.inputs["lengths"].lengths, [], ("query", "key", "value")
    inputs = {name: widened(drawn.inputs[name]).split(sizes) for name in names}
    cotangents = drawn.cotangents["result"].split(sizes)
    for i, size in enumerate(sizes):
        one = {name: x[i] for name, x in inputs.items()} | {"lengths": make_lengths([size], cotangents[i].device)}
        pieces.append(exact_by(_EVALUATE_ATTENTION, eager, Drawn(one, {"result": cotangents[i]}), outputs))
    values = {name: torch.cat([piece.values[name] for piece in pieces]) for name in outputs}
    return Exact(values, {p: torch.cat([piece.gradients[p] for piece in pieces]) for p in pieces[0].gradients})


def _cost_attention(shape: Shape, itemsize: int) -> OperationCost:
    sizes, heads, kv_heads, width = sequence_lengths(shape), shape["heads"], shape["kv_heads"], shape["head_dim"]
    inputs, result = (sum(sizes) * n * width * itemsize for n in (heads + 2 * kv_heads, heads))
    matmuls = 4 * heads * width * sum(size * (size + 1) // 2 for size in sizes)
    return OperationCost(
        bytes_forward=inputs + result,
        bytes_total=3 * inputs + 2 * result,
        flops_forward=matmuls,
        flops_total=3 * matmuls,
        words="bytes: query, key, value read, with backward again, their gradients written; work: 4 heads head_dim "
        "for each pair of tokens that see each other, with backward 12",
    )


def _check_attention(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    features = [name for name in attention_laws.FEATURES if name not in chosen.lacks]
    wide = {} if device.type == "cpu" else {"head_dim": 16}
    attention_laws.check_attention(fn, features=features, dtypes=(dtype,), device=device, **wide)
    return True


_EVALUATE_ATTENTION = differentiate(_call_attention, ("query", "key", "value"))

ATTENTION = OperationCase(
    op="attention",
    shape={"R": 8, "L": 384, "heads": 14, "kv_heads": 2, "head_dim": 64},
    dtypes=FLOATS,
    bound="matmul",
    outputs=("result",),
    timed=("result",),
    leaves=("query", "key", "value"),
    draw=_draw_attention,
    evaluate=_EVALUATE_ATTENTION,
    exact=_exact_attention,
    cost=_cost_attention,
    check=_check_attention,
    multiples={"heads": "kv_heads"},
)


def _draw_decode_attention(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    rows, columns, width, generator = shape["R"], shape["C"], shape["head_dim"], torch.Generator().manual_seed(0)
    sizes = {"query": (rows, shape["heads"], width)}
    sizes |= dict.fromkeys(("keys", "values"), (rows, shape["kv_heads"], columns, width))
    return Drawn({name: normal(generator, *size).to(device, dtype) for name, size in sizes.items()}, {})


def _call_decode_attention(fn: Callable, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Tensor]:
    query, keys, values = inputs.values()
    return {"result": fn(query, keys, values, None, start=0, end=keys.shape[2], scale=query.shape[2] ** -0.5)}


def _cost_decode_attention(shape: Shape, itemsize: int) -> OperationCost:
    heads = shape["R"] * shape["head_dim"]
    size = heads * itemsize * 2 * (shape["kv_heads"] * shape["C"] + shape["heads"])
    words = "bytes: query, keys and values read, the result written"
    return OperationCost(bytes_forward=size, bytes_total=None, words=words)


def _check_decode_attention(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_decode_attention(fn, dtypes=(dtype,), device=device)
    return True


_EVALUATE_DECODE_ATTENTION = differentiate(_call_decode_attention, ())

DECODE_ATTENTION = OperationCase(
    op="decode_attention",
    shape={"R": 64, "C": 128, "heads": 14, "kv_heads": 2, "head_dim": 64},
    dtypes=FLOATS,
    bound="copy",
    outputs=("result",),
    timed=("result",),
    leaves=(),
    draw=_draw_decode_attention,
    evaluate=_EVALUATE_DECODE_ATTENTION,
    exact=partial(exact_by, _EVALUATE_DECODE_ATTENTION, decode_eager),
    cost=_cost_decode_attention,
    check=_check_decode_attention,
    multiples={"heads": "kv_heads"},
)
