"""vLLM on models whose layers carry states along a row."""

from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.steps import Forward, MicroBatching, compute_log_probs
from tests.rollout.test_embedded import make_prompts
from tests.vllm.conftest import start
from tests.vllm.families import make


def test_log_probs_of_mamba_beside_attention_are_the_trainers():
    """Of prompts of several lengths, whose samples share them, and for each version."""
    engine, model = start("falcon_h1")
    with engine:
        for version in range(2):
            _, params = make("falcon_h1", seed=version)
            ask = Ask(make_prompts((7, 20, 3)), Sampling(max_tokens=20, n=2), Key(1), version=version)
            rollout = engine.generate(params, ask)
            ours = compute_log_probs(params, rollout, forward=Forward(model), micro_batching=MicroBatching(size=8))
            assert (rollout.rollout_log_probs - ours).abs().max() < 1e-5
