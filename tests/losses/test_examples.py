"""How many examples loss math is drawn for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

DRAWN: list[int] = []


@given(st.integers())
def draw(number: int) -> None:
    DRAWN.append(number)


def test_loss_math_draws_a_hundred_examples_in_ci(request: pytest.FixtureRequest):
    """Other tests do not draw so often: `tests/test_costs.py`."""
    draw()
    assert (len(DRAWN) >= 100) == (request.config.getoption("--hypothesis-profile") in ("ci", "thorough"))
