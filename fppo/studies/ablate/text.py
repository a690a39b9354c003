"""An ablation as a table of text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from types import MappingProxyType

from fppo.studies.ablate.result import Ablation, ResultRow, groups, shape_words

Column = tuple[str, str, list[str]]  # a heading over some columns, the column's own, its cells
GAP = "  "
LAWS = MappingProxyType({"kept": "kept", "broken": "FAILED", "partly": "partly", "not checked": "-"})

_STARRED = "* what Kernels.named() takes; fppo train chooses by machine and length, and says so"


def table(ablation: Ablation, *, width: int = 120) -> str:
    """All groups of rows as text with the machine's rates on top, at most `width` columns wide where possible."""
    machine = ablation.machine
    rates = [f"matmul {name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in machine.matmul.items()]
    rates += [f"copy {machine.copy / 1e9:,.1f} GB/s"] if machine.copy == machine.copy else []
    threads = f"{machine.threads} thread{'s' if machine.threads > 1 else ''}"
    lines = _wrap(f"{machine.device}, {threads}, torch {machine.torch}; {', '.join(rates)}", width, "")
    explained: set[str] = set()
    for rows in groups(ablation.rows):
        lines += ["", *_group(rows, width, explain=rows[0].op not in explained)]
        explained.add(rows[0].op)
    if any(row.default for row in ablation.rows):
        lines += ["", *_wrap(_STARRED, width, "")]
    if ablation.interrupted:
        lines += ["", "interrupted: what is above was measured before"]
    return "\n".join(lines)


def _group(rows: Sequence[ResultRow], width: int, *, explain: bool) -> list[str]:
    first = rows[0]
    cost, results = first.cost, max(row.result_bytes for row in rows)
    moved = f"{size(cost.bytes_forward)} forward"
    if cost.bytes_total is not None:
        moved += f", {size(cost.bytes_total)} with backward"
    about = f"must move {moved}"
    if first.bound == "matmul":
        about += f"; {_flops(cost.flops_forward)} forward, {_flops(cost.flops_total)} with backward"
    lines = [f"{first.op}  {shape_words(first)}  {first.dtype}"]
    if results:
        about += f"; results and gradients are {results / 2**20:,.0f} MiB of the peak"
    lines += _wrap(about, width, "  ")
    lines += [*(_wrap(f"({cost.words})", width, "  ") if explain else []), ""]
    names = [_name(row) for row in rows]
    shown = [row for row in rows if row.errors or row.seconds_forward is not None]
    if shown:
        kept = [name for name, row in zip(names, rows, strict=True) if row in shown]
        lines += _blocks(kept, _columns(shown), width)
    for row, name in zip(rows, names, strict=True):
        if row not in shown or row.reason or _lacking(row):
            lines += _remark(row, name, width)
    return lines


def _name(row: ResultRow) -> str:
    return f"{row.implementation}{' *' if row.default else ''}"


def _remark(row: ResultRow, name: str, width: int) -> list[str]:
    words = {"refused": "cannot run here: ", "error": "ERROR: ", "failed": "FAILED: ", "ok": "", "interrupted": ""}
    text = f"{words[row.status]}{row.reason or ''}"
    if lacking := _lacking(row):
        text = f"{text}{'; ' if text else ''}lacks {lacking}"
    return _wrap(f"{name}: {text}", width, "  ")


def _lacking(row: ResultRow) -> str:
    return ", ".join(row.lacks)


def _columns(rows: Sequence[ResultRow]) -> list[Column]:
    backward = rows[0].cost.bytes_total is not None
    of = "of matmul" if rows[0].bound == "matmul" else "of copy"
    columns: list[Column] = [
        ("", "laws", [LAWS[row.contract] for row in rows]),
        ("time", "forward", [seconds(row.seconds_forward) for row in rows]),
    ]
    if backward:
        columns.append(("time", "and backward", [seconds(row.seconds_total) for row in rows]))
    columns.append((of, "forward", [share(row.fraction_forward) for row in rows]))
    if backward:
        columns.append((of, "and backward", [share(row.fraction_total) for row in rows]))
    columns.append(("", "peak MiB", [_mib(row.peak_bytes) for row in rows]))
    places = dict.fromkeys((e.output, e.by) for row in rows for e in row.errors)
    for output, by in places:
        errors = [next((e for e in row.errors if (e.output, e.by) == (output, by)), None) for row in rows]
        cells = ["-" if e is None else _error(e.relative) for e in errors]
        columns.append((f"error of {output}", "value" if by is None else f"d {by}", cells))
    return columns


def _error(relative: float) -> str:
    return f"{relative:.1e}" if relative else "0"


def _blocks(names: Sequence[str], columns: Sequence[Column], width: int) -> list[str]:
    """Lines of a table with one row per name, in as many blocks of columns as `width` requires. Columns under one
    heading stay in one block."""
    label = max([len(name) for name in names] + [6])
    runs: list[list[Column]] = []
    for column in columns:
        if runs and runs[-1][0][0] == column[0]:
            runs[-1].append(column)
        else:
            runs.append([column])
    blocks: list[list[list[Column]]] = [[]]
    for run in runs:
        used = label + sum(_run_width(other) for other in blocks[-1])
        if blocks[-1] and used + _run_width(run) > width - 2:
            blocks.append([])
        blocks[-1].append(run)
    lines: list[str] = []
    for number, block in enumerate(blocks):
        lines += [""] if number else []
        lines += _block(names, block, label)
    return lines


def _widths(run: Sequence[Column]) -> list[int]:
    widths = [max(len(name), *(len(cell) for cell in cells)) for _, name, cells in run]
    missing = len(run[0][0]) - sum(widths) - len(GAP) * (len(run) - 1)
    return [max(widths[0] + missing, widths[0]), *widths[1:]]


def _run_width(run: Sequence[Column]) -> int:
    return sum(_widths(run)) + len(GAP) * len(run)


def _block(names: Sequence[str], runs: Sequence[Sequence[Column]], label: int) -> list[str]:
    top, below = " " * label, " " * label
    for run in runs:
        widths = _widths(run)
        top += GAP + run[0][0].rjust(sum(widths) + len(GAP) * (len(run) - 1))
        below += "".join(GAP + name.rjust(n) for (_, name, _), n in zip(run, widths, strict=True))
    lines = [f"  {top}", f"  {below}"]
    for i, name in enumerate(names):
        cells = [GAP + cells[i].rjust(n) for run in runs for (*_, cells), n in zip(run, _widths(run), strict=True)]
        lines.append(f"  {name.ljust(label)}{''.join(cells)}")
    return [line.rstrip() for line in lines]


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, max(width, 40), initial_indent=indent, subsequent_indent=indent + "  ")


def seconds(value: float | None) -> str:
    """A time with three digits."""
    if value is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}" if value * factor < 1000 else f"{value * factor:.0f} {unit}"
    return f"{value * 1e6:.3g} us"


def share(value: float | None) -> str:
    """A fraction in per cent."""
    return "-" if value is None else f"{100 * value:.3g} %" if value < 1 else f"{100 * value:.0f} %"


def size(value: int) -> str:
    """Bytes in a few characters."""
    number = float(value)
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def _flops(value: int | None) -> str:
    return "-" if value is None else f"{size(value).removesuffix('B')}FLOP"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"
