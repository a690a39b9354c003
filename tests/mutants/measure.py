"""A record of which fast tests execute which lines: the tests under coverage, one context a test, on all workers.

The first half is a plugin of pytest that `measure` gives to each of its workers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.choice import FOLDER, RECORD, SOURCES

PLACE = "FPPO_MUTANTS_PLACE"  # environment: where a worker writes what it saw
PACKAGES = ("fppo", "kernels")


class Recorder:
    """Switches coverage to a context for each test, and writes down the lines of those that passed."""

    def __init__(self, root: Path, place: Path):
        from coverage import Coverage  # in no extra: nothing else needs it

        self.root, self.place, self.failed = root, place, set()
        self.coverage = Coverage(
            data_file=str(place / f"{os.getpid()}.data"), include=[f"{root / name}/*" for name in PACKAGES]
        )
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid.split("[")[0])
        result = yield
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid.split("[")[0])

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        seen = {
            str(Path(file).relative_to(self.root)): _kept(data.contexts_by_lineno(file), self.failed)
            for file in data.measured_files()
        }
        (self.place / f"{os.getpid()}.json").write_text(json.dumps(seen), "utf-8")


def _kept(contexts: Mapping[int, Iterable[str]], failed: set[str]) -> dict[int, list[str]]:
    kept = {number: sorted({*names} - failed - {""}) for number, names in contexts.items()}
    return {number: names for number, names in kept.items() if names}


def pytest_configure(config: pytest.Config) -> None:
    """In a process that runs tests: a worker, or the only one."""
    alone = not getattr(config.option, "numprocesses", None)
    if PLACE in os.environ and (alone or hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder(config.rootpath, Path(os.environ[PLACE])), "mutants' recorder")


def measure(root: Path, tests: Sequence[str], *, jobs: int) -> int:
    """Run fast tests under coverage, keep who executes what in `.mutants`, and return the exit status of pytest. Raises
    ValueError without coverage."""
    if importlib.util.find_spec("coverage") is None:
        raise ValueError("--measure needs the package coverage: pip install coverage")
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.measure", "-n", str(jobs), *tests]
        status = subprocess.run(command, cwd=root, env={**os.environ, PLACE: place}, check=False).returncode
        parts = [json.loads(path.read_text("utf-8")) for path in sorted(Path(place).glob("*.json"))]
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / SOURCES, ignore_errors=True)
    for name in PACKAGES:
        shutil.copytree(root / name, folder / SOURCES / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / RECORD).write_text(json.dumps(merged(parts)), "utf-8")
    return status


def merged(parts: Iterable[Mapping[str, Mapping[str, Sequence[str]]]]) -> dict[str, Any]:
    """What the workers saw as the fields of a `Record`: {file: {line number: tests}} for each of them."""
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for part in parts:
        for file, rows in part.items():
            for number, names in rows.items():
                seen[file, number].update(names)
    tests = sorted({name for names in seen.values() for name in names})
    place = {name: number for number, name in enumerate(tests)}
    counts, sets, lines = [0] * len(tests), {}, defaultdict(dict)
    for (file, number), names in seen.items():
        key = tuple(sorted(place[name] for name in names))
        lines[file][number] = sets.setdefault(key, len(sets))
        for test in key:
            counts[test] += 1
    return {"tests": tests, "counts": counts, "sets": [list(key) for key in sets], "lines": lines}
