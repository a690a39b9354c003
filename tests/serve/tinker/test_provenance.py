"""Recorded sequences: their log-probs take the place of a datum's, and what was not sampled so is refused."""

import attrs
import pytest
import torch
from tinker.proto import tinker_public_pb2 as pb

from fppo.serve.refusal import Refusal
from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.decode import TinkerBounds
from fppo.serve.tinker.provenance import SampledRecord, TargetRun, with_records
from fppo.serve.tinker.records import SampleRecords

RECORDS = {
    "a": SampledRecord(torch.tensor([5, 6]), torch.tensor([7, 8, 9]), torch.tensor([-1.0, -2.0, -3.0])),
    "b": SampledRecord(torch.tensor([5, 6, 7, 8, 9, 3]), torch.tensor([4]), torch.tensor([-4.0])),
}
# prompt 5 6, sampled 7 8 9, said by others 3, sampled 4
DATUM = Datum(torch.tensor([5, 6, 7, 8, 9, 3]), torch.tensor([6, 7, 8, 9, 3, 4]), {"advantages": torch.ones(6)})
RUNS = (
    TargetRun("a", 1, 1, sampled=False),
    TargetRun("a", 0, 1, sampled=True),
    TargetRun("a", 1, 2, sampled=True),
    TargetRun("b", 5, 1, sampled=False),
    TargetRun("b", 0, 1, sampled=True),
)


def test_sampled_targets_have_their_recorded_log_probs():
    found = with_records(DATUM, RUNS, RECORDS)
    assert found.inputs["sampled"].tolist() == [0, 1, 1, 1, 0, 1]
    assert found.inputs["logprobs"].tolist() == [0, -1, -2, -3, 0, -4]
    assert found.inputs["advantages"] is DATUM.inputs["advantages"]


def test_targets_of_prompts_may_be_any():
    other = attrs.evolve(DATUM, targets=torch.tensor([0, 7, 8, 9, 0, 4]))
    assert with_records(other, RUNS, RECORDS).inputs["sampled"].tolist() == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda runs: runs[:-1], "runs of 5 targets do not tile the datum's 6"),
        (lambda runs: (*runs, TargetRun("a", 0, 1, sampled=True), TargetRun("a", 1, -1, sampled=True)), "do not tile"),
        (lambda runs: (TargetRun("a", -1, 1, sampled=False), *runs[1:]), "do not tile"),
        (lambda runs: (*runs[:-1], TargetRun("c", 0, 1, sampled=True)), "'c' has no record in this session"),
        (lambda runs: (*runs[:-1], TargetRun("b", 1, 1, sampled=True)), "has 1 sampled tokens"),
        (lambda runs: (TargetRun("a", 2, 1, sampled=False), *runs[1:]), "has 2 prompt tokens"),
        (lambda runs: (*runs[:-1], TargetRun("a", 0, 1, sampled=True)), "targets 5 to 6 are not the tokens"),
    ],
)
def test_runs_that_do_not_fit_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        with_records(DATUM, change(RUNS), RECORDS)


def test_several_targets_of_a_token_have_no_provenance():
    with pytest.raises(ValueError, match="one target"):
        with_records(attrs.evolve(DATUM, targets=DATUM.targets[:, None].expand(-1, 2)), RUNS, RECORDS)


def numbers(values):
    return pb.Tensor(dtype=pb.DTYPE_INT64, shape=[len(values)], dense=torch.tensor(values).numpy().tobytes())


def span(name):
    return pb.ProvenanceSpan(sampled_tokens={"sequence_id": name, "offset": 0, "length": 1})


@pytest.mark.parametrize(
    ("spans", "inputs", "says"),
    [
        ([], {}, r"data\[1\]: stable_reinforce needs the samples"),
        ([span("s:1")], {}, r"data\[1\]: there is no target_tokens"),
        ([span("s:1")], {"target_tokens": numbers([7])}, r"data\[1\]: .*'s:1' has no record"),
        ([span("t:1")], {"target_tokens": numbers([7])}, r"data\[1\]: the sample t:1 is of another session"),
    ],
)
def test_data_that_name_no_samples_of_the_session_are_refused(spans, inputs, says):
    """A datum that brings its samples stays as it is."""
    own = pb.Datum(loss_fn_inputs={"sampled": numbers([1])})
    other = pb.Datum(loss_fn_inputs=inputs, loss_fn_input_spans=spans)
    with pytest.raises(Refusal) as raised:
        SampleRecords().resolve(pb.ForwardBackwardRequest(data=[own, other]), "s", TinkerBounds())
    assert raised.match(says)
