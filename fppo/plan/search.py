"""The best of all meshes of some GPUs: each looked at by a formula, and the best ones planned."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs

from fppo.plan.built import Built, models_of
from fppo.plan.case import Case, problems, with_sequences
from fppo.plan.estimate import ORDER
from fppo.plan.plan import Plan, plan
from fppo.plan.rough import ROOM, Facts, Rough, facts_of, rough

PLANNED = 5  # meshes that fit are planned
TRIED = 12  # meshes at most
VIRTUAL = (1, 2, 4)
DIVIDING = ("expert", "sequence", "tensor")  # axes that must divide something of a model


@attrs.frozen
class Candidate:
    """A mesh, and what the formula says of it."""

    case: Case
    rough: Rough

    @property
    def words(self) -> str:
        """The words for the command line."""
        sizes = {**self.case.mesh, "virtual-stages": self.case.virtual_stages}
        return " ".join(f"--mesh.{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


@attrs.frozen
class SearchResult:
    """What a search has found: the plans that fit, the fastest first; those that turned out not to; and of all others
    why not."""

    best: tuple[tuple[Candidate, Plan], ...]
    failed: tuple[tuple[Candidate, Plan], ...]
    slower: tuple[Candidate, ...]  # which might fit, and by the formula take longer
    too_large: tuple[Candidate, ...]  # by the formula, the smallest first
    refused: Mapping[str, int]  # how many meshes each reason keeps out

    @property
    def count(self) -> int:
        """Number of meshes considered."""
        mine = (self.best, self.failed, self.slower, self.too_large)
        return sum(map(len, mine)) + sum(self.refused.values())


def search(case: Case, ranks: int, sequences: int) -> SearchResult:
    """Plans the meshes of `ranks` GPUs on which the formula has a step of the case fastest, among those that fit.

    A step has `sequences` on each mesh, in passes of at most the case's tokens.
    """
    built = Built()
    facts = {name: facts_of(case, built.model(case, name)) for name in models_of(case)}
    refused: Counter[str] = Counter()
    every: list[Candidate] = []
    divides = functools.cache(lambda *sizes: _undivided(case, *sizes))
    for mesh, virtual in meshes(ranks, experts=any(each.experts for each in facts.values())):
        moved = attrs.evolve(case, mesh=mesh, virtual_stages=virtual)
        if reason := _unused(moved, sequences, facts) or divides(*(mesh[axis] for axis in DIVIDING)):
            refused[reason] += 1
            continue
        moved = with_sequences(moved, sequences)
        every.append(Candidate(moved, rough(moved, facts)))
    every.sort(key=lambda candidate: candidate.rough.seconds)
    limit = ROOM * case.hardware.memory
    large = sorted((c for c in every if c.rough.memory > limit), key=lambda candidate: candidate.rough.memory)
    best, failed, slower = _planned([c for c in every if c.rough.memory <= limit], built)
    return SearchResult(best, failed, slower, tuple(large), refused)


def _planned(
    candidates: Sequence[Candidate], built: Built
) -> tuple[tuple[tuple[Candidate, Plan], ...], tuple[tuple[Candidate, Plan], ...], tuple[Candidate, ...]]:
    """The first of them planned, until enough fit: those, the others, and what is left."""
    fitting, failed, tried = [], [], 0
    for candidate in candidates:
        if len(fitting) == PLANNED or tried == TRIED:
            break
        tried += 1
        planned = plan(candidate.case, only_if_fits=True, built=built)
        (fitting if planned.fits else failed).append((candidate, planned))
    fitting.sort(key=lambda pair: pair[1].seconds)
    return tuple(fitting), tuple(failed), tuple(candidates[tried:])


def meshes(ranks: int, *, experts: bool = False) -> Iterator[tuple[dict[str, int], int]]:
    """Every mesh of so many ranks, with its virtual stages, with an expert axis if there are `experts`; rows are cut by
    a sequence axis or a context axis."""
    divisors = _divisors(ranks)
    for pipeline, replicate, cut, tensor in itertools.product(divisors, repeat=4):
        rest, left = divmod(ranks, pipeline * replicate * cut * tensor)
        if left or not rest:
            continue
        pairs = {(cut, 1): None, (1, cut): None}
        for expert, (sequence, context) in itertools.product(divisors if experts else (1,), pairs):
            if rest % expert:
                continue
            sizes = (pipeline, replicate, rest // expert, expert, sequence, context, tensor)
            for virtual in VIRTUAL if pipeline > 1 else (1,):
                yield dict(zip(ORDER, sizes, strict=True)), virtual


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _unused(case: Case, sequences: int, facts: Mapping[str, Facts]) -> str | None:
    """Why a mesh has ranks without work, or is not tried."""
    stages = case.size("pipeline") * case.virtual_stages
    if short := [name for name, each in facts.items() if each.layers < stages]:
        return f"more stages than the {short[0]} has layers"
    if case.data_ranks > sequences:
        return f"more data ranks than the {sequences:,} sequences of an update"
    if case.size("tensor") * case.size("sequence") > case.hardware.per_node:
        return f"tensor times sequence is more than the {case.hardware.per_node} GPUs of a node"
    return None


def _undivided(case: Case, *sizes: int) -> str | None:
    """What axes of `DIVIDING`, of these sizes, do not divide."""
    mesh = dict(zip(DIVIDING, sizes, strict=True))
    wrong = problems(attrs.evolve(case, mesh=mesh, virtual_stages=1))
    return wrong[0] if wrong else None
