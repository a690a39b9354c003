"""`fppo train --rollout.engine vllm`: the run of the embedded engine."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from fppo import commands, jsonl, models
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from tests import runs


def trained(directory, engine):
    settings = runs.settings(
        directory, output_dir=str(directory / engine), rollout__engine=engine, steps=3, rollout__batch_size=16
    )
    assert commands.train(settings) == 0
    return jsonl.read(directory / engine / "metrics.jsonl")


def test_a_run_on_vllm_is_the_run_on_the_embedded_engine(tmp_path):
    """The weights of every step reach it: its log-probs stay the trainer's, and the numbers those of the other run."""
    runs.write_task(tmp_path)
    tokenizer = character_tokenizer(CHARACTERS)
    model = small_model(len(tokenizer), width=128, layers=1)  # heads as wide as vLLM's CPU build needs
    models.save(model, models.init_params(model, Key(0)), tmp_path / "start", tokenizer=tokenizer)
    expected, found = trained(tmp_path, "embedded"), trained(tmp_path, "vllm")
    for line, other in zip(expected[1:], found[1:], strict=True):
        assert other["training/rollout_probs_diff_max"] < 1e-5
        assert other["rollout/kept_mass"] == pytest.approx(1.0)
        for name in (
            "critic/rewards/mean",
            "response_length/mean",
            "actor/entropy",
            "actor/grad_norm",
            "critic/vf_loss",
        ):
            assert other[name] == pytest.approx(line[name], rel=1e-3, abs=1e-5), name
