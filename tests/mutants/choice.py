"""The tests to run for a mutant, likeliest to catch it first: by a record of who executes its line, or by names."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs

from tests.mutants.records import DoesNotApply, Mutant, definitions, lines_of, number_of

FOLDER = ".mutants"  # in the root of the tree, ignored by git
RECORD, SOURCES = "record.json", "sources"  # in that folder: what was measured, and a copy of the sources then


@attrs.frozen
class Record:
    """Which tests execute which lines: sets of tests by number, and the number of a set for each line."""

    tests: Sequence[str]
    counts: Sequence[int]  # lines that each test executes
    sets: Sequence[Sequence[int]]
    lines: Mapping[str, Mapping[str, int]]  # by file, then by line number (text, as in JSON)

    def of(self, file: str, numbers: range) -> set[int]:
        """The tests that execute one of these lines."""
        known = self.lines.get(file, {})
        return {test for number in numbers if str(number) in known for test in self.sets[known[str(number)]]}


def record_of(root: Path) -> Record | None:
    """The record of a tree, or None if nothing was measured there."""
    path = root / FOLDER / RECORD
    return Record(**json.loads(path.read_text("utf-8"))) if path.exists() else None


def choose(mutant: Mutant, root: Path, record: Record | None) -> list[str]:
    """The tests to run, each as file::function, or as a file where no test is known to execute the line."""
    return (_measured(mutant, root, record) if record else []) or nearest(mutant, root)


def _measured(mutant: Mutant, root: Path, record: Record) -> list[str]:
    """The tests that execute the statement, or for one that is executed on import those that execute its function; the
    tests of the mirrored file first, then by how few lines they execute."""
    source = root / FOLDER / SOURCES / mutant.file
    if not source.exists():
        return []
    text = source.read_text("utf-8")
    try:
        number = number_of(mutant, text)
    except DoesNotApply:  # the line is newer than the record
        return []
    found = record.of(mutant.file, _statement(text, number))
    for span in () if found else lines_of(text, mutant.function):
        found |= record.of(mutant.file, span)
    mirror = _mirror(mutant, root)
    names = [(record.tests[x].split("::")[0] != mirror, record.counts[x], record.tests[x]) for x in found]
    return [test for _, _, test in sorted(names) if _stands(test, root)]


def _statement(text: str, number: int) -> range:
    """The lines of the innermost statement around a line; of a compound one those before its body."""
    best = range(number, number + 1)
    for node in ast.walk(ast.parse(text)):  # breadth first: what comes later is further inside
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if node.lineno <= number <= end:
                best = range(node.lineno, max(end, node.lineno) + 1)
    return best


def _stands(test: str, root: Path) -> bool:
    """Whether a recorded test is still there."""
    path, *rest = test.split("::")
    return (root / path).exists() and ".".join(rest) in _functions(root / path)


@cache
def _functions(path: Path) -> frozenset[str]:
    return frozenset(name for name, _ in definitions(ast.parse(path.read_text("utf-8"))))


def _place(mutant: Mutant, root: Path) -> Path:
    """The folder that mirrors the mutant's file, or the nearest above it that is there."""
    inner = mutant.file.removeprefix("fppo/").replace("kernels/fppo_kernels/", "kernels/")
    place = (root / "tests" / inner).parent
    while not place.is_dir():
        place = place.parent
    return place


def _mirror(mutant: Mutant, root: Path) -> str:
    """The file of tests that mirrors the mutant's, whether it is there or not."""
    path = _place(mutant, root) / f"test_{Path(mutant.file).stem.lstrip('_')}.py"
    return str(path.relative_to(root))


def nearest(mutant: Mutant, root: Path) -> list[str]:
    """The files of tests in the mirrored folder: the mirrored file, then those that name the function or the module,
    then the rest. For a module that stands in no room, those that name it, if any do."""
    place, mirror = _place(mutant, root), _mirror(mutant, root)
    top = place == root / "tests"
    stem = Path(mutant.file).stem
    words = [word for word in mutant.function.split(".") if not word.startswith("_")]
    ranked: list[tuple[int, str]] = []
    for path in sorted(place.glob("test_*.py") if top else place.rglob("test_*.py")):
        text, name = path.read_text("utf-8"), str(path.relative_to(root))
        named = any(re.search(rf"\b{re.escape(word)}\b", text) for word in words)
        mentioned = re.search(rf"\b{re.escape(stem)}\b", text) is not None
        rank = 0 if name == mirror else 1 if named else 2 if mentioned else 3
        ranked.append((rank, name))
    near = [x for x in ranked if x[0] < 3] if top else ranked
    return [name for _, name in sorted(near or ranked)]
