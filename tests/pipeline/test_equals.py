"""Groups of equal outcomes among rows that were not scored, by the whole score and by its parts."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import settings as draws
from hypothesis import strategies as st

from fppo.batch import Column
from fppo.pipeline.draw import equal_groups, truncated
from tests import tiny

ROWS = 6
WHOLE = tiny.experience(0, ROWS)
NUMBERS = st.lists(st.sampled_from([None, -1.0, 0.0, 0.5]), min_size=ROWS, max_size=ROWS)


def column(numbers: list[float | None]) -> torch.Tensor:
    return torch.tensor([math.nan if x is None else x for x in numbers])


@draws(max_examples=80)
@given(NUMBERS, st.one_of(st.none(), NUMBERS), NUMBERS, st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS))
def test_groups_are_of_equals_where_all_that_is_known_of_them_is_equal(scores, outcomes, part, groups):
    rows: Any = attrs.evolve(
        WHOLE,
        scores=column(scores),
        outcomes=None if outcomes is None else column(outcomes),
        named_scores={"part": column(part)},
        groups=torch.tensor(groups),
    )
    for by, numbers in {"score": scores if outcomes is None else outcomes, "part": part}.items():
        known = [{x for x, g in zip(numbers, groups, strict=True) if g == group and x is not None} for group in groups]
        assert equal_groups(rows, by=by).tolist() == [len(x) <= 1 for x in known]
    with pytest.raises(ValueError, match=r"no part 'other' to compare groups by; there are \['score', 'part'\]"):
        equal_groups(rows, by="other")


def test_a_response_is_cut_where_the_limit_ended_it():
    finish = ["length", "stop", "length", "cut", "stop", "stop"]
    found = truncated(attrs.evolve(WHOLE, finish=Column(finish)))
    assert found.tolist() == [True, False, True, False, False, False]
