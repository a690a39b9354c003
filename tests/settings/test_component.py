"""Keywords of functions that settings name, as their sources have them, and what the functions are bound to."""

from __future__ import annotations

import os
import types
from functools import partial
from typing import Any, Literal

import attrs
import pytest

from fppo.settings.component import (
    Keyword,
    Signature,
    bound,
    called_with,
    functions_of,
    keyword_problems,
    part_problems,
    parts,
    requires,
    signature_of,
    takes,
    value_of,
)
from fppo.settings.learning import LossSettings
from fppo.settings.tables import POLICY_LOSSES
from fppo.settings.train import TrainSettings

NOTHING = attrs.NOTHING
MODULE = '''
"""Functions of one's own."""
import functools

WIDE = 5

def plain(rows, mask, *, scale: float, most: int = 3, name: str = "x", on: bool = True, low: float | None = None):
    """A function of columns."""

def typed(values, /, first, second: Tensor = None, *, kernel: Callable = print, weights: Tensor | None = None,
          kind: Literal["a", "b"] = "a", pair: tuple[float, float] = (0.9, 0.99), many: tuple[int, ...] = (),
          limit: "float | None" = 1.5, other: Thing = WIDE + 1, mixed: int | str = 2, clip: float | Tensor = 0.2):
    """A function of every kind."""

def bare(x, y=2, *, z=True, t: Tensor): ...

def any_keyword(x, **more): ...

@functools.cache
def decorated(x, y=1): ...

def twice(x): ...
def twice(x, y): ...

class Made:
    def __init__(self, size: int, *, depth: float = 2.0):
        self.size, self.depth = size, depth

class Inherited(Made):
    pass

if True:
    def inside(x): ...
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_parts"


def test_the_parameters_of_a_function_are_those_of_its_source(module):
    found = signature_of(f"{module}:plain", {})
    assert found == Signature(
        ("rows", "mask"),
        {
            "scale": Keyword(float, NOTHING),
            "most": Keyword(int, 3),
            "name": Keyword(str, "x"),
            "on": Keyword(bool, True),
            "low": Keyword(float | None, None),
        },
        frozenset(),
    )
    typed = signature_of(f"{module}:typed", {})
    assert typed is not None
    assert typed.required == ("values", "first")
    assert typed.functions == {"kernel", "weights"}
    assert typed.keywords == {
        "second": Keyword(Any, None),
        "kind": Keyword(Literal["a", "b"], "a"),
        "pair": Keyword(tuple[float, float], (0.9, 0.99)),
        "many": Keyword(tuple[int, ...], ()),
        "limit": Keyword(float | None, 1.5),
        "other": Keyword(Any, "WIDE + 1"),
        "mixed": Keyword(Any, 2),
        "clip": Keyword(float, 0.2),
    }
    bare = signature_of(f"{module}:bare", {})
    assert bare == Signature(("x", "t"), {"y": Keyword(Any, 2), "z": Keyword(bool, True)}, frozenset())
    made = signature_of(f"{module}:Made", {})
    assert made == Signature(("size",), {"depth": Keyword(float, 2.0)}, frozenset())


@pytest.mark.parametrize("name", ["any_keyword", "decorated", "twice", "Inherited", "inside", "nothing"])
def test_of_other_functions_the_source_does_not_say(module, name):
    assert signature_of(f"{module}:{name}", {}) is None
    assert signature_of("no_such_module:fn", {}) is None


def test_functions_of_one_name_have_all_of_their_keywords(module):
    table = {"both": (f"{module}:plain", f"{module}:bare"), "one": (f"{module}:bare",), "none": ()}
    both = signature_of("both", table)
    assert both is not None
    assert both.required == ("rows", "mask", "x", "t")
    assert set(both.keywords) == {"scale", "most", "name", "on", "low", "y", "z"}
    assert signature_of("none", table) == Signature((), {}, frozenset())
    assert signature_of("both", table | {"both": (f"{module}:plain", f"{module}:twice")}) is None
    part = LossSettings(name="both", keywords={"most": 7, "low": "none"})
    assert value_of(part, table, "most") == 7
    assert value_of(part, table, "low", 3.0) is None
    assert value_of(part, table, "name") == "x"
    assert value_of(part, table, "absent", "otherwise") == "otherwise"
    unknown = LossSettings(name=f"{module}:twice", keywords={"most": 7})
    assert (value_of(unknown, table, "most"), value_of(unknown, table, "x", 4)) == (7, 4)
    assert [requires(part, table, name) for name in ("rows", "t", "most", "absent")] == [True, True, False, False]
    assert not requires(unknown, table, "x")


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"scale": 1.0}, {}),
        ({"scale": 1, "most": 2, "name": "y", "on": False, "low": "none"}, {}),
        ({}, {"scale": "plain needs it: give a number"}),
        ({"scale": "x"}, {"scale": "must be a number"}),
        ({"scale": 1.0, "most": 2.5}, {"most": "must be a whole number"}),
        ({"scale": 1.0, "on": 1}, {"on": "must be true or false"}),
        ({"scale": 1.0, "low": "x"}, {"low": 'must be a number, or "none"'}),
        ({"scale": float("nan")}, {"scale": "must be a number or inf"}),
        ({"scale": float("inf")}, {}),
        ({"scale": 1.0, "mots": 2}, {"mots": "has no such keyword; did you mean most?"}),
        ({"scale": 1.0, "rows": 2}, {"rows": "has no such keyword"}),
    ],
)
def test_keywords_are_held_against_the_source(module, keywords, expected):
    name = f"{module}:plain"
    found = {x.path: x.text for x in keyword_problems("some.part", name, keywords, {})}
    assert found.keys() == {f"some.part.{key}" for key in expected}
    assert all(text.removeprefix("plain") in found[f"some.part.{key}"] for key, text in expected.items())
    assert list(keyword_problems("some.part", f"{module}:any_keyword", keywords, {})) == []


def test_a_keyword_that_has_another_name_now_is_told(module):
    (found,) = keyword_problems("critic", f"{module}:bare", {"value_clip": 1.0}, {})
    assert (found.path, found.value, found.text) == ("critic.value_clip", 1.0, "it is called critic.loss.clip now")
    (found,) = keyword_problems("a", f"{module}:bare", {"owm": 1}, {}, own=("own",))
    assert "did you mean own" in found.text


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("none", float | None, None),
        ("none", float, TypeError),
        (1, float | None, 1.0),
        ([1, 2], Any, (1, 2)),
        ("none", Any, "none"),
        ([0.5, 1], tuple[float, float], (0.5, 1.0)),
        ("a", Literal["a", "b"], "a"),
    ],
)
def test_a_value_is_passed_as_its_function_takes_it(value, kind, expected):
    if isinstance(expected, type):
        with pytest.raises(expected):
            called_with(value, Keyword(kind, NOTHING))
        return
    assert called_with(value, Keyword(kind, NOTHING)) == expected
    assert called_with([1], None) == (1,)


def test_functions_get_the_keywords_that_they_take():
    part = LossSettings(name="clip_cov", keywords={"clip_low": 0.1, "ratio": 0.5, "low": 2})
    loss, select = bound(part, POLICY_LOSSES, "actor.loss")
    assert isinstance(loss, partial)
    assert isinstance(select, partial)
    assert (loss.func.__name__, select.func.__name__) == ("clip_cov", "select_clip_cov")
    assert loss.keywords == {"clip_low": 0.1}
    assert select.keywords == {"clip_low": 0.1, "ratio": 0.5, "low": 2.0}
    (plain,) = bound(LossSettings(), POLICY_LOSSES, "actor.loss")
    assert isinstance(plain, types.FunctionType)
    with pytest.raises(ValueError, match=r"^actor\.loss\.raito = 1: clip_cov has no such keyword; did you mean ratio"):
        bound(LossSettings(name="clip_cov", keywords={"raito": 1}), POLICY_LOSSES, "actor.loss")
    with pytest.raises(
        ValueError, match=r"^actor\.loss\.name = 'clp_cov': there is no such name; did you mean clip_cov"
    ):
        functions_of(LossSettings(name="clp_cov"), POLICY_LOSSES, "actor.loss")


def test_a_function_that_takes_any_keyword_gets_all_that_are_given(tmp_path, monkeypatch):
    (tmp_path / "own_keywords.py").write_text("def own(x, **more): ...")
    monkeypatch.syspath_prepend(tmp_path)
    part = LossSettings(name="own_keywords:own", keywords={"x": 1, "low": [1, 2], "more": "a"})
    (found,) = bound(part, {}, "actor.loss")
    assert found.keywords == {"x": 1, "low": (1, 2), "more": "a"}


def test_the_parameters_of_a_file_that_has_changed_are_read_again(module, tmp_path):
    assert list(signature_of(f"{module}:bare", {}).keywords) == ["y", "z"]
    file = tmp_path / f"{module}.py"
    changed = file.stat().st_mtime_ns + 1_000_000_000
    file.write_text("def bare(x, *, w=1.0): ...")
    os.utime(file, ns=(changed, changed))
    assert signature_of(f"{module}:bare", {}) == Signature(("x",), {"w": Keyword(float, 1.0)}, frozenset())


def test_a_function_takes_the_names_of_its_parameters():
    def fn(a, /, b, *, c): ...

    def anything(**more): ...

    assert [takes(fn, name) for name in "abcd"] == [False, True, True, False]
    assert takes(anything, "d")


def test_every_part_of_the_settings_is_found_by_its_path():
    found = {path: part.name for path, part, _ in parts(TrainSettings())}
    assert found == {
        "data.curriculum": "none",
        "rollout.environment": "none",
        "algorithm.advantage": "gae",
        "algorithm.correction": "none",
        "actor.loss": "ppo_clip",
        "actor.distill": "none",
        "actor.optimizer": "adamw",
        "critic.loss": "mse",
        "critic.optimizer": "adamw",
        "sft.optimizer": "adamw",
    }
    settings = attrs.evolve(TrainSettings(), actor=attrs.evolve(TrainSettings().actor, loss=LossSettings(name="ppo")))
    (problem,) = part_problems(settings)
    assert (problem.path, problem.value) == ("actor.loss.name", "ppo")
    assert problem.text.startswith("there is no such policy loss; did you mean ")
