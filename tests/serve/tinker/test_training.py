"""The runs of a server: when their states are saved, what a failed request costs, and what the next server finds."""

from __future__ import annotations

import resource
import shutil
import warnings
from contextlib import contextmanager

import pytest

from fppo.serve.refusal import Refusal
from fppo.serve.tinker.decode import (
    CreateVerb,
    LaterVerb,
    LoadVerb,
    PassVerb,
    RefusedVerb,
    SaveVerb,
    SnapshotVerb,
    StepVerb,
)
from fppo.serve.tinker.futures import FailedRequest, Futures, Payload
from fppo.serve.tinker.journal import JournalRecord, read
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import Adapters, StepParams
from fppo.serve.tinker.training import RunInfo, TrainingRuns
from fppo.serve.tinker.work import request_name
from tests.serve.tinker.served import base, equal
from tests.serve.tinker.test_client import ours
from tests.serve.tinker.test_futures import Clock

RUN = "0123456789ab:train:{}"


class Noting:
    """Stores that note what they get, and give runs back as they are."""

    def __init__(self):
        self.calls = []

    def save(self, run, info, verb, number):
        self.calls.append(("save", info.name, verb.kind, number))
        return "tinker://x"

    def snapshot(self, run, info, verb, number):
        self.calls.append(("snapshot", info.name, verb.session, number))
        return "s:sample:1"

    def load(self, run, info, verb):
        self.calls.append(("load", info.name, verb.path, verb.optimizer))
        return run

    def keep(self, info):
        self.calls.append(("keep", info.name))


class World:
    """The runs of a folder, as one server holds them."""

    def __init__(self, root, clock, **changes):
        self.clock, self.futures, self.stores = clock, Futures(clock), Noting()
        self.doing = lambda: None  # called while a pass is being done
        self.runs = TrainingRuns(
            root,
            {"tiny": base().base},
            self.stores,
            self.futures,
            loss_of=self.loss_of,
            verb_of=lambda info, record: VERBS[record.body.decode()],
            clock=clock,
            **changes,
        )

    def loss_of(self, info, verb):
        self.doing()
        return Loss(verb.loss)

    def create(self, number=0, **changes):
        info = info_of(number, created=self.clock.now, **changes)
        self.runs.create(info)
        self.futures.open(request_name(info.name, 0), info.owner)
        return info.name, self.did(info.name, 0, CreateVerb())

    def did(self, run, number, verb):
        outcome = self.runs.do(run, number, verb)
        self.futures.settle(request_name(run, number), outcome)
        return outcome

    def take(self, run, number, name):
        """Take a request in, and do it."""
        self.futures.open(request_name(run, number), "me")
        self.runs.accept(run, JournalRecord(number, "pass", name.encode()))
        return self.did(run, number, VERBS[name])

    def held(self, run):
        return self.runs._held[run]


def info_of(number, *, created=0.0, owner="me", optimizer="adamw", rank=2, **changes):
    adapters = Adapters(rank, seed=number)
    own = {"name": RUN.format(number), "session": "0123456789ab", "owner": owner, "base": "tiny", "adapters": adapters}
    return RunInfo(**own, optimizer=optimizer, created=created, **changes)


def passed(loss="importance_sampling", *, backward=True):
    return PassVerb(data=tuple(ours(1)), loss=loss, config={}, backward=backward)


VERBS = {
    "pass": passed(),
    "forward": passed(backward=False),
    "wrong": passed("nothing"),
    "wrong forward": passed("nothing", backward=False),
    "step": StepVerb(kind="adamw", params=StepParams(learning_rate=1e-2)),
    "muon": StepVerb(kind="muon", params=StepParams()),
    "refused": RefusedVerb(error="no"),
    "refused, not a pass": RefusedVerb(error="no", breaks=False),
    "save": SaveVerb(kind="weights", name="x"),
    "sampler": SaveVerb(kind="sampler_weights", name="x"),
    "external": SaveVerb(kind="external_weights", name="x"),
    "snapshot": SnapshotVerb(session=1, inflight=False),
    "load": LoadVerb(path="tinker://y", optimizer=True),
}


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, Clock())
    yield made
    made.runs.close()


@pytest.mark.parametrize(
    ("first", "taken"),
    [
        ("wrong", False),
        ("refused", False),
        ("wrong forward", True),
        ("refused, not a pass", True),
        ("muon", True),
        ("forward", True),
    ],
)
def test_a_pass_that_fails_costs_its_step_and_nothing_else_does(world, first, taken):
    run, created = world.create()
    assert b"create_model" in created.body
    world.take(run, 1, "pass")
    world.take(run, 2, first)
    before = dict(world.runs.value(run).state.params)
    outcome = world.take(run, 3, "step")
    assert isinstance(outcome, Payload) == taken
    assert equal(before, world.runs.value(run).state.params) == (not taken)
    if not taken:
        assert outcome.error.startswith("no step was taken: request 2 failed")
        assert "without gradients" in world.take(run, 4, "step").error  # they are gone, too
    world.take(run, 5, "pass")
    assert isinstance(world.take(run, 6, "step"), Payload)
    assert world.held(run).done == 6


def test_steps_of_another_optimizer_are_refused(world):
    run, _ = world.create()
    world.take(run, 1, "pass")
    assert "optimizer is adamw" in world.take(run, 2, "muon").error


def test_results_are_of_their_requests(world):
    run, _ = world.create()
    found = [world.take(run, number, name) for number, name in enumerate(["save", "sampler", "external"], start=1)]
    kinds = [b"save_weights", b"save_weights_for_sampler", b"save_weights_external"]
    assert all(b'"' + kind + b'"' in each.body for kind, each in zip(kinds, found, strict=True))
    assert b"s:sample:1" in world.take(run, 4, "snapshot").body
    assert b"tinker://y" in world.take(run, 5, "load").body
    names = ("weights", "sampler_weights", "external_weights")
    assert world.stores.calls == [
        *(("save", run, name, number) for number, name in enumerate(names, start=1)),
        ("snapshot", run, 1, 4),
        ("load", run, "tinker://y", True),
    ]


def saved(world, run):
    return world.held(run).saved


def test_a_state_is_saved_once_its_work_is_worth_it_and_whole(world):
    """A saving may take a twentieth of the time, and a quarter of a second is always little."""
    run, _ = world.create()
    world.runs.done(run, 0, 4.9)
    assert saved(world, run) == -1
    world.runs.done(run, 0, 0.2)
    assert saved(world, run) == 0
    assert world.held(run).cost == 0
    world.take(run, 1, "pass")
    world.runs.done(run, 1, 100.0)  # its gradients are no part of a state
    assert saved(world, run) == 0
    world.take(run, 2, "step")
    world.runs.done(run, 2, 0.0)
    assert saved(world, run) == 2
    world.held(run).saving = 1.0
    world.take(run, 3, "forward")
    world.runs.done(run, 3, 19.9)
    assert saved(world, run) == 2
    world.take(run, 4, "wrong")
    world.runs.done(run, 4, 1.0)
    assert saved(world, run) == 2  # what is broken is not saved
    world.take(run, 5, "step")
    world.runs.done(run, 5, 0.0)
    assert saved(world, run) == 5
    assert world.stores.calls.count(("keep", run)) == 3
    assert [path.name for path in world.held(run).directory.glob("results-*.log")] == ["results-5.log"]


def test_a_state_is_saved_soon_where_what_it_came_from_may_go(world):
    run, _ = world.create()
    world.take(run, 1, "pass")
    world.take(run, 2, "wrong")
    world.take(run, 3, "load")
    assert world.runs.value(run).grads is None
    world.runs.done(run, 3, 0.0)
    assert (saved(world, run), world.held(run).due) == (3, False)
    other, _ = world.create(1, loaded="tinker://y", with_optimizer=False)
    assert world.stores.calls[-1] == ("load", other, "tinker://y", False)
    world.runs.done(other, 0, 0.0)
    assert saved(world, other) == 0


@pytest.mark.slow
def test_a_state_is_saved_where_the_journal_is_long(world):
    run, _ = world.create()
    world.take(run, 1, "forward")
    world.runs.done(run, 1, 0.0)
    assert saved(world, run) == -1
    world.runs.accept(run, JournalRecord(3, "pass", bytes(64 << 20)))  # which waits
    world.runs.done(run, 1, 0.0)
    assert saved(world, run) == 1


def test_the_next_server_has_the_results_that_may_be_read_and_does_what_waits(tmp_path):
    clock = Clock()
    first = World(tmp_path, clock)
    run, _ = first.create()
    names = ["pass", "step", "wrong", "refused", "step", "forward"]
    outcomes = [first.take(run, number, name) for number, name in enumerate(names, start=1)]
    first.futures.forget([request_name(run, 1)])  # read long ago
    first.runs.accept(run, JournalRecord(8, "pass", b"step"))  # came before its pass, and waits
    first.runs.save(run)
    assert first.held(run).numbers == [0, 2, 3, 4, 5, 6, 8]
    assert [record.number for record in read(first.held(run).directory / "journal.log")] == [8]
    first.runs.accept(run, JournalRecord(7, "pass", b"pass"))
    params = dict(first.runs.value(run).state.params)
    first.runs.close()
    second = World(tmp_path, clock)
    ((name, number, todo),) = second.runs.restore()
    assert (name, number) == (run, 7)
    assert {at: verb.record.body for at, verb in todo.items()} == {7: b"pass", 8: b"step"}  # read when they are done
    for at, outcome in list(enumerate(outcomes, start=1))[1:]:
        assert second.futures.state(request_name(run, at), "me") == (outcome,)
    assert second.futures.state(request_name(run, 1), "me") is None
    assert second.futures.state(request_name(run, 7), "me") == (None,)
    assert isinstance(second.did(run, 7, todo[7]), Payload)
    assert isinstance(second.did(run, 8, todo[8]), Payload)
    assert second.runs.value(run).state.step == 2
    assert not equal(params, second.runs.value(run).state.params)
    second.runs.save(run)
    assert sorted(second.held(run).numbers) == [0, 2, 3, 4, 5, 6, 7, 8]
    second.runs.close()


def test_results_keep_their_kind_and_whose_fault_they_are(tmp_path):
    clock = Clock()
    first = World(tmp_path, clock)
    run, _ = first.create()
    outcomes = [Payload(b"{}"), Payload(b"\x00", proto=True), FailedRequest("a"), FailedRequest("b", "server")]
    for number, outcome in enumerate(outcomes, start=1):
        first.futures.open(request_name(run, number), "me")
        first.runs.accept(run, JournalRecord(number, "pass", b"pass"))
        first.held(run).done = number
        first.futures.settle(request_name(run, number), outcome)
    first.runs.save(run)
    first.runs.close()
    second = World(tmp_path, clock)
    list(second.runs.restore())
    for number, outcome in enumerate(outcomes, start=1):
        assert second.futures.state(request_name(run, number), "me") == (outcome,)
    second.runs.close()


def test_a_run_that_was_let_go_of_has_nothing_left_to_do(tmp_path):
    clock = Clock()
    first = World(tmp_path, clock)
    run, _ = first.create()
    first.take(run, 1, "forward")
    first.runs.save(run)
    first.take(run, 2, "forward")
    assert first.runs.open_runs() == [run]
    first.runs.release(run)
    assert first.runs.open_runs() == []
    assert not (first.held(run).directory / "states").exists()
    assert read(first.held(run).directory / "journal.log") == []
    first.runs.close()
    second = World(tmp_path, clock)
    assert [todo for *_, todo in second.runs.restore()] == [{}]
    assert second.runs.info(run, "me").ended
    second.runs.close()


def test_runs_are_their_owners_the_newest_first(world):
    for number, owner in enumerate(["me", "you", "me"]):
        world.clock.now += 1
        world.create(number, owner=owner)
    assert [info.name for info in world.runs.infos("me")] == [RUN.format(2), RUN.format(0)]
    world.clock.now = 500.0
    world.take(RUN.format(0), 1, "forward")
    assert world.runs.last_request(RUN.format(0)) == 500.0
    assert world.runs.last_request(RUN.format(1)) == 102.0
    assert world.runs.info(RUN.format(1), "you").owner == "you"
    for wrong in (RUN.format(1), RUN.format(9)):
        with pytest.raises(Refusal):
            world.runs.info(wrong, "me")


def test_what_is_in_a_saved_state_is_not_done_again_by_the_next_server(world, tmp_path):
    """Also if the server was killed before its journal was made shorter."""
    run, _ = world.create()
    world.take(run, 1, "pass")
    world.take(run, 2, "step")
    world.runs.accept(run, JournalRecord(3, "pass", b"pass"))
    world.held(run).journal.compact = lambda keep: None
    world.runs.save(run)
    assert [record.number for record in read(world.held(run).directory / "journal.log")] == [1, 2, 3]
    later = World(tmp_path, world.clock)
    assert list(later.runs.restore()) == [(run, 3, {3: LaterVerb(JournalRecord(3, "pass", b"pass"))})]
    later.runs.close()


def test_a_request_under_which_two_servers_ended_is_not_tried_again(tmp_path):
    """A kill may come at any moment, so that one end is no proof. What is refused then is so for good."""
    first = World(tmp_path, Clock())
    run, _ = first.create()
    first.runs.accept(run, JournalRecord(1, "pass", b"pass"))
    place = first.held(run).directory
    first.runs.close()
    for tries, refused, notes in ((1, False, 0), (2, True, 1), (2, True, 0)):
        (place / "doing").write_text(f"1 {tries}")
        later = World(tmp_path, Clock())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ((_, number, todo),) = later.runs.restore()
        assert number == 0
        assert isinstance(todo[1], RefusedVerb) == refused
        assert len([each for each in said if "it is not tried again" in str(each.message)]) == notes
        later.runs.close()
    assert later.did(run, 0, todo[0]) is not None
    outcome = later.did(run, 1, todo[1])
    assert isinstance(outcome, FailedRequest)
    assert outcome.category == "server"
    assert (place / "doing").read_text() == "2 0"


@contextmanager
def full_disk():
    """Files take no more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("torn", [False, True])
def test_a_request_that_was_done_is_done_again_however_often_servers_end_under_it(tmp_path, torn):
    """Its outcome may have been sent, and what came behind it builds on what it did. The folder is copied while the
    request is being done, as a kill would leave it; also where one ended while it noted what it does."""
    first = World(tmp_path / "0", Clock())
    run, _ = first.create()
    first.take(run, 1, "pass")
    first.take(run, 2, "step")
    if torn:
        with full_disk():
            first.runs.do(run, 3, VERBS["forward"])
    first.runs.close()
    for kills in range(4):
        place, copy = tmp_path / str(kills), tmp_path / str(kills + 1)
        later = World(place, Clock())
        ((_, _, todo),) = later.runs.restore()
        assert [type(todo[number]) for number in range(3)] == [CreateVerb, LaterVerb, LaterVerb]
        later.did(run, 0, todo[0])
        later.doing = lambda place=place, copy=copy: shutil.copytree(place, copy)
        later.runs.do(run, 1, todo[1])
        later.runs.close()


def test_what_was_answered_as_failed_stays_so_at_the_next_server(tmp_path):
    """Whatever that could do: a save for which there was no room, and a pass that the machine could not run."""
    first = World(tmp_path, Clock())
    run, _ = first.create()
    first.runs.accept(run, JournalRecord(1, "pass", b"wrong"))
    failed = first.did(run, 1, VERBS["wrong"])
    assert isinstance(failed, FailedRequest)
    first.runs.close()
    later = World(tmp_path, Clock())
    ((_, _, todo),) = later.runs.restore()
    assert todo[1] == RefusedVerb(error=failed.error, breaks=True, category=failed.category)
    later.runs.close()
