"""The findings of an ablation, as values: rows, the machine they were measured on, and their JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import attrs

from fppo_kernels.operation import OperationCost

Contract = Literal["kept", "broken", "partly", "not checked"]  # partly: none is broken of those that were tried
Status = Literal["ok", "failed", "refused", "error", "interrupted"]


@attrs.frozen(kw_only=True)
class Error:
    """How far one tensor is from the float64 reference: the largest difference, and that over the largest number.

    `by` names the leaf where the tensor is the gradient of `output`; None where it is the output itself.
    """

    output: str
    by: str | None
    max_abs: float
    relative: float


@attrs.frozen(kw_only=True)
class ResultRow:
    """One implementation at one shape in one dtype.

    status "ok": it keeps its contract and was measured; "failed": it breaks a law (`reason`), and was measured all the
    same; "refused": it cannot run on this machine; "error": it raised at this shape; "interrupted": not measured.
    Seconds are medians. `peak_bytes` is what forward and backward hold beyond the inputs, `result_bytes` the part of it
    that the outputs and gradients are. A fraction is the work of `cost` by the time, over the machine's rate.
    """

    op: str
    implementation: str
    dtype: str
    shape: dict[str, int]
    default: bool
    status: Status
    reason: str | None = None
    contract: Contract = "not checked"
    lacks: tuple[str, ...] = ()
    errors: tuple[Error, ...] = ()
    seconds_forward: float | None = None
    seconds_total: float | None = None
    seconds_first: float | None = None  # of the first forward and backward, which compiles
    repeats: int = 0
    cost: OperationCost
    bound: Literal["matmul", "copy"]
    peak_bytes: int | None = None
    result_bytes: int = 0
    fraction_forward: float | None = None
    fraction_total: float | None = None

    @property
    def worst(self) -> tuple[float | None, float | None]:
        """The largest relative error of the outputs, and that of the gradients; None where no error was measured."""
        values = [e.relative for e in self.errors if e.by is None]
        gradients = [e.relative for e in self.errors if e.by is not None]
        return max(values, default=None), max(gradients, default=None)


@attrs.frozen(kw_only=True)
class HostRates:
    """The machine of an ablation and its rates: FLOP/s of a matmul by dtype, bytes/s read and written by a copy."""

    device: str
    threads: int
    torch: str
    matmul: dict[str, float] = attrs.field(factory=dict)
    copy: float = math.nan


@attrs.frozen(kw_only=True)
class Ablation:
    """All rows in the order in which they were asked for. `interrupted` says that ctrl-C cut it short."""

    rows: tuple[ResultRow, ...]
    machine: HostRates
    interrupted: bool = False


def groups(rows: Sequence[ResultRow]) -> list[list[ResultRow]]:
    """The rows by operation, shape and dtype, in order."""
    by_place: dict[tuple, list[ResultRow]] = {}
    for row in rows:
        by_place.setdefault((row.op, tuple(row.shape.items()), row.dtype), []).append(row)
    return list(by_place.values())


def shape_words(row: ResultRow) -> str:
    """The sizes of a row's shape as text, such as "N=256 H=896"."""
    return " ".join(f"{name}={size:,}" for name, size in row.shape.items())
