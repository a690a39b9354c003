"""Records of samples, for losses that need log-probs of sampling: datums name the samples that they come from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from fppo._errors import printable
from fppo.rollout.requests import FinishedRequest
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.decode import TinkerBounds, refused, tensor_of
from fppo.serve.tinker.encode import model_log_probs
from fppo.serve.tinker.provenance import SampledRecord, TargetRun, with_records
from fppo.serve.tinker.samples import SampleWork

_RECORD = 128  # tokens that a record counts for the memory of its tensors, beside its own tokens


class SampleRecords:
    """The records of a server's samples, by their names: the newest of up to `max_tokens` tokens. Any thread may
    call."""

    def __init__(self, max_tokens: int = 1 << 24) -> None:
        self._most, self._size = max_tokens, 0
        self._lock = threading.Lock()
        self._held: OrderedDict[str, SampledRecord] = OrderedDict()

    def add(self, work: SampleWork, finished: Sequence[FinishedRequest]) -> None:
        """Record the samples of a prompt."""
        prompt = torch.tensor(work.ids)
        with self._lock:
            for each in finished:
                record = SampledRecord(prompt, each.tokens, model_log_probs(each).float())
                self._held[each.name] = record
                self._size += _size(record)
            while self._size > self._most:
                _, old = self._held.popitem(last=False)
                self._size -= _size(old)

    def resolve(self, message: pb.ForwardBackwardRequest, session: str, bounds: TinkerBounds) -> None:
        """Write the recorded log-probs of the samples that datums name into the datums.

        Raises Refusal, also for samples of another session.
        """
        for place, datum in enumerate(message.data):
            if not datum.loss_fn_input_spans:
                if "sampled" in datum.loss_fn_inputs:
                    continue
                advice = "sample with record_stability_info, and give its provenance (Datum.with_provenance)"
                raise refused(f"data[{place}]", f"stable_reinforce needs the samples that it comes from: {advice}")
            try:
                resolved = self._resolved(datum, f"data[{place}]", session, bounds)
            except ValueError as error:
                raise refused(f"data[{place}]", str(error)) from error
            for name in ("logprobs", "sampled"):
                _write(datum.loss_fn_inputs[name], resolved.inputs[name])
            del datum.loss_fn_input_spans[:]
            del datum.model_input_spans[:]

    def _resolved(self, datum: pb.Datum, name: str, session: str, bounds: TinkerBounds) -> Datum:
        if "target_tokens" not in datum.loss_fn_inputs:
            raise refused(name, "there is no target_tokens")
        targets = tensor_of(datum.loss_fn_inputs["target_tokens"], f"{name}.target_tokens", bounds)
        found = [_run_of(span) for span in datum.loss_fn_input_spans]
        named = {run.sequence_id for run in found}
        if other := next((each for each in named if not each.startswith(f"{session}:")), None):
            raise Refusal(f"{name}: the sample {printable(other, 120)} is of another session")
        with self._lock:
            records = {each: self._held[each] for each in named if each in self._held}
            for each in records:
                self._held.move_to_end(each)
        return with_records(Datum(tokens=targets.flatten(), targets=targets), found, records)


def _size(record: SampledRecord) -> int:
    return len(record.prompt) + len(record.tokens) + _RECORD


def _run_of(span: pb.ProvenanceSpan) -> TargetRun:
    sampled = span.WhichOneof("span") == "sampled_tokens"
    own = span.sampled_tokens if sampled else span.prompt_tokens
    return TargetRun(own.sequence_id, own.offset, own.length, sampled)


def _write(message: pb.Tensor, value: Tensor) -> None:
    message.Clear()
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(value.shape)
    message.dense = value.numpy().astype(np.float32).tobytes()
