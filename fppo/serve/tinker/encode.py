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
from fppo.serve.tinker.futures import FailedRequest, Payload
from fppo.serve.tinker.runs import PassOutputs

EMPTY = -99999.0  # the log-prob of an entry that there is no token for


def json_payload(value: Mapping[str, Any]) -> Payload:
    """A result in JSON."""
    return Payload(json.dumps(value).encode())


def error_of(failed: FailedRequest) -> dict[str, str]:
    """The protocol's error."""
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


def sample_payload(finished: Sequence[FinishedRequest]) -> Payload:
    """The result of a request for samples of a prompt, which the first of them may have scored."""
    message = pb.SampleResponse()
    for each in finished:
        sequence = message.sequences.add()
        sequence.stop_reason = pb.STOP_REASON_STOP if each.end == "stop" else pb.STOP_REASON_LENGTH
        sequence.tokens = _bytes(each.tokens, np.int32)
        sequence.logprobs = _bytes(each.log_probs, np.float32)
    return Payload(message.SerializeToString(), proto=True)
