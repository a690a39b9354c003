"""What the tests cost is counted and held to its budget; what newest releases do to them is told."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import costs, newest
from tests.costs import Cost

DRAWN: list[int] = []

CHILD = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", ""], check=True)
subprocess.run(["true"], check=True)
if os.fork() == 0:
    os._exit(0)
os.wait()
"""


def test_what_a_child_starts_counts_for_its_test(tmp_path):
    log = tmp_path / "log"
    log.touch()
    own = {costs.LOG: str(log), costs.CAUSE: "gw0\ttests/runs/test_a.py::test_b"}
    path = os.pathsep.join([str(costs.TESTS / "started"), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", CHILD], check=True, env={**os.environ, **own, "PYTHONPATH": path})
    assert costs.counted(log.read_text().splitlines()) == {"runs": {"processes": 4}}  # itself, python, true, its copy


SERVED = """
import multiprocessing, os, sys
from pathlib import Path
def ran():
    pass
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    for name in ("tests/runs/test_a.py::test_b", "tests/plan/test_c.py::test_d"):
        os.environ["FPPO_TESTS_CAUSE"] = "gw0\\t" + name
        Path(os.environ["FPPO_TESTS_LOG"] + ".gw0").write_text(name)
        process = context.Process(target=ran)
        process.start()
        process.join()
"""


def test_a_copy_of_a_fork_server_counts_for_the_test_that_asked_for_it(tmp_path):
    log, script = tmp_path / "log", tmp_path / "script.py"
    log.touch()
    script.write_text(SERVED)
    path = os.pathsep.join([str(costs.TESTS / "started"), os.environ.get("PYTHONPATH", "")])
    own = {costs.LOG: str(log), "PYTHONPATH": path}
    without = {name: value for name, value in os.environ.items() if name != costs.CAUSE}
    subprocess.run([sys.executable, str(script)], check=True, env={**without, **own})
    found = costs.counted(log.read_text().splitlines())
    assert found == {"runs": {"processes": 3}, "plan": {"processes": 1}}  # with the server, and what tracks its memory


@pytest.fixture(scope="module")
def made() -> str:
    """Whatever a fixture of a module is set up for."""
    return os.environ[costs.CAUSE].partition("\t")[2]


def test_a_test_is_the_cause_again_once_its_fixtures_are_set_up(made, request):
    assert made == "fixture tests/test_costs.py::made[0]"
    assert os.environ[costs.CAUSE].partition("\t")[2] == request.node.nodeid


def test_a_fixture_counts_once_however_many_workers_set_it_up():
    fixture = "fixture tests/plan/test_a.py::made[0]"
    lines = [f"gw0\t{fixture}\tprocesses"] * 2 + [f"gw1\t{fixture}\tprocesses"] * 2
    lines += ["gw0\ttests/plan/test_a.py::test_b\tprocesses", "gw1\ttests/test_c.py::test_d\tcompiled"]
    assert costs.counted(lines) == {"plan": {"processes": 3}, "test_c.py": {"compiled": 1}}


def test_a_folder_beyond_its_budget_is_named():
    spent = {"plan": Cost(3, 1.0, 3, 0), "runs": Cost(1, 9.0, 0, 1), "laws": Cost(4, 7.0, 0, 0)}
    assert costs.over(spent, {"plan": {"processes": 3}, "runs": {"compiled": 2}}) == []
    assert costs.over(spent, {"plan": {"processes": 2}}) == [
        "tests/plan: 3 processes, and tests/budgets.toml allows 2",
        "tests/runs: 1 compiled, and tests/budgets.toml allows 0",
    ]


def test_the_table_has_the_dearest_folder_first_and_the_sum_last():
    lines = costs.table({"plan": Cost(3, 1.0, 3, 0), "runs": Cost(1, 9.0, 0, 1)})
    assert [line.split()[0] for line in lines] == ["folder", "runs", "plan", "all"]
    assert lines[-1].split() == ["all", "4", "10.0", "3", "1"]


def test_budgets_are_of_folders_that_there_are():
    budgets = tomllib.loads(costs.BUDGETS.read_text())
    assert [name for name in budgets if not (costs.TESTS / name).exists()] == []
    assert {kind for budget in budgets.values() for kind in budget} <= set(costs.KINDS)


def test_the_seconds_are_of_this_process_and_those_below():
    before = costs.seconds_spent()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert costs.seconds_spent() - before > 0.05


@given(st.integers())
def draw(number: int) -> None:
    DRAWN.append(number)


def test_few_examples_are_drawn_in_ci(request):
    """But for loss math: `tests/losses/test_examples.py`."""
    draw()
    assert (len(DRAWN) >= 100) == (request.config.getoption("--hypothesis-profile") == "thorough")


@pytest.mark.parametrize(
    ("requirement", "name", "free"),
    [
        ("torch>=2.11,<2.15", "torch", "torch"),
        ("mkdocstrings[python]>=0.27", "mkdocstrings", "mkdocstrings[python]"),
        ("triton>=3.6; sys_platform == 'linux'", "triton", "triton; sys_platform == 'linux'"),
        ("numpy", "numpy", "numpy"),
    ],
)
def test_the_newest_of_a_package_is_asked_for_without_its_bounds(requirement, name, free):
    assert newest.name_of(requirement) == name
    assert newest.unbounded(requirement) == free


def test_every_package_that_is_tried_is_required_and_has_tests():
    named = newest.requirements(tomllib.loads((newest.ROOT / "pyproject.toml").read_text()))
    assert {*newest.TOUCHED, *newest.CHECKERS} <= {*named}
    assert {x for paths in newest.TOUCHED.values() for x in paths if not (newest.ROOT / x).exists()} == set()


def test_a_verdict_is_of_the_tests_that_touch_a_package(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.data.test_a" name="test_one[x]"/>
        <testcase classname="tests.data.test_a" name="test_two"><failure>no</failure></testcase>
        <testcase classname="tests.runs.test_b" name="test_three"><skipped/></testcase>
        <testcase classname="tests.runs.test_b" name="test_four"><error>no</error></testcase>
        <testcase classname="tests.laws.test_c" name="test_five"/>
        </testsuite></testsuites>"""
    )
    said = newest.outcomes(report)
    assert newest.verdict(said, ["tests/laws"]) == "1 passed"
    assert newest.verdict(said, ["tests/data"]) == "1 of 2 fail: tests/data/test_a.py::test_two"
    assert newest.verdict(said, ["tests/runs/test_b.py"]) == "1 of 1 fail: tests/runs/test_b.py::test_four"
    assert newest.verdict(said, ["tests/da"]) == "no test ran"
    assert newest.verdict(said, ["tests"]).startswith("2 of 4 fail")


CONFTEST = """
import pytest
from tests.costs import SlowTests
def pytest_addoption(parser):
    parser.addoption("--slow-minutes", type=float)
def pytest_configure(config):
    config.pluginmanager.register(SlowTests(config.getoption("--slow-minutes")))
"""
SLOW = """
import pytest
@pytest.mark.slow
@pytest.mark.parametrize("case", range(3))
def test_slow(case):
    pass
def test_fast():
    pass
"""


def test_slow_tests_that_would_begin_too_late_are_left_out_and_counted(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    (tmp_path / "test_some.py").write_text(SLOW)
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(costs.TESTS.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-n", "1", "--slow-minutes", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=own)
    assert "1 passed, 3 skipped" in ran.stdout
    assert "a slow machine: 3 slow tests were left out" in ran.stdout
