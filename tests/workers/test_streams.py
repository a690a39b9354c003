"""Calls whose outcomes come one by one, while others are put."""

import asyncio
import contextvars
import logging
import threading

import attrs
import pytest

from fppo.workers.calls import Mode
from fppo.workers.pool import WorkerPool
from fppo.workers.runner import FunctionRunner
from fppo.workers.sample import Sample
from fppo.workers.streams import called_here
from tests.workers.slow_functions import blocks, later, number

LOG = logging.getLogger("tests")


def sample_of(number):
    return Sample(str(number), "", None, "", {}, (), (), "stop")


@attrs.frozen
class _Named:
    name: str
    fn: object
    asynchronous: bool
    inline: bool
    kind: str = "sample"


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("fn", [number, later])
def test_outcomes_come_one_by_one_while_others_are_put(fn, inline):
    function = _Named("own", fn, fn is later, inline)
    limits = {"time_limit": 10.0, "workers": 2, "concurrency": 4, "start_limit": 60.0}
    with FunctionRunner([function], role="reward", **limits) as ready, ready.stream(function, "calls", LOG) as calls:
        found = {}
        for start in range(0, 60, 20):
            for i in range(start, start + 20):
                calls.put(i, sample_of(i))
            found |= calls.taken(wait=True)
        while len(found) < 60:
            found |= calls.taken(wait=True)
        assert {i: outcome.score for i, outcome in found.items()} == {i: float(i) for i in range(60)}
        assert calls.taken(wait=True) == []


SEEN = contextvars.ContextVar("seen", default="nothing")


def seen(sample):
    return float(SEEN.get() == "here") + 2 * (threading.current_thread() is threading.main_thread())


@pytest.mark.parametrize("loops", [True, False])
def test_calls_in_this_process_see_the_callers_context(loops):
    """Also where an event loop runs, beside which they have a thread of their own."""

    def outcomes():
        SEEN.set("here")
        return called_here(seen, [sample_of(0)], Mode("sample", False, 1.0, 1.0, 1))

    async def inside():
        return outcomes()

    found = asyncio.run(inside()) if loops else contextvars.copy_context().run(outcomes)
    assert [x.score for x in found] == [1.0 if loops else 3.0]


@pytest.mark.slow
def test_a_coroutine_that_blocks_costs_itself_alone():
    with_limit = Mode("sample", True, 0.5, 60.0, 8)
    pool = WorkerPool([("own", blocks)], workers=1, start_limit=60.0)
    runner = FunctionRunner([], role="reward", time_limit=0.5, workers=1, concurrency=8, start_limit=60.0)
    try:
        run, found = pool.begin(0, with_limit, runner.patience()), {}
        for i in range(6):
            run.put(i, sample_of(i))
        while len(found) < 6:
            found |= pool.taken(run, wait=True)
    finally:
        pool.close()
    assert [found[i].kind for i in range(6)] == ["value"] * 3 + ["timeout"] + ["value"] * 2


def test_threads_share_the_processes():
    function = _Named("own", later, True, False)
    limits = {"time_limit": 10.0, "workers": 1, "concurrency": 4, "start_limit": 60.0}
    found = {}
    with FunctionRunner([function], role="reward", **limits) as ready:

        def asks(name):
            found[name] = [x.score for x in ready.outcomes_of(function, [sample_of(i) for i in range(name, name + 30)])]

        threads = [threading.Thread(target=asks, args=(name,)) for name in (0, 100)]
        with ready.stream(function, "calls", LOG) as calls:
            calls.put(7, sample_of(7))
            for thread in threads:
                thread.start()
            assert [(i, x.score) for i, x in calls.taken(wait=True)] == [(7, 7.0)]
            for thread in threads:
                thread.join()
            calls.put(8, sample_of(8))
            with ready.stream(function, "others", LOG) as others:
                others.put(9, sample_of(9))
                assert [(i, x.score) for i, x in others.taken(wait=True)] == [(9, 9.0)]
            assert [(i, x.score) for i, x in calls.taken(wait=True)] == [(8, 8.0)]  # the end of others is not its own
    assert found == {name: [float(i) for i in range(name, name + 30)] for name in (0, 100)}
