"""What a search over meshes has found, as text, and as what JSON holds."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from fppo.plan.plan import Plan
from fppo.plan.search import Candidate, SearchResult
from fppo.plan.values import GIB

ROUGH = (
    "Of every mesh a formula estimates time and memory (fppo/plan/rough.py); those with the shortest steps that may "
    "fit are planned as `fppo plan` plans a mesh."
)


def found_report(found: SearchResult, *, width: int = 100) -> str:
    """Everything, for a terminal."""
    if not found.count:
        return "there is no mesh of so many GPUs"
    lines = [f"{found.count:,} meshes", ""]
    if found.best:
        lines += ["planned, and fit:", "  step s  tokens/s each   MFU  GiB each  mesh"]
        lines += [_row(candidate, planned) for candidate, planned in found.best]
    else:
        lines.append("None of those that were planned fits.")
    lines += ["", "the others:", *_others(found, width), "", *textwrap.wrap(ROUGH, width)]
    return "\n".join(lines)


def _row(candidate: Candidate, planned: Plan) -> str:
    updates = [stage.name for stage in planned.stages if stage.name.startswith("update")]
    speed = planned.tokens / planned.seconds / planned.case.world
    memory, mfu = planned.peak.total / GIB, planned.mfu(*updates)
    return f"  {planned.seconds:>6,.4g}  {speed:>13,.0f}  {mfu:>4.0%}  {memory:>8,.1f}  {candidate.words}"


def _others(found: SearchResult, width: int) -> list[str]:
    lines = []
    for candidate, planned in found.failed:
        need, have = planned.needs / GIB, planned.case.hardware.memory / GIB
        lines.append(f"1 needs {need:,.1f} of {have:,.1f} GiB, planned: {candidate.words}")
    if found.too_large:
        smallest = found.too_large[0]
        have = smallest.case.hardware.memory / GIB
        lines.append(
            f"{len(found.too_large):,} too large for {have:,.1f} GiB by the formula; the smallest takes "
            f"{smallest.rough.memory / GIB:,.1f}: {smallest.words}"
        )
    if found.slower:
        first = found.slower[0]
        lines.append(
            f"{len(found.slower):,} slower by the formula, not planned; the next takes {_times(found, first)}: "
            f"{first.words}"
        )
    lines += [f"{count:,} impossible: {reason}" for reason, count in found.refused.items()]
    wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return [line for text in lines for line in wrap.wrap(text)]


def _times(found: SearchResult, candidate: Candidate) -> str:
    """How long a step takes there, beside that of the best one, both by the formula."""
    if not found.best:
        return f"{candidate.rough.seconds:,.3g} s"
    return f"{candidate.rough.seconds / found.best[0][0].rough.seconds:.2f} times the best one's time"


def found_summary(found: SearchResult) -> dict[str, Any]:
    """Everything, for machines: bytes and seconds."""

    def rough(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
        return [{"mesh": _mesh(c), "rough_seconds": c.rough.seconds, "rough_bytes": c.rough.memory} for c in candidates]

    def planned(pairs: Sequence[tuple[Candidate, Plan]]) -> list[dict[str, Any]]:
        times = [{"seconds": p.seconds, "mfu": p.mfu()} if p.fits else {} for _, p in pairs]
        return [rough([c])[0] | time | {"peak_bytes": p.needs} for (c, p), time in zip(pairs, times, strict=True)]

    return {
        "estimate": True,
        "meshes": found.count,
        "best": planned(found.best),
        "failed": planned(found.failed),
        "slower": rough(found.slower),
        "too_large": rough(found.too_large),
        "impossible": dict(found.refused),
    }


def _mesh(candidate: Candidate) -> dict[str, int]:
    return {**candidate.case.mesh, "virtual_stages": candidate.case.virtual_stages}
