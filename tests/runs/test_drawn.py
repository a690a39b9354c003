"""A run goes on with the prompts and rows that it began with, or says which are others, and asks."""

from __future__ import annotations

import json
import shutil

import pytest

from fppo import data
from fppo.commands import cli
from fppo.runtime import checkpoint
from fppo.settings import files
from tests import tiny_run
from tests.data.rows import tokenizer

TEMPLATE = "{{ messages[0].content }}{# 1 #}"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of two steps, and the files that it was made from."""
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    (directory / "t.jinja").write_text(TEMPLATE)
    more = {"data__chat": True, "data__chat_template": str(directory / "t.jinja"), "eval__max_prompts": 8}
    files.save(tiny_run.settings(directory, steps=1, **more), directory / "run.toml")
    assert cli.main(["train", str(directory / "run.toml")]) == 0
    return directory


@pytest.fixture
def task(done, tmp_path):
    shutil.copytree(done, tmp_path / "task")
    text = (done / "run.toml").read_text().replace(str(done), str(tmp_path / "task"))
    (tmp_path / "task" / "run.toml").write_text(text)
    return tmp_path / "task"


def goes_on(task, *overrides):
    return cli.main(["train", str(task / "run.toml"), "--steps", "2", *overrides])


def rewritten(task, name, change):
    rows = [json.loads(line) for line in (task / name).read_text().splitlines()]
    (task / name).write_text("\n".join(map(json.dumps, change(rows))) + "\n")


CHANGES = {
    "as tokens and the prompts as rewards read them": {
        "a row more": lambda rows: [*rows, rows[0]],
        "another order": lambda rows: [rows[1], rows[0], *rows[2:]],
        "another prompt": lambda rows: [{**rows[0], "prompt": "9+9="}, *rows[1:]],  # a chat's, which rewards read too
    },
    "as rewards read them": {
        "another answer": lambda rows: [{**rows[0], "answer": "7"}, *rows[1:]],
        "another kind": lambda rows: [{**rows[0], "answer": int(rows[0]["answer"])}, *rows[1:]],
        "another field": lambda rows: [{**rows[0], "level": 1}, *rows[1:]],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "change"), [(which, name) for which, each in CHANGES.items() for name in each])
def test_other_rows_are_named_and_wait_for_a_setting(task, capsys, which, change):
    rewritten(task, "train.jsonl", CHANGES[which][change])
    assert goes_on(task) == 2
    said = capsys.readouterr().err
    assert f"data: the prompts {which} differ from those that " in said
    assert "or data.may_change = true to go on with these" in said
    assert checkpoint.steps(task / "run" / "checkpoints") == [1]


def test_another_template_is_named(task, capsys):
    (task / "t.jinja").write_text("{{ messages[0].content }}=")
    assert goes_on(task) == 2
    assert "data: the prompts as tokens differ from those that " in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_and_with_others_if_asked(task, capsys):
    (task / "t.jinja").write_text(TEMPLATE.replace("1", "2"))  # which changes no prompt
    (task / "train.jsonl").rename(task / "moved.jsonl")
    (task / "moved.jsonl").write_text((task / "moved.jsonl").read_text())
    (task / "other").mkdir()
    shutil.move(task / "moved.jsonl", task / "other" / "train.jsonl")
    place = ["--data.path", str(task / "other" / "train.jsonl")]
    rewritten(task, "test.jsonl", lambda rows: rows[::-1])
    assert goes_on(task, *place) == 0
    said = capsys.readouterr().err
    assert "going on with other data than step_00000001 was made with: the held-out prompts as tokens" in said
    rewritten(task / "other", "train.jsonl", lambda rows: rows[::-1])
    assert cli.main(["train", str(task / "run.toml"), "--steps", "3", *place]) == 2
    allowed = [*place, "--data.may-change"]
    assert cli.main(["train", str(task / "run.toml"), "--steps", "3", *allowed]) == 0
    assert "with other data than step_00000002 was made with: the prompts as tokens and" in capsys.readouterr().err
    assert cli.main(["train", str(task / "run.toml"), "--steps", "4", *place]) == 0  # it is the run's data now


@pytest.mark.slow
def test_a_checkpoint_of_a_time_without_notes_is_gone_on_from(task):
    manifest = next((task / "run" / "checkpoints").glob("step_*")) / "state.json"
    content = json.loads(manifest.read_text())
    assert content.pop("notes")
    from fppo.runtime import _checkpoint_files as stored

    content.pop("digest")
    manifest.write_text(json.dumps(content | {"digest": stored._digest(stored._canonical(content))}))
    rewritten(task, "train.jsonl", lambda rows: rows[::-1])
    assert goes_on(task) == 0


def test_digests_know_where_one_prompt_ends():
    ones = [data.digests_of(data.prompt_set(tokens, pad_token_id=0)) for tokens in ([[1, 2], [3]], [[1], [2, 3]])]
    assert ones[0]["as tokens"] != ones[1]["as tokens"]
    assert ones[0]["as rewards read them"] == ones[1]["as rewards read them"]
    texts = [data.digests_of(data.prompt_set(["1"], tokenizer(), ground_truths=[truth])) for truth in ("1", 1, None)]
    assert len({each["as rewards read them"] for each in texts}) == 3
