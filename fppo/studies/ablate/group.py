"""One operation at one shape in one dtype: laws, errors and memory of each implementation, then times in turn."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import devices
from fppo.laws._kernels import words
from fppo.laws._search import LawViolation
from fppo.laws.kernels import check_kernel
from fppo.studies.ablate import measure
from fppo.studies.ablate.evaluation import Result, evaluate, exact
from fppo.studies.ablate.result import Contract, Error, HostRates, ResultRow
from fppo_kernels.operation import Drawn, Exact, Operation
from fppo_kernels.table import Implementation

Progress = Callable[[str], None]
Checked = tuple[Contract, str | None]  # and the broken law, or why not all were tried


class _OutOfTime(BaseException):
    """The time for the laws is over; no Exception, which the search would take for a violation."""


@attrs.frozen(kw_only=True)
class MeasuredGroup:
    """Every implementation of an operation at one shape in one dtype, to be measured together."""

    case: Operation
    shape: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    repeats: int
    machine: HostRates
    default: str | None


@attrs.frozen(kw_only=True)
class _Examined:
    """The findings on an implementation before its times; without `fn` it is not timed."""

    fn: Callable | None = None
    status: Any = "ok"
    reason: str | None = None
    contract: Checked = ("not checked", None)
    errors: tuple[Error, ...] = ()
    seconds_first: float | None = None
    peak_bytes: int | None = None
    result_bytes: int = 0


Times = dict[str, tuple[list[float], list[float]]]


def refusal(case: Operation, implementation: Implementation, device: torch.device) -> str | None:
    """The reason why an implementation cannot run on `device`; None if it can."""
    if case.ranks > 1 and device.type != "cpu":
        return f"{case.name} is measured on simulated ranks, which run on the CPU"
    return implementation.refuse()


def measure_group(
    group: MeasuredGroup,
    implementations: Mapping[str, Implementation],
    contracts: Mapping[str, Checked],
    *,
    progress: Progress,
) -> tuple[list[ResultRow], bool]:
    """Measure every implementation of a group; returns a row for each, and whether ctrl-C cut the measurement short.
    `contracts` are the verdicts of the laws by implementation."""
    case, what = group.case, f"{group.case.name} {words(group.dtype)}"
    results: dict[str, _Examined] = {}
    times: Times = {name: ([], []) for name in implementations}
    interrupted = False
    try:
        refused = {name: refusal(case, x, group.device) for name, x in implementations.items()}
        results = {name: _Examined(status="refused", reason=reason) for name, reason in refused.items() if reason}
        if len(results) < len(implementations):
            drawn = case.sized(group.shape, group.dtype, group.device)
            progress(f"{what}: the float64 reference")
            known = exact(case, drawn)
            for name, implementation in implementations.items():
                if name not in results:
                    progress(f"{what} {name}: errors and memory")
                    results[name] = _examine(group, implementation, contracts[name], drawn, known)
            del known
            for number in range(group.repeats):
                progress(f"{what}: times, round {number + 1} of {group.repeats}")
                _time(group, results, implementations, drawn, times)
    except KeyboardInterrupt:
        interrupted = True
    missing = _Examined(status="interrupted", reason="not measured: interrupted")
    rows = [_row(group, name, x, results.get(name, missing), times[name]) for name, x in implementations.items()]
    return rows, interrupted


def _examine(
    group: MeasuredGroup, implementation: Implementation, contract: Checked, drawn: Drawn, known: Exact
) -> _Examined:
    """Measure an implementation's errors against the `known` exact results, its first call's time and its memory. An
    exception becomes a status with a reason."""
    case, device = group.case, group.device
    outputs, timed = (_without(names, implementation) for names in (case.outputs, case.timed))
    broken = contract[0] == "broken"
    try:
        fn = implementation.load()
        run = partial(evaluate, case, fn, drawn, timed, timed)
        first = measure.seconds(run, device)
        errors = tuple(_errors(case, fn, drawn, known, outputs))
        size = _size(run())
        peak = measure.peak_bytes(run, device)
    except Exception as error:
        if devices.is_accelerator(device):
            torch.accelerator.empty_cache()
        reason = f"it raised {type(error).__name__}: {_first_line(error)}"
        reason = f"{contract[1]}; at this shape {reason}" if broken else reason
        return _Examined(status="failed" if broken else "error", reason=reason, contract=contract)
    return _Examined(
        fn=fn,
        status="failed" if broken else "ok",
        reason=contract[1],
        contract=contract,
        errors=errors,
        seconds_first=first,
        peak_bytes=peak,
        result_bytes=size,
    )


def _size(result: Result) -> int:
    return sum(x.nbytes for part in result for x in part.values())


def _time(
    group: MeasuredGroup,
    results: Mapping[str, _Examined],
    implementations: Mapping[str, Implementation],
    drawn: Drawn,
    times: Times,
) -> None:
    """Time one forward, and one forward and backward, of each implementation that runs; append them to `times`."""
    for name, known in results.items():
        if known.fn is None:
            continue
        timed = _without(group.case.timed, implementations[name])
        run = partial(evaluate, group.case, known.fn, drawn, timed)
        forward, total = times[name]
        if not forward:
            run(())  # without a backward pass to come, some compile anew
        forward.append(measure.seconds(partial(run, ()), group.device))
        if group.case.leaves:
            total.append(measure.seconds(partial(run, timed), group.device))


def _row(
    group: MeasuredGroup,
    name: str,
    implementation: Implementation,
    examined: _Examined,
    times: tuple[list[float], list[float]],
) -> ResultRow:
    case = group.case
    cost = case.cost(group.shape, group.dtype.itemsize)
    forward, total = (statistics.median(x) if x else None for x in times)
    copied = case.bound == "copy"
    rate = group.machine.copy if copied else group.machine.matmul.get(words(group.dtype))
    works = (cost.bytes_forward, cost.bytes_total) if copied else (cost.flops_forward, cost.flops_total)
    fractions = [w / s / rate if w and s and rate else None for w, s in zip(works, (forward, total), strict=True)]
    return ResultRow(
        op=case.name,
        implementation=name,
        dtype=words(group.dtype),
        shape=group.shape,
        default=name == group.default,
        status=examined.status,
        reason=examined.reason,
        contract=examined.contract[0],
        lacks=tuple(sorted(implementation.lacks)),
        errors=examined.errors,
        seconds_forward=forward,
        seconds_total=total,
        seconds_first=examined.seconds_first,
        repeats=len(times[0]),
        cost=cost,
        bound=case.bound,
        peak_bytes=examined.peak_bytes,
        result_bytes=examined.result_bytes,
        fraction_forward=fractions[0],
        fraction_total=fractions[1],
    )


def _without(names: Sequence[str], implementation: Implementation) -> tuple[str, ...]:
    return tuple(name for name in names if name not in implementation.lacks)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def check_contract(
    case: Operation, implementation: Implementation, dtype: torch.dtype, device: torch.device, *, limit: float
) -> Checked:
    """Check an implementation against the laws of the operation, on small shapes and for at most `limit` seconds (0:
    not at all).

    Empties the caches of torch.compile, where it is in use.
    """
    if limit <= 0 or refusal(case, implementation, device):
        return "not checked", None
    deadline = time.perf_counter() + limit

    def watched(*args: Any, **kwargs: Any) -> Any:
        if time.perf_counter() > deadline:
            raise _OutOfTime
        return fn(*args, **kwargs)

    try:
        fn = implementation.load()
        there = check_kernel(
            case,
            watched,
            dtypes=(dtype,),
            device=device,
            lacks=implementation.lacks,
            reference=implementation.definition(),
            tolerance=getattr(torch, implementation.tolerance) if implementation.tolerance else None,
        )
    except LawViolation as violation:
        lines = str(violation).splitlines()
        return "broken", f'breaks the law "{violation.law}": {lines[1].strip() if lines[1:] else ""}'
    except _OutOfTime:
        return "partly", f"no law broken in {limit:g} s, which were not enough to try all"
    except Exception as error:
        return "not checked", f"the laws could not be tried: {type(error).__name__}: {_first_line(error)}"
    finally:
        if "torch._dynamo" in sys.modules:  # the laws' small shapes use up the limit of programs per function
            torch.compiler.reset()
    return ("kept", None) if there else ("not checked", "no law is made for what it lacks, or for this device")


def _errors(case: Operation, fn: Callable, drawn: Drawn, known: Exact, outputs: Sequence[str]) -> list[Error]:
    """The errors of every output, and of its gradient by every leaf."""
    errors = []
    for output in outputs:
        of = (output,) if any(place[0] == output for place in known.gradients) else ()
        result = evaluate(case, fn, drawn, outputs, of)
        errors.append(_error(output, None, known.values[output], result.values[output]))
        for leaf, gradient in result.gradients.items():
            errors.append(_error(output, leaf, known.gradients[output, leaf], gradient))
        del result
        gc.collect()
    return errors


def _error(output: str, by: str | None, expected: Tensor, actual: Tensor) -> Error:
    if expected.shape != actual.shape:
        raise ValueError(f"{output} has the shape {list(actual.shape)}, expected {list(expected.shape)}")
    wide = actual.double()
    gap = (wide - expected).abs().where(wide != expected, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    largest = expected.abs().where(expected.isfinite(), 0.0).max().item() if expected.numel() else 0.0
    worst = gap.max().item() if gap.numel() else 0.0
    return Error(output=output, by=by, max_abs=worst, relative=worst / largest if largest else worst)
