"""What a process was stopped for counts against nothing."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime import clock

GAPS = st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=30)


@given(GAPS, st.floats(0.1, 5))
def test_seconds_lived_through_are_those_that_passed_but_for_long_gaps(gaps, most):
    with pytest.MonkeyPatch.context() as patch:
        passed = [100.0]
        patch.setattr(time, "monotonic", lambda: passed[0])
        lived, unchanged, value, since = clock.ProcessClock(most), clock.Unchanged(), 0, 0.0
        expected = 0.0
        assert unchanged.seconds(value, lived.now()) == 0.0
        for gap, changed in gaps:
            passed[0] += gap
            expected += min(gap, most)
            assert lived.now() == lived.now() == pytest.approx(expected)
            if changed:
                value, since = value + 1, expected
            assert unchanged.seconds(value, lived.now()) == pytest.approx(expected - since)


def test_a_sleep_is_not_over_when_a_process_that_was_stopped_goes_on(monkeypatch):
    passed, naps = [0.0], []

    def nap(seconds):
        naps.append(seconds)
        passed[0] += 1000.0 if len(naps) == 3 else seconds

    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    monkeypatch.setattr(time, "sleep", nap)
    clock.sleep(2.0)
    assert 19 <= len(naps) <= 20
