"""Values as JSON brings them back, what is missing in them, and text that is no text: each by a walk of its own."""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.data.plain import TwiceError, half_pairs, missing_in, once, plain, twice

texts = st.text("ab\ud800\udc00", max_size=3)
BEYOND = st.sampled_from([math.nan, math.inf, -math.inf])
leaves = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | BEYOND | st.sampled_from(["", "é", "nan"])


KEYS = st.sampled_from("abc")


def nested(inner, keys=KEYS):
    return st.recursive(
        inner,
        lambda x: st.lists(x, max_size=3) | st.tuples(x, x) | st.dictionaries(keys, x, max_size=3),
        max_leaves=9,
    )


@settings(max_examples=60)
@given(nested(leaves))
def test_a_plain_value_is_what_json_brings_back(value):
    assert repr(plain(value)) == repr(json.loads(json.dumps(value), parse_constant=lambda _: None))


def test_dates_arrays_and_numbered_keys_are_plain_too():
    day, hour = datetime.date(2024, 1, 2), datetime.time(3, 4)
    found = plain(
        {1: [day, (hour, datetime.datetime(2024, 1, 2, 3))], "x": np.array([[1.5, np.nan]]), "y": np.int64(3)}
    )
    assert repr(found) == repr({"1": ["2024-01-02", ["03:04:00", "2024-01-02T03:00:00"]], "x": [[1.5, None]], "y": 3})
    for value in ([b"x"], {"a": {1}}, object):
        with pytest.raises(ValueError, match="does not fit JSON"):
            plain(value)


def walk(value, path=""):
    """Every leaf with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk(inner, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from walk(inner, f"{path}[{place}]")
    else:
        yield path, value


@settings(max_examples=40)
@given(nested(leaves | BEYOND | st.just(datetime.date(2024, 1, 2))))
def test_what_is_missing_is_found_at_its_place_and_nothing_else(value):
    expected = [path for path, x in walk(value) if isinstance(x, float) and not math.isfinite(x)]
    assert list(missing_in(value)) == expected
    assert list(missing_in({"n": np.array([1.0, np.inf])})) == ["['n'][1]"]


@settings(max_examples=60)
@given(nested(st.integers() | texts, texts))
def test_half_of_a_surrogate_pair_is_found_in_keys_and_values_in_order(value):
    def every(x):
        if isinstance(x, str):
            yield x
        elif isinstance(x, dict):
            for pair in x.items():
                yield from every(pair)
        elif isinstance(x, list | tuple):
            for inner in x:
                yield from every(inner)

    assert half_pairs(value) == next((x for x in every(value) if any("\ud800" <= c <= "\udfff" for c in x)), None)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1)), max_size=5))
def test_an_object_has_each_key_once(pairs):
    names = [name for name, _ in pairs]
    more = sorted(name for name, number in Counter(names).items() if number > 1)
    assert twice(names) == more
    if not more:
        assert list(once(pairs).items()) == pairs
        return
    with pytest.raises(TwiceError) as told:
        once(pairs)
    assert str(told.value).startswith(f"{more} more than once")
