"""Responses of several turns on vLLM are those on the embedded engine, row by row."""

import attrs
import pytest
import torch

from fppo.key import Key
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.steps.forward import Forward, forward_micro_batch
from tests.rollout.test_embedded import KERNELS, PAD, make_prompts
from tests.rollout.test_turns import CUT, SAMPLING, engine_of
from tests.vllm.conftest import start
from tests.vllm.families import make


@pytest.mark.parametrize("host", ["local", "process"])
def test_rows_are_those_of_the_embedded_engine(host, lent):
    model, params = make("qwen2", seed=2)
    prompts, limits = make_prompts(extra=1), torch.tensor([30, 14, 4, 30, 19, 1])
    embedded = EmbeddedEngine(model=model, kernels=KERNELS, pad_token_id=PAD)

    def sample(inner, sampling, most):
        engine = engine_of(inner, turn_tokens=9)
        return engine.generate(params, Ask(prompts, sampling, Key(3), version=5, limits=most))

    cases = [(SAMPLING, None), (CUT, limits), (attrs.evolve(SAMPLING, greedy=True, n=1), None)]
    with lent(options={"host": host}) as (inner, _):
        pairs = [(sample(inner, *case), sample(embedded, *case)) for case in cases]
    for sampled, expected in pairs:
        for name in ("tokens", "attention_mask", "response_mask", "row_ids", "groups", "versions"):
            assert torch.equal(getattr(sampled, name), getattr(expected, name)), name
        assert sampled.finish == expected.finish
        for name in ("rollout_log_probs", "sampling_log_probs"):
            torch.testing.assert_close(getattr(sampled, name), getattr(expected, name), rtol=0, atol=1e-5)
        holes = expected.attention_mask[:, -expected.response_mask.shape[1] :] & ~expected.response_mask
        assert holes.any()


def test_the_trainer_gives_the_tokens_vllms_log_probs(lent):
    model, params = make("qwen2", seed=2)
    with lent() as (inner, _):
        sampled = engine_of(inner).generate(params, Ask(make_prompts(), CUT, Key(8)))
    out = forward_micro_batch(params, sampled, forward=Forward(model), temperature=CUT.temperature)
    torch.testing.assert_close(sampled.rollout_log_probs, out.log_probs, rtol=0, atol=1e-5)


def test_a_context_may_fill_vllm_to_its_limit():
    """A row's own context and budget count, not the longest of each in the batch."""
    _, params = make("qwen2", seed=2)
    inner, _ = start(options={"max_model_len": 32})
    sampling = Sampling(max_tokens=25, stop_token_ids=SAMPLING.stop_token_ids)
    with inner:
        sampled = engine_of(inner).generate(params, Ask(make_prompts((7, 1, 4)), sampling, Key(3)))
        with pytest.raises(ValueError, match="reach 33, but vLLM was started for max_model_len = 32"):
            engine_of(inner).generate(params, Ask(make_prompts((7, 1)), attrs.evolve(sampling, max_tokens=26), Key(3)))
    assert (sampled.attention_mask.sum(1) <= 32).all()
