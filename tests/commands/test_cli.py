"""The command line: arguments reach their command, and mistakes are one message."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tomllib

import pytest

import fppo
from fppo._errors import RunFailed, UsageError
from fppo.commands import cli
from fppo.commands.arguments import file_and_overrides, processes
from fppo.commands.ends import status_of
from fppo.runtime.checkpoint import CheckpointError
from fppo.settings import checks, files


def test_a_supervised_run_needs_nothing_that_it_does_not_read(task, started, capsys):
    """No reward, and no sampling that goes with another; what is wrong with the rest is named."""
    begun, file = started(3), str(task / "run.toml")
    unread = ["--reward.functions", "--rollout.n", "3", "--sft.response", "answer"]
    assert cli.main(["sft", file, *unread, "--nproc", "2"]) == 3
    assert len(begun()) == 1
    assert cli.main(["train", file, *unread]) == cli.main(["sft", file, "--sft.epochs", "0", "--data.path"]) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in ("reward.functions", "rollout.n", "sft.epochs", "data.path"))
    assert cli.main(["sft", file, "--sft.epoch", "1"]) == 2
    assert "did you mean sft.epochs?" in capsys.readouterr().err


def test_settings_that_conflict_stop_before_any_work(task, capsys):
    assert cli.main(["train", str(task / "run.toml"), "--rollout.n", "3", "--rollout.batch-sise", "4"]) == 2
    assert not (task / "run").exists()
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
    ("error", "status"),
    [(CheckpointError("torn"), 2), (OSError("disk full"), 2), (RunFailed("no"), 1), (BrokenPipeError(32, "torn"), 2)],
)
def test_errors_of_commands_are_one_message(capfd, error, status):
    assert status_of(error, "replay", show=False) == status
    said = capfd.readouterr().err
    assert said.startswith(f"fppo replay: {error}")
    assert said.endswith("\n(--traceback shows where)\n")
    assert status_of(UsageError("give a step"), "replay", show=False) == 2
    assert capfd.readouterr().err == "fppo replay: give a step\n"


def interrupted_rows():
    yield {"prompt": "1+1=", "answer": "2"}
    raise KeyboardInterrupt


def test_an_interrupt_ends_a_command_with_130(task, capsys):
    given = ["--data.rows", f"{__name__}:interrupted_rows", "--data.path"]
    assert cli.main(["train", str(task / "run.toml"), *given]) == 130
    assert capsys.readouterr().err.endswith("fppo train: interrupted\n")


def test_a_defect_keeps_its_traceback():
    with pytest.raises(KeyError):
        status_of(KeyError("x"), "replay", show=False)


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("command", "goes_on"), [("train", True), ("plan", False)])
def test_what_the_system_refuses_is_said_of_what(capfd, command, goes_on, number):
    assert status_of(IsADirectoryError(21, "Is a directory", "plan.json"), command, show=False) == 2
    assert f"fppo {command}: plan.json: is a directory\n" in capfd.readouterr().err
    assert status_of(OSError(number, "No space left on device", "plan.json"), command, show=False) == 2
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


def test_the_least_numbers_of_processes_and_restarts_are_taken():
    found, left = processes(["--nproc", "1", "--steps", "3", "--max-restarts=0"])
    assert (found.nproc, found.max_restarts, left) == (1, 0, ["--steps", "3"])
    for words in (["--nproc", "0"], ["--max-restarts", "-1"], ["--nproc"]):
        with pytest.raises(ValueError, match="give a whole number"):
            processes(words)
