"""A step planned: memory of a rank by kind, what it sends by axis, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from fppo import models, tree
from fppo.models import flops
from fppo.models.model import Model
from fppo.models.spans import layer_spans
from fppo.plan import layers, passes
from fppo.plan._track import ACTIVATIONS, BATCH, GATHERED, GRADIENTS, LOGITS
from fppo.plan.case import Case, problems
from fppo.plan.estimate import Seconds, Wire, seconds_of, wires
from fppo.plan.hardware import overhead
from fppo.plan.values import Phase, peak_of

TRANSIENT = (GRADIENTS, GATHERED, ACTIVATIONS, LOGITS)
OUTSIDE = "outside of tensors"


@attrs.frozen
class Stage:
    """One stage of a step on the rank that holds most."""

    name: str
    where: str  # the phase in which most is held
    memory: Mapping[str, float]  # bytes by kind at that moment
    wire: Mapping[str, Wire]  # by axis
    seconds: Seconds
    model_flops: float  # of this rank's share, without what is computed again

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.memory.values())


@attrs.frozen
class Plan:
    """A case, what is at rest on a rank, and the stages of the step in order. The rollout is not among them."""

    case: Case
    parameters: Mapping[str, int]  # of each model, whole
    rest: Mapping[str, float]  # bytes at rest on a rank, by kind
    stages: tuple[Stage, ...]
    imbalance: float = 1.0  # of a pipeline: the work of the rank that has most, over the mean of all

    @property
    def peak(self) -> Stage:
        """The stage that holds most."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether the accelerator holds it."""
        return bool(self.stages) and self.peak.total <= self.case.hardware.memory

    @property
    def seconds(self) -> float:
        """Of the step, without the rollout, and of rewards only the reward model's."""
        return sum(stage.seconds.total for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Of the step, over all ranks."""
        return self.case.mini_batch * self.case.length

    def mfu(self, *names: str) -> float:
        """The share of the peak that the FLOPs which the models need are, in these stages (none: all)."""
        chosen = [stage for stage in self.stages if not names or stage.name in names]
        most = sum(x.seconds.total * _peak_flops(self.case.at(x.name)) for x in chosen)
        return sum(x.model_flops for x in chosen) / most


def plan(case: Case, *, only_if_fits: bool = False) -> Plan:
    """Plans a step; with `only_if_fits` no further than the first stage that is too large, the largest first. Of a
    pipeline it is the step of the first rank, which keeps most passes under way, or of the last, which has the head:
    that which holds more.

    Raises ValueError for a case that no run could have.
    """
    if wrong := problems(case):
        raise ValueError("; ".join(wrong))
    last = case.size("pipeline") - 1
    ends = [_plan(attrs.evolve(case, pipeline_rank=rank), only_if_fits) for rank in dict.fromkeys((0, last))]
    return max(ends, key=lambda end: end.peak.total if end.stages else sum(end.rest.values()))


def _plan(case: Case, only_if_fits: bool) -> Plan:
    """The plan of one rank of a pipeline."""
    every = {name: passes.model_of(case, name) for name in passes.models_of(case)}
    rest = _at_rest(case, every)
    parameters = {name: sum(shape.numel() for shape in model.whole_shapes.values()) for name, model in every.items()}
    stages: list[Stage] = []
    work = pipeline_work(case, every["actor"])
    imbalance = max(work) * len(work) / sum(work)
    known: dict[str, list[Phase]] = {}
    if only_if_fits and sum(rest.values()) > case.hardware.memory:
        return Plan(case, parameters, rest, (), imbalance)
    for name in reversed(passes.stages_of(case)):  # the updates first
        model, at, same = every[passes.STAGES[name]], case.at(name), passes.SAME.get(name, name)
        same = same if at == case.at(same) else name
        if same not in known:
            known[same] = phases_of(at, same, model)
        stages.insert(0, _stage(case, at, name, model, rest, known[same]))
        if only_if_fits and stages[0].total > case.hardware.memory:
            break
    return Plan(case, parameters, rest, tuple(stages), imbalance)


def pipeline_work(case: Case, model: Model) -> list[float]:
    """The multiply-adds of a pass on each rank of the case's pipeline, for each token."""
    virtual, ranks = case.virtual_stages, case.size("pipeline")
    layers, head = flops.layer_weights(model), flops.head_weights(model)
    attention = flops.forward_flops(model, [case.length]) / (2 * case.length) - sum(layers) - head
    work = [0.0] * ranks
    for stage, cut in enumerate(layer_spans(model, ranks * virtual)):
        work[stage % ranks] += sum(layers[number] + attention / len(layers) for number in cut)
    work[-1] += head * case.response_tokens / case.length
    return work


def phases_of(case: Case, name: str, model: Model) -> list[Phase]:
    """The stage of a model with all layers; from few layers where they are alike, unless `case.full`."""
    count = len(model.layers)
    if not case.full and case.size("pipeline") == 1 and count > layers.MORE and layers.alike(model):
        few, more = (passes.run_stage(case, name, layers=n) for n in (layers.FEW, layers.MORE))
        phases = layers.extrapolated(few, more, count)
        if phases is not None:
            return phases
    return passes.run_stage(case, name)


def shard_numbers(model: Model, case: Case) -> int:
    """How many numbers of the parameters the rank with most of them has."""
    return sum(math.prod(shape) for shape in _shard_shapes(model, case).values())


def optimizer_bytes(model: Model, case: Case) -> int:
    """How many bytes the tensors of the optimizer's state take on that rank, single numbers left out."""
    params = {name: torch.empty(shape, device="meta") for name, shape in _shard_shapes(model, case).items()}
    return sum(x.nbytes for x in tree.tensors(passes.optimizer_of(case).init(params)) if x.dim())


def _shard_shapes(model: Model, case: Case) -> dict[str, tuple[int, ...]]:
    return _own_shapes(models.place(model, passes.mesh_of(case, lambda *_: None)).shapes, case)


def _own_shapes(shapes: Mapping[str, torch.Size], case: Case) -> dict[str, tuple[int, ...]]:
    mesh = passes.mesh_of(case, lambda *_: None)
    return {name: passes.shard_shape(shape, mesh) for name, shape in shapes.items()}


def _peak_flops(case: Case) -> float:
    """Per second, in the dtype that the case computes in."""
    narrow = case.compute_dtype is not None or case.dtype != torch.float32
    return case.hardware.flops if narrow else case.hardware.flops_float32


def _stage(case: Case, at: Case, name: str, model: Model, rest: Mapping[str, float], phases: Sequence[Phase]) -> Stage:
    """The stage of a case, which is `at` there."""
    where, peak = peak_of(phases)
    moving = {kind: float(peak.peak.get(kind, 0)) for kind in TRANSIENT}
    wide = [axis for axis, size in case.mesh.items() if size > 1]
    outside = overhead(case.hardware, len(wide), sum(moving.values()))
    lengths = [case.length] * case.rows
    work = flops.train_flops if name.startswith("update") else flops.forward_flops
    needed = work(model, lengths, head_tokens=case.rows * (1 if name == passes.REWARD else case.response_tokens))
    stages = pipeline_work(at, model)
    return Stage(
        name=name,
        where=where,
        memory={**rest, **moving, OUTSIDE: outside},
        wire=wires(phases, at),
        seconds=seconds_of(phases, at, slowest=max(stages) / stages[case.pipeline_rank]),
        model_flops=needed * case.micro_batches * case.data_ranks / case.world,
    )


def _kept(model: Model, case: Case) -> float:
    """Bytes of parameters on a rank between the stages."""
    return 0 if case.offload == "all" else case.dtype.itemsize * shard_numbers(model, case)


def _at_rest(case: Case, every: Mapping[str, Model]) -> dict[str, float]:
    """Bytes on a rank between the stages."""
    rest: dict[str, float] = {}
    for name, model in every.items():
        at = case.at(name if name == passes.REWARD else f"update {name}")
        rest[f"{name}'s parameters"] = _kept(model, at)
        if name != passes.REWARD:
            rest[f"{name}'s optimizer"] = optimizer_bytes(model, at) if at.offload == "none" else 0
    if (frozen := every["actor"].frozen) is not None:  # the critic's and the reference's, too
        numbers = sum(math.prod(shape) for shape in _own_shapes(frozen.shapes, case).values())
        rest["base's weights"] = passes.base_dtype(case).itemsize * numbers
    elif case.reference:
        rest["reference's parameters"] = _kept(every["actor"], case.at("reference"))
    row = passes.rows_of(case, 1)
    size = sum(x.nbytes for x in tree.tensors(row))
    return rest | {BATCH: size * case.mini_batch}  # every rank holds all rows
