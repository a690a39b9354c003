"""A stage of a step on a long pipeline, from a short one whose ranks have a stage each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import attrs

from fppo.plan._track import ACTIVATIONS, GATHERED, GRADIENTS
from fppo.plan.case import Case
from fppo.plan.values import Cost, Phase, Segment, peak_of

SHORT = 3  # ranks that are run: one with the embeddings, one between, one with the head

Run = Callable[[Case, int], list[Phase]]  # (case of a short pipeline, layers of a stage) -> its phases


def piped(case: Case, own: Sequence[int], run: Run) -> list[Phase]:
    """The phases of the planned rank, whose stages have `own` layers, with the mean pass through one of them: of an
    end of the pipeline one, and of those between the others.

    What a rank holds is linear in the passes under way, of which the first rank of three has one more than the one
    between, and its gradients in its layers.
    """
    short = attrs.evolve(case, mesh={**case.mesh, "pipeline": SHORT}, virtual_stages=1)
    first, between, last = (attrs.evolve(short, pipeline_rank=rank) for rank in range(SHORT))
    end, middle, virtual = last if case.pipeline_rank else first, run(between, max(own)), len(own)
    phases, others = run(end, max(own)), sum(own) / max(own) - 1  # stages between, in ones of the most layers
    phases, middle = (
        x if x[-1].name.startswith("after") else [*x, Phase("after", (), Cost())] for x in (phases, middle)
    )
    (where, peak), (_, held) = peak_of(phases), peak_of(middle)
    most = Counter(peak.peak)
    for kind in (GRADIENTS, *((GATHERED,) if case.sharding.stage == 1 else ())):
        most[kind] += others * held.peak.get(kind, 0)  # type: ignore[assignment]
    if any(phase.name.startswith("backward") for phase in phases):
        more = peak_of(run(first, max(own)))[1].peak.get(ACTIVATIONS, 0) - held.peak.get(ACTIVATIONS, 0)
        under_way = case.in_flight * (others + 1) / virtual - end.in_flight
        most[ACTIVATIONS] += more / (first.in_flight - between.in_flight) * under_way  # type: ignore[assignment]
    passes = [
        Phase(name, (Segment(most),) if where.startswith(name) else (), _pass(phases, middle, name, others, virtual))
        for name in ("forward", "backward")
    ]
    ends = [
        Phase(phase.name, (), _added(phase.cost, other.cost, others))
        for phase, other in ((phases[0], middle[0]), (phases[-1], middle[-1]))
    ]
    if not where.startswith(("forward", "backward")):
        ends[1] = ends[1]._replace(segments=(Segment(most),))
    return [ends[0], *passes, ends[1]]


def _pass(phases: Sequence[Phase], middle: Sequence[Phase], name: str, others: float, virtual: int) -> Cost:
    """The mean cost of a pass forward, or backward, through a stage of the rank."""
    own, rest = (_mean(each, name) for each in (phases, middle))
    total = _added(own, rest, others)
    return Cost(*(Counter({key: x / virtual for key, x in getattr(total, n).items()}) for n in Cost.__match_args__))


def _mean(phases: Sequence[Phase], name: str) -> Cost:
    """Of all passes of a run; what follows a pass backward is a part of it."""
    count = sum(phase.name.startswith("forward") for phase in phases)
    total = Cost()
    for phase in phases[1:-1]:
        if phase.name.startswith("forward") == (name == "forward"):
            total = _added(total, phase.cost, 1 / count)
    return total


def _added(cost: Cost, other: Cost, times: float) -> Cost:
    """A cost, and another so many times."""
    sums = []
    for field in Cost.__match_args__:
        own, more = getattr(cost, field), getattr(other, field)
        sums.append(Counter({key: own[key] + times * more[key] for key in dict.fromkeys([*own, *more])}))
    return Cost(*sums)
