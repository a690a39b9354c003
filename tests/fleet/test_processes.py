"""Ranks in processes of this machine: collectives over gloo, and what is said of one that is killed."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
import torch.distributed as dist

from fppo.fleet import HERE, Group, GroupDied, RankSpec, cluster, processes
from fppo.fleet.group import RankLost
from tests.fleet.test_group import check_stream, fails_on, make, reduced


def pid(here):
    return os.getpid()


def gpus(here):
    seen = torch.zeros(2, dtype=torch.int64)
    seen[here.rank] = int(os.environ["CUDA_VISIBLE_DEVICES"])
    dist.all_reduce(seen, group=here.mesh["shard"].group)
    return seen.tolist()


class StandIn:
    """A process that does not start, that is lost as it begins, or of which nothing is ever heard."""

    exitcode, made = -9, 0

    def __init__(self, how, *, args, **_):
        self.how, self.line, StandIn.made = how, args[0], StandIn.made + 1
        self.pid = StandIn.made

    def start(self):
        if self.how == "no":
            raise OSError("no memory for a process")
        if self.how == "silent" or self.pid != 2:
            self.kept = Connection(os.dup(self.line.fileno()))

    def join(self):
        pass

    close = kill = join


@pytest.mark.parametrize("how", ["no", "lost", "silent"])
def test_a_rank_that_does_not_start_says_so_before_those_who_wait_for_it_to_join(monkeypatch, how):
    context = SimpleNamespace(Process=partial(StandIn, how), set_forkserver_preload=list)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(StandIn, "made", 0)
    words = {
        "no": "no memory for a process",
        "lost": "process 2 ended by SIGKILL, perhaps for want of memory",
        "silent": "process 1, 2, 3 was not up after 0.2 s",
    }
    with pytest.raises((OSError, RankLost)) as raised:
        processes.Processes(RankSpec(count=3, patience=0.2)).start()
    assert str(raised.value) == words[how]
    assert how == "no" or raised.value.again == (how == "lost")


@pytest.mark.slow
def test_ranks_are_processes_with_their_own_gpus_that_may_be_killed_and_start_anew(monkeypatch):
    monkeypatch.setattr(processes, "_ON_GPUS", "forkserver")  # which is up in a moment
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    with cluster("processes") as there:
        there.ranks(RankSpec(gpus=1))
        ranks = there.ranks(RankSpec(count=2, gpus=1, threads=1, patience=120.0))
    assert ranks._spec.device == "cuda"
    ranks._spec = attrs.evolve(ranks._spec, device="cpu")
    with Group("two", ranks, patience=120.0) as two:
        assert two.call(gpus, HERE) == [5, 3]
        state, _ = two.call(make, HERE, 1.0, stays=(0,))
        assert two.call(reduced, HERE, 1.0) == 2.0
        assert float(two.call(dict, state)["x"][0]) == 1.0
        first = two.call(pid, HERE)
        assert first != os.getpid()
        os.kill(first, signal.SIGKILL)
        words = rf"group 'two': rank 0 of 2 \(process {first}\) was lost in reduced: process {first} ended by SIGKILL"
        with pytest.raises(GroupDied, match=words):
            two.call(reduced, HERE, 1.0)
        two.start()
        assert two.call(reduced, HERE, 1.0) == 2.0
        with pytest.raises(KeyError):
            two.call(fails_on, HERE, 0)


def dies(number):
    yield from range(number)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_items_of_a_process_come_one_by_one_until_it_dies(tmp_path):
    with Group("one", processes.Processes(RankSpec(threads=1, patience=120.0)), patience=120.0) as one:
        check_stream(one, tmp_path)
        items = []
        with pytest.raises(GroupDied, match=r"was lost in dies: process .* ended by SIGKILL"):
            one.call(dies, 3, on_item=items.append)
        assert items == [0, 1, 2]


def sleeper():
    """A process that this one has started, and this one's variables but for those that a rank sets."""
    child = subprocess.Popen(["sleep", "600"])
    return child.pid, {name for name in os.environ if name not in ("GLOO_SOCKET_IFNAME", "LC_CTYPE")}


@pytest.mark.slow
def test_a_new_python_has_an_environment_of_its_own_and_what_it_starts_ends_with_it():
    ranks = processes.Processes(RankSpec(threads=1, patience=120.0), environment={"MINE": "1"})
    with Group("one", ranks, patience=120.0) as one:
        for _ in range(2):
            started, variables = one.call(sleeper)
            assert variables == {"MINE"}
            assert os.getsid(started) == one.call(pid, HERE) != os.getsid(0)
            one.start()
            deadline = time.monotonic() + 120
            while running(started) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not running(started)


def running(number):
    """Whether a process is at work, which one that is dead and has no parent yet that notices is not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_group_that_starts_again_and_again_keeps_nothing_of_the_processes_before():
    def kept():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    spec = RankSpec(threads=1, patience=120.0)
    with cluster("processes") as there, Group("one", there.ranks(spec), patience=120.0) as one:
        asked = threading.Thread(target=one.start)
        asked.start()
        asked.join()  # Linux ends a process that ends with its parent when the thread ends that started it
        first = one.call(pid, HERE)
        time.sleep(0.05)
        assert one.call(pid, HERE) == first
        before = kept()
        for _ in range(3):
            one.start()
        deadline = time.monotonic() + 120
        while kept() > before and time.monotonic() < deadline:  # a thread ends soon after what it listened to
            time.sleep(0.01)
        assert kept() <= before
