"""One rank fails: its error is shown once, and all ranks end within seconds."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from torch._C._distributed_c10d import TCPStore

RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from fppo.runtime.failure import Limits, Monitor
from fppo.runtime.mesh import Mesh, all_reduce
from fppo.runtime.watch import watched

rank, world, port = (int(x) for x in sys.argv[1:4])
torch.set_num_threads(1)
store = TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=PrefixStore("groups", store), rank=rank, world_size=world)
mesh, watch = watched(Mesh.of(init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))))
x = torch.ones(4)
limits = Limits(period=0.1, timeout=2.0, silence=6.0)
with Monitor(PrefixStore("monitor", store), rank, world, watch, limits):
    for step in range(1, 4):
        watch.step = step
        all_reduce(x, mesh["shard"])
    {body}
    for _ in range(3):
        all_reduce(x, mesh["shard"])
dist.destroy_process_group()
"""


def run(tmp_path, body, world=3):
    """The exit statuses of the ranks, what they wrote, and the seconds from the first end to the last."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK).replace("{body}", textwrap.indent(textwrap.dedent(body), "    ").strip()))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log = tmp_path / "log"
    with log.open("w") as sink:
        command = [sys.executable, str(script)]
        children = [
            subprocess.Popen([*command, str(rank), str(world), str(store.port)], stderr=sink, stdout=sink)
            for rank in range(world)
        ]
        first, deadline = None, time.monotonic() + 60
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            if first is None and any(child.poll() is not None for child in children):
                first = time.monotonic()
            time.sleep(0.02)
        seconds = time.monotonic() - (first or 0.0)
        for child in children:
            child.kill()
            child.wait()
    return [child.returncode for child in children], log.read_text(), seconds


def test_ranks_that_end_well_say_nothing(tmp_path):
    assert run(tmp_path, "pass", world=2)[:2] == ([0, 0], "")


def test_the_error_of_one_is_shown_once_and_ends_all(tmp_path):
    statuses, text, seconds = run(tmp_path, "if rank == 1: raise ValueError('the data is bad')")
    assert statuses == [1, 1, 1]
    assert text.count("ValueError: the data is bad\n") == 1
    assert text.count("Traceback") == 1
    assert "on rank 1 of 3" in text
    assert seconds < 8


def test_the_same_error_of_all_is_shown_once(tmp_path):
    statuses, text, _ = run(tmp_path, "raise ValueError('the settings are bad')")
    assert statuses == [1, 1, 1]
    assert text.count("Traceback") == text.count("ValueError: the settings are bad\n") == 1


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    statuses, text, seconds = run(tmp_path, "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)")
    assert statuses[2] == -signal.SIGKILL
    assert 0 not in statuses
    assert "after step 3: all_reduce over the axis 'shard' failed" in text
    assert "of all ranks [2] have not come to it" in text
    assert seconds < 10


def test_a_rank_that_hangs_is_named_with_what_waits_for_it(tmp_path):
    statuses, text, seconds = run(tmp_path, "if rank == 1: time.sleep(100)")
    assert statuses == [1, 1, 1]
    expected = "after step 3: all_reduce over the axis 'shard' has waited for 2 s; of all ranks [1] have not come to it"
    assert text.count(expected) == 1
    assert "mesh.timeout" in text
    assert seconds < 8


def test_a_rank_that_is_frozen_is_named(tmp_path):
    """Its process stands still, and with it the thread that speaks for it; nobody waits in a collective."""
    body = """
    if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)
    """
    statuses, text, _ = run(tmp_path, body, world=2)
    assert statuses == [1, -signal.SIGKILL]  # the frozen one was killed here
    assert "rank 0: rank 1 has not been heard of for 6 s" in text


@pytest.mark.skipif(not hasattr(os, "setsid"), reason="needs sessions")
def test_ranks_end_when_whoever_started_them_is_gone(tmp_path):
    body = "print('ready', flush=True); time.sleep(100)"
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK).replace("{body}", body))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, str(script), "0", "1", str(store.port)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    del store
    _, error = child.communicate(timeout=20)
    assert child.returncode == 1
    assert "whoever started the ranks cannot be reached" in error
