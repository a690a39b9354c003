"""Scripts that complete commands, settings and their values in a shell."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from fppo._errors import UsageError, did_you_mean
from fppo.commands.arguments import Command
from fppo.commands.help import positional
from fppo.settings import files
from fppo.settings.component import parts, signature_of
from fppo.settings.train import TrainSettings

SHELLS = ("bash", "zsh", "fish")
ADVICE = """Run it in a shell, or add it to the shell's startup file (~/.bashrc, ~/.zshrc, config.fish):
  bash, zsh   eval "$(fppo completion bash)", or zsh in place of bash
  fish        fppo completion fish | source"""


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """A shell's script that completes the arguments of fppo. Raises ValueError for an unknown shell."""
    if shell not in SHELLS:
        raise UsageError(f"there is no completion for {shell!r}; {did_you_mean(shell, SHELLS)}")
    flags = {name: flags_of(command) for name, command in commands.items()}
    values = {flag: choice for each in flags.values() for flag, choice in each.items() if choice}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](flags, values)


def flags_of(command: Command) -> dict[str, tuple[str, ...]]:
    """The flags of a command, each with its allowed values; these are empty if any text, or no value, may follow."""
    kinds: dict[str, Any] = {}
    if command.options is not None:
        places = positional(command.options)
        kinds |= {path: kind for path, kind in files.paths(command.options).items() if path not in places}
    if command.settings:
        kinds |= {**files.paths(), **_keywords()}
    flags: dict[str, tuple[str, ...]] = {}
    for path, kind in kinds.items():
        section, dot, name = path.replace("_", "-").rpartition(".")
        flags[f"--{section}{dot}{name}"] = _choices(kind)
        if kind is bool:
            flags[f"--{section}{dot}no-{name}"] = ()
    return flags | dict.fromkeys((*command.launch, "--help", "--traceback"), ())


def _keywords() -> dict[str, Any]:
    """The types of the keywords of the library's own parts, by their paths."""
    return {
        f"{path}.{name}": keyword.kind
        for path, _, table in parts(TrainSettings())
        for function in table
        if (signature := signature_of(function, table)) is not None
        for name, keyword in signature.keywords.items()
    }


def _choices(kind: Any) -> tuple[str, ...]:
    """The allowed words of a setting or of a list's elements; empty if any text is allowed."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType, tuple):
        return tuple(word for each in get_args(kind) for word in _choices(each))
    return ()


def _bash(flags: Mapping[str, Mapping[str, Sequence[str]]], values: Mapping[str, Sequence[str]]) -> str:
    of_command = "\n".join(f"    {command}) words='{' '.join(own)}' ;;" for command, own in flags.items())
    of_flag = "\n".join(f"    {flag}) words='{' '.join(choice)}' ;;" for flag, choice in values.items())
    return f"""_fppo() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=''
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(flags)} --help --version' -- "$word"))
    return
  fi
  if [ "${{COMP_WORDS[1]}}" = completion ]; then
    COMPREPLY=($(compgen -W '{" ".join(SHELLS)}' -- "$word"))
    return
  fi
  case "$before" in
{of_flag}
  esac
  if [ -n "$words" ] && [ "${{word#-}}" = "$word" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{of_command}
  esac
  if [ "${{word#-}}" != "$word" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _fppo fppo"""


def _zsh(flags: Mapping[str, Mapping[str, Sequence[str]]], values: Mapping[str, Sequence[str]]) -> str:
    return f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{_bash(flags, values)}"


def _fish(flags: Mapping[str, Mapping[str, Sequence[str]]], values: Mapping[str, Sequence[str]]) -> str:
    lines = [
        'function __fppo_runs; set -l words (commandline -opc); test "$words[2]" = $argv[1]; end',
        f"complete -c fppo -n __fish_use_subcommand -f -a '{' '.join(flags)}'",
        "complete -c fppo -n __fish_use_subcommand -l help",
        "complete -c fppo -n __fish_use_subcommand -l version",
        f"complete -c fppo -n '__fppo_runs completion' -f -a '{' '.join(SHELLS)}'",
    ]
    for command, own in flags.items():
        for flag, choice in own.items():
            words = f" -x -a '{' '.join(choice)}'" if choice else ""
            lines.append(f"complete -c fppo -n '__fppo_runs {command}' -l {flag[2:]}{words}")
    return "\n".join(lines)
