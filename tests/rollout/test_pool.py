"""Several engines as one: whatever their number, and whichever of them die, the rollout is the same, bit for bit."""

import contextlib
import random
import threading
import warnings

import attrs
import pytest
import torch

from fppo import tree
from fppo.fleet import HERE, LOCAL_GROUP, Group, GroupDied
from fppo.key import Key
from fppo.rollout import Ask, EnginePool, Policy, Sampling, SyncError, pool, sync
from fppo.rollout.pool import _taken as taken
from fppo.runtime import fsdp
from tests import tiny
from tests.fleet.threads import Threads
from tests.rollout.test_embedded import PAD, engine_of, make_prompts

ROWS = 5  # of a request: two prompts
SAMPLING = Sampling(max_tokens=6, n=2, stop_token_ids=(3, 4))


@pytest.fixture(scope="module")
def policy():
    return tiny.model_and_params(dtype=torch.float32)


def ask(**changes):
    prompts, limits = make_prompts(extra=1), torch.tensor([6, 2, 6, 4, 6, 6])
    prompts = tree.replace(prompts, tokens=prompts.tokens % tiny.VOCAB)
    return attrs.evolve(Ask(prompts, SAMPLING, Key(3), version=1, limits=limits), **changes)


def made(here):
    model, _ = tiny.model_and_params()
    return engine_of(model).generate


def make(group):
    return group.call(made, HERE, stays=True, label="make engine")


@contextlib.contextmanager
def engines(policy, count, *, group=LOCAL_GROUP, model=None, on_send=None, kind=Policy, **changes):
    """A pool of so many engines, in threads."""
    with contextlib.ExitStack() as opened:
        ranks = [Threads() for _ in range(count)]
        for each in ranks:
            each.on_send = on_send
        groups = [opened.enter_context(Group(f"engine {i}", each)) for i, each in enumerate(ranks)]
        where = kind(group=group, model=policy[0] if model is None else model, bucket_bytes=1 << 10)
        yield opened.enter_context(
            EnginePool(groups, make, where, names=policy[1], pad_token_id=PAD, rows=ROWS, **changes)
        )


class Sent(list):
    """The labels of what engines are sent, by its number over all engines; the rank that it goes to is lost if
    `doomed(number, label)`."""

    doomed = staticmethod(lambda number, label: False)

    def __call__(self, threads, request):
        if request.label in ("generate", "take weights", "make engine"):
            self.append(request.label)
            if self.doomed(len(self), request.label):
                threads.lose(0)


def dying(doomed):
    sent = Sent()
    sent.doomed = doomed
    return sent


@pytest.fixture(scope="module")
def alone(policy):
    """The rollout of one engine that is a pool."""
    with engines(policy, 1) as one:
        return one.generate(policy[1], ask())


def test_a_pool_answers_what_an_engine_answers(policy, alone):
    """But for the rounding of other batches: the tokens, their places, and all that goes with a row."""
    whole = engine_of(policy[0]).generate(policy[1], ask())
    assert (alone.rollout_log_probs - whole.rollout_log_probs).abs().max() < 1e-5
    same = dict.fromkeys(("rollout_log_probs", "sampling_log_probs"), torch.zeros(1))
    assert tree.digest(tree.replace(alone, **same)) == tree.digest(tree.replace(whole, **same))
    assert len({len(x.tokens) for x in (alone, whole)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(2, 1), (3, 0), (3, 2), (3, 3)])
def test_any_number_of_engines_and_any_deaths_change_no_bit(policy, alone, count, seed):
    rng = random.Random(seed)
    deaths = set() if seed == 0 else set(rng.sample(range(count + 1, count + 30), 3))
    sent = dying(lambda number, label: number in deaths)
    other = {name: x + 0.1 for name, x in policy[1].items()}
    with engines(policy, count, restarts=3, on_send=sent) as several, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for params, version in ((other, 0), (policy[1], 1), (other, 1), (policy[1], 1)):
            rollout = several.generate(params, ask(version=version))
            assert (tree.digest(rollout) == tree.digest(alone)) == (params is policy[1])


def test_who_dies_is_said_and_the_last_that_dies_ends_the_rollout(policy):
    with engines(policy, 2, restarts=1, on_send=dying(lambda number, label: label == "generate")) as several:
        words = "all 2 engines are gone, after 1 starts again; the last: .*was lost in generate: the thread is gone"
        with pytest.raises(GroupDied, match=words), pytest.warns(RuntimeWarning, match="others answer for it"):
            several.generate(policy[1], ask())
        with pytest.raises(GroupDied):
            several.generate(policy[1], ask())


def damaged(tensors, how):
    there, _ = taken(tensors, how)
    return there, {name: sync.digest(x + 1e-6, how) for name, x in there.items()}


@pytest.mark.slow
def test_no_engine_answers_before_it_has_confirmed_its_weights(policy, monkeypatch):
    sent = Sent()
    with engines(policy, 2, on_send=sent) as several:
        several.generate(policy[1], ask())
        sent.clear()
        several.generate(policy[1], ask())
        assert sent == ["generate"] * 3  # they hold what is asked for
        assert pool._requests(ask(), ROWS) == [[2, 5], [4, 0], [3, 1]]  # by their tokens at most
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_taken", damaged)
            with pytest.raises(SyncError, match="changed on the way"):
                several.generate(policy[1], ask(version=2))
        sent.clear()
        several.generate(policy[1], ask(version=2))
        assert sent.count("take weights") > 2  # all of them again


def test_a_rollout_ends_no_earlier_than_who_reads_its_weights(policy):
    """Else a newcomer might be sent what an update has written in their place meanwhile."""
    calls = []
    reading, go_on, all_done = threading.Event(), threading.Event(), threading.Event()

    class HeldUp(Policy):
        def buckets(self, params):
            calls.append(1)
            if len(calls) == 2:  # a newcomer's
                reading.set()
                go_on.wait()
            yield from super().buckets(params)

    def on_finished(row, tokens, finish):
        reading.wait()
        reported.append(row)
        if len(reported) == 12:
            all_done.set()

    reported, sent = [], dying(lambda number, label: label == "generate" and sent.count(label) == 1)
    with engines(policy, 2, on_send=sent, kind=HeldUp) as several, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        rollout = threading.Thread(target=several.generate, args=(policy[1], ask(on_finished=on_finished)))
        rollout.start()
        all_done.wait()
        rollout.join(0.2)
        still = rollout.is_alive()
        go_on.set()
        rollout.join()
    assert still


def loaded(here):
    model, params = tiny.model_and_params(dtype=torch.float32)
    return {"model": model, "params": fsdp.shard(params, here.mesh)}


@pytest.mark.slow
def test_the_policy_may_be_on_ranks_that_each_hold_a_part(policy, alone):
    sent = Sent()
    with Group("actor", Threads(shard=2)) as actor:
        there = actor.call(loaded, HERE, stays=True)
        with engines(policy, 2, group=actor, model=there["model"], on_send=sent) as several:
            assert tree.digest(several.generate(there["params"], ask())) == tree.digest(alone)
            sent.clear()
            kept = actor.call(tree.copy, there["params"], stays=True)
            several.bring(kept)
            assert set(sent) == {"take weights"}
            sent.clear()
            assert tree.digest(several.generate(kept, ask())) == tree.digest(alone)
            assert set(sent) == {"generate"}  # its ranks may train meanwhile


def test_an_engine_gets_the_parameters_that_it_takes_and_no_others(policy):
    other = {**policy[1], "other": torch.ones(1)}
    with engines((policy[0], other), 2) as several, pytest.raises(SyncError, match="missing: other"):
        several.generate(policy[1], ask())


@pytest.mark.parametrize("on_host", [False, True])
def test_weights_stay_where_the_engine_takes_them_from(policy, on_host):
    told = []

    def note(threads, request):
        if request.label == "take weights":
            told.append(request.on_host)

    with engines(policy, 1, on_send=note, on_host=on_host) as several:
        several.bring(policy[1])  # the policy is in this process, where reading costs nothing
        assert told == []
        several.generate(policy[1], ask())
    assert {*told} == {on_host}


def test_how_often_engines_may_yet_be_started_is_said(policy):
    sent = dying(lambda number, label: number == 4)
    with engines(policy, 2, restarts=3, on_send=sent) as several, pytest.warns(RuntimeWarning) as warned:
        several.generate(policy[1], ask())
    (said,) = [str(each.message) for each in warned if each.category is RuntimeWarning]
    assert "others answer for it, and it may be started again" in said
    assert " of 3 times more" in said


@pytest.mark.slow
def test_rows_are_reported_once_each_as_requests_are_answered(policy, alone):
    rows = {}

    def on_finished(row, tokens, finish):
        assert row not in rows
        rows[row] = (tokens, finish)

    sent = dying(lambda number, label: number == 4)
    with engines(policy, 2, on_send=sent) as several, pytest.warns(RuntimeWarning, match="others answer for it"):
        several.generate(policy[1], ask(on_finished=on_finished))
    width = alone.response_mask.shape[1]
    expected = [
        (tokens[mask].tolist(), finish)
        for tokens, mask, finish in zip(alone.tokens[:, -width:], alone.response_mask, alone.finish, strict=True)
    ]
    assert [rows[row] for row in range(len(expected))] == expected


def test_what_an_engine_refuses_is_raised(policy):
    with engines(policy, 2) as several:
        with pytest.raises(ValueError, match=r"stop_token_ids \[99\] are beyond"):
            several.generate(policy[1], ask(sampling=Sampling(stop_token_ids=(99,))))
        prompts = make_prompts()
        empty = tree.replace(prompts, attention_mask=prompts.attention_mask & False)
        with pytest.raises(ValueError, match="leave empty prompts out"):
            several.generate(policy[1], ask(prompts=empty))


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_what_ends_a_thread_of_an_engine_ends_the_rollout(policy, kind):
    """Nobody waits for an answer that does not come."""
    raised = []

    def leaves(row, response, finish):
        raise kind("enough")

    def generate():
        try:
            several.generate(policy[1], ask(on_finished=leaves))
        except BaseException as error:
            raised.append(error)

    with engines(policy, 2) as several:
        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        thread.join(120.0)
        assert [type(error) for error in raised] == [kind]
