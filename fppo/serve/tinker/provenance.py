"""Provenance: which sampled sequence each target of a datum comes from, checked against what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fppo.serve.tinker.data import Datum


@attrs.frozen(eq=False)
class SampledRecord:
    """A sequence as it was sampled: its prompt [P] and tokens [N], int64, and their log-probs [N], float32."""

    prompt: Tensor
    tokens: Tensor
    log_probs: Tensor


@attrs.frozen
class TargetRun:
    """A run of a datum's targets: tokens `offset` to `offset + length` of a sequence, sampled or of its prompt."""

    sequence_id: str
    offset: int
    length: int
    sampled: bool


def with_records(datum: Datum, runs: Sequence[TargetRun], records: Mapping[str, SampledRecord]) -> Datum:
    """Add to a training datum of T tokens what was recorded when its targets were sampled. Returns the datum with two
    inputs [T]: "logprobs", the recorded log-probs, and "sampled", 1.0 where the target was sampled; both are 0.0
    elsewhere.

    `runs` say for consecutive stretches of the targets which part of a sampled sequence, or of its prompt, they are.
    `records` has the sequences by `sequence_id`.

    Raises ValueError for runs that do not cover the T targets exactly, for a sequence without a record or shorter than
    its run, and for sampled targets that differ from the recorded tokens. Targets in a prompt are not compared: clients
    put any token there, since these targets have no weight.
    """
    count = len(datum.tokens)
    if datum.targets.dim() != 1:
        raise ValueError(f"provenance is of one target for each token; the targets are {list(datum.targets.shape)}")
    if any(run.length < 0 or run.offset < 0 for run in runs) or sum(run.length for run in runs) != count:
        raise ValueError(f"runs of {sum(run.length for run in runs)} targets do not tile the datum's {count}")
    log_probs, sampled, start = torch.zeros(count), torch.zeros(count), 0
    for run in runs:
        if run.sequence_id not in records:
            raise ValueError(
                f"sequence {run.sequence_id!r} has no record in this session: sample with record_stability_info=True, "
                "and train on it before the record expires"
            )
        stop, record = start + run.length, records[run.sequence_id]
        every = record.tokens if run.sampled else record.prompt
        kind = "sampled" if run.sampled else "prompt"
        if run.offset + run.length > len(every):
            raise ValueError(
                f"sequence {run.sequence_id!r} has {len(every)} {kind} tokens; the run wants {run.offset} to "
                f"{run.offset + run.length}"
            )
        if run.sampled:
            own = slice(run.offset, run.offset + run.length)
            if not torch.equal(every[own], datum.targets[start:stop]):
                raise ValueError(f"targets {start} to {stop} are not the tokens that {run.sequence_id!r} sampled")
            log_probs[start:stop], sampled[start:stop] = record.log_probs[own], 1.0
        start = stop
    return attrs.evolve(datum, inputs={**datum.inputs, "logprobs": log_probs, "sampled": sampled})
