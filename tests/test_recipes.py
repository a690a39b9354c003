"""The recipes: checked as any settings are, planned on the machines that they name, and run on shrunk models."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from fppo import models
from fppo.commands import actions, plan
from fppo.key import Key
from fppo.quickstart import bpe_tokenizer
from fppo.runs import jsonl
from fppo.settings import files, modules, resolve
from fppo.settings.plan import PlanSettings
from fppo.settings.train import TrainSettings

RECIPES = Path(__file__).parent.parent / "experiments" / "recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.toml"))
GPUS = {"gsm8k_qwen3_30b_a3b.toml": "h200"}  # others: h100, the first of 80 GB
SOLVED = [
    {"question": f"{a} and {b}?", "answer": f"It is <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b:,}"}
    for a in range(9, 12)
    for b in (1, 995)
]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


def load(name: str, *overrides: str) -> TrainSettings:
    """The settings of a recipe, if nothing is wrong with them or with the functions that they name."""
    return files.load(RECIPES / name, overrides, look=lambda settings, known: modules.module_problems(settings))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_free_of_problems_and_says_where_it_runs(name):
    settings = load(name)
    assert re.match(r"# .+ GPUs? of \d+ GB", (RECIPES / name).read_text())
    assert settings.output_dir == f"runs/{Path(name).stem}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_the_machine_that_it_names(name, tmp_path, capsys):
    file = tmp_path / "plan.json"
    settings = load(name)
    assert plan.run(settings, PlanSettings(gpu=GPUS.get(name, "h100"), tries=False, json=str(file))) == 0
    assert "fits" in capsys.readouterr().out
    assert json.loads(file.read_text())


@pytest.fixture
def gsm8k(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows in the place of the data set."""
    monkeypatch.setattr(datasets, "load_dataset", lambda name, configuration, *, split: list(SOLVED))


def shrunk(settings: TrainSettings) -> PreTrainedConfig:
    """A config of the recipe's kind that takes no time."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 512}
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if "a3b" in settings.model.path.lower():
        return Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return Qwen3Config(**sizes)


@pytest.mark.slow
@pytest.mark.usefixtures("gsm8k")
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_a_shrunk_model(name, tmp_path):
    tokenizer = bpe_tokenizer([row["question"] for row in SOLVED], size=300)
    tokenizer.chat_template = TEMPLATE
    model = models.build(shrunk(load(name)))
    models.save(model, models.init_params(model, Key(0)), tmp_path / "model", tokenizer=tokenizer)
    whole = load(name)
    rows = 2 * whole.rollout.n
    flags = [f"--model.path={tmp_path / 'model'}", f"--output-dir={tmp_path / 'run'}", "--steps=2", "--device=cpu"]
    flags += ["--actor.optimizer.warmup-steps=0", "--mesh.shard=1", "--mesh.tensor=1", f"--rollout.batch-size={rows}"]
    flags += [f"--actor.mini-batch-size={rows}", "--rollout.max-tokens=4", "--eval.max-prompts=2"]
    flags += [f"--critic.mini-batch-size={rows}", "--critic.pretrain=1"] if whole.uses_critic_model else []
    flags += ["--model.lora.rank=4"] if whole.model.lora.used else []
    settings = load(name, *flags)
    settings, _ = resolve.resolved(settings, resolve.CPU)
    assert actions.train(settings) == 0
    lines = jsonl.read(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines][-1] == 2
    assert {line.get("reward/errors", 0.0) for line in lines} == {0.0}


@pytest.mark.usefixtures("gsm8k")
def test_the_rows_of_gsm8k_end_with_numbers():
    spec = importlib.util.spec_from_file_location("recipe_rows", RECIPES / "gsm8k_rows.py")
    assert spec is not None
    assert spec.loader is not None
    rows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rows)
    first, *_, last = rows.train()
    assert (first["answer"], last["answer"]) == ("10", "1006")
    assert first["prompt"][0]["content"].startswith("9 and 1?\n\nSolve")
