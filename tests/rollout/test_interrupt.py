"""Responses that go on with newer weights: each token is of the policy that is named for it, and of no other."""

import itertools
import threading
import time
import warnings

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import tree
from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.rollout import Ask, InterruptibleEngine, Sampling
from fppo.runtime.in_order import InOrder
from fppo.steps.forward import Forward, forward_micro_batch
from tests import tiny
from tests.models.families import make
from tests.rollout.test_embedded import PAD, engine_of, make_prompts
from tests.rollout.test_generated import LETTERS, Generating, alone, told
from tests.rollout.test_pool import dying, engines
from tests.rollout.test_spread import prompts_of

TEXTS = StopTexts((b"bdb", b"ee"), tuple(b"abcdefgh"[i % 8 : i % 8 + 1] for i in range(tiny.VOCAB)))
SAMPLING = Sampling(temperature=0.8, top_k=9, n=2, max_tokens=9, stop_token_ids=(3,), stop_texts=TEXTS)
LIMITS = torch.tensor([9, 2, 9, 5, 9, 9])


def ask(newer=lambda: None, **changes):
    prompts = make_prompts(extra=1)
    prompts = tree.replace(prompts, tokens=prompts.tokens % tiny.VOCAB)
    return attrs.evolve(Ask(prompts, SAMPLING, Key(3), version=4, limits=LIMITS, newer=newer), **changes)


def interruptible(engine, every):
    return InterruptibleEngine(engine=engine, every=every, pad_token_id=PAD)


def policies(count, **changes):
    """A model, and the parameters of so many versions of it."""
    model, first = tiny.model_and_params(**changes)
    return model, [{name: x * (1 + 0.3 * i) for name, x in first.items()} for i in range(count)]


def coming(versions, first=4):
    """`Ask.newer` that gives the parameters of the next version every second time it is asked."""
    calls = itertools.count()

    def newer():
        number = min(next(calls) // 2, len(versions) - 1)
        return (versions[number], first + number)

    return newer


def same_but_for(*names):
    return lambda rollout: tree.digest(tree.replace(rollout, **dict.fromkeys(names, torch.zeros(len(rollout.tokens)))))


@pytest.mark.parametrize("every", [1, 2, 4, 9, 50])
def test_without_newer_weights_it_is_the_engines_own_rollout(every):
    model, (params,) = policies(1)
    engine, reports = engine_of(model), [{}, {}]
    ends = [lambda row, *rest, own=own: own.setdefault(row, []).append(rest) for own in reports]
    whole = engine.generate(params, ask(newer=None, on_finished=ends[0]))
    parts = interruptible(engine, every).generate(params, ask(on_finished=ends[1]))
    assert parts.token_versions.dtype == torch.int32
    assert (parts.token_versions == torch.where(parts.response_mask, 4, 0)).all()
    for name in ("rollout_log_probs", "sampling_log_probs"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=0, atol=1e-10)
    rest = same_but_for("rollout_log_probs", "sampling_log_probs", "token_versions")
    assert rest(parts) == rest(whole)
    assert set(parts.finish) == {"stop", "length"}
    assert reports[0] == reports[1]
    assert len(reports[1]) == 12
    plain = interruptible(engine, every).generate(params, ask(newer=None))
    assert tree.digest(plain) == tree.digest(whole)


def test_a_text_that_begins_in_one_piece_and_ends_in_the_next_ends_a_response():
    model, (params,) = policies(1)
    first = attrs.evolve(ask(), prompts=batches.rows(ask().prompts, [2]), limits=None, newer=None)
    engine, plain = engine_of(model), attrs.evolve(SAMPLING, n=1, stop_texts=None, stop_token_ids=())
    whole = engine.generate(params, attrs.evolve(first, sampling=plain))
    letters = bytes(TEXTS.piece(token)[0] for token in whole.tokens[0, -9:].tolist())
    asked = attrs.evolve(first, sampling=attrs.evolve(plain, stop_texts=attrs.evolve(TEXTS, texts=(letters[2:5],))))
    assert letters.find(letters[2:5]) == 2
    reports, calls = [], []

    class Counted:
        def generate(self, params, ask):
            calls.append(ask.offset)
            return engine.generate(params, ask)

    for newer, every in ((None, 4), (lambda: None, 4), (lambda: None, 2)):
        said = attrs.evolve(asked, newer=newer, on_finished=lambda *what: reports.append(what))
        rollout = interruptible(Counted(), every).generate(params, said)
        assert (rollout.response_mask.shape, list(rollout.finish)) == ((1, 5), ["stop"])
        assert rollout.tokens[0, -5:].tolist() == whole.tokens[0, -9:-4].tolist()
    assert reports == reports[:1] * 3
    assert calls == [0, 0, 4, 0, 2, 4]


@pytest.mark.parametrize("every", [1, 2])
def test_a_token_has_the_log_prob_of_the_version_that_is_named_for_it(every):
    model, versions = policies(4)
    sampling = attrs.evolve(SAMPLING, stop_texts=None, top_k=None)
    asked = ask(coming(versions), sampling=sampling)
    rollout = interruptible(engine_of(model), every).generate(versions[0], asked)
    named, mask = rollout.token_versions, rollout.response_mask
    assert set(named[mask].tolist()) >= {4, 5, 6}
    assert rollout.versions.tolist() == [4] * 12
    forward, seen = Forward(model), torch.zeros_like(mask)
    for version, params in enumerate(versions, 4):
        own = mask & (named == version)
        out = forward_micro_batch(params, rollout, forward=forward, temperature=sampling.temperature)
        torch.testing.assert_close(rollout.rollout_log_probs[own], out.log_probs[own], rtol=0, atol=1e-10)
        seen |= own
    assert (seen == mask).all()
    # the draws of a position are those of a rollout by one policy, so its first tokens are
    one = engine_of(model).generate(versions[0], attrs.evolve(asked, newer=None))
    first, start = named == 4, rollout.tokens.shape[1] - mask.shape[1]
    assert (rollout.tokens[:, start:][first] == one.tokens[:, start : start + mask.shape[1]][first]).all()


class Whole(Generating):
    """An engine that answers prompts at once, without limits too."""

    def generate(self, params, ask):
        most = torch.full((len(ask.prompts.tokens),), ask.sampling.max_tokens)
        return super().generate(params, ask if ask.limits is not None else attrs.evolve(ask, limits=most))


def in_pieces(asked, sampling, n, offset, limits, every, coming_versions):
    """Each row's tokens, the version of each, and whether it stopped, in pieces of so many tokens; by hand."""
    rows = [(place, 7 + 2 * place, draw) for place in range(len(asked)) for draw in range(n)]
    found, version, had = {row: ([], [], None) for row in range(len(rows))}, 4, 0
    left, newest = [*range(len(rows))], iter(coming_versions)
    while left:
        version = max(version, next(newest, None) or 0)
        for row in [*left]:
            place, number, draw = rows[row]
            tokens, versions, _ = found[row]
            most = min(every, limits[place] - had)
            prompt = [*asked[place], *tokens]
            new, end = alone(prompt, Key(3), number * n + draw, offset + had, sampling, most)
            tokens += new
            versions += [version] * len(new)
            texts = sampling.stop_texts
            cuts = [i for i in range(1, len(tokens) + 1) if texts is not None and texts.last(tokens[:i]) is not None]
            if cuts or end == "stop" or len(tokens) >= limits[place]:
                size = min(cuts, default=len(tokens))
                stopped = bool(cuts) or tokens[size - 1] in sampling.stop_token_ids
                found[row] = tokens[:size], versions[:size], "stop" if stopped else "length"
                left.remove(row)
        had += every
    return [found[row] for row in range(len(rows))]


@pytest.mark.slow
@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(4, 16), min_size=1, max_size=3), st.integers(1, 8)), min_size=1, max_size=3
    ),
    st.sampled_from(
        [
            Sampling(stop_token_ids=(3, 5)),
            Sampling(temperature=0.5, top_p=0.5),
            Sampling(stop_token_ids=(9,), stop_texts=StopTexts((b"ef", b"ghi", b"k"), LETTERS)),
            Sampling(stop_texts=StopTexts((b"de", b"f", b"mn", b"s"), LETTERS)),
        ]
    ),
    st.integers(1, 2),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.integers(1, 4),
    st.lists(st.sampled_from([None, 3, 4, 5, 7]), max_size=6),
)
def test_pieces_are_those_of_each_row_alone(asked, sampling, n, offset, limited, every, versions):
    """Tokens, log-probs, versions, ends and reports; with limits or without, behind an offset, whatever comes when."""
    coming_ones, reports = iter(versions), []

    def newer():
        version = next(coming_ones, None)
        return None if version is None else ({"x": torch.tensor(float(version))}, version)

    limits = [most if limited else 8 for _, most in asked]
    request = Ask(
        prompts_of([ids for ids, _ in asked]),
        attrs.evolve(sampling, n=n, max_tokens=8),
        Key(3),
        version=4,
        limits=torch.tensor(limits) if limited else None,
        offset=offset,
        newer=newer,
        on_finished=lambda *what: reports.append(what),
    )
    inner = Whole(routed=False, versioned=False)
    rollout = interruptible(inner, every).generate({"x": torch.tensor(4.0)}, request)
    expected = in_pieces([ids for ids, _ in asked], sampling, n, offset, limits, every, versions)
    width = max(len(tokens) for tokens, *_ in expected)
    assert rollout.response_mask.shape == (len(expected), width)
    assert sorted(reports) == [(row, tokens, end) for row, (tokens, _, end) in enumerate(expected)]
    assert [*rollout.finish] == [end for *_, end in expected]
    first = max(4, next(iter(versions), None) or 0)
    assert rollout.versions.tolist() == [first] * len(expected)
    assert rollout.groups.tolist() == [7 + 2 * (row // n) for row in range(len(expected))]
    assert rollout.row_ids.tolist() == [(7 + 2 * (row // n)) * n + row % n for row in range(len(expected))]
    for row, (tokens, own, _) in enumerate(expected):
        rest = width - len(tokens)
        assert rollout.response_mask[row].tolist() == [*[True] * len(tokens), *[False] * rest]
        assert rollout.tokens[row, -width:].tolist() == [*tokens, *[PAD] * rest]
        assert rollout.token_versions[row].tolist() == [*own, *[0] * rest]
        log_probs = -torch.tensor(tokens) / 8.0 - told(sampling) - torch.tensor(own)
        for column, times in ((rollout.rollout_log_probs, 1), (rollout.sampling_log_probs, 2)):
            assert torch.equal(column[row, : len(tokens)], times * log_probs)
            assert not column[row, len(tokens) :].any()
    assert {one.version for one in inner.asked} == {version for _, own, _ in expected for version in own}


def test_an_update_that_changes_nothing_changes_no_bit():
    model, (params,) = policies(1, dtype=torch.float32)
    engine = interruptible(engine_of(model), 2)
    still = engine.generate(params, ask())
    again = engine.generate(params, ask(coming([dict(params) for _ in range(4)])))
    rest = same_but_for("token_versions")
    assert rest(still) == rest(again)
    assert len(again.token_versions.unique()) > 2


def test_weights_that_are_no_newer_are_not_taken():
    model, versions = policies(2)
    engine = interruptible(engine_of(model), 2)
    still = engine.generate(versions[0], ask())
    for version in (3, 4):
        assert tree.digest(engine.generate(versions[0], ask(lambda v=version: (versions[1], v)))) == tree.digest(still)


@pytest.mark.slow
def test_engines_that_die_on_the_way_change_no_bit():
    model, versions = policies(3, dtype=torch.float32)
    with engines((model, versions[0]), 1) as one:
        expected = interruptible(one, 2).generate(versions[0], ask(coming(versions)))
    assert expected.token_versions.unique().tolist() == [0, 4, 5]
    sent = dying(lambda number, label: number in (5, 11, 17))
    with engines((model, versions[0]), 2, restarts=3, on_send=sent) as several, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        rollout = interruptible(several, 2).generate(versions[0], ask(coming(versions)))
    assert tree.digest(rollout) == tree.digest(expected)
    assert len(sent) > 17


def test_what_has_no_sense_is_refused():
    model, (params,) = policies(1)
    with pytest.raises(ValueError, match="every = 0: give 1 or more tokens"):
        interruptible(engine_of(model), 0)
    with pytest.raises(ValueError, match=r"Ask.newer: greedy responses are one policy's"):
        interruptible(engine_of(model), 2).generate(params, ask(sampling=Sampling(greedy=True)))
    model, params = make("qwen3_moe")
    with pytest.raises(ValueError, match="routed: the engine tells experts of pieces anew"):
        interruptible(engine_of(model, routed=True), 2).generate(params, ask())


def test_whoever_comes_again_at_once_stands_behind_those_who_wait():
    lock, order = InOrder(), []

    def other():
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock:
        thread.start()
        while len(lock._there) < 2:
            time.sleep(0.001)
    with lock:
        order.append("again")
    thread.join()
    assert order == ["other", "again"]


def test_who_is_interrupted_in_line_is_not_waited_for(monkeypatch):
    def interrupted(changed, ready):
        if not ready():
            raise InterruptedError

    monkeypatch.setattr(threading.Condition, "wait_for", interrupted)
    lock = InOrder()
    with lock, pytest.raises(InterruptedError), lock:
        pass
    with lock:
        pass
