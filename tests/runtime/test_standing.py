"""Whom a collective waits for, from what ranks have said of themselves."""

import sys
import threading
import time

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime._standing import Standing, broken, causes, described, missing, too_long
from fppo.runtime.watch import WaitingCollective, Watch


def at_work(**calls):
    return Standing(beat=1, step=7, calls=calls, line="a/b.py:5 in load")


def in_collective(axis, op, number, group, **calls):
    return Standing(1, 7, calls | {axis: number}, "c.py:1 in f", (axis, op, number), 3.0, tuple(group))


def test_standings_pass_as_text_unchanged():
    for standing in (at_work(shard=3), in_collective("shard", "all_gather", 4, [0, 2], replicate=1)):
        assert Standing.loaded(standing.dumped().encode()) == standing


def test_a_rank_that_has_begun_the_collective_is_not_missing():
    standings = {0: at_work(shard=4), 1: at_work(shard=3), 2: None, 3: at_work(replicate=9)}
    assert missing("shard", 4, [0, 1, 2, 3], standings) == [1, 2, 3]
    assert missing("shard", 4, [0, 3], standings) == [3]


def test_the_cause_is_whoever_waits_for_nobody():
    standings = {
        0: in_collective("shard", "all_gather", 5, [0, 1]),
        1: in_collective("replicate", "all_reduce", 3, [1, 3], shard=4),
        2: in_collective("shard", "all_gather", 5, [2, 3]),
        3: at_work(shard=4, replicate=2),
    }
    text = too_long(WaitingCollective("shard", "all_gather", 5, 0.0), 7, 60.0, [1], standings)
    assert text == (
        "after step 7: all_gather over the axis 'shard' has waited for 60 s for rank 1, in all_reduce over the axis "
        "'replicate' for 3 s after step 7; that is for rank 3, at a/b.py:5 in load after step 7 "
        "(mesh.timeout is the limit)"
    )


@given(seed=st.integers(0, 999), ranks=st.integers(1, 6))
def test_the_search_for_causes_ends_and_finds_ranks_that_do_not_wait(seed, ranks):
    """Also where ranks wait for each other in a circle."""
    standings = {}
    for rank in range(ranks):
        kind = (seed >> rank) % 3
        number = (seed * 7 + rank) % 4
        standings[rank] = [
            None,
            at_work(shard=number),
            in_collective("shard", "barrier", number, range(ranks)),
        ][kind]
    found = causes(list(range(ranks)), standings)
    assert all(standings[rank] is None or standings[rank].waiting is None for rank in found)
    assert {rank for rank, x in standings.items() if x is None or x.waiting is None} == set(found)


def test_ranks_that_have_all_come_are_in_different_collectives():
    standings = {0: None, 1: in_collective("shard", "all_reduce", 5, [0, 1])}
    text = too_long(WaitingCollective("shard", "all_gather", 5, 0.0), 7, 60.0, [1], standings)
    assert "although all its ranks have come to one: rank 1, in all_reduce over the axis 'shard' for 3 s" in text


def test_of_many_ranks_the_first_are_told():
    standings = {rank: at_work() for rank in range(100)}
    text = too_long(WaitingCollective("shard", "all_gather", 5, 0.0), 7, 60.0, range(1, 100), standings)
    assert text.count("at a/b.py") == 4
    assert "; and 95 more" in text


def test_a_broken_collective_names_who_is_gone():
    waiting = WaitingCollective("shard", "all_gather", 5, 0.0)
    assert broken(waiting, 7, "reset", [], {}) == "after step 7: all_gather over the axis 'shard' failed (reset)"
    text = broken(waiting, 7, "reset", [1], {1: at_work()})
    assert "failed; no longer reporting: rank 1, at a/b.py:5 in load after step 7 (reset)" in text


def test_a_rank_tells_the_line_that_it_is_at_and_what_it_waits_for():
    watch = Watch({"shard": (0, 3)})
    watch.step = 2
    number = watch.count("shard", 10)
    go = threading.Event()

    def stands():
        go.wait(5)

    thread = threading.Thread(target=stands)
    thread.start()
    try:
        found = Standing.of(watch, 4, thread.ident)
        assert found.line.startswith("runtime/test_standing.py:")
        assert found.line.endswith(" in stands")
        assert (found.beat, found.step, found.calls, found.waiting) == (4, 2, {"shard": 1}, None)
        watch.waiting = WaitingCollective("shard", "barrier", number, time.monotonic() - 9)
        found = Standing.of(watch, 5, thread.ident)
        assert (found.waiting, found.group) == (("shard", "barrier", 1), (0, 3))
        assert found.place == "in barrier over the axis 'shard' for 9 s after step 2"
    finally:
        go.set()
        thread.join()
    assert Standing.of(watch, 6, -1).line == "an unknown line"
    found = Standing.of(watch, 7, threading.get_ident()).line  # its own code aside
    assert found.endswith(" in test_a_rank_tells_the_line_that_it_is_at_and_what_it_waits_for")
    assert sys._current_frames()


def test_a_message_is_waited_for_from_its_sender_alone():
    """Ranks of a pipeline send each other unequally many."""
    line = "pipeline from rank 1 to rank 2"
    standings = {0: at_work(pipeline=1), 1: at_work(pipeline=9, **{line: 3}), 2: None}
    standings[1] = Standing.loaded(attrs.evolve(standings[1], at="pipeline 1, tensor 0").dumped().encode())
    assert too_long(WaitingCollective(line, "receive", 4, 0.0), 7, 60.0, [1], standings) == (
        "after step 7: receive over the axis 'pipeline' from rank 1 to rank 2 has waited for 60 s for rank 1 "
        "(pipeline 1, tensor 0), at a/b.py:5 in load after step 7 (mesh.timeout is the limit)"
    )
    assert "although all its ranks have come" in too_long(
        WaitingCollective(line, "receive", 3, 0.0), 7, 60.0, [1], standings
    )


def test_a_circle_of_waiting_ends_and_a_cause_of_several_is_named_once():
    circle = {
        0: in_collective("shard", "barrier", 3, [0, 1], replicate=1),
        1: in_collective("replicate", "barrier", 2, [0, 1], shard=2),
    }
    assert causes([1], circle) == causes([0, 1], circle) == []
    both = {rank: in_collective("shard", "barrier", 3, [0, 1, 2, 3]) for rank in (0, 1, 2)} | {3: at_work(shard=2)}
    assert causes([0, 1, 2], both) == causes([2, 1, 3, 0], both) == [3]
    waiting = WaitingCollective("replicate", "all_gather", 5, 0.0)
    text = too_long(waiting, 7, 60.0, [1, 3], both)  # both are late; one of them is a cause itself
    assert text.count("rank 3, at a/b.py") == 1
    assert "that is for" not in text


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_ranks_that_never_reported_are_named_and_many_are_counted(count):
    said = described(range(3, 3 + count), dict.fromkeys(range(20)))
    shown = [f"rank {rank}, which has never reported" for rank in range(3, 3 + min(count, 4))]
    assert said == "; ".join(shown) + ("" if count < 5 else f"; and {count - 4} more")
