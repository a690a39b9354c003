"""The list of mutants: each applies, and every room of the packages has some."""

from pathlib import Path

import pytest

from tests.mutants.records import ROOT, DoesNotApply, Mutant, planted, read, selected

MUTANTS = read()
LEAST = 400
TEXT = """
LIMIT = 3


class Counter:
    def add(self, size: int) -> int:
        if size > LIMIT:
            return 0
        return size  # nothing is added


def add(x: int, y: int) -> int:
    def inner(z: int) -> int:
        return z
    return inner(x) + y
"""


def _mutant(line: str, becomes: str, function: str = "add") -> Mutant:
    return Mutant("room", "name", "sums.py", function, line, becomes, "Sums are wrong.")


@pytest.mark.slow
def test_every_mutant_applies() -> None:
    wrong = []
    for mutant in MUTANTS:
        try:
            planted(mutant, (ROOT / mutant.file).read_text("utf-8") if (ROOT / mutant.file).is_file() else "")
        except DoesNotApply as error:
            wrong.append(f"{mutant.room}.toml, {mutant.name}: {error}")
    assert not wrong, "\n".join(["give these lines as they are now, or other mistakes in their place:", *wrong])


def test_every_room_has_mutants() -> None:
    rooms = {f"fppo/{path.name}" for path in (ROOT / "fppo").iterdir() if (path / "__init__.py").exists()}
    files = [mutant.file for mutant in MUTANTS]
    without = [room for room in sorted({*rooms, "kernels/fppo_kernels"}) if not any(x.startswith(room) for x in files)]
    assert not without
    assert len(MUTANTS) >= LEAST


def test_mutants_say_what_a_user_would_get() -> None:
    wrong = [x.name for x in MUTANTS if not x.harm.endswith(".") or "\n" in x.harm or len(x.harm) < 20]
    assert not wrong


def test_no_mutant_stands_twice() -> None:
    places = [(x.file, x.function, x.line, x.becomes) for x in MUTANTS]
    assert len({*places}) == len(places)


@pytest.mark.parametrize(
    ("mutant", "line"),
    [
        (_mutant("return inner(x) + y", "return inner(x) - y"), 15),
        (_mutant("return z", "return -z", "add.inner"), 14),
        (_mutant("if size > LIMIT:", "if size >= LIMIT:", "Counter.add"), 7),
        (_mutant("LIMIT = 3", "LIMIT = 4", ""), 2),
    ],
)
def test_planted_replaces_one_line_and_keeps_its_place(mutant: Mutant, line: int) -> None:
    before, after = TEXT.split("\n"), planted(mutant, TEXT).split("\n")
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [line]
    assert after[line - 1] == before[line - 1].replace(mutant.line, mutant.becomes)


@pytest.mark.parametrize(
    ("mutant", "why"),
    [
        (_mutant("return x", "return y"), "0 lines"),
        (_mutant("return inner(x) + y", "return y", "subtract"), "no subtract"),
        (_mutant("return size  # nothing is added", "return size", "Counter.add"), "changes nothing"),
        (_mutant("if size > LIMIT:", "if size > LIMIT", "Counter.add"), "no Python"),
    ],
)
def test_planted_refuses_what_does_not_apply(mutant: Mutant, why: str) -> None:
    with pytest.raises(DoesNotApply, match=why):
        planted(mutant, TEXT)


def test_planted_refuses_a_line_that_stands_twice() -> None:
    with pytest.raises(DoesNotApply, match="2 lines"):
        planted(_mutant("return 0", "return 1"), "def add(x):\n    if x:\n        return 0\n    return 0\n")


def test_read_refuses_unknown_keys_and_equal_names(tmp_path: Path) -> None:
    table = '["sums.add"]\nfile = "a.py"\nfunction = ""\nline = "x = 1"\nbecomes = "x = 2"\n'
    (tmp_path / "one.toml").write_text(table)
    with pytest.raises(ValueError, match=r"one\.toml: \[sums\.add\] must have the keys becomes, file, function, harm"):
        read(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(f'{table}harm = "x is too large."\n')
    with pytest.raises(ValueError, match=r"two\.toml: one\.toml has a mutant named sums\.add, too"):
        read(tmp_path)


def test_selected_by_room_and_by_name() -> None:
    mutants = [x for x in MUTANTS if x.room in ("losses", "studies")]
    assert {x.room for x in selected(mutants, rooms=["studies"], names=[])} == {"studies"}
    assert selected(mutants, rooms=[], names=[mutants[0].name]) == [mutants[0]]
    with pytest.raises(ValueError, match="no room nothing: losses, studies"):
        selected(mutants, rooms=["nothing"], names=[])
