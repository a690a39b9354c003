"""Host memory of a rank's process, besides the memory of its device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch

from fppo.rollout.pool import Policy
from fppo.rollout.sync import pieces
from fppo.runtime.checkpoint import STAGE_BYTES
from fppo.settings.model import params_on_host
from fppo.studies.plan import passes
from fppo.studies.plan.case import BUILT_FOR_GPUS, CUDA_PROCESS, PROCESS, TRAINED, Case, pinned
from fppo.studies.plan.passes import Built, base_dtype, every_shape, models_of, shard_shapes
from fppo.studies.plan.track import Phase

STATE, GRADS, AWAY, READ, COPIES, BUCKET, RECEIVED, COLUMNS, ITSELF = (
    "state between uses",
    "gradients that came",
    "activations put away",
    "weights that are read",
    "copies for the checkpoint",
    "weights on their way",
    "weights that came",
    "columns of the batch",
    "the process itself",
)
OPTIMIZER = "optimizer"  # the end of the kinds of what optimizers keep, as "actor's optimizer"
POOL_BUCKET: int = attrs.fields(Policy).bucket_bytes.default


@attrs.frozen
class HostMemory:
    """Bytes of host memory by kind: `rest` for the lifetime of the process, in addition `starting` while it starts, and
    `meanwhile` while it sends weights or writes a checkpoint. `files` are bytes on disk in place of memory, which a
    checkpoint doubles while it is written."""

    rest: Mapping[str, float]
    starting: Mapping[str, float]
    meanwhile: Mapping[str, float]
    files: float = 0.0

    @property
    def needs(self) -> float:
        """The peak in bytes."""
        moving = max(sum(self.starting.values()), sum(self.meanwhile.values()))
        return sum(self.rest.values()) + moving


def host_of(case: Case, built: Built, stages: Mapping[str, Sequence[Phase]] = MappingProxyType({})) -> HostMemory:
    """Plan the host memory of a rank's process with these stages."""
    on_gpu, state = case.hardware.on_gpu, state_of(case, built)
    in_files = [name for name, (on_host, _) in state.items() if case.moments_in_files and on_host and OPTIMIZER in name]
    files = sum(sum(state.pop(name)[1]) for name in in_files)
    away = [pinned(size) if on_gpu else size for on_host, sizes in state.values() if on_host for size in sizes]
    copies = sum(sum(sizes) for name, (_, sizes) in state.items() if name.startswith(TRAINED))
    rest = {
        ITSELF: float(CUDA_PROCESS if on_gpu else process_bytes()),
        STATE: float(sum(away)),
        GRADS: gradient_bytes(case, built),
    }
    rest |= {AWAY: away_bytes(case, stages), COLUMNS: case.columns, RECEIVED: received_bytes(case, built)}
    return HostMemory(
        rest=rest,
        starting={READ: read_bytes(case, built)},
        # what a checkpoint's thread writes, and the buffer for copies from a GPU
        meanwhile={
            COPIES: float(copies + (STAGE_BYTES if copies and on_gpu else 0)),
            BUCKET: bucket_bytes(case, built),
        },
        files=float(files),
    )


def process_bytes() -> int:
    """Bytes of a process without a GPU, besides tensors, with the installed build of torch."""
    return PROCESS + (BUILT_FOR_GPUS if torch.version.cuda else 0)


def state_of(case: Case, built: Built) -> dict[str, tuple[bool, list[int]]]:
    """A rank's parameters and optimizer states between uses, by kind: whether they are on the host, and the bytes of
    each tensor. The base of adapters is not included."""
    found: dict[str, tuple[bool, list[int]]] = {}
    own_reference = case.reference and case.lora is None and case.has("reference")
    for name in [*filter(case.has, models_of(case)), *["reference"] * own_reference]:
        model, at = "actor" if name == "reference" else name, case.at_rest(name)
        sizes = _nbytes(shard_shapes(at, model, built).values(), at.dtype)
        found[f"{name}'s parameters"] = params_on_host(at.offload), sizes
        if name in TRAINED:
            found[f"{name}'s {OPTIMIZER}"] = at.offload != "none", passes.moments(at, shard_shapes(at, name, built))
    return found


def gradient_bytes(case: Case, built: Built) -> float:
    """Bytes of the gradients of an optimizer's step on the host, which roles take in turn."""
    needed = [0]
    for name in filter(case.has, models_of(case)):
        at = case.at_rest(name)
        if name in TRAINED and at.offload == "optimizer_step":
            sizes = _nbytes(shard_shapes(at, name, built).values(), at.dtype)
            needed.append(sum(pinned(size) if case.hardware.on_gpu else size for size in sizes))
    return float(max(needed))


def away_bytes(case: Case, stages: Mapping[str, Sequence[Phase]]) -> float:
    """Bytes of activations on the host: those that the fullest pass offloads (`model.offload_activations`), times the
    passes in flight on a pipeline."""
    passes_of_all = (phase for phases in stages.values() for phase in phases)
    most = max((phase.cost.other["away"] for phase in passes_of_all), default=0)
    return float(most * case.in_flight / case.virtual_stages)


def read_bytes(case: Case, built: Built) -> float:
    """The most bytes of host memory that one rank needs to load a model: the largest over its models, which are loaded
    one after another. For a model it is its largest tensor and, on the way to a GPU, the rank's part of the model. On a
    CPU that part is counted elsewhere, since it stays."""
    sizes = [0.0]
    for name in filter(case.has, models_of(case)):
        largest = max(shape.numel() for shape in built.model(case, name).whole_shapes.values())
        dtype = case.at_rest(name).dtype
        own = _nbytes(every_shape(case, name, built).values(), dtype if case.lora is None else base_dtype(case))
        sizes.append(largest * dtype.itemsize + (sum(own) if case.hardware.on_gpu else 0))
    return float(max(sizes))


def bucket_bytes(case: Case, built: Built) -> float:
    """Bytes of the memory through which weights go to vLLM's process or a pool's engine: the fullest bucket."""
    sampling = case.sampling
    if sampling is None or not sampling.shared:
        return 0.0
    own = (sampling.dtype or case.compute_dtype or case.dtype).itemsize
    size = 0
    if sampling.pool is not None:
        size += _fullest(case, built, case.dtype.itemsize, POOL_BUCKET)
    if sampling.engine == "vllm":
        size += _fullest(case, built, own, sampling.bucket // 3 if case.cuts else sampling.bucket)
    return float(size)


def received_bytes(case: Case, built: Built) -> float:
    """Bytes of the policy on a rank of an engine pool, which receives it whole before its vLLM does; 0 for any other
    engine."""
    sampling = case.sampling
    if sampling is None or sampling.pool is None or sampling.engine != "vllm":
        return 0.0
    shapes = built.model(case, "actor").plain.whole_shapes.values()
    return float(sum(shape.numel() for shape in shapes) * case.dtype.itemsize)


def _fullest(case: Case, built: Built, width: int, budget: int) -> int:
    shapes = built.model(case, "actor").plain.whole_shapes
    sizes = {name: shape.numel() * width for name, shape in shapes.items()}
    return max(sum(sizes[name] for name in piece) for piece in pieces(sizes, budget))


def _nbytes(shapes: Iterable[Sequence[int]], dtype: torch.dtype) -> list[int]:
    return [math.prod(shape) * dtype.itemsize for shape in shapes]
