"""The embedded engine decodes models whose layers carry states: each row its own, also as others end."""

import copy

import pytest
import torch

from fppo import batch as batches
from fppo.key import Key
from fppo.models.precision import KeepDouble
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.requests import Request
from fppo.steps.forward import Forward, forward_micro_batch
from tests.models.families import make, plain
from tests.models.hybrids import EXACT, HYBRIDS
from tests.rollout.test_embedded import STOPS, engine_of, make_prompts, plain_logits


@pytest.mark.parametrize("name", EXACT)
def test_log_probs_are_those_of_transformers_and_of_the_trainer(name):
    """With prompts of one length beside others, several draws of each, and rows that leave as they end."""
    model, params = make(name, config=HYBRIDS[name])
    module = plain(model, params)
    sampling = Sampling(n=2, max_tokens=9, stop_token_ids=STOPS)
    prompts = make_prompts()
    rollout = engine_of(model).generate(params, Ask(prompts, sampling, Key(3)))
    lengths = rollout.response_mask.sum(1).tolist()
    assert min(lengths) < max(lengths)
    for row, length in enumerate(lengths):
        tokens = rollout.tokens[row, -rollout.response_mask.shape[1] :][:length, None]
        expected = plain_logits(module, rollout, row).log_softmax(-1).gather(1, tokens)[:, 0]
        torch.testing.assert_close(rollout.rollout_log_probs[row, :length], expected, rtol=0, atol=1e-10)
    for packed in (True, False):
        out = forward_micro_batch(params, rollout, forward=Forward(model, remove_padding=packed))
        torch.testing.assert_close(out.log_probs, rollout.rollout_log_probs, rtol=0, atol=1e-10)
    one = engine_of(model, max_rows=4, prefill_tokens=8)  # other waves and other passes
    chosen = [5, 3, 0]
    part = one.generate(params, Ask(batches.rows(prompts, chosen), sampling, Key(3)))
    rows = [2 * i + j for i in chosen for j in range(2)]
    width = part.response_mask.shape[1]
    assert torch.equal(part.response_mask, rollout.response_mask[rows, :width])
    torch.testing.assert_close(part.rollout_log_probs, rollout.rollout_log_probs[rows, :width], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", EXACT)
def test_greedy_tokens_are_those_of_generate(name):
    model, params = make(name, config=HYBRIDS[name])
    module, prompts = plain(model, params), make_prompts((3, 6))
    rollout = engine_of(model).generate(params, Ask(prompts, Sampling(greedy=True, max_tokens=6), Key(0)))
    for row, mask, drawn in zip(prompts.tokens, prompts.attention_mask, rollout.tokens[:, -6:], strict=True):
        with torch.no_grad(), KeepDouble():
            out = module.generate(row[mask][None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert out[0, -6:].tolist() == drawn.tolist()


def bytes_of(held):
    """All bytes of the tensors in a cache's layer."""
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, dict):
        return sum(map(bytes_of, held.values()))
    return sum(map(bytes_of, held)) if isinstance(held, list | tuple) else 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "mamba2"])
def test_a_bound_in_bytes_counts_states_and_keys_and_values(name):
    """The bound is what transformers holds of a row of 16 tokens."""
    model, params = make(name, config=HYBRIDS[name])
    with torch.no_grad(), KeepDouble():
        out = plain(model, params)(input_ids=torch.arange(3, 19)[None], use_cache=True)
    kept = getattr(out, "past_key_values", None) or out.cache_params
    one = sum(bytes_of(vars(layer)) for layer in kept.layers)
    sampling, prompt = Sampling(max_tokens=9), make_prompts((7,))
    with pytest.raises(ValueError, match=f"16 tokens, {one:,} bytes of keys and values"):
        engine_of(model, cache_bytes=one - 1).generate(params, Ask(prompt, sampling, Key(0)))
    engine_of(model, cache_bytes=one).generate(params, Ask(prompt, sampling, Key(0)))
    asked = Request(name="a", ids=prompt.tokens[0].tolist(), sampling=sampling, key=Key(0))
    with (
        engine_of(model, cache_bytes=one - 1).open(params) as requests,
        pytest.raises(ValueError, match=f"{one:,} bytes"),
    ):
        requests.add([asked])
    with engine_of(model, cache_bytes=one).open(params) as requests:
        requests.add([asked])


def test_a_model_that_transformers_decodes_otherwise_is_refused():
    config = copy.deepcopy(HYBRIDS["nemotron_h"])
    config.time_step_min = 0.001
    model, _ = make("nemotron_h", config=config)
    with pytest.raises(ValueError, match=r"'nemotron_h' keeps the time steps .* within \[0.001, inf\].*take the vLLM"):
        engine_of(model)
