"""Messages of errors against their definitions: untrusted text, depth of nesting, hints, exits of user code."""

from __future__ import annotations

import difflib
import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fppo._errors import (
    DEEPEST,
    MOST,
    RunFailed,
    check_depth,
    did_you_mean,
    is_of_python,
    json_of,
    nearest,
    no_exit,
    of_exit,
    printable,
    words_of,
)

WHOLE = 10**6
ODD = st.sampled_from("\x00\x1b\x7f\x9b\u200e\u2028\u202e\u2066\ud800\n\t\r é€")


def escaped(character: str, lines: bool) -> str:
    """A character as a terminal is shown it."""
    harmful = unicodedata.category(character) in ("Cc", "Cs") or character in "\u200e\u200f\u2028\u2029"
    harmful |= "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    kept = lines and character in "\n\t"
    return character.encode("unicode_escape", "surrogatepass").decode() if harmful and not kept else character


@settings(max_examples=60)
@given(st.lists(st.characters() | ODD, max_size=30).map("".join), st.integers(0, 31), st.booleans())
@example("ab\u2028c", 4, True)
@example("abcd", 4, False)
@example("abcdef", 1, False)
def test_text_is_shown_whole_or_without_its_middle(text, most, lines):
    def shown(part):
        return "".join(escaped(x, lines) for x in part)

    half = most // 2
    left = f"... ({len(text) - 2 * half:,} more characters) ..."
    cut = f"{shown(text[:half])} {left} {shown(text[len(text) - half :])}" if half else left
    assert printable(text, most, lines=lines) == (shown(text) if len(text) <= most else cut)


def test_the_words_of_an_error_are_its_type_and_text_in_one_short_line():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("x")

    assert words_of(ValueError("a\nb\x1b")) == "ValueError: a\\nb\\x1b"
    assert words_of(Mute()) == "Mute: (its text raises KeyError)"
    assert len(words_of(ValueError("x" * WHOLE))) < MOST + 50
    assert words_of(ValueError("x" * 100), 20) == "ValueError ... (92 more characters) ... xxxxxxxxxx"


KINDS = {"tables": ('{"a":', "1", "}"), "lists": ("[", "1", "]"), "both": ('[{"a":', "1", "}]")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deep", [1, DEEPEST - 2, DEEPEST, DEEPEST + 2, 50_000])
@pytest.mark.parametrize("made", [str, str.encode])
def test_json_is_read_as_deep_as_files_may_be(kind, deep, made):
    begin, inside, end = KINDS[kind]
    count = deep if kind != "both" else max(deep // 2, 1)
    text = made(begin * count + inside + end * count)
    if deep <= max(DEEPEST, 2):
        assert json_of(text) == json.loads(text)
    else:
        with pytest.raises(ValueError, match=f"its tables and lists are nested more than {DEEPEST} deep"):
            json_of(text)


@pytest.mark.parametrize("wrap", [lambda x: {"a": x}, lambda x: [x], lambda x: (x,), lambda x: {"b": 1, "a": (0, [x])}])
def test_values_are_as_deep_as_files_may_be(wrap):
    """Tables, lists and tuples count one each, the outermost does not."""
    step = 3 if len(wrap(0)) == 2 else 1
    value, depth = wrap(0), step
    while depth + step <= DEEPEST + 1:
        value, depth = wrap(value), depth + step
    assert check_depth(value) is value
    with pytest.raises(ValueError, match="nested more than"):
        check_depth(wrap(value))


def test_objects_are_made_by_the_given_function():
    assert json_of('{"a": 1, "a": 2}', pairs=list) == [("a", 1), ("a", 2)]
    with pytest.raises(json.JSONDecodeError):
        json_of("{")


names = st.lists(st.text("abc", min_size=1, max_size=5), max_size=5, unique=True)


@given(st.text("abc", max_size=5), names, st.sampled_from([0.0, 0.3, 0.6, 0.9]))
def test_a_hint_is_the_nearest_name_where_one_is_near(name, choices, cutoff):
    shares = {x: difflib.SequenceMatcher(None, x, name).ratio() for x in choices}
    near = max(shares.values(), default=-1.0)
    found = nearest(name, iter(choices), cutoff)
    assert (found is None) == (near < cutoff)
    assert found is None or shares[found] == near
    question = "" if found is None else f"did you mean {found}? "
    assert did_you_mean(name, iter(choices), cutoff) == f"{question}there are {', '.join(choices)}"
    assert did_you_mean("lossez", ["loss", "x"]) == "did you mean loss? there are loss, x"


def test_an_exit_is_named_by_the_innermost_function_that_is_no_part_of_python():
    def inner():
        json.loads("1", object_hook=print, parse_int=lambda x: sys.exit("bye\x1b"))

    def outer():
        inner()

    with pytest.raises(RunFailed) as caught, no_exit():
        outer()
    assert re.match(
        r"<lambda>\(\), .*test_errors\.py:\d+, called sys\.exit\('bye\\x1b'\), which ends ", str(caught.value)
    )
    with pytest.raises(RunFailed, match=r"^the module's own code, .* called sys\.exit\(3\)"), no_exit():
        exec(compile("import sys\nsys.exit(3)", str(Path(__file__)), "exec"), {})
    assert of_exit(SystemExit(None)).startswith("a function called sys.exit(None), ")


def test_files_of_python_are_those_of_its_library_without_packages():
    library = Path(json.__file__).parent
    found = {
        str(library / "decoder.py"): True,
        "<string>": True,
        "<frozen importlib._bootstrap>": True,
        str(library.parent / "site-packages" / "x.py"): False,
        str(library.parent / "dist-packages" / "x" / "y.py"): False,
        f"{library.parent}x/y.py": False,
        __file__: False,
    }
    assert {name: is_of_python(name) for name in found} == found
