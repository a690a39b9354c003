"""Extrapolation from few layers to many, and from a short pipeline to a long one.

Where all layers are alike, the bytes held at each point of a pass are linear in the number of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs

from fppo.models.model import Model
from fppo.runtime.schedule import Action, all_forward, one_f_one_b
from fppo.studies.plan import passes
from fppo.studies.plan.case import Case
from fppo.studies.plan.track import GATHERED, STATE, Cost, Phase, Segment

FEW, MORE = 4, 5  # two layers at either end differ from those between, since their neighbours are gathered differently


def alike(model: Model) -> bool:
    """Whether all layers have equal shapes and the same kind of attention."""
    kinds = {str(kind) for kind in getattr(model.config, "layer_types", None) or ()}
    starts = [f"{model.prefix}{path}." for path in model.layers]
    shapes = [{n[len(s) :]: x for n, x in model.shapes.items() if n.startswith(s)} for s in starts]
    return len(kinds) <= 1 and all(each == shapes[0] for each in shapes)


def extrapolated(few: Sequence[Phase], more: Sequence[Phase], layers: int) -> list[Phase] | None:
    """Extrapolate to the phases of a model of `layers` layers, from those of models of FEW and of MORE layers.

    Only segments near the first and the last layer are returned: no peak lies between them, since the bytes held rise
    or fall linearly from layer to layer. None if the phases do not match.
    """
    if [p.name for p in few] != [p.name for p in more]:
        return None
    phases = []
    for a, b in zip(few, more, strict=True):
        extra = (len(b.segments) - len(a.segments)) / (MORE - FEW)
        if extra != int(extra) or extra < 0:
            return None
        half = (len(a.segments) + 1) // 2
        rest = len(a.segments) - half
        pairs = [*zip(a.segments[:half], b.segments[:half], strict=True)]
        if rest:
            pairs += zip(a.segments[-rest:], b.segments[-rest:], strict=True)
        segments = tuple(Segment(_linear(x.peak, y.peak, layers)) for x, y in pairs)
        phases.append(Phase(a.name, segments, _cost(a.cost, b.cost, layers), _linear(a.start, b.start, layers)))
    return phases


def _cost(few: Cost, more: Cost, layers: int) -> Cost:
    return Cost(*(Counter(_linear(getattr(few, n), getattr(more, n), layers)) for n in Cost.__match_args__))


def _linear(few: Mapping[Any, float], more: Mapping[Any, float], layers: int) -> dict[Any, float]:
    values = {}
    for key in dict.fromkeys([*few, *more]):
        a, b = few.get(key, 0), more.get(key, 0)
        values[key] = a + (b - a) * (layers - FEW) / (MORE - FEW)
    return values


SHORT = 3  # the ranks that are run: one with the embeddings, one in the middle, one with the head

Run = Callable[[Case, int], list[Phase]]  # (case of a short pipeline, layers of a stage) -> its phases


def piped(case: Case, name: str, own: Sequence[int], run: Run) -> list[Phase]:
    """Assemble the phases of the planned rank, whose stages have `own` layers, in the order of its schedule: from a
    rank of a short pipeline with the same part of the model.

    The bytes that an action adds do not depend on what else is held. Only a stage's first backward pass differs from
    later ones, since it finds no gradients.
    """
    ranks = case.size("pipeline")
    short = attrs.evolve(case, mesh={**case.mesh, "pipeline": SHORT}, virtual_stages=1, in_turn=True)
    stages = {}
    for stage, layers in zip(range(case.pipeline_rank, ranks * case.virtual_stages, ranks), own, strict=True):
        place = 0 if stage == 0 else 2 if stage == ranks * case.virtual_stages - 1 else 1
        stages[stage] = _Stage(run(attrs.evolve(short, pipeline_rank=place), layers))
    schedule = one_f_one_b if name.startswith("update") else all_forward
    count = passes.passes_of(case, name)
    actions = schedule(ranks, count, case.virtual_stages).actions[case.pipeline_rank]
    return _in_order(actions, stages, (STATE, GATHERED) if case.sharding.stage == 1 else (STATE,))


class _Stage:
    """Phases of a stage of a short pipeline by name, with the bytes held after each."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.setup, first, *_, last = phases
        self.begin = first.start
        self.trains = last.name.startswith("after")
        self._phases = {phase.name: phase for phase in phases}
        before = self._phases["after 2"] if self.trains else first
        cost = _difference(last.cost, before.cost)  # what happens after the last pass only
        self.end = Phase("after", last.segments if self.trains else (), cost, last.start)
        self._held = {phase.name: after.start for phase, after in pairwise(phases)}

    def of(self, action: Action, again: bool) -> tuple[list[Phase], Mapping[str, float], Cost]:
        """The phases of an action, the bytes held after it, and the cost of any later action of its kind. `again`: an
        earlier action of the stage was of the same kind."""
        own, later = (self._named(action.kind, 1 + (more and self.trains)) for more in (again, True))
        return own, self._held[own[-1].name], _sum([phase.cost for phase in later])

    def _named(self, kind: str, number: int) -> list[Phase]:
        names = [f"{kind} {number}"] if kind == "forward" else [f"{kind} {number}", f"after {number}"]
        return [self._phases[name] for name in names]


def _in_order(actions: Sequence[Action], stages: Mapping[int, _Stage], kinds: Sequence[str]) -> list[Phase]:
    """Phases of a rank with several stages, in the order of its `actions`. Each of the `stages` holds its own bytes of
    these `kinds` from the start."""
    first, *others = stages.values()
    held = Counter(first.begin)
    for stage in others:
        held.update({kind: stage.begin.get(kind, 0) for kind in kinds})
    start = _moved(Segment(held), first.begin, first.setup.start).peak
    result = [_phase("setup", [first.setup], start, _sum([stage.setup.cost for stage in stages.values()]))]
    seen: set[tuple[str, int]] = set()
    for action in actions:
        own, after, cost = stages[action.stage].of(action, (action.kind, action.stage) in seen)
        seen.add((action.kind, action.stage))
        result.append(_phase(action.kind, own, held, cost))
        held.update(after)
        held.subtract(own[0].start)
    return [*result, _phase("after", [first.end], held, _sum([stage.end.cost for stage in stages.values()]))]


def _phase(name: str, own: Sequence[Phase], held: Mapping[str, float], cost: Cost) -> Phase:
    """Merge consecutive phases into one with this `cost`, as if it began with the bytes `held`."""
    segments = (segment for phase in own for segment in phase.segments)
    return Phase(name, tuple(_moved(segment, own[0].start, held) for segment in segments), cost)


def _moved(segment: Segment, start: Mapping[str, float], held: Mapping[str, float]) -> Segment:
    """The segment as it would be if its phase had begun with the bytes `held` instead of `start`."""
    peak = Counter(segment.peak)
    peak.update(held)
    peak.subtract(start)
    return Segment(peak)


def _difference(cost: Cost, less: Cost) -> Cost:
    return Cost(*(getattr(cost, name) - getattr(less, name) for name in Cost.__match_args__))


def _sum(costs: Sequence[Cost]) -> Cost:
    """Add up costs, counter by counter."""
    return Cost(*(sum((getattr(cost, name) for cost in costs), Counter()) for name in Cost.__match_args__))
