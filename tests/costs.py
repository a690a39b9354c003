"""What the tests cost, by folder: seconds of processor, processes started, programs compiled.

A process counts wherever it was started, also by one that a test started, or as a copy of a fork server that several
folders share: `tests/started/sitecustomize.py` writes a line for each into a log. What a fixture of a module starts
counts once, however many workers set it up, so that the counts do not depend on the machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

TESTS = Path(__file__).parent
LOG, CAUSE = "FPPO_TESTS_LOG", "FPPO_TESTS_CAUSE"  # environment: where lines go, and on whose behalf
KINDS = ("processes", "compiled")
BUDGETS = TESTS / "budgets.toml"
_START = TESTS / "started"
_TICKS = os.sysconf("SC_CLK_TCK")


@attrs.frozen
class Cost:
    """The cost of a folder's tests."""

    tests: int = 0
    seconds: float = 0.0  # of processor
    processes: int = 0
    compiled: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


def folder_of(nodeid: str) -> str:
    """The folder of a test below `tests`; the file of one that stands there itself."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if parts[0] == "tests" and len(parts) > 1 else parts[0]


def seconds_spent() -> float:
    """Processor seconds of this process, of those it waited for, and of those below it that still run."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + sum(map(_seconds_below, _children("self")))


def _seconds_below(process: str) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has ended
    return sum(map(int, fields[11:15])) / _TICKS + sum(map(_seconds_below, _children(process)))


def _children(process: str) -> list[str]:
    try:
        tasks = os.listdir(f"/proc/{process}/task")
        return [pid for task in tasks for pid in Path(f"/proc/{process}/task/{task}/children").read_text().split()]
    except OSError:
        return []  # it has ended, or the system has no such files


def counted(lines: list[str]) -> dict[str, Counter[str]]:
    """By folder, how many of each kind the lines "worker, cause, kind" say: of a fixture's the most of any worker."""
    each: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for line in lines:
        worker, cause, kind = line.split("\t")
        each[cause, kind][worker] += 1
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for (cause, kind), workers in each.items():
        shared = cause.startswith("fixture ")
        total[folder_of(cause.removeprefix("fixture "))][kind] += max(workers.values()) if shared else workers.total()
    return total


def table(costs: Mapping[str, Cost]) -> list[str]:
    """The lines of a table, the dearest folder first, and the sum."""
    rows = sorted(costs.items(), key=lambda row: -row[1].seconds)
    rows.append(("all", sum(costs.values(), Cost())))
    lines = [f"{'folder':<24} {'tests':>6} {'processor s':>12} {'processes':>10} {'compiled':>9}"]
    return lines + [f"{n:<24} {c.tests:>6} {c.seconds:>12.1f} {c.processes:>10} {c.compiled:>9}" for n, c in rows]


def over(costs: Mapping[str, Cost], budgets: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What exceeds its budget, one line each; a folder without a budget may start and compile nothing."""
    found = []
    for folder, cost in sorted(costs.items()):
        for kind in KINDS:
            used, most = getattr(cost, kind), budgets.get(folder, {}).get(kind, 0)
            if used > most:
                found.append(f"tests/{folder}: {used} {kind}, and tests/{BUDGETS.name} allows {most}")
    return found


class Costs:
    """The plugin: each worker measures its tests, and the controller adds up what they send and prints it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker = getattr(config, "workerinput", {}).get("workerid", "main")
        self._costs: dict[str, Cost] = defaultdict(Cost)
        self._over: list[str] = []
        if self._worker == "main":
            log = tempfile.NamedTemporaryFile("w", prefix="fppo-tests-", suffix=".log", delete=False)  # noqa: SIM115
            log.close()
            os.environ[LOG] = log.name
            os.environ["PYTHONPATH"] = os.pathsep.join([str(_START), *filter(None, [os.environ.get("PYTHONPATH")])])
            if config.getoption("--budgets"):  # else they would count for the first test that needs one
                subprocess.run([sys.executable, "-c", "from fppo_kernels import _cpp; _cpp.failure()"], check=True)
            from tests.started import sitecustomize

            sitecustomize.watch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = seconds_spent()
        with _cause(self._worker, item.nodeid):
            result = yield
        self._costs[folder_of(item.nodeid)] += Cost(1, max(0.0, seconds_spent() - before))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        name = f"{request.node.nodeid}::{fixturedef.argname}[{request.param_index}]"
        with _cause(self._worker, f"fixture {name}"):
            return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker != "main":
            measured = sum(cost.seconds for cost in self._costs.values())
            self._costs["(imports, collection)"] += Cost(0, seconds_spent() - measured)
            self._config.workeroutput["costs"] = {n: attrs.astuple(c) for n, c in self._costs.items()}  # type: ignore[attr-defined]
            return
        log = Path(os.environ[LOG])
        for folder, kinds in counted(log.read_text().splitlines()).items():
            self._costs[folder] += Cost(0, 0.0, *(kinds[kind] for kind in KINDS))
        for file in (log, *log.parent.glob(f"{log.name}.*")):
            file.unlink()
        if self._config.getoption("--budgets"):
            self._over = over(self._costs, tomllib.loads(BUDGETS.read_text()))
        if self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("costs")
        for line in [*table(self._costs), *self._over]:
            terminalreporter.write_line(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for folder, cost in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self._costs[folder] += Cost(*cost)


class SlowTests:
    """The plugin that begins no slow test after so many minutes, and says how many it left out.

    With `--order TEXT` these are drawn by the text, so that a slow machine tests others for each commit.
    """

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self._reason = f"slow, and {minutes:g} minutes were over"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("slow") is not None and time.monotonic() > self._end:
            pytest.skip(self._reason)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        if left := sum(self._reason in str(report.longrepr) for report in skipped):
            terminalreporter.write_line(f"a slow machine: {left} slow tests were left out")


@contextlib.contextmanager
def _cause(worker: str, name: str) -> Iterator[None]:
    """Has processes start on behalf of a test, or of a fixture that is set up while a test is."""
    before, named = os.environ.get(CAUSE), Path(f"{os.environ[LOG]}.{worker}")  # the file is for fork servers
    os.environ[CAUSE] = f"{worker}\t{name}"
    named.write_text(name)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CAUSE]
        else:
            os.environ[CAUSE] = before
            named.write_text(before.partition("\t")[2])
