"""Ranks in processes of this machine: collectives over gloo, and what is said of one that is killed."""

import os
import signal

import pytest

from fppo.fleet import HERE, Group, GroupDied, Processes
from tests.fleet.test_group import fails_on, make, reduced


def pid(here):
    return os.getpid()


@pytest.mark.slow
def test_ranks_are_processes_that_may_be_killed_and_start_anew():
    with Group("two", Processes(2, threads=1), patience=120.0) as two:
        state, _ = two.call(make, HERE, 1.0, stays=(0,))
        assert two.call(reduced, HERE, 1.0) == 2.0
        assert float(two.call(dict, state)["x"][0]) == 1.0
        first = two.call(pid, HERE)
        assert first != os.getpid()
        os.kill(first, signal.SIGKILL)
        words = (
            rf"group 'two': rank 0 of 2 \(process {first}\) was lost in reduced: process {first} ended with status -9"
        )
        with pytest.raises(GroupDied, match=words):
            two.call(reduced, HERE, 1.0)
        two.start()
        assert two.call(reduced, HERE, 1.0) == 2.0
        with pytest.raises(KeyError):
            two.call(fails_on, HERE, 0)
