"""A run is its directory: it can be moved and copied, forked and gone on with, and its record says what made it."""

import itertools
import json
import re
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from fppo import models, tree
from fppo.commands import actions, cli
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.runs import jsonl, samples
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import CheckpointError, Pending
from fppo.settings import files
from fppo.settings.train import TrainSettings
from tests import tiny_run

SETTINGS = {"checkpoint__keep": 9, "actor__optimizer__schedule": "constant"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The files of a task, and a run of four steps on it, `run`, which tests copy."""
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    train(directory, tiny_run.settings(directory, **SETTINGS))
    return directory


def train(directory: Path, settings: TrainSettings) -> None:
    """Trains by the command line, from a file in the directory."""
    files.save(settings, directory / "begin.toml")
    assert cli.main(["train", str(directory / "begin.toml")]) == 0


@pytest.fixture
def run(task, tmp_path):
    """A copy of that run, at another place."""
    return Path(shutil.copytree(task / "run", tmp_path / "copy"))


def digests(directory: Path) -> dict[int, str]:
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


def content(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def exported(directory: Path) -> dict[Path, bytes]:
    """An export without its card, which no run's own export has, and the list that names it."""
    card = {Path(name) for name in ("README.md", "curves.png", "fppo_files.json")}
    return {path: text for path, text in content(directory).items() if path not in card}


def fppo(capsys, *arguments: object, status: int = 0) -> str:
    """What a command prints, on both streams; it must end with this status."""
    capsys.readouterr()
    assert cli.main([str(word) for word in arguments]) == status
    return "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_copy_goes_on_by_itself_and_is_what_commands_read(task, run, capsys):
    before = content(task / "run")
    fppo(capsys, "train", run / "settings.toml", "--steps", 6)
    assert max(digests(run)) == 6
    assert content(task / "run") == before
    assert fppo(capsys, "eval", run).startswith("step 6\n")
    assert fppo(capsys, "eval", task / "run").startswith("step 4\n")
    assert "equal, bit for bit" in fppo(capsys, "replay", run, "--step", 6)
    assert "6 of 6" in Path(fppo(capsys, "report", run).strip()).read_text()
    fppo(capsys, "export", run, run.parent / "out")
    assert exported(run.parent / "out") == exported(run / "model")
    said = fppo(capsys, "ablate", "--op", "gae", "--implementations", "scan", "--replay", run, "--step", 6)
    assert "as recorded, bit for bit" in said


@pytest.mark.slow
def test_what_a_run_names_inside_of_itself_moves_with_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("runs/mine")
    tiny_run.write_task(run)
    given = tiny_run.settings(run, **SETTINGS, output_dir=str(run), data__eval_path=[str(run.resolve() / "test.jsonl")])
    train(tmp_path, given)
    shutil.move("runs", "elsewhere")
    moved = Path("elsewhere/mine")
    assert "equal, bit for bit" in fppo(capsys, "replay", moved, "--step", 3)
    assert fppo(capsys, "eval", moved).startswith("step 4\n")
    assert "other settings: steps 4 -> 5\n" in fppo(capsys, "train", moved / "settings.toml", "--steps", 5)
    monkeypatch.chdir(moved)
    assert fppo(capsys, "train", "settings.toml", "--steps", 6).count("->") == 1
    monkeypatch.chdir(tmp_path)
    assert not Path("runs").exists()
    assert max(digests(moved)) == 6


def test_a_directory_without_a_checkpoint_is_not_evaluated(run, capsys):
    shutil.rmtree(run / "checkpoints")
    assert "there is no checkpoint in" in fppo(capsys, "eval", run, status=2)
    assert "fppo eval reads the run" in fppo(capsys, "eval", run, "--output-dir", "x", status=2)


@pytest.mark.slow
def test_how_a_start_was_asked_for_is_none_of_the_runs_settings(task, tmp_path, capsys):
    whole = digests(task / "run")
    fork = checkpoint.path_of(task / "run" / "checkpoints", 2)
    file = tmp_path / "fork.toml"
    files.save(tiny_run.settings(task, output_dir=str(tmp_path / "fork"), **SETTINGS), file)
    ask = ("train", file, "--resume", fork)
    fppo(capsys, *ask, "--steps", 3)
    assert checkpoint.steps(tmp_path / "fork" / "checkpoints") == [2, 3]
    assert 'resume = "auto"' in (tmp_path / "fork" / "settings.toml").read_text()
    fppo(capsys, "train", tmp_path / "fork" / "settings.toml", "--steps", 4)  # the advice of a run that was stopped
    assert digests(tmp_path / "fork") == {step: whole[step] for step in (3, 4)}
    fppo(capsys, *ask, "--steps", 5)  # the same command again goes on too
    assert max(digests(tmp_path / "fork")) == 5
    assert "equal, bit for bit" in fppo(capsys, "replay", tmp_path / "fork", "--step", 3)
    shutil.rmtree(checkpoint.path_of(tmp_path / "fork" / "checkpoints", 2))
    said = fppo(capsys, "replay", tmp_path / "fork", "--step", 3, status=2)
    assert "began from the checkpoint of step 2, and has none before step 3 any more" in said
    said = fppo(capsys, "train", file, "--resume", checkpoint.path_of(fork.parent, 3), status=2)
    assert "holds the checkpoint of step 5 already: give another output_dir" in said
    new = tmp_path / "new"
    assert actions.train(tiny_run.settings(task, output_dir=str(new), resume="never", steps=1)) == 0
    fppo(capsys, "train", new / "settings.toml", "--steps", 2)
    assert sorted(digests(new)) == [1, 2]


@pytest.mark.slow
def test_a_fork_whose_settings_change_before_a_checkpoint_is_still_that_fork(task, tmp_path, monkeypatch, capsys):
    fork = checkpoint.path_of(task / "run" / "checkpoints", 2)
    file = tmp_path / "fork.toml"
    files.save(tiny_run.settings(task, output_dir=str(tmp_path / "fork"), **SETTINGS), file)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", killed)
        fppo(capsys, "train", file, "--resume", fork, status=130)
        fppo(capsys, "train", tmp_path / "fork" / "settings.toml", "--actor.optimizer.lr", "0.01", status=130)
    fppo(capsys, "train", file, "--resume", fork, "--steps", 3)
    assert sorted(digests(tmp_path / "fork")) == [3]


@pytest.mark.slow
def test_a_run_that_begins_anew_with_another_model_keeps_that_ones_config(task, tmp_path, monkeypatch, capsys):
    given = {"output_dir": str(tmp_path / "run"), "checkpoint__every": 0}

    def breaks(*_, **__):
        raise RuntimeError("mine")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", breaks)
        with pytest.raises(RuntimeError, match="mine"):
            actions.train(tiny_run.settings(task, **given))
    tokenizer = character_tokenizer(CHARACTERS)
    wide = small_model(len(tokenizer), width=32, layers=1)
    models.save(wide, models.init_params(wide, Key(0)), tmp_path / "wide", tokenizer=tokenizer)
    assert actions.train(tiny_run.settings(task, **given, model__path=str(tmp_path / "wide"), steps=1)) == 0
    assert fppo(capsys, "eval", tmp_path / "run").startswith("step 1\n")


def test_responses_of_any_checkpoint_are_sampled(task, run, capsys):
    resume = checkpoint.path_of(run / "checkpoints", 2)
    said = fppo(capsys, "rollout", run / "settings.toml", "--steps", 1, "--resume", resume)
    assert "batch 1/1" in said


@pytest.mark.slow
def test_a_fork_that_was_killed_before_its_first_checkpoint_goes_on_from_there(task, tmp_path, monkeypatch):
    fork = str(checkpoint.path_of(task / "run" / "checkpoints", 2))
    given = tiny_run.settings(task, output_dir=str(tmp_path / "fork"), resume=fork, **SETTINGS)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", killed)
        with pytest.raises(KeyboardInterrupt):
            actions.train(given)
    assert actions.train(files.load(tmp_path / "fork" / "settings.toml")) == 0
    assert sorted(digests(tmp_path / "fork")) == [3, 4]


@pytest.mark.slow
def test_a_checkpoint_that_failed_is_found_out_at_the_next_step(task, tmp_path, monkeypatch):
    def fails(*_, **__):
        result = Future()
        result.set_exception(CheckpointError("disk full"))
        return Pending(result)

    monkeypatch.setattr(checkpoint, "begin_save", fails)
    with pytest.raises(CheckpointError, match="disk full"):
        actions.train(tiny_run.settings(task, output_dir=str(tmp_path / "run"), steps=8, checkpoint__every=2))
    assert max(digests(tmp_path / "run")) == 3


@pytest.mark.slow
def test_an_error_lets_the_checkpoint_that_was_begun_be_written(task, tmp_path, monkeypatch):
    real = checkpoint.begin_save
    waited = []

    class Slow(Pending):
        def done(self):
            return False

        def wait(self, timeout=None):
            waited.append(self)
            return super().wait(timeout)

    monkeypatch.setattr(checkpoint, "begin_save", lambda *args, **more: Slow(real(*args, **more)._result))
    on_host, steps = samples.on_host, itertools.count(1)

    def broken(experience):
        if next(steps) == 2:
            raise RuntimeError("mine")
        return on_host(experience)

    monkeypatch.setattr(samples, "on_host", broken)
    with pytest.raises(RuntimeError, match="mine"):
        actions.train(tiny_run.settings(task, output_dir=str(tmp_path / "run")))
    assert len(waited) == 1
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1]


@pytest.mark.slow
def test_changed_settings_are_named_recorded_and_used_for_the_steps_that_they_made(run, capsys):
    said = fppo(capsys, "train", run / "settings.toml", "--steps", 6, "--actor.optimizer.lr", "0.01")
    assert "going on from step 4 with other settings: steps 4 -> 6, actor.optimizer.lr 0.001 -> 0.01\n" in said
    assert "other settings" not in fppo(capsys, "train", run / "settings.toml")
    names = [path.name for path in sorted((run / "starts").glob("*.toml"))]
    assert names == ["step_00000000.toml", "step_00000004.toml"]
    for step in (4, 5):
        assert "equal, bit for bit" in fppo(capsys, "replay", run, "--step", step)
    for step in (3, 4, 5):
        shutil.rmtree(checkpoint.path_of(run / "checkpoints", step))
    assert fppo(capsys, "replay", run, "--step", 6).count("equal, bit for bit") == 4
    said = fppo(capsys, "ablate", "--op", "gae", "--implementations", "scan", "--replay", run, "--step", 6)
    assert "as recorded, bit for bit" in said


@pytest.mark.slow
def test_fewer_steps_than_are_done_change_nothing(run, capsys):
    before = content(run)
    assert "steps = 2: step 4 is done" in fppo(capsys, "train", run / "settings.toml", "--steps", 2)
    assert content(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["half a line amid", "half a line at the end", "gone"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "digests.jsonl"])
def test_a_damaged_record_loses_nothing_else_and_what_is_gone_is_said(task, run, capsys, name, damage):
    path = run / name
    lines = path.read_text().splitlines(keepends=True)
    lost = {"half a line amid": -2, "half a line at the end": -1}
    number = len(lines) + lost.get(damage, 0) + 1
    if damage == "gone":
        path.unlink()
    else:
        lines[lost[damage]] = lines[lost[damage]][:50] + ("\n" if "amid" in damage else "")
        path.write_text("".join(lines))
    step = {"half a line amid": "3", "half a line at the end": "4", "gone": "1 to 4"}[damage]
    if name == "metrics.jsonl" and damage != "gone":
        said = fppo(capsys, "report", run)
        assert (f"left out: {path}, line {number}: not JSON" in said) == ("amid" in damage)
    said = fppo(capsys, "train", run / "settings.toml", "--steps", 5)
    assert f"{path} holds nothing of step {step}\n" in said
    assert (f"{path}, line {number}: not JSON" in said) == ("amid" in damage)
    assert path.with_name(f"{name}.damaged").exists() == ("amid" in damage)
    there = {line["step"] for line in jsonl.read(path)}
    assert there & set(range(1, 6)) == {1, 2, 3, 4, 5} - {int(x) for x in re.findall(r"\d", step.replace(" to ", "23"))}
    other = "metrics.jsonl" if name == "digests.jsonl" else "digests.jsonl"
    assert [line["step"] for line in jsonl.read(run / other)][-5:] == [1, 2, 3, 4, 5]
    assert "equal, bit for bit" in fppo(capsys, "replay", run, "--step", 5)
    assert max(digests(task / "run")) == 4


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_over_its_record(run, capsys):
    shutil.rmtree(run / "checkpoints")
    before = content(run)
    said = fppo(capsys, "train", run / "settings.toml", status=2)
    assert "holds the record of 4 steps, but no checkpoint to go on from" in said
    assert content(run) == before
    fppo(capsys, "train", run / "settings.toml", "--resume", "never", "--steps", 1)
    assert sorted(digests(run)) == [1]


def _unable_to_train(run: Path, task: Path) -> None:
    """Takes away what no command but training may need, and has the settings ask for what this machine lacks."""
    text = (run / "settings.toml").read_text()
    text = text.replace('device = "auto"', 'device = "cuda:99"').replace(str(task), str(task / "gone"))
    text = text.replace(str(task / "gone" / "test.jsonl"), str(task / "test.jsonl"))
    (run / "settings.toml").write_text(text)
    for file in run.glob("starts/*"):
        file.write_text(text)


@pytest.mark.slow
def test_evaluation_and_export_need_only_what_they_use(task, run, capsys):
    expected = fppo(capsys, "eval", run)
    _unable_to_train(run, task)
    fppo(capsys, "export", run, run.parent / "policy", "--step", 4)
    assert exported(run.parent / "policy") == exported(run / "model")
    fppo(capsys, "export", run, run.parent / "critic", "--critic")
    model, critic = models.load(run.parent / "critic", "value")
    shapes = {name: torch.empty(shape) for name, shape in model.shapes.items()}
    stored = checkpoint.load(shapes, run / "checkpoints", 4, part=".critic.params")
    assert tree.digest(dict(critic)) == tree.digest(stored)
    assert AutoModelForTokenClassification.from_pretrained(run.parent / "critic").num_labels == 1
    assert "device = 'cuda:99': t" in fppo(capsys, "eval", run, status=2)
    files_of_its_own = re.compile(r"_eval_\d+")
    again = fppo(capsys, "eval", run, "--device", "cpu")
    assert files_of_its_own.sub("", again) == files_of_its_own.sub("", expected)
    assert "device = 'cuda:99': t" in fppo(capsys, "export", run, run.parent / "x", "--device", "cuda:99", status=2)
    shutil.rmtree(run / "checkpoints")
    assert "holds no checkpoint" in fppo(capsys, "export", run, run.parent / "x", status=2)


def test_vllm_is_not_asked_for_an_export(run, capsys):
    file = run / "settings.toml"
    file.write_text(file.read_text().replace('engine = "embedded"', 'engine = "vllm"', 1))
    fppo(capsys, "export", run, run.parent / "policy")
    assert exported(run.parent / "policy") == exported(run / "model")


@pytest.mark.slow
def test_a_run_without_a_critic_exports_none(task, tmp_path, capsys):
    given = {"algorithm__advantage": "grpo", "rollout__n": 4, "steps": 1}
    assert actions.train(tiny_run.settings(task, output_dir=str(tmp_path / "run"), **given)) == 0
    said = fppo(capsys, "export", tmp_path / "run", tmp_path / "critic", "--critic", status=2)
    assert "the run has no critic: algorithm.advantage = 'grpo'" in said


@pytest.mark.parametrize("target", ["notes", "run", "settings.toml", "start"])
def test_an_export_deletes_nothing_of_a_users(task, run, tmp_path, capsys, target):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    place = {"run": run, "settings.toml": run / "settings.toml", "start": task / "start"}.get(target, tmp_path / target)
    before = content(tmp_path), content(task)
    said = fppo(capsys, "export", run, place, status=2)
    assert "give a" in said
    assert (content(tmp_path), content(task)) == before


def test_a_run_does_not_export_over_what_it_began_from(task, tmp_path, capsys):
    shutil.copytree(task / "start", tmp_path / "run" / "model")
    given = tiny_run.settings(task, output_dir=str(tmp_path / "run"), model__path=str(tmp_path / "run" / "model"))
    with pytest.raises(ValueError, match=r"is what model\.path names, and an export would replace it"):
        actions.train(given)
    (tmp_path / "other" / "model").mkdir(parents=True)
    (tmp_path / "other" / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt, which saving a model would delete"):
        actions.train(tiny_run.settings(task, output_dir=str(tmp_path / "other")))
    assert not (tmp_path / "other" / "settings.toml").exists()


@pytest.mark.slow
def test_a_settings_file_of_ones_own_in_the_runs_directory_is_kept(task, tmp_path, capsys):
    file = tmp_path / "mine" / "settings.toml"
    file.parent.mkdir()
    files.save(tiny_run.settings(task, output_dir=str(file.parent), steps=1), file)
    text = "# my thoughts\n" + file.read_text()
    file.write_text(text)
    for steps in (1, 2):
        fppo(capsys, "train", file, "--steps", steps)
    assert (file.parent / "settings.toml.kept").read_text() == text


@pytest.mark.slow
def test_what_was_written_before_a_run_kept_its_starts_is_read_where_it_stands(run, capsys):
    """Runs of the versions before have neither starts nor configs."""
    for name in ("starts", "configs"):
        shutil.rmtree(run / name)
    fppo(capsys, "train", run / "settings.toml", "--output-dir", run, "--steps", 5)
    assert fppo(capsys, "eval", run).startswith("step 5\n")
    assert json.loads((run / "configs" / "actor" / "config.json").read_text())["model_type"] == "qwen2"
