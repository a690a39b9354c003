"""Rewards that begin before the rollout ends: the results are the plain ones, and hanging rows hold up no others."""

from __future__ import annotations

import random
import threading
import time

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import rewards
from fppo.batch import Column, Prompts
from fppo.data import collate, prompt_set
from fppo.key import Key
from fppo.rewards.distributed import SpreadRewardRunner
from fppo.rewards.early import EarlyRewardRunner
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.spread import SpreadEngine
from fppo.runtime.simulate import simulate
from fppo.workers.sample import Outcome
from fppo_kernels.table import Kernels
from tests import tiny
from tests.rewards import functions
from tests.rewards.samples import Letters, rollout
from tests.rewards.test_runner import gone

N = 2


def prompts_of(sampled) -> Prompts:
    """The prompts that a rollout of N responses to each answers."""
    start = sampled.tokens.shape[1] - sampled.response_mask.shape[1]
    columns = {name: Column(getattr(sampled, name)[::N]) for name in ("ids", "ground_truth", "source", "extras")}
    return Prompts(
        tokens=sampled.tokens[::N, :start],
        attention_mask=sampled.attention_mask[::N, :start],
        row_ids=sampled.row_ids[::N] // N,
        **columns,
    )


def words(prompts: list[str], responses: list[str]):
    """N responses to each prompt, with columns as engines repeat them: the same objects for all."""
    sampled = rollout(
        [p for p in prompts for _ in range(N)], responses, [f"t{p}" for p in prompts for _ in range(N)], n=N
    )
    asked = prompts_of(sampled)
    columns = {name: Column(x for x in getattr(asked, name) for _ in range(N)) for name in ("ground_truth", "extras")}
    return attrs.evolve(sampled, **columns), asked


def report(listener, sampled, rows) -> None:
    """What an engine does when these rows end, in this order."""
    width = sampled.response_mask.shape[1]
    for row in rows:
        listener(row, sampled.tokens[row, -width:][sampled.attention_mask[row, -width:]].tolist(), sampled.finish[row])


def both(runner, sampled, asked, rows):
    """The plain results, and those of a runner for which these rows finished early, in this order."""
    samples = rewards.samples_of(sampled, Letters())
    with EarlyRewardRunner(runner, Letters()) as early:
        report(early.make_on_finished(asked, N), sampled, rows)
        return runner.run(samples), early.run(samples)


class Watched(rewards.RewardRunner):
    """Counts what is scored after the rollout."""

    late = 0

    def outcomes_of(self, term, samples, patience=None):
        if threading.current_thread().name != "early rewards":
            self.late += len(samples)
        return super().outcomes_of(term, samples, patience)


MANY = rewards.weighted_sum(
    {
        "length": functions.length,
        "odd": functions.by_response,
        "batch": functions.batch_lengths,
        "later": functions.quick,
        "here": rewards.exact_match,
    }
)


@rewards.inline_reward
async def awaited(sample) -> float:
    return float(len(sample.response))


@st.composite
def finished(draw):
    count = draw(st.integers(1, 4))
    prompts = draw(st.lists(st.sampled_from(["p", "q"]), min_size=count, max_size=count))
    responses = draw(st.lists(st.sampled_from(["", "a", "bb", "raise"]), min_size=N * count, max_size=N * count))
    order = draw(st.permutations(range(N * count)))
    return prompts, responses, order[: draw(st.integers(0, N * count))]


@pytest.mark.slow
def test_any_order_gives_the_plain_judgement():
    """Failures, names, answers and functions of the batch; rows that are alike, and some that were not reported."""
    with Watched(MANY, workers=2) as runner:

        @given(finished())
        def check(case):
            prompts, responses, rows = case
            sampled, asked = words(prompts, responses)
            runner.late = 0
            expected, actual = both(runner, sampled, asked, rows)
            assert actual == expected
            begun = 3  # functions of single samples that do not run in this process
            assert runner.late == 5 * len(responses) + 2 * len(responses) + begun * (len(responses) - len(rows))

        check()


class Telling(rewards.RewardRunner):
    """Scores by all that a sample holds, without processes."""

    def outcomes_of(self, term, samples, patience=None):
        self.known = getattr(self, "known", {})
        held = [(*sample[:4], *sample.extras.values(), *sample[5:]) for sample in samples]
        return [Outcome("value", float(self.known.setdefault(each, len(self.known)))) for each in held]


TRUTHS, EXTRAS = ("7", "8"), ({"mark": 1}, {"mark": 2})
OBJECTS = st.tuples(st.sampled_from(["p", "q"]), st.sampled_from(TRUTHS), st.sampled_from(EXTRAS))
SAID = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["stop", "length"]))


@settings(max_examples=60)
@given(st.lists(st.tuples(OBJECTS, SAID, SAID), min_size=1, max_size=3), st.data())
def test_rows_that_differ_in_anything_are_told_apart(prompts, data):
    """In their prompt, response or finish, or in the ground truth or the extras alone, which prompts may share."""
    asks, *said = zip(*prompts, strict=True)
    responses = [said[i][number] for number in range(len(prompts)) for i in range(N)]
    sampled, asked = words([prompt for prompt, _, _ in asks], [response for response, _ in responses])
    own = {"ground_truth": [truth for _, truth, _ in asks], "extras": [extra for _, _, extra in asks]}
    asked = attrs.evolve(asked, **{name: Column(column) for name, column in own.items()})
    columns = {name: Column(x for x in column for _ in range(N)) for name, column in own.items()}
    sampled = attrs.evolve(sampled, finish=Column(finish for _, finish in responses), **columns)
    rows = data.draw(st.permutations(range(len(responses))))[: data.draw(st.integers(0, len(responses)))]
    runner = Telling(functions.length)
    expected, actual = both(runner, sampled, asked, rows)
    assert actual == expected


@pytest.mark.slow
def test_timeouts_and_deaths_are_those_of_the_plain_judgement():
    sampled, asked = words(["p", "q"], ["sleep", "a", "die", "b"])
    with rewards.RewardRunner(functions.by_response, time_limit=4.0) as runner:
        expected, actual = both(runner, sampled, asked, [2, 0, 3])
    assert actual == expected
    assert [failure.kind for failure in actual.failures] == ["timeout", "error"]


@pytest.mark.slow
def test_parts_of_a_rollout_share_its_patience():
    """Rows that come one by one are one batch to the limit of the batch; another rollout is another batch."""
    sampled, asked = words(["p", "q"], ["sleep", "sleep", "sleep", "sleep"])
    with (
        rewards.RewardRunner(functions.by_response, time_limit=1.0, batch_limit=1.0) as runner,
        EarlyRewardRunner(runner, Letters()) as early,
    ):
        for _ in range(2):
            on_finished = early.make_on_finished(asked, N)
            for row in range(3):
                report(on_finished, sampled, [row])
                time.sleep(0.3)
            failures = early.run(rewards.samples_of(sampled, Letters())).failures
            assert [failure.text.partition(":")[0] for failure in failures] == [
                *["no result within 1 s"] * 2,
                *["not called"] * 2,
            ]


@pytest.mark.slow
def test_faults_are_raised_where_the_plain_judgement_raises_them():
    sampled, asked = words(["p"], ["a", "b"])
    for fn in (functions.bad_result, functions.uneven_names):
        with rewards.RewardRunner(fn) as runner:
            samples = rewards.samples_of(sampled, Letters())
            with pytest.raises(ValueError, match=r"the reward '\w+' returned") as expected:
                runner.run(samples)
            with EarlyRewardRunner(runner, Letters()) as early:
                report(early.make_on_finished(asked, N), sampled, [1, 0])
                with pytest.raises(ValueError, match="returned") as actual:
                    early.run(samples)
        assert str(actual.value) == str(expected.value)


def unloadable():
    """A function whose worker cannot load it."""

    class Refuses:
        def __reduce__(self):
            return (int, ("no number",))

        def __call__(self, sample):
            return 0.0

    return Refuses()


def test_a_function_that_does_not_load_is_an_error_of_the_judge():
    sampled, asked = words(["p"], ["a", "b"])
    with rewards.RewardRunner(unloadable()) as runner, EarlyRewardRunner(runner, Letters()) as early:
        report(early.make_on_finished(asked, N), sampled, [1, 0])
        with pytest.raises(ValueError, match="does not load in a worker process"):
            early.run(rewards.samples_of(sampled, Letters()))


def test_rewards_begin_while_others_are_generated(tmp_path):
    sampled, asked = words(["p"], ["a", "b"])
    extras = {"directory": str(tmp_path)}
    asked = attrs.evolve(asked, extras=Column([extras]))
    sampled = attrs.evolve(sampled, extras=Column([extras, extras]))
    with rewards.RewardRunner(functions.notes) as runner, EarlyRewardRunner(runner, Letters()) as early:
        listener = early.make_on_finished(asked, N)
        report(listener, sampled, [0])
        until = time.monotonic() + 60
        while not (tmp_path / "a").exists():  # the second row is still to come
            assert time.monotonic() < until
            time.sleep(0.01)
        report(listener, sampled, [1])
        assert early.run(rewards.samples_of(sampled, Letters())).scores == {"notes": [1.0, 1.0]}
        assert (tmp_path / "b").exists()


def in_time(early, samples):
    """The results; a failure where the runner would wait without end for rows that no rollout reports again."""
    found = []
    thread = threading.Thread(target=lambda: found.append(early.run(samples)), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the runner waits"
    return found[0]


def test_what_was_heard_before_or_elsewhere_does_not_count(tmp_path):
    """Two rollouts with one runner, one of them left unscored; and samples of rows that were not reported."""
    first, asked = words(["p"], ["a", "bb"])
    second, again = words(["q"], ["ccc", "a"])
    with rewards.RewardRunner(functions.length) as runner, EarlyRewardRunner(runner, Letters()) as early:
        report(early.make_on_finished(asked, N), first, [0, 1])
        report(early.make_on_finished(again, N), second, [1, 0])
        assert in_time(early, rewards.samples_of(second, Letters())).scores == {"length": [3.0, 1.0]}
        assert in_time(early, rewards.samples_of(second, Letters())).scores == {"length": [3.0, 1.0]}
        assert in_time(early, rewards.samples_of(first, Letters())).scores == {"length": [1.0, 2.0]}
        changed = attrs.evolve(first, extras=Column([{"more": 1}, {"more": 2}]))
        report(early.make_on_finished(asked, N), first, [0, 1])
        assert in_time(early, rewards.samples_of(changed, Letters())).scores == {"length": [1.0, 2.0]}


def test_a_rollout_that_was_given_up_does_not_answer_for_the_next(tmp_path):
    """Its row is still being scored when the next one, of the same prompts, begins."""
    sampled, asked = words(["p"], ["a", "b"])
    asked = attrs.evolve(asked, extras=Column([{"directory": str(tmp_path)}]))
    sampled = attrs.evolve(sampled, extras=Column(asked.extras[0] for _ in range(N)))
    samples = rewards.samples_of(sampled, Letters())[:1]
    with Watched(functions.numbered) as runner, EarlyRewardRunner(runner, Letters()) as early:
        old = early.make_on_finished(asked, N)
        report(old, sampled, [0])
        while not (tmp_path / "calls").exists():
            time.sleep(0.01)
        again = early.make_on_finished(asked, N)
        report(again, sampled, [0])
        report(old, sampled, [0])
        (tmp_path / "go").touch()
        assert in_time(early, samples).scores == {"numbered": [2.0]}
        assert runner.late == 0


class Counted(rewards.RewardRunner):
    """Scores by the number of the rollout, without processes, and notes its calls with their patience."""

    rollout, faulty = 0, False

    def outcomes_of(self, term, samples, patience=None):
        early = threading.current_thread().name == "early rewards"
        self.calls.append((term.name, early, len(samples), patience))
        if early and self.faulty:
            raise RuntimeError(f"fault of rollout {self.rollout}")
        return [Outcome("value", 100.0 * self.rollout + len(sample.response)) for sample in samples]


def settled(early):
    """Waits until every row that finished has its outcomes."""
    with early._changed:
        assert early._changed.wait_for(lambda: early._error is not None or not any(early._open.values()), 60)


ROLLOUTS = st.lists(
    st.tuples(
        st.permutations(range(4)), st.integers(0, 4), st.sampled_from(["scored", "scored", "given up", "faulty"])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40)
@given(ROLLOUTS, st.lists(st.sampled_from(["", "a", "bb"]), min_size=4, max_size=4), st.booleans())
def test_every_rollout_is_scored_by_its_own_calls_alone(rollouts, responses, alike):
    """For the same prompts, with rows that are alike: each row is scored once, those of a rollout with one patience for
    each function, and what an earlier rollout left is none of it, nor is its fault."""
    sampled, asked = words(["p", "p" if alike else "q"], responses)
    samples, known = rewards.samples_of(sampled, Letters()), []
    runner = Counted(MANY)
    with EarlyRewardRunner(runner, Letters()) as early:
        for runner.rollout, (order, count, end) in enumerate(rollouts):
            runner.calls, runner.faulty = [], end == "faulty" and count > 0
            report(early.make_on_finished(asked, N), sampled, order[:count])
            settled(early)
            if end == "given up":
                continue
            if runner.faulty:
                with pytest.raises(RuntimeError, match=f"fault of rollout {runner.rollout}$"):
                    early.run(samples)
                runner.calls, count = [], 0  # all are scored again
            expected = [100.0 * runner.rollout + len(response) for response in responses]
            assert in_time(early, samples).scores == dict.fromkeys(
                ("length", "odd", "batch", "later", "here"), expected
            )
            for name in ("length", "odd", "later"):
                own = [(begun, size, patience) for term, begun, size, patience in runner.calls if term == name]
                assert sum(size for begun, size, _ in own if begun) == count
                assert [size for begun, size, _ in own if not begun] == [4 - count]
                ((first, *others),) = [[patience for _, _, patience in own]]
                assert all(patience is first for patience in others)
                assert not any(first is patience for patience in known)
                assert (first is None) == (count == 0)  # a batch of their own
                known += [first] * (first is not None)
            assert [call for call in runner.calls if call[0] in ("batch", "here")] == [
                *(("batch", False, 4, None), ("here", False, 4, None))
            ]
            runner.calls = []
            assert early.run(samples).scores["odd"] == expected  # as an evaluation of the same samples
            assert [call[1:] for call in runner.calls] == [(False, 4, None)] * 5


class Watching(Letters):
    """Notes the threads that decode with it."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def decode(self, ids, **how):
        self.threads.add(threading.current_thread().name)
        return super().decode(ids, **how)


def test_what_is_scored_early_has_a_tokenizer_of_its_own():
    """One that is in use may not encode in another thread. Coroutines begin early too, for which a thread waits."""
    sampled, asked = words(["p"], ["a", "bb"])
    tokenizer, runner = Watching(), Counted(rewards.weighted_sum({"many": MANY, "awaited": awaited}))
    runner.calls = []
    with EarlyRewardRunner(runner, tokenizer) as early:
        report(early.make_on_finished(asked, N), sampled, [0, 1])
        settled(early)
    assert {name for name, begun, _, _ in runner.calls if begun} == {
        *("many/length", "many/odd", "many/later", "awaited")
    }
    assert tokenizer.threads == set()


def test_threads_judge_at_the_same_time():
    """As an evaluation and a rollout ahead do."""
    sampled, asked = words(["p", "q"], ["a", "bb", "ccc", "dddd"])
    other, _ = words(["p"], ["eeeee", "a"])
    actual = []
    with rewards.RewardRunner(functions.length) as runner, EarlyRewardRunner(runner, Letters()) as early:

        def evaluate():
            for _ in range(10):
                actual.append(early.run(rewards.samples_of(other, Letters())).scores["length"])

        thread = threading.Thread(target=evaluate)
        thread.start()
        for _ in range(10):
            report(early.make_on_finished(asked, N), sampled, [3, 1, 0, 2])
            assert early.run(rewards.samples_of(sampled, Letters())).scores["length"] == [1.0, 2.0, 3.0, 4.0]
        thread.join()
    assert actual == [[5.0, 1.0]] * 10


def test_nothing_is_listened_for_where_nothing_can_begin():
    _, asked = words(["p"], ["a", "b"])
    with rewards.RewardRunner(rewards.exact_match) as runner, EarlyRewardRunner(runner, Letters()) as early:
        assert early.make_on_finished(asked, N) is None
        assert early.terms == runner.terms
    with rewards.RewardRunner(functions.length) as runner:
        early = EarlyRewardRunner(runner, Letters())
        early.close()
        assert early.make_on_finished(asked, N) is None


def test_a_rollout_that_fails_leaves_nothing_behind(tmp_path):
    """The engine raises while a reward hangs: the command does not wait for it, and its processes end."""
    sampled, asked = words(["p"], ["a", "sleep"])
    file = tmp_path / "pids"
    asked = attrs.evolve(asked, extras=Column([{"file": str(file)}]))
    before = set(threading.enumerate())
    start = time.monotonic()

    def fails():
        with (
            rewards.RewardRunner(functions.spawns, time_limit=120) as runner,
            EarlyRewardRunner(runner, Letters()) as early,
        ):
            report(early.make_on_finished(asked, N), sampled, [1])
            while not file.exists() or len(file.read_text().split()) < 2:
                time.sleep(0.01)
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):
        fails()
    assert time.monotonic() - start < 50  # the reward takes more
    for pid in map(int, file.read_text().split()):
        assert gone(pid)
    while set(threading.enumerate()) - before and time.monotonic() < start + 120:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


# engines


def reported_by(engine, prompts, sampling, limits=None):
    """The rollout, and the rows that were reported."""
    _, params = tiny.model_and_params(dtype=torch.float32)
    reported: dict[int, tuple[list[int], str]] = {}

    def listener(row, response, finish):
        assert row not in reported
        reported[row] = (list(response), finish)

    sampled = engine.generate(params, Ask(prompts, sampling, Key(3), limits=limits, on_finished=listener))
    width = sampled.response_mask.shape[1]
    rows = {
        row: (sampled.tokens[row, -width:][sampled.response_mask[row]].tolist(), sampled.finish[row])
        for row in range(len(sampled.tokens))
    }
    return sampled, reported, rows


def some_prompts(count: int = 5) -> Prompts:
    draw = random.Random(1)
    ids = [[draw.randrange(2, tiny.VOCAB) for _ in range(draw.randint(1, 5))] for _ in range(count)]
    return collate(prompt_set(ids, pad_token_id=0), range(count))


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(), (1, 4, 9)])
@pytest.mark.parametrize("limits", [None, [1, 3, 6, 2, 9]])
def test_the_embedded_engine_tells_of_each_row_once(stops, limits):
    sampling = Sampling(n=N, max_tokens=6, stop_token_ids=stops)
    limits = None if limits is None else torch.tensor(limits)
    model, _ = tiny.model_and_params()
    for waves in (3, 100):
        engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0, max_rows=waves)
        sampled, reported, rows = reported_by(engine, some_prompts(), sampling, limits)
        assert reported == rows
        plain = engine.generate(
            tiny.model_and_params(dtype=torch.float32)[1], Ask(some_prompts(), sampling, Key(3), limits=limits)
        )
        assert torch.equal(plain.tokens, sampled.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5])
def test_each_rank_tells_of_what_it_made_and_is_asked_about_it(count):
    sampling = Sampling(n=N, max_tokens=6, stop_token_ids=(1, 4))
    model, params = tiny.model_and_params(dtype=torch.float32)
    engine = EmbeddedEngine(model=model, kernels=Kernels.named(), pad_token_id=0)
    prompts = some_prompts(count)

    def on_rank(mesh):
        spread = SpreadEngine(engine=engine, mesh=mesh, pad_token_id=0)
        _, reported, rows = reported_by(spread, prompts, sampling)
        assert reported.items() <= rows.items()
        with Watched(functions.length) as runner, EarlyRewardRunner(runner, Letters()) as early:
            sampled = spread.generate(
                params, Ask(prompts, sampling, Key(3), on_finished=early.make_on_finished(prompts, N))
            )
            on_ranks = SpreadRewardRunner(early, mesh, torch.device("cpu"))
            actual = on_ranks.run(rewards.samples_of(sampled, Letters()), sampled.groups.tolist())
            assert runner.late == 0
        return sorted(reported), actual

    ((rows, expected),) = simulate({"shard": 1}, on_rank)
    assert rows == list(range(N * count))
    for ranks in (2, 3):
        results = simulate({"shard": ranks}, on_rank)
        assert sorted(row for rows, _ in results for row in rows) == list(range(N * count))
        assert all(actual == expected for _, actual in results)
