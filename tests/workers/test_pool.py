"""The pool over processes that do as their samples say, in the time of a clock of their own: outcomes, and when."""

from __future__ import annotations

import contextlib
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.workers.calls import Mode, Patience
from fppo.workers.channel import ForeignBytes
from fppo.workers.pool import System, WorkerPool
from fppo.workers.sample import Outcome, Sample
from tests.workers.slow_functions import later, number

LIMIT, LOAD, START = 2.0, 0.5, 5.0
LATE = Outcome("timeout", text=f"no result within {LIMIT:g} s")


def sample_of(name, what, seconds):
    return Sample(str(name), what, None, "", {"seconds": seconds}, (), (), "stop")


class World:
    """Processes of a script, at most `most` at a time, and their time."""

    def __init__(self, most, *, loads="ready", wait=None):
        self.time, self.most, self.loads, self.made = 0.0, most, loads, []
        system = System(lambda: (Scripted(self),) * 2, wait or self.wait, lambda process: process.end(-9), self.now)
        self.pool = WorkerPool([("own", number), ("other", later)], workers=most, start_limit=START, system=system)

    def now(self):
        return self.time

    def wait(self, channels, limit):
        assert 0.0 <= limit <= 0.05
        due = min((at for channel in channels for at, _ in channel.events), default=math.inf)
        self.time = max(self.time, min(due, self.time + limit))
        return [channel for channel in channels if any(at <= self.time for at, _ in channel.events)]

    @property
    def alive(self):
        return [each for each in self.made if each.code is None]


@contextlib.contextmanager
def world_of(most, **how):
    world = World(most, **how)
    try:
        yield world
    finally:
        world.pool.close()
    assert not world.alive


class Scripted:
    """A process, and the channel to it."""

    unsent = False

    def __init__(self, world):
        self.world, self.events, self.until, self.code = world, [], 0.0, None
        self.functions, self.ready_at, self.stuck, self.tasks = None, math.inf, False, []
        world.made.append(self)
        assert len(world.alive) <= world.most
        assert len(world.made) < 200, "processes are started again and again"

    def end(self, code):
        self.code = code if self.code is None else self.code

    def kill(self):
        self.end(-9)

    def wait(self, timeout):
        assert timeout > 0
        assert self.code is not None

    def poll(self):
        return self.code

    def flush(self):
        pass

    def close(self):
        if not self.stuck:  # else it notices nothing
            self.end(0)

    def send(self, data):
        if self.code is not None:
            raise BrokenPipeError
        message = pickle.loads(data)
        if self.functions is None:
            self.functions, at = [pickle.loads(each) for each in message], self.world.time + LOAD
            said = {
                "ready": ("ready",),
                "failed": ("failed", "a reason"),
                "dies": EOFError,
                "writes": ForeignBytes("x"),
            }
            self.events += [(at, said[self.world.loads])] if self.world.loads in said else []
            self.ready_at = at
            return
        assert self.world.time >= self.ready_at
        place, mode, samples = message
        self.tasks.append((self.functions[place], Mode(*mode), [int(Sample(*each).prompt) for _, each in samples]))
        self.work(Mode(*mode), [(each, Sample(*sample)) for each, sample in samples])

    def work(self, mode, samples):
        """Put what it will say about these samples, at its time, behind what it has yet to say."""
        now = self.world.time
        self.until = max(self.until, now)
        if mode.kind == "batch":
            self.events.append((now, ("tick",)))
            wrong = next((each for each in samples if each[1].response != "value"), None)
            at = now + sum(sample.extras["seconds"] for _, sample in samples)
            if wrong is not None:
                self.say(at, *wrong)
            elif not self.stuck:
                for each, sample in samples:
                    self.say(at, each, sample)
            return
        for each, sample in samples:
            if self.stuck:
                return
            if mode.asynchronous and sample.response == "hangs":  # and with it all that have not ended
                self.events, self.stuck = [event for event in self.events if event[0] <= now], True
            elif mode.asynchronous and sample.extras["seconds"] > mode.time_limit:
                self.events.append((now + mode.time_limit, (each, tuple(LATE))))
            elif mode.asynchronous:
                self.say(now + sample.extras["seconds"], each, sample)
            else:
                self.until += sample.extras["seconds"]
                self.say(self.until, each, sample)

    def say(self, at, each, sample):
        said = {"value": (each, tuple(Outcome("value", float(sample.prompt)))), "dies": EOFError}
        said["writes"] = ForeignBytes("something")
        if sample.response == "hangs":
            self.stuck = True
            return
        self.events += [(at, said[sample.response.removesuffix(" twice")])] * (1 + sample.response.endswith(" twice"))

    def receive(self):
        due = sorted((each for each in self.events if each[0] <= self.world.time), key=lambda each: each[0])
        messages = []
        for event in due:
            if not isinstance(event[1], tuple) and messages:
                break
            if event[1] is EOFError:
                self.end(3)
                raise EOFError
            self.events.remove(event)
            if isinstance(event[1], ForeignBytes):
                raise event[1]
            messages.append(pickle.dumps(event[1]))
        return messages


def mode_of(kind):
    return Mode("batch" if kind == "batch" else "sample", kind == "coroutines", LIMIT, 1e6, 64)


def expected(name, what, seconds):
    """The outcome of a sample that is called alone."""
    if what == "hangs" or seconds > LIMIT:
        return LATE
    if what == "dies":
        return Outcome("error", text="its process ended with code 3")
    if what == "writes":
        return Outcome("error", text="it wrote to a descriptor that is not its own: the pool got something")
    return Outcome("value", float(name))


WHAT = st.sampled_from(["value"] * 5 + ["hangs", "dies", "writes"])
SCRIPT = st.lists(st.tuples(WHAT, st.sampled_from([0.0, 0.25, 1.0, 3.0])), max_size=12)
KIND = st.sampled_from(["one by one", "coroutines", "batch"])


@settings(max_examples=60)
@given(st.lists(st.tuples(KIND, SCRIPT), min_size=1, max_size=2), st.integers(1, 3), st.integers(0, 12))
def test_every_sample_comes_to_what_it_comes_to_alone(scripts, workers, first):
    """Whoever is beside it, in its process or in another, and whenever it came; of two runs each has its own."""
    scripts = [(kind, [each for each in script if kind != "batch" or each[1] <= 1]) for kind, script in scripts]
    with world_of(workers) as world:
        runs = []
        for place, (kind, script) in enumerate(scripts):
            run = world.pool.begin(place, mode_of(kind), Patience(LIMIT, 1e6))
            names = [1000 * place + i for i in range(len(script))]
            samples = {each: sample_of(name, *how) for each, (name, how) in enumerate(zip(names, script, strict=True))}
            wanted = {each: expected(name, *how) for each, (name, how) in enumerate(zip(names, script, strict=True))}
            runs.append((run, samples, wanted, {}))
            for each in [*samples][:first]:
                run.put(each, samples[each])
        for run, _, wanted, found in runs:
            found |= world.pool.taken(run, wait=bool(wanted) and first > 0)
        for run, samples, _, _ in runs:
            for each in [*samples][first:]:
                run.put(each, samples[each])
        while any(len(found) < len(wanted) for *_, wanted, found in runs):
            for run, _, wanted, found in runs:
                new = world.pool.taken(run, wait=len(found) < len(wanted))
                assert not new.keys() & found.keys()
                assert new or len(found) == len(wanted)
                found |= new
        for run, _, wanted, found in runs:
            assert found == wanted
            assert (run.samples, run.new, [*run.pending], run.outcomes) == ({}, [], [], {})
        for process in world.made:
            assert process.functions == [number, later]
            for fn, mode, names in process.tasks:
                (place,) = {name // 1000 for name in names}
                assert (fn, mode) == ((number, later)[place], mode_of(scripts[place][0]))


@settings(max_examples=40)
@given(SCRIPT, st.sampled_from([1.0, 3.0, 1e6]))
def test_one_process_takes_the_time_that_its_samples_take(script, batch_limit):
    """A call that is late costs its limit, which shrinks with the patience of the batch, and a new process."""
    time, lost, wanted, process = 0.0, 0.0, {}, False
    for each, (what, seconds) in enumerate(script):
        if lost >= 2 * batch_limit:
            text = f"not called: others of its batch have run out of time for {lost:g} s"
            wanted[each] = Outcome("timeout", text=text)
            continue
        time, process = time + (0.0 if process else LOAD), True
        limit = LIMIT if lost < batch_limit else 1.0
        if what == "hangs" or seconds > limit:
            wanted[each] = Outcome("timeout", text=f"no result within {limit:g} s")
            time, lost, process = time + limit, lost + limit, False
        else:
            wanted[each] = expected(each, what, seconds)
            time, process = time + seconds, what == "value"
    with world_of(1) as world:
        samples = [sample_of(each, *how) for each, how in enumerate(script)]
        found = world.pool.run(0, mode_of("one by one"), samples, Patience(LIMIT, batch_limit))
        assert found == [wanted[each] for each in range(len(script))]
        assert world.time == pytest.approx(time)


@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from(["one by one", "coroutines"]))
def test_all_processes_are_at_work(count, workers, kind):
    with world_of(workers) as world:
        samples = [sample_of(each, "value", 1.0) for each in range(count)]
        assert [x.score for x in world.pool.run(1, mode_of(kind), samples, Patience(LIMIT, 1.0))] == [*range(count)]
        piece = min(32, math.ceil(count / (4 * workers)))
        most = 1.0 if kind == "coroutines" else count / workers + piece
        assert world.time <= LOAD + most + 1e-9
        assert len(world.made) <= min(workers, count)
        sizes = [len(names) for process in world.made for *_, names in process.tasks]
        assert max(sizes) <= (math.ceil(count / workers) if kind == "coroutines" else piece)


def test_a_process_is_late_where_it_says_nothing_for_the_time_of_a_call():
    """Coroutines have a second more, in which they end by themselves."""
    for kind, seconds in (("one by one", LIMIT), ("coroutines", LIMIT + 1.0), ("batch", LIMIT)):
        with world_of(1) as world:
            run = world.pool.run(0, mode_of(kind), [sample_of(0, "hangs", 0.0)], Patience(LIMIT, 1e6))
            assert run == [LATE]
            assert world.time == pytest.approx(LOAD + seconds)


def test_company_gives_a_call_that_is_late_no_more_time():
    with world_of(1) as world:
        run = world.pool.begin(0, mode_of("coroutines"), Patience(LIMIT, 1e6))
        run.put(0, sample_of(0, "hangs", 0.0))
        while not world.made or not world.made[0].tasks:
            world.pool.taken(run, wait=False)
            world.time += LOAD
        begun, world.time = world.time - LOAD, world.time + 1.5
        run.put(1, sample_of(1, "value", 0.0))
        world.pool.taken(run, wait=False)
        assert len(world.made[0].tasks) == 2
        world.time = begun + LIMIT + 0.9
        world.pool.taken(run, wait=False)
        assert world.made[0].code is None
        world.time = begun + LIMIT + 1.0
        world.pool.taken(run, wait=False)
        assert world.made[0].code is not None


@pytest.mark.parametrize(
    ("loads", "at", "text"),
    [
        ("failed", LOAD, "the reward own, other does not load in a worker process: a reason"),
        ("dies", LOAD, "the process of the reward own, other ended with code 3 before it was ready"),
        ("writes", LOAD, "the reward own, other, as it was loaded: it wrote to a descriptor .* the pool got x"),
        ("hangs", START, "the reward own, other did not load within 5 s"),
    ],
)
def test_functions_that_do_not_load_are_said_and_leave_no_process(loads, at, text):
    with world_of(2, loads=loads) as world:
        world.pool.start()
        assert len(world.alive) == 2
        with pytest.raises(ValueError, match=text):
            world.pool.run(0, mode_of("one by one"), [sample_of(0, "value", 0.0)], Patience(LIMIT, 1.0))
        assert world.time == pytest.approx(at)
        assert not world.alive


def test_what_is_closed_meanwhile_fails_and_a_later_run_starts_anew():
    with world_of(2) as world:
        run = world.pool.begin(0, mode_of("one by one"), Patience(LIMIT, 1.0))
        for each in range(4):
            run.put(each, sample_of(each, "value", 1.0))
        assert world.pool.taken(run, wait=True)
        world.pool.close()
        assert not world.alive
        with pytest.raises(RuntimeError, match="of the reward own, other were closed while they were at work"):
            world.pool.taken(run, wait=False)
        samples = [sample_of(each, "value", 0.0) for each in range(3)]
        assert len(world.pool.run(0, mode_of("one by one"), samples, Patience(LIMIT, 1.0))) == 3
        assert len(world.alive) == 2


def test_a_run_that_is_forgotten_takes_its_processes_with_it_and_no_others():
    with world_of(2) as world:
        runs = [world.pool.begin(place, mode_of("one by one"), Patience(LIMIT, 1.0)) for place in (0, 1)]
        for run in runs:
            run.put(0, sample_of(0, "value", 1.0))
        while len(world.made) < 2 or not all(process.tasks for process in world.made):
            for run in runs:
                world.pool.taken(run, wait=False)
            world.time += LOAD / 2
        own, other = world.made
        world.pool.forget(runs[0])
        assert (own.code is None, other.code is None) == (False, True)
        assert world.pool.taken(runs[1], wait=True) == {0: Outcome("value", 0.0)}
        world.pool.forget(world.pool.begin(0, mode_of("one by one"), Patience(LIMIT, 1.0)))
        assert world.alive == [other]


def test_two_outcomes_of_one_sample_are_not_taken():
    """They would be another sample's: who writes them has got hold of the worker's descriptor."""
    with world_of(1) as world:
        samples = [sample_of(0, "value twice", 1.0), sample_of(1, "value", 1.0), sample_of(2, "value", 1.0)]
        first, second, _ = world.pool.run(0, mode_of("coroutines"), samples, Patience(LIMIT, 1e6))
        assert first == Outcome("value", 0.0)
        assert second == Outcome("value", 1.0)
        assert len(world.made) == 2


def test_a_process_that_ended_while_idle_is_no_samples_fault():
    with world_of(1) as world:
        for _ in range(2):
            samples = [sample_of(each, "value", 0.0) for each in range(3)]
            found = world.pool.run(0, mode_of("one by one"), samples, Patience(LIMIT, 1.0))
            assert [x.score for x in found] == [0.0, 1.0, 2.0]
            world.made[-1].end(9)
        assert len(world.made) == 2


def test_an_interruption_leaves_no_process_behind():
    def interrupted(channels, limit):
        raise KeyboardInterrupt

    with world_of(2, wait=interrupted) as world:
        with pytest.raises(KeyboardInterrupt):
            world.pool.run(0, mode_of("one by one"), [sample_of(0, "value", 0.0)] * 2, Patience(LIMIT, 1.0))
        assert len(world.made) == 2
        assert not world.alive
