"""The stages of a step, run for the record: the real functions, on parameters without data, on one rank of a mesh whose
other ranks are imagined. Tokens and masks are real numbers, as the steps read lengths from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fppo import losses, tree
from fppo.batch import Column, Experience
from fppo.models.model import Model
from fppo.models.quantised import CODES, SCALES
from fppo.plan import standins
from fppo.plan._group import Sent, counting_mesh
from fppo.plan._track import AWAY, BATCH, HOST, LOGITS, STATE, Tracker
from fppo.plan.built import REWARD, STAGES, Built, base_dtype, models_of
from fppo.plan.case import ROLES, Case
from fppo.plan.values import Phase
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh
from fppo.runtime.offload import HostActivations, Lane, Offloaded, by_layer, offloaded_adamw
from fppo.runtime.schedule import Action, Schedule, one_f_one_b
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_values
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import Optimizer, adamw
from fppo.steps.scores import compute_reward_scores
from fppo.steps.train_state import TrainState, init_state
from fppo_kernels.adamw import adamw_
from fppo_kernels.context import BLOCKS, deal
from fppo_kernels.record import Kernels

SAME: Mapping[str, str] = {"reference": "log-probs"}  # the same pass on other parameters
_LANE = Lane(torch.device("cpu"))
PASSES = 2  # the second has everything that any later one has: gradients that are there, and new ones
TURNS = 4  # of a rank that runs one pass after the other: two that tell of all, one after them, and one that is sent


def stages_of(case: Case) -> list[str]:
    """The stages of the case's step, in order."""
    has = models_of(case)
    every = [name for name, model in STAGES.items() if model in has and (case.reference or name != "reference")]
    return [name for name in every if case.has(ROLES[name])]


def rows_of(case: Case, count: int) -> Experience:
    """`count` full sequences, of a prompt and a response."""
    length, response = case.length, case.response_tokens

    def numbers() -> Tensor:
        return torch.full((count, response), -1.0)

    blank = Column([None] * count)
    return Experience(
        tokens=torch.ones(count, length, dtype=torch.int64),
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
        token_rewards=numbers(),
        advantages=numbers(),
        returns=numbers(),
    )


def kernels_of(case: Case, tracker: Tracker) -> Kernels:
    """The kernels of a run, that tell the tracker what is for logits, and when a pass begins."""
    log_probs = standins.log_probs_of(case.log_probs, on_gpu=case.hardware.on_gpu)
    kernels = Kernels.named()

    def unpad(*args: Any, **kwargs: Any) -> Any:
        tracker.begin_pass()
        return kernels.unpad(*args, **kwargs)

    if case.hardware.on_gpu:
        kernels = attrs.evolve(kernels, attention=standins.attention)
    return attrs.evolve(kernels, unpad=unpad, log_probs=tracker.scoped(log_probs, LOGITS))


class Shelf(Lane):
    """A lane to the host, whose memory for what is put away is told from the accelerator's."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(torch.device("cpu"))
        self._tracker = tracker

    def host_like(self, x: Tensor) -> Tensor:
        with self._tracker.making(AWAY):
            return super().host_like(x)


def optimizer_of(case: Case) -> Optimizer:
    """The optimizer of actor and critic."""
    return adamw(lambda step: 1e-6, kernel=adamw_ if case.offload == "none" else offloaded_adamw(adamw_, _LANE))


def stage_of(
    case: Case,
    name: str,
    batch: Experience,
    *,
    forward: Forward,
    shelf: Lane = _LANE,
    began: Callable[[Action], None] = lambda action: None,
) -> Callable[[TrainState], Any]:
    """The stage as a function of its model's state. All of `batch`, which every data rank has, is one update; the other
    stages are of this rank's rows. `shelf` is the way of activations to the host; `began` is told what a rank of a
    pipeline that runs one pass at a time begins."""
    micro_batching = MicroBatching(token_budget=case.tokens)
    on_host = case.offload == "all"
    if not name.startswith("update"):
        compute = {"values": compute_values, REWARD: compute_reward_scores}.get(name, compute_log_probs)
        compute = by_layer(compute, _LANE) if on_host else compute
        return lambda state: compute(state.params, batch, forward=forward, micro_batching=micro_batching)
    schedule = partial(turns, rank=case.pipeline_rank, began=began) if case.in_turn else one_f_one_b
    loop = Loop(mini_batch_size=len(batch.tokens), micro_batching=micro_batching, stage_schedule=schedule)
    how = {"forward": forward, "loop": loop, "optimizer": optimizer_of(case)}
    update = UpdateCritic(**how) if name == "update critic" else UpdateActor(loss_fn=losses.ppo_clip, **how)
    update = HostActivations(update, shelf) if case.offload_activations else update
    update = Offloaded(update, _LANE) if on_host else update
    return lambda state: update(state, batch, donate=True)


def turns(ranks: int, micros: int, virtual_stages: int, *, rank: int, began: Callable[[Action], None]) -> Schedule:
    """A schedule in which each pass backward follows its pass forward. Of one stage on each rank; `rank` leaves the
    last micro-batch out, so that there is always another one on its way to it."""
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
    """The rows of few passes: those of all data ranks for an update, this rank's for another stage."""
    rows = case.rows * min(case.micro_batches, passes_of(case, name))
    return rows_of(case, rows * (case.data_ranks if name.startswith("update") else 1))


def passes_of(case: Case, name: str) -> int:
    """How many passes tell of all: `PASSES`, or as many as an update has under way on a pipeline, and one more; with
    interleaved stages as many as are not filled up with empty ones."""
    ranks = case.size("pipeline")
    if ranks == 1 or not name.startswith("update"):
        return PASSES
    if case.in_turn:
        return TURNS
    count = max(PASSES, -(-case.in_flight // case.virtual_stages) + 1)
    return count if case.virtual_stages == 1 else -(-count // ranks) * ranks


def run_stage(case: Case, name: str, *, own: Sequence[int] | None = None, built: Built | None = None) -> list[Phase]:
    """What the stage of a case (`Case.at`) holds, computes and sends on the rank that has most, in few passes; or on
    one whose stages have `own` layers."""
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
    forward = Forward(model, kernels=kernels_of(case, tracker), mesh=mesh, share_prompts=False)
    stage = stage_of(case, name, batch, forward=forward, shelf=Shelf(tracker), began=tracker.began)
    return tracked(case, tracker, stage, init_state(params, optimizer_of(case)), batch)


def base_of(case: Case, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The base of an adapted model without numbers, of which a rank has these shapes, as the case keeps it."""
    kinds = {n: kind for form in model.forms.values() for n, kind in zip((CODES, SCALES), form.dtypes, strict=True)}
    dtypes = {name: next((kinds[end] for end in kinds if name.endswith(end)), base_dtype(case)) for name in shapes}
    return {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in shapes.items()}


def tracked(
    case: Case, tracker: Tracker, stage: Callable[[TrainState], Any], state: TrainState, batch: Any
) -> list[Phase]:
    """What `stage` does with a state, which it may use up."""
    tracker.hold(state.params.values(), HOST if case.offload == "all" else STATE)
    tracker.hold(tree.tensors(state.opt), STATE if case.offload == "none" else HOST)
    tracker.hold(tree.tensors(batch), BATCH)
    with tracker:
        result = stage(state)
    del result
    return tracker.phases()


def mesh_of(case: Case, sent: Sent) -> Mesh:
    """The case's mesh as the planned rank sees it."""
    sharding = case.sharding if case.shards > 1 else None
    mesh = counting_mesh(case.mesh, fullest(case), sharding, sent, virtual_stages=case.virtual_stages)
    return attrs.evolve(mesh, ring=case.ring)


def fullest(case: Case) -> dict[str, int]:
    """The place of the planned rank: on the sequence, context and tensor axes that which has most; of words the last
    has."""
    places = {"sequence": fullest_slice(case), "context": fullest_deal(case), "tensor": case.size("tensor") - 1}
    return places | {"pipeline": case.pipeline_rank}


def fullest_slice(case: Case) -> int:
    """The place on the sequence axis whose slice of the packed row has the most response tokens."""
    total = case.rows * case.length
    return _fullest(case, torch.arange(total).split(-(-total // case.size("sequence"))))


def fullest_deal(case: Case) -> int:
    """The place on the context axis to which the most response tokens are dealt."""
    ranks, lengths = case.size("context"), [case.length] * case.rows
    fill = -sum(lengths) % (ranks * BLOCKS[-1] * case.size("tensor"))
    return _fullest(case, deal([*lengths, fill], ranks).places)


def _fullest(case: Case, places: Sequence[Tensor]) -> int:
    """Which of the ranks that have these tokens of the packed row has the most response tokens."""
    total, prompt = case.rows * case.length, case.length - case.response_tokens
    counts = [int(((own % case.length >= prompt) & (own < total)).sum()) for own in places]
    return max(range(len(counts)), key=lambda i: counts[i])
