"""Mutants planted in copies of the tree, and the verdict of the tests on each."""

from __future__ import annotations

import compileall
import contextlib
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Literal

import attrs

from tests.mutants.choice import choose, nearest, record_of
from tests.mutants.records import DoesNotApply, Mutant, planted

LEFT_OUT = "tests/mutants/"  # its tests fail for any change of a line that the list names
MARKS = ("not slow", "slow")  # of the tests for a mutant, in their order
FIRST_GROUP = 5  # tests, or files, of the first process for a mutant; each next one takes twice as many


@attrs.frozen
class Verdict:
    """What the tests said of a mutant."""

    mutant: Mutant
    state: Literal["caught", "not caught", "does not apply"]
    why: str  # the first test that failed, or the number of tests that passed, or why it does not apply
    seconds: float


@attrs.frozen
class Bounds:
    """Seconds."""

    silence: float = 300.0  # in which no test ends: it hangs, which counts as caught
    mutant: float = 900.0  # for all tests of a mutant; no further ones are started then


def files_of(root: Path) -> list[str]:
    """What is copied: the files that git knows or does not ignore, and that are there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({name for name in listed if name and not name.startswith(LEFT_OUT) and (root / name).is_file()})


def copied(root: Path, copy: Path, packages: Sequence[str]) -> Path:
    """Copy the tree. The packages are compiled with digests of their sources in place of times, so that a line that is
    replaced by one of its length within a second is seen, and the other files are not compiled again and again."""
    for name in files_of(root):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name, follow_symlinks=False)
    for package in packages:
        compileall.compile_dir(copy / package, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    return copy


def failing(
    copy: Path, tests: Sequence[str], silence: float, without: Collection[str] = (), *, marks: str = MARKS[0]
) -> str | None:
    """The first of these tests with the marks that fails in the copy, or None. One that hangs or kills the process
    fails."""
    command = [sys.executable, "-m", "pytest", "-v", "-x", "--tb=no", "-rfE", "-o", "addopts=", "-m", marks]
    command += ["-p", "no:cacheprovider", "--basetemp", str(copy.parent / f"{copy.name}.t"), *tests]
    command += [f"--deselect={name}" for name in sorted(without)]
    paths = [str(copy), str(copy / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    output, hung = bytearray(), False
    while not hung:
        if not select.select([process.stdout], [], [], silence)[0]:
            hung = True
        elif chunk := os.read(process.stdout.fileno(), 65536):
            output += chunk
        else:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what the tests left behind
    status = process.wait()
    return reason(output.decode("utf-8", "replace"), status if not hung else None)


def reason(output: str, status: int | None) -> str | None:
    """What failed, by pytest's output and exit status (None: it was ended for its silence). None if nothing failed."""
    if status in (0, 5):  # 5: all were left out, as tests that need a GPU
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    if status in (1, 2) and failed:
        return failed[1]
    begun = re.findall(r"^(\S+::.+?)(?: (?:PASSED|SKIPPED|XFAIL).*)?$", output, re.MULTILINE)
    last = begun[-1].strip() if begun else "before the first test"
    if status is None:
        return f"{last} (time limit)"
    return f"{last} (exit status {status})"


def verdict(mutant: Mutant, root: Path, copy: Path, tests: Sequence[str], bounds: Bounds, anyway: set[str]) -> Verdict:
    """Plant a mutant in a copy, run the fast tests in growing groups until one fails, if none does the slow ones, and
    take the mistake out again.

    A test that fails without the mistake, too, says nothing: it joins those that fail `anyway`, and is left out.
    """
    begun, path, text = time.monotonic(), copy / mutant.file, (root / mutant.file).read_text("utf-8")
    todo = [(MARKS[0], name) for name in tests] + [(MARKS[1], name) for name in nearest(mutant, root)]
    size, passed = FIRST_GROUP, 0
    with_mistake = planted(mutant, text)
    try:
        while todo and time.monotonic() - begun < bounds.mutant:
            marks = todo[0][0]
            left = [name for own, name in todo if own == marks]
            group = left[:size]
            path.write_text(with_mistake, "utf-8")
            found = failing(copy, group, bounds.silence, anyway, marks=marks)
            path.write_text(text, "utf-8")
            if found is None:
                todo, passed = todo[len(group) :], passed + len(group) * (marks == MARKS[0])
                size = 2 * size if todo and todo[0][0] == marks else FIRST_GROUP
                continue
            own = found.split("[")[0].split(" (")[0]
            file = own.split("::")[0]
            if failing(copy, [own] if (copy / file).is_file() else group, bounds.silence, marks=marks) is None:
                return Verdict(mutant, "caught", found, time.monotonic() - begun)
            if "::" in own and own not in anyway:
                anyway.add(own)
            else:  # it cannot be collected
                others = [each for each in todo if each[1].split("::")[0] != file]
                todo = others if len(others) < len(todo) else todo[len(group) :]
    finally:
        path.write_text(text, "utf-8")
    what = "tests that execute it" if tests and "::" in tests[0] else "near files of tests"
    said = f"{passed} {what} passed" + (f", {len(todo)} were not run in time" if todo else "")
    return Verdict(mutant, "not caught", said, time.monotonic() - begun)


def verdicts(root: Path, mutants: Sequence[Mutant], place: Path, *, jobs: int, bounds: Bounds) -> Iterator[Verdict]:
    """Plant each mutant in one of `jobs` copies below `place`, and yield what came of it as it comes."""
    record, anyway = record_of(root), set[str]()
    fit: list[Mutant] = []
    for mutant in mutants:
        try:
            planted(mutant, (root / mutant.file).read_text("utf-8") if (root / mutant.file).is_file() else "")
            fit.append(mutant)
        except DoesNotApply as error:
            yield Verdict(mutant, "does not apply", str(error), 0.0)
    if not fit:
        return
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    first = copied(root, place / "0", sorted({mutant.file.split("/")[0] for mutant in fit}))
    copies.put(first)
    for number in range(1, min(jobs, len(fit))):
        copies.put(Path(shutil.copytree(first, place / str(number), symlinks=True)))

    def judged(mutant: Mutant) -> Verdict:
        copy = copies.get()
        try:
            return verdict(mutant, root, copy, choose(mutant, root, record), bounds, anyway)
        finally:
            copies.put(copy)

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(judged, mutant) for mutant in fit]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # at ctrl-C those that have begun come to their ends
