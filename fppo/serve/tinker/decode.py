"""Requests of the tinker protocol as values: what a body holds is checked here, before anything is kept or run.

Types are those of the `tinker` package, whose client writes these bodies.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import attrs
import numpy as np
import torch
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from fppo._errors import printable
from fppo.batch import RowInputs
from fppo.data.images import ImageReader
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.futures import Category
from fppo.serve.tinker.journal import JournalRecord
from fppo.serve.tinker.runs import OPTIMIZERS, Adapters, StepParams

M = TypeVar("M", bound=BaseModel)
PROTO = "application/x-protobuf"
MOST_NUMBER = 1 << 62  # of requests of a run, or of a sampling session
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_TTL = (3600, 10 * 366 * 24 * 3600)  # seconds


@attrs.frozen(kw_only=True)
class TinkerBounds:
    """The bounds of what a request may hold."""

    body_bytes: int = 64 << 20  # of a body, once it is decompressed
    body_seconds: float = 60.0  # until its last byte has come
    datums: int = 1024  # of a pass
    tokens: int = 1 << 22  # of a pass, over all datums
    numbers: int = 1 << 24  # in one tensor, sparse ones written out
    decoded: int = 1 << 24  # in all tensors of a pass together, sparse ones written out
    padded: int = 1 << 26  # of a pass, in one tensor of all its rows: datums times longest times most targets
    samples: int = 4096  # of one prompt
    drawn: int = 1 << 25  # likeliest tokens of all draws of a prompt: samples times their tokens times the most of each
    pixels: int = 1 << 26  # of all images of a pass, or of a prompt
    scored: int = 1 << 22  # log-probs of a prompt: its tokens times the width of what is to be scored
    drawn_top: int = 1024  # likeliest tokens of each draw
    stops: int = 64
    metadata: int = 16 << 10  # characters of what a user attaches
    open_requests: int = 8192  # of a key, that have no result yet
    open_bytes: int = 1 << 30  # of all requests that wait


@attrs.frozen
class CreateVerb:
    """A run's first request; the content is in the run's `RunInfo`."""


@attrs.frozen(kw_only=True)
class PassVerb:
    """A forward pass over data, with `backward` also one backward, whose gradients are added to the run's."""

    data: tuple[Datum, ...]
    loss: str  # its name
    config: Mapping[str, float | str]
    backward: bool


@attrs.frozen(kw_only=True)
class StepVerb:
    """A step of the optimizer; `kind` is the family of optimizers that its `params` are for."""

    kind: str
    params: StepParams


@attrs.frozen(kw_only=True)
class SaveVerb:
    """Weights to be saved: all of a run's state, those that sampling needs, or files for other programs."""

    kind: Literal["weights", "sampler_weights", "external_weights"]
    name: str
    seconds: int | None = None  # its time to live
    overwrite: bool = False
    metadata: Mapping[str, str] | None = None


@attrs.frozen(kw_only=True)
class SnapshotVerb:
    """Weights for the sampling session number `session`: fixed ones or, if `inflight`, the run's newest."""

    session: int
    inflight: bool


@attrs.frozen(kw_only=True)
class LoadVerb:
    """Weights of a checkpoint to continue from, and its optimizer's state."""

    path: str
    optimizer: bool


@attrs.frozen(kw_only=True)
class RefusedVerb:
    """A refused request, which keeps its turn. If it `breaks`, gradients are missing, and the next step fails."""

    error: str
    breaks: bool = True
    category: Category = "user"


@attrs.frozen
class LaterVerb:
    """A request that an earlier server recorded. It is decoded in its turn: one at a time is in memory."""

    record: JournalRecord


RunVerb = CreateVerb | PassVerb | StepVerb | SaveVerb | SnapshotVerb | LoadVerb | RefusedVerb | LaterVerb


def memory_of(verb: RunVerb) -> int:
    """The bytes of a request's tensors."""
    if not isinstance(verb, PassVerb):
        return 0
    tensors = [x for datum in verb.data for x in (datum.tokens, datum.targets, *datum.inputs.values())]
    tensors += [x for datum in verb.data if datum.images is not None for x in datum.images.tensors.values()]
    return sum(x.numel() * x.element_size() for x in tensors)


def refused(name: str, text: str) -> Refusal:
    """The refusal of a field."""
    return Refusal(f"{name}: {text}")


def of_type(kind: type[M], value: Mapping[str, Any] | bytes) -> M:
    """A body as one of the protocol's types. Raises Refusal, which names the field."""
    try:
        return kind.model_validate_json(value) if isinstance(value, bytes) else kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise Refusal(printable(f"{place}: {first['msg']}", 500)) from error


def number_of(value: Any, name: str = "seq_id", *, low: int = 0) -> int:
    """Check a whole number of a request, of at least `low`. Raises Refusal."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < MOST_NUMBER:
        raise refused(name, f"{value!r} is no number from {low} to {MOST_NUMBER - 1}")
    return value


def pass_message(body: bytes) -> pb.ForwardBackwardRequest:
    """The message of a pass. Raises Refusal for any other body."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refusal("the body is no ForwardBackwardRequest in protobuf") from error
    return message


def adds_gradients(kind: str, body: bytes) -> bool:
    """Whether a request of a run is to add gradients: a pass that is not forward alone, or does not decode."""
    if kind != "pass":
        return False
    try:
        return not pass_message(body).forward_only
    except Refusal:
        return True


def pass_verb(
    message: pb.ForwardBackwardRequest,
    *,
    bounds: TinkerBounds,
    vocabulary: int,
    limit: int,
    images: ImageReader | None = None,
) -> PassVerb:
    """The pass of a message, for a model with `vocabulary` tokens and rows of at most `limit`. Raises Refusal."""
    if not 0 < len(message.data) <= bounds.datums:
        raise refused("data", f"{len(message.data)} datums; give 1 to {bounds.datums}")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    _check_sizes(message, bounds, vocabulary)
    data, total = list[Datum](), 0
    for place, datum in enumerate(message.data):
        data.append(_datum(datum, f"data[{place}]", bounds, vocabulary, limit, images))
        total += len(data[-1].tokens)
        if total > bounds.tokens:
            raise refused("data", f"over {bounds.tokens:,} tokens; cut the batch into several calls")
    longest = max(len(datum.tokens) for datum in data)
    widest = max(datum.targets.shape[1] if datum.targets.ndim == 2 else 1 for datum in data)
    if len(data) * longest * widest > bounds.padded:
        what = f"{len(data)} datums of up to {longest} tokens with up to {widest} targets each"
        raise refused("data", f"{what}: over {bounds.padded:,} numbers; cut the batch into several calls")
    return PassVerb(data=tuple(data), loss=message.loss_fn, config=config, backward=not message.forward_only)


def _datum(
    message: pb.Datum, name: str, bounds: TinkerBounds, vocabulary: int, limit: int, images: ImageReader | None
) -> Datum:
    parts = [_part(chunk, f"{name}.model_input", vocabulary) for chunk in message.model_input]
    ids, seen = joined_input(parts, f"{name}.model_input", images)
    if not 0 < len(ids) <= limit:
        raise refused(f"{name}.model_input", f"{len(ids)} tokens; the model takes 1 to {limit}")
    inputs = {key: tensor_of(value, f"{name}.{key}", bounds) for key, value in message.loss_fn_inputs.items()}
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise refused(f"{name}.loss_fn_inputs", f"there is no target_tokens; there are {sorted(inputs)}")
    if targets.is_floating_point():
        raise refused(f"{name}.target_tokens", "give int64 ids")
    if targets.ndim not in (1, 2) or len(targets) != len(ids):
        raise refused(f"{name}.target_tokens", f"shape {[*targets.shape]}; the input has {len(ids)} tokens")
    _check_ids(targets.numpy(), f"{name}.target_tokens", vocabulary)
    return Datum(
        tokens=torch.tensor(ids),
        targets=targets.long(),
        inputs={key: value if value.is_floating_point() else value.float() for key, value in inputs.items()},
        images=seen,
    )


def _check_sizes(message: pb.ForwardBackwardRequest, bounds: TinkerBounds, vocabulary: int) -> None:
    """Raise Refusal for tensors that are too large, alone or together, before a sparse one is made dense."""
    numbers = pixels = 0
    for place, datum in enumerate(message.data):
        for key, tensor in datum.loss_fn_inputs.items():
            name, shape = f"data[{place}].{key}", [*tensor.shape]
            _check_shape(shape, name, bounds)
            if len(shape) == 2 and shape[1] > vocabulary:
                raise refused(name, f"shape {shape}: more columns than the model's {vocabulary} tokens")
            numbers += math.prod(shape) if shape else len(tensor.dense) // 4
            if numbers > bounds.decoded:
                raise refused("data", f"over {bounds.decoded:,} numbers in all; cut the batch into several calls")
        for chunk in datum.model_input:
            pixels += pixels_of(chunk.image.data) if chunk.WhichOneof("chunk") == "image" else 0
            if pixels > bounds.pixels:
                raise refused("data", f"over {bounds.pixels:,} pixels in all images; cut the batch into several calls")


def pixels_of(data: bytes) -> int:
    """The number of pixels of an image, by the head of its file; 0 if it is no image."""
    try:
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            return image.width * image.height
    except Exception:  # an error, or that pillow is missing, is reported where the image is read
        return 0


class ImagePart(NamedTuple):
    """An image in an input: its file, and the number of its tokens that the client expects."""

    data: bytes
    expected: int | None


InputPart = list[int] | ImagePart


def joined_input(
    parts: Sequence[InputPart], name: str, images: ImageReader | None
) -> tuple[list[int], RowInputs | None]:
    """The tokens of an input's parts, and its images' inputs. Raises Refusal."""
    if images is None:
        tokens: list[int] = []
        for part in parts:
            if isinstance(part, ImagePart):
                raise refused(name, "a chunk of images: this model takes text alone")
            tokens += part
        return tokens, None
    try:
        for part in parts:
            if isinstance(part, ImagePart) and part.expected is not None:
                found = len(images.joined([part.data])[0])
                if found != part.expected:
                    raise refused(name, f"an image has {found} tokens, and {part.expected} were expected")
        return images.joined([part.data if isinstance(part, ImagePart) else part for part in parts])
    except Refusal:
        raise
    except Exception as error:  # processors raise what they like
        raise refused(name, printable(str(error), 500)) from error


def _part(chunk: pb.Chunk, name: str, vocabulary: int) -> InputPart:
    kind = chunk.WhichOneof("chunk")
    if kind == "image":
        image = chunk.image
        if image.HasField("override_dimensions"):
            raise refused(name, "an image with override_dimensions: send it in the size that the model is to see")
        return ImagePart(image.data, image.expected_tokens if image.HasField("expected_tokens") else None)
    if kind != "encoded_text":
        raise refused(name, f"a chunk of {'audio' if kind == 'dmel' else 'nothing'}: give tokens, or images")
    data = chunk.encoded_text.tokens
    if len(data) % 4:
        raise refused(name, f"{len(data)} bytes are no int32 tokens")
    ids = np.frombuffer(data, np.int32)
    _check_ids(ids, name, vocabulary)
    return ids.tolist()


def _check_ids(ids: np.ndarray, name: str, vocabulary: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        wrong = ids[(ids < 0) | (ids >= vocabulary)].flat[0]
        raise refused(name, f"the token {wrong} is none of the model's {vocabulary}")


def tensor_of(message: pb.Tensor, name: str, bounds: TinkerBounds) -> Tensor:
    """A tensor of the protocol; a sparse one is made dense, with zeros. Raises Refusal."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise refused(name, f"dtype {message.dtype}: give float32 or int64")
    shape = [*message.shape]
    _check_shape(shape, name, bounds)
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        rows, columns = (_numbers(x, np.dtype(np.int64), name) for x in (csr.crow_indices, csr.col_indices))
        return torch.from_numpy(dense_of(_numbers(csr.values, np.dtype(dtype), name), rows, columns, shape, name))
    values = _numbers(message.dense, np.dtype(dtype), name)
    if shape and math.prod(shape) != len(values):
        raise refused(name, f"shape {shape} with {len(values)} numbers")
    return torch.from_numpy(values.reshape(shape or [len(values)]).copy())


def _check_shape(shape: Sequence[int], name: str, bounds: TinkerBounds) -> None:
    if len(shape) > 2 or any(size < 0 for size in shape) or math.prod(shape) > bounds.numbers:
        raise refused(name, f"shape {shape}: give one or two dimensions, and at most {bounds.numbers:,} numbers")


def _numbers(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise refused(name, f"{len(data)} bytes are no numbers of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)


def dense_of(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int], name: str, *, fill: int = 0
) -> np.ndarray:
    """A sparse matrix of this shape made dense, with `fill` where it has no value (CSR: `rows` are its row pointers).
    Raises Refusal."""
    if len(shape) != 2 or len(rows) != shape[0] + 1 or len(columns) != len(values):
        raise refused(name, f"sparse of shape {list(shape)}, {len(rows)} row pointers, {len(columns)} columns")
    if rows[0] != 0 or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise refused(name, "its row pointers do not rise from 0 to the number of values")
    if len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise refused(name, f"a column outside of 0 to {shape[1] - 1}")
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def step_verb(body: Mapping[str, Any]) -> StepVerb:
    """The step of a request. Raises Refusal."""
    request = of_type(types.OptimStepRequest, body)
    given = request.optim_params
    if isinstance(given, types.AdamParams):
        return StepVerb(kind="adamw", params=_step_params(given.model_dump()))
    if given.type != "muon":
        advice = "its formula is not published; give muon, or adamw" if given.type == "dimuon" else "give adamw or muon"
        raise refused("optimizer_params.type", f"{printable(given.type, 40)!r}: {advice}")
    fields = {name: value for name, value in given.model_dump().items() if name != "type"}
    return StepVerb(kind="muon", params=_step_params(fields))


def _step_params(fields: Mapping[str, Any]) -> StepParams:
    """The numbers of a step. Raises Refusal, which names the number."""
    known = [field.name for field in attrs.fields(StepParams)]
    for name, value in fields.items():
        if name not in known:
            raise refused(printable(name, 60), f"a step has {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(name, f"{printable(repr(value), 60)} is no number")
    clip = fields.get("grad_clip_norm", 0.0)
    given = {**fields, "grad_clip_norm": max(clip, 0.0) if math.isfinite(clip) else clip}
    try:
        return StepParams(**given)
    except ValueError as error:
        raise Refusal(f"optim_params: {error}") from error


def save_verb(body: Mapping[str, Any], bounds: TinkerBounds) -> SaveVerb:
    """The saving of a run's state. Raises Refusal."""
    request = of_type(types.SaveWeightsRequest, body)
    if request.path is None:
        raise refused("path", "give the checkpoint a name")
    return SaveVerb(
        kind="weights",
        name=name_of(request.path),
        seconds=seconds_of(request.ttl_seconds),
        overwrite=request.overwrite,
        metadata=metadata_of(request.user_metadata, bounds),
    )


def sampler_verb(body: Mapping[str, Any], bounds: TinkerBounds) -> SaveVerb | SnapshotVerb:
    """The saving of weights to sample from, under a name or for a session alone. Raises Refusal."""
    request = of_type(types.SaveWeightsForSamplerRequest, body)
    if request.path is not None:
        return SaveVerb(
            kind="sampler_weights",
            name=name_of(request.path),
            seconds=seconds_of(request.ttl_seconds),
            metadata=metadata_of(request.user_metadata, bounds),
        )
    if request.sampling_session_seq_id is None:
        raise refused("path, sampling_session_seq_id", "give one of them")
    number = number_of(request.sampling_session_seq_id, "sampling_session_seq_id")
    return SnapshotVerb(session=number, inflight=request.kind == "inflight")


def external_verb(body: Mapping[str, Any]) -> SaveVerb:
    """The saving of files for other programs. Raises Refusal."""
    request = of_type(types.SaveWeightsExternalRequest, body)
    if request.age_encryption_recipients:
        raise refused("age_encryption_recipients", "this server encrypts no files: leave it out")
    return SaveVerb(kind="external_weights", name=name_of(request.path), seconds=seconds_of(request.ttl_seconds))


def load_verb(request: types.LoadWeightsRequest) -> LoadVerb:
    """The loading of a checkpoint. Raises Refusal."""
    if request.weights_access_token is not None:
        raise refused("weights_access_token", "this server has its own checkpoints alone: publish the other key's")
    return LoadVerb(path=request.path[:1000], optimizer=request.optimizer)


def adapters_of(config: types.LoraConfig | None, seed: int) -> Adapters:
    """The adapters that a run is to train; rank 0, and no configuration, stand for all weights. Raises Refusal."""
    if config is None:
        return Adapters(rank=0, seed=seed, attention=True, mlp=True, unembed=True)
    if not 0 <= config.rank <= 4096:
        raise refused("lora_config.rank", f"{config.rank}: give 1 to 4096, or 0 to train all weights")
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise refused("lora_config", "nothing would be trained: set train_attn, train_mlp or train_unembed")
    chosen = seed if config.seed is None else config.seed % (1 << 64)
    return Adapters(
        rank=config.rank,
        seed=chosen,
        attention=config.train_attn,
        mlp=config.train_mlp,
        unembed=config.train_unembed,
    )


def optimizer_of(config: types.OptimizerConfig | None) -> str:
    """The optimizer's family. Raises Refusal."""
    kind = "adamw" if config is None else config.type
    if kind == "dimuon":
        raise refused("optimizer_config.type", "'dimuon': its formula is not published; give muon, or adamw")
    if kind not in OPTIMIZERS:
        raise refused("optimizer_config.type", f"{printable(kind, 40)!r}: there are {', '.join(OPTIMIZERS)}")
    return kind


_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


def name_of(value: str) -> str:
    """Check the name of a checkpoint, which must be a plain file name. Raises Refusal."""
    if not 0 < len(value) <= 128 or not _LETTERS.issuperset(value) or value.startswith("."):
        text = "give 1 to 128 letters, digits, dots, hyphens and underscores, the first of them no dot"
        raise refused("path", f"{printable(value, 60)!r} is no name of a checkpoint: {text}")
    return value


def seconds_of(value: int | None) -> int | None:
    """Check a time to live in seconds. Raises Refusal."""
    if value is not None and not _TTL[0] <= value <= _TTL[1]:
        raise refused("ttl_seconds", f"{value}: give {_TTL[0]} (an hour) to {_TTL[1]} (ten years), or nothing")
    return value


def metadata_of(value: Mapping[str, Any] | None, bounds: TinkerBounds) -> dict[str, str] | None:
    """The metadata that a user attaches to a session, a run or a checkpoint, as texts. Raises Refusal."""
    if value is None:
        return None
    texts = {str(name): each if isinstance(each, str) else str(each) for name, each in value.items()}
    if sum(len(name) + len(each) for name, each in texts.items()) > bounds.metadata:
        raise refused("user_metadata", f"over {bounds.metadata} characters")
    return texts
