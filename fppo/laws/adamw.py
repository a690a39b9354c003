"""Laws of AdamW kernels: the textbook's numbers over several steps, and skipped steps that change no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fppo.laws._kernels import DTYPES, apart, checked
from fppo.laws._search import Law, LawExample, check, differ, normal
from fppo_kernels.adamw import reference_

SIZES = ((1, 1), (1, 2), (3, 2), (0, 3), (5, 130))
STEPS = 3
STATE = ("parameter", "first moment", "second moment")


class AdamWScalars(NamedTuple):
    """Scalars of a step of AdamW; with `lr_tensor` the rate is a 0-d tensor."""

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_scale: float | None = None
    found_inf: float | None = None  # 0: the flag is not raised
    lr_tensor: bool = False


_CASES = (
    AdamWScalars(),
    AdamWScalars(weight_decay=0.3),
    AdamWScalars(lr=0.01, betas=(0.5, 0.9), eps=0.1),
    AdamWScalars(grad_scale=4.0, weight_decay=0.1),
    AdamWScalars(betas=(0.0, 0.95), found_inf=0.0, grad_scale=0.375),
    AdamWScalars(lr_tensor=True, found_inf=0.0),
)


class _State(NamedTuple):
    """The tensors that a step changes: in each list one for each parameter."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    def copy(self) -> _State:
        return _State(*([x.clone() for x in part] for part in self))


def _start(example: LawExample) -> _State:
    """The example's parameters, with moments and step counts as after some earlier steps."""
    params = list(example.inputs.values())
    moments = [0.1 * p.flip(0) if p.dim() else 0.1 * p for p in params]
    steps = [torch.full((), 2.0, device=p.device) for p in params]
    return _State(params, moments, [m.square() for m in moments], steps).copy()


def _wide_copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.to(torch.float64, copy=True) for x in tensors]


def _grads(example: LawExample, step: int) -> list[Tensor]:
    return [x[step].clone() for x in example.extras.values()]


def _step(kernel: Callable, state: _State, grads: list[Tensor], case: AdamWScalars, **changes: Tensor) -> None:
    device = state.params[0].device if state.params else torch.device("cpu")
    flags = {"grad_scale": case.grad_scale, "found_inf": case.found_inf}
    flags = {name: None if x is None else torch.tensor(x, device=device) for name, x in flags.items()} | changes
    lr = torch.tensor(case.lr, dtype=torch.float64) if case.lr_tensor else case.lr
    kernel(
        state.params,
        grads,
        state.exp_avgs,
        state.exp_avg_sqs,
        state.steps,
        lr=lr,
        betas=case.betas,
        eps=case.eps,
        weight_decay=case.weight_decay,
        **flags,
    )


def is_textbook(kernel: Callable, example: LawExample, generator: torch.Generator, *, case: AdamWScalars) -> str | None:
    """Describe the first difference from the textbook's numbers over some steps; None if there is none."""
    state, names = _start(example), list(example.inputs)
    expected = _State(*(_wide_copies(part) for part in state))
    for step in range(STEPS):
        grads = _grads(example, step)
        count = int(state.steps[0]) + 1
        _step(reference_, expected, _wide_copies(grads), case)
        _step(kernel, state, grads, case)
        if any(int(x) != count for x in state.steps):
            return f"after step {step + 1}, steps are {[x.item() for x in state.steps]}, expected {count}.0 of each"
        for i, name in enumerate(names):
            for what, wanted, actual in zip(STATE, expected, state, strict=False):
                if reason := apart(f"the {what} {name!r}", wanted[i], actual[i], actual[i].dtype):
                    return f"with {case}, after step {step + 1}, {reason}"
    return None


def keeps_skipped(
    kernel: Callable, example: LawExample, generator: torch.Generator, *, case: AdamWScalars
) -> str | None:
    """Describe the first change by a step that is to be skipped, with found_inf = 1 and infinite gradients; None if
    there is none."""
    state, names = _start(example), list(example.inputs)
    before = state.copy()
    grads = [torch.full_like(g, torch.inf) for g in _grads(example, 0)]
    _step(kernel, state, grads, case, found_inf=torch.ones((), device=before.steps[0].device))
    for what, old, new in zip((*STATE, "count"), before, state, strict=True):
        for name, a, b in zip(names, old, new, strict=True):
            if reason := differ(f"the {what} of {name!r}", a, b, 0.0):
                return f"with found_inf=1, {reason}, as before"
    return None


def _alone(kernel: Callable, example: LawExample, generator: torch.Generator, *, case: AdamWScalars) -> str | None:
    together = _start(example)
    _step(kernel, together, _grads(example, 0), case)
    for i, name in enumerate(example.inputs):
        alone = _State(*([part[i]] for part in _start(example)))
        _step(kernel, alone, [_grads(example, 0)[i]], case)
        if reason := differ(f"the parameter {name!r}", alone.params[0], together.params[i], 0.0):
            return f"beside other parameters, {reason}, as alone"
    return None


def _law(name: str, statement: str, breach: Callable, seeds: int) -> Law:
    """Make a law whose `breach` gets one of the `AdamWScalars` as `case`, another one after every `seeds` seeds."""

    def with_case(kernel: Callable, example: LawExample, generator: torch.Generator) -> str | None:
        return breach(kernel, example, generator, case=_CASES[generator.initial_seed() // seeds])

    return Law(name, statement, with_case)


def _laws(num_dtypes: int) -> tuple[Law, ...]:
    return (
        _law("textbook", "parameters, moments and counts are the textbook's, step by step", is_textbook, num_dtypes),
        _law("skipped step", "where found_inf is 1, nothing changes a bit", keeps_skipped, num_dtypes),
        _law("alone", "a parameter's update does not depend on the others in the list", _alone, num_dtypes),
    )


def example(dtypes: Sequence[torch.dtype], device: torch.device | str, rows: int, width: int, seed: int) -> LawExample:
    """A matrix, a vector and a number as parameters, with gradients for some steps."""
    generator = torch.Generator().manual_seed(1000 * rows + 100 * width + seed)
    dtype, shapes = dtypes[seed % len(dtypes)], {"matrix": (rows, width), "vector": (width,), "number": ()}
    inputs = {name: normal(generator, *shape) for name, shape in shapes.items()}
    extras = {f"{name} gradients": normal(generator, STEPS, *shape) for name, shape in shapes.items()}
    return LawExample(inputs, extras, torch.zeros(0)).map(lambda x: x.to(device, dtype))


def check_adamw(
    kernel: Callable[..., None], *, dtypes: Sequence[torch.dtype] = DTYPES, device: torch.device | str = "cpu"
) -> None:
    """Check an in-place AdamW kernel: `laws.check_adamw(my_adamw_)`. Raises LawViolation for the first broken law.

    `kernel(params, grads, exp_avgs, exp_avg_sqs, steps, *, lr, betas, eps, weight_decay, grad_scale, found_inf)` takes
    lists of tensors of one dtype and float32 0-d steps (see `fppo_kernels.adamw`).

    Over several steps it gives the numbers of the textbook in float64, to the tolerance of the dtype, with gradients
    divided by grad_scale; if found_inf is 1 it changes no bit of parameters, moments and steps, whatever the gradients
    hold; and a parameter's update does not depend on the others. Raises ValueError for another dtype.
    """
    dtypes = checked(dtypes)
    seeds = len(_CASES) * len(dtypes)
    check(kernel, _laws(len(dtypes)), partial(example, dtypes, device), sizes=SIZES, seeds=seeds)
