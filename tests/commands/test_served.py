"""What is not served or exported is named, and what a run is read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from fppo.commands import cli
from fppo.runs import saved, starts
from fppo.settings import files
from tests import tiny_run


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("{run} --exact", "is a run, which is served as it trained: leave --exact and --compute-dtype out"),
        ("{run} --compute-dtype bfloat16", "is a run, which is served as it trained: leave --exact and"),
        ("{run} --step 3", "holds no checkpoint of step 3"),
        ("a b", "2 of them, a, b: several need --tinker"),
        ("", "give the output_dir of a run, or a model"),
        ("a b a --tinker", "a, b, a: a model is given twice"),
        ("a --step 1 --tinker", "leave --step and --follow out"),
        ("a {run} --tinker", "is a run: export it"),
    ],
)
def test_what_is_not_served_is_named(tmp_path, capsys, monkeypatch, words, text):
    monkeypatch.setenv("FPPO_API_KEY", "tml-server")
    (tmp_path / "run").mkdir()
    starts.record(tiny_run.settings(tmp_path), 0)
    assert cli.main(["serve", *words.format(run=tmp_path / "run").split(), "--port", "0"]) == 2
    assert text in capsys.readouterr().err


def test_a_critic_that_is_none_or_no_model_is_not_exported(tmp_path):
    none = tiny_run.settings(tmp_path, algorithm__advantage="rloo", rollout__n=2)
    with pytest.raises(ValueError, match=r"the run has no critic: algorithm.advantage = 'rloo' trains none"):
        saved.export(none, tmp_path / "out", 4, "critic")
    reading = tiny_run.settings(tmp_path, critic__reads="confidence")
    with pytest.raises(ValueError, match=r"critic is not a model: with critic\.reads = 'confidence'"):
        saved.export(reading, tmp_path / "out", 4, "critic")


def test_a_run_is_read_from_its_own_configs_where_it_has_them(tmp_path):
    settings = tiny_run.settings(tmp_path, data__chat_template="t", data__chat=True)
    assert saved.bare(settings) is settings
    (tmp_path / "run" / "configs").mkdir(parents=True)
    own = tmp_path / "run" / "configs"
    found = saved.bare(settings)
    expected = {"model.path": str(own / "actor"), "model.critic_path": str(own / "critic"), "data.chat_template": None}
    assert {name: new for name, (_, new) in files.changes(files.to_dict(settings), found).items()} == expected
    none = tiny_run.settings(tmp_path, algorithm__advantage="rloo", rollout__n=2)
    assert saved.bare(none).model.critic_path is None
    adapted = tiny_run.settings(tmp_path, model__lora__rank=2)
    assert saved.bare(adapted) is adapted
    assert Path(found.model.path).name == "actor"
