"""Run the stages of a step for tracking: the real functions on parameters without data, on one rank of a mesh whose
other ranks are imagined. Tokens and masks have data, since the steps read lengths from them.

Plans run without a GPU, and count what its kernels hold. Only in these places they run other code than a step:

- log_probs/triton cannot run on tensors without data: `triton_buffers` makes its buffers (see triton.py).
- log_probs/chunked is run as it is, with the tiles it takes on a GPU. There a slab of float32 logits is made at once;
  here it is in bfloat16 and widened block by block, which holds as much.
- attention is the CPU's flash attention through sdpa: the same results are kept; what a GPU's kernel takes inside its
  backward pass is `track.attention_workspace`. For queries that are the last tokens of their sequences the CPU's kernel
  has a mask, which `attention` leaves out.
- the step of an optimizer that is not AdamW is an elementwise one on the state that its `init` makes.
- choices of experts are replaced by a load: `sizes_of_load` gives the number of rows for each rank of an expert axis.
- scratch memory of CPU kernels that torch does not allocate as tensors is not counted.
"""

# pyright: reportIncompatibleMethodOverride=false
# torch's stubs name the parameters of its C++ classes otherwise than torch calls them
from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fppo import losses, models, tree
from fppo.assembly import functions
from fppo.batch import Column, Experience
from fppo.models import lora
from fppo.models.bases import in_codes
from fppo.models.codes import layout_in_codes
from fppo.models.model import HeadKind, Model, Params, is_trained
from fppo.models.quantised import CODES, SCALES
from fppo.models.regions import Sizes
from fppo.models.spans import layer_spans
from fppo.runtime import fsdp
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import HostActivations, Lane, Offloaded, by_layer
from fppo.runtime.schedule import Action, Schedule, one_f_one_b
from fppo.settings.model import params_on_host
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_values
from fppo.steps.host_step import HostStep, on_host
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import Optimizer, UpdateCall, clipped, kept_on_host
from fppo.steps.scores import compute_reward_scores
from fppo.steps.train_state import TrainState, init_state
from fppo.studies.plan.case import ROLES, Case, with_layers
from fppo.studies.plan.track import AWAY, BATCH, HOST, LOGITS, STATE, Phase, Sent, Tracker, counting_mesh
from fppo_kernels import table
from fppo_kernels.adamw import adamw_
from fppo_kernels.attention.sdpa import sdpa
from fppo_kernels.context import BLOCKS, deal
from fppo_kernels.log_probs.chunked import CUDA_TILES, chunked
from fppo_kernels.log_probs.reference import LogProbs
from fppo_kernels.padding import Lengths
from fppo_kernels.table import Kernels

LOG_PROBS = ("reference", "chunked", "triton")
SLAB, ROWS, COLUMNS, TILE = 512 << 20, 32768, 16384, 256  # from fppo_kernels.log_probs.triton.Tiling
SPLITS = 64  # splits of the vocabulary with their own moments: 8 tiles each, for 128k entries


def log_probs_of(name: str, *, on_gpu: bool) -> Callable[..., LogProbs]:
    """The planned function for the log-probs kernel of this name. Raises ValueError for a kernel that is not
    planned."""
    if name not in LOG_PROBS:
        raise ValueError(f"--model.log-probs {name!r} is not planned; there are {', '.join(LOG_PROBS)}")
    if name == "triton":
        return triton_buffers
    if name == "chunked" and on_gpu:
        return partial(chunked, tiles=CUDA_TILES)
    return table.get("log_probs", name)


def triton_buffers(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> LogProbs:
    """Make the results of log_probs/triton as shapes, through storages of the kernel's sizes."""
    out = _StandInTriton.apply(hidden, weight)
    return LogProbs(out[0], out[1] if options.get("entropy") else None, None)


def sizes_of_load(load: float, rank: int) -> Sizes:
    """Exchange sizes for a rank whose experts get `load` times the mean of the ranks, from each rank's tokens; the
    other ranks share the rest."""

    def sizes(counts: Tensor, others: Tensor, rows: int) -> tuple[list[int], list[int]]:
        del others
        ranks = len(counts)
        own = min(rows, round(load * rows / ranks))
        sent = [(rows - own + place) // (ranks - 1) for place in range(ranks - 1)]
        return [*sent[:rank], own, *sent[rank:]], [own] * ranks

    return sizes


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lengths: Lengths,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_lengths: Lengths | None = None,
) -> Tensor:
    """Attention for a plan, with the arguments of `attention/sdpa`, which computes it. Only if keys have other lengths
    than queries, with no window, softcap or sinks, it stands for a GPU kernel with a built-in causal mask: shapes and
    work are right then, the numbers are not."""
    masked = window is not None or softcap is not None or sinks is not None
    if masked or key_lengths is None or key_lengths.lengths == lengths.lengths:
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "key_lengths": key_lengths}
        return sdpa(query, key, value, lengths=lengths, scale=scale, **options)
    rows = [
        [part.transpose(0, 1)[None] for part in x.split(sizes.lengths)]
        for x, sizes in ((query, lengths), (key, key_lengths), (value, key_lengths))
    ]
    gqa = query.shape[1] != key.shape[1]
    outputs = [
        F.scaled_dot_product_attention(*row, is_causal=True, scale=scale, enable_gqa=gqa)[0].transpose(0, 1)
        for row in zip(*rows, strict=True)
    ]
    return torch.cat(outputs)


class _StandInTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        tokens = len(hidden)
        moments = hidden.new_empty(3, SPLITS, tokens, dtype=torch.float32)
        total = moments.sum(1)
        own = total[0].clone()
        torch.mm(hidden[:, :1].expand(-1, weight.numel()), weight.reshape(-1, 1))  # the logits' FLOPs, storing none
        ctx.save_for_backward(hidden, weight, total, own)
        return own - total[0], total[2].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, total, own = ctx.saved_tensors
        rows_of = torch.cat([total, torch.stack(grads), own[None]])
        d_hidden, d_weight = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(weight)
        height = min(len(hidden), ROWS)
        width = min(SLAB // max(1, height * weight.element_size()), COLUMNS, len(weight) + TILE - 1)
        slab = weight.new_empty(height, max(1, width // TILE) * TILE)
        for start in range(0, len(weight), slab.shape[1]):
            part = weight[start : start + slab.shape[1]]
            for begin in range(0, len(hidden), ROWS):
                rows = hidden[begin : begin + ROWS]
                used = torch.mm(rows, part.T, out=slab[: len(rows), : len(part)])
                d_hidden[begin : begin + ROWS] += (used @ part).float()
                d_weight[start : start + slab.shape[1]] += used.T @ rows
        del rows_of
        return d_hidden.to(hidden.dtype), d_weight


T = TypeVar("T")
KEPT = 16  # the number of cached runs
REWARD, TEACHER = "reward model", "teacher"
# models that differ in shape
HEADS: Mapping[str, HeadKind] = {"actor": "lm", "critic": "value", REWARD: "value", TEACHER: "lm"}
# the model that each stage runs, in the order of a step
STAGES: Mapping[str, str] = {stage: "actor" if role == "reference" else role for stage, role in ROLES.items()}


def models_of(case: Case) -> list[str]:
    """Names of the case's models among actor, critic, reward model and teacher (`HEADS`)."""
    wanted = {"critic": case.critic, REWARD: case.reward_model is not None, TEACHER: case.teacher is not None}
    return [name for name in HEADS if wanted.get(name, True)]


def model_of(case: Case, name: str, layers: int | None = None) -> Model:
    """Build the case's model of this name (a key of `HEADS`), with all of its layers or with the first `layers`."""
    config = {REWARD: case.reward_model, TEACHER: case.teacher}.get(name, case.config)
    assert config is not None
    config = config if layers is None else with_layers(config, layers)
    again = case.checkpoint_layers
    model = models.build(config, HEADS[name], compute_dtype=case.compute_dtype, checkpoint_layers=again)
    return _adapted(attrs.evolve(model, mlp_slice_tokens=_slice_of(case, name)), case, name)


def _slice_of(case: Case, name: str) -> int | None:
    """The tokens of a slice of a model's MLPs; None if they are whole, as a reward model's are."""
    return None if name == REWARD else case.mlp_slice_tokens


def _adapted(model: Model, case: Case, name: str) -> Model:
    """Add the case's adapter to a model, if it has one."""
    spec = {"actor": case.lora, "critic": case.critic_lora}.get(name)
    if spec is None:
        return model
    base = model if case.lora_base is None else in_codes(model, case.lora_base, base_dtype(case))
    return lora.without_base(base, spec)


def base_dtype(case: Case) -> torch.dtype:
    """The dtype of the base under adapters, which is the case's compute dtype."""
    return case.compute_dtype or torch.float32


class Built:
    """A cache of the slow parts of building models, each made once. All cases that use it have the same models."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Any] = {}
        self._runs: list[tuple[Case, str, int, list[Phase]]] = []

    def model(self, case: Case, name: str, layers: int | None = None) -> Model:
        """The model that `model_of` builds, cached by `name` and `layers`: compute dtype and recomputation are those of
        the first case that asked for it."""
        return self.once(("model", name, layers), lambda: model_of(case, name, layers))

    def cuts(self, case: Case, name: str) -> list[range]:
        """The layers of a model on each stage of the case's pipeline; without a pipeline, one range of all layers. A
        critic on the actor's base is cut like the actor."""
        stages = case.size("pipeline") * case.virtual_stages
        name = "actor" if name == "critic" and case.critic_lora is not None else name
        return self.once(("cuts", name, stages), lambda: layer_spans(self.model(case, name).plain, stages))

    def layout(self, case: Case, name: str, mesh: Mesh) -> Layout | None:
        """The layout of a model's parameters, base included, on a rank of the case's mesh."""
        layout = self._prepared(case, name, None, mesh).layout(mesh, self.cuts(case, name))
        model = self.model(case, name)
        if layout is None or (frozen := model.frozen) is None:
            return layout
        return layout_in_codes(lora.with_factors(layout, frozen.places, frozen.lora.rank), model.forms)

    def placed(self, case: Case, name: str, mesh: Mesh, own: Sequence[int] | None = None) -> Model:
        """The part of a model on a rank of the case's mesh. With `own`, the model has only the layers of the rank's own
        stages, in these numbers."""
        cuts = self.cuts(case, name) if own is None else _stages_of(case, own)
        prepared = self._prepared(case, name, None if own is None else sum(own), mesh)
        placed = _adapted(prepared.on(mesh, cuts), case, name)
        return attrs.evolve(
            placed,
            compute_dtype=case.compute_dtype,
            checkpoint_layers=case.checkpoint_layers,
            mlp_slice_tokens=_slice_of(case, name),
        )

    def run(self, case: Case, name: str, layers: int, make: Callable[[], list[Phase]]) -> list[Phase]:
        """The phases of a case's stage with `layers` layers; the last few results are cached."""
        for known, stage, count, phases in self._runs:
            if (stage, count) == (name, layers) and known == case:
                return phases
        self._runs = [(case, name, layers, make()), *self._runs[: KEPT - 1]]
        return self._runs[0][3]

    def _prepared(self, case: Case, name: str, layers: int | None, mesh: Mesh) -> models.Prepared:
        key = ("prepared", name, layers, case.size("tensor"), case.size("expert"))
        prepared = self.once(key, lambda: models.prepare(self.model(case, name, layers).plain, mesh))
        if prepared.dispatched is None:
            return prepared
        own = attrs.evolve(prepared.dispatched, sizes=sizes_of_load(case.load, mesh["expert"].rank))
        return attrs.evolve(prepared, dispatched=own)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The cached result of `make`, which runs on the first request for the key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def own_layers(case: Case, cuts: Sequence[range]) -> list[int]:
    """The number of layers of each pipeline stage on the rank that is planned. `cuts` has the layers of every stage.
    With P ranks on the pipeline axis, rank r holds the stages r, r + P, r + 2 P and so on."""
    return [len(cut) for cut in cuts[case.pipeline_rank :: case.size("pipeline")]]


def _stages_of(case: Case, own: Sequence[int]) -> list[range]:
    """The layers of each stage, if the planned rank's stages have `own` consecutive layers and others have none."""
    cuts, start = [], 0
    for stage in range(case.size("pipeline") * len(own)):
        count = own[stage // case.size("pipeline")] if stage % case.size("pipeline") == case.pipeline_rank else 0
        cuts.append(range(start, start + count))
        start += count
    return cuts


SAME: Mapping[str, str] = {"reference": "log-probs"}  # the same pass on other parameters
_LANE = Lane(torch.device("cpu"))
PASSES = 2  # the second pass is like any later one: gradients exist already, and new ones arrive
TURNS = 4  # if one pass runs after the other: two that stand for all, one after them, and one in transfer


def stages_of(case: Case) -> list[str]:
    """The stages of the case's step, in order."""
    has = models_of(case)
    every = [name for name, model in STAGES.items() if model in has and (case.reference or name != "reference")]
    return [name for name in every if case.has(ROLES[name])]


def rows_of(case: Case, count: int) -> Experience:
    """Make `count` full sequences, each a prompt and a response; every `case.together` consecutive rows share a
    prompt."""
    length, response = case.length, case.response_tokens
    row, tokens = torch.arange(count), torch.ones(count, length, dtype=torch.int64)
    if case.together > 1:
        prompts = (row / case.together).long()  # tokens of prompts are their numbers, like those of responses
        tokens = torch.where(torch.arange(length) < length - response, prompts[:, None], row[:, None])

    def numbers() -> Tensor:
        return torch.full((count, response), -1.0)

    blank = Column([None] * count)
    return Experience(
        tokens=tokens,
        attention_mask=torch.ones(count, length, dtype=torch.bool),
        response_mask=torch.ones(count, response, dtype=torch.bool),
        rollout_log_probs=numbers(),
        sampling_log_probs=numbers(),
        row_ids=torch.arange(count),
        groups=torch.arange(count),
        versions=torch.zeros(count, dtype=torch.int64),
        finish=blank,
        ids=blank,
        ground_truth=blank,
        source=blank,
        extras=blank,
        scores=torch.zeros(count),
        named_scores={},
        old_log_probs=numbers(),
        ref_log_probs=numbers() if case.reference else None,
        values=numbers() if case.critic else None,
        teacher_log_probs=numbers() if case.teacher is not None else None,
        token_rewards=numbers(),
        advantages=numbers(),
        returns=numbers(),
    )


def kernels_of(case: Case, tracker: Tracker) -> Kernels:
    """The kernels of a run, which tell the tracker which storages hold logits, and when a pass begins."""
    log_probs = log_probs_of(case.log_probs, on_gpu=case.hardware.on_gpu)
    kernels = Kernels.named()

    def unpad(*args: Any, **kwargs: Any) -> Any:
        tracker.begin_pass()
        return kernels.unpad(*args, **kwargs)

    if case.hardware.on_gpu:
        kernels = attrs.evolve(kernels, attention=attention)
    return attrs.evolve(kernels, unpad=unpad, log_probs=tracker.scoped(log_probs, LOGITS))


class Shelf(Lane):
    """A lane to the host whose memory for offloaded tensors, of this kind, is counted apart from the accelerator's."""

    def __init__(self, tracker: Tracker, kind: str = AWAY) -> None:
        super().__init__(torch.device("cpu"))
        self._tracker, self._kind = tracker, kind

    def host_like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        with self._tracker.making(self._kind):
            return super().host_like(x, dtype)


def optimizer_of(case: Case, lane: Lane = _LANE) -> Optimizer:
    """The optimizer of actor and critic. Its step may be on the host that the lane leads to."""
    own = partial(functions.optimizer_of, case.optimizer, 1, setting="optimizer")
    home = None if case.offload in ("none", "optimizer_step") else _LANE

    def make(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> Optimizer:
        if case.optimizer.name == "adamw":
            return own(kernel=wrap(adamw_), on_host=home)
        made = own()
        if case.optimizer.name != "adamw_8bit":
            made = clipped(made.init, _elementwise_, max_grad_norm=1.0)
        return made if home is None else kept_on_host(made, home)

    return on_host(make, lane) if case.offload == "optimizer_step" else make(lambda kernel: kernel)


def _elementwise_(params: Params, grads: Params, state: Any, call: UpdateCall) -> Any:
    """Read gradients, read and write parameters and state, in the place of a step that may need data."""
    del call
    for name, x in params.items():
        x.sub_(grads[name])
    for x in tree.tensors(state):
        x.mul_(1)
    return state


def moments(case: Case, shapes: Mapping[str, Sequence[int]]) -> list[int]:
    """Bytes of each tensor of the optimizer's state for parameters of these shapes, without 0-d tensors."""
    optimizer = optimizer_of(attrs.evolve(case, offload="none"))  # the bytes are the same on the host
    params = {name: torch.empty(shape, dtype=case.dtype, device="meta") for name, shape in shapes.items()}
    return [x.nbytes for x in tree.tensors(optimizer.init(params)) if x.dim()]


def stage_of(
    case: Case,
    name: str,
    batch: Experience,
    *,
    forward: Forward,
    shelf: Lane = _LANE,
    home: Lane = _LANE,
    began: Callable[[Action], None] = lambda action: None,
) -> Callable[[TrainState], Any]:
    """The stage as a function of its model's state. An update runs on all of `batch`, which every data rank has; other
    stages on this rank's rows. `shelf` transfers activations to the host, `home` gradients. `began` is called with
    each action that a pipeline rank begins, if it runs one pass at a time."""
    micro_batching = MicroBatching(token_budget=case.tokens)
    if case.together > 1:  # `case.rows` rows in each
        micro_batching = MicroBatching(size=case.rows)
    away = params_on_host(case.offload)
    if not name.startswith("update"):
        compute = {"values": compute_values, REWARD: compute_reward_scores}.get(name, compute_log_probs)
        compute = by_layer(compute, _LANE) if away else compute
        return lambda state: compute(state.params, batch, forward=forward, micro_batching=micro_batching)
    schedule = partial(turns, rank=case.pipeline_rank, began=began) if case.in_turn else one_f_one_b
    loop = Loop(mini_batch_size=len(batch.tokens), micro_batching=micro_batching, stage_schedule=schedule)
    how = {"forward": forward, "loop": loop, "optimizer": optimizer_of(case, home)}
    update = UpdateCritic(**how) if name == "update critic" else UpdateActor(loss_fn=losses.ppo_clip, **how)
    update = HostActivations(update, shelf) if case.offload_activations else update
    if away:
        update = Offloaded(update, _LANE) if case.offload == "all" else HostStep(update, home, forward)
    return lambda state: update(state, batch, donate=True)


def turns(ranks: int, micros: int, virtual_stages: int, *, rank: int, began: Callable[[Action], None]) -> Schedule:
    """A pipeline schedule of one stage per rank, in which each backward pass directly follows its forward pass. The
    planned `rank` leaves out the last micro-batch, so that one more is always in transfer to it. `began` is called with
    each action."""
    del virtual_stages
    kinds: tuple[Literal["forward"], Literal["backward"]] = ("forward", "backward")
    return Schedule(
        tuple(
            tuple(Action(kind, stage, micro) for micro in range(micros - (stage == rank)) for kind in kinds)
            for stage in range(ranks)
        ),
        began,
    )


def rows_of_stage(case: Case, name: str) -> Experience:
    """Make the rows of a stage's tracked passes: for an update the rows of all data ranks, for other stages this
    rank's."""
    rows = case.rows * min(case.micro_batches, passes_of(case, name))
    return rows_of(case, rows * (case.data_ranks if name.startswith("update") else 1))


def passes_of(case: Case, name: str) -> int:
    """The number of passes to track, which stand for all passes of a stage: `PASSES` or, for an update on a pipeline,
    one more than are in flight, rounded up to a multiple of the ranks if stages are interleaved."""
    ranks = case.size("pipeline")
    if ranks == 1 or not name.startswith("update"):
        return PASSES
    if case.in_turn:
        return TURNS
    count = max(PASSES, -(-case.in_flight // case.virtual_stages) + 1)
    return count if case.virtual_stages == 1 else -(-count // ranks) * ranks


def run_stage(case: Case, name: str, *, own: Sequence[int] | None = None, built: Built | None = None) -> list[Phase]:
    """Track memory, FLOPs and traffic of a case's stage (`Case.at`) in a few passes, on the fullest rank, or on one
    whose stages have `own` layers."""
    batch = rows_of_stage(case, name)
    tracker = Tracker(on_gpu=case.hardware.on_gpu)
    mesh = mesh_of(case, tracker.sent)
    model = (built or Built()).placed(case, STAGES[name], mesh, own)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if (frozen := model.frozen) is not None:
            kept = base_of(case, model, fsdp.shard_shapes(frozen.shapes, mesh, model.cuts))
            tracker.hold(kept.values())
            model = attrs.evolve(model, frozen=attrs.evolve(frozen, params=kept))
        shapes = fsdp.shard_shapes(model.shapes, mesh, model.cuts)
        params = {name: torch.empty(shape, dtype=case.dtype) for name, shape in shapes.items()}
    share = "auto" if case.together > 1 else False
    forward = Forward(model, kernels=kernels_of(case, tracker), mesh=mesh, share_prompts=share)
    lanes = {"shelf": Shelf(tracker), "home": Shelf(tracker, HOST)}
    stage = stage_of(case, name, batch, forward=forward, **lanes, began=tracker.began)
    return tracked(case, tracker, stage, init_state(params, optimizer_of(case)), batch)


def base_of(case: Case, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The base of an adapted model without data, in a rank's `shapes` and the case's dtype."""
    kinds = {n: kind for form in model.forms.values() for n, kind in zip((CODES, SCALES), form.dtypes, strict=True)}
    dtypes = {name: next((kinds[end] for end in kinds if name.endswith(end)), base_dtype(case)) for name in shapes}
    return {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in shapes.items()}


def tracked(
    case: Case, tracker: Tracker, stage: Callable[[TrainState], Any], state: TrainState, batch: Any
) -> list[Phase]:
    """Run `stage` on `state`, which it may use up, and return the phases that the tracker recorded."""
    tracker.hold(state.params.values(), HOST if params_on_host(case.offload) else STATE)
    tracker.hold(tree.tensors(state.opt), STATE if case.offload == "none" else HOST)
    tracker.hold(tree.tensors(batch), BATCH)
    with tracker:
        result = stage(state)
    del result
    return tracker.phases()


def mesh_of(case: Case, sent: Sent) -> Mesh:
    """The case's mesh as seen by the planned rank, with groups that count collectives and report them to `sent`."""
    sharding = case.sharding if case.shards > 1 else None
    mesh = counting_mesh(case.mesh, fullest(case), sharding, sent, virtual_stages=case.virtual_stages)
    return attrs.evolve(mesh, ring=case.ring)


def fullest(case: Case) -> dict[str, int]:
    """The coordinates of the planned rank: on the sequence and context axes the rank with the most response tokens, on
    the tensor axis the last, and on the pipeline the case's."""
    places = {"sequence": fullest_slice(case), "context": fullest_deal(case), "tensor": case.size("tensor") - 1}
    return places | {"pipeline": case.pipeline_rank}


def fullest_slice(case: Case) -> int:
    """The rank on the sequence axis whose slice of the packed row has the most response tokens."""
    total = case.rows * case.length
    return _fullest(case, torch.arange(total).split(-(-total // case.size("sequence"))))


def fullest_deal(case: Case) -> int:
    """The rank on the context axis with the most response tokens."""
    ranks, lengths = case.size("context"), [case.length] * case.rows
    fill = -sum(lengths) % (ranks * BLOCKS[-1] * case.size("tensor"))
    return _fullest(case, deal([*lengths, fill], ranks).places)


def _fullest(case: Case, places: Sequence[Tensor]) -> int:
    """The rank with the most response tokens; `places` are each rank's token indices in the packed row."""
    total, prompt = case.rows * case.length, case.length - case.response_tokens
    counts = [int(((own % case.length >= prompt) & (own < total)).sum()) for own in places]
    return max(range(len(counts)), key=lambda i: counts[i])


def shard_shapes(case: Case, name: str, built: Built) -> dict[str, tuple[int, ...]]:
    """The shard shapes of the trained parameters on the fullest rank of a model."""
    every, model = every_shape(case, name, built), built.model(case, name)
    return every if model.frozen is None else {name: shape for name, shape in every.items() if is_trained(name)}


def every_shape(case: Case, name: str, built: Built) -> dict[str, tuple[int, ...]]:
    """The shard shapes of all parameters, base weights included, on the fullest rank of a model."""
    mesh = mesh_of(case, lambda *_: None)
    layout = built.layout(case, name, mesh)
    shapes = built.model(case, name).all_shapes if layout is None else layout.shapes
    return fsdp.shard_shapes(shapes, mesh, {} if layout is None else layout.cuts)
