"""Search for settings with which a case fits, one by one, then together; and for the best mesh of some GPUs."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fppo.models.slices import find_mlps
from fppo.studies.plan import passes
from fppo.studies.plan.case import TRAINED, Case, divisors, problems, with_sequences
from fppo.studies.plan.estimate import ORDER, ROOM, Facts, Rough, facts_of, rough
from fppo.studies.plan.passes import Built, models_of
from fppo.studies.plan.plan import Plan, plan
from fppo.studies.plan.track import ACTIVATIONS, LOGITS

Flags = Mapping[str, Any]  # changed settings, by their names on the command line
MESH = tuple(f"mesh.{axis}" for axis in ORDER)
ROWS = ("mesh.sequence", "mesh.context", "mesh.tensor")  # axes that reduce each rank's activations
CUTS = ("mesh.context", "mesh.expert", "mesh.tensor")  # candidates that a formula checks first
OF_MODEL = ("log_probs", "checkpoint_layers", "mlp_slice_tokens", "offload")
FIELDS = {f"model.{name.replace('_', '-')}": name for name in OF_MODEL}
TOKENS = "actor.token-budget"
WITHOUT_GRADIENT = "model.forward-token-budget"
SLICES = (4096, 1024)  # tokens of an MLP's slices
# of what the search does not try: some change what is learned, others take long to plan
UNTRIED = (
    "Not tried: model.offload_activations, model.ref_offload, model.ref_dtype, adapters (model.lora.rank, on a base of "
    'model.lora.base = "nf4"), shorter rows, and less memory for the engine (rollout.cache_gb): docs/guides/memory.md.'
)
MORE = (2, 4, 8, 16, 32, 64)  # multiples of the number of GPUs


@attrs.frozen
class Remedy:
    """A change of settings with which a case fits, and the resulting plan."""

    flags: Flags
    plan: Plan
    pool: str | None = None  # the pool that is planned

    @property
    def words(self) -> str:
        """The change as text: flags of the command line; axes and ranks of a pool as in a settings file."""
        return " ".join(self._word(name, value) for name, value in self.flags.items())

    def _word(self, name: str, value: Any) -> str:
        if self.pool is not None and name in (*MESH, "gpus"):
            field = "ranks" if name == "gpus" else name.rpartition(".")[2]
            return f"placement.pools.{self.pool}.{field}={value}"
        return f"--{name} {value}"

    @property
    def seconds_per_token(self) -> float:
        """GPU seconds per token with the change, which is its cost."""
        return seconds_per_token(self.plan)


def seconds_per_token(planned: Plan) -> float:
    """GPU seconds per token of a step."""
    return planned.seconds * planned.case.world / planned.tokens


def remedies(base: Plan) -> list[Remedy]:
    """Changes with which a plan fits, the fastest first; if no single change suffices, several together.

    More GPUs are tried only if nothing helps on the given number. Empty if nothing helps at all.
    """
    case, built = base.case, Built()
    if found := single_remedies(base, built):
        return found
    together = _together(case, built)
    if together is not None:
        return [together]
    wider = [{"gpus": case.world * n, "mesh.shard": case.size("shard") * n} for n in MORE]
    alone = _first(case, wider, built) if _helps(wider, base) else None
    both = next((r for flags in wider if (r := _together(applied(case, flags), built, flags)) is not None), None)
    remedies = [remedy for remedy in (both, alone) if remedy is not None]
    return sorted(remedies, key=lambda remedy: remedy.plan.case.world)


def single_remedies(base: Plan, built: Built) -> list[Remedy]:
    """Single changes on the given number of GPUs with which a plan fits, the fastest first."""
    case = base.case
    found = [r for family in families(case) if _helps(family, base) and (r := _first(case, family, built))]
    return sorted(found, key=lambda remedy: remedy.seconds_per_token)


def families(case: Case) -> list[list[Flags]]:
    """Families of changes, each of one kind and with its smallest change first; cheap kinds before expensive ones."""
    choices: list[list[Flags]] = []
    if case.log_probs == "reference":
        choices.append([{"model.log-probs": "chunked"}])
    if case.compute_dtype is None and case.hardware.on_gpu:
        choices.append([{"model.compute-dtype": "bfloat16"}])
    if case.shards > 1 and case.sharding.stage < 3:
        choices.append([{"mesh.stage": stage} for stage in range(case.sharding.stage + 1, 4)])
    if case.rows > 1:
        choices.append([{TOKENS: tokens} for tokens in _budgets(case)])
    if case.forward_tokens is not None and case.forward_tokens > case.tokens:
        choices.append([{WITHOUT_GRADIENT: case.tokens}])
    replicate, shard = case.size("replicate"), case.size("shard")
    if replicate > 1:
        factors = divisors(replicate)[1:]
        choices.append([{"mesh.replicate": replicate // n, "mesh.shard": shard * n} for n in factors])
    if case.checkpoint_layers is not True:
        kinds = (True,) if case.checkpoint_layers else ("selective", True)
        choices.append([{"model.checkpoint-layers": how} for how in kinds])
    if case.mlp_slice_tokens is None and (sizes := [x for x in SLICES if x < case.tokens]) and _has_mlps(case):
        choices.append([{"model.mlp-slice-tokens": size} for size in sizes])
    choices += filter(None, (list(_longer_axes(case, axis)) for axis in ("sequence", "context", "expert", "tensor")))
    places = ("none", "moments", "all", "optimizer_step")[: None if case.lora is None else 2]  # a base stays
    if case.hardware.on_gpu and (later := places[places.index(case.offload) + 1 :]):
        choices.append([{"model.offload": what} for what in later])
    if pipeline := list(_longer_axes(case, "pipeline")):
        choices.append(pipeline)
    return choices


def applied(case: Case, flags: Flags) -> Case:
    """Apply a change of settings to a case."""
    changes: dict[str, Any] = {field: flags[name] for name, field in FIELDS.items() if name in flags}
    if "model.compute-dtype" in flags:
        changes["compute_dtype"] = torch.bfloat16
    if "mesh.stage" in flags:
        changes["sharding"] = attrs.evolve(case.sharding, stage=flags["mesh.stage"])
    if WITHOUT_GRADIENT in flags:
        changes["forward_tokens"] = flags[WITHOUT_GRADIENT]
    if TOKENS in flags:  # the same mini-batch in more passes
        rows = max(1, case.most_rows(flags[TOKENS]))
        passes = max(1, case.micro_batches * case.rows // rows)
        changes |= {"tokens": rows * case.length, "budget": flags[TOKENS], "micro_batches": passes}
    sizes = {name.rpartition(".")[2]: flags[name] for name in MESH if name in flags}
    changed = attrs.evolve(case, mesh={**case.mesh, **sizes}, **changes)
    if set(flags).isdisjoint(("mesh.pipeline", "mesh.context", "mesh.tensor")):
        return changed
    same = changed.micro_batches * case.data_ranks // changed.data_ranks  # the same mini-batch
    return attrs.evolve(changed, micro_batches=same)


def _has_mlps(case: Case) -> bool:
    """Whether the models that are trained have MLPs that can be computed in slices."""
    built = Built()
    try:
        for name in set(models_of(case)) & set(TRAINED):
            find_mlps(built.model(case, name, 1).plain.skeleton)
    except ValueError:
        return False
    return True


def _budgets(case: Case) -> list[int]:
    """Token budgets of passes with half the sequences, a quarter, and so on down to one sequence."""
    budgets, rows = [], case.rows
    while rows > 1:
        rows = -(-rows // 2)
        budgets.append(case.distinct(rows))
    return budgets


def _longer_axes(case: Case, axis: str) -> Iterator[Flags]:
    """Yield changes of the mesh that make an axis 2, 4 or 8 times as long, and the replicate or the shard axis shorter
    by the same factor. All axes but the pipeline stay inside a node."""
    for n in (2, 4, 8):
        size = case.size(axis) * n
        for name in ("replicate", "shard"):
            flags = {f"mesh.{name}": case.size(name) // n, f"mesh.{axis}": size}
            divides = case.size(name) % n == 0 and case.size(name) > 1
            if divides and _possible(applied(case, flags), axis):
                yield flags
                break


def _possible(case: Case, axis: str) -> bool:
    """Whether a case can have more ranks on an axis: neighbours must share a node, and the models must be divisible."""
    neighbours = math.prod(map(case.size, ORDER[ORDER.index(axis) :])) if axis != "pipeline" else 1
    if neighbours > case.hardware.per_node or problems(case):
        return False
    if axis != "tensor":
        return True
    alone, built = attrs.evolve(case, mesh={"tensor": case.size("tensor")}, virtual_stages=1), Built()
    try:
        for name in models_of(case):
            built.placed(alone, name, passes.mesh_of(alone, lambda *_: None), [1])
    except ValueError:  # blocks that no axis cuts
        return False
    return True


def _fitting(case: Case, flags: Flags, built: Built) -> Remedy | None:
    changed = applied(case, flags)
    if not set(flags).isdisjoint(CUTS) and _too_large(changed, built):
        return None
    tried = plan(changed, only_if_fits=True, built=built)
    return Remedy(flags, tried) if tried.fits else None


def _too_large(case: Case, built: Built) -> bool:
    """Whether a quick formula shows that a case cannot fit, so that it need not be planned. The formula does not apply
    to adapters and pools: for these the answer is False."""
    if case.lora is not None or case.only is not None:
        return False
    facts = {name: facts_of(case.at_rest(name), built.model(case, name)) for name in models_of(case)}
    return rough(case, facts).memory > ROOM * case.hardware.memory


def _helps(family: Sequence[Flags], base: Plan) -> bool:
    """Whether a family can help at all: more shards cannot if activations and logits, which they leave as they are, are
    too large by themselves."""
    kept = sum(base.peak.memory[kind] for kind in (ACTIVATIONS, LOGITS))
    only_shards = all("mesh.shard" in flags and set(flags).isdisjoint(ROWS) for flags in family)
    return not only_shards or kept <= base.case.hardware.memory


def _first(case: Case, options: Sequence[Flags], built: Built) -> Remedy | None:
    """The first of `options`, changes in order of size, with which the case fits; None if there is none."""
    return next((remedy for flags in options if (remedy := _fitting(case, flags, built)) is not None), None)


def _together(case: Case, built: Built, before: Flags | None = None) -> Remedy | None:
    """Apply the largest change of each family, one after the other, until the case fits; then remove unnecessary ones.

    `before` are changes that the case has already.
    """
    flags: dict[str, Any] = {}
    while True:
        options = families(applied(case, flags))
        if not options:
            return None
        flags |= options[0][-1]
        remedy = _fitting(case, flags, built)
        if remedy is not None:
            trimmed = _trimmed(case, remedy, built)
            return Remedy({**(before or {}), **trimmed.flags}, trimmed.plan)


def _trimmed(case: Case, remedy: Remedy, built: Built) -> Remedy:
    groups = [[name] for name in remedy.flags if name not in MESH]
    for group in groups:
        rest = {name: value for name, value in remedy.flags.items() if name not in group}
        remedy = (_fitting(case, rest, built) if rest else None) or remedy
    if TOKENS in remedy.flags:
        for tokens in _budgets(case):
            if better := _fitting(case, {**remedy.flags, TOKENS: tokens}, built):
                return better
    return remedy


PLANNED = 5  # number of fitting meshes to plan
TRIED = 12  # number of meshes to plan at most
VIRTUAL = (1, 2, 4)
DIVIDING = ("expert", "sequence", "tensor")  # axes that must divide sizes of a model


@attrs.frozen
class Candidate:
    """A mesh that a search considers, with a rough estimate of its time and memory."""

    case: Case
    rough: Rough

    @property
    def words(self) -> str:
        """The mesh as flags of the command line."""
        sizes = {**self.case.mesh, "virtual-stages": self.case.virtual_stages}
        return " ".join(f"--mesh.{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"


@attrs.frozen
class SearchResult:
    """The result of a search: fitting plans, the fastest first; plans that turned out not to fit; and the reasons
    against all other meshes."""

    best: tuple[tuple[Candidate, Plan], ...]
    failed: tuple[tuple[Candidate, Plan], ...]
    slower: tuple[Candidate, ...]  # not planned: they might fit, but are slower by the formula
    too_large: tuple[Candidate, ...]  # too large by the formula, the smallest first
    refused: Mapping[str, int]  # the number of meshes that each reason excludes

    @property
    def count(self) -> int:
        """The number of meshes considered."""
        mine = (self.best, self.failed, self.slower, self.too_large)
        return sum(map(len, mine)) + sum(self.refused.values())


def search(case: Case, ranks: int, sequences: int) -> SearchResult:
    """Plan the meshes of `ranks` GPUs with the fastest steps by the formula, among those that fit.

    A step has `sequences` sequences on each mesh, in passes of at most the case's tokens.
    """
    built = Built()
    facts = {name: facts_of(case.at_rest(name), built.model(case, name)) for name in models_of(case)}
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
    """Plan candidates in order until enough of them fit. Returns the fitting plans, the other plans, and the remaining
    candidates."""
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
    """All meshes of `ranks` ranks with their virtual stages, with expert axes if there are `experts`; a sequence axis
    or a context axis cuts rows."""
    sizes_of_axes = divisors(ranks)
    for pipeline, replicate, cut, tensor in itertools.product(sizes_of_axes, repeat=4):
        rest, left = divmod(ranks, pipeline * replicate * cut * tensor)
        if left or not rest:
            continue
        pairs = {(cut, 1): None, (1, cut): None}
        for expert, (sequence, context) in itertools.product(sizes_of_axes if experts else (1,), pairs):
            if rest % expert:
                continue
            sizes = (pipeline, replicate, rest // expert, expert, sequence, context, tensor)
            for virtual in VIRTUAL if pipeline > 1 else (1,):
                yield dict(zip(ORDER, sizes, strict=True)), virtual


def _unused(case: Case, sequences: int, facts: Mapping[str, Facts]) -> str | None:
    """The reason why a mesh is not tried, such as ranks without work; None if it is."""
    stages = case.size("pipeline") * case.virtual_stages
    if short := [name for name, each in facts.items() if each.layers < stages]:
        return f"more stages than the {short[0]} has layers"
    if case.data_ranks > sequences:
        return f"more data ranks than the {sequences:,} sequences of an update"
    if case.size("tensor") * case.size("sequence") > case.hardware.per_node:
        return f"tensor times sequence is more than the {case.hardware.per_node} GPUs of a node"
    return None


def _undivided(case: Case, *sizes: int) -> str | None:
    """The first problem of the case on a mesh of these `sizes` of the expert, sequence and tensor axes (`DIVIDING`);
    None if the axes divide the model."""
    mesh = dict(zip(DIVIDING, sizes, strict=True))
    wrong = problems(attrs.evolve(case, mesh=mesh, virtual_stages=1))
    return wrong[0] if wrong else None
