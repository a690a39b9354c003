"""What would make a case fit: settings tried one by one, then together, by planning each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from fppo.plan import passes
from fppo.plan._track import ACTIVATIONS, LOGITS
from fppo.plan.built import Built, models_of
from fppo.plan.case import Case, problems
from fppo.plan.estimate import ORDER
from fppo.plan.plan import Plan, plan
from fppo.plan.rough import ROOM, facts_of, rough

Flags = Mapping[str, Any]  # settings to change, by the names of the command line
MESH = tuple(f"mesh.{axis}" for axis in ORDER)
ROWS = ("mesh.sequence", "mesh.context", "mesh.tensor")  # axes with fewer activations on each rank
CUTS = ("mesh.context", "mesh.expert", "mesh.tensor")  # that a formula looks at first
FIELDS = {f"model.{name.replace('_', '-')}": name for name in ("log_probs", "checkpoint_layers", "offload")}
TOKENS = "actor.token-budget"
MORE = (2, 4, 8, 16, 32, 64)  # times as many GPUs


@attrs.frozen
class Remedy:
    """A change of settings that makes a case fit, and what it gives."""

    flags: Flags
    plan: Plan
    pool: str | None = None  # whose plan it is

    @property
    def words(self) -> str:
        """The words for the command line; axes and ranks of a pool as in a settings file."""
        return " ".join(self._word(name, value) for name, value in self.flags.items())

    def _word(self, name: str, value: Any) -> str:
        if self.pool is not None and name in (*MESH, "gpus"):
            field = "ranks" if name == "gpus" else name.rpartition(".")[2]
            return f"placement.pools.{self.pool}.{field}={value}"
        return f"--{name} {value}"

    @property
    def seconds_per_token(self) -> float:
        """GPU seconds: what the change costs."""
        return seconds_per_token(self.plan)


def seconds_per_token(planned: Plan) -> float:
    """GPU seconds for each token of a step."""
    return planned.seconds * planned.case.world / planned.tokens


def remedies(base: Plan) -> list[Remedy]:
    """Changes that make a plan fit, those that cost least time first; if no single one does, several together.

    More GPUs are thought of only if nothing helps on those there are. Empty if nothing does at all.
    """
    case, built = base.case, Built()
    remedies = [r for family in families(case) if _helps(family, base) and (r := _first(case, family, built))]
    if remedies:
        return sorted(remedies, key=lambda remedy: remedy.seconds_per_token)
    together = _together(case, built)
    if together is not None:
        return [together]
    wider = [{"gpus": case.world * n, "mesh.shard": case.size("shard") * n} for n in MORE]
    alone = _first(case, wider, built) if _helps(wider, base) else None
    both = next((r for flags in wider if (r := _together(applied(case, flags), built, flags)) is not None), None)
    remedies = [remedy for remedy in (both, alone) if remedy is not None]
    return sorted(remedies, key=lambda remedy: remedy.plan.case.world)


def families(case: Case) -> list[list[Flags]]:
    """Changes of one kind each, the smallest first: kinds that cost little before those that cost more."""
    choices: list[list[Flags]] = []
    if case.log_probs == "reference":
        choices.append([{"model.log-probs": "chunked"}])
    if case.compute_dtype is None and case.hardware.on_gpu:
        choices.append([{"model.compute-dtype": "bfloat16"}])
    if case.shards > 1 and case.sharding.stage < 3:
        choices.append([{"mesh.stage": stage} for stage in range(case.sharding.stage + 1, 4)])
    if case.rows > 1:
        choices.append([{TOKENS: tokens} for tokens in _budgets(case)])
    replicate, shard = case.size("replicate"), case.size("shard")
    if replicate > 1:
        divisors = [n for n in range(2, replicate + 1) if replicate % n == 0]
        choices.append([{"mesh.replicate": replicate // n, "mesh.shard": shard * n} for n in divisors])
    if case.checkpoint_layers is not True:
        kinds = (True,) if case.checkpoint_layers else ("selective", True)
        choices.append([{"model.checkpoint-layers": how} for how in kinds])
    choices += filter(None, (list(_longer_axes(case, axis)) for axis in ("sequence", "context", "expert", "tensor")))
    if case.hardware.on_gpu and case.offload != ("all" if case.lora is None else "moments"):
        places = ("moments", "all") if case.lora is None else ("moments",)  # the base of adapters stays
        choices.append([{"model.offload": what} for what in places if what != case.offload])
    if pipeline := list(_longer_axes(case, "pipeline")):
        choices.append(pipeline)
    return choices


def applied(case: Case, flags: Flags) -> Case:
    """The case with these settings."""
    changes: dict[str, Any] = {field: flags[name] for name, field in FIELDS.items() if name in flags}
    if "model.compute-dtype" in flags:
        changes["compute_dtype"] = torch.bfloat16
    if "mesh.stage" in flags:
        changes["sharding"] = attrs.evolve(case.sharding, stage=flags["mesh.stage"])
    if TOKENS in flags:  # the same mini-batch, in more passes
        rows = max(1, flags[TOKENS] // case.length)
        changes |= {"tokens": flags[TOKENS], "micro_batches": max(1, case.micro_batches * case.rows // rows)}
    sizes = {name.rpartition(".")[2]: flags[name] for name in MESH if name in flags}
    changed = attrs.evolve(case, mesh={**case.mesh, **sizes}, **changes)
    if set(flags).isdisjoint(("mesh.pipeline", "mesh.context", "mesh.tensor")):
        return changed
    same = changed.micro_batches * case.data_ranks // changed.data_ranks  # the same mini-batch
    return attrs.evolve(changed, micro_batches=same)


def _budgets(case: Case) -> list[int]:
    """Half as many sequences of a pass, and so on down to one."""
    budgets, rows = [], case.rows
    while rows > 1:
        rows = -(-rows // 2)
        budgets.append(rows * case.length)
    return budgets


def _longer_axes(case: Case, axis: str) -> Iterator[Flags]:
    """More ranks for the same rows or experts, taken from those with other rows; all but a pipeline's inside a node."""
    for n in (2, 4, 8):
        size = case.size(axis) * n
        for name in ("replicate", "shard"):
            flags = {f"mesh.{name}": case.size(name) // n, f"mesh.{axis}": size}
            divides = case.size(name) % n == 0 and case.size(name) > 1
            if divides and _possible(applied(case, flags), axis):
                yield flags
                break


def _possible(case: Case, axis: str) -> bool:
    """Whether a case with more ranks on an axis can be: neighbours share a node, and the models can be cut."""
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
    """Whether a case need not be planned, by a formula, which knows no adapters and no pools."""
    if case.lora is not None or case.only is not None:
        return False
    facts = {name: facts_of(case, built.model(case, name)) for name in models_of(case)}
    return rough(case, facts).memory > ROOM * case.hardware.memory


def _helps(family: Sequence[Flags], base: Plan) -> bool:
    """Whether a family can help at all: more shards do not where what they leave as it is is too large alone."""
    kept = sum(base.peak.memory[kind] for kind in (ACTIVATIONS, LOGITS))
    only_shards = all("mesh.shard" in flags and set(flags).isdisjoint(ROWS) for flags in family)
    return not only_shards or kept <= base.case.hardware.memory


def _first(case: Case, options: Sequence[Flags], built: Built) -> Remedy | None:
    """The smallest change of a family that makes the case fit."""
    return next((remedy for flags in options if (remedy := _fitting(case, flags, built)) is not None), None)


def _together(case: Case, built: Built, before: Flags | None = None) -> Remedy | None:
    """The largest change of each family, one on top of the other until it fits; then without those it can do without.

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
