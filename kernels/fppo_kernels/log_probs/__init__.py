"""Log-probs of labels, entropy, and the sum of squared probabilities, from hidden states and a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fppo_kernels.log_probs import reference as definition
from fppo_kernels.operation import Arguments, Drawn, Kernel, Operation, OperationCost, Shape, normal, normal64

OUTPUTS = ("log_probs", "entropy", "sum_squared")
CHUNK = 256  # tokens of logits that the float64 reference holds


class _LogProbsCase(NamedTuple):
    bias: bool = False
    temperature: float | str | None = None
    softcap: float | None = None
    scale: float | None = None
    logits: str = "usual"  # or "flat", "extreme"


_CASES = (
    _LogProbsCase(),
    _LogProbsCase(bias=True),
    _LogProbsCase(temperature=0.7),
    _LogProbsCase(temperature="per token"),
    _LogProbsCase(softcap=2.0),
    _LogProbsCase(scale=0.5),
    _LogProbsCase(True, "per token", 3.0, 1.5),
    _LogProbsCase(logits="flat"),
    _LogProbsCase(temperature="per token", logits="extreme"),
    _LogProbsCase(True, 0.5, 30.0, 0.5, "extreme"),
)


def _call(kernel: Kernel, x: Arguments, keywords: Arguments, outputs: Sequence[str]) -> dict[str, Tensor]:
    wanted = {name: name in outputs for name in OUTPUTS[1:]}
    found = kernel(*x.values(), **{**keywords, **wanted})
    return {name: getattr(found, name, None) for name in outputs}  # pyright: ignore[reportReturnType]  # a law's matter


def _draw(generator: torch.Generator, rows: int, width: int, number: int, wide: int | None) -> Drawn:
    """Draw numbers that float32 represents exactly; extreme logits are integers, so that it computes them exactly."""
    case, hidden_size = _CASES[number], wide or 2

    def draw(*shape: int, step: float = 1.0) -> Tensor:
        if case.logits == "extreme":
            return step * torch.randint(-2, 3, shape, generator=generator).double()
        return normal64(generator, *shape) * (case.logits != "flat")

    inputs = {
        "hidden": draw(rows, hidden_size, step=64.0),
        "weight": draw(width, hidden_size),
        "labels": torch.randint(width, (rows,), generator=generator),
    }
    numbers = {"temperature": case.temperature, "softcap": case.softcap, "scale": case.scale}
    extras = {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items() if isinstance(x, float)}
    if case.temperature == "per token":
        extras["temperature"] = 2.0 ** torch.randint(-1, 2, (rows,), generator=generator).double()
    if case.bias:
        extras["bias"] = draw(width, step=64.0)
    return Drawn(inputs, extras, normal64(generator, 3, rows))


def _sized(shape: Shape, dtype: torch.dtype, device: torch.device) -> Drawn:
    """Draw inputs whose logits are normal with a standard deviation of 3."""
    rows, width, vocabulary = shape["N"], shape["H"], shape["V"]
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "hidden": normal(generator, rows, width).to(device, dtype),
        "weight": normal(generator, vocabulary, width, scale=3.0 * width**-0.5).to(device, dtype),
        "labels": torch.randint(vocabulary, (rows,), generator=generator).to(device),
    }
    return Drawn(inputs, {}, torch.stack([normal(generator, rows) for _ in OUTPUTS]).to(device))


def _split(drawn: Drawn) -> list[Drawn]:
    """Split inputs into chunks of tokens, so that the float64 reference holds few logits at a time."""
    hidden, weight, labels = drawn.inputs.values()
    return [
        Drawn({"hidden": hidden[i], "weight": weight, "labels": labels[i]}, drawn.extras, drawn.weights[:, i])
        for i in (slice(start, start + CHUNK) for start in range(0, len(hidden), CHUNK))
    ]


def _cost(shape: Shape, itemsize: int) -> OperationCost:
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


OPERATION = Operation(
    name="log_probs",
    call=_call,
    reference=definition.reference,
    outputs=OUTPUTS,
    leaves=("hidden", "weight", "bias"),
    sloped=OUTPUTS,
    draw=_draw,
    sizes=((0, 2), (1, 1), (1, 2), (2, 2), (1, 4), (3, 5), (5, 9), (33, 1100)),  # tokens, vocabulary
    features=(frozenset[str](),) * len(_CASES),
    needed=frozenset({"bias", "temperature", "softcap", "scale", "entropy", "sum_squared"}),
    wide=16,
    screened=((4, 95, 2),),
    usual={"bias": None, "softcap": None, "scale": 1.0},
    shape={"N": 256, "H": 512, "V": 32_000},
    sized=_sized,
    cost=_cost,
    bound="matmul",
    timed=OUTPUTS[:2],
    split=_split,
    shared=("weight",),
)
