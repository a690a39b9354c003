"""Scripts for shells offer the commands, the flags of each, and the words that a flag takes."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from fppo.commands import cli, completion
from fppo.settings import files


def offered(script, *words):
    """What bash offers for the last of the words typed."""
    typed = " ".join(f"'{word}'" for word in words)
    print_all = 'printf "%s\\n" "${COMPREPLY[@]}"'
    lines = [script, f"COMP_WORDS=({typed})", f"COMP_CWORD={len(words) - 1}", "_fppo", print_all]
    said = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True, cwd="/")
    assert said.stderr == ""
    return said.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_what_is_typed():
    script = completion.script("bash", cli.COMMANDS)
    assert offered(script, "fppo", "") == [*cli.COMMANDS, "--help", "--version"]
    assert offered(script, "fppo", "comp") == ["compare", "completion"]
    assert offered(script, "fppo", "completion", "") == ["bash", "zsh", "fish"]
    assert offered(script, "fppo", "train", "x.toml", "--actor.optimizer.lr") == ["--actor.optimizer.lr"]
    assert offered(script, "fppo", "train", "x.toml", "--rollout.engine", "v") == ["vllm"]
    assert offered(script, "fppo", "replay", "--") == ["--step", "--device", "--nproc", "--help", "--traceback"]
    assert "etc" in offered(script, "fppo", "train", "")  # files
    assert offered(script, "fppo", "trace", "--nproc") == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("fppo comp", ["compare", "completion"]),
        ("fppo completion ", ["bash", "fish", "zsh"]),
        ("fppo train x.toml --rollout.engine v", ["vllm"]),
        ("fppo sft x.toml --sft.optimizer.l", ["--sft.optimizer.lr"]),
        ("fppo view compare --ex", ["--export", "--export-mb"]),  # a run may have a command's name
    ],
)
def test_fish_completes_what_is_typed(typed, expected):
    script = completion.script("fish", cli.COMMANDS) + f"\ncomplete -C '{typed}'"
    said = subprocess.run(["fish", "--no-config"], input=script, capture_output=True, text=True, check=True, cwd="/")
    assert (said.stderr, [line.split("\t")[0] for line in said.stdout.split("\n") if line]) == ("", expected)


def test_every_setting_and_every_option_is_offered():
    flags = completion.flags_of(cli.COMMANDS["train"])
    wanted = {f"--{path.replace('_', '-')}" for path in files.paths()}
    assert wanted <= {*flags}
    assert flags["--device"] == ()
    assert "embedded" in flags["--rollout.engine"]
    assert {"--vary", "--seeds", *wanted} <= {*completion.flags_of(cli.COMMANDS["compare"])}
    for shell in completion.SHELLS:
        script = completion.script(shell, cli.COMMANDS)
        assert all(command in script for command in cli.COMMANDS)


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "completion"])
def test_whatever_flag_the_help_of_a_command_names_is_offered(command, capsys):
    """Arguments without a flag are not offered, however often one asks."""
    assert cli.main([command, "--help"]) == 0
    said = capsys.readouterr().out
    named = set(re.findall(r"(?m)^  (--[a-z][a-z.-]*)(?=[ ,\n])", said))
    processes = {flag for flag in ("--nproc", "--max-restarts") if flag in said.splitlines()[0]}
    assert named | processes <= {*completion.flags_of(cli.COMMANDS[command])}
    assert processes == {*completion.flags_of(cli.COMMANDS[command])} & {"--nproc", "--max-restarts"}
    assert not {"--run", "--runs", "--target", "--targets", "--trainer"} & {*completion.flags_of(cli.COMMANDS[command])}


def test_a_shell_that_there_is_not(capsys):
    assert cli.main(["completion", "bahs"]) == 2
    assert "fppo completion: there is no completion for 'bahs'; did you mean bash?" in capsys.readouterr().err
    assert cli.main(["completion"]) == 2
    assert capsys.readouterr().err == "fppo completion: give the name of a shell: fppo completion bash|zsh|fish\n"
