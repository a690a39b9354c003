"""Descriptions of operations, independent of their implementations: one record each, for laws, screening and
ablations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import attrs
import torch
from torch import Tensor

from fppo_kernels import table

TRANSFORMS = ("grad", "vmap", "jvp", "hessian")  # of torch.func; vjp and jacrev count as grad, jacfwd as jvp
FLOATS = (torch.float64, torch.float32, torch.bfloat16)
Shape = Mapping[str, int]
Kernel = Callable[..., Any]
Arguments = Mapping[str, Any]  # by name


class Drawn(NamedTuple):
    """Drawn arguments of an operation: `inputs` by name, in order, and `extras`, its keywords.

    `weights` are cotangents: the gradient is that of sum(weights * output). For several outputs they are stacked.
    """

    inputs: dict[str, Any]
    extras: dict[str, Any]
    weights: Tensor


class Exact(NamedTuple):
    """Outputs in float64 by name, and the gradient of each output by each leaf."""

    values: dict[str, Tensor]
    gradients: dict[tuple[str, str], Tensor]


@attrs.frozen(kw_only=True)
class OperationCost:
    """The work that an operation requires at a shape, in any implementation, and a note (`words`) on its counting.

    Bytes to read and write, and FLOPs (multiplications and additions; 0 if memory is the bound): forward, and with the
    backward pass (None without one).
    """

    bytes_forward: int
    bytes_total: int | None
    flops_forward: int = 0
    flops_total: int | None = None
    words: str = ""


@attrs.frozen(kw_only=True)
class Operation:
    """One operation of `fppo_kernels.table.Kernels`.

    `call(kernel, inputs, keywords, outputs)` returns those outputs by name; the kernel `reference` defines them.
    `leaves` are the inputs and keywords that take a gradient; `sloped` are the outputs that have one.

    Laws draw small float64 examples by `draw(generator, rows, width, number, wide)`, for each (rows, width) of `sizes`
    and each index `number` of `features`. features[number] are the keywords that such an example needs. `wide`, given
    on GPUs, is the width of heads and hidden states. `rows` names the inputs whose rows do not see each other.
    Kernels that lack a keyword in `needed` are not tried. Gradients have `slack` times the tolerance, which is
    that of the inputs' dtype, or of the dtype `tolerance`. Screening draws
    `screened`, each (rows, width, number), and adds the `usual` keywords of a run.

    Ablations draw `sized(shape, dtype, device)` and measure the outputs `timed` against `cost(shape, itemsize)`, on
    this number of simulated `ranks`. Kernels support the `transforms` of torch.func, unless `Implementation.opaque`.
    The float64 reference is computed for each of the pieces of `split`, and gradients by the leaves `shared` are
    summed over them; or by `exact`.
    """

    name: str
    call: Callable[[Kernel, Arguments, Arguments, Sequence[str]], dict[str, Tensor]]
    reference: Kernel
    outputs: tuple[str, ...] = ("result",)
    leaves: tuple[str, ...] = ()
    sloped: tuple[str, ...] = ("result",)
    draw: Callable[[torch.Generator, int, int, int, int | None], Drawn] | None = None
    sizes: tuple[tuple[int, int], ...] = ((0, 2), (1, 1), (1, 2), (2, 2), (3, 5), (5, 3), (33, 130))
    features: tuple[frozenset[str], ...] = (frozenset[str](),) * 4
    rows: tuple[str, ...] = ()
    needed: frozenset[str] = frozenset()
    wide: int | None = None
    slack: Callable[[Arguments, Arguments], float] = lambda inputs, extras: 1.0
    tolerance: torch.dtype | None = None
    screened: tuple[tuple[int, int, int], ...] = ((4, 64, 0),)
    usual: Arguments = attrs.field(factory=dict[str, Any])
    shape: Shape
    sized: Callable[[Shape, torch.dtype, torch.device], Drawn]
    cost: Callable[[Shape, int], OperationCost]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    transforms: tuple[str, ...] = TRANSFORMS
    bound: Literal["matmul", "copy"] = "copy"
    timed: tuple[str, ...] = attrs.field(default=attrs.Factory(lambda self: self.outputs, takes_self=True))
    multiples: Mapping[str, str | int] = attrs.field(factory=dict[str, str | int])  # by size: its divisor
    ranks: int = 1
    exact: Callable[[Drawn], Exact] | None = None
    split: Callable[[Drawn], Sequence[Drawn]] = lambda drawn: [drawn]
    shared: tuple[str, ...] = ()

    def cotangents(self, weights: Tensor) -> dict[str, Tensor]:
        """The weights of each output that has a gradient, by name."""
        parts = weights if len(self.sloped) > 1 else [weights] * len(self.sloped)
        return dict(zip(self.sloped, parts, strict=True))


def operation_of(name: str) -> Operation:
    """The record of an operation in `Kernels`. Raises ValueError for an unknown name."""
    places = {field.name: field.metadata["operation"] for field in attrs.fields(table.Kernels)}
    if name not in places:
        raise ValueError(f"no operation {name!r}; there are {sorted(places)}")
    return table.found(places[name])


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Draw normal numbers in float32 on the CPU, so that they are equal for every device."""
    return scale * torch.randn(shape, generator=generator)


def normal64(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw standard normal numbers in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def filled(
    device: torch.device,
    dtype: torch.dtype,
    weights: tuple[int, ...],
    extras: dict[str, Any],
    **inputs: tuple[int, ...],
) -> Drawn:
    """Draw standard normal inputs of these shapes; a two-dimensional input named "weight" is scaled so that products
    with it keep their size. `weights` is the shape of the cotangents, `extras` are keywords."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: normal(generator, *shape, scale=shape[1] ** -0.5 if name == "weight" and len(shape) == 2 else 1.0)
        for name, shape in inputs.items()
    }
    moved: dict[str, Any] = {name: x.to(device, dtype) for name, x in tensors.items()}
    return Drawn(moved, extras, normal(generator, *weights).to(device))


def side_by_side(results: Any, *names: str) -> Tensor:
    """Concatenate several results along the last dimension. Raises ValueError for another number of results."""
    if isinstance(results, tuple | list) and len(cast(list[Tensor], results)) == len(names):
        return torch.cat(list(cast(list[Tensor], results)), -1)
    several = isinstance(results, tuple | list)
    found = f"{len(cast(list[Tensor], results))} results" if several else f"a {type(cast(object, results)).__name__}"
    raise ValueError(f"the kernel returned {found}, expected ({', '.join(names)})")
