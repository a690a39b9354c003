"""Running every implementation of operations at every shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from fppo.laws._kernels import words
from fppo.studies.ablate import measure, operations
from fppo.studies.ablate.group import MeasuredGroup, Progress, check_contract, measure_group
from fppo.studies.ablate.result import Ablation, HostRates, ResultRow
from fppo_kernels import table as tables
from fppo_kernels.operation import Operation, Shape
from fppo_kernels.table import Implementation, Kernels, Table


def ablate(  # a notebook sets any of them  # noqa: PLR0913
    op: str | Operation | Sequence[str | Operation],
    *,
    implementations: Sequence[str] | Mapping[str, Callable | Implementation] | None = None,
    shapes: Sequence[Shape] | None = None,
    dtypes: Sequence[str | torch.dtype] = ("float32", "bfloat16"),
    repeats: int = 5,
    device: torch.device | str = "cpu",
    law_seconds: float = 5.0,
    defaults: Kernels | None = None,
    machine: HostRates | None = None,
    table: Table = tables.BUILTIN,
    progress: Progress | None = None,
) -> Ablation:
    """Measure every implementation of an operation, or of several, side by side; `text.table` shows them.

    `implementations` are names of `table`, or a mapping of your own by name, which join those of the table:
    `ablate("log_probs", implementations={"mine": my_function})`. `shapes` are mappings such as {"N": 256}; a size
    that is left out has the operation's default (`operation_of(op).shape`), and an operation takes the sizes that it
    has. A dtype that an operation is not made for is left out.

    Each implementation is put through the laws of the operation first, for at most `law_seconds` (0: not at all); then
    come errors against float64, peak memory, and times, the implementations in turn, `repeats` rounds. One that cannot
    run here, breaks a law or raises has a row that says so. `defaults` are the kernels of a run (`Kernels.named()`),
    which are marked. `machine` is that of an earlier ablation, whose rates are then not measured again. Ctrl-C ends the
    ablation with what was measured so far. The caches of torch.compile are emptied after the laws, which fill them with
    small shapes.

    Raises ValueError for an unknown operation, implementation, size or dtype.
    """
    place = torch.device(device)
    cases = [operations.case_of(name) for name in ([op] if isinstance(op, str | Operation) else op)]
    table = operations.extended(cases, implementations, table)
    chosen = {case.name: operations.names_of(case.name, implementations, table) for case in cases}
    wanted = {case.name: operations.dtypes_of(case, dtypes, one=len(cases) == 1) for case in cases}
    sizes = {case.name: operations.shapes_of(case, shapes, cases) for case in cases}
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {repeats}")
    say: Progress = progress or (lambda text: None)
    known = machine or measure.host_of(place)
    rows: list[ResultRow] = []
    try:
        if machine is None:
            say("the rates of this machine")
            known = measure.with_rates(known, place, _matmul_dtypes(cases, wanted))
        for case in cases:
            implementing = {name: table[case.name][name] for name in chosen[case.name]}
            usual = operations.default_of(case.name, table, defaults)
            base = MeasuredGroup(
                case=case, shape={}, dtype=torch.float32, device=place, repeats=repeats, machine=known, default=usual
            )
            measured = _measured(base, implementing, wanted[case.name], sizes[case.name], law_seconds, say)
            for group, interrupted in measured:
                rows += group
                if interrupted:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        return Ablation(rows=tuple(rows), machine=known, interrupted=True)
    return Ablation(rows=tuple(rows), machine=known)


def _matmul_dtypes(cases: Sequence[Operation], dtypes: Mapping[str, Sequence[torch.dtype]]) -> tuple[torch.dtype, ...]:
    """The dtypes of the operations whose speed is bound by matrix products."""
    return tuple(dict.fromkeys(d for case in cases if case.bound == "matmul" for d in dtypes[case.name]))


def _measured(
    base: MeasuredGroup,
    implementations: Mapping[str, Implementation],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[dict[str, int]],
    law_seconds: float,
    say: Progress,
) -> Iterator[tuple[list[ResultRow], bool]]:
    """Yield the rows of each dtype and shape in turn, and whether ctrl-C cut the measurement short. The laws are
    checked once for each dtype, before its measurements; `say` reports progress."""
    for dtype in dtypes:
        contracts = {}
        for name, implementation in implementations.items():
            say(f"{base.case.name} {words(dtype)} {name}: laws")
            contracts[name] = check_contract(base.case, implementation, dtype, base.device, limit=law_seconds)
        for shape in shapes:
            group = attrs.evolve(base, shape=shape, dtype=dtype)
            yield measure_group(group, implementations, contracts, progress=say)
