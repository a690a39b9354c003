"""Responses that go on with newer weights on vLLM are those on the embedded engine, token by token."""

import torch

from tests.rollout.test_embedded import engine_of
from tests.rollout.test_interrupt import ask, coming, interruptible
from tests.vllm.families import make


def test_rows_are_those_of_the_embedded_engine(lent):
    model, first = make("qwen2", seed=2)
    versions = [{name: x * (1 + 0.1 * i) for name, x in first.items()} for i in range(3)]
    with lent() as (inner, _):
        sampled = interruptible(inner, 2).generate(versions[0], ask(coming(versions)))
    expected = interruptible(engine_of(model), 2).generate(versions[0], ask(coming(versions)))
    for name in ("tokens", "attention_mask", "response_mask", "row_ids", "groups", "versions", "token_versions"):
        assert torch.equal(getattr(sampled, name), getattr(expected, name)), name
    assert sampled.finish == expected.finish
    assert len(expected.token_versions.unique()) > 2
    for name in ("rollout_log_probs", "sampling_log_probs"):
        torch.testing.assert_close(getattr(sampled, name), getattr(expected, name), rtol=0, atol=1e-5)
