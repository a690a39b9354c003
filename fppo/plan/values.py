"""What is known of a case, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import attrs

GIB = 1024**3


class Work(NamedTuple):
    """What one operation does."""

    kind: str  # "matmul" or "attention", with the dtype; "" for others
    flops: float
    traffic: int  # bytes read and written by what is no matmul


@attrs.frozen
class Cost:
    """Counters of what is done between two moments."""

    flops: Counter[str] = attrs.field(factory=Counter)  # by the kind of Work
    # bytes of "traffic", to or from the "host", and of the memory there of activations put "away"; "launches"
    other: Counter[str] = attrs.field(factory=Counter)
    sent: Counter[tuple[str, str, bool]] = attrs.field(
        factory=Counter
    )  # bytes by axis, collective and whether waited for
    calls: Counter[tuple[str, str, bool]] = attrs.field(factory=Counter)

    def add(self, work: Work) -> None:
        """Counts one operation."""
        if work.kind:
            self.flops[work.kind] += work.flops  # type: ignore[assignment]
        self.other["traffic"] += work.traffic
        self.other["launches"] += 1


@attrs.frozen
class Segment:
    """Bytes by kind at the moment, between two layers, when most is held."""

    peak: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.peak.values())


class Phase(NamedTuple):
    """A forward pass, a backward pass, or what lies between: its segments, one per layer and one more, and its cost;
    and the bytes by kind that are held when it begins."""

    name: str
    segments: tuple[Segment, ...]
    cost: Cost
    start: Mapping[str, float] = MappingProxyType({})


def peak_of(phases: Sequence[Phase]) -> tuple[str, Segment]:
    """Where most is held, and what."""
    return max(((p.name, s) for p in phases for s in p.segments), key=lambda pair: pair[1].total)
