"""What texts of settings may hold, and how the command line writes those that are put before a model."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from fppo.settings.fields import name_of
from fppo.settings.problems import Problems, problem

# settings whose texts are shown to a model, or sought in what it writes: a shell has no easy way to write a new line
ESCAPED = ("data.prompt", "reward.judge.template", "rollout.stop", "eval.stop", "rollout.turns.failure")
_ESCAPE = re.compile(r"\\(\\[nt]|n|t)")
_COMMANDS = (  # of LaTeX, which begin as a new line or a tab is written
    *("nabla", "ne", "neq", "neg", "ni", "nu", "not", "notin", "newline", "newcommand", "nmid", "nonumber", "noindent"),
    *("tan", "tau", "text", "textbf", "textit", "tfrac", "theta", "tilde", "times", "to", "top", "triangle", "tag"),
)
_COMMAND = re.compile(rf"(?<!\\)\\({'|'.join(_COMMANDS)})(?![A-Za-z])")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file in UTF-8, without the mark that some editors put before it. Raises UnicodeDecodeError."""
    content = Path(path).read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnicodeDecodeError("utf-8", content, 0, 2, "it is UTF-16; save it as UTF-8")
    return content.decode("utf-8-sig").replace("\r\n", "\n")


def unescaped(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    r"""What the command line changed of `ESCAPED`, by path, with a new line for \n and a tab for \t; \\n stays \n.

    Raises ValueError for a command of LaTeX that begins so, which may be meant.
    """
    changed = [path for path in ESCAPED if now[path] != before[path]]
    return {
        path: [_unescaped(path, text) for text in value]
        if isinstance(value := now[path], list)
        else _unescaped(path, value)
        for path in changed
        if now[path] is not None
    }


def _unescaped(path: str, text: str) -> str:
    if (found := _COMMAND.search(text)) is not None:
        kind = {"n": "a new line", "t": "a tab"}[found[1][0]]
        why = f"\\{found[1][0]} is {kind} here, and \\{found[1]} may be meant: write \\\\{found[1]} for that"
        raise ValueError(problem(path, text, f"{why}, or the character itself for {kind}"))
    characters = {"n": "\n", "t": "\t"}
    return _ESCAPE.sub(lambda match: characters.get(match[1], match[1]), text)


def text_problems(settings: Any) -> Problems:
    """The texts that no path, file or tokenizer can hold: NUL characters and halves of surrogate pairs."""
    for path, text in _texts(settings, ""):
        if "\0" in text:
            yield problem(path, text, "holds a NUL character, which no path and no text has; leave it out")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            kind = f"{text[error.start]!a} is half of a surrogate pair, or a byte that is not UTF-8"
            yield f"{path} = {text!a}: {kind}; write the whole character, or rename the file"


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path of the setting, text) of every text, in lists and tables too."""
    if isinstance(value, str):
        yield path, value
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from _texts(getattr(value, field.name), f"{path}.{name_of(field)}".lstrip("."))
    elif isinstance(value, Mapping):
        for pair in value.items():
            for each in pair:
                yield from _texts(each, path)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each, path)
