"""Model cards: what a hub reads of them, what they say of a run, and that no text of its data is markup."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from fppo.commands import actions, cli
from fppo.report.card import Exported, add_card, card
from fppo.runs import jsonl, starts
from fppo.runs.jsonl import JsonLines
from fppo.runtime import exports
from fppo.settings import files
from fppo.settings.train import TrainSettings
from tests import tiny_run
from tests.runs.test_markdown import NASTY

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
METRICS = {
    0: {"val-core/sums/reward/mean@1": 0.25},
    1: {"critic/score/mean": 0.5, "timing_s/step": 1800.0, "perf/total_num_tokens": 5e5},
    2: {"critic/score/mean": 0.75, "timing_s/step": 1800.0, "perf/total_num_tokens": 5e5},
    3: {"val-core/sums/reward/mean@1": 0.875},
}


def settings_of(directory: Path, **changes: object) -> TrainSettings:
    values = {
        "output_dir": str(directory),
        "model": {"path": "org/base-7b"},
        "data": {"path": ["openai/gsm8k:main", "/home/alice/secret/train.jsonl"], "prompt": "Question: {q}"},
        "reward": {"functions": ["exact_match"]},
        "actor": {"optimizer": {"lr": 2e-5}},
    }
    return files.replace(files.from_dict(values), {name.replace("__", "."): x for name, x in changes.items()})


def exported(directory: Path, settings: TrainSettings, **changes: object) -> Exported:
    directory.mkdir(parents=True, exist_ok=True)
    starts.record(settings, 0)
    made = Exported(run_dir=directory, settings=settings, step=2, name="me/new")
    return attrs.evolve(made, **changes)


def records(metrics: dict[int, dict[str, float]]) -> list[dict[str, float]]:
    return [{"step": step, **numbers} for step, numbers in metrics.items()]


def test_a_hub_reads_base_data_and_kind(tmp_path):
    made = exported(tmp_path / "run", settings_of(tmp_path / "run"))
    data = ModelCard(card(made, [], [])).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("org/base-7b", "transformers", "text-generation")
    assert data.datasets == ["openai/gsm8k"]
    adapted = attrs.evolve(made, settings=settings_of(tmp_path / "run", model__lora__rank=8), form="adapter")
    data = ModelCard(text := card(adapted, [], [])).data
    assert (data.library_name, data.to_dict()["base_model_relation"]) == ("peft", "adapter")
    assert 'PeftModel.from_pretrained(base, "me/new")' in text
    data = ModelCard(text := card(attrs.evolve(made, role="critic"), [], [])).data
    assert data.pipeline_tag == "token-classification"
    assert "AutoModelForTokenClassification" in text


def test_a_base_in_a_directory_is_named_without_the_directory(tmp_path):
    (tmp_path / "base").mkdir()
    made = exported(tmp_path / "run", settings_of(tmp_path / "run", model__path=str(tmp_path / "base")))
    text = card(made, [], [])
    assert ModelCard(text).data.base_model is None
    assert str(tmp_path) not in text
    assert "alice" not in text
    assert '"train.jsonl"' in text


def test_numbers_up_to_the_step_and_what_repeats_it(tmp_path):
    made = exported(tmp_path / "run", settings_of(tmp_path / "run"))
    log = JsonLines(tmp_path / "run" / "metrics.jsonl")
    for step, numbers in METRICS.items():
        log.log(step, numbers)
    log.close()
    exports.write_whole(tmp_path / "run" / exports.CONTENTS, b'{"files": []}')
    text = add_card(made, tmp_path / "run").read_text()
    assert "| sums | reward | mean&#64;1 | 0 | 0.25 | 0 | 0.25 |" in text
    assert "| mean reward in training | 0.500 in the first step, 0.750 in the last |" in text
    assert "| time in steps | 1.00 h |" in text
    assert "fppo train run.toml" in text
    assert "lr = 2e-05" in text
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    listed = json.loads((tmp_path / "run" / exports.CONTENTS).read_text())["files"]
    assert listed == ["README.md", "curves.png"]


def test_the_settings_of_a_card_are_those_of_the_run(tmp_path):
    settings = settings_of(tmp_path / "run", data__path=["openai/gsm8k:main"], data__prompt='"""\n```{q}', steps=7)
    text = card(exported(tmp_path / "run", settings), [], [])
    block = next(token.content for token in PARSER.parse(text) if token.type == "fence" and token.info == "toml")
    (tmp_path / "again.toml").write_text(block)
    again = files.replace(files.load(tmp_path / "again.toml"), {"output_dir": settings.output_dir})
    assert again == settings


def test_settings_that_changed_on_the_way_are_listed(tmp_path):
    settings = settings_of(tmp_path / "run")
    made = exported(tmp_path / "run", settings)
    changed = files.replace(settings, {"actor.optimizer.lr": 1e-5})
    starts.record(changed, 1)
    text = card(attrs.evolve(made, settings=changed), [], [])
    assert "| 1 | actor&#46;optimizer&#46;lr | 2e&#45;05 | 1e&#45;05 |" in text


def test_where_copies_of_the_run_are_is_left_out(tmp_path):
    settings = settings_of(tmp_path / "run", checkpoint__remote="s3://secret/run")
    made = exported(tmp_path / "run", settings)
    changed = files.replace(settings, {"checkpoint.remote": "s3://secret/other", "steps": 9})
    starts.record(changed, 1)
    text = card(attrs.evolve(made, settings=changed), [], [])
    assert "| 1 | steps |" in text
    assert "secret" not in text


def test_no_text_of_settings_or_data_is_markup(tmp_path):
    values = {"data__prompt": NASTY, "reward__functions": ["exact_match"], "data__source": NASTY, "log__project": NASTY}
    settings = settings_of(tmp_path / "run", **values)
    made = exported(tmp_path / "run", settings, name=NASTY)
    metrics = {0: {f"val-core/{NASTY.replace(chr(10), ' ')}/reward/mean@1": 0.25}}
    text = card(made, records(metrics), []).split("---\n", 2)[2]
    tokens = PARSER.parse(text)
    heads = [tokens[place + 1].content for place, token in enumerate(tokens) if token.type == "heading_open"]
    assert heads[1:] == ["Use", "Training", "Evaluation", "Repeat it"]
    children = [child for token in tokens for child in token.children or []]
    assert {child.type for child in children} <= {"text", "text_special", "html_inline", "code_inline", "softbreak"}
    assert {child.content for child in children if child.type == "html_inline"} <= {"<br>"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("card")
    tiny_run.write_task(directory)
    settings = tiny_run.settings(directory, steps=2, eval__before=False)
    assert actions.train(settings) == 0
    return directory / "run"


@pytest.mark.slow
def test_an_export_has_a_card_and_is_replaced_with_it(run, tmp_path, capsys):
    for _ in range(2):
        assert cli.main(["export", str(run), str(tmp_path / "out"), "--step", "1"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "The policy after step 1 of a run of fppo that trained start by gae and ppo&#95;clip" in text
    assert f"fppo=={jsonl.json_of(next((run / 'starts').glob('*.json')).read_text())['versions']['fppo']}" in text
    assert "| torch |" in text
    assert (tmp_path / "out" / "curves.png").exists()
    exports.check_replaceable(tmp_path / "out")
