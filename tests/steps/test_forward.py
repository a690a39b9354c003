"""Outputs per token against transformers' plain forward, one row at a time, without padding, in float64."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fppo import batch as batches
from fppo.models.precision import KeepDouble
from fppo.steps.forward import (
    Forward,
    compute_log_probs,
    compute_outputs,
    compute_values,
    forward_micro_batch,
)
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.scores import compute_reward_scores
from tests import tiny
from tests.models.families import make, plain

MODEL, PARAMS = tiny.model_and_params()
VALUE_MODEL, VALUE_PARAMS = tiny.model_and_params("value", seed=1)
POLICY, CRITIC = Forward(MODEL), Forward(VALUE_MODEL)
CUTS = (MicroBatching(size=1), MicroBatching(size=2), MicroBatching(token_budget=9), MicroBatching(size=100))
VOCABULARY = ("log_probs", "entropy", "sum_squared_probs", "hidden")


def _plain(params):
    module = AutoModelForCausalLM.from_config(tiny.config(), dtype=torch.float64, attn_implementation="eager").eval()
    module.load_state_dict({name: x for name, x in params.items() if "score" not in name}, strict=False)
    module.tie_weights()
    return module


PLAIN, VALUE_PLAIN = _plain(PARAMS), _plain(VALUE_PARAMS)


def _rows(batch):
    """Of each row: its real tokens, the columns [n] of its tokens in the mask, and those tokens' places among them."""
    prompt = batch.tokens.shape[1] - batch.response_mask.shape[1]
    for tokens, attention, mask in zip(batch.tokens, batch.attention_mask, batch.response_mask, strict=True):
        columns = mask.nonzero().flatten()
        places = [int(attention[: prompt + int(c)].sum()) for c in columns]
        yield tokens[attention], columns, places


@torch.no_grad()
def _expected(batch, temperature):
    """The slow program: for each token, softmax of the logits at the token before it."""
    out = {name: torch.zeros(batch.response_mask.shape, dtype=torch.float64) for name in VOCABULARY[:3]}
    out["hidden"] = torch.zeros(*batch.response_mask.shape, PLAIN.config.hidden_size, dtype=torch.float64)
    for i, (tokens, columns, places) in enumerate(_rows(batch)):
        with KeepDouble():
            logits = PLAIN(tokens[None]).logits[0] / temperature
            states = PLAIN.model(tokens[None]).last_hidden_state[0]
        for column, place in zip(columns, places, strict=True):
            probs = torch.softmax(logits[place - 1], -1)
            out["log_probs"][i, column] = probs[tokens[place]].log()
            out["entropy"][i, column] = -(probs * probs.log()).sum()
            out["sum_squared_probs"][i, column] = (probs**2).sum()
            out["hidden"][i, column] = states[place - 1]
    return out


@torch.no_grad()
def _expected_values(batch):
    out = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    scores = []
    for i, (tokens, columns, places) in enumerate(_rows(batch)):
        with KeepDouble():
            hidden = VALUE_PLAIN.model(tokens[None]).last_hidden_state[0]
        values = F.linear(hidden, VALUE_PARAMS["score.weight"], VALUE_PARAMS["score.bias"])[:, 0]
        for column, place in zip(columns, places, strict=True):
            out[i, column] = values[place - 1]
        scores.append(values[-1])
    return out, torch.stack(scores)


@pytest.mark.slow
@settings(max_examples=15)
@given(rows=st.integers(1, 6), seed=st.integers(0, 10_000), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_outputs_equal_the_plain_forward_packed_and_padded(rows, seed, temperature):
    batch = tiny.experience(seed, rows)
    expected = _expected(batch, temperature)
    for remove_padding in (True, False):
        out = forward_micro_batch(
            PARAMS,
            batch,
            forward=attrs.evolve(POLICY, remove_padding=remove_padding),
            outputs=VOCABULARY,
            temperature=temperature,
        )
        assert out.values is None
        for name in VOCABULARY:
            torch.testing.assert_close(getattr(out, name), expected[name], atol=1e-10, rtol=1e-10)
            assert (getattr(out, name)[~batch.response_mask] == 0).all()


@pytest.mark.parametrize("name", ["cohere", "granite", "gemma2"])
def test_log_probs_are_those_of_each_family_s_head(name):
    """With a factor of the logits, a divisor, and a soft cap."""
    model, params = make(name)
    batch = tiny.experience(3, 3)
    batch = attrs.evolve(batch, tokens=batch.tokens % model.config.vocab_size)
    out = forward_micro_batch(params, batch, forward=Forward(model), outputs=("log_probs",), temperature=0.7)
    module = plain(model, params)
    for found, (tokens, columns, places) in zip(out.log_probs, _rows(batch), strict=True):
        with KeepDouble(), torch.no_grad():
            log_probs = torch.log_softmax(module(tokens[None]).logits[0] / 0.7, -1)
        expected = torch.stack([log_probs[place - 1, tokens[place]] for place in places])
        torch.testing.assert_close(found[columns], expected, atol=1e-10, rtol=1e-10)


@pytest.mark.slow
@settings(max_examples=15)
@given(rows=st.integers(1, 6), seed=st.integers(0, 10_000), cut=st.sampled_from(CUTS), packed=st.booleans())
def test_compute_functions_keep_the_order_of_rows_in_any_partition(rows, seed, cut, packed):
    batch = tiny.experience(seed, rows)
    policy, critic = (attrs.evolve(forward, remove_padding=packed) for forward in (POLICY, CRITIC))
    log_probs = compute_log_probs(PARAMS, batch, forward=policy, micro_batching=cut, temperature=0.8)
    states = compute_outputs(PARAMS, batch, forward=policy, micro_batching=cut, outputs=("entropy", "hidden")).hidden
    by_token = _expected(batch, 0.8)
    torch.testing.assert_close(log_probs, by_token["log_probs"], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(states, by_token["hidden"], atol=1e-10, rtol=1e-10)
    values = compute_values(VALUE_PARAMS, batch, forward=critic, micro_batching=cut)
    expected, scores = _expected_values(batch)
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=1e-10)
    found = compute_reward_scores(VALUE_PARAMS, batch, forward=CRITIC, micro_batching=cut)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scores.float())
    assert not any(x.requires_grad for x in (log_probs, values, found))


def test_the_mask_decides_what_is_computed_not_what_is_read():
    batch = tiny.experience(3, 6)
    full = batches.extend(type(batch), batch, response_mask=batch.attention_mask[:, -6:])
    run = {"forward": POLICY, "micro_batching": CUTS[1], "outputs": VOCABULARY}
    out, wide = compute_outputs(PARAMS, batch, **run), compute_outputs(PARAMS, full, **run)
    assert not torch.equal(batch.response_mask, full.response_mask)
    for name in VOCABULARY:
        kept = getattr(wide, name)
        kept = kept.where(batch.response_mask if kept.dim() == 2 else batch.response_mask[..., None], 0.0)
        torch.testing.assert_close(getattr(out, name), kept, atol=1e-12, rtol=1e-12)


def test_low_precision_parameters_give_float32_outputs():
    batch = tiny.experience(4, 3)
    half = {name: x.bfloat16() for name, x in PARAMS.items()}
    out = forward_micro_batch(half, batch, forward=POLICY, outputs=VOCABULARY)
    values = {name: x.bfloat16() for name, x in VALUE_PARAMS.items()}
    valued = forward_micro_batch(values, batch, forward=CRITIC, outputs=("values",))
    assert {x.dtype for x in (*out, valued.values) if x is not None} == {torch.float32}
    torch.testing.assert_close(out.log_probs.double(), _expected(batch, 1.0)["log_probs"], atol=0.15, rtol=0.1)


@pytest.mark.parametrize(
    ("model", "outputs", "words"),
    [
        (MODEL, ("probs",), "unknown outputs"),
        (MODEL, ("values",), "value head"),
        (VALUE_MODEL, ("log_probs",), "vocabulary head"),
        (VALUE_MODEL, ("values", "log_probs"), "vocabulary head"),
    ],
)
def test_outputs_that_the_head_does_not_have_are_errors(model, outputs, words):
    params = PARAMS if model is MODEL else VALUE_PARAMS
    with pytest.raises(ValueError, match=words):
        forward_micro_batch(params, tiny.experience(0, 2), forward=Forward(model), outputs=outputs)


def test_a_reward_model_has_a_value_head():
    with pytest.raises(ValueError, match="value head"):
        compute_reward_scores(PARAMS, tiny.experience(0, 2), forward=POLICY, micro_batching=CUTS[0])
