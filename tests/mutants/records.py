"""Mutants as records: the TOML files of this folder, and a file's text with one of its lines replaced."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import attrs

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class DoesNotApply(ValueError):
    """A mutant whose line is gone, stands more than once, or becomes what it was."""


@attrs.frozen
class Mutant:
    """A mistake in one line."""

    room: str  # the name of the TOML file
    name: str
    file: str  # from the root of the tree
    function: str  # its qualified name, or a class's; "" for a line outside of both
    line: str  # the whole line, without the white space around it
    becomes: str
    harm: str  # what a user would get


def read(folder: Path = HERE) -> tuple[Mutant, ...]:
    """All mutants of a folder's TOML files, in the order of their names. Raises ValueError for a key that is missing or
    unknown, and for a name that two rooms use."""
    found: dict[str, Mutant] = {}
    wanted = {field.name for field in attrs.fields(Mutant)} - {"room", "name"}
    for path in sorted(folder.glob("*.toml")):
        for name, table in tomllib.loads(path.read_text("utf-8")).items():
            if set(table) != wanted:
                raise ValueError(f"{path.name}: [{name}] must have the keys {', '.join(sorted(wanted))}")
            if name in found:
                raise ValueError(f"{path.name}: {found[name].room}.toml has a mutant named {name}, too")
            found[name] = Mutant(room=path.stem, name=name, **table)
    return tuple(found[name] for name in sorted(found))


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """(qualified name, node) of all functions and classes below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from definitions(child, f"{name}.")
        elif not isinstance(child, ast.expr):
            yield from definitions(child, prefix)


@lru_cache(maxsize=4)  # mutants come file by file
def parsed(text: str) -> ast.Module:
    """A file's text as a tree, which is not to be changed."""
    return ast.parse(text)


def span(node: ast.stmt) -> range:
    """The line numbers of a statement, with its decorators."""
    begins = [node.lineno, *(x.lineno for x in getattr(node, "decorator_list", ()))]
    return range(min(begins), (node.end_lineno or node.lineno) + 1)


def lines_of(text: str, function: str) -> list[range]:
    """The line numbers of all definitions of a qualified name; of the whole file for ""."""
    return _spans(text).get(function, []) if function else [range(1, len(text.splitlines()) + 1)]


@lru_cache(maxsize=4)
def _spans(text: str) -> dict[str, list[range]]:
    found: dict[str, list[range]] = {}
    for name, node in definitions(parsed(text)):
        found.setdefault(name, []).append(span(node))
    return found


def number_of(mutant: Mutant, text: str) -> int:
    """The number of the mutant's line in a file's text. Raises DoesNotApply."""
    spans = lines_of(text, mutant.function)
    if not spans:
        raise DoesNotApply(f"{mutant.file} has no {mutant.function}")
    rows = text.splitlines()
    found = sorted({number for own in spans for number in own if rows[number - 1].strip() == mutant.line})
    if len(found) != 1:
        raise DoesNotApply(f"{mutant.file}: {len(found)} lines of {mutant.function or 'the file'} are `{mutant.line}`")
    return found[0]


def planted(mutant: Mutant, text: str) -> str:
    """A file's text with the mistake in it. Raises DoesNotApply."""
    number = number_of(mutant, text)
    rows = text.splitlines(keepends=True)
    rows[number - 1] = rows[number - 1].replace(mutant.line, mutant.becomes)
    (around,) = (node for node in parsed(text).body if number in span(node))
    own = "".join(rows[i - 1] for i in span(around))
    try:
        changed = ast.dump(ast.parse(own)) != ast.dump(ast.Module([around], []))
    except SyntaxError as error:
        raise DoesNotApply(f"{mutant.file}: `{mutant.becomes}` is no Python there: {error.msg}") from error
    if not changed:
        raise DoesNotApply(f"{mutant.file}: `{mutant.becomes}` changes nothing")
    return "".join(rows)


def selected(mutants: Sequence[Mutant], *, rooms: Sequence[str], names: Sequence[str]) -> list[Mutant]:
    """The mutants of these rooms, or with these names; all if neither are given. Raises ValueError for unknown ones."""
    known = {mutant.room for mutant in mutants}, {mutant.name for mutant in mutants}
    for kind, given, choices in (("room", rooms, known[0]), ("mutant", names, known[1])):
        if unknown := [x for x in given if x not in choices]:
            listed = ", ".join(sorted(choices)) if kind == "room" else "`python -m tests.mutants --list` names them"
            raise ValueError(f"no {kind} {', '.join(unknown)}: {listed}")
    return [x for x in mutants if (not rooms or x.room in rooms) and (not names or x.name in names)]
