"""Each draw of the embedded engine, asked at once or by requests as they come, against its definition."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.models.precision import KeepDouble
from fppo.rollout import drawn as drawing
from fppo.rollout import places
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.interrupt import InterruptibleEngine
from fppo.rollout.requests import Request
from fppo.rollout.sampling import draw, process_logits
from fppo.rollout.scores import Scores
from tests.models.families import make, plain
from tests.models.hybrids import HYBRIDS
from tests.rollout.test_embedded import PAD, STOPS, engine_of, make_prompts

PIECES = tuple(bytes([97 + i % 4]) for i in range(31))
SAMPLINGS = (
    Sampling(stop_token_ids=STOPS),
    Sampling(temperature=0.7, top_k=9, top_p=0.8),
    Sampling(temperature=1.7, stop_texts=StopTexts((b"ba", b"cc"), PIECES)),
    Sampling(greedy=True, temperature=0.5),
    Sampling(top_p=0.6, stop_token_ids=STOPS),
    Sampling(min_p=0.4, stop_token_ids=STOPS),
)
TOKEN_BYTES = 2 * 2 * 4 * 8 * 2  # two layers' keys and values, 2 heads of 4 numbers


@cache
def policies(name: str) -> tuple[Any, list[Any], list[Any]]:
    """A model, the parameters of three versions of it, and transformers' modules of these."""
    model, first = make(name, config=HYBRIDS.get(name))
    g = torch.Generator().manual_seed(2)
    versions = [first]
    for _ in range(2):
        versions.append({n: x + 0.1 * torch.randn(x.shape, generator=g).double() for n, x in first.items()})
    return model, versions, [plain(model, params) for params in versions]


REQUEST = st.fixed_dictionaries(
    {
        "ids": st.sampled_from([(3, 4), (3, 4), (7,), (11, 12, 13, 14, 15, 6, 7, 8, 3, 17)]),
        "sampling": st.sampled_from(SAMPLINGS),
        "most": st.integers(1, 6),
        "row": st.integers(0, 2),
        "position": st.sampled_from([0, 0, 3]),
        "on": st.sampled_from([None, None, 0, 1]),  # which of those that are kept it goes on after
        "keep": st.booleans(),
        "scores": st.sampled_from([None, None, Scores(prompt=True), Scores(prompt=True, drawn_top=2)]),
        "owner": st.sampled_from([None, "one"]),
    }
)
EVENTS = st.sampled_from([None, None, "update", "cancel", "release"])
ROUNDS = st.lists(
    st.tuples(st.lists(REQUEST, max_size=4), st.integers(0, 5), EVENTS, st.integers(0, 5)), min_size=1, max_size=5
)


class Script:
    """Requests to an open engine, and all that it told of them."""

    def __init__(self, requests: Any, versions: list[Any]) -> None:
        self.requests, self.versions, self.version = requests, versions, 0
        self.asked: dict[str, tuple[Request, tuple[int, ...]]] = {}  # with all tokens before its draws
        self.open: list[str] = []
        self.drawn: dict[str, list[tuple[int, float, float, int]]] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        self.finished: dict[str, Any] = {}

    def add(self, each: list[dict[str, Any]]) -> None:
        new: list[Request] = []
        for one in each:
            names = [*self.kept]
            after = None if one["on"] is None or not names else names[one["on"] % len(names)]
            scores = one["scores"]
            if scores is not None and after is not None:
                scores = Scores(drawn_top=2)
            request = Request(
                name=f"{len(self.asked)}",
                ids=one["ids"] if after is None else one["ids"][: one["row"] * 5],
                sampling=attrs.evolve(one["sampling"], max_tokens=one["most"]),
                key=Key(3),
                row=one["row"],
                position=one["position"],
                after=after,
                keep=one["keep"],
                scores=scores if scores is None or len(one["ids"]) > 1 or after else None,
                owner=one["owner"],
            )
            self.asked[request.name] = request, (*(self.kept[after] if after else ()), *request.ids)
            self.open.append(request.name)
            new.append(request)
        self.requests.add(new)

    def step(self) -> None:
        drawn, finished = self.requests.step()
        assert drawn.version == self.version
        for name, *token in zip(drawn.names, drawn.tokens, drawn.log_probs, drawn.sampling_log_probs, strict=True):
            self.drawn.setdefault(name, []).append((*token, self.version))
        for one in finished:
            self.open.remove(one.name)
            self.finished[one.name] = one
            request, before = self.asked[one.name]
            if request.keep:
                self.kept[one.name] = (*before, *one.tokens.tolist())
        counts = self.requests.counts
        assert counts.open == len(self.open)
        assert counts.kept == len(self.kept)

    def happens(self, event: str | None, number: int) -> None:
        if event == "update":
            self.version += 1
            self.requests.update(self.versions[self.version % 3], self.version)
        elif event == "cancel" and self.open:
            self.requests.cancel([self.open[number % len(self.open)], "nobody"])
            self.step()
        elif event == "release" and self.kept:
            name = [*self.kept][number % len(self.kept)]
            del self.kept[name]
            self.requests.release([name, "nobody"])


def length_of(tokens: list[int], how: Sampling) -> tuple[int, bool]:
    """The length of the response that these tokens begin with, and whether it stops there."""
    for end in range(1, len(tokens) + 1):
        said = b"".join(PIECES[token] for token in tokens[:end])
        if tokens[end - 1] in how.stop_token_ids or (how.stop_texts and any(x in said for x in how.stop_texts.texts)):
            return end, True
    return len(tokens), False


def whole_logits(module: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad(), KeepDouble():
        return module(input_ids=torch.tensor([ids])).logits[0]


def likeliest(module: Any, row: int, ids: list[int], most: int) -> list[int]:
    """A draft of the likeliest tokens, those that greedy rows draw from this module."""
    draft = list[int]()
    for _ in range(most):
        draft.append(int(whole_logits(module, [*ids, *draft])[-1].argmax()))
    return draft


def check_draw(logits: torch.Tensor, number: torch.Tensor, how: Sampling, found: tuple[int, float, float]) -> None:
    """A token and its two log-probs are those that the uniform number draws from logits [V]."""
    token, log_prob, other = found
    assert int(draw(logits[None], number[None], how).tokens) == token
    assert log_prob == pytest.approx(float((logits / how.temperature).log_softmax(-1)[token]), abs=1e-9)
    cut = process_logits(logits[None], how).log_softmax(-1)[0, token]
    assert other == pytest.approx(0.0 if how.greedy else float(cut), abs=1e-9)


def check(script: Script, name: str, modules: list[Any]) -> None:
    """A request that ended has the draws of its definition, under the weights of the step that drew each."""
    (request, before), one = script.asked[name], script.finished[name]
    how, told = request.sampling, script.drawn.get(name, [])
    tokens = one.tokens.tolist()
    assert tokens == [token for token, *_ in told]
    assert one.log_probs.tolist() == [x for _, x, *_ in told]
    assert one.sampling_log_probs.tolist() == [x for *_, x, _ in told]
    assert one.versions.tolist() == [version for *_, version in told]
    assert one.log_probs.dtype == torch.float64
    length, stops = length_of(tokens, how)
    assert length == len(tokens) <= how.max_tokens
    if one.end == "cancelled":
        assert not stops
        assert length < how.max_tokens
    else:
        assert one.end == ("stop" if stops else "length")
        assert stops or length == how.max_tokens
    of = {v: whole_logits(modules[v % 3], [*before, *tokens]) for v in {version for *_, version in told}}
    numbers = request.key.uniform(torch.tensor([request.row]), torch.arange(length) + request.position)[0]
    for i, (*found, version) in enumerate(told):
        check_draw(of[version][len(before) - 1 + i], numbers[i], how, tuple(found))
    check_scores(request, one, before, [(of[version], token) for token, *_, version in told])


def check_scores(request: Request, one: Any, before: tuple[int, ...], drawn: list[tuple[torch.Tensor, int]]) -> None:
    scores = request.scores
    assert (one.drawn_scores is not None) == (scores is not None and scores.drawn_top > 0)
    for i, (logits, token) in enumerate(drawn if one.drawn_scores is not None else ()):
        expected = logits[len(before) - 1 + i].log_softmax(-1)
        assert float(one.drawn_scores.log_probs[i]) == pytest.approx(float(expected[token]), abs=1e-9)
        assert one.drawn_scores.top.ids[i].tolist() == expected.topk(2).indices.tolist()
        torch.testing.assert_close(one.drawn_scores.top.log_probs[i], expected.topk(2).values, rtol=0, atol=1e-9)
    if scores is None or not scores.prompt:
        assert one.prompt_scores is None
    elif drawn:  # by the weights that drew the first token
        given = torch.tensor(before)[1:, None]
        expected = drawn[0][0].log_softmax(-1)[: len(given)].gather(1, given)[:, 0]
        torch.testing.assert_close(one.prompt_scores.log_probs[1:], expected, rtol=0, atol=1e-9)
        assert one.prompt_scores.log_probs[:1].isnan().all()


@pytest.mark.slow
@settings(max_examples=30)
@given(
    ROUNDS,
    st.sampled_from(["qwen2", "qwen2", "mistral", "gemma2", "lfm2"]),
    st.sampled_from([1, 2, 1024]),
    st.sampled_from([1, 9, 1024]),
    st.sampled_from([1, 4, 128]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 4]),
)
def test_draws_of_requests_are_by_their_own_tokens_keys_and_weights(
    rounds, name, max_rows, prefill, chunk, graphs, bounded, drafts
):
    model, versions, modules = policies(name)
    how = {"graphs": True} if graphs and name in ("qwen2", "mistral") else {}
    if drafts and not how and name != "lfm2":
        how = {"draft_tokens": drafts, "drafter": lambda: partial(likeliest, modules[0])}
    if bounded and name == "qwen2":
        how["cache_bytes"] = 120 * TOKEN_BYTES
    engine = engine_of(model, max_rows=max_rows, prefill_tokens=prefill, **how)
    with pytest.MonkeyPatch.context() as patch:
        for module in (places, drawing):
            patch.setattr(module, "CHUNK", chunk)
        with engine.open(versions[0]) as requests:
            script = Script(requests, versions)
            for each, steps, event, number in rounds:
                script.add(each)
                for _ in range(steps):
                    script.step()
                script.happens(event, number)
                assert requests.counts.drawing <= max_rows
            for _ in range(200):
                if script.open:
                    script.step()
            assert not script.open
    for each in script.finished:
        check(script, each, modules)


ASKS = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 9), min_size=1, max_size=4),
        "n": st.integers(1, 3),
        "most": st.integers(1, 12),
        "limits": st.none() | st.lists(st.integers(1, 14), min_size=4, max_size=4),
        "sampling": st.sampled_from(SAMPLINGS),
        "offset": st.sampled_from([0, 0, 3]),
        "heard": st.booleans(),
        "extra": st.integers(0, 1),
    }
)
HOW = st.fixed_dictionaries(
    {
        "max_rows": st.sampled_from([1, 2, 5, 1024]),
        "prefill_tokens": st.sampled_from([1, 8, 1024]),
        "graphs": st.booleans(),
        "cache_bytes": st.sampled_from([None, None, 1, 4]),  # rows
        "every": st.sampled_from([None, None, 1, 2, 5]),  # so many tokens newer weights are looked for
    }
)


class Newer:
    """Weights that are newer every second time that somebody looks."""

    def __init__(self, versions: list[Any]) -> None:
        self.versions, self.looks = versions, 0

    def __call__(self) -> tuple[Any, int] | None:
        self.looks += 1
        number = (self.looks - 1) // 2
        return None if self.looks % 2 == 0 else (self.versions[number % 3], 3 + number)


@pytest.mark.slow
@settings(max_examples=30)
@given(ASKS, HOW, st.sampled_from(["qwen2", "qwen2", "mistral", "gemma2", "lfm2"]), st.sampled_from([2, 5, 128]))
def test_draws_of_a_whole_rollout_are_by_their_own_tokens_and_numbers(asked, how, name, chunk):
    """However many share a wave, a pass or a step, and whatever leaves: rows end by themselves, and are told of."""
    model, versions, modules = policies(name)
    every = None if asked["sampling"].greedy else how["every"]
    how = {key: x for key, x in how.items() if key != "every"}
    count, most, n = len(asked["lengths"]), asked["most"], asked["n"]
    sampling = attrs.evolve(asked["sampling"], n=n, max_tokens=most)
    given_limits = asked["limits"] and asked["limits"][:count]
    limits = [min(most, x) for x in given_limits] if given_limits else [most] * count
    if name not in ("qwen2", "mistral"):
        how = how | {"graphs": False}
    if how["cache_bytes"] is not None:
        row = max(asked["lengths"]) + max(limits)
        fits = name == "qwen2" and not how["graphs"]
        how = how | {"cache_bytes": how["cache_bytes"] * row * TOKEN_BYTES if fits else None}
    heard: dict[int, tuple[list[int], str]] = {}

    def on_finished(row: int, ids: list[int], why: str) -> None:
        assert row not in heard
        heard[row] = ids, why

    prompts = make_prompts(asked["lengths"], extra=asked["extra"], seed=sum(asked["lengths"]))
    ask = Ask(prompts, sampling, Key(6), version=3, offset=asked["offset"])
    ask = attrs.evolve(ask, limits=None if given_limits is None else torch.tensor(given_limits))
    ask = attrs.evolve(ask, on_finished=on_finished if asked["heard"] else None)
    engine = engine_of(model, **how)
    if every is not None:
        engine = InterruptibleEngine(engine=engine, every=every, pad_token_id=PAD)
        ask = attrs.evolve(ask, newer=Newer(versions))
    with pytest.MonkeyPatch.context() as patch:
        for module in (places, drawing):
            patch.setattr(module, "CHUNK", chunk)
        rollout = engine.generate(versions[0], ask)
    assert (rollout.token_versions is None) == (every is None)
    assert rollout.versions.tolist() == [3] * len(rollout.tokens)
    width = rollout.response_mask.shape[1]
    assert rollout.row_ids.tolist() == [x * n + j for x in prompts.row_ids.tolist() for j in range(n)]
    for row, (mask, ids) in enumerate(zip(rollout.response_mask, rollout.tokens, strict=True)):
        length = int(mask.sum())
        tokens, before = ids[-width:][:length].tolist(), ids[:-width][rollout.attention_mask[row, :-width]].tolist()
        assert before == prompts.tokens[row // n][prompts.attention_mask[row // n]].tolist()
        assert mask.tolist() == [True] * length + [False] * (width - length)
        found, stops = length_of(tokens, sampling)
        assert found == length <= limits[row // n]
        assert stops or length == limits[row // n]
        assert rollout.finish[row] == ("stop" if stops else "length")
        assert not asked["heard"] or heard[row] == (tokens, rollout.finish[row])
        drawn_by = [0 if every is None else i // every // 2 for i in range(length)]
        if every is not None:
            assert rollout.token_versions[row].tolist() == [*(3 + x for x in drawn_by), *[0] * (width - length)]
        of = {x: whole_logits(modules[x % 3], [*before, *tokens])[len(before) - 1 :] for x in {*drawn_by}}
        numbers = Key(6).uniform(rollout.row_ids[row : row + 1], torch.arange(length) + asked["offset"])[0]
        columns = rollout.rollout_log_probs[row].tolist(), rollout.sampling_log_probs[row].tolist()
        for i, each in enumerate(zip(tokens, *columns, strict=False)):
            check_draw(of[drawn_by[i]][i], numbers[i], sampling, each)
    assert width == int(rollout.response_mask.sum(1).max())
