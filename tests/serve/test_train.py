"""A run whose environment is an agent, and what is refused of its settings."""

from __future__ import annotations

import attrs
import pytest

from fppo.assembly.environments import maker_of
from fppo.commands import actions
from fppo.quickstart import CHARACTERS, character_tokenizer
from fppo.runs import jsonl, sample_files
from fppo.settings import files
from fppo.settings.rollout import EnvironmentSettings
from tests import tiny_run

PLAY = "tests.serve.players:adding"


def settings(directory, **changes):
    fixed = {
        "data__path": [],
        "data__eval_path": [],
        "reward__functions": [],
        "rollout__max_tokens": 12,
        "rollout__n": 2,
        "rollout__environment__name": "agent",
        "rollout__environment__play": PLAY,
        "rollout__environment__eval_episodes": 4,
        "algorithm__advantage": "rloo",
        "steps": 2,
    }
    return tiny_run.settings(directory, **{**fixed, **changes})


@pytest.mark.slow
def test_an_agent_trains_by_its_settings(tmp_path):
    tiny_run.write_task(tmp_path)
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "start")
    assert actions.train(settings(tmp_path)) == 0
    lines = [line for line in jsonl.read(tmp_path / "run" / "metrics.jsonl") if "environment/first" in line]
    assert len(lines) == 2
    assert all(line["environment/rows"] == 1 and line["environment/failures"] == 0 for line in lines)
    table = sample_files.read(sample_files.files(tmp_path / "run" / "samples")[1])
    rows = table.to_pylist()
    assert {len([x for x in row["turn_ids"] if x >= 0]) > 0 for row in rows} == {True}
    assert all(row["prompt"].endswith("=") for row in rows)
    assert all(row["score"] == pytest.approx(row["score.environment"]) for row in rows)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"play": "tests.serve.players:nobody"}, "has no 'nobody'"),
        ({"play": PLAY, "concurrency": 0}, "must be above 0"),
        ({"play": PLAY, "rows": "some"}, 'give "longest" or "all"'),
    ],
)
def test_an_agent_that_cannot_play_is_refused(keywords, text):
    with pytest.raises(ValueError, match=text):
        maker_of(EnvironmentSettings(name="agent", keywords=keywords))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rollout__environment__plays": PLAY}, "plays"),
        ({"rollout__turns__max_turns": 3}, "rollout.turns.max_turns"),
        ({"mesh__shard": 2}, "rollout.environment.name"),
    ],
)
def test_settings_that_an_agent_does_not_go_with_are_named(tmp_path, changes, name):
    with pytest.raises(files.SettingsError, match=name):
        files.check(settings(tmp_path, **changes))


def test_an_agent_needs_its_name(tmp_path):
    whole = settings(tmp_path)
    bare = attrs.evolve(whole, rollout=attrs.evolve(whole.rollout, environment=EnvironmentSettings(name="agent")))
    with pytest.raises(files.SettingsError, match="play"):
        files.check(bare)
