"""Isolation: exceptions, deaths and hangs cost one sample its score, and nothing survives the runner."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fppo.commands import start
from fppo.rewards import RewardRunner, batch_reward, inline_reward, weighted_sum
from fppo.workers.calls import Patience
from fppo.workers.runner import FunctionRunner
from tests.rewards import functions
from tests.rewards.samples import NONE, sample, samples


def run(reward, item, **limits):
    with RewardRunner(reward, **{"time_limit": 60.0, **limits}) as runner:
        return runner.run(item)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize("workers", [1, 2])
def test_scores_come_in_order(workers):
    words = ["a" * (i % 7) for i in range(90)]
    results = run(functions.length, samples(*words), workers=workers)
    assert results.scores == {"length": [float(len(w)) for w in words]}
    assert results.failures == ()


def test_no_samples_and_no_processes():
    assert run(functions.length, []).scores == {"length": []}


def test_workers_are_other_processes_without_torch_and_stay():
    with RewardRunner(functions.process) as runner:
        first, second = (runner.run(samples("a", "b")) for _ in range(2))
        assert first.named == second.named
        (pid,) = set(first.named["pid"])
        assert int(pid) != os.getpid()
        assert first.named["torch"] == [0.0, 0.0]
        assert alive(int(pid))
    assert gone(int(pid))


def test_samples_on_which_functions_raise_have_no_score(caplog):
    with caplog.at_level(logging.WARNING, logger="fppo.rewards"):
        results = run(functions.by_response, samples("", "raise", "exit", ""))
    assert results.scores["by_response"] == [1.0, NONE, NONE, 1.0]
    assert [(f.number, f.kind) for f in results.failures] == [(1, "error"), (2, "error")]
    assert "KeyError: 'no such thing' at " in results.failures[0].text
    assert "SystemExit: 3" in results.failures[1].text
    (record,) = (each for each in caplog.records if each.name == "fppo.rewards")
    assert "'by_response' failed on 2 of 4 samples" in record.getMessage()
    assert "no such thing" in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("hang", ["loop", "regex", "sleep"])
def test_hangs_are_bounded_in_python_and_in_c(hang):
    with RewardRunner(functions.by_response, time_limit=3.0) as runner:
        runner.run(samples(""))
        start = time.monotonic()
        results = runner.run(samples("", hang, *[""] * 10))
        assert time.monotonic() - start >= 3.0
        assert results.scores["by_response"] == [1.0, NONE, *[1.0] * 10]
        ((term, number, kind, text),) = results.failures
        assert (term, number, kind, text) == ("by_response", 1, "timeout", "no result within 3 s")
        assert runner.run(samples("")).scores["by_response"] == [1.0]


def test_calls_have_less_time_and_then_none_where_others_of_the_batch_ran_out_of_it():
    patience, texts = Patience(time_limit=20.0, batch_limit=50.0), []
    while not patience.used_up:
        texts.append(patience.overdue(patience.limit).text)
    assert texts == ["no result within 20 s"] * 3 + ["no result within 2 s"] * 20
    assert patience.given_up().kind == "timeout"
    assert patience.given_up().text == "not called: others of its batch have run out of time for 100 s"
    short, shorter = Patience(time_limit=4.0, batch_limit=1.0), Patience(time_limit=0.5, batch_limit=1.0)
    for each in (short, shorter):
        each.overdue(1.0)
    assert (short.limit, shorter.limit) == (1.0, 0.5)
    shared = {"role": "reward", "concurrency": 1, "start_limit": 60.0}
    for batch_limit, time_limit, expected in ((3.0, 4.0, 6.0), (None, 4.0, 120.0), (None, 20.0, 240.0)):
        runner = FunctionRunner([], time_limit=time_limit, batch_limit=batch_limit, workers=2, **shared)
        assert runner.patience() == Patience(time_limit, expected)  # of both processes together


@pytest.mark.slow
@pytest.mark.parametrize("fn", [functions.by_response, functions.batch_lengths])
def test_a_batch_of_hanging_calls_is_given_up(fn):
    """Not the samples of the next one."""
    with RewardRunner(fn, time_limit=2.0, batch_limit=1.5) as runner:
        texts = [failure.text for failure in runner.run(samples(*["sleep"] * 8)).failures]
        # of a function of the batch no call was on one sample
        lost = ["no result within 2 s", "no result within 1 s"] if fn is functions.by_response else []
        given_up = "not called: others of its batch have run out of time for 3 s"
        assert texts == [*lost, *[given_up] * (8 - len(lost))]
        again = runner.run(samples("a", "b"))
        assert again.failures == ()


def test_coroutines_of_a_batch_are_given_up_too():
    with RewardRunner(functions.coroutine, time_limit=2.0, batch_limit=2.0, concurrency=1) as runner:
        results = runner.run(samples(*["wait"] * 5))
    assert [failure.text for failure in results.failures] == [
        "no result within 2 s",
        "no result within 1 s",
        "no result within 1 s",
        *["not called: others of its batch have run out of time for 4 s"] * 2,
    ]


@pytest.mark.slow
def test_a_worker_that_dies_is_started_again():
    results = run(functions.by_response, samples("", "die", "", "die", *[""] * 20), workers=2)
    assert results.scores["by_response"] == [1.0, NONE, 1.0, NONE, *[1.0] * 20]
    assert [(f.number, f.kind, f.text) for f in results.failures] == [
        (number, "error", "its process ended with code 7") for number in (1, 3)
    ]


def test_a_worker_killed_while_idle_is_no_samples_fault():
    with RewardRunner(functions.process) as runner:
        pid = int(runner.run(samples("")).named["pid"][0])
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        again = runner.run(samples("", ""))
        assert again.failures == ()
        assert int(again.named["pid"][0]) != pid


def test_what_a_reward_starts_dies_with_it(tmp_path):
    file = tmp_path / "pids"
    results = run(functions.spawns, [sample(file=str(file))], time_limit=4.0)
    assert results.failures[0].kind == "timeout"
    assert all(gone(int(pid)) for pid in file.read_text().split())


def test_a_machine_that_stood_still_costs_no_sample(tmp_path, monkeypatch):
    """Both processes were stopped, and the trainer goes on first."""
    item, stopped = sample(directory=str(tmp_path)), [0.0]
    with RewardRunner(functions.numbered, time_limit=60.0) as runner, ThreadPoolExecutor(1) as thread:
        results = thread.submit(runner.run, [item])
        while not (tmp_path / "calls").exists():
            time.sleep(0.01)
        monotonic = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + stopped[0])
        stopped[0] = 1000.0
        time.sleep(1.5)  # it looks a few times
        (tmp_path / "go").touch()
        assert results.result().failures == ()


def test_a_machine_that_stood_still_costs_no_coroutine(monkeypatch):
    real, stopped = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + stopped[0])

    @inline_reward
    async def waits(item) -> float:
        stopped[0] += 1000.0
        await asyncio.sleep(0.01)
        return 3.0

    assert run(waits, samples("a", "b")).scores == {"waits": [3.0, 3.0]}


def test_a_coroutine_that_is_late_ends_as_it_likes_and_is_late():
    ended = []

    @inline_reward
    async def stubborn(item) -> float:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            ended.append(item.response)
            if item.response == "raise":
                raise OSError("broken") from None
        return 3.0

    results = run(stubborn, samples("stay", "raise"), time_limit=2.0)
    assert [(f.kind, f.text) for f in results.failures] == [("timeout", "no result within 2 s")] * 2
    assert sorted(ended) == ["raise", "stay"]


@pytest.mark.slow
def test_functions_of_the_batch_see_all_and_isolate_by_halves():
    words = ["a", "bb", "ccc", "dddd"]
    results = run(functions.batch_lengths, samples(*words))
    assert results.scores["batch_lengths"] == [401.0, 402.0, 403.0, 404.0]
    results = run(functions.batch_lengths, samples("a", "bb", "raise", "dddd"))
    assert results.scores["batch_lengths"] == [201.0, 202.0, NONE, 104.0]
    assert [(f.number, f.kind) for f in results.failures] == [(2, "error")]
    results = run(functions.batch_lengths, samples("a", "loop", "ccc", "dddd"), time_limit=2.5)
    assert results.scores["batch_lengths"] == [101.0, NONE, 203.0, 204.0]
    assert [(f.number, f.kind) for f in results.failures] == [(1, "timeout")]


@pytest.mark.slow
def test_coroutines_run_together_and_are_bounded():
    with RewardRunner(functions.coroutine, time_limit=4.0) as runner:
        runner.run(samples(""))
        start = time.monotonic()
        results = runner.run(samples(*["x"] * 20, "raise", "wait"))
        assert time.monotonic() - start < 20  # one after the other they take more
        assert results.scores["coroutine"] == [1.0] * 20 + [NONE, NONE]
        assert results.named["length"] == [1.0] * 20 + [NONE, NONE]
        assert [(f.number, f.kind) for f in results.failures] == [(20, "error"), (21, "timeout")]


@pytest.mark.slow
def test_a_coroutine_that_blocks_its_loop_is_found():
    results = run(functions.coroutine, samples("x", "loop", "x"), time_limit=2.5)
    assert results.scores["coroutine"] == [1.0, NONE, 1.0]
    assert [(f.number, f.kind) for f in results.failures] == [(1, "timeout")]


def test_async_functions_of_the_batch():
    assert run(functions.async_batch, samples("a", "bb")).scores == {"async_batch": [1.0, 2.0]}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_inline_functions_run_where_an_event_loop_runs_too(asynchronous):
    """As in the cells of a notebook."""

    @inline_reward
    def plain(sample):
        return float(len(sample.response))

    @inline_reward
    async def awaited(sample):
        await asyncio.sleep(0)
        return float(len(sample.response))

    async def cell():
        return run(awaited if asynchronous else plain, samples("", "abc"))

    assert list(asyncio.run(cell()).scores.values()) == [[0.0, 3.0]]


def test_inline_functions_run_here():
    results = run(functions.inline, samples("", "raise"))
    assert results.scores["inline"] == [1.0 + os.getpid(), NONE]
    assert results.failures[0].kind == "error"


def test_sums_keep_their_parts_apart():
    results = run(weighted_sum({"outer": functions.summed, "process": functions.process}), samples("aa", "raise"))
    assert results.scores == {"outer/length": [2.0, 5.0], "outer/one": [1.0, NONE], "process": [1.0, 1.0]}
    assert set(results.named) == {"process/pid", "process/torch"}
    assert [(f.term, f.number) for f in results.failures] == [("outer/one", 1)]


@inline_reward
def given(item):
    return item.ground_truth


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "None"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (1e39, r"1e\+39"),  # more than float32 holds
        ("1.0", "'1.0'"),
        ([1.0], "1 numbers for 0 response tokens"),
        ({"accuracy": 1.0}, "'accuracy'"),
        ({"score": None}, "'score': None"),
        ({"score": 1.0, "other": "text"}, "'other': 'text'"),
        ({"score": 1.0, "answer": 3}, "'answer': 3"),
    ],
)
def test_results_that_are_no_scores_are_errors(result, text):
    with pytest.raises(ValueError, match=rf"'given' returned .*{text}.*; it must .*\(1 of 2 .*of sample 1 "):
        run(given, [sample("x", 1.0), sample("x", result)])


@pytest.mark.slow
def test_bad_results_of_workers_and_batches():
    with pytest.raises(ValueError, match="'bad_result' returned None; it must return a finite number"):
        run(functions.bad_result, [sample("", None)])
    with pytest.raises(ValueError, match="'too_few' returned 1 results for 2 samples; a function of a batch must"):
        run(functions.too_few, samples("", ""))
    with pytest.raises(ValueError, match=r"the names \['a'\] for sample 0, but \['b'\] for sample 1"):
        run(functions.uneven_names, samples("a", "b"))


def test_good_results_of_all_types():
    import numpy
    import torch

    good = [True, 2, numpy.float32(0.5), torch.tensor(3.0), numpy.int64(4)]
    results = run(given, [sample("", value) for value in good])
    assert results.scores["given"] == [1.0, 2.0, 0.5, 3.0, 4.0]


def test_closures_are_sent_by_value():
    bonus = 5.0

    def local(item) -> float:
        return bonus + len(item.response)

    assert run(local, samples("ab")).scores == {"local": [7.0]}
    generator = (i for i in ())

    def stuck(item) -> float:
        return float(bool(generator))

    with pytest.raises(ValueError, match="'stuck' cannot be sent to a worker process"):
        RewardRunner(stuck)


def test_a_reward_that_does_not_load_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "fragile.py").write_text(
        "import os, sys\nif 'pytest' not in sys.modules:\n    raise ImportError('only under test')\n"
        "def f(sample):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import fragile  # type: ignore[import-not-found]

    with pytest.raises(
        ValueError, match="the reward f does not load in a worker process: ImportError: only under test"
    ):
        run(fragile.f, samples(""))


def test_a_runner_has_the_limits_that_it_is_given():
    limits = {"time_limit": 2.0, "batch_limit": 3.0, "workers": 4, "concurrency": 5, "start_limit": 6.0}
    both = weighted_sum({"here": functions.inline, "there": functions.length}, {"there": 2.0})
    runner = RewardRunner(both, **limits)
    assert [(term.name, term.weight) for term in runner.terms] == [("here", 1.0), ("there", 2.0)]
    assert runner.patience() == Patience(2.0, 3.0 * 4)
    assert RewardRunner(functions.length).patience() == Patience(10.0, 60.0)


def test_limits_are_checked():
    for limits in ({"time_limit": 0}, {"workers": 0}, {"time_limit": float("nan")}, {"batch_limit": 0}):
        with pytest.raises(ValueError, match="above 0"):
            RewardRunner(functions.length, **limits)


SCRIPT = """
import os, signal, sys
from fppo.rewards import RewardRunner
from fppo.workers.sample import Sample

LIMIT = 3
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it leaves in the background without

def mine(sample):
    if sample.response == "loop":
        print(os.getpid(), flush=True, file=sys.stderr)
        while True: pass
    return len(sample.response) + LIMIT

runner = RewardRunner(mine, time_limit=60)
one = Sample("", "ab", None, "", {}, (), (), "stop")
print(runner.run([one]).scores["mine"], flush=True)
runner.run([one._replace(response="loop")])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_script_without_a_guard_leaves_nothing_behind(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "[5.0]\n"
    worker = int(process.stderr.readline())
    assert alive(worker)
    process.send_signal(how)
    process.wait(timeout=60)
    assert gone(worker)
    errors = process.stderr.read()
    assert ("KeyboardInterrupt" in errors) == (how == signal.SIGINT)
    process.stdout.close()
    process.stderr.close()


@pytest.mark.slow
def test_workers_outlive_the_thread_that_needed_them():
    """A rollout ahead is scored on a thread that ends, maybe before a process that it started anew is ready."""
    with RewardRunner(functions.naps, time_limit=3.0, workers=2) as runner:
        runner.run(samples(*["0.4"] * 4))  # both are ready
        batches = []
        first = ["60", "0", "2.0", "2.0", *["0"] * 12]  # tasks of two: the second ends just after the first is given up
        thread = threading.Thread(target=lambda: batches.append(runner.run(samples(*first))))
        thread.start()
        thread.join()
        time.sleep(0.1)
        batches.append(runner.run(samples(*["0.3"] * 4)))
    late, after = (results.scores["naps"] for results in batches)
    assert late == pytest.approx([math.nan, *map(float, first[1:])], nan_ok=True)
    assert after == [0.3] * 4
    assert [[f.kind for f in results.failures] for results in batches] == [["timeout"], []]


def hard(sample):
    return float(sample.extras["difficulty"])


@batch_reward
def all_hard(samples):
    return [hard(sample) for sample in samples]


async def hard_later(sample):
    return hard(sample)


@pytest.mark.parametrize("fn", [hard, all_hard, hard_later])
def test_a_column_that_a_reward_misses_is_named_with_those_there_are(fn):
    with RewardRunner(inline_reward(fn)) as runner:
        results = runner.run([sample("a", difficulty=2), sample("b", level=3, **{"x" * 10**5: 1})])
    (failure,) = results.failures
    assert failure.number == 1
    assert re.search(r"KeyError: 'difficulty' at .*; the row has the columns \['level', 'xxx", failure.text)
    assert len(failure.text) < 3000


ENDS = [("interrupt", "KeyboardInterrupt: "), ("base", "OwnEnd: mine")]


@pytest.mark.parametrize("what", ENDS)
@pytest.mark.parametrize("name", ["by_response", "as_coroutine", "batch_lengths", "inline", "inline_coroutine"])
def test_what_a_function_raises_is_its_own_even_if_it_looks_like_ctrl_c(capfd, name, what):
    """Beside a command's handler of ctrl-C, which is not Python's."""
    response, text = what
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with RewardRunner(getattr(functions, name), workers=1) as runner:
            results = runner.run(samples("", response, ""))
            again = runner.run(samples(""))
    finally:
        signal.signal(signal.SIGINT, before)
    ((number, kind, said),) = [(x.number, x.kind, x.text) for x in results.failures]
    assert (number, kind) == (1, "error")
    assert said.startswith(text)
    assert again.failures == ()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_response", "as_coroutine"])
def test_a_function_that_closes_descriptors_is_told_without_a_traceback(capfd, name):
    with RewardRunner(getattr(functions, name), workers=1) as runner:
        results = runner.run(samples("", "close", ""))
        again = runner.run(samples(""))
    assert [(x.number, x.text) for x in results.failures] == [
        (1, "its process closed a descriptor that is not its own")
    ]
    assert again.failures == ()
    assert capfd.readouterr().err.count("Traceback") == 0


def test_ctrl_c_ends_a_function_of_this_process():
    """That of Python's own handler, and of a command's."""

    def pressing(sample):
        signal.raise_signal(signal.SIGINT)
        return 1.0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for handler in (signal.default_int_handler, start._interrupt):
            signal.signal(signal.SIGINT, handler)
            with RewardRunner(inline_reward(pressing)) as runner, pytest.raises(KeyboardInterrupt):
                runner.run(samples(""))
    finally:
        signal.signal(signal.SIGINT, before)
