"""vLLM on prompts with videos: it answers the trainer's ids and pixels, with the trainer's log-probs."""

import attrs
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fppo import tree
from fppo.batch import Column
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.vllm.engine import VllmEngine, VllmOptions
from fppo.steps import Forward, MicroBatching, compute_log_probs
from tests.vllm.vision import make, prompts_of, stand_in

SAMPLING = Sampling(max_tokens=5, n=2)
TIMES = "second_per_grid_ts"


def with_times(prompts, seconds):
    """The prompts, whose videos have so many seconds for each step of time."""
    inputs = [x and attrs.evolve(x, tensors={**x.tensors, **_times(x.tensors, seconds)}) for x in prompts.inputs]
    return tree.replace(prompts, inputs=Column(inputs))


def _times(tensors, seconds):
    return {TIMES: torch.full_like(tensors[TIMES], seconds)} if TIMES in tensors else {}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_log_probs_are_the_trainers(name):
    """Of rows with videos and images in either order; text after a video that is long in time is refused, where vLLM
    gives it other positions than transformers."""
    stand_in(name)
    model, params = make(name)
    prompts = with_times(prompts_of(name, ("vi", "", "iv", "vv", "i")), 1.0)  # a step of positions each
    options = VllmOptions(cache_gb=0.05, max_rows=16)
    with VllmEngine(model, pad_token_id=0, options=options, probe="always") as engine:
        rollout = engine.generate(params, Ask(prompts, SAMPLING, Key(3)))
        forward, sizes = Forward(model), MicroBatching(size=10)
        expected = compute_log_probs(params, rollout, forward=forward, micro_batching=sizes)
        assert (rollout.rollout_log_probs - expected).abs().max() < 1e-5
        if name == "qwen2_5_vl":
            with pytest.raises(ValueError, match="longer in time than in height and width"):
                engine.generate(params, Ask(with_times(prompts, 2.75), SAMPLING, Key(3), version=1))
