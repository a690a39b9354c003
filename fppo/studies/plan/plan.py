"""The plan of a step: a rank's memory by kind, its traffic by axis, and its time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import torch

from fppo import tree
from fppo.models import flops
from fppo.models.model import Model, is_trained
from fppo.runtime.mesh import LOCAL
from fppo.settings.model import params_on_host
from fppo.steps import recorded
from fppo.studies.plan import layers, passes
from fppo.studies.plan.case import Case, overhead, problems
from fppo.studies.plan.estimate import Seconds, WireTraffic, seconds_of, wires
from fppo.studies.plan.host import HostMemory, host_of, state_of
from fppo.studies.plan.layers import SHORT, piped
from fppo.studies.plan.passes import REWARD, STAGES, Built, every_shape, models_of, own_layers, shard_shapes
from fppo.studies.plan.rollout import OUTSIDE, PlannedRollout, rollout_of
from fppo.studies.plan.track import ACTIVATIONS, BATCH, GATHERED, GRADIENTS, LOGITS, Phase, peak_of

TRANSIENT = (GRADIENTS, GATHERED, ACTIVATIONS, LOGITS)


@attrs.frozen
class Stage:
    """One stage of a step on the fullest rank."""

    name: str
    where: str  # the phase with the peak
    memory: Mapping[str, float]  # bytes by kind at the peak
    wire: Mapping[str, WireTraffic]  # traffic by axis
    seconds: Seconds
    model_flops: float  # FLOPs of this rank's share, without recomputation
    recorded: bool = False  # whether its passes run as CUDA graphs
    computed: float = 1.0  # the fraction of its tokens that is computed, where rows share prompts

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.memory.values())


@attrs.frozen
class Plan:
    """A case, the bytes at rest on a rank, the stages of the step in order, the rollout (not among the stages), and the
    host's memory."""

    case: Case
    parameters: Mapping[str, int]  # parameters of each whole model
    rest: Mapping[str, float]  # bytes at rest on a rank, by kind
    stages: tuple[Stage, ...]
    imbalance: float = 1.0  # on a pipeline: the work of the busiest rank relative to the mean
    rollout: PlannedRollout | None = None
    host: HostMemory | None = None  # None for a plan that stopped early

    @property
    def peak(self) -> Stage:
        """The stage with the largest peak."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def needs(self) -> float:
        """The largest peak in bytes; for a plan that stopped early, the bytes at rest."""
        most = self.peak.total if self.stages else sum(self.rest.values())
        return most if self.rollout is None else max(most + self.rollout.stays, self.rollout.total)

    @property
    def fits(self) -> bool:
        """Whether the accelerator's memory suffices."""
        return bool(self.stages) and self.needs <= self.case.hardware.memory

    @property
    def seconds(self) -> float:
        """Seconds of the step, without the rollout; of rewards, only the reward model's are counted."""
        return sum(stage.seconds.total for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Tokens of the step, over all ranks."""
        return self.case.mini_batch * self.case.length

    def mfu(self, *names: str) -> float:
        """Model FLOPs utilisation: the models' FLOPs as a fraction of the peak, in these stages (none: all)."""
        chosen = [stage for stage in self.stages if not names or stage.name in names]
        most = sum(x.seconds.total * _peak_flops(self.case.at(x.name)) for x in chosen)
        return sum(x.model_flops for x in chosen) / most


@attrs.frozen
class Engines:
    """A pool of engines: the work and the memory of each, equal for all."""

    case: Case
    rollout: PlannedRollout
    host: HostMemory

    @property
    def fits(self) -> bool:
        """Whether the accelerator's memory suffices for an engine."""
        return self.rollout.total <= self.case.hardware.memory

    @property
    def sent(self) -> float:
        """Bytes that the controller sends to all engines after an update."""
        return self.rollout.engines * self.rollout.sent


def plan_engines(case: Case) -> Engines:
    """Plan the engines of a case whose sampling has a pool."""
    built = Built()
    rollout = rollout_of(case, {}, built)
    assert rollout is not None
    return Engines(case, rollout, host_of(case, built))


def plan(case: Case, *, only_if_fits: bool = False, built: Built | None = None) -> Plan:
    """Plan a step; with `only_if_fits` stop at the first stage that is too large, trying the largest first.

    On a pipeline the fuller of two ranks is planned: the first, which has the most passes in flight, or the last, which
    has the head. Plans of the same models on other meshes may share `built`. Raises ValueError for an impossible case.
    """
    if wrong := problems(case):
        raise ValueError("; ".join(wrong))
    last, built = case.size("pipeline") - 1, built or Built()
    ends: list[Plan] = []
    for rank in dict.fromkeys((0, last)):
        ends.append(_plan(attrs.evolve(case, pipeline_rank=rank), only_if_fits, built))
        if only_if_fits and not ends[-1].fits:
            break
    return max(ends, key=lambda end: end.needs)


def _plan(case: Case, only_if_fits: bool, built: Built) -> Plan:
    """Plan one rank of a pipeline."""
    rest = _at_rest(case, built)
    parameters = {name: _numbers(built.model(case, name).whole_shapes) for name in models_of(case) if case.has(name)}
    if case.only is not None and "reference" in case.only:
        parameters["reference"] = _numbers(built.model(case, "actor").whole_shapes)
    stages: list[Stage] = []
    work = pipeline_work(case, "actor", built)
    imbalance = max(work) * len(work) / sum(work)
    known: dict[str, list[Phase]] = {}
    if only_if_fits and sum(rest.values()) > case.hardware.memory:
        return Plan(case, parameters, rest, (), imbalance)
    for name in reversed(passes.stages_of(case)):  # updates first
        at, same = case.at(name), passes.SAME.get(name, name)
        same = same if at == case.at(same) else name
        if same not in known:
            known[same] = phases_of(at, same, built)
        stages.insert(0, _stage(case, at, name, rest, known[same], built))
        if only_if_fits and stages[0].total > case.hardware.memory:
            break
    rollout = rollout_of(case, rest, built) if case.has("actor") else None
    return Plan(case, parameters, rest, tuple(stages), imbalance, rollout, host_of(case, built, known))


def pipeline_work(case: Case, name: str, built: Built) -> list[float]:
    """Multiply-adds per token in a pass of a model, for each rank of the case's pipeline."""
    model, ranks = built.model(case, name), case.size("pipeline")
    layers, head = flops.layer_weights(model), flops.head_weights(model)
    attention = flops.forward_flops(model, [case.length]) / (2 * case.length) - sum(layers) - head
    work = [0.0] * ranks
    for stage, cut in enumerate(built.cuts(case, name)):
        work[stage % ranks] += sum(layers[number] + attention / len(layers) for number in cut)
    work[-1] += head * case.response_tokens / case.length
    return work


def phases_of(case: Case, name: str, built: Built | None = None) -> list[Phase]:
    """The phases of a stage with all layers of the planned rank. Unless `case.full`, they are extrapolated from few
    layers and a short pipeline, where layers are alike."""
    built = built or Built()
    away = case.offload_activations and name.startswith("update")  # the device holds a window of them: not linear
    if case.full or away or not layers.alike(built.model(case, STAGES[name])):
        return passes.run_stage(case, name, built=built)
    own = own_layers(case, built.cuts(case, STAGES[name]))
    if case.size("pipeline") * case.virtual_stages > SHORT and case.micro_batches >= passes.TURNS:

        def run(short: Case, count: int) -> list[Phase]:
            return built.run(short, name, count, partial(_from_few, short, name, [count], built))

        return piped(case, name, own, run)
    return _from_few(case, name, own, built)


def _from_few(case: Case, name: str, own: Sequence[int], built: Built) -> list[Phase]:
    """Extrapolate the phases of a stage from few layers, where the planned rank's stages have `own` layers that are
    alike."""
    most = max(own)
    if most > layers.FEW + layers.MORE and min(own) > most - layers.FEW:
        few, more = (
            passes.run_stage(case, name, own=[n - most + count for n in own], built=built)
            for count in (layers.FEW, layers.MORE)
        )
        phases = layers.extrapolated(few, more, most)
        if phases is not None:
            return phases
    return passes.run_stage(case, name, own=own, built=built)


def shard_numbers(case: Case, name: str, built: Built | None = None) -> int:
    """The number of a model's parameters on the fullest rank."""
    return _numbers(shard_shapes(case, name, built or Built()))


def _numbers(shapes: Mapping[str, Sequence[int]]) -> int:
    return sum(map(math.prod, shapes.values()))


def _peak_flops(case: Case) -> float:
    """Peak FLOP per second in the case's compute dtype."""
    narrow = case.compute_dtype is not None or case.dtype != torch.float32
    return case.hardware.flops if narrow else case.hardware.flops_float32


def _stage(case: Case, at: Case, name: str, rest: Mapping[str, float], phases: Sequence[Phase], built: Built) -> Stage:
    """Plan one stage of a case; `at` is the case with the stage's overrides."""
    where, peak = peak_of(phases)
    moving = {kind: float(peak.peak.get(kind, 0)) for kind in TRANSIENT}
    outside = overhead(case.hardware, case.groups, sum(moving.values()))
    lengths = [at.length] * at.rows
    work = flops.train_flops if name.startswith("update") else flops.forward_flops
    head_tokens = at.rows * (1 if name == REWARD else at.response_tokens)
    needed = work(built.model(case, STAGES[name]), lengths, head_tokens=head_tokens, shared=at.shared) / at.rows
    stages, by_graph = pipeline_work(at, STAGES[name], built), _recorded(at, built.model(case, STAGES[name]))
    return Stage(
        name=name,
        where=where,
        memory={**rest, **moving, OUTSIDE: outside},
        wire=wires(phases, at),
        seconds=seconds_of(phases, at, slowest=max(stages) / stages[case.pipeline_rank], recorded=by_graph),
        model_flops=needed * case.mini_batch / case.world,
        computed=at.computed,
        recorded=by_graph,
    )


def _recorded(case: Case, model: Model) -> bool:
    """Whether the case's passes of a model run as CUDA graphs (`steps.recorded`)."""
    model = attrs.evolve(model, checkpoint_layers=case.checkpoint_layers, mlp_slice_tokens=case.mlp_slice_tokens)
    able = (
        case.hardware.on_gpu and case.world == 1 and not params_on_host(case.offload) and not case.offload_activations
    )
    able = able and recorded.records(model, LOCAL)
    return case.graphs and able and case.tokens <= recorded.most_tokens(model)


def _at_rest(case: Case, built: Built) -> dict[str, float]:
    """Bytes on a rank between stages, by kind."""
    rest: dict[str, float] = {kind: 0 if away else sum(sizes) for kind, (away, sizes) in state_of(case, built).items()}
    if case.lora is not None:  # shared with critic and reference
        base = {n: shape for n, shape in every_shape(case, "actor", built).items() if not is_trained(n)}
        model = built.model(case, "actor")
        with torch.device("meta"):
            weights = passes.base_of(case, model, base)
        rest["base's weights"] = sum(x.nbytes for x in weights.values())
    row = passes.rows_of(case, 1)
    size = sum(x.nbytes for x in tree.tensors(row))
    return rest | {BATCH: size * case.mini_batch}  # every rank holds all rows
