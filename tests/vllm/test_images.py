"""vLLM on prompts with images: it answers the trainer's ids and pixels, with the trainer's log-probs."""

import re

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fppo import tree
from fppo.batch import Column, RowInputs
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.sync import SyncError
from fppo.rollout.vllm import images
from fppo.rollout.vllm.engine import EngineFailure, VllmEngine, VllmOptions
from fppo.rollout.vllm.vision import weight_names
from fppo.steps import Forward, MicroBatching, compute_log_probs
from tests.models.vision import IMAGE, rows
from tests.vllm.conftest import forks
from tests.vllm.vision import make, prompts_of, stand_in

SAMPLING = Sampling(max_tokens=7, n=2, stop_token_ids=(20, 21))


def start(model, *, options=None, **changes):
    own = {"cache_gb": 0.05, "max_rows": 16, **(options or {})}
    return VllmEngine(model, pad_token_id=0, options=VllmOptions(**own), **changes)


def trainers(model, params, record):
    return compute_log_probs(params, record, forward=Forward(model), micro_batching=MicroBatching(size=8))


@pytest.mark.parametrize("name", ["qwen2_vl", "smolvlm", "idefics3", "llava"])
def test_log_probs_are_the_trainers_for_every_version_of_the_tower(name, monkeypatch):
    """Also of rows that share images, of a response that holds what stands for them, and in another process."""
    stand_in(name)
    host = "process" if name == "idefics3" else "local"
    model, params = make(name)
    prompts = prompts_of(name, (1, 0, 2, 1))
    read = {n for n, x in params.items() for _ in weight_names(model)(n, x)}
    with forks(), start(model, send="changed", probe="always", options={"host": host}) as engine:
        for version in range(3):
            seeing = model.vision_params if version == 1 else params.keys()
            params = params | {n: x for n, x in make(name, seed=version)[1].items() if n in seeing}
            rollout = engine.generate(params, Ask(prompts, SAMPLING, Key(3), version=version))
            assert (rollout.rollout_log_probs - trainers(model, params, rollout)).abs().max() < 1e-5
        assert engine.sync(params, version=3).tensors == 0
        record = rows(name, (2,), sampled=True)
        tokens, width = record.tokens[0].tolist(), record.response_mask.shape[1]
        assert IMAGE in tokens[-width:]
        theirs = engine.log_probs([tokens], len(tokens) - width, inputs=list(record.inputs))
        assert (theirs - trainers(model, params, record)).abs().max() < 1e-5
        one = next(n for n in params if n in model.vision_params & read)
        assert 0 < engine.sync(params | {one: params[one] + 1}, version=4).tensors < len(read)
        with pytest.raises(SyncError, match=rf"missing: {one}$"):
            engine.sync({n: x for n, x in params.items() if n != one}, version=5)

        plain, pair = engine._rename, {"norm1": "norm2", "norm2": "norm1"}
        engine._rename = lambda n, x: [(re.sub("norm[12]", lambda m: pair[m[0]], new), y) for new, y in plain(n, x)]
        with pytest.raises(SyncError, match=r"log-probs of 8 tokens lie .* from the model's"):
            engine.sync(params, version=5)
        engine._rename = plain
        own = prompts.inputs[0]
        for places, text in ((own.places - 1, "do not hold token 60"), (own.places[:-1], "tokens stand for images")):
            cut = Column([RowInputs(own.tensors, places, own.shown), *prompts.inputs[1:]])
            with pytest.raises(ValueError, match=text):
                engine.generate(params, Ask(tree.replace(prompts, inputs=cut), SAMPLING, Key(3), version=6))
        if host == "process":
            return
        mm_input = images.mm_input
        monkeypatch.setattr(images, "mm_input", lambda ids, *others: mm_input([*ids, 5], *others))
        with pytest.raises(EngineFailure, match=r"answered another prompt than it was asked in row \d"):
            engine.generate(params, Ask(prompts, SAMPLING, Key(3), version=6))
