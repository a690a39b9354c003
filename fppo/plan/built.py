"""The models of a case, without parameters, each built and cut once for all the stages and meshes that have it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch

from fppo import models
from fppo.models import lora
from fppo.models.bases import in_codes
from fppo.models.codes import layout_in_codes
from fppo.models.model import HeadKind, Model
from fppo.models.spans import layer_spans
from fppo.plan import standins
from fppo.plan.case import ROLES, Case
from fppo.plan.presets import with_layers
from fppo.plan.values import Phase
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import Mesh

T = TypeVar("T")
KEPT = 16  # runs
REWARD = "reward model"
HEADS: Mapping[str, HeadKind] = {"actor": "lm", "critic": "value", REWARD: "value"}  # of models that differ in shape
# which of them each stage runs, in the order of a step
STAGES: Mapping[str, str] = {stage: "actor" if role == "reference" else role for stage, role in ROLES.items()}


def models_of(case: Case) -> list[str]:
    """Which models of `HEADS` the case has."""
    wanted = {"critic": case.critic, REWARD: case.reward_model is not None}
    return [name for name in HEADS if wanted.get(name, True)]


def model_of(case: Case, name: str, layers: int | None = None) -> Model:
    """One of `HEADS` as the case has it, with as many layers as it has or with `layers`."""
    config = case.reward_model if name == REWARD else case.config
    assert config is not None
    config = config if layers is None else with_layers(config, layers)
    again = case.checkpoint_layers
    model = models.build(config, HEADS[name], compute_dtype=case.compute_dtype, checkpoint_layers=again)
    return _adapted(model, case, name)


def _adapted(model: Model, case: Case, name: str) -> Model:
    """A model with the adapter that the case gives it, if any."""
    spec = {"actor": case.lora, "critic": case.critic_lora}.get(name)
    if spec is None:
        return model
    base = model if case.lora_base is None else in_codes(model, case.lora_base, base_dtype(case))
    return lora.without_base(base, spec)


def base_dtype(case: Case) -> torch.dtype:
    """What the base of adapters is kept in: what it is computed with."""
    return case.compute_dtype or torch.float32


class Built:
    """What takes long to make of a case's models, made once. The cases that ask have the same models."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._runs: list[tuple[Case, str, int, list[Phase]]] = []

    def model(self, case: Case, name: str, layers: int | None = None) -> Model:
        """See `model_of`; in the dtype, and with the recomputation, of the first case that asked."""
        return self.once(("model", name, layers), lambda: model_of(case, name, layers))

    def cuts(self, case: Case, name: str) -> list[range]:
        """The layers of each stage of the case's pipeline, or all. A critic on the actor's base has the actor's."""
        stages = case.size("pipeline") * case.virtual_stages
        name = "actor" if name == "critic" and case.critic_lora is not None else name
        return self.once(("cuts", name, stages), lambda: layer_spans(self.model(case, name).plain, stages))

    def layout(self, case: Case, name: str, mesh: Mesh) -> Layout | None:
        """How the parameters of a model, and those of the base of an adapted one, lie on a rank of the case's mesh."""
        layout = self._prepared(case, name, None, mesh).layout(mesh, self.cuts(case, name))
        model = self.model(case, name)
        if layout is None or (frozen := model.frozen) is None:
            return layout
        return layout_in_codes(lora.with_factors(layout, frozen.places, frozen.lora.rank), model.forms)

    def placed(self, case: Case, name: str, mesh: Mesh, own: Sequence[int] | None = None) -> Model:
        """What a rank of the case's mesh runs of a model; or of one with these numbers of layers in the rank's own
        stages, and without others."""
        cuts = self.cuts(case, name) if own is None else _stages_of(case, own)
        prepared = self._prepared(case, name, None if own is None else sum(own), mesh)
        placed = _adapted(prepared.on(mesh, cuts), case, name)
        return attrs.evolve(placed, compute_dtype=case.compute_dtype, checkpoint_layers=case.checkpoint_layers)

    def run(self, case: Case, name: str, layers: int, make: Callable[[], list[Phase]]) -> list[Phase]:
        """What a stage of a case does with so many layers, of which the last few are kept."""
        for known, stage, count, phases in self._runs:
            if (stage, count) == (name, layers) and known == case:
                return phases
        self._runs = [(case, name, layers, make()), *self._runs[:KEPT]]
        return self._runs[0][3]

    def _prepared(self, case: Case, name: str, layers: int | None, mesh: Mesh) -> models.Prepared:
        key = ("prepared", name, layers, case.size("tensor"), case.size("expert"))
        prepared = self.once(key, lambda: models.prepare(self.model(case, name, layers).plain, mesh))
        if prepared.dispatched is None:
            return prepared
        own = attrs.evolve(prepared.dispatched, sizes=standins.sizes_of_load(case.load, mesh["expert"].rank))
        return attrs.evolve(prepared, dispatched=own)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made the first time that somebody asks for the key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def own_layers(case: Case, cuts: Sequence[range]) -> list[int]:
    """How many layers each stage of the planned rank has."""
    return [len(cut) for cut in cuts[case.pipeline_rank :: case.size("pipeline")]]


def _stages_of(case: Case, own: Sequence[int]) -> list[range]:
    """The layers of each stage, if the planned rank's have so many, one after the other, and those of others none."""
    cuts, start = [], 0
    for stage in range(case.size("pipeline") * len(own)):
        count = own[stage // case.size("pipeline")] if stage % case.size("pipeline") == case.pipeline_rank else 0
        cuts.append(range(start, start + count))
        start += count
    return cuts
