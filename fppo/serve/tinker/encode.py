"""Results of the tinker protocol as bodies of responses: protobuf for passes and samples, JSON for all else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from fppo.rollout.requests import FinishedRequest
from fppo.rollout.scores import TopTokens
from fppo.serve.tinker.futures import FailedRequest, Payload
from fppo.serve.tinker.runs import PassOutputs
from fppo.serve.tinker.samples import SampleWork

EMPTY = -99999.0  # the log-prob of an entry without a token


def json_payload(value: Mapping[str, Any]) -> Payload:
    """A result in JSON."""
    return Payload(json.dumps(value).encode())


def error_of(failed: FailedRequest) -> dict[str, str]:
    """A failed request as the protocol's error."""
    return {"error": failed.error, "category": failed.category}


def pass_payload(outputs: PassOutputs) -> Payload:
    """The result of a pass: tensors of each datum, in records of equal widths, and metrics."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in outputs.metrics.items():
        message.metrics[name] = float(value)
    group: list[Mapping[str, Tensor]] = []
    for each in outputs.per_datum:
        if group and _widths(each) != _widths(group[0]):
            _add_record(message, group)
            group = []
        group.append(each)
    _add_record(message, group)
    return Payload(message.SerializeToString(deterministic=True), proto=True)


def _widths(fields: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape[1:]) for name, value in fields.items()}


def _add_record(message: pb.ForwardBackwardOutput, group: Sequence[Mapping[str, Tensor]]) -> None:
    record = message.loss_fn_outputs.add()
    record.num_datums = len(group)
    for name in group[0]:
        values = [each[name].detach().to("cpu", torch.float32) for each in group]
        field = record.fields[name]
        field.dtype = pb.DTYPE_FLOAT32
        field.data = b"".join(_bytes(value, np.float32) for value in values)
        field.offsets = np.cumsum([0, *(value.numel() * 4 for value in values)], dtype=np.int64).tobytes()
        field.trailing_shape.extend(values[0].shape[1:])


def _bytes(value: Tensor, dtype: Any) -> bytes:
    return np.ascontiguousarray(value.detach().cpu().numpy().astype(dtype)).tobytes()


def sample_payload(finished: Sequence[FinishedRequest], work: SampleWork) -> Payload:
    """The result of a request for samples of a prompt; the first sample may have scores of the prompt.

    Log-probs are the model's own, at a temperature of 1, as those of training passes are.
    """
    message = pb.SampleResponse()
    for each in finished:
        sequence = message.sequences.add()
        sequence.stop_reason = pb.STOP_REASON_STOP if each.end == "stop" else pb.STOP_REASON_LENGTH
        sequence.tokens = _bytes(each.tokens, np.int32)
        sequence.logprobs = _bytes(model_log_probs(each), np.float32)
        if work.top and each.drawn_scores is not None:
            _write_top(sequence.topk_sampled_logprobs, each.drawn_scores.top)
    scores = finished[0].prompt_scores
    if scores is None:
        return Payload(message.SerializeToString(), proto=True)
    if scores.log_probs is not None:
        message.prompt_logprobs = _bytes(scores.log_probs, np.float32)
    if scores.top is not None:
        _write_top(message.topk_prompt_logprobs, scores.top)
    if scores.targets is not None:
        _write_targets(message.target_prompt_logprobs, scores.targets, work)
    if scores.draws is not None:
        _write_tensor(message.prompt_alt_tokens.tokens, scores.draws.ids, np.int32)
        _write_tensor(message.prompt_alt_tokens.logprobs, scores.draws.log_probs, np.float32)
    return Payload(message.SerializeToString(), proto=True)


def model_log_probs(finished: FinishedRequest) -> Tensor:
    """The log-probs of draws under the model's own distribution, at a temperature of 1."""
    return finished.log_probs if finished.drawn_scores is None else finished.drawn_scores.log_probs


def _write_top(message: pb.TopkLogprobs, top: TopTokens) -> None:
    missing = top.ids < 0
    message.token_ids = _bytes(top.ids.masked_fill(missing, 0), np.int32)
    message.logprobs = _bytes(top.log_probs.masked_fill(missing, EMPTY), np.float32)
    message.length, message.k = top.ids.shape


def _write_targets(message: pb.Tensor, log_probs: Tensor, work: SampleWork) -> None:
    """Write log-probs in the layout of the request's targets; 0 where a target names no token."""
    assert work.scores.targets is not None
    values = log_probs.masked_fill(work.scores.targets < 0, 0.0)
    if work.sparse is None:
        _write_tensor(message, values, np.float32)
        return
    rows, columns = (np.asarray(x, dtype=np.int64) for x in work.sparse)
    places = np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(log_probs.shape)
    message.sparse_csr.values = values.numpy()[places].astype(np.float32).tobytes()
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = rows.tobytes(), columns.tobytes()


def _write_tensor(message: pb.Tensor, value: Tensor, dtype: Any) -> None:
    message.dtype = pb.DTYPE_INT32 if dtype is np.int32 else pb.DTYPE_FLOAT32
    message.shape.extend(value.shape)
    message.dense = _bytes(value, dtype)
