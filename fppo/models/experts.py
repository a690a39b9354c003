"""Models on an expert axis: ranks with different rows hold different experts, and exchange tokens (arXiv:2006.16668).

The rest of a model is whole on every rank, or cut over a tensor axis. transformers' configs name the parameters of the
experts. Their modules take hidden states [M, H], the indices [M, k] of each token's experts, and their weights [M, k].
"""

from __future__ import annotations

import copy

import attrs
from transformers import PreTrainedConfig

from fppo.models.inner import OWN
from fppo.models.model import Model
from fppo.models.regions import ExpertsSeam, Region, Sizes, exchanged_rows, replace
from fppo.models.routing import planned
from fppo.runtime.layout import Cut, Layout
from fppo_kernels.collectives import Axis

SINGLE = Axis()


@attrs.frozen(eq=False)
class Dispatched:
    """A model prepared for an expert axis of `ranks` ranks, before a rank is chosen; `sizes` counts exchanged rows."""

    model: Model
    cuts: dict[str, Cut]
    modules: tuple[str, ...]  # paths of the experts' modules
    ranks: int
    sizes: Sizes = exchanged_rows

    def layout(self, axis: Axis, narrower: Layout | None = None) -> Layout:
        """The layout of the parameters on this rank of an expert axis; `narrower` is the layout on the rank's tensor
        axis, which does not cut experts."""
        layout = narrower or Layout(self.model.shapes, {}, frozenset(), 0, 1)
        within = tuple(f"{self.model.prefix}{path}." for path in self.modules)
        others = {name: cut for name, cut in layout.cuts.items() if not name.startswith(within)}
        once = frozenset(name for name in layout.once if not name.startswith(within))
        return attrs.evolve(layout, cuts=others | self.cuts, once=once, expert=(axis.rank, axis.size))

    def on(self, axis: Axis, narrower: Model | None = None, tensor: Axis = SINGLE) -> Model:
        """The model of this rank of an expert axis; `narrower` is that on the rank's `tensor` axis, whose skeleton is
        reused."""
        region, block = Region(axis), Region(tensor)
        base = narrower or attrs.evolve(self.model, skeleton=copy.deepcopy(self.model.skeleton))
        for path in self.modules:
            experts = copy.deepcopy(self.model.skeleton.get_submodule(path))
            experts.num_experts //= self.ranks  # type: ignore[operator]
            replace(base.skeleton, path, lambda _, own=experts: ExpertsSeam(own, region, self.sizes, block))
        layout = self.layout(axis, base.layout)
        placed = attrs.evolve(base, shapes=layout.shapes, layout=layout, unplaced=self.model)
        placed._copies.kept = (OWN, None), {False: base.skeleton}  # this thread's own already
        return placed


def dispatched(model: Model, ranks: int) -> Dispatched:
    """Cut a model's experts over an expert axis. Raises ValueError that names the model type, for a config without
    experts and for a number of experts that the ranks do not divide."""
    kind = f"fppo cannot run model type {model.config.model_type!r} on an expert axis of {ranks} ranks"
    if model.layout is not None:
        raise ValueError("the model is placed already")
    modules, names = _experts(model)
    if not modules:
        raise ValueError(f"{kind}: its config names no experts to cut; leave out mesh.expert")
    counts = {model.shapes[name][0] for name in names}
    wrong = sorted(count for count in counts if count % ranks)
    if wrong:
        fitting = [n for n in range(1, wrong[0] + 1) if all(count % n == 0 for count in counts)]
        raise ValueError(f"{kind}: it does not divide the model's {wrong[0]} experts; give one of {fitting}")
    cuts = {name: Cut(0, ranks, (model.shapes[name][0],), "expert") for name in names}
    return Dispatched(model, cuts, modules, ranks)


def expert_count(config: PreTrainedConfig) -> int:
    """The number of experts per layer that an expert axis can cut; 0 if it can cut none."""
    if "grouped_gemm" not in (getattr(config, "base_model_ep_plan", None) or {}).values():
        return 0
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return next(filter(None, counts), 0)


def expert_names(model: Model) -> tuple[str, ...]:
    """The names of the experts' parameters that an expert axis can cut; empty for a model without any."""
    return _experts(model)[1]


def _experts(model: Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths of the experts' modules, and the names of their parameters [E, ...], row i of expert i."""
    start = model.prefix if model.vision is None else f"{model.prefix}{model.vision.text}."
    names = {name.removeprefix(start): name for name in model.shapes if name.startswith(start)}
    rows = [names[path] for path in planned(model.config, "grouped_gemm", names)]
    modules = dict.fromkeys(name.removeprefix(model.prefix).rpartition(".")[0] for name in rows)
    return tuple(modules), tuple(rows)
