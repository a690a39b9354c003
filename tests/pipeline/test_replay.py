"""Which steps a replay computes anew."""

from types import SimpleNamespace
from typing import Any

import pytest

from fppo.pipeline.replay import replay


def steps_from(computed: list[int], first: int) -> Any:
    def begin(run: Any) -> Any:
        for step in range(run.step + 1, 99):
            computed.append(step)
            yield SimpleNamespace(step=step), None, None

    return SimpleNamespace(step=first), begin


@pytest.mark.parametrize(("first", "until"), [(0, 1), (0, 3), (4, 7)])
def test_the_steps_after_a_run_and_up_to_the_one_that_is_named(first, until):
    run, begin = steps_from(computed := [], first)
    recorded: dict[int, Any] = {until: None}  # whose digests are compared with nothing
    got = [(after.step, difference) for after, difference in replay(run, begin=begin, recorded=recorded, until=until)]
    assert got == [(step, None) for step in range(first + 1, until + 1)]
    assert computed == [*range(first + 1, until + 1)]


def test_a_step_without_a_record_is_named_before_any_is_computed():
    run, begin = steps_from(computed := [], 4)
    with pytest.raises(ValueError, match="no record of step 9; the recorded steps are"):
        next(iter(replay(run, begin=begin, recorded={7: {}, 8: {}}, until=9)))
    assert computed == []
