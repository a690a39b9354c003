"""A step's time and memory from formulas alone, good enough to choose which of many meshes to plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import attrs

from fppo.models import flops
from fppo.models.model import Model
from fppo.plan import passes
from fppo.plan.case import Case
from fppo.plan.estimate import LINK_SHARE, MATMUL_SHARE, link
from fppo.plan.hardware import overhead

_STATE = {"none": 12, "moments": 4, "all": 0}  # bytes of a number of the trained parameters and moments on the device
_KEPT_LAYER = 10.0  # elements of a token's width that a layer keeps for its backward pass, what is inside the MLP aside


class Rough(NamedTuple):
    """What a rank needs: seconds of a step without its rollout, and bytes where most is held."""

    seconds: float
    memory: float


class Sizes(NamedTuple):
    """Numbers of a model's parameters: of its layers, and of its embeddings or head, the larger."""

    layers: float
    outside: float


def sizes_of(model: Model) -> Sizes:
    """The sizes of a model that no axis cuts."""
    inside = {name: shape.numel() for name, shape in model.shapes.items() if model.layer_of(name) is not None}
    others = [shape.numel() for name, shape in model.shapes.items() if name not in inside]
    return Sizes(float(sum(inside.values())), float(max(others, default=0)))


def rough(case: Case, models: Mapping[str, Model]) -> Rough:
    """An estimate of the whole step; `models` are the case's, by `passes.models_of`."""
    seconds = sum(_seconds(case.at(name), name, models[passes.STAGES[name]]) for name in passes.stages_of(case))
    rest = sum(_rest(case, name, model) for name, model in models.items())
    if case.reference:
        rest += _own(case, models["actor"]) * case.at("reference").dtype.itemsize
    moving = max(_moving(case.at(name), name, models[passes.STAGES[name]]) for name in passes.stages_of(case))
    wide = sum(size > 1 for size in case.mesh.values())
    return Rough(seconds, rest + moving + overhead(case.hardware, wide, moving))


def _own(case: Case, model: Model, *, shards: bool = True) -> float:
    """Numbers of the parameters on the rank that has most: on a pipeline, one that has its embeddings or head."""
    sizes = sizes_of(model)
    both = 1 if case.size("pipeline") > 1 else 2
    cut = case.size("tensor") * (case.size("shard") if shards else 1)
    return (sizes.layers / case.size("pipeline") + both * sizes.outside) / cut


def _rest(case: Case, name: str, model: Model) -> float:
    at = case.at(name if name == passes.REWARD else f"update {name}")
    trained = _STATE[at.offload] if name != passes.REWARD else (0 if at.offload == "all" else at.dtype.itemsize)
    return trained * _own(case, model)


def _moving(case: Case, name: str, model: Model) -> float:
    """Bytes that come and go in a stage."""
    width = 4 if case.compute_dtype is None else case.compute_dtype.itemsize
    layers = len(model.layers) / case.size("pipeline")
    whole = _own(case, model, shards=False)
    gathered = 0.0
    if case.size("shard") > 1 or case.compute_dtype is not None:
        gathered = width * (whole if case.sharding.stage < 3 else whole * min(1.0, 3 / layers))
    if not name.startswith("update"):
        return gathered + 4 * width * _tokens(case) * model.config.hidden_size
    grads = 4 * (_own(case, model) if case.sharding.stage > 1 else whole)
    hidden, inner = model.config.hidden_size, getattr(model.config, "intermediate_size", 0) or 0
    active = getattr(model.config, "num_experts_per_tok", None) or 1
    inside = (_KEPT_LAYER * hidden + 4.0 * inner * active) / case.size("tensor")
    of_layer = 2.0 * hidden + inside
    kept = layers * (hidden if case.checkpoint_layers else of_layer) * case.in_flight / case.virtual_stages
    return gathered + grads + width * _tokens(case) * (kept + (of_layer if case.checkpoint_layers else 0.0))


def _tokens(case: Case) -> float:
    """Of a pass, that a rank has between blocks before the tensor axis cuts them."""
    return case.tokens / (case.size("sequence") * case.size("context"))


def _seconds(case: Case, name: str, model: Model) -> float:
    """Of a stage with all of its passes."""
    hardware, trains = case.hardware, name.startswith("update")
    tensor = case.size("tensor")
    parts = case.world // case.data_ranks
    lengths = [case.length] * case.rows
    needed = flops.forward_flops(model, lengths, head_tokens=case.rows * case.response_tokens) / parts
    times = (4 if case.checkpoint_layers else 3) if trains else 1
    narrow = case.compute_dtype is not None
    compute = times * needed / ((hardware.flops if narrow else hardware.flops_float32) * MATMUL_SHARE)
    width = case.compute_dtype.itemsize if narrow and case.compute_dtype is not None else 4
    state = _own(case, model, shards=False)
    often = (1 / max(1, case.micro_batches)) if case.sharding.stage == 1 else 1.0
    rounds = {1: 1, 2: 1, 3: 2}[case.sharding.stage] if trains else 1
    gathers = often * _over(case, "shard", state * (rounds * width + 4 * trains))
    hidden = _tokens(case) * model.config.hidden_size * width
    blocks = len(model.layers) / case.size("pipeline") * (2 if trains else 1)
    exchanges = 4 * blocks * _over(case, "tensor", hidden)
    exchanges += 4 * blocks * _over(case, "sequence", hidden / tensor)
    heads = model.config.num_attention_heads
    keys = 2 * (getattr(model.config, "num_key_value_heads", None) or heads) / heads  # and values, to the hidden width
    exchanges += blocks * _over(case, "context", keys * hidden * case.size("context") / tensor)
    if case.size("pipeline") > 1:
        per_second = link(case, "pipeline")[2] * LINK_SHARE
        exchanges += (2 if trains else 1) * case.virtual_stages * hidden / tensor / per_second
    each = compute + max(0.0, gathers - compute) + exchanges
    once = 2 * _over(case, "replicate", 4 * state / case.size("shard")) if trains else 0.0
    return each * case.micro_batches * (1 + case.bubble) + once


def _over(case: Case, axis: str, size: float) -> float:
    """Seconds in which a ring over an axis gathers, or scatters, so many bytes of the whole."""
    ranks = case.size(axis)
    return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / (link(case, axis)[1] * LINK_SHARE)


def with_sequences(case: Case, sequences: int) -> Case:
    """The case with so many sequences to an update, over all ranks, in passes of as many tokens as it has."""
    share = -(-sequences // case.data_ranks)
    rows = min(case.rows, share)
    return attrs.evolve(case, tokens=max(2, rows * case.length), micro_batches=-(-share // rows))
