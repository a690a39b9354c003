"""The passes, the sizes and the overrides of a case against counts by hand."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime.mesh import AXES
from fppo.studies.plan.case import (
    COMMUNICATOR,
    CONTEXT,
    FRAGMENTS,
    ROLES,
    WORKSPACE,
    Role,
    balanced,
    hardware_of,
    overhead,
    pinned,
    with_layers,
    with_sequences,
)
from fppo.studies.plan.passes import HEADS, models_of, rows_of, stages_of
from tests.studies.plan.cases import case, config

FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
OVERRIDES = {
    "critic": Role(tokens=128, compute_dtype="float16", checkpoint_layers=True, offload="none"),
    "reference": Role(offload="moments", dtype=torch.bfloat16),
    "reward model": Role(tokens=320, compute_dtype="float32", dtype=torch.bfloat16),
    "teacher": Role(offload="none"),
}
WHOLE = case(
    tokens=256,
    length=64,
    micro_batches=3,  # 12 sequences of a data rank
    forward_tokens=384,
    compute_dtype=BFLOAT16,
    checkpoint_layers="selective",
    offload="all",
    roles=OVERRIDES,
    reward_model=config(),
    teacher=config(),
)
# tokens and number of passes; the dtype of passes, recomputation, what is on the host, the dtype of parameters
AT = {
    "reward model": (256, 3, None, "selective", "all", BFLOAT16),  # 5 rows at most, in 3 equal passes
    "teacher": (384, 2, BFLOAT16, "selective", "none", torch.float32),
    "log-probs": (384, 2, BFLOAT16, "selective", "all", torch.float32),
    "reference": (384, 2, BFLOAT16, "selective", "moments", BFLOAT16),
    "values": (384, 2, FLOAT16, True, "none", torch.float32),
    "update critic": (128, 6, FLOAT16, True, "none", torch.float32),
    "update actor": (256, 3, BFLOAT16, "selective", "all", torch.float32),
}


@pytest.mark.parametrize("stage", ROLES)
def test_a_stage_has_the_passes_and_the_overrides_of_its_model(stage):
    tokens, passes, compute, again, offload, dtype = AT[stage]
    expected = attrs.evolve(
        WHOLE,
        tokens=tokens,
        micro_batches=passes,
        compute_dtype=compute,
        checkpoint_layers=again,
        offload=offload,
        dtype=dtype,
        forward_tokens=None,
        roles={},
    )
    assert WHOLE.at(stage) == expected
    plain = attrs.evolve(WHOLE, roles={}, forward_tokens=None)
    assert plain.at(stage) == plain


def test_stages_and_models_are_those_that_a_case_has():
    assert stages_of(WHOLE) == list(ROLES)
    assert models_of(WHOLE) == list(HEADS)
    bare = case(critic=False, reference=False)
    assert stages_of(bare) == ["log-probs", "update actor"]
    assert models_of(bare) == ["actor"]
    assert stages_of(attrs.evolve(WHOLE, only=("critic", "reward model"))) == [
        "reward model",
        "values",
        "update critic",
    ]
    assert stages_of(attrs.evolve(WHOLE, only=("actor", "reference"))) == ["log-probs", "reference", "update actor"]


def test_passes_of_updates_and_passes_without_gradients_share_prompts_as_their_rows_do():
    """Prompts of 48 tokens, responses of 16: 4 rows of two prompts in an update, 8 of one prompt before it."""
    what = case(tokens=256, length=64, response=0.25, micro_batches=4, together=2.0, forward_together=8.0, budget=160)
    update, before = what.at("update actor"), what.at("log-probs")
    assert (update.rows, update.micro_batches, update.together) == (4, 4, 2.0)
    assert update.distinct(4) == 2 * 48 + 4 * 16 == 160
    assert (before.rows, before.micro_batches, before.together) == (6, 3, 8.0)  # 16 rows, 7 of a prompt at most
    assert before.distinct(7) == 48 + 7 * 16 == 160
    assert update.shared == [48, 48]
    assert before.shared == [48] * 5
    assert update.computed == 160 / 256
    assert before.computed == (48 + 6 * 16) / (6 * 64)
    assert len(rows_of(update, 4).tokens[:, :48].unique(dim=0)) == 2


@given(
    length=st.integers(2, 40),
    response=st.floats(0.05, 0.95),
    together=st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0]),
    budget=st.integers(1, 900),
)
def test_a_pass_has_as_many_rows_as_its_distinct_tokens_allow(length, response, together, budget):
    what = case(tokens=900, length=length, response=response, together=together)
    answer = min(length - 1, max(1, round(length * response)))
    assert what.response_tokens == answer

    def distinct(rows):
        return math.ceil(rows / together) * (length - answer) + rows * answer

    assert all(what.distinct(rows) == distinct(rows) for rows in range(1, 12))
    assert what.most_rows(budget) == max(rows for rows in range(budget + 1) if not rows or distinct(rows) <= budget)
    asked = attrs.evolve(what, budget=budget)
    assert what.rows == 900 // length
    assert asked.most_rows() == (900 // length if together == 1 else what.most_rows(budget))


@given(sequences=st.integers(1, 200), most=st.integers(0, 40))
def test_passes_are_as_few_as_may_be_and_of_equal_size(sequences, most):
    rows, passes = balanced(sequences, most)
    fewest = math.ceil(sequences / max(1, most))
    assert passes == min(fewest, sequences)
    assert rows == math.ceil(sequences / passes)
    assert rows <= max(1, most)


@pytest.mark.parametrize(
    ("mesh", "sequences", "tokens", "passes"),
    [
        ({}, 12, 4 * 64, 3),
        ({"shard": 2}, 12, 3 * 64, 2),
        ({"replicate": 3, "tensor": 2}, 13, 3 * 64, 2),
        ({}, 1, 64, 1),
    ],
)
def test_the_sequences_of_an_update_are_dealt_to_data_ranks(mesh, sequences, tokens, passes):
    found = with_sequences(case(tokens=256, length=64, mesh=mesh), sequences)
    assert (found.tokens, found.micro_batches) == (tokens, passes)
    assert found.mini_batch >= sequences


def test_ranks_are_counted_by_their_axes():
    sizes = dict(zip(AXES, (2, 3, 5, 7, 11, 13, 17), strict=True))
    what = case(mesh=sizes)
    assert what.world == math.prod(sizes.values())
    assert what.data_ranks == sizes["replicate"] * sizes["shard"] * sizes["expert"]
    assert what.mini_batch == what.rows * what.micro_batches * what.data_ranks
    assert what.groups == 8  # one more for shard and expert together
    assert case(mesh={"shard": 2, "tensor": 1}).groups == 1
    assert [case(mesh={axis: 2}).cuts for axis in AXES] == [
        axis in ("shard", "expert", "tensor", "pipeline") for axis in AXES
    ]


def test_a_process_holds_more_than_its_tensors():
    gpu = hardware_of("h100")
    assert overhead(gpu, 3, 1000.0) == CONTEXT + WORKSPACE + 3 * COMMUNICATOR + FRAGMENTS * 1000
    assert overhead(hardware_of("cpu"), 3, 1000.0) == 0
    assert [pinned(size) for size in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 2048]


def test_numbers_of_a_gpu_take_the_place_of_those_that_are_known():
    known = hardware_of("a100-80")
    own = {
        "memory": 1.0,
        "flops": 2.0,
        "bandwidth": 3.0,
        "node_bandwidth": 4.0,
        "network_bandwidth": 5.0,
        "per_node": 6,
    }
    for name, value in own.items():
        found = hardware_of("a100-80", {name: value, "memory": own["memory"] if name == "memory" else None})
        assert found == attrs.evolve(known, **{name: value})
    custom = hardware_of("custom", own)
    assert custom == attrs.evolve(hardware_of("h100"), name="custom", flops_float32=2.0 / 15, **own)
    with pytest.raises(ValueError, match=r"missing: --flops, --network-bandwidth$"):
        hardware_of("custom", {name: own[name] for name in ("memory", "bandwidth", "node_bandwidth", "per_node")})
    assert hardware_of("custom", {name: own[name] for name in own if name != "per_node"}).per_node == 8


def test_a_model_of_fewer_layers_has_the_first_ones():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    whole = config(layer_types=kinds, use_sliding_window=True)
    few = with_layers(whole, 2)
    assert (few.num_hidden_layers, few.layer_types) == (2, kinds[:2])
    assert (whole.num_hidden_layers, whole.layer_types) == (3, kinds)
