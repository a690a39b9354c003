"""Runs that draft from the responses of earlier epochs: they stop, go on and replay bit for bit."""

import pytest

from fppo import tree
from fppo.assembly.run import assemble
from fppo.commands import actions
from fppo.pipeline.train import iterate
from fppo.runs import jsonl
from tests import tiny_run

DRAFTS = {"rollout__draft_tokens": 4, "rollout__n": 2, "rollout__max_tokens": 8, "rollout__temperature": 0.3}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory, rows=4)  # a step has all of them
    return directory


def _digests(directory):
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


@pytest.mark.slow
def test_a_run_with_drafts_stops_goes_on_and_replays_bit_for_bit(task, tmp_path):
    given = DRAFTS | {"rollout__ahead": 1, "actor__optimizer__schedule": "constant"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert actions.train(tiny_run.settings(task, output_dir=str(whole), **given)) == 0
    for steps in (2, 4):
        actions.train(tiny_run.settings(task, output_dir=str(parts), steps=steps, **given))
    assert _digests(whole) == _digests(parts)
    assert actions.replay(whole, 4) == 0
    # a run may go on without drafts, and with them from where there were none
    for tokens in (0, 4):
        drafts = {"rollout__draft_tokens": tokens, "steps": 5 + (tokens > 0)}
        assert actions.train(tiny_run.settings(task, output_dir=str(parts), **given | drafts)) == 0


def test_a_prompt_that_comes_again_is_drafted_from_what_it_had(task):
    with assemble(tiny_run.settings(task, **DRAFTS)) as assembly:
        steps = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
        (run, first, early), (_, _, late) = (next(steps) for _ in range(2))
    assert [path for path, _ in tree.leaves_with_paths(run.cursor)] == [".epoch", ".position", ".earlier"]
    assert first.earlier is None
    assert len(run.cursor.earlier) == 4
    name = "rollout/drafts/accepted"
    assert float(late[name].total) > float(early[name].total)


def test_rows_of_turns_keep_none(task):
    turns = {"rollout__turns__respond": "calculator", "rollout__stop": ("=",)}
    with assemble(tiny_run.settings(task, **turns, **DRAFTS)) as assembly:
        assert assembly.run.cursor.earlier is None
