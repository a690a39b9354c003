"""Rows that vLLM draws, at once or in turns: each token by its own key, row and place, whatever vLLM does with rows."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.requests import QueueFull, Request
from fppo.rollout.sampling import draw, process_logits
from fppo.rollout.scores import Scores
from fppo.rollout.vllm import local
from fppo.rollout.vllm.host import EngineDied, EngineFailure, HostBatch, HostDraws, HostRow
from fppo.rollout.vllm.requests import VllmRequests
from tests.rollout.vllm_stand_in import SIZE, StandIn, host_of, logits_of, worker_of

PIECES = tuple(bytes([97 + i % 4]) for i in range(SIZE))
SAMPLINGS = (
    Sampling(stop_token_ids=(5, 9, 20)),
    Sampling(temperature=0.6, top_k=9, top_p=0.8),
    Sampling(temperature=1.5, stop_texts=StopTexts((b"ba", b"cc"), PIECES)),
    Sampling(greedy=True, temperature=0.5),
    Sampling(min_p=0.2),
)


def by_hand(version, prompt, key, row, position, sampling):
    """The response: tokens with their two log-probs, and whether it stops."""
    numbers = key.uniform(torch.tensor([row]), torch.arange(sampling.max_tokens) + position)[0]
    found, tokens = [], []
    for number in numbers:
        logits = logits_of(version, [*prompt, *tokens])[None]
        token = int(draw(logits, number[None], sampling).tokens)
        log_probs = (logits / sampling.temperature).log_softmax(-1), process_logits(logits, sampling).log_softmax(-1)
        tokens.append(token)
        found.append((token, float(log_probs[0][0, token]), 0.0 if sampling.greedy else float(log_probs[1][0, token])))
        said = b"".join(PIECES[x] for x in tokens)
        texts = () if sampling.stop_texts is None else sampling.stop_texts.texts
        if token in sampling.stop_token_ids or any(text in said for text in texts):
            return found, True
    return found, False


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(3, 30), min_size=1, max_size=4), st.integers(1, 6)), min_size=1, max_size=6
)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    PROMPTS, st.sampled_from(SAMPLINGS), st.booleans(), st.sampled_from([0, 3]), st.integers(1, 4), st.integers(0, 9)
)
def test_a_batch_of_rows_is_drawn_row_by_row(rows, sampling, limited, offset, max_rows, seed):
    with pytest.MonkeyPatch.context() as patch:
        llm = StandIn(worker_of(patch), seed=seed, max_rows=max_rows)
        host, answers = host_of(local, llm), {}
        sampling = attrs.evolve(sampling, max_tokens=6)
        limits = [most for _, most in rows]
        ids = torch.tensor([40 + 3 * i for i in range(len(rows))])
        batch = HostBatch(
            prompts=[prompt for prompt, _ in rows],
            sampling=sampling,
            key=Key(3),
            row_ids=ids,
            limits=limits if limited else None,
            offset=offset,
            adapter=4 if seed % 2 else None,
        )
        for _ in range(2):  # another begins anew
            answers.clear()
            host.generate(batch, lambda row, answer: answers.setdefault(row, []).append(answer))
            assert sorted(answers) == [*range(len(rows))]
            assert not llm.llm_engine.has_unfinished_requests()
            for row, ((prompt, most), (answer,)) in enumerate(zip(rows, [answers[i] for i in sorted(answers)])):
                how = attrs.evolve(sampling, max_tokens=most if limited else 6)
                expected, _ = by_hand(0, prompt, Key(3), int(ids[row]), offset, how)
                assert answer.tokens.tolist() == [token for token, *_ in expected]
                np.testing.assert_allclose(answer.log_probs, [x for _, x, _ in expected], atol=1e-5)
                np.testing.assert_allclose(answer.sampling_log_probs, [x for *_, x in expected], atol=1e-5)
                assert answer.tokens.dtype == np.int64
        for each in llm.llm_engine.every:  # what has ended, by a text too, is drawn no further
            assert each.output == answers[int(each.name)][0].tokens.tolist()
        assert llm.resets == 2
        named = ("fppo-4", 4, "memory:4") if seed % 2 else None
        assert {*llm.llm_engine.adapters} == {named}


@settings(max_examples=15)
@given(PROMPTS, st.integers(1, 4), st.integers(0, 9))
def test_tokens_that_are_given_have_their_log_probs(rows, max_rows, seed):
    """Stops do not end them, and nothing is drawn."""
    forced = torch.randint(3, SIZE, (len(rows), 4), generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(temperature=0.7, max_tokens=4, stop_token_ids=tuple(range(20)))
    with pytest.MonkeyPatch.context() as patch:
        host, answers = host_of(local, StandIn(worker_of(patch), seed=seed, max_rows=max_rows)), {}
        batch = HostBatch(
            prompts=[prompt for prompt, _ in rows],
            sampling=sampling,
            key=Key(0),
            row_ids=torch.arange(len(rows)),
            forced=forced,
        )
        host.generate(batch, answers.__setitem__)
    for row, (prompt, _) in enumerate(rows):
        assert answers[row].tokens.tolist() == forced[row].tolist()
        for i, token in enumerate(forced[row].tolist()):
            expected = (logits_of(0, [*prompt, *forced[row, :i].tolist()]) / 0.7).log_softmax(-1)[token]
            assert answers[row].log_probs[i] == pytest.approx(float(expected), abs=1e-5)


def test_a_caller_that_leaves_ends_its_rows():
    with pytest.MonkeyPatch.context() as patch:
        llm = StandIn(worker_of(patch))
        batch = HostBatch(
            prompts=[[3], [4]], sampling=Sampling(max_tokens=9), key=Key(0), row_ids=torch.arange(2), limits=[1, 9]
        )

        def leave(row, answer):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            host_of(local, llm).generate(batch, leave)
        assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("what", ["tokens", "prompt", "nan"])
@pytest.mark.parametrize("turns", [False, True])
def test_what_vllm_did_otherwise_is_noticed(what, turns):
    with pytest.MonkeyPatch.context() as patch:
        llm = StandIn(worker_of(patch))
        engine, host, step = llm.llm_engine, host_of(local, llm), llm.llm_engine.step

        def other():
            outputs = step()
            for output in outputs:
                if what == "tokens":
                    output.outputs[0].token_ids[-1] = (output.outputs[0].token_ids[-1] + 1) % SIZE
                elif what == "prompt":
                    output.prompt_token_ids = [*output.prompt_token_ids, 3]
            return outputs

        engine.step = other
        apply = llm.processor.apply

        def broken(logits):
            drawn = apply(logits * torch.nan).isinf().long().argmax(-1)
            return torch.nn.functional.one_hot((drawn + 1) % SIZE, SIZE).float()

        if what == "nan":
            patch.setattr(llm.processor, "apply", broken)
        text = {"tokens": "other tokens than were drawn", "prompt": "another prompt", "nan": "are not numbers"}[what]
        sampling = Sampling(max_tokens=1)
        batch = HostBatch(prompts=[[3, 4]], sampling=sampling, key=Key(0), row_ids=torch.arange(1))

        def in_turns():
            host.begin_turns(None)
            host.turn([HostRow(7, (3, 4), sampling, Key(0), 1, 0)], [])
            for _ in range(3):
                host.turn([], [])

        with pytest.raises(EngineFailure, match=text):
            in_turns() if turns else host.generate(batch, lambda row, answer: None)


@pytest.mark.parametrize("adapter", [None, 4])
def test_rows_are_answered_by_the_adapter_that_their_turns_began_with(adapter):
    with pytest.MonkeyPatch.context() as patch:
        llm = StandIn(worker_of(patch))
        host = host_of(local, llm)
        for number in (3, adapter):
            host.begin_turns(number)
            for row in range(2):
                host.turn([HostRow(row, (3, 4), Sampling(max_tokens=4), Key(0), row, 0)], [])
        named = None if adapter is None else ("fppo-4", 4, "memory:4")
        assert llm.llm_engine.adapters == [("fppo-3", 3, "memory:3")] * 2 + [named] * 2


def test_a_worker_that_ended_is_a_death():
    with pytest.MonkeyPatch.context() as patch:
        llm = StandIn(worker_of(patch))
        host = host_of(local, llm)

        def ends():
            llm.llm_engine.engine_core.engine_core.model_executor.is_failed = True
            raise RuntimeError("no answer")

        llm.llm_engine.step = ends
        batch = HostBatch(prompts=[[3]], sampling=Sampling(max_tokens=2), key=Key(0), row_ids=torch.arange(1))
        with pytest.raises(EngineDied, match="a worker of vLLM ended"):
            host.generate(batch, lambda row, answer: None)
        llm.collective_rpc = lambda *args, **how: ends()
        with pytest.raises(EngineDied):
            host.call("x")


class Turns:
    """`VllmTurns` of stand-ins, whose logits are those of a version; it dies in some turns."""

    limit = 60

    def __init__(self, worker, seed, max_rows, deaths):
        self.worker, self.seed, self.max_rows, self.deaths = worker, seed, max_rows, deaths
        self.turns, self.begun, self.version, self.fed = 0, [], 0, {}

    def begin(self, params, version):
        self.begun.append((params, version))
        self.version = version
        self.host = host_of(local, StandIn(self.worker, seed=self.seed + len(self.begun), max_rows=self.max_rows))
        self.host._llm.llm_engine.version = version
        self.host._llm.llm_engine.cached = 1
        self.host.begin_turns(None)

    def turn(self, new, ended):
        self.turns += 1
        if self.turns in self.deaths:
            raise EngineDied("it died")
        return self.host.turn(new, ended)

    def replace(self, died):
        self.begin("again", self.version)


REQUEST = st.fixed_dictionaries(
    {
        "ids": st.sampled_from([(3, 4), (7,), (11, 12, 13)]),
        "sampling": st.sampled_from(SAMPLINGS),
        "most": st.integers(1, 5),
        "row": st.integers(0, 2),
        "position": st.sampled_from([0, 3]),
        "on": st.sampled_from([None, None, 0, 1]),
        "keep": st.booleans(),
        "pictured": st.booleans(),
    }
)
ROUNDS = st.lists(
    st.tuples(
        st.lists(REQUEST, max_size=3),
        st.integers(0, 5),
        st.sampled_from([None, None, "update", "cancel", "release"]),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(ROUNDS, st.integers(1, 4), st.sets(st.integers(1, 12), max_size=2), st.integers(0, 9))
def test_requests_are_drawn_by_their_own_tokens_whatever_dies(rounds, max_rows, deaths, seed):
    with pytest.MonkeyPatch.context() as patch:
        turns = Turns(worker_of(patch), seed, max_rows, deaths)
        checked = []
        requests = VllmRequests(turns, {"w": 0}, 0, size=SIZE, most_waiting=None, check_inputs=checked.append)
        assert (requests.together, requests.limit) == ((), 60)
        asked, drawn, kept, open_names, finished, version = {}, {}, {}, [], {}, 0

        def step():
            result = requests.step()
            assert result.drawn.version == version
            for name, *token in zip(*result.drawn[:4], strict=True):
                drawn.setdefault(name, []).append((*token, version))
            for one in result.finished:
                open_names.remove(one.name)
                finished[one.name] = one
                request, before = asked[one.name]
                if request.keep:
                    kept[one.name] = (*before, *one.tokens.tolist())
            assert (requests.counts.open, requests.counts.kept) == (len(open_names), len(kept))

        for each, steps, event, number in rounds:
            new = []
            for one in each:
                after = None if one["on"] is None or not kept else [*kept][one["on"] % len(kept)]
                request = Request(
                    name=f"{len(asked)}",
                    ids=one["ids"],
                    sampling=attrs.evolve(one["sampling"], max_tokens=one["most"]),
                    key=Key(3),
                    row=one["row"],
                    position=one["position"],
                    after=after,
                    keep=one["keep"],
                )
                asked[request.name] = request, (*(kept[after] if after else ()), *one["ids"])
                open_names.append(request.name)
                new.append(request)
            requests.add(new)
            assert requests.counts.waiting >= len(new)
            for _ in range(steps):
                step()
            if event == "update":
                version += 1
                requests.update({"w": version}, version)
                assert turns.begun[-1] == ({"w": version}, version)
            elif event == "cancel" and open_names:
                requests.cancel([open_names[number % len(open_names)], "nobody"])
                step()
            elif event == "release" and kept:
                name = [*kept][number % len(kept)]
                del kept[name]
                requests.release([name, "nobody"])
        for _ in range(150):
            if open_names:
                step()
        assert not open_names
        assert len(checked) == len(asked)
        died = bool(deaths) and turns.turns >= min(deaths)
        assert died or not turns.host._llm.llm_engine.has_unfinished_requests() or requests._gone
    for name, one in finished.items():
        check(asked[name], one, drawn.get(name, []))


def check(asked, one, told):
    request, before = asked
    tokens = one.tokens.tolist()
    assert tokens == [token for token, *_ in told]
    assert one.versions.tolist() == [version for *_, version in told]
    torch.testing.assert_close(one.log_probs, torch.tensor([x for _, x, *_ in told]), rtol=0, atol=0)
    torch.testing.assert_close(one.sampling_log_probs, torch.tensor([x for _, _, x, _ in told]), rtol=0, atol=0)
    stops = False
    for i, (*found, version) in enumerate(told):
        how = attrs.evolve(request.sampling, max_tokens=1, stop_texts=None)
        place = request.position + i
        ((token, log_prob, other),), stops = by_hand(
            version, [*before, *tokens[:i]], request.key, request.row, place, how
        )
        assert found[0] == token
        assert found[1:] == pytest.approx([log_prob, other], abs=1e-5)
        texts = request.sampling.stop_texts
        if texts is not None:
            said = b"".join(PIECES[x] for x in tokens[: i + 1])
            stops = any(text in said for text in texts.texts)
        assert not stops or i == len(told) - 1
    most = request.sampling.max_tokens
    assert one.end == ("stop" if stops else "length" if len(tokens) == most else "cancelled")


def test_what_goes_through_the_model_is_counted_without_what_was_cached():
    with pytest.MonkeyPatch.context() as patch:
        turns = Turns(worker_of(patch), 0, 4, ())
        requests = VllmRequests(turns, {}, 0, size=SIZE, most_waiting=None, check_inputs=lambda request: None)
        how = {"key": Key(0), "sampling": Sampling(max_tokens=3)}
        requests.add([Request(name="a", ids=(3, 4, 5, 6), keep=True, **how)])
        found = []
        while requests.counts.open:
            found += requests.step().finished
        requests.add([Request(name="b", ids=(7,), after="a", **how)])
        while requests.counts.open:
            found += requests.step().finished
    assert [one.fed for one in found] == [4 - 1 + 2, 8 - 1 + 2]  # one token is cached each time


def test_images_stay_with_their_rows_and_what_it_cannot_do_is_refused():
    class Noting:
        limit = 20

        def __init__(self):
            self.new = []

        def begin(self, params, version):
            pass

        def turn(self, new, ended):
            self.new += new
            return [
                SimpleNamespace(
                    number=row.number, tokens=[4], log_probs=[0.0], sampling_log_probs=[0.0], ended=True, cached=0
                )
                for row in new
            ]

    turns = Noting()
    requests = VllmRequests(turns, {}, 0, size=SIZE, most_waiting=2, check_inputs=lambda request: None)
    how = {"key": Key(0), "sampling": Sampling(max_tokens=3)}
    seen = object()
    requests.add([Request(name="a", ids=(3,), inputs=seen, keep=True, **how)])
    requests.step()
    requests.add([Request(name="b", ids=(5,), after="a", **how)])
    requests.step()
    assert [row.inputs for row in turns.new] == [seen, seen]
    assert [[*row.tokens] for row in turns.new] == [[3], [3, 4, 5]]
    for wrong, text in (
        ({"ids": (SIZE,)}, "vocabulary of 31"),
        ({"ids": (3,) * 18}, "vLLM was started for max_model_len = 20"),
        ({"scores": Scores(drawn_top=1)}, "scores is for"),
        ({"adapter": "x"}, "adapter is for"),
        ({"after": "nobody"}, "is not kept"),
    ):
        with pytest.raises(ValueError, match=text):
            requests.add([Request(**{"name": "c", "ids": (3,), **how, **wrong})])
    requests.add([Request(name="d", ids=(3,) * 17, **how), Request(name="e", ids=(3,), **how)])
    with pytest.raises(QueueFull, match="3 requests would wait, and at most 2 may"):
        requests.add([Request(name="f", ids=(3,), **how)])
    assert requests.counts == (2, 0, 1)


class Script:
    """`VllmTurns` whose rows draw the same tokens for ever, until they are ended."""

    limit = 20

    def __init__(self, tokens):
        self.tokens, self.drawn, self.asked = tokens, {}, []

    def begin(self, params, version):
        pass

    def turn(self, new, ended):
        self.asked += [row.number for row in new]
        self.drawn = {number: n for number, n in self.drawn.items() if number not in ended}
        self.drawn |= {row.number: 0 for row in new}
        found = [HostDraws(number, [self.tokens[n]], [-1.0], [-1.0], False, 0) for number, n in self.drawn.items()]
        self.drawn = {number: n + 1 for number, n in self.drawn.items()}
        return found


def test_a_row_that_a_text_or_its_asker_ends_is_drawn_no_further():
    turns = Script([5, 4, 6, 6, 6, 6, 6, 6])  # as text "bac..."
    requests = VllmRequests(turns, {}, 0, size=SIZE, most_waiting=None, check_inputs=lambda request: None)
    by_text = Sampling(max_tokens=8, stop_texts=StopTexts((b"ba",), PIECES))
    requests.add([Request(name="a", ids=(3,), sampling=by_text, key=Key(0), keep=True)])
    requests.add([Request(name="b", ids=(3,), sampling=Sampling(max_tokens=8), key=Key(0))])
    assert not requests.step().finished
    (a,) = requests.step().finished
    assert (a.name, a.tokens.tolist(), a.end) == ("a", [5, 4], "stop")
    requests.add([Request(name="c", ids=(3,), sampling=by_text, key=Key(0))])
    requests.cancel(["c"])
    (c,) = requests.step().finished
    assert (c.name, c.tokens.tolist(), c.end) == ("c", [], "cancelled")
    assert (turns.drawn, turns.asked) == ({1: 3}, [0, 1])  # vLLM has been told that the first is over
    assert requests.counts == (0, 1, 1)
    requests.release(["a", "nobody"])
    assert requests.counts == (0, 1, 0)
    with pytest.raises(ValueError, match="after = 'a' is not kept"):
        requests.add([Request(name="d", ids=(3,), after="a", sampling=by_text, key=Key(0))])


@pytest.mark.parametrize("inputs", [None, [None, None]])
def test_images_of_earlier_rows_are_forgotten_where_rows_may_have_some(inputs):
    with pytest.MonkeyPatch.context() as patch:
        llm = StandIn(worker_of(patch))
        rows = {"prompts": [[3], [4]], "row_ids": torch.arange(2), "inputs": inputs}
        host_of(local, llm).generate(HostBatch(sampling=Sampling(max_tokens=1), key=Key(0), **rows), lambda *_: None)
        assert llm.llm_engine.forgotten == (inputs is not None)


@pytest.mark.parametrize(
    ("workers", "digests", "unfilled"),
    [
        ([({"a": "1", "b": "2"}, ["y"]), ({"a": "1", "b": "2"}, ["x", "y"])], {"a": "1", "b": "2"}, ["x", "y"]),
        ([({"a": "1", "b": "2"}, []), ({"a": "3"}, [])], {"a": "1|3"}, []),
    ],
)
def test_digests_are_those_on_which_all_workers_agree(workers, digests, unfilled):
    with pytest.MonkeyPatch.context() as patch:
        llm = StandIn(worker_of(patch))
        llm.collective_rpc = lambda method, args=(): workers
        assert host_of(local, llm).end_load() == (digests, unfilled)
