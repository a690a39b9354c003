"""Models on an expert axis: ranks with other rows hold other experts, and send each other tokens (arXiv:2006.16668).

All else of a model is whole on every rank. transformers' configs name the experts' modules, which are called with
hidden states [M, H], the numbers [M, k] of each token's experts, and their weights [M, k].
"""

from __future__ import annotations

import copy
import re

import attrs
import torch
from torch import Tensor

from fppo.models import probe as probes
from fppo.models.heads import logits_of, output_head
from fppo.models.inner import OWN
from fppo.models.model import Model, Params, packed_attention
from fppo.models.regions import ExpertsSeam, Region, replace
from fppo.models.run import hidden_states
from fppo.runtime.layout import Cut, Layout
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import make_lengths


@attrs.frozen(eq=False)
class Dispatched:
    """What each of `ranks` ranks of an expert axis runs of a model, before it is known which of them this is."""

    model: Model
    cuts: dict[str, Cut]
    modules: tuple[str, ...]  # paths of the experts
    ranks: int

    def on(self, axis: Axis) -> Model:
        """The model of this rank of an axis of as many ranks."""
        skeleton, region = copy.deepcopy(self.model.skeleton), Region(axis)
        for path in self.modules:
            skeleton.get_submodule(path).num_experts //= self.ranks  # type: ignore[operator]
            replace(skeleton, path, lambda experts: ExpertsSeam(experts, region))
        layout = Layout(self.model.shapes, self.cuts, frozenset(), axis.rank, axis.size)
        placed = attrs.evolve(self.model, skeleton=skeleton, shapes=layout.shapes, layout=layout, unplaced=self.model)
        placed._copies.kept = OWN, {False: skeleton}  # this thread's own already
        return placed


def dispatched(model: Model, ranks: int) -> Dispatched:
    """A model whose experts are cut over the ranks of an expert axis. Raises ValueError that names the model type for
    one without experts that its config tells of, and the number that the ranks do not divide."""
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
    cuts = {name: Cut(0, ranks, (model.shapes[name][0],)) for name in names}
    return Dispatched(model, cuts, modules, ranks)


def _experts(model: Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths of the experts' modules, and the names of their parameters, of which row i is expert i's."""
    plan: dict[str, str] = getattr(model.config, "base_model_ep_plan", None) or {}
    modules = [pattern for pattern, rule in plan.items() if rule == "ep_dispatch_experts"]
    rows = [pattern for pattern, rule in plan.items() if rule == "grouped_gemm"]
    paths = (path for path, _ in model.skeleton.named_modules())
    names = (name for name in model.shapes if name.startswith(model.prefix))
    return (
        tuple(path for path in paths if _matches(modules, path)),
        tuple(name for name in names if _matches(rows, name.removeprefix(model.prefix))),
    )


def _matches(patterns: list[str], name: str) -> bool:
    return any(re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) for pattern in patterns)


@torch.no_grad()
def check_dispatched(model: Model, ranks: int) -> None:
    """Holds a model whose experts are cut over the ranks of a simulated expert axis, each with a row of its own,
    against the model itself: small random instances.

    Raises ValueError that names the model type, for other logits or where its code fails.
    """
    kind, probe = model.config.model_type, probes.make_probe(model)
    few = 2 if ranks % 2 == 0 else ranks
    whole, rows = {name: x.double() for name, x in probe.params.items()}, probes.probe_rows(probe)
    cut = dispatched(probe.model, few)

    def logits(own: Model, params: Params, row: Tensor) -> Tensor:
        attend = packed_attention(sdpa, make_lengths([len(row)]))
        hidden = hidden_states(own, params, row, torch.arange(len(row)), attend=attend)
        return logits_of(output_head(own, params), hidden)

    def run(mesh: Mesh) -> Tensor:
        placed = cut.on(mesh["expert"])
        assert placed.layout is not None
        own = {name: placed.layout.take(name, x) for name, x in whole.items()}
        return logits(placed, own, rows[mesh["expert"].rank % len(rows)])

    expected = [logits(probe.model, whole, row) for row in rows]
    try:
        found = simulate({"expert": few}, run)
    except Exception as error:
        raise ValueError(
            f"fppo cannot run model type {kind!r} on an expert axis of {ranks} ranks: its code fails where each rank "
            f"has some of the experts: {type(error).__name__}: {error}"
        ) from error
    for rank, got in enumerate(found):
        if (wrong := probes.difference(got, expected[rank % len(rows)])) is not None:
            raise ValueError(
                f"fppo cannot run model type {kind!r} on an expert axis of {ranks} ranks: cut over {few}, a small "
                f"random model of this kind gives logits that differ by {wrong:.2g} from those of the whole one"
            )
