"""Restarts: whatever is lost and whenever, no more attempts are made than the limit allows, and none in vain."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime.restarts import Lost, Restarts


class PoolLost(Lost):
    pass


FATES = st.sampled_from(
    [None, ValueError("of the work"), Lost("another kind"), PoolLost("mends"), PoolLost("never", again=False)]
)


@given(st.lists(FATES, max_size=8), st.integers(0, 4))
def test_attempts_end_with_a_result_or_with_what_no_restart_mends(fates, limit):
    """The first fate that is no mendable loss of the kind decides, or the first beyond the limit."""
    attempts, restarted, restarts = iter(fates), [], Restarts(limit)

    def attempt():
        fate = next(attempts, None)
        if fate is not None:
            raise fate
        return "result"

    decisive = next((i for i, x in enumerate(fates) if not (isinstance(x, PoolLost) and x.again)), len(fates))
    end = min(decisive, limit)
    fate = fates[end] if end < len(fates) else None
    if fate is None:
        assert restarts.run(attempt, PoolLost, restarted.append) == "result"
    else:
        with pytest.raises(type(fate)) as raised:
            restarts.run(attempt, PoolLost, restarted.append)
        assert raised.value is fate
    assert restarted == fates[:end]
    assert len(list(attempts)) == max(len(fates) - end - 1, 0)
    assert str(restarts) == f"{end} of {limit} times"


def test_threads_share_what_is_left():
    restarts, together, attempts, ended = Restarts(30), threading.Barrier(4), [], []

    def attempt():
        attempts.append(1)
        raise Lost("mends")

    def live():
        together.wait()
        with pytest.raises(Lost):
            restarts.run(attempt, Lost, lambda _: time.sleep(0))
        ended.append(restarts.used)

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [30] * 4
    assert len(attempts) == 34
