"""The runner on a tree of one module: its verdicts, its choice of tests, and its exit status."""

import subprocess
from pathlib import Path

import attrs
import pytest

from tests.mutants import __main__ as command
from tests.mutants.choice import Record, choose, nearest
from tests.mutants.measure import merged
from tests.mutants.plant import Bounds, Verdict, reason, verdicts
from tests.mutants.records import Mutant

SUMS = """def total(numbers):
    found = 0
    for x in numbers:
        found += x
    return found


def mean(numbers):
    return total(numbers) / len(numbers)


def halved(size):
    while size > 1:
        size //= 2
    return size


def doubled(x):
    return 2 * x
"""
TESTS = """import pytest

from fppo.sums import doubled, halved, total


@pytest.mark.slow
def test_doubled():
    assert doubled(3) == 6


def test_total():
    assert total([1, 2]) == 3


def test_halved():
    assert halved(8) == 1


def test_that_fails_anyway():
    assert total([1]) == 2
"""


def _mutant(name: str, line: str, becomes: str) -> Mutant:
    return Mutant("sums", name, "fppo/sums.py", name, line, becomes, "Sums are wrong.")


TOTAL = _mutant("total", "found += x", "found -= x")
MEAN = _mutant("mean", "return total(numbers) / len(numbers)", "return total(numbers)")
HALVED = _mutant("halved", "size //= 2", "size //= 1")
DOUBLED = _mutant("doubled", "return 2 * x", "return x + 2")
GONE = _mutant("total", "found = 1", "found = 2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree that git knows, with a module and its tests."""
    place = tmp_path / "tree"
    files = {
        "fppo/__init__.py": "",
        "fppo/sums.py": SUMS,
        "tests/test_sums.py": TESTS,
        "pytest.ini": "[pytest]\nmarkers = slow\n",
    }
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    subprocess.run(["git", "init", "-q", place], check=True)
    return place


@pytest.mark.slow
def test_verdicts(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    bounds = Bounds(silence=8.0, mutant=90.0)
    mutants = [TOTAL, MEAN, HALVED, DOUBLED, GONE]
    found = {x.mutant: x for x in verdicts(root, mutants, tmp_path / "copies", jobs=1, bounds=bounds)}
    assert (found[TOTAL].state, found[TOTAL].why) == ("caught", "tests/test_sums.py::test_total")
    assert (found[MEAN].state, found[MEAN].why) == ("not caught", "1 near files of tests passed")
    assert (found[HALVED].state, found[HALVED].why) == ("caught", "tests/test_sums.py::test_halved (time limit)")
    assert (found[DOUBLED].state, found[DOUBLED].why) == ("caught", "tests/test_sums.py::test_doubled")
    assert (found[GONE].state, found[GONE].why) == ("does not apply", "fppo/sums.py: 0 lines of total are `found = 1`")
    assert (root / "fppo/sums.py").read_text() == SUMS
    assert (tmp_path / "copies/0/fppo/sums.py").read_text() == SUMS


def test_reason_names_the_first_failure() -> None:
    failed = "tests/a.py::test_x[1] FAILED  [ 10%]\nFAILED tests/a.py::test_x[1] - ValueError: no - such\n"
    assert reason(failed, 1) == "tests/a.py::test_x[1]"
    assert reason("ERROR tests/a.py - ImportError: x\n", 2) == "tests/a.py"
    assert reason("tests/a.py::test_x PASSED  [50%]\ntests/a.py::test_y ", None) == "tests/a.py::test_y (time limit)"
    assert reason("tests/a.py::test_y ", -11) == "tests/a.py::test_y (exit status -11)"
    assert reason("ImportError while loading conftest\n", 4) == "before the first test (exit status 4)"
    assert reason("tests/a.py::test_x PASSED  [100%]\n", 0) is None


def test_nearest_takes_the_mirrored_file_first(root: Path) -> None:
    place = root / "tests/rooms"
    place.mkdir()
    texts = {"test_a": "", "test_sums": "", "test_b": "mean of all", "test_c": "import sums"}
    for name, text in texts.items():
        (place / f"{name}.py").write_text(text)
    mutant = attrs.evolve(MEAN, file="fppo/rooms/sums.py")
    assert [Path(x).stem for x in nearest(mutant, root)] == ["test_sums", "test_b", "test_c", "test_a"]
    assert nearest(MEAN, root) == ["tests/test_sums.py"]


def test_recorded_tests_stand_before_others(root: Path) -> None:
    (root / "tests/test_other.py").write_text("def test_little(): ...\ndef test_much(): ...\n")
    sources = root / ".mutants/sources/fppo"
    sources.mkdir(parents=True)
    (sources / "sums.py").write_text(SUMS)
    little, much = "tests/test_other.py::test_little", "tests/test_other.py::test_much"
    own, gone = "tests/test_sums.py::test_total", "tests/test_other.py::test_gone"
    parts = [{"fppo/sums.py": {"2": [much], "4": [little, much, gone]}}, {"fppo/sums.py": {"2": [own], "4": [own]}}]
    record = Record(**merged(parts))
    assert choose(TOTAL, root, record) == [own, little, much]
    assert choose(HALVED, root, record) == ["tests/test_sums.py"]  # no test executes it


@pytest.mark.parametrize(
    ("states", "allowed", "status"),
    [
        (["caught", "caught"], 0, 0),
        (["caught", "not caught"], 0, 1),
        (["caught", "not caught"], 1, 0),
        (["not caught", "not caught"], 1, 1),
        (["not caught", "does not apply"], 1, 2),
    ],
)
def test_exit_status(states: list[str], allowed: int, status: int) -> None:
    done = [Verdict(TOTAL, state, "because", 1.0) for state in states]  # type: ignore[arg-type]
    text, found = command.summary(done, allowed)
    assert found == status
    assert f"{states.count('caught')} of 2 caught" in text
    assert ("found -= x" in text) is (states.count("caught") < 2)


def test_draws_are_those_of_the_seed() -> None:
    def drawn(seed: str) -> list[Mutant]:
        return command.chosen(command.parsed(["--draw", "20", "--seed", seed]))

    assert len(drawn("a")) == 20
    assert drawn("a") == drawn("a") != drawn("b")
