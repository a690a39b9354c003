"""Samples of clients: the engine's requests, and what comes back, against definitions by hand."""

from __future__ import annotations

import json
import math

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

from fppo.key import Key
from fppo.rollout.requests import FinishedRequest
from fppo.rollout.scores import DrawnScores, PromptScores, TopTokens
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.decode import TinkerBounds
from fppo.serve.tinker.encode import EMPTY, pass_payload, sample_payload
from fppo.serve.tinker.runs import PassOutputs
from fppo.serve.tinker.samples import sample_request, sample_work
from tests.serve.tinker.served import LIMIT, SIZE, base, tokenizer

RULES = attrs.evolve(base().rules, seed=9)
BOUNDS = TinkerBounds(samples=5, scored=60, drawn_top=4, stops=3)
PROMPT = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=8) | st.sampled_from([[3] * 31, [3] * 32])
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(0, LIMIT + 1),
        "seed": st.sampled_from([0, 5, -1]),
        "temperature": st.sampled_from([0.0, 0.5, 1.0]),
        "top_k": st.sampled_from([-1, 3]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "stop": st.sampled_from([[], [4, 5], [4, 5, 6, 7], ["1", "+2"], "3"]),
    },
)
MORE = st.fixed_dictionaries(
    {},
    optional={
        "num_samples": st.integers(0, 6),
        "prompt_logprobs": st.booleans(),
        "prompt_logprobs_last_n": st.integers(1, 8),
        "topk_prompt_logprobs": st.integers(0, 9),
        "prompt_alt_tokens_k": st.integers(0, 9),
        "topk_sample_logprobs": st.integers(0, 5),
        "record_stability_info": st.booleans(),
    },
)


def refused(ids, params, more, targeted):
    """Whether the request goes beyond a bound."""
    room = LIMIT - len(ids)
    last = more.get("prompt_logprobs_last_n")
    return (
        not 0 < params.get("max_tokens", room) <= room
        or not 0 < more.get("num_samples", 1) <= 5
        or len(params.get("stop", "")) > 3
        or (targeted and 2 * len(ids) > 60)
        or max(more.get("topk_prompt_logprobs", 0), more.get("prompt_alt_tokens_k", 0)) * len(ids) > 60
        or more.get("topk_sample_logprobs", 0) > 4
        or (last is not None and (not more.get("prompt_logprobs") or last >= len(ids)))
    )


@pytest.mark.slow
@settings(max_examples=150)
@given(PROMPT, PARAMS, MORE, st.booleans())
def test_the_engine_gets_what_a_client_asks(ids, params, more, targeted):
    chunks = [{"type": "encoded_text", "tokens": part} for part in (ids[:2], ids[2:]) if part]
    body = {"prompt": {"chunks": chunks}, "sampling_params": params, **more}
    targets = [[row, -1] for row in range(1, len(ids))] if targeted and len(ids) > 1 else None
    if targets is not None:
        data = {"data": [x for row in targets for x in row], "dtype": "int64", "shape": [len(ids) - 1, 2]}
        body["target_prompt_logprobs"] = data
    request = sample_request(json.dumps(body).encode())
    if refused(ids, params, more, targeted):
        with pytest.raises(Refusal):
            sample_work(request, "s:1", rules=RULES, bounds=BOUNDS)
        return
    work = sample_work(request, "s:1", rules=RULES, bounds=BOUNDS)
    requests = work.requests("s:1", adapter="one", owner="me")
    assert [each.name for each in requests] == [f"s:1:{row}" for row in range(more.get("num_samples", 1))]
    assert [each.row for each in requests] == [*range(len(requests))]
    key = Key(params["seed"] % 2**64).fold("seed") if "seed" in params else Key(9).fold("tinker", "s:1")
    assert {(each.ids, each.key, each.adapter, each.owner) for each in requests} == {(tuple(ids), key, "one", "me")}
    temperature, stop = params.get("temperature", 1.0), params.get("stop")
    for each in requests:
        how = each.sampling
        assert (how.n, how.max_tokens) == (1, params.get("max_tokens", LIMIT - len(ids)))
        assert how.greedy == (temperature == 0)
        assert how.temperature == (temperature or 1.0)
        assert how.top_k == (None if params.get("top_k", -1) == -1 else 3)
        assert how.top_p == params.get("top_p", 1.0)
        tokens = (1,) if stop is None else tuple(x for x in stop if isinstance(x, int))
        texts = [x for x in stop or () if isinstance(x, str)]
        words = tuple(tokenizer().get_vocab()[x] for x in texts if x in tokenizer().get_vocab())
        assert how.stop_token_ids == (*tokens, *words)
        assert (how.stop_texts is not None) == bool(texts)
    # at another temperature than 1 draws are scored: their log-probs are the model's own
    top = max(more.get("topk_sample_logprobs", 0), int(how.temperature != 1))
    names = {"prompt": "prompt_logprobs", "last": "prompt_logprobs_last_n", "prompt_top": "topk_prompt_logprobs"}
    names |= {"draws": "prompt_alt_tokens_k"}
    expected = {name: more[field] for name, field in names.items() if more.get(field)}
    first = requests[0].scores
    assert (first is None) == (not expected and not top and targets is None)
    if first is not None:
        found = {name: getattr(first, name) for name in names if getattr(first, name)}
        assert found == expected
        assert first.drawn_top == top
        assert (None if first.targets is None else first.targets.tolist()) == targets
    for each in requests[1:]:  # the first alone scores the prompt
        assert (None if each.scores is None else (each.scores.of_prompt, each.scores.drawn_top)) == (
            (False, top) if top else None
        )
    assert (work.top, work.record) == (more.get("topk_sample_logprobs", 0), more.get("record_stability_info", False))


def floats(data):
    return np.frombuffer(data, np.float32).tolist()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_samples_and_scores_come_back_in_the_protocols_layout(scored, sparse):
    """Two samples of a prompt of 3 tokens, which the first one scored; absent numbers are the protocol's."""
    nan = math.nan
    targets = [[5, -1, 0], [-1, -1, 7]]
    layout = {"sparse_crow_indices": [0, 2, 3], "sparse_col_indices": [0, 2, 2]} if sparse else {}
    data = {"data": [5, 0, 7] if sparse else [x for row in targets for x in row], "dtype": "int64", "shape": [2, 3]}
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
        "sampling_params": {"temperature": 0.5 if scored else 1.0},
        "num_samples": 2,
        "topk_sample_logprobs": 2 if scored else 0,
        "target_prompt_logprobs": data | layout,
    }
    work = sample_work(sample_request(json.dumps(body).encode()), "s:1", rules=RULES, bounds=TinkerBounds())
    assert work.scores.targets.tolist() == targets
    top = TopTokens(torch.tensor([[-1, -1], [8, 9], [6, 7]]), torch.tensor([[nan, nan], [-0.5, -1.0], [-2.0, -3.0]]))
    draws = TopTokens(torch.tensor([[3], [4]]), torch.tensor([[-0.25], [-0.75]]))
    given_targets = torch.tensor([[-5.0, nan, -0.125], [nan, nan, -7.0]])
    prompt = PromptScores(torch.tensor([nan, -1.5, -2.5]), top, given_targets, draws)
    finished = [
        FinishedRequest(
            name=f"s:1:{row}",
            tokens=torch.tensor(tokens),
            log_probs=torch.tensor([-1.0, -2.0][: len(tokens)]) - row,
            sampling_log_probs=torch.zeros(len(tokens)),
            versions=torch.zeros(len(tokens), dtype=torch.int32),
            end=end,
            fed=0,
            prompt_scores=None if row else prompt,
            drawn_scores=DrawnScores(
                torch.tensor([-4.0, -8.0][: len(tokens)]) - row,
                TopTokens(torch.tensor([[3, 4], [5, 6]])[: len(tokens)], torch.zeros(2, 2)[: len(tokens)] - row),
            )
            if scored
            else None,
        )
        for row, (tokens, end) in enumerate([([8, 1], "stop"), ([9], "length")])
    ]
    message = pb.SampleResponse()
    message.ParseFromString(sample_payload(finished, work).body)
    one, other = message.sequences
    assert (one.stop_reason, other.stop_reason) == (pb.STOP_REASON_STOP, pb.STOP_REASON_LENGTH)
    assert [np.frombuffer(x.tokens, np.int32).tolist() for x in (one, other)] == [[8, 1], [9]]
    own = [[-4.0, -8.0], [-5.0]] if scored else [[-1.0, -2.0], [-2.0]]
    assert [floats(x.logprobs) for x in (one, other)] == own
    if scored:
        drawn = one.topk_sampled_logprobs
        assert (drawn.length, drawn.k, np.frombuffer(drawn.token_ids, np.int32).tolist()) == (2, 2, [3, 4, 5, 6])
    likeliest = message.topk_prompt_logprobs
    assert (likeliest.length, likeliest.k) == (3, 2)
    assert np.frombuffer(likeliest.token_ids, np.int32).tolist() == [0, 0, 8, 9, 6, 7]
    assert floats(likeliest.logprobs) == [EMPTY, EMPTY, -0.5, -1.0, -2.0, -3.0]
    assert floats(message.prompt_logprobs)[1:] == [-1.5, -2.5]
    assert floats(message.prompt_alt_tokens.logprobs.dense) == [-0.25, -0.75]
    assert np.frombuffer(message.prompt_alt_tokens.tokens.dense, np.int32).tolist() == [3, 4]
    found = message.target_prompt_logprobs
    assert [*found.shape] == [2, 3]
    if sparse:
        assert floats(found.sparse_csr.values) == [-5.0, -0.125, -7.0]
        assert np.frombuffer(found.sparse_csr.crow_indices, np.int64).tolist() == [0, 2, 3]
        assert np.frombuffer(found.sparse_csr.col_indices, np.int64).tolist() == [0, 2, 2]
    else:
        assert floats(found.dense) == [-5.0, 0.0, -0.125, 0.0, 0.0, -7.0]


def test_results_of_a_pass_come_in_records_of_one_width():
    widths = [(2,), (1,), (3, 2), (2, 2), (2, 3), (1,)]
    numbers = [torch.arange(float(math.prod(shape))).view(shape) + 10 * i for i, shape in enumerate(widths)]
    message = pb.ForwardBackwardOutput()
    outputs = PassOutputs(per_datum=[{"logprobs": x} for x in numbers], metrics={"loss:sum": 2.5})
    message.ParseFromString(pass_payload(outputs).body)
    assert dict(message.metrics) == {"loss:sum": 2.5}
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 2, 1, 1]
    fields = [record.fields["logprobs"] for record in message.loss_fn_outputs]
    assert [[*field.trailing_shape] for field in fields] == [[], [2], [3], []]
    offsets = [np.frombuffer(field.offsets, np.int64).tolist() for field in fields]
    assert offsets == [[0, 8, 12], [0, 24, 40], [0, 24], [0, 4]]
    assert [x for field in fields for x in floats(field.data)] == torch.cat([x.flatten() for x in numbers]).tolist()


@pytest.mark.parametrize(("width", "fits"), [(3, True), (4, False)])
def test_targets_of_a_prompt_are_bounded(width, fits):
    shape = [19, width]
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3] * 20}]},
        "sampling_params": {"max_tokens": 1},
        "target_prompt_logprobs": {"data": [5] * math.prod(shape), "dtype": "int64", "shape": shape},
    }
    request = sample_request(json.dumps(body).encode())
    if fits:
        assert sample_work(request, "s:1", rules=RULES, bounds=BOUNDS).scores.targets.shape == (19, 3)
        return
    with pytest.raises(Refusal) as raised:
        sample_work(request, "s:1", rules=RULES, bounds=BOUNDS)
    assert raised.match("20 tokens times 4 targets; at most 60")
