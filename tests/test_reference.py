"""The reference runs: their settings can be started, and the page shows what was kept of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from fppo.settings import files, modules
from fppo.settings.train import TrainSettings

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "experiments" / "reference"


def load(file: Path, *overrides: str) -> TrainSettings:
    """The settings of a file, if nothing is wrong with them or with the functions that they name."""
    return files.load(file, overrides, look=lambda settings, known: modules.module_problems(settings))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the reference runs by its name."""
    monkeypatch.syspath_prepend(str(REFERENCE))
    return importlib.import_module


def test_each_run_has_settings_without_problems(reference, tmp_path):
    found = {}
    for name, run in reference("runs").RUNS.items():
        command = run.command(name, 3, tmp_path)
        if command[0] == "fppo":
            found[name] = load(Path(command[2]), *command[3:])
            assert (found[name].output_dir, found[name].seed) == (str(tmp_path / name / "seed_3"), 3)
    assert found["any_expression"].reward.weights == (0.0, 1.0)
    assert {name for name, settings in found.items() if settings.algorithm.advantage.name == "gae"} == {
        "ppo_hidden",
        "ppo_tokens",
    }
    assert found["distilled"].model.teacher_path == str(tmp_path / "grpo" / "seed_3" / "model")


def test_the_page_shows_the_tables_of_what_was_kept(reference):
    page = (ROOT / "docs" / "reference.md").read_text()
    results = reference("results")
    for name, study in results.STUDIES.items():
        assert results.table(study) in page, name
        picture = f"pictures/reference-{name}.png"
        assert picture in page
        assert (ROOT / "docs" / picture).is_file()


def test_gsm8k_becomes_chats_with_solutions_and_answers(reference, tmp_path, monkeypatch):
    monkeypatch.setenv("GSM8K", str(tmp_path))
    line = '{"question": "48 and half?", "answer": "Half is 48/2=<<48/2=24>>24.\\nTogether 1,072.\\n#### 1,072"}\n'
    (tmp_path / "train.jsonl").write_text(line)
    (row,) = reference("gsm8k_chats").train()
    assert row["prompt"] == [{"role": "user", "content": "48 and half?"}]
    assert row["response"] == "Half is 48/2=24.\nTogether 1,072.\n#### 1072"
    (pattern,) = load(REFERENCE / "gsm8k.toml").reward.arguments["regular_expression"].values()
    last = re.compile(pattern)
    assert [(found := last.search(text)) and found[1] for text in (row["response"], "12-7", "it is -7.", "1.5")] == [
        row["answer"],
        "7",
        "-7",
        None,
    ]
