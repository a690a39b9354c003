"""What user code does to the descriptors and the process that it finds costs its own sample alone."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.rewards import RewardRunner
from fppo.workers.channel import SECRET, Channel, ForeignBytes, WorkerChannel
from tests.rewards.samples import samples
from tests.workers.meddling import forks_at_once, meddles

KEY = bytes(range(SECRET))


@pytest.mark.parametrize("what", ["length", "noise", "close", "replace"])
def test_a_reward_that_meddles_with_descriptors_fails_alone(what):
    with RewardRunner(meddles, time_limit=5.0) as runner:
        results = runner.run(samples("", what, ""))
        assert results.scores["meddles"] == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
        (failure,) = results.failures
        assert failure.number == 1
        if what in ("length", "noise"):
            assert "it wrote to a descriptor that is not its own" in failure.text
        assert runner.run(samples("", "")).failures == ()


@pytest.mark.parametrize("fn", [meddles, forks_at_once])
def test_a_reward_that_forks_returns_once(fn):
    with RewardRunner(fn, time_limit=60.0) as runner:
        for _ in range(2):
            results = runner.run(samples("fork", "", "fork"))
            assert results.failures == ()
            assert len(set(results.scores[fn.__name__])) == 1


def test_a_process_that_does_not_read_holds_nobody_up():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, KEY)
    channel.send(b"x" * (8 << 20))
    assert channel.unsent
    other = WorkerChannel(theirs.detach(), KEY)
    received = []
    thread = threading.Thread(target=lambda: received.append(other.receive()))
    thread.start()
    while channel.unsent:
        channel.flush()
        time.sleep(0.001)
    thread.join()
    assert received == [b"x" * (8 << 20)]


def _sent(*messages):
    """What a channel sends for these messages."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, KEY)
        for message in messages:
            channel.send(message)
        return theirs.recv(1 << 20)


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=40), max_size=4), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_messages_come_whole_and_in_order_in_whatever_pieces(messages, sizes):
    data, received = _sent(*messages) if messages else b"", []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, KEY)
        while data:
            for size in sizes:
                theirs.sendall(data[:size])
                data = data[size:]
                received += channel.receive()
        theirs.close()
        with pytest.raises(EOFError):
            channel.receive()
    assert received == messages


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=30), st.data())
def test_a_byte_that_is_changed_is_noticed_or_never_a_message(message, data):
    sent = bytearray(_sent(message))
    place = data.draw(st.integers(0, len(sent) - 1))
    sent[place] ^= data.draw(st.integers(1, 255))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        with contextlib.suppress(ForeignBytes):
            assert Channel(ours, KEY).receive() == []  # it would be longer
