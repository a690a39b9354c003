"""The operations around a model: padding, the exchange between ranks, advantages, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fppo.ablate.cases import (
    FLOATS,
    Drawn,
    Exact,
    OperationCase,
    Result,
    Shape,
    differentiate,
    exact_by,
    normal,
    widened,
)
from fppo.ablate.result import OperationCost
from fppo.laws import collectives as collective_laws
from fppo.laws.adamw import check_adamw
from fppo.laws.padding import check_padding
from fppo.laws.temporal import check_gae
from fppo.runtime.simulate import simulate
from fppo_kernels import padding
from fppo_kernels.gae.loop import loop
from fppo_kernels.table import Implementation

GAMMA, LAM = 0.99, 0.95
RANKS = 2  # threads of this process
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
LEAF = 1 << 20  # numbers in one parameter


def _ragged(rows: int, width: int) -> Tensor:
    """A mask [B, T] whose row i has its first T (i + 1) / B tokens."""
    lengths = torch.arange(1, rows + 1)[:, None] * width // max(rows, 1)
    return torch.arange(width) < lengths


# gae


def _draw_gae(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    size = shape["B"], shape["T"]
    inputs = {name: normal(generator, *size).to(device, dtype) for name in ("rewards", "values")}
    return Drawn(inputs | {"mask": _ragged(*size).to(device)}, {})


def _call_gae(fn: Callable, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Tensor]:
    return dict(zip(("advantages", "returns"), fn(*inputs.values(), gamma=GAMMA, lam=LAM), strict=True))


def _cost_gae(shape: Shape, itemsize: int) -> OperationCost:
    size = shape["B"] * shape["T"] * (4 * itemsize + 1)
    return OperationCost(
        bytes_forward=size, bytes_total=None, words="bytes: rewards, values, mask read, two results written"
    )


def _check_gae(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    if device.type != "cpu":
        return False
    check_gae(fn, dtypes=tuple({torch.float64, dtype}))
    return True


_EVALUATE_GAE = differentiate(_call_gae, ())

GAE = OperationCase(
    op="gae",
    shape={"B": 256, "T": 1024},
    dtypes=FLOATS[:2],
    bound="copy",
    outputs=("advantages", "returns"),
    timed=("advantages", "returns"),
    leaves=(),
    draw=_draw_gae,
    evaluate=_EVALUATE_GAE,
    exact=partial(exact_by, _EVALUATE_GAE, loop),
    cost=_cost_gae,
    check=_check_gae,
)


# padding


def _draw_unpad(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    mask = _ragged(shape["B"], shape["S"])
    inputs = {
        "tokens": torch.randint(1, 1000, mask.shape, generator=generator).to(device),
        "attention_mask": mask.to(device),
        "column": normal(generator, *mask.shape).to(device, dtype),
    }
    return Drawn(inputs, {"column": normal(generator, int(mask.sum())).to(device)})


def _call_unpad(fn: Callable, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Tensor]:
    packed = fn(inputs["tokens"], inputs["attention_mask"], columns={"column": inputs["column"]})
    return {"tokens": packed.tokens, "labels": packed.labels, "column": packed.columns["column"]}


def _exact_unpad(drawn: Drawn, outputs: Sequence[str]) -> Exact:
    tokens, mask, column = drawn.inputs["tokens"], drawn.inputs["attention_mask"], drawn.inputs["column"]
    following = torch.full_like(tokens, padding.IGNORE)
    following[:, :-1] = tokens[:, 1:].where(mask[:, 1:], padding.IGNORE)
    gradient = torch.zeros_like(column, dtype=torch.float64)
    gradient[mask] = drawn.cotangents["column"].to(column.dtype).double()
    values = {"tokens": tokens[mask], "labels": following[mask], "column": column[mask].double()}
    return Exact(values, {("column", "column"): gradient})


def _cost_unpad(shape: Shape, itemsize: int) -> OperationCost:
    padded, real = shape["B"] * shape["S"], int(_ragged(shape["B"], shape["S"]).sum())
    forward = padded * 9 + real * (4 * 8 + 2 * itemsize)
    words = "bytes: tokens, mask and the column read; tokens, positions, labels, index and the column written"
    return OperationCost(bytes_forward=forward, bytes_total=forward + (padded + real) * itemsize, words=words)


def _check_unpad(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_padding(fn, padding.pad, device=device)
    return True


UNPAD = OperationCase(
    op="unpad",
    shape={"B": 64, "S": 1024},
    dtypes=FLOATS,
    bound="copy",
    outputs=("tokens", "labels", "column"),
    timed=("column",),
    leaves=("column",),
    draw=_draw_unpad,
    evaluate=differentiate(_call_unpad, ("column",)),
    exact=_exact_unpad,
    cost=_cost_unpad,
    check=_check_unpad,
)


def _draw_pad(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    mask = _ragged(shape["B"], shape["S"])
    inputs = {
        "x": normal(generator, int(mask.sum()), shape["D"]).to(device, dtype),
        "index": mask.flatten().nonzero().flatten().to(device),
        "shape": tuple(mask.shape),
    }
    return Drawn(inputs, {"padded": normal(generator, *mask.shape, shape["D"]).to(device)})


def _call_pad(fn: Callable, inputs: dict[str, Any], outputs: Sequence[str]) -> dict[str, Tensor]:
    return {"padded": fn(inputs["x"], inputs["index"], inputs["shape"])}


def _exact_pad(drawn: Drawn, outputs: Sequence[str]) -> Exact:
    x, index, (rows, width) = drawn.inputs["x"], drawn.inputs["index"], drawn.inputs["shape"]
    padded = torch.zeros(rows * width, x.shape[1], dtype=torch.float64, device=x.device)
    padded[index] = x.double()
    gradient = drawn.cotangents["padded"].flatten(0, 1)[index].to(x.dtype).double()
    return Exact({"padded": padded.view(rows, width, -1)}, {("padded", "x"): gradient})


def _cost_pad(shape: Shape, itemsize: int) -> OperationCost:
    padded, real = shape["B"] * shape["S"], int(_ragged(shape["B"], shape["S"]).sum())
    forward = (padded + real) * shape["D"] * itemsize + 8 * real
    words = "bytes: x and index read, the padded tensor written, with backward the real rows read and written"
    return OperationCost(
        bytes_forward=forward, bytes_total=forward + real * (2 * shape["D"] * itemsize + 8), words=words
    )


def _check_pad(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_padding(padding.unpad, fn, device=device)
    return True


PAD = OperationCase(
    op="pad",
    shape={"B": 64, "S": 1024, "D": 64},
    dtypes=FLOATS,
    bound="copy",
    outputs=("padded",),
    timed=("padded",),
    leaves=("x",),
    draw=_draw_pad,
    evaluate=differentiate(_call_pad, ("x",)),
    exact=_exact_pad,
    cost=_cost_pad,
    check=_check_pad,
)


# all-to-all: from a slice of the tokens with all heads to all tokens with a slice of the heads


def _draw_all_to_all(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    size = shape["N"], shape["heads"], shape["head_dim"]
    whole, cotangent = (normal(generator, *size) for _ in range(2))
    return Drawn({"x": whole.to(dtype)}, {"exchanged": cotangent})


def _evaluate_all_to_all(fn: Callable, drawn: Drawn, outputs: Sequence[str], of: Sequence[str]) -> Result:
    backward = bool(of)

    def run(mesh: Any) -> tuple[Tensor, Tensor | None]:
        axis = mesh["sequence"]
        own = drawn.inputs["x"].chunk(RANKS, 0)[axis.rank].detach().requires_grad_(backward)
        out = fn(own, axis, split_dim=1, concat_dim=0)
        if not backward:
            return out, None
        cotangent = drawn.cotangents["exchanged"].chunk(RANKS, 1)[axis.rank].to(out.dtype)
        return out.detach(), torch.autograd.grad(out, own, cotangent)[0]

    shards = simulate({"sequence": RANKS}, run)
    gradients = {"x": torch.cat([gradient for _, gradient in shards])} if backward else {}  # type: ignore[arg-type]
    return Result({"exchanged": torch.cat([out for out, _ in shards], 1)}, gradients)


def _exact_all_to_all(drawn: Drawn, outputs: Sequence[str]) -> Exact:
    x = drawn.inputs["x"]
    gradient = drawn.cotangents["exchanged"].to(x.dtype).double()
    return Exact({"exchanged": x.double()}, {("exchanged", "x"): gradient})


def _cost_all_to_all(shape: Shape, itemsize: int) -> OperationCost:
    size = 2 * shape["N"] * shape["heads"] * shape["head_dim"] * itemsize
    words = f"bytes: all read and written once, by {RANKS} ranks, threads here, whose start is in the time"
    return OperationCost(bytes_forward=size, bytes_total=2 * size, words=words)


def _check_all_to_all(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    collective_laws.check_all_to_all(fn, ranks=(1, RANKS))
    return True


ALL_TO_ALL = OperationCase(
    op="all_to_all",
    shape={"N": 4096, "heads": 16, "head_dim": 64},
    dtypes=FLOATS,
    bound="copy",
    outputs=("exchanged",),
    timed=("exchanged",),
    leaves=("x",),
    draw=_draw_all_to_all,
    evaluate=_evaluate_all_to_all,
    exact=_exact_all_to_all,
    cost=_cost_all_to_all,
    check=_check_all_to_all,
    multiples={"N": RANKS, "heads": RANKS},
    cpu_only=True,
)


# adamw


def _draw_adamw(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    """Parameters of a million numbers each, and a rest, as they are after nine steps."""
    generator, count = torch.Generator().manual_seed(0), shape["P"]
    sizes = [LEAF] * (count // LEAF) + ([count % LEAF] if count % LEAF else [])
    inputs: dict[str, Any] = {
        name: [normal(generator, n, scale=scale).to(device, dtype) for n in sizes]
        for name, scale in (("params", 0.02), ("grads", 1e-3), ("exp_avgs", 1e-3))
    }
    inputs["exp_avg_sqs"] = [(x.float() ** 2 + 1e-8).to(dtype) for x in inputs["grads"]]
    inputs["steps"] = [torch.full((), 9.0, device=device) for _ in sizes]
    return Drawn(inputs | {"donated": _cloned(inputs)}, {})


def _cloned(inputs: dict[str, Any]) -> dict[str, list[Tensor]]:
    return {name: [x.clone() for x in xs] for name, xs in inputs.items() if name != "donated"}


def _evaluate_adamw(fn: Callable, drawn: Drawn, outputs: Sequence[str], of: Sequence[str]) -> Result:
    """One step in place: of a copy, if `outputs` names what is returned, and without any of what is donated."""
    donated = _cloned(drawn.inputs) if outputs else drawn.inputs["donated"]
    fn(*donated.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    return Result({name: torch.cat(donated[name]) for name in outputs}, {})


def _exact_adamw(drawn: Drawn, outputs: Sequence[str]) -> Exact:
    """Loshchilov and Hutter (2019), algorithm 2."""
    params, grads, first, second = (torch.cat(widened(drawn.inputs[n])) for n in list(drawn.inputs)[:4])
    step = drawn.inputs["steps"][0].item() + 1
    first = BETAS[0] * first + (1 - BETAS[0]) * grads
    second = BETAS[1] * second + (1 - BETAS[1]) * grads**2
    root = (second / (1 - BETAS[1] ** step)).sqrt() + EPS
    params = params - LR * DECAY * params - LR * first / (1 - BETAS[0] ** step) / root
    return Exact({"params": params, "exp_avgs": first, "exp_avg_sqs": second}, {})


def _cost_adamw(shape: Shape, itemsize: int) -> OperationCost:
    words = "bytes: parameters, gradients and two moments read, all but the gradients written"
    return OperationCost(bytes_forward=7 * shape["P"] * itemsize, bytes_total=None, words=words)


def _check_adamw(fn: Callable, dtype: torch.dtype, device: torch.device, chosen: Implementation) -> bool:
    check_adamw(fn, dtypes=(dtype,), device=device)
    return True


ADAMW = OperationCase(
    op="adamw",
    shape={"P": 16_000_000},
    dtypes=FLOATS,
    bound="copy",
    outputs=("params", "exp_avgs", "exp_avg_sqs"),
    timed=(),
    leaves=(),
    draw=_draw_adamw,
    evaluate=_evaluate_adamw,
    exact=_exact_adamw,
    cost=_cost_adamw,
    check=_check_adamw,
)
