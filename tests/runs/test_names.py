"""Which step a checkpoint is of its manifest says, whatever its directory is called."""

import shutil

import pytest

from fppo.commands import cli
from fppo.runs import jsonl
from fppo.runtime import checkpoint
from fppo.settings import files
from tests import tiny_run


def _swap(one, other):
    one.rename(one.with_name("beside"))
    other.rename(one)
    one.with_name("beside").rename(other)


CHANGES = {
    "renamed to a later step": lambda at: at(2).rename(at(9)),
    "renamed to a step that comes": lambda at: at(2).rename(at(3)),
    "renamed to an earlier step": lambda at: (shutil.rmtree(at(1)), at(2).rename(at(1))),
    "swapped": lambda at: _swap(at(1), at(2)),
    "copied to a later step": lambda at: shutil.copytree(at(2), at(9)),
    "copied to a step that comes": lambda at: shutil.copytree(at(1), at(3)),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A task, a run of it that stands at step 2, and the digests of one that was left alone."""
    task = tmp_path_factory.mktemp("task")
    tiny_run.write_task(task)
    settings = tiny_run.settings(task, steps=3, eval__before=False, data__eval_path=[], checkpoint__keep=9)
    files.save(settings, task / "run.toml")
    assert cli.main(["train", str(task / "run.toml"), "--steps", "2"]) == 0
    shutil.copytree(task / "run", task / "begun")
    assert cli.main(["train", str(task / "run.toml")]) == 0
    return task, jsonl.read(task / "run" / "digests.jsonl")


FAST = ("renamed to a step that comes", "swapped")


@pytest.mark.slow
@pytest.mark.parametrize("change", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in CHANGES])
def test_a_run_goes_on_bit_for_bit_from_what_its_manifests_say(begun, tmp_path, capsys, change):
    task, digests = begun
    run = tmp_path / "run"
    shutil.copytree(task / "begun", run)
    checkpoints = run / "checkpoints"
    CHANGES[change](lambda step: checkpoint.path_of(checkpoints, step))
    assert checkpoint.steps(checkpoints)[-1] == 2
    assert cli.main(["train", str(task / "run.toml"), "--output-dir", str(run), "--checkpoint.keep", "9"]) == 0
    said = capsys.readouterr().err
    assert "as its manifest says; its name is wrong" in said
    assert jsonl.read(run / "digests.jsonl") == digests
    assert checkpoint.steps(checkpoints)[-1] == 3
    assert checkpoint.step_of(checkpoint.path_of(checkpoints, 3)) == 3
    assert cli.main(["replay", str(run), "--step", "3"]) == 0
    assert cli.main(["eval", str(run), "--data.eval-path", str(task / "test.jsonl")]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "second"), "--step", "2"]) == 0


@pytest.mark.slow
def test_old_checkpoints_are_dropped_by_their_steps(begun, tmp_path):
    task, _ = begun
    run = tmp_path / "run"
    shutil.copytree(task / "begun", run)
    at = [checkpoint.path_of(run / "checkpoints", step) for step in range(10)]
    at[1].rename(at[9])
    assert cli.main(["train", str(task / "run.toml"), "--output-dir", str(run), "--checkpoint.keep", "2"]) == 0
    assert sorted((run / "checkpoints").iterdir()) == at[2:4]


@pytest.mark.slow
def test_a_checkpoint_that_is_named_is_the_one_that_is_loaded(begun, tmp_path, capsys):
    """A directory that holds another run's step beside the one with that name is refused: two are of one step."""
    task, _ = begun
    shutil.copytree(task / "begun" / "checkpoints", tmp_path / "checkpoints")
    copy = checkpoint.path_of(tmp_path / "checkpoints", 7)
    shutil.copytree(checkpoint.path_of(tmp_path / "checkpoints", 1), copy)
    asked = ["train", str(task / "run.toml"), "--output-dir", str(tmp_path / "fork"), "--resume", str(copy)]
    assert cli.main(asked) == 2
    assert f"{copy} holds the checkpoint of step 1, as its manifest says, and so does" in capsys.readouterr().err
    shutil.rmtree(checkpoint.path_of(tmp_path / "checkpoints", 1))
    assert cli.main(asked) == 0
    assert checkpoint.steps(tmp_path / "fork" / "checkpoints")[-1] == 3
