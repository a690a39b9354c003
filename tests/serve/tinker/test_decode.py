"""Bodies of the tinker protocol as values: what they ask for, and what is refused before anything is kept."""

import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from fppo.serve.refusal import Refusal
from fppo.serve.tinker import decode
from fppo.serve.tinker.decode import StepVerb, TinkerBounds
from fppo.serve.tinker.runs import StepParams

RUN = {"model_id": "x", "seq_id": 1}
MUON = {"type": "muon", "learning_rate": 0.5}


@pytest.mark.parametrize(
    ("given", "kind", "params"),
    [
        ({"adam_params": {}}, "adamw", StepParams()),
        ({"optim_params": {"beta1": 0.5, "grad_clip_norm": -1.0}}, "adamw", StepParams(beta1=0.5)),
        (
            {"optimizer_params": {**MUON, "weight_decay": 0.25, "grad_clip_norm": 2.0}},
            "muon",
            StepParams(learning_rate=0.5, weight_decay=0.25, grad_clip_norm=2.0),
        ),
    ],
)
def test_a_step_is_by_the_optimizer_that_was_asked_for(given, kind, params):
    assert decode.step_verb(RUN | given) == StepVerb(kind=kind, params=params)


def loading(**more):
    return types.LoadWeightsRequest(path="tinker://x", optimizer=False, **more)


def image(**more):
    return pb.Chunk(image=pb.ImageChunk(data=b"x", **more))


def passed(*chunks):
    message = pb.ForwardBackwardRequest(data=[pb.Datum(model_input=chunks)])
    return decode.pass_verb(message, bounds=TinkerBounds(), vocabulary=9, limit=9)


def tensor(shape, count):
    return pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape, dense=np.zeros(count, np.float32).tobytes())


NOTHING = types.LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=False)
BOUNDS = TinkerBounds(metadata=10, numbers=8)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: decode.step_verb(RUN | {"optimizer_params": {**MUON, "momentum": 0.9}}),
            "momentum: a step has",
        ),
        (lambda: decode.step_verb(RUN | {"optimizer_params": {**MUON, "eps": "1"}}), "eps: .* is no number"),
        (lambda: decode.step_verb(RUN | {"optimizer_params": {"type": "dimuon"}}), "not published"),
        (lambda: decode.load_verb(loading(weights_access_token="secret")), "this server has its own checkpoints alone"),
        (lambda: decode.metadata_of({"name": "abcdefg"}, BOUNDS), "over 10 characters"),
        (lambda: decode.adapters_of(NOTHING, 0), "nothing would be trained"),
        (lambda: decode.optimizer_of(types.AdamOptimizerConfig.model_construct(type="sgd")), "'sgd': there are"),
        (lambda: passed(image(override_dimensions=pb.ImageDimensions())), "override_dimensions"),
        (lambda: decode.tensor_of(tensor([3], 2), "x", BOUNDS), r"shape \[3\] with 2 numbers"),
        (lambda: decode.tensor_of(tensor([3], 4), "x", BOUNDS), r"shape \[3\] with 4 numbers"),
        (lambda: decode.tensor_of(tensor([9], 9), "x", BOUNDS), "at most 8 numbers"),
    ],
)
def test_what_the_server_cannot_do_is_refused(ask, message):
    with pytest.raises(Refusal) as raised:
        ask()
    assert raised.match(message)


def test_what_is_within_the_bounds_is_taken():
    assert decode.load_verb(loading()).path == "tinker://x"
    assert decode.metadata_of({"name": "abcdef"}, BOUNDS) == {"name": "abcdef"}
    assert decode.tensor_of(tensor([2, 4], 8), "x", BOUNDS).shape == (2, 4)
    assert decode.tensor_of(tensor([], 3), "x", BOUNDS).shape == (3,)
