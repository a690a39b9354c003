"""The cost of a step's rollout: memory of an engine, its time, and the weights that it is sent. Prompts run through the
embedded engine's own code, on parameters without data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from fppo import models
from fppo.models import experts, flops
from fppo.models.model import Model
from fppo.models.rows import RowWise
from fppo.rollout import cache as caches
from fppo.rollout.decoder import JOINED, KINDS, PACKED
from fppo.rollout.states import PromptStates
from fppo.rollout.vllm.devices import BESIDE, KEPT_FREE
from fppo.runtime.mesh import DENSE
from fppo.runtime.watch import wire_bytes
from fppo.settings.model import params_on_host
from fppo.studies.plan import layers, passes
from fppo.studies.plan.case import Case, PlannedSampling, overhead
from fppo.studies.plan.estimate import ATTENTION_SHARE, COPY_SHARE, LATENCY, LINK_SHARE, MATMUL_SHARE, link
from fppo.studies.plan.passes import Built, base_dtype
from fppo.studies.plan.track import STATE, Tracker, peak_of
from fppo_kernels.padding import make_lengths

FEW, MORE = 1, 2  # layers that are run: without gradients a layer holds nothing of others, except keys and values


class Prefill(NamedTuple):
    """Bytes of a pass over prompts."""

    column: float  # keys and values of one token, in all layers
    states: float  # one row's states
    moving: float  # at the peak, with the keys and values of its tokens


def prefill_of(case: Case, built: Built, *, prompts: int, length: int) -> Prefill:
    """Bytes of a pass over `prompts` prompts of `length` tokens, for a whole model on one rank; the caller divides them
    by a tensor axis. If all layers are alike, the bytes are extrapolated from a few."""
    key = ("prefill", case.compute_dtype, case.hardware.on_gpu, prompts, length)
    return built.once(key, lambda: _of_all(case, built, prompts, length))


def _of_all(case: Case, built: Built, prompts: int, length: int) -> Prefill:
    whole = built.model(case, "actor").plain
    count = len(whole.layers)
    if case.full or count <= MORE or not layers.alike(whole):
        return _run(case, whole, prompts, length)
    few, more = (_run(case, built.model(case, "actor", some).plain, prompts, length) for some in (FEW, MORE))
    return Prefill(*(a + (b - a) * (count - FEW) / (MORE - FEW) for a, b in zip(few, more, strict=True)))


def _run(case: Case, model: Model, prompts: int, length: int) -> Prefill:
    tracker = Tracker(on_gpu=case.hardware.on_gpu)
    model = attrs.evolve(model, compute_dtype=case.compute_dtype)
    kernels = passes.kernels_of(case, tracker)
    tokens = torch.ones(1, prompts * length, dtype=torch.int64)
    positions = torch.arange(length).repeat(prompts)[None]
    lengths = make_lengths([length] * prompts)
    kept, states = caches.Layers(), PromptStates(lengths, model)

    def run(skeleton: PreTrainedModel) -> None:
        attend = caches.prefill_attention(kernels.attention, lengths, kept, [])
        with tracker:
            models.forward(model.text_of(skeleton), tokens, positions, attend=RowWise(attend, states))

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        dtype = case.compute_dtype or case.dtype
        params = {name: torch.empty(shape, dtype=dtype) for name, shape in model.whole_shapes.items()}
        tracker.hold(params.values(), STATE)
        models.bind(model, params, run, kernels=kernels)
    peak = peak_of(tracker.phases())[1]
    return Prefill(caches.row_bytes(kept, 1), states.states_(1, 1).row_bytes, peak.total - peak.peak[STATE])


WEIGHTS, KEYS, MOVING, OUTSIDE = "engine's weights", "keys and values", "prompts or logits", "outside of tensors"
ALIGNED = 64  # columns of the cache of recorded steps; blocks of vLLM have fewer tokens
BLOCK = 16
PREFILL_TOKENS = 16384  # tokens of a pass of the embedded engine over prompts
TOGETHER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # weights that the decoder concatenates
ALONE = ("o_proj", "down_proj")  # those that it copies only to pack them
LOGITS = 3  # products, scaled products and their weights, all float32


@attrs.frozen
class PlannedRollout:
    """The rollout of a step on the GPU of an engine."""

    engines: int
    gpus: int  # GPUs of each engine
    rows: int  # rows of an engine
    together: int  # rows that decode together
    memory: Mapping[str, float]  # bytes by kind while sampling, with bytes at rest on the same GPU
    stays: float  # bytes that stay allocated during updates
    prefill: float  # seconds
    decode: float
    gathered: float  # bytes that a rank sends other ranks, for whole weights
    sent: float  # bytes that an engine is sent after an update
    sending: float  # seconds for both

    @property
    def total(self) -> float:
        """Bytes while sampling."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """Seconds of prompts, responses and weights, if all responses have the maximal length."""
        return self.prefill + self.decode + self.sending


@attrs.frozen
class _Engine:
    """One engine of a rollout: its model, the GPUs over which it is cut, its prompts, and its bytes per GPU."""

    model: Model  # the whole model
    dtype: torch.dtype  # the compute dtype
    cut: int  # GPUs over which it is cut
    count: int
    prompts: int  # prompts of the engine, each with `sampling.n` responses
    prompt: int  # tokens
    response: int
    prefill: Prefill

    @property
    def at_once(self) -> int:
        """The number of the engine's prompts that one prefill pass takes."""
        return _at_once(self.prompts, self.prompt)

    @property
    def numbers(self) -> int:
        """The number of parameters on one of its GPUs."""
        return sum(shape.numel() for shape in self.model.whole_shapes.values()) // self.cut

    @property
    def column(self) -> float:
        """Bytes of the keys and values of one token on one of the engine's GPUs. With more GPUs than key heads, several
        GPUs hold the same head."""
        heads = getattr(self.model.config, "num_key_value_heads", None) or self.model.config.num_attention_heads
        return self.prefill.column / min(self.cut, heads)

    def row(self, multiple: int) -> float:
        """Bytes of the keys, values and states of a whole row, in blocks of `multiple` columns."""
        columns = -(-(self.prompt + self.response) // multiple) * multiple
        return columns * self.column + self.prefill.states / self.cut


def rollout_of(case: Case, rest: Mapping[str, float], built: Built) -> PlannedRollout | None:
    """Plan the rollout of a case with these bytes at rest on a rank; None if no rollout is planned."""
    sampling = case.sampling
    if sampling is None:
        return None
    engine = _engine(case, sampling, built)
    rows = engine.prompts * sampling.n
    if sampling.engine == "vllm":
        memory, together, stays = _vllm(case, sampling, engine, rest)
        waves = math.ceil(rows / together)
    else:
        memory, together, waves = _embedded(case, sampling, engine, rest)
        stays = 0.0
    gathered, sent, sending = _weights(case, sampling, engine)
    return PlannedRollout(
        engines=engine.count,
        gpus=engine.cut,
        rows=rows,
        together=together,
        memory=memory,
        stays=stays,
        prefill=case.pace.forward * prefill_seconds(case, engine),
        decode=case.pace.decode * waves * decode_seconds(case, engine, -(-rows // waves)),
        gathered=gathered,
        sent=sent,
        sending=sending,
    )


def _engine(case: Case, sampling: PlannedSampling, built: Built) -> _Engine:
    model = built.model(case, "actor").plain
    alone = sampling.engine == "vllm" or sampling.pool is not None
    cut = sampling.tensor if sampling.engine == "vllm" else _decodes_cut(case)
    count = sampling.pool or (case.world if alone else case.world // cut)
    prompts = -(-(sampling.sequences or case.mini_batch) // (sampling.n * count))
    response = case.response_tokens
    prompt = case.length - response
    dtype = (sampling.dtype if sampling.engine == "vllm" else None) or case.compute_dtype or case.dtype
    at_once = _at_once(prompts, prompt)
    computing = attrs.evolve(case, compute_dtype=dtype)
    prefill = prefill_of(computing, built, prompts=at_once, length=prompt)
    return _Engine(model, dtype, cut, count, prompts, prompt, response, prefill)


def _at_once(prompts: int, length: int) -> int:
    """The number of `prompts` prompts of `length` tokens that one prefill pass takes."""
    return max(1, min(prompts, PREFILL_TOKENS // length))


def _decodes_cut(case: Case) -> int:
    """The number of ranks over which the embedded engine's weights stay cut while it decodes: the tensor axis, but 1
    with an expert axis or in a pool of its own, where each engine has whole weights."""
    return case.size("tensor") if case.size("expert") == 1 and case.sampling and case.sampling.pool is None else 1


def _embedded(
    case: Case, sampling: PlannedSampling, engine: _Engine, rest: Mapping[str, float]
) -> tuple[dict[str, float], int, int]:
    """Plan the embedded engine's schedule: bytes by kind, those at `rest` on the trainer's rank among them; the rows
    that decode together; and the number of waves of such rows."""
    recorded = case.hardware.on_gpu and engine.cut == 1
    row, n = engine.row(ALIGNED if recorded else 1), sampling.n
    gathered, made = _gathered(case, sampling, engine), _made(case, engine)
    memory = {**rest, WEIGHTS: gathered + made}
    outside = overhead(case.hardware, case.groups, 0)
    budget = sampling.cache
    if budget is None and case.hardware.on_gpu:
        budget = max(0.0, case.hardware.memory - sum(memory.values()) - outside) / 2
    rows, draws = sampling.max_rows, n
    if budget is not None:
        fitting = max(1, int(budget // row))
        rows, draws = min(rows, fitting), min(n, fitting)
    prompts = min(engine.prompts, max(1, rows // n))
    together = prompts * draws
    at_once, size = engine.at_once, together * row
    logits = LOGITS * 4 * together * flops.head_weights(engine.model) / engine.model.config.hidden_size / engine.cut
    moving = engine.prefill.moving * min(prompts, at_once) / at_once / engine.cut
    if prompts <= at_once:  # the cache is allocated after the prompts' passes
        moving = max(moving - size, logits + min(prompts, at_once) * engine.prompt * engine.column)
    if gathered and case.shards > 1:  # all at once; cast parts lie in a buffer
        parts = gathered / case.shards * (1 if _narrow(case, engine) == _kept(case) else 2)
        moving = max(moving, gathered + parts - made - size)
    memory |= {KEYS: together * row, MOVING: moving}
    memory[OUTSIDE] = overhead(case.hardware, case.groups, moving + together * row)
    return memory, together, -(-engine.prompts // prompts) * -(-n // draws)


def _gathered(case: Case, sampling: PlannedSampling, engine: _Engine) -> float:
    """Bytes of weights that a rank holds for the embedded engine besides its own shards: gathered from shards in the
    engine's dtype, or received from the host or another process. 0 if it uses the trainer's tensors."""
    away = sampling.pool is not None or params_on_host(case.offload)
    dtype = _narrow(case, engine) if _cut(case, engine) else _kept(case)
    return float(engine.numbers * dtype.itemsize) if away or _cut(case, engine) else 0.0


def _cut(case: Case, engine: _Engine) -> bool:
    """Whether each trainer rank holds only a part of the weights that an engine's rank needs."""
    return case.shards > 1 or case.size("pipeline") > 1 or engine.cut < case.size("tensor")


def _kept(case: Case) -> torch.dtype:
    return case.dtype if case.lora is None else base_dtype(case)


def _narrow(case: Case, engine: _Engine) -> torch.dtype:
    """The dtype to which shards are cast before they are gathered; codes are not cast."""
    return engine.dtype if case.lora_base is None else base_dtype(case)


def _made(case: Case, engine: _Engine) -> float:
    """Bytes that the embedded engine derives from the weights: cast or merged weights, concatenated ones of a common
    input where rows are few, and on a CPU a float32 head, and what is packed for oneDNN's products."""
    model, width = engine.model, engine.dtype.itemsize
    merged = case.lora is not None and case.lora_base is None and engine.dtype == torch.float32
    cast = _kept(case) != engine.dtype and not _cut(case, engine)
    size = engine.numbers * width if merged or cast else 0
    inside = {name: x.numel() for name, x in model.whole_shapes.items() if model.layer_of(name) is not None}
    known = type(model.text_of(model.skeleton)).__module__ in KINDS
    if known and sum(inside.values()) * width / engine.cut <= (PACKED if case.packs else JOINED):
        copied = {name: count for name, count in inside.items() if name.split(".")[-2] in TOGETHER}
        if case.packs:
            copied |= {x: count for x, count in inside.items() if x.endswith(tuple(f"{y}.weight" for y in ALONE))}
        size += width * sum(copied.values()) // engine.cut
    head = 4 * flops.head_weights(model) // engine.cut
    if not case.hardware.on_gpu:
        size += head * ((width < 4) + (case.packs and head <= PACKED))
    return float(size)


def _vllm(
    case: Case, sampling: PlannedSampling, engine: _Engine, rest: Mapping[str, float]
) -> tuple[dict[str, float], int, float]:
    """Plan a vLLM engine: bytes on one of its GPUs by kind, with the trainer's `rest` if that is there too; the rows
    that decode together; and the bytes that it keeps on the trainer's GPU during updates."""
    own = {} if sampling.apart or sampling.pool is not None else dict(rest)
    hardware, weights = case.hardware, float(engine.numbers * engine.dtype.itemsize)
    trainer = overhead(hardware, case.groups, 0) if own else 0.0
    outside = overhead(hardware, int(engine.cut > 1), 0)
    if sampling.cache is not None or not hardware.on_gpu:
        keys = float(1 << 30) if sampling.cache is None else sampling.cache
    elif sampling.share is not None:
        keys = sampling.share * hardware.memory - weights - outside
    else:
        free = hardware.memory - sum(own.values()) - trainer
        beside = 1.0 if not own or sampling.sleeps else BESIDE
        keys = (1 - KEPT_FREE) * free * beside - weights - outside
    keys = max(keys, engine.row(BLOCK))
    together = max(1, min(engine.prompts * sampling.n, sampling.max_rows, int(keys // engine.row(BLOCK))))
    memory = {**own, WEIGHTS: weights, KEYS: keys, OUTSIDE: trainer + outside}
    return memory, together, 0.0 if not own or sampling.sleeps else weights + keys + outside


def prefill_seconds(case: Case, engine: _Engine) -> float:
    """Seconds of an engine's prompts, each once: max(FLOPs / (peak * MATMUL_SHARE), bytes of the weights, once, /
    (bandwidth * COPY_SHARE))."""
    needed = flops.forward_flops(engine.model, [engine.prompt] * engine.prompts, head_tokens=engine.prompts)
    reading = engine.numbers * engine.dtype.itemsize / (case.hardware.bandwidth * COPY_SHARE)
    return max(needed / engine.cut / (_peak(case, engine) * MATMUL_SHARE), reading)


def decode_seconds(case: Case, engine: _Engine, rows: int) -> float:
    """Seconds of `rows` rows that decode together, token by token. A step takes

        max(bytes of the weights that some row meets / (bandwidth * COPY_SHARE), FLOPs / (peak * MATMUL_SHARE))
        + max(bytes of keys and values so far / (bandwidth * COPY_SHARE), FLOPs / (peak * ATTENTION_SHARE))

    and on several GPUs two collectives for each layer, where the host launches all of it at once.
    """
    model, hardware = engine.model, case.hardware
    bandwidth, peak = hardware.bandwidth * COPY_SHARE, _peak(case, engine)
    read = engine.dtype.itemsize * met_weights(model, rows) / engine.cut
    each = 2.0 * (sum(flops.layer_weights(model)) + flops.head_weights(model)) * rows / engine.cut
    tokens = engine.prompt * engine.response + engine.response * (engine.response + 1) / 2  # seen by one row's steps
    whole = flops.forward_flops(model, [engine.prompt + engine.response]) - flops.forward_flops(model, [engine.prompt])
    attention = whole * rows / engine.cut - each * engine.response
    seen = rows * (engine.column * tokens + engine.prefill.states / engine.cut * engine.response)
    waiting = 0.0
    if engine.cut > 1:
        spans = engine.cut > hardware.per_node
        waiting = 2 * len(model.layers) * LATENCY[spans] * engine.response
    with_weights = engine.response * max(read / bandwidth, each / (peak * MATMUL_SHARE))
    return with_weights + max(seen / bandwidth, attention / (peak * ATTENTION_SHARE)) + waiting


def met_weights(model: Model, rows: int) -> float:
    """The number of weights that a step of `rows` tokens reads, on average over choices of experts: if each token has k
    of E experts, E (1 - (1 - k / E)^rows) experts are read."""
    count = experts.expert_count(model.config)
    each = sum(flops.layer_weights(model)) + flops.head_weights(model)
    if not count:
        return float(each)
    chosen = (getattr(model.config, "num_experts_per_tok", None) or count) / count
    routed = sum(model.whole_shapes[name].numel() for name in experts.expert_names(model))
    return each + routed * (1 - (1 - chosen) ** rows - chosen)


def _peak(case: Case, engine: _Engine) -> float:
    return case.hardware.flops if engine.dtype.itemsize == 2 else case.hardware.flops_float32


def _weights(case: Case, sampling: PlannedSampling, engine: _Engine) -> tuple[float, float, float]:
    """The cost of getting weights to an engine: bytes that a rank sends to the others so that they have whole weights,
    bytes that an engine is sent, and the seconds of both."""
    every = sum(shape.numel() for shape in engine.model.whole_shapes.values())
    if sampling.pool is not None:
        sent = float(every * case.dtype.itemsize)
        return 0.0, sent, sent / (case.hardware.network_bandwidth * LINK_SHARE)
    alone = sampling.engine == "vllm"
    dtype = engine.dtype if alone else _narrow(case, engine)
    size = every * dtype.itemsize // (1 if alone else engine.cut)
    gathered = seconds = 0.0
    for axis, ranks in ((DENSE, case.shards), ("tensor", case.size("tensor") if alone or engine.cut == 1 else 1)):
        if ranks > 1:
            part = wire_bytes("all_gather", size // (case.size("tensor") if axis == DENSE and alone else 1), ranks)
            gathered += part
            seconds += part / (link(case, axis)[1] * LINK_SHARE)
    if not alone:
        return gathered, 0.0, seconds
    way = case.hardware.host_bandwidth if sampling.shared or sampling.apart else case.hardware.bandwidth / 2
    return gathered, float(size), seconds + size / (way * LINK_SHARE)
