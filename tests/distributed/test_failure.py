"""One rank fails: its error is shown once, and all ranks end within seconds."""

import datetime
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

from fppo.runtime import launch
from fppo.runtime.failure import Limits, Monitor
from fppo.runtime.mesh import Mesh, Sharding, all_reduce
from fppo.runtime.watch import watched
from tests.distributed.processes import server

LIMITS = Limits(period=0.1, timeout=90.0, silence=90.0)
IMPATIENT = Limits(period=0.1, timeout=4.0, silence=90.0)
SOON = 40.0  # seconds: less than the limits, and than a rank hangs


def work(rank, sizes, port, body, limits, hosted, output):
    """What a process does: three steps, then `body(rank, mesh)`, then three more collectives."""
    torch.set_num_threads(1)
    with open(output, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    world = torch.Size(sizes.values()).numel()
    store = TCPStore("127.0.0.1", port, is_master=hosted and rank == 0, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=PrefixStore("groups", store), rank=rank, world_size=world)
    device_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh, watch = watched(Mesh.of(device_mesh))
    with Monitor(PrefixStore("monitor", store), rank, world, watch, limits):
        x = torch.ones(4)
        for step in range(1, 4):
            for name in sizes:
                all_reduce(x, mesh[name])
            watch.step = step
        body(rank, mesh)
        for _ in range(3):
            for name in sizes:
                all_reduce(x, mesh[name])
        dist.barrier()
    dist.destroy_process_group()


def started(target, *arguments):
    """A process that has everything imported."""
    process = server().Process(target=target, args=arguments)
    process.start()
    return process


def start(directory, body, sizes, *, limits=LIMITS, hosted=False):
    """The processes, with the store that they meet at; `hosted` in rank 0's process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if hosted:
        del store
        store = None
    output = str(directory / "log")
    ranks = range(torch.Size(sizes.values()).numel())
    return [started(work, rank, sizes, port, body, limits, hosted, output) for rank in ranks], store


def end(processes, seconds=120.0):
    """The exit statuses, and the seconds from the first end to the last; what is left after `seconds` is killed."""
    first, deadline = None, time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if first is None and not all(process.is_alive() for process in processes):
            first = time.monotonic()
        time.sleep(0.02)
    now = time.monotonic()
    took = now - (first or now)
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes], took


def run(directory, body, sizes=None, **changes):
    """The exit statuses, what was written, and the seconds from the first end to the last."""
    processes, store = start(directory, body, sizes or {"shard": 3}, **changes)
    statuses, seconds = end(processes)
    del store
    return statuses, (directory / "log").read_text(), seconds


def nothing(rank, mesh):
    pass


def bad_data(rank, mesh):
    if rank == 1:
        raise ValueError("the data is bad")


def bad_settings(rank, mesh):
    raise ValueError("the settings are bad")


def first_is_bad(rank, mesh):
    if rank == 0:
        raise ValueError("the data is bad")


def killed(rank, mesh):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(rank, mesh):
    if rank == 1:
        time.sleep(100)


def frozen(rank, mesh):
    """The process stands still, and with it the thread that speaks for it; nobody waits in a collective."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)


def busy(rank, mesh, directory):
    (directory / str(rank)).touch()
    time.sleep(100)


def breaks(rank, mesh, directory):
    """Works until the file "end" is there."""
    (directory / str(rank)).touch()
    while not all_reduce(torch.tensor(float((directory / "end").exists())), mesh["shard"]):
        time.sleep(0.1)


def await_work(directory, ranks):
    """Returns once all ranks are at it."""
    deadline = time.monotonic() + 120
    while not all((directory / str(rank)).exists() for rank in range(ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def asked_to_stop(rank, mesh):
    raise SystemExit(130)


def test_ranks_that_end_well_say_nothing(tmp_path):
    assert run(tmp_path, nothing)[:2] == ([0, 0, 0], "")


def test_ranks_that_were_asked_to_stop_say_nothing(tmp_path):
    assert run(tmp_path, asked_to_stop)[:2] == ([130, 130, 130], "")


@pytest.mark.parametrize("hosted", [False, True])
def test_the_error_of_one_is_shown_once_and_ends_all(tmp_path, hosted):
    statuses, text, seconds = run(tmp_path, first_is_bad if hosted else bad_data, hosted=hosted)
    assert statuses == [1, 1, 1]
    assert text.count("Traceback") == text.count("ValueError: the data is bad\n") == 1
    assert f"on rank {0 if hosted else 1} of 3" in text
    assert "fppo: " not in text
    assert seconds < SOON


def test_the_same_error_of_all_is_shown_once(tmp_path):
    statuses, text, _ = run(tmp_path, bad_settings)
    assert statuses == [1, 1, 1]
    assert text.count("Traceback") == text.count("ValueError: the settings are bad\n") == 1


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    statuses, text, seconds = run(tmp_path, killed)
    assert statuses == [1, 1, -signal.SIGKILL]
    expected = "PeerError: after step 3: all_reduce over the axis 'shard' failed; no longer reporting: rank 2, at "
    assert text.count(expected) == text.count("failure.PeerError") == 1
    assert seconds < SOON


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_where_it_is_and_what_waits_for_it(tmp_path):
    statuses, text, seconds = run(tmp_path, hangs, limits=IMPATIENT)
    assert statuses == [1, 1, 1]
    assert "after step 3: all_reduce over the axis 'shard' has waited for 4 s for rank 1, at " in text
    assert text.startswith(("fppo: rank 0: ", "fppo: rank 2: "))
    assert "distributed/test_failure.py:" in text
    assert "in hangs after step 3 (mesh.timeout is the limit)\n" in text
    assert text.count("\n") == 1
    assert seconds < SOON


@pytest.mark.slow
def test_only_ranks_of_the_same_group_are_waited_for(tmp_path):
    """Rank 1 of two replicas of two shards hangs: ranks 0 and 3 wait for it, and rank 2 for rank 3."""
    statuses, text, _ = run(tmp_path, hangs, {"replicate": 2, "shard": 2}, limits=IMPATIENT)
    assert statuses == [1, 1, 1, 1]
    waits = {
        0: "'shard' has waited for 4 s for rank 1 (replicate 0, shard 1), at ",
        2: "'shard' has waited for 4 s for rank 3 (replicate 1, shard 1), in all_reduce over the axis 'replicate' for ",
        3: "'replicate' has waited for 4 s for rank 1 (replicate 0, shard 1), at ",
    }
    speaker = int(text.removeprefix("fppo: rank ").split()[0])
    assert waits[speaker] in text
    assert text.endswith("in hangs after step 3 (mesh.timeout is the limit)\n")
    assert ("; that is for rank 1 (replicate 0, shard 1), at " in text) == (speaker == 2)
    assert text.count("\n") == 1


@pytest.mark.slow
def test_a_rank_that_is_frozen_is_named(tmp_path):
    limits = Limits(period=0.1, timeout=90.0, silence=4.0)
    processes, store = start(tmp_path, frozen, {"shard": 2}, limits=limits)
    assert end(processes[:1])[0] == [1]
    assert end(processes, 0.0)[0] == [1, -signal.SIGKILL]  # the frozen one was killed here
    assert (tmp_path / "log").read_text() == "fppo: rank 0: rank 1 has not reported for 4 s\n"
    del store


@pytest.mark.slow
def test_ranks_that_were_all_stopped_for_a_while_go_on(tmp_path):
    limits = Limits(period=0.1, timeout=4.0, silence=4.0)
    processes, store = start(tmp_path, partial(breaks, directory=tmp_path), {"shard": 2}, limits=limits)
    await_work(tmp_path, 2)
    for number, order in ((signal.SIGSTOP, processes[::-1]), (signal.SIGCONT, processes)):
        for process in order:  # the first one that goes on finds the other as it was long ago
            os.kill(process.pid, number)
            time.sleep(0.3)
        time.sleep(4.5)
    (tmp_path / "end").touch()
    assert end(processes)[0] == [0, 0]
    assert (tmp_path / "log").read_text() == ""
    del store


def test_ranks_end_when_whoever_started_them_is_gone(tmp_path):
    processes, store = start(tmp_path, partial(busy, directory=tmp_path), {"shard": 2})
    await_work(tmp_path, 2)
    del store
    statuses, seconds = end(processes)
    assert statuses == [1, 1]
    assert (tmp_path / "log").read_text().count("the launcher of the ranks cannot be reached") == 1
    assert seconds < SOON


def again(rank, port, attempt, output):
    """Each start fails; torchrun starts all ranks again, and the store is the same."""
    torch.set_num_threads(1)
    with open(output, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
    place = launch.Place(rank, rank, 2, started=True)
    with launch.joined({"shard": 2}, place, torch.device("cpu"), timeout=90.0, sharding=Sharding()) as (mesh, *_):
        all_reduce(torch.ones(1), mesh["shard"])
        time.sleep(0.7)
        if rank != attempt:
            raise ValueError(f"error {attempt}")
        all_reduce(torch.ones(1), mesh["shard"])


@pytest.mark.slow
def test_ranks_that_are_started_again_know_nothing_of_the_error_before(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        ranks = [started(again, rank, store.port, attempt, str(tmp_path / "log")) for rank in range(2)]
        assert end(ranks)[0] == [1, 1]
    text = (tmp_path / "log").read_text()
    assert text.count("Traceback") == 2
    assert text.count("ValueError: error 0\n") == text.count("ValueError: error 1\n") == 1


@pytest.mark.parametrize("claim", ["", '[1, "gone"]', "[" * 9])
def test_an_error_that_somebody_else_writes_to_the_store_is_told_once(tmp_path, claim):
    """No rank has failed: it ends with a message that says so."""
    processes, store = start(tmp_path, partial(busy, directory=tmp_path), {"shard": 2})
    await_work(tmp_path, 2)
    store.set("monitor/stand/0", "nothing of a rank's")
    store.set("monitor/error", claim)
    assert end(processes)[0] == [1, 1]
    log = (tmp_path / "log").read_text()
    assert log.count("the store of the ranks holds an error that none of them has written") == 1
    assert "another program writes to it" in log


def sampling(rank, port, fails, limits, output):
    """Two ranks whose batches are made by a thread beside, over a mesh of its own; rank 1's does not come."""
    torch.set_num_threads(1)
    with open(output, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=PrefixStore("groups", store), rank=rank, world_size=2)
    (mesh, watch), (twin, beside) = (
        watched(Mesh.of(init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)))) for _ in range(2)
    )
    with Monitor(PrefixStore("monitor", store), rank, 2, watch, limits, beside):
        all_reduce(torch.ones(1), mesh["shard"])

        def sample():
            all_reduce(torch.ones(1), twin["shard"])
            if rank == 1:
                os._exit(3) if fails else time.sleep(100)
            all_reduce(torch.ones(1), twin["shard"])

        with ThreadPoolExecutor(1) as pool:
            pool.submit(sample).result()


@pytest.mark.parametrize("fails", [False, True])
def test_a_hang_of_batches_ahead_is_told_with_the_rank_that_does_not_come(tmp_path, fails):
    """The thread that trains waits for no collective meanwhile, but for the batch."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limits = LIMITS if fails else IMPATIENT
    ranks = [started(sampling, rank, store.port, fails, limits, str(tmp_path / "log")) for rank in range(2)]
    assert end(ranks)[0] == [1, 3 if fails else 1]
    said = (tmp_path / "log").read_text()
    if fails:
        assert "of the batches that are made ahead, after step 0: all_reduce over the axis 'shard' failed" in said
        assert "no longer reporting: rank 1" in said
    else:
        waits = "of the batches that are made ahead, after step 0: all_reduce over the axis 'shard' has waited for 4 s"
        assert said.count(waits) == 1
        assert "for rank 1, at " in said
        assert "in sample" in said
