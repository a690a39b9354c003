"""Calls of functions, in this process, against loops over single samples."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.workers.calls import Mode, Patience, call
from fppo.workers.pool import PoolRun
from fppo.workers.runner import FunctionRunner
from fppo.workers.sample import Outcome, Sample, is_asynchronous, outcome_of
from fppo.workers.streams import CallStream

FAULTS = st.lists(st.sampled_from(["", "", "", "raise", "exit", "own limit"]), max_size=9)


def sample_of(number, what=""):
    return Sample(str(number), what, None, "", {}, (), (), "stop")


def one(item):
    if item.response == "raise":
        raise KeyError(item.prompt)
    if item.response == "exit":
        raise SystemExit(3)
    if item.response == "own limit":
        raise TimeoutError("slow")
    return float(item.prompt) / 2


async def later(item):
    await asyncio.sleep(0)
    return one(item)


def mode_of(kind, *, asynchronous=False, time_limit=60.0, batch_limit=60.0, concurrency=3):
    return Mode(kind, asynchronous, time_limit, batch_limit, concurrency)


def called(fn, samples, mode):
    """The outcomes, how often each came, and the number of calls of a batch."""
    outcomes, ticks = [], []
    with asyncio.Runner() as loop:
        call(
            fn, samples, mode, loop, lambda number, outcome: outcomes.append((number, outcome)), lambda: ticks.append(1)
        )
    assert sorted(number for number, _ in outcomes) == [*range(len(samples))]
    return [outcome for _, outcome in sorted(outcomes, key=lambda pair: pair[0])], len(ticks)


def check(faults, outcomes):
    for number, (what, outcome) in enumerate(zip(faults, outcomes, strict=True)):
        if what:
            assert (outcome.kind, outcome.score) == ("error", 0.0)
            said = {"raise": f"KeyError: '{number}'", "exit": "SystemExit: 3", "own limit": "TimeoutError: slow"}
            assert outcome.text.startswith(f"{said[what]} at ")
            assert f"{__file__}:" in outcome.text
        else:
            assert outcome == Outcome("value", number / 2)


@settings(max_examples=60)
@given(FAULTS, st.sampled_from(["plain", "awaitable", "coroutine"]))
def test_an_error_costs_its_own_sample_alone(faults, how):
    samples = [sample_of(number, what) for number, what in enumerate(faults)]
    fn = {"plain": one, "awaitable": lambda item: later(item), "coroutine": later}[how]
    outcomes, ticks = called(fn, samples, mode_of("sample", asynchronous=how == "coroutine"))
    check(faults, outcomes)
    assert ticks == 0


def halves(faults):
    """The calls that a batch takes until the samples at fault are alone."""
    if len(faults) == 1 or not any(faults):
        return 1
    half = len(faults) // 2
    return 1 + halves(faults[:half]) + halves(faults[half:])


@settings(max_examples=40)
@given(FAULTS.filter(bool), st.booleans())
def test_a_batch_is_halved_until_the_samples_at_fault_are_alone(faults, awaited):
    samples = [sample_of(number, what) for number, what in enumerate(faults)]

    async def wait(items):
        return [one(item) for item in items]

    fn = wait if awaited else lambda items: [one(item) for item in items]
    outcomes, ticks = called(fn, samples, mode_of("batch", asynchronous=awaited))
    check(faults, outcomes)
    assert ticks == halves(faults)


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([1.0], "1 results for 2 samples"),
        ([1.0] * 3, "3 results for 2 samples"),
        ({"a": 1, "b": 2}, "a dict for 2 samples"),
        ("ab", "a str for 2 samples"),
        (7, "a int for 2 samples"),
        (iter([1.0]), "a list_iterator for 2 samples"),
    ],
)
def test_a_batch_has_one_result_for_each_sample(results, text):
    outcomes, _ = called(lambda items: results, [sample_of(0), sample_of(1)], mode_of("batch"))
    assert {outcome.kind for outcome in outcomes} == {"bad"}
    assert all(outcome.text.startswith(text) for outcome in outcomes)
    made, _ = called(lambda items: iter([1.0, "no"]), [sample_of(0), sample_of(1)], mode_of("batch"))
    assert [outcome.kind for outcome in made] == ["value", "bad"]


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 4))
def test_so_many_coroutines_run_at_a_time(count, concurrency):
    running, most = [], []

    async def fn(item):
        running.append(item)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(item)
        return 1.0

    called(fn, [sample_of(i) for i in range(count)], mode_of("sample", asynchronous=True, concurrency=concurrency))
    assert max(most) == min(count, concurrency)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_coroutines_that_never_end_use_the_patience_of_their_batch_up(concurrency):
    tick = 2.0**-7

    async def never(item):
        await asyncio.Event().wait()

    mode = mode_of("sample", asynchronous=True, time_limit=tick, batch_limit=2 * tick, concurrency=concurrency)
    outcomes, _ = called(never, [sample_of(i) for i in range(12)], mode)
    texts = [outcome.text for outcome in outcomes]
    assert {outcome.kind for outcome in outcomes} == {"timeout"}
    assert texts[: 4 * concurrency] == [f"no result within {tick:g} s"] * (4 * concurrency)
    assert all(text.startswith("not called: others of its batch") for text in texts[4 * concurrency + 1 :])


@settings(max_examples=60)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 40), st.integers(1, 100))
def test_patience_is_used_up_by_what_is_late(late, time_limit, batch_limit):
    patience, lost = Patience(float(time_limit), float(batch_limit)), 0.0
    for each in late:
        limit = time_limit if lost < batch_limit else min(time_limit, max(time_limit / 10, 1.0))
        assert (patience.limit, patience.used_up) == (limit, lost >= 2 * batch_limit)
        if each:
            outcome = patience.overdue(patience.limit)
            lost += limit
            assert (outcome.kind, outcome.text) == ("timeout", f"no result within {limit:g} s")
            assert patience.given_up().text.endswith(f"out of time for {lost:g} s")


NUMBERS = st.sampled_from([0.5, 2, True, math.nan, math.inf, -3.5e38, 3.4e38, "1", None])
RESULTS = NUMBERS | st.dictionaries(
    st.sampled_from(["score", "a", "b" * 200, "c" * 201, 7, "answer"]), NUMBERS | st.sampled_from(["yes"]), max_size=4
)


def is_number(x):
    return isinstance(x, (int, float)) and abs(x) <= 3.4028234e38


@settings(max_examples=150)
@given(RESULTS)
def test_results_are_checked_by_their_definition(result):
    found = outcome_of(result)
    if not isinstance(result, dict):
        assert found == Outcome("value", float(result)) if is_number(result) else found.kind == "bad"
        return
    numbers = {name: x for name, x in result.items() if name != "answer"}
    fits = "score" in numbers and all(isinstance(name, str) and len(name) <= 200 for name in numbers)
    fits = fits and all(map(is_number, numbers.values()))
    fits = fits and (result.get("answer") is None or isinstance(result["answer"], str))
    if not fits:
        assert (found.kind, found.score, found.named) == ("bad", 0.0, {})
        return
    named = {name: float(x) for name, x in numbers.items() if name != "score"}
    assert found == Outcome("value", float(result["score"]), named, result.get("answer"))


class Raises:
    """A number that raises as it is read, or shown."""

    def __float__(self):
        raise OverflowError("too large")

    def __repr__(self):
        raise KeyError("nothing to show")


def test_results_that_raise_are_no_scores():
    for result in (Raises(), {"score": Raises()}):
        found = outcome_of(result)
        assert (found.kind, "it must return a finite number" in found.text) == ("bad", True)
    assert outcome_of(Raises()).text.startswith("a Raises whose repr raises KeyError; it must")


@pytest.mark.parametrize("length", [198, 199, 500])
def test_a_long_result_that_is_no_score_is_cut(length):
    text = repr("x" * length)
    assert outcome_of("x" * length).text.partition("; it must")[0] == (text if length < 199 else f"{text[:200]}...")


def test_so_many_numbers_may_come_with_a_score():
    assert outcome_of({"score": 1.0, **{f"{i}": 0.0 for i in range(99)}}).kind == "value"
    assert outcome_of({"score": 1.0, **{f"{i}": 0.0 for i in range(100)}}).kind == "bad"


def test_a_run_is_done_with_what_has_an_outcome_and_with_nothing_else():
    run = PoolRun(0, mode_of("sample"), Patience(1.0, 1.0), 0)
    for number in range(4):
        run.put(number, sample_of(number))
    run.suspects |= {0, 1, 2}
    run.end({1: Outcome("value", 1.0), 3: Outcome("value", 3.0)})
    assert (run.samples, run.suspects) == ({0: sample_of(0), 2: sample_of(2)}, {0, 2})
    run.end({0: Outcome("error", text="no")})
    assert (run.samples, run.suspects, run.new) == ({2: sample_of(2)}, {2}, [0, 1, 2, 3])
    assert run.outcomes == {1: Outcome("value", 1.0), 3: Outcome("value", 3.0), 0: Outcome("error", text="no")}


class Scripted:
    """A source whose calls fail so often each before they succeed."""

    def __init__(self, fails, batches):
        self.fails, self.batches, self.put_ones, self.waited = dict(fails), batches, [], []

    def put(self, number, sample):
        self.put_ones.append((number, sample))
        self.open.append(number)

    open: list[int]

    def taken(self, *, wait):
        self.waited.append(wait)
        found = {}
        for _ in range(self.batches if self.batches else 1):
            if self.open:
                number = self.open.pop(0)
                left = self.fails.get(number, 0)
                self.fails[number] = left - 1
                kind = ("error", "timeout")[left % 2] if left > 0 else "value"
                found[number] = Outcome(kind, float(number), text=f"{number} {left}" if left > 0 else "")
        return found


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 2), st.integers(1, 3))
def test_what_fails_is_called_again_up_to_so_often(fails, retries, batches):
    source = Scripted(enumerate(fails), batches)
    source.open = []
    calls = CallStream(source, retries)
    for number in range(len(fails)):
        calls.put(number, sample_of(number))
    found = []
    while len(found) < len(fails):
        new = calls.taken(wait=True)
        assert new  # with `wait` at least one
        found += new
    assert calls.taken(wait=True) == []
    assert {number: outcome.kind == "value" for number, outcome in found} == {
        number: count <= retries for number, count in enumerate(fails)
    }
    for number, count in enumerate(fails):
        mine = [sample for other, sample in source.put_ones if other == number]
        assert mine == [sample_of(number)] * (1 + min(count, retries))
    assert calls.count == len(fails)
    assert calls.failed == sum(count > retries for count in fails)
    failed = [f"{number} {count - retries}" for number, count in enumerate(fails) if count > retries]
    assert calls.why in failed or (not failed and calls.why == "")
    assert source.waited[-1] is False


@attrs.frozen
class _Named:
    name: str
    fn: object
    asynchronous: bool
    inline: bool = True
    kind: str = "sample"


def test_the_patience_of_a_batch_is_that_of_all_workers():
    functions = [_Named("here", one, False), _Named("first", one, False, False)]
    given = {"role": "tool", "retries": 7, "workers": 4, "concurrency": 5, "start_limit": 6.0}
    assert FunctionRunner(functions, time_limit=2.0, batch_limit=3.0, **given).patience() == Patience(2.0, 3.0 * 4)
    for seconds, most in ((2.0, 60.0), (20.0, 120.0)):  # a minute, or six calls
        assert FunctionRunner(functions, time_limit=seconds, **given).patience() == Patience(seconds, most * 4)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 2), st.sampled_from(["at once", "stream"]))
def test_a_runner_calls_again_and_logs_what_failed_in_the_end(fails, retries, how):
    calls = []

    def fn(item):
        calls.append(item.prompt)
        if calls.count(item.prompt) <= fails[int(item.prompt)]:
            raise KeyError(item.prompt)
        return float(item.prompt)

    lines = []
    log = SimpleNamespace(warning=lambda text, *args: lines.append(text % args))
    function, limits = _Named("own", fn, False), {"time_limit": 9.0, "workers": 1, "concurrency": 1, "start_limit": 9.0}
    samples = [sample_of(number) for number in range(len(fails))]
    with FunctionRunner([function], role="tool", retries=retries, **limits) as runner:
        if how == "at once":
            outcomes = runner.logged_outcomes(function, samples, "turns", log)  # pyright: ignore
        else:
            with runner.stream(function, "turns", log) as stream:  # pyright: ignore
                for number, each in enumerate(samples):
                    stream.put(number, each)
                taken = {}
                while len(taken) < len(samples):
                    taken |= dict(stream.taken(wait=True))
            outcomes = [taken[number] for number in range(len(samples))]
    assert [outcome.kind for outcome in outcomes] == ["error" if count > retries else "value" for count in fails]
    assert [calls.count(f"{number}") for number in range(len(fails))] == [1 + min(count, retries) for count in fails]
    failed = [number for number, count in enumerate(fails) if count > retries]
    assert len(lines) == bool(failed)
    if failed:
        head = f"the tool 'own' failed on {len(failed)} of {len(fails)} turns"
        assert lines[0].startswith(head)
        assert f"KeyError: '{failed[0]}' at " in lines[0]


def test_calls_that_are_open_end_with_their_stream():
    ended = []

    async def fn(item):
        try:
            if item.prompt == "0":
                return 0.0
            await asyncio.Event().wait()
        finally:
            ended.append(item.prompt)

    limits = {"time_limit": 60.0, "workers": 1, "concurrency": 8, "start_limit": 9.0}
    function, log = _Named("own", fn, True), SimpleNamespace(warning=None)
    with FunctionRunner([function], role="tool", **limits) as runner, runner.stream(function, "turns", log) as stream:  # pyright: ignore
        for number in range(3):
            stream.put(number, sample_of(number))
        assert [number for number, _ in stream.taken(wait=True)] == [0]
        assert stream.taken(wait=False) == []
    assert sorted(ended) == ["0", "1", "2"]


def test_coroutine_functions_and_instances_are_told_from_others():
    class Plain:
        def __call__(self, item):
            return later(item)

    class Later:
        async def __call__(self, item):
            return 1.0

    assert [is_asynchronous(fn) for fn in (later, Later(), one, Plain())] == [True, True, False, False]
