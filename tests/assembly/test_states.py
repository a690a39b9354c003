"""A run of a model whose layers carry states, from its files to an export."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fppo import models
from fppo.commands import cli
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer
from fppo.runs import jsonl
from tests import tiny_run
from tests.models.hybrids import HYBRIDS


@pytest.mark.slow
def test_ppo_trains_it_and_engine_and_trainer_agree(tmp_path):
    tiny_run.write_task(tmp_path)
    tokenizer = character_tokenizer(CHARACTERS)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    tiny = HYBRIDS["qwen3_5_text"]
    config = type(tiny).from_dict({**tiny.to_dict(), **sizes, "eos_token_id": 1})
    model = models.build(config)
    models.save(model, models.init_params(model, Key(0)), tmp_path / "start", tokenizer=tokenizer)
    cli.main(
        [
            "train",
            f"--output-dir={tmp_path / 'run'}",
            "--steps=2",
            f"--model.path={tmp_path / 'start'}",
            f"--data.path={tmp_path / 'train.jsonl'}",
            "--rollout.batch-size=8",
            "--rollout.n=2",
            "--rollout.max-tokens=5",
            "--reward.functions=exact_match",
            "--algorithm.kl.coef=0.01",
            "--actor.mini-batch-size=8",
            "--critic.mini-batch-size=8",
            "--actor.optimizer.lr=1e-2",
            "--log.loggers=jsonl",
            "--device=cpu",
        ]
    )
    last = jsonl.read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert last["training/rollout_probs_diff_max"] < 1e-6
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    started = AutoModelForCausalLM.from_pretrained(tmp_path / "start").state_dict()
    moved = {path for path, x in exported.items() if not torch.equal(x, started[path])}
    assert any("A_log" in path for path in moved)
    assert any("conv1d" in path for path in moved)
