"""Checks of settings at their bounds, and problems by the paths and in the words that a user sees."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo import fields
from fppo.fields import Problem, WrongSetting, kept, setting

NUMBERS = [-2, -1, 0, 1, 2, 3, -1.0, 0.5, 1.0, 1.5, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("check", "right", "words"),
    [
        (fields.at_least(1), lambda x: x >= 1, "must be 1 or more"),
        (fields.above(1), lambda x: x > 1, "must be greater than 1"),
        (fields.at_most(1), lambda x: x <= 1, "must be 1 or less"),
        (fields.below(1), lambda x: x < 1, "must be less than 1"),
    ],
)
def test_a_bound_is_inside_or_outside(check, right, words):
    assert check(None) is None
    assert {x: check(x) for x in NUMBERS} == {x: None if right(x) else words for x in NUMBERS}


def test_texts_and_temperatures_have_their_forms():
    temperatures = {None: True, 0.0: True, 1e-6: True, 1e6: True, 9.9e-7: False, 1.01e6: False, -1.0: False}
    assert {x: fields.temperature(x) is None for x in temperatures} == temperatures
    functions = {None: True, "a.b:c": True, "a:b": True, "a": False, "a:b:c": False, "a:b c": False, "a:": False}
    assert {x: fields.module_function(x) is None for x in functions} == functions
    assert [fields.nonempty("give one")(x) for x in ("", (), "x", ("",))] == ["is not set; give one"] * 2 + [None] * 2


SMALLEST, LARGEST = 1.1754944e-38, 3.4028234e38  # sizes of the normal numbers of float32
values = st.floats() | st.integers(-(2**66), 2**66) | st.booleans() | st.text(max_size=2) | st.none()
EDGES = [SMALLEST, -LARGEST, 1e-39, -1e-40, 5e-324, 0.0, math.inf, -math.inf, math.nan]
EDGES += [2**64, 2**64 - 1, 1 - 2**64, -(2**64), True, "x", None]


def expected(value, *, infinite):
    """The words on a value by hand: of one number, or of the first kind of fault of several."""
    each = value if isinstance(value, tuple) else (value,)
    floats = [x for x in each if isinstance(x, float)]
    if any(math.isnan(x) if infinite else not math.isfinite(x) for x in floats):
        return "must be a number or inf" if infinite else "must be finite"
    if any(type(x) is int and not -(2**64) < x < 2**64 for x in each):
        return "is larger than 64 bits hold"
    wrong = any(x and math.isfinite(x) and not SMALLEST <= abs(x) <= LARGEST for x in floats)
    return "must be 0, or of a size from 1.17549e-38 to 3.40282e+38" if wrong else None


SECTIONS = {x: attrs.make_class("Section", {"x": setting(None, unbounded=x)}, frozen=True) for x in (False, True)}


def check_number(value):
    assert fields.number_problem(value) == expected(value, infinite=True)
    for unbounded in (False, True):
        words = expected(value, infinite=unbounded)
        found = list(fields.wrong_values(SECTIONS[unbounded](value)))
        assert found == ([] if words is None else [Problem("x", value, words)])


@pytest.mark.parametrize("value", EDGES, ids=repr)
def test_a_number_at_an_edge_is_one_that_computations_hold(value):
    """Alone, or among others."""
    check_number(value)
    for other in (1.5, 3, *EDGES):
        check_number((value, other))


@given(values | st.lists(values, max_size=3).map(tuple))
def test_a_number_of_a_setting_is_one_that_computations_hold(value):
    check_number(value)


@attrs.frozen
class Inner:
    """A section inside of sections."""

    low: float = setting(0.5, fields.at_least(0.0), fields.below(1.0))
    name: str = setting("a")
    keywords: dict = attrs.field(factory=dict, metadata={"keywords": True})


@attrs.frozen
class Middle:
    """A section with a setting whose name Python reserves."""

    inner: Inner = setting(Inner)
    from_: str | None = setting(None, name="from")
    flag: bool = setting(True)


@attrs.frozen
class Whole:
    """Settings of sections."""

    middle: Middle = setting(Middle)
    size: int = setting(3, fields.above(0))
    made: int = kept(7)
    cluster: str = setting("none")


def whole(**changes):
    inner = Inner(**{name: x for name, x in changes.items() if name in ("low", "name", "keywords")})
    middle = Middle(inner=inner, **{name: x for name, x in changes.items() if name in ("from_", "flag")})
    return Whole(middle=middle, **{name: x for name, x in changes.items() if name in ("size", "made", "cluster")})


def test_problems_have_the_whole_paths_of_their_settings():
    found = list(fields.wrong_values(whole(low=2.0, size=0, from_=math.nan, made=-1)))
    assert [str(problem) for problem in found] == [
        "middle.inner.low = 2.0: must be less than 1.0",
        "middle.from = nan: must be finite",
        "size = 0: must be greater than 0",
    ]
    assert list(fields.wrong_values(whole())) == []
    named = {cls: [fields.name_of(x) for x in fields.fields_of(cls)] for cls in (Whole, Middle, Inner)}
    assert named == {Whole: ["middle", "size", "cluster"], Middle: ["inner", "from", "flag"], Inner: ["low", "name"]}
    assert dict(fields.kinds_of(Middle)) == {"inner": Inner, "from": str | None, "flag": bool}
    assert fields.value_at(whole(from_="x"), "middle.from") == "x"
    assert fields.value_at(whole(low=0.25), "middle.inner") == Inner(low=0.25)
    assert fields.value_at(whole(), "") == whole()
    assert fields.problem_at(whole(low=0.25), "middle.inner.low", "no") == Problem("middle.inner.low", 0.25, "no")
    assert fields.only(whole(size=5), "size", "cluster") == {"size": 5, "cluster": "none"}


def test_what_nothing_reads_is_what_was_given():
    """Whatever it is: also what is false, and a section's settings one by one."""
    paths = ("middle", "size", "cluster")
    assert list(fields.unread_problems(whole(), paths, "x")) == []
    found = list(fields.unread_problems(whole(low=0.0, from_="", flag=False, size=4), paths, "a thing"))
    words = "nothing reads it here: it is for a thing; leave it out"
    given = {"middle.inner.low": 0.0, "middle.from": "", "middle.flag": False, "size": 4}
    assert found == [Problem(path, value, words) for path, value in given.items()]
    assert list(fields.unread_problems(whole(low=0.0, size=4), ("size",), "x")) == [
        Problem("size", 4, words.replace("a thing", "x"))
    ]


def test_a_cluster_is_a_word_or_an_address():
    right = ["none", "local", "host:1234", "ray://a.b:1", "10.0.0.1:6379"]
    wrong = ["", "host", "host:", ":1", "a:1:2", "host:1x", "a b:1", "xray://a:1", "ray://a/b:1"]
    for value in (*right, *wrong):
        found = list(fields.cluster_problems(whole(cluster=value), "cluster", ("none", "local")))
        words = "it is none, local, or the HOST:PORT of a Ray cluster that runs"
        assert found == ([] if value in right else [Problem("cluster", value, words)])


def test_a_problem_in_words_and_back():
    assert str(Problem("a.b", ("x", 1), "no")) == "a.b = ['x', 1]: no"
    assert str(Problem("a.b", "x", "no")) == "a.b = 'x': no"
    assert str(Problem("a.b", attrs.NOTHING, "no: never")) == "a.b: no: never"
    assert fields.problem_of(WrongSetting("a", 1, "no")) == Problem("a", 1, "no")
    assert str(WrongSetting("a", (), "no")) == "a = []: no"
    assert fields.problem_of(ValueError("a = 1: no: never")) == Problem("a = 1", attrs.NOTHING, "no: never")
