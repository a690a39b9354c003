"""The rules of the rooms hold over the whole tree, and each of them notices what breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house


def backward(root: Path) -> list[str]:
    """Imports of a room that stands on a later floor, or of one that stands on none."""
    wrong = [places for (a, b), places in house.arrows(root).items() if not _may_import(a, b)]
    return [place for places in wrong for place in places]


def _may_import(a: str, b: str) -> bool:
    return a in house.FLOOR and b in house.FLOOR and house.FLOOR[b] <= house.FLOOR[a]


@pytest.mark.slow
def test_rooms_import_rooms_of_earlier_floors_alone():
    assert backward(house.ROOT) == []


@pytest.mark.slow
def test_rooms_form_no_circle():
    assert house.circles(set(house.arrows())) == []


@pytest.mark.slow
def test_modules_form_no_circle():
    """Inside of a room neither, also where an import waits inside of a function."""
    assert house.circles(house.module_arrows()) == []


def test_a_circle_of_modules_is_noticed(tmp_path):
    write(tmp_path, "fppo/losses/policy.py", "def f():\n    from fppo.losses import value\n")
    write(tmp_path, "fppo/losses/value.py", "from fppo.losses.policy import f\n")
    write(tmp_path, "fppo/losses/kl.py", "from fppo.losses.policy import f\n")
    assert house.circles(house.module_arrows(tmp_path)) == ["fppo.losses.policy", "fppo.losses.value"]


@pytest.mark.slow
def test_every_room_of_the_table_is_there_and_the_other_way_round():
    assert {house.room_of(module) for module in house.sources()} <= set(house.FLOOR)
    assert set(house.FLOOR) <= {house.room_of(module) for module in house.sources()}


@pytest.mark.slow
def test_files_and_functions_can_be_read_in_one_sitting():
    assert list(house.sizes()) == []


@pytest.mark.slow
def test_the_library_touches_nothing_but_its_results():
    assert list(house.side_effects()) == []


@pytest.mark.slow
def test_docstrings_and_names_stand_alone():
    assert list(house.prose()) == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Those of a pass."""',
        'def f():\n    """Of all ranks."""',
        'class A:\n    """The same of rows."""',
        "def asked_for(): ...",
        "class WhatIsThere: ...",
    ],
)
def test_prose_that_leans_on_a_name_is_noticed(tmp_path, text):
    write(tmp_path, "fppo/batch.py", text)
    assert len(list(house.prose(tmp_path))) == 1


def test_prose_that_only_looks_like_it_passes(tmp_path):
    write(tmp_path, "fppo/batch.py", 'def toldest():\n    """Offsets of rows, as italics: the same."""\n')
    assert list(house.prose(tmp_path)) == []


def test_rooms_say_what_flows_in_and_out_and_where_to_begin():
    assert list(house.openings()) == []


@pytest.mark.parametrize("begin", ["", "Begin with `nowhere.f`.", "Begin with `policy.g`."])
def test_a_room_that_does_not_is_noticed(tmp_path, begin):
    write(tmp_path, "fppo/losses/__init__.py", f'"""Losses.\n\nIn: rows. Out: sums.\n{begin}\n"""\n')
    write(tmp_path, "fppo/losses/policy.py", "def f(): ...\n")
    assert len(list(house.openings(tmp_path))) == 1


def test_few_functions_of_assembly_take_all_settings():
    """The others take the sections, or the values, that they read."""
    found = house.takers("assembly", "TrainSettings")
    assert len(found) <= 8, found  # resolving, assembling and looking over; `Inputs` hands them on with what they name


def test_a_function_or_a_class_with_all_settings_is_noticed(tmp_path):
    write(
        tmp_path, "fppo/assembly/run.py", "class A:\n    x: Mapping[str, S]\ndef f(*, x: 'S | None'):\n    return x\n"
    )
    write(tmp_path, "fppo/assembly/program.py", "def f(x: Set) -> S:\n    def g(x: S): ...\n")
    write(tmp_path, "fppo/studies/plan/run.py", "def f(x: S): ...\n")
    assert house.takers("assembly", "S", tmp_path) == [
        "fppo.assembly.program.g",
        "fppo.assembly.run.A",
        "fppo.assembly.run.f",
    ]


@pytest.mark.slow
def test_a_name_stands_for_one_class():
    assert house.doubles() == {}


def test_a_name_of_two_classes_is_noticed(tmp_path):
    for module in ("batch", "metrics", "tree"):
        write(tmp_path, f"fppo/{module}.py", f"class {'Row' if module != 'tree' else 'Leaf'}: ...\n")
    assert house.doubles(tmp_path) == {"Row": ["fppo.batch", "fppo.metrics"]}


def write(root: Path, path: str, text: str) -> None:
    """A file of a house that is made up."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("fppo/losses/policy.py", "from fppo.steps.update import update_actor\n"),
        ("fppo/losses/policy.py", "def f():\n    import fppo.models.load\n"),
        ("fppo/tree.py", "from fppo import losses\n"),
        ("kernels/fppo_kernels/table.py", "from fppo import losses\n"),
        ("fppo/stray/new.py", "from fppo import tree\n"),
    ],
)
def test_an_arrow_backwards_is_noticed(tmp_path, path, text):
    write(tmp_path, path, text)
    assert len(backward(tmp_path)) == 1


def test_a_circle_is_noticed():
    assert house.circles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == ["b", "c"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    print(x)\n",
        "import os\nHOME = os.environ['HOME']\n",
        "import os\nHOME = os.getenv('HOME')\n",
        "def f():\n    global x\n    x = 1\n",
        "def f(x):\n    x[0] = 1\n",
        "def f(x, y):\n    x[0] += y\n",
        "def f(*, x):\n    x.add_(1)\n",
    ],
)
def test_a_side_effect_is_noticed(tmp_path, text):
    write(tmp_path, "fppo/losses/policy.py", text)
    assert len(list(house.side_effects(tmp_path))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def scale_(x):\n    x.mul_(2)\n",
        "def f(x):\n    x = x.clone()\n    x[0] = 1\n    return x\n",
        "def f(x):\n    y = {}\n    y[x] = 1\n    return y\n",
    ],
)
def test_a_write_into_memory_of_its_own_is_none(tmp_path, text):
    write(tmp_path, "fppo/losses/policy.py", text)
    assert list(house.side_effects(tmp_path)) == []


@pytest.mark.slow
def test_what_is_too_long_is_noticed(tmp_path):
    write(tmp_path, "fppo/losses/policy.py", "def f():\n" + "    x = 1\n" * 601)
    write(tmp_path, "experiments/mine.py", "x = 1\n" * 61)
    assert [line.split(",")[0].rsplit(": ", 1)[1] for line in house.sizes(tmp_path)] == [
        "602 lines",
        "f has 602 lines",
        "61 lines",
    ]
