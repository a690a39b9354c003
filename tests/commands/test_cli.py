"""The command line: arguments reach their command, and mistakes are one message."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fppo
from fppo.commands import actions, cli, distributed
from fppo.commands.actions import ALONE
from fppo.commands.arguments import file_and_overrides, processes
from fppo.runtime.checkpoint import CheckpointError
from fppo.settings import checks, files, places
from fppo.settings.train import TrainSettings

MINIMAL = 'model.path = "m"\ndata.path = "a.jsonl"\nreward.functions = "exact_match"\n'


@pytest.fixture
def calls(monkeypatch) -> list[tuple[Any, ...]]:
    """What reaches the commands; each returns 3."""
    made: list[tuple[Any, ...]] = []

    def command(name: str) -> Any:
        return lambda *arguments, **named: made.append((name, *arguments, *named.values())) or 3

    for name in ("quickstart", "train", "evaluate", "replay", "export"):
        monkeypatch.setattr(actions, name, command(name))
    monkeypatch.setattr(actions, "settings_of", lambda directory, step=None: TrainSettings())
    monkeypatch.setattr(places, "place_problems", lambda settings: [])  # of what is not there
    return made


def test_arguments_reach_their_command(calls, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(MINIMAL)
    settings = files.load(file)
    assert cli.main(["quickstart", "--seed", "4"]) == 3
    assert cli.main(["train", str(file), "--steps", "9"]) == 3
    flags = "--steps 9 --model.path m --data.path a.jsonl --reward.functions exact_match"
    assert cli.main(["train", *flags.split()]) == 3
    assert cli.main(["eval", str(tmp_path), "--steps", "9"]) == 3
    assert cli.main(["replay", "r", "--step", "7"]) == 3
    assert cli.main(["export", "r", "out"]) == 3
    assert cli.main(["export", "r", "out", "--critic", "--step", "2", "--device", "cuda", "--merge"]) == 3
    assert cli.main(["export", "r", "out", "--push", "me/new", "--public"]) == 3
    changed = files.replace(settings, {"steps": 9, "mesh.shard": 1})
    quickstart, *others = calls
    assert quickstart[:-1] == ("quickstart", Path("runs/quickstart"), 4)
    assert others == [
        ("train", changed, ALONE),
        ("train", changed, ALONE),
        ("evaluate", files.replace(changed, {"output_dir": str(tmp_path)}), ALONE),
        ("replay", Path("r"), 7, ALONE),
        ("export", Path("r"), Path("out"), None, "actor", "cpu", False, None, False),
        ("export", Path("r"), Path("out"), 2, "critic", "cuda", True, None, False),
        ("export", Path("r"), Path("out"), None, "actor", "cpu", False, "me/new", True),
    ]


def test_a_supervised_run_needs_nothing_that_it_does_not_read(calls, tmp_path, monkeypatch, capsys):
    """No reward, and no sampling that goes with another; what is wrong with the rest is named."""
    monkeypatch.setattr(actions, "sft", lambda settings, here: calls.append(settings) or 3)
    file = tmp_path / "run.toml"
    file.write_text(
        'model.path = "m"\ndata.path = "a.jsonl"\nsft.response = "answer"\n[rollout]\nn = 3\nbatch_size = 4\n'
    )
    assert cli.main(["sft", str(file)]) == 3
    assert (calls[-1].rollout.n, calls[-1].sft.response) == (3, "answer")
    calls.clear()
    assert cli.main(["train", str(file)]) == cli.main(["sft", str(file), "--sft.epochs", "0", "--data.path"]) == 2
    assert calls == []
    said = capsys.readouterr().err
    assert all(text in said for text in ("reward.functions", "rollout.n", "sft.epochs", "data.path"))
    assert cli.main(["sft", str(file), "--sft.epoch", "1"]) == 2
    assert "did you mean sft.epochs?" in capsys.readouterr().err


def test_settings_that_conflict_stop_before_any_work(calls, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(MINIMAL + "[rollout]\nn = 3\nbatch_sise = 4\n")
    assert cli.main(["train", str(file)]) == 2
    assert calls == []
    error = capsys.readouterr().err
    assert "2 problems" in error
    assert "did you mean rollout.batch_size?" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean train?"),
        (["zzz"], "there are quickstart"),
        (["train", "no_such.toml"], "no such file"),
        (["eval", "no_such_run"], "no such file"),
        (["eval"], "output_dir"),
        (["train", "--steps", "3", "run.toml"], "give it first: fppo train run.toml --steps 3"),
        (["train", "--help", "rolout"], "did you mean rollout?"),
        (["report", "no_such_run"], "no such directory"),
        (["train", "--nproc", "two"], "--nproc two: give a whole number, 1 or more"),
        (["train", "--nproc=0"], "--nproc 0: give a whole number, 1 or more"),
        (["quickstart", "--max-restarts"], "--max-restarts : give a whole number, 0 or more"),
    ],
)
def test_mistakes_are_one_message(arguments, message, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_behind_a_flag_is_its_value(tmp_path):
    """The run that is there already, without a file of its own: all settings are flags."""
    (tmp_path / "settings.toml").touch()
    for rest in (["--output-dir", str(tmp_path)], [f"--output-dir={tmp_path}"]):
        assert file_and_overrides(rest, "train") == (None, rest)
    for flags in (["--steps", "3"], ["--steps=3"], ["--output-dir=x", "--steps=3"]):
        with pytest.raises(ValueError, match=f"{tmp_path} comes after flags; give it first: .* {' '.join(flags)}"):
            file_and_overrides([*flags, str(tmp_path)], "train")


def test_a_traceback_is_shown_on_request(capsys):
    assert cli.main(["report", "no_such_run", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(CheckpointError("torn"), 2), (OSError("disk full"), 2), (KeyboardInterrupt(), 130)]
)
def test_errors_of_commands_are_one_message(calls, monkeypatch, capsys, error, status):
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(actions, "replay", fail)
    assert cli.main(["replay", "r", "--step", "7"]) == status
    assert capsys.readouterr().err.startswith(f"fppo replay: {str(error) or 'interrupted'}")


def test_a_defect_keeps_its_traceback(calls, monkeypatch):
    monkeypatch.setattr(actions, "replay", lambda *arguments: {}["x"])
    with pytest.raises(KeyError):
        cli.main(["replay", "r", "--step", "7"])


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert cli.main([]) == 2


def test_without_a_file_it_says_how_to_come_by_one(capsys):
    for command in ("train", "rollout"):
        for more in ([], ["--nproc", "2"]):
            assert cli.main([command, *more]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"fppo {command}: give a file of settings: fppo {command} FILE.toml; ")
            assert "\n  [model]\n" in said
            assert "Traceback" not in said
    assert checks.problems(files.from_dict(tomllib.loads(cli.LEAST))) == []


def test_arguments_that_are_missing_are_named(capsys):
    for command, names in (("report", "RUN"), ("diff", "RUN RUN"), ("export", "RUN TARGET")):
        with pytest.raises(SystemExit) as ended:
            cli.main([command])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert all(re.search(rf"\b{name}\b", said) for name in names.split()), said


@pytest.mark.parametrize("columns", [10, 40, 80])
def test_lines_are_as_narrow_as_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (["--help"], ["train", "--help"]):
        assert cli.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        wide = [line for line in lines if len(line) > max(columns, 28) and len(line.split()) > 3]
        assert wide == [line for line in wide if line.startswith("fppo ") or "usage:" in line]


def test_help_shows_sections_and_the_settings_of_one(capsys):
    for command in ("train", "rollout"):
        assert cli.main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert len(shown.splitlines()) <= 60
        assert all(f"  {name} " in shown for name in ("rollout", "algorithm", "log"))
    for name in ("rollout", "rollout.vllm", "critic"):
        assert cli.main(["train", "--help", name]) == 0
        shown = capsys.readouterr().out
        own = [path for path in files.paths() if path.startswith(f"{name}.")]
        flags = [line.split()[0].rstrip(",") for line in shown.splitlines() if line.startswith("  --")]
        settings = [flag for flag in flags if not flag.endswith(".KEYWORD")]
        assert sorted(settings) == sorted(f"--{path.replace('_', '-')}" for path in own)
        assert ("--critic.loss.KEYWORD" in flags) == (name == "critic")
    assert "[1e-05]" in shown.partition("--critic.optimizer.lr")[2]  # the section's own default


def test_the_help_of_eval_is_what_an_evaluation_takes(capsys):
    assert cli.main(["eval", "--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 60
    assert all(f"--{name}" in shown for name in ("eval.n", "eval.top-p", "eval.stop", "data.eval-path"))
    assert "--actor" not in shown


def test_help_answers_without_loading_what_is_slow():
    program = (
        "import sys; from fppo.commands import cli\n"
        "for name in ([], *([x] for x in cli.COMMANDS)):\n"
        "    try: cli.main([*name, '--help'])\n"
        "    except SystemExit: pass\n"
        "    slow = [x for x in ('torch', 'transformers', 'matplotlib', 'datasets') if x in sys.modules]\n"
        "    if slow: sys.exit(f'{name} loads {slow}')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage:") == 1 + len(cli.COMMANDS)


def test_a_report_is_written(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"]],
    ids=" ".join,
)
def test_a_reader_that_has_gone_is_no_error(arguments):
    """As in `fppo ... | head`: more than fits into a buffer, and less."""
    ours, theirs = os.pipe()
    os.close(ours)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "fppo", *arguments]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch, capfd):
    def breaks(arguments):
        raise BrokenPipeError(32, "Broken pipe", "an engine's")

    monkeypatch.setattr(cli, "COMMANDS", {"plan": breaks})
    assert cli.main(["plan"]) == 2
    assert "fppo plan: an engine's: broken pipe\n" in capfd.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("command", "goes_on"), [("train", True), ("plan", False)])
def test_what_the_system_refuses_is_said_of_what(monkeypatch, capfd, command, goes_on, number):
    def refused(arguments):
        raise IsADirectoryError(21, "Is a directory", "plan.json")

    def full(arguments):
        raise OSError(number, "No space left on device", "plan.json")

    monkeypatch.setattr(cli, "COMMANDS", {command: refused})
    assert cli.main([command]) == 2
    assert f"fppo {command}: plan.json: is a directory\n" in capfd.readouterr().err
    monkeypatch.setattr(cli, "COMMANDS", {command: full})
    assert cli.main([command]) == 2
    said = capfd.readouterr().err
    assert f"fppo {command}: plan.json: no space left on device (the disk is full; free space" in said
    assert ("resume from the last checkpoint" in said) == goes_on


@pytest.mark.parametrize("name", cli.COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_one_form_and_costs_no_torch(capsys, name, flag):
    assert cli.main([name, flag]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: fppo {name} ")
    assert "Traceback" not in said
    assert "╭" not in said  # the boxes of another renderer


def test_the_version_is_that_of_the_distribution(capsys):
    for flag in ("--version", "-V"):
        assert cli.main([flag]) == 0
        assert capsys.readouterr().out == f"fppo {fppo.__version__}\n"


def test_a_replay_takes_processes(calls, monkeypatch):
    monkeypatch.setattr(distributed, "run", lambda command, settings, arguments, *processes: calls.append(processes))
    assert cli.main(["replay", "runs/a", "--step", "3", "--nproc", "2"]) == 0
    assert calls[-1] == (2,)
    assert cli.main(["replay", "runs/a", "--step", "3", "--max-restarts", "2"]) == 2


def test_where_an_error_came_from_is_offered_where_that_tells_something(calls, capsys, monkeypatch):
    assert cli.main(["replay", "runs/a", "--step", "3", "--nproc", "none"]) == 2
    assert "--traceback" not in capsys.readouterr().err

    def broken(*arguments):
        raise ValueError("of other code")

    monkeypatch.setattr(actions, "settings_of", broken)
    assert cli.main(["replay", "runs/a", "--step", "3"]) == 2
    assert "(--traceback shows where)" in capsys.readouterr().err


def test_the_least_numbers_of_processes_and_restarts_are_taken():
    found, left = processes(["--nproc", "1", "--steps", "3", "--max-restarts=0"])
    assert (found.nproc, found.max_restarts, left) == (1, 0, ["--steps", "3"])
    for words in (["--nproc", "0"], ["--max-restarts", "-1"], ["--nproc"]):
        with pytest.raises(ValueError, match="give a whole number"):
            processes(words)
