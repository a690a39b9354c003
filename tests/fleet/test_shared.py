"""Arrays come out of parcels as they went in, with memory for them or without, and nothing is left of that memory."""

import contextlib
import errno
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import threading

import numpy as np
import pytest
import torch

from fppo.fleet import Group, Processes, RankSpec, processes
from fppo.fleet.codec import Sent
from fppo.fleet.shared import Parcel, PipeLane, put


def arrays_of(*sizes):
    return [(np.arange(size) * 37 % 251).astype(np.uint8) for size in sizes]


def no_space(*_):
    raise OSError(errno.ENOSPC, "no space left on device")


def refused(*_):
    raise OSError(errno.ETOOMANYREFS, "too many references")


def no_file(*_, **__):
    raise RuntimeError("unable to open file")


def short(file, data, start):
    return write(file, data[: len(data) // 2 + 1], start)


write = os.pwrite
TROUBLES = {
    "none": (None, "", None),
    "no memory": (os, "memfd_create", no_space),
    "no room in it": (os, "pwrite", no_space),
    "written in parts": (os, "pwrite", short),
    "too many on their way": (socket, "send_fds", refused),
    "not to be mapped": (torch, "from_file", no_file),
}


@pytest.fixture
def lanes():
    limit = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)  # what is not sent is not waited for
    yield tuple(PipeLane(line) for line in multiprocessing.Pipe())
    socket.setdefaulttimeout(limit)


def sent_through(lanes, message, arrays):
    parcel = Parcel(pickle.dumps(message), put(arrays) or arrays)
    thread = threading.Thread(target=lanes[0].send, args=(parcel,))
    thread.start()
    found = lanes[1].receive()
    thread.join()
    return found


def files():
    """The files in memory that this process has open, and what it has mapped of such."""
    opened = []
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself, and what a thread closes meanwhile
            opened.append(os.readlink(f"/proc/self/fd/{file}"))
    with open("/proc/self/maps") as maps:
        return [x for x in opened if "fppo-fleet" in x], [x for x in maps if "fppo-fleet" in x]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_arrays_arrive_whatever_there_is_room_for(trouble, lanes, monkeypatch):
    where, name, instead = TROUBLES[trouble]
    if instead is not None:
        monkeypatch.setattr(where, name, instead)
    for sizes in ((), (1,), (100_000, 1, 70_000), (3, 300_000)):
        message, found = sent_through(lanes, {"n": sizes}, arrays_of(*sizes))
        assert message == {"n": sizes}
        assert all(np.array_equal(x, y) for x, y in zip(found, arrays_of(*sizes), strict=True))
        assert all(x.ctypes.data % 64 == 0 for x in found) or trouble not in ("none", "written in parts")
        for x in found:
            x[:] = 7  # it is the receiver's own
    del found, x
    assert files() == ([], [])


def test_a_limit_of_the_system_is_no_bus_error(lanes):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        assert put(arrays_of(1 << 17)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_several_read_the_same_memory_and_none_sees_what_another_writes():
    places = put(arrays_of(100_000, 70_000))
    found = []
    for _ in range(2):
        one, other = (PipeLane(x) for x in multiprocessing.Pipe())
        one.send(Parcel(pickle.dumps(None), places))
        found.append(other.receive()[1])
    found[0][1][5] = 99
    assert np.array_equal(found[1][1], arrays_of(70_000)[0])
    assert len(files()[0]) == 1
    del places
    assert (len(files()[0]), len(files()[1])) == (0, 2)
    assert np.array_equal(found[1][0], arrays_of(100_000)[0])


def test_who_is_gone_is_found_at_both_ends():
    one, _ = (PipeLane(x) for x in multiprocessing.Pipe())
    del _
    with pytest.raises(OSError):
        one.send(Parcel(pickle.dumps(1), put(arrays_of(9))))
    with pytest.raises(EOFError):
        one.receive()


def test_a_tensor_is_put_once_until_it_is_written_into_or_gone():
    made = []

    def stored(arrays):
        made.append([x.copy() for x in arrays])
        return range(10 * len(made), 10 * len(made) + len(arrays))

    sent, x, y = Sent(stored), torch.zeros(4), torch.ones(4)
    assert sent.refs([x, y, x]) == [10, 11, 10]
    assert sent.refs([y, x]) == [11, 10]
    x += 2
    assert sent.refs([x, y]) == [20, 11]
    assert [len(each) for each in made] == [2, 1]
    assert made[1][0].tobytes() == x.numpy().tobytes()
    assert sent.refs([x.view(2, 2)]) == [30]  # which is another tensor
    assert Sent(lambda _: None).refs([x]) is None
    assert Sent(lambda _: None).refs([]) == []


def look(x):
    return float(x["a"].sum()), [line for line in open("/proc/self/maps") if "fppo-fleet" in line] != []


def itself(x):
    return x


def more(x):
    return torch.full((1 << 17,), float(x))


@pytest.mark.slow
def test_ranks_find_large_tensors_in_memory_of_which_nothing_is_left(monkeypatch):
    sent = Sent(put)
    ranks = [Processes(RankSpec(threads=1), sent=sent) for _ in range(2)]
    with Group("a", ranks[0]) as a, Group("b", ranks[1]) as b:
        column = {"a": torch.ones(1 << 17), "b": torch.zeros(3)}
        assert a.call(look, column) == b.call(look, column) == (1 << 17, True)
        assert len(files()[0]) == 1  # both have it from there
        column["a"] += 1
        assert a.call(look, column) == (1 << 18, True)
        monkeypatch.setattr(processes, "MOST", 3)
        many = [torch.full((1 << 14,), float(i)) for i in range(5)]
        assert [b.call(itself, x, stays=True) for x in many] != []
        made = []
        monkeypatch.setattr(processes, "put", lambda arrays: made.append(len(arrays)) or put(arrays))
        assert b.call(torch.stack, many).sum() == 10 << 14
        assert made == [5]  # in one piece, for those that they were in are too many
        held = a.call(itself, column, stays=True)
        back = a.call(more, 3)
        assert (back.mean(), a.call(dict, held)["a"].sum()) == (3.0, 1 << 18)
        del many
        assert len(files()[0]) == 1
        os.kill(a.call(pid), signal.SIGKILL)
        monkeypatch.setattr(sent, "_put", lambda _: None)
        assert float(b.call(itself, column)["a"].sum()) == 1 << 18
        assert back.mean() == 3.0
    del column, back, held
    assert files() == ([], [])
    assert not [name for name in os.listdir("/dev/shm") if "fppo" in name]


def pid():
    return os.getpid()
