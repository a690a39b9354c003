"""Drafts change neither tokens nor log-probs, whatever is drafted; they only make passes fewer."""

import random
from functools import cache

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.batch import Column
from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.rollout import drawn as drawing
from fppo.rollout import places
from fppo.rollout.drafts import DraftLength, text_drafts
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.requests import Request
from fppo.tree import replace
from fppo_kernels.table import Kernels, needs_cpp
from tests.models.families import make
from tests.models.hybrids import HYBRIDS
from tests.rollout.talks import same, talks, told, with_samplings
from tests.rollout.test_embedded import STOPS, engine_of, make_prompts
from tests.rollout.test_exact import engine_of as exact_engine_of
from tests.rollout.test_tensor import on_ranks

PIECES = tuple(b"abcdefgh"[i % 8 : i % 8 + 1] for i in range(31))
SAMPLINGS = (
    Sampling(max_tokens=14, stop_token_ids=STOPS),
    Sampling(max_tokens=9, temperature=0.7, top_k=9, top_p=0.8, n=3),
    Sampling(max_tokens=12, greedy=True),
    Sampling(max_tokens=12, n=2, min_p=0.1, stop_texts=StopTexts((b"ce", b"dd"), PIECES)),
)
COLUMNS = ("rollout_log_probs", "sampling_log_probs")


def rows_of(rollout):
    return [ids[mask.bool()].tolist() for ids, mask in zip(rollout.tokens, rollout.attention_mask, strict=True)]


def foretelling(rollout, wrong, seed, longer=0):
    """Drafts that know what will be drawn, but for a share of `wrong` tokens; some are too long, or end early."""
    texts = rows_of(rollout)

    def drafter():
        chance = random.Random(seed)

        def draft(row, ids, most):
            rest = next((text[len(ids) :] for text in texts if text[: len(ids)] == [*ids]), [])
            own = [(token + 1) % 31 if chance.random() < wrong else token for token in rest[: most + longer]]
            return own[: chance.randrange(len(own) + 1)] if wrong else own

        return draft

    return drafter


def guessing(seed):
    def drafter():
        chance = random.Random(seed)
        return lambda row, ids, most: [chance.randrange(31) for _ in range(chance.randrange(most + 3))]

    return drafter


@cache
def reference(name, number, order):
    model, params = make(name)
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(order))
    prompts = make_prompts([(4, 1, 7, 2, 5, 7)[i] for i in rows.tolist()], row_ids=rows)
    ask = Ask(prompts, SAMPLINGS[number], Key(3))
    return model, params, ask, engine_of(model).generate(params, ask)


def agree(found, expected, atol=1e-10):
    assert rows_of(found) == rows_of(expected)
    assert found.finish == expected.finish
    for name in COLUMNS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=atol)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(["qwen2", "qwen2", "mistral", "gemma3", "gpt2", "gpt_oss", "qwen3_moe"]),
    number=st.integers(0, len(SAMPLINGS) - 1),
    order=st.integers(0, 1),
    most=st.integers(1, 6),
    drafter=st.sampled_from(["right", "often right", "too long", "guesses", "texts"]),
    max_rows=st.sampled_from([1, 4, 1024]),
    chunk=st.sampled_from([2, 5, 128]),
    lag=st.sampled_from([0, 3, 64]),
    kernel=st.sampled_from(["sdpa", "eager", "cpp"]),
)
def test_drafts_change_nothing(name, number, order, most, drafter, max_rows, chunk, lag, kernel):
    model, params, ask, expected = reference(name, number, order)
    drafters = {
        "right": lambda: foretelling(expected, 0.0, 0),
        "often right": lambda: foretelling(expected, 0.2, 1),
        "too long": lambda: foretelling(expected, 0.1, 2, longer=5),
        "guesses": lambda: guessing(3),
        "texts": lambda: text_drafts,
    }
    kernel = "eager" if kernel == "cpp" and needs_cpp() is not None else kernel
    engine = engine_of(model, max_rows=max_rows, draft_tokens=most, drafter=drafters[drafter]())
    engine = attrs.evolve(engine, kernels=Kernels.named(decode_attention=kernel))
    with pytest.MonkeyPatch.context() as patch:
        for module in (places, drawing):
            patch.setattr(module, "CHUNK", chunk)
        patch.setattr(places, "_LAG", lag)
        agree(engine.generate(params, ask), expected)


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
def test_a_stop_inside_a_draft_ends_the_row(number):
    model, params, ask, expected = reference("qwen2", number, 0)
    for drafter in (foretelling(expected, 0.0, 0), foretelling(expected, 0.3, 1)):
        engine = engine_of(model, draft_tokens=6, drafter=drafter)
        agree(engine.generate(params, ask), expected)


def answers(engine, params, requests):
    with engine.open(params) as opened:
        opened.add(requests)
        finished, steps, streamed = {}, 0, {}
        while opened.counts.open:
            result = opened.step()
            steps += 1
            for name, token in zip(result.drawn.names, result.drawn.tokens, strict=True):
                streamed.setdefault(name, []).append(token)
            finished |= {one.name: one for one in result.finished}
    assert {name: one.tokens.tolist() for name, one in finished.items()} == streamed
    return finished, steps


def test_right_drafts_take_few_passes_and_all_count():
    model, params, ask, expected = reference("qwen2", 2, 0)  # greedy: 12 tokens
    texts = rows_of(expected)
    requests = [
        Request(name=str(i), ids=text[:-12], sampling=ask.sampling, key=Key(3), row=i) for i, text in enumerate(texts)
    ]
    engine = engine_of(model, draft_tokens=8, drafter=foretelling(expected, 0.0, 0))
    found, steps = answers(engine, params, requests)
    assert [found[str(i)].tokens.tolist() for i in range(len(texts))] == [text[-12:] for text in texts]
    assert steps == 1 + 3  # the prompt's, and passes of 1 + 2, 1 + 4, and the other 3
    assert {one.drafts for one in found.values()} == {(8, 8)}
    assert [found[str(i)].fed for i in range(len(texts))] == [len(text) - 1 for text in texts]
    assert expected.drafts is None
    assert engine.generate(params, ask).drafts.tolist() == [[8, 8]] * len(texts)


def earlier_of(rollout, n):
    """The responses of a rollout as earlier ones of its prompts, of which each has `n`."""
    pairs = zip(rollout.tokens, rollout.response_mask, strict=True)
    rows = [ids[-len(mask) :][mask].tolist() for ids, mask in pairs]
    return Column([rows[first : first + n] for first in range(0, len(rows), n)])


def test_earlier_responses_are_drafted():
    """Responses to the same prompt come true; to other prompts, and odd ones, they change nothing."""
    model, params, ask, expected = reference("qwen2", 1, 0)
    engine, own = engine_of(model, draft_tokens=6), earlier_of(expected, 3)
    accepted = []
    for earlier in (None, own, own[::-1], Column([[[1], []]] * 6)):
        found = engine.generate(params, attrs.evolve(ask, prompts=replace(ask.prompts, earlier=earlier)))
        agree(found, expected)
        accepted.append(int(found.drafts[:, 1].sum()))
    assert accepted[1] > 80 > 20 > max(accepted[0], *accepted[2:])  # of 162


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [text_drafts, guessing(0)], ids=["texts", "guesses"])
def test_talks_are_those_without_drafts(drafter):
    """Rows of several turns come and go; each has a sampling of its own."""
    model, params = make("qwen2")
    hot = Sampling(max_tokens=7, temperature=1.5, stop_token_ids=STOPS)
    rows = with_samplings(talks(samples=3), hot, Sampling(max_tokens=9, greedy=True), attrs.evolve(hot, top_k=3))
    expected, _ = told(engine_of(model), params, rows)
    for most, max_rows in ((2, 1024), (5, 3)):
        engine = engine_of(model, draft_tokens=most, drafter=drafter, max_rows=max_rows)
        found, _ = told(engine, params, rows, delay=lambda row, turn: (5 * row + turn) % 4)
        same(found, expected)


@pytest.mark.skipif(needs_cpp() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["qwen3", pytest.param("mistral", marks=pytest.mark.slow)])
def test_exact_engines_keep_their_bits(name):
    engine, params = exact_engine_of(name)
    ask = Ask(make_prompts(), Sampling(max_tokens=12, n=2), Key(0))
    expected = engine.generate(params, ask)
    for drafter in (foretelling(expected, 0.2, 0), guessing(1)):
        agree(attrs.evolve(engine, draft_tokens=4, drafter=drafter).generate(params, ask), expected, atol=0.0)
    again = attrs.evolve(ask, prompts=replace(ask.prompts, earlier=earlier_of(expected, 2)))
    found = attrs.evolve(engine, draft_tokens=4).generate(params, again)
    agree(found, expected, atol=0.0)
    assert int(found.drafts[:, 1].sum()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_ranks_of_a_tensor_axis_keep_the_same_drafts(name):
    """By a decoder, and by the modules of a family that has none."""
    model, params, ask, expected = reference(name, 0, 0)
    drafter = foretelling(expected, 0.2, 0)
    for rollout, *_ in on_ranks(model, params, {"tensor": 2}, ask, draft_tokens=4, drafter=drafter):
        agree(rollout, expected)
        assert rollout.drafts[:, 1].sum() > 0


def last_occurrence(texts, ids, most):
    """What `text_drafts` says of texts that are all known before: by search from the end."""
    for size in (4, 3, 2):
        gram = ids[-size:]
        for place in range(len(ids) - 1, size - 1, -1):
            if len(gram) == size and ids[place - size : place] == gram:
                period = len(ids) - place
                return [ids[place + i % period] for i in range(most)]
    return []


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 6), st.integers(0, 30))
def test_text_drafts_are_what_followed_before(ids, most, known):
    draft, own = text_drafts(), list[int]()
    own += ids[:known]
    draft(0, own, most)
    own += ids[known:]
    assert [*draft(0, own, most)] == last_occurrence([], own, most)


def test_text_drafts_read_the_other_rows_of_a_prompt():
    draft = text_drafts()
    first, second = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3]
    assert not draft(0, first, 3)
    assert draft(1, second, 3) == [4, 5, 6]
    second += [5, 6]
    assert draft(1, second, 3) == [7]
    second += [9, 9, 5, 6]
    assert draft(1, second, 2) == [9, 9]  # its own text is the newest
    assert text_drafts()(0, second[:5], 3) == ()  # another prompt's rows know nothing of it


def test_lengths_follow_what_was_accepted():
    length = DraftLength(8)
    found = []
    for accepted in (2, 4, 8, 8, 3, 0):
        found.append(length.next())
        length.learn(found[-1], accepted)
    assert found == [2, 4, 8, 8, 8, 3]
    pauses = [0] * 9
    for number in range(9):
        while not (size := length.next()):
            pauses[number] += 1
        length.learn(size, 0)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    while not (size := length.next()):
        pass
    assert size == 1
    length.learn(1, 1)
    assert length.next() == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"draft_tokens": -1}, "give 0 for none"),
        ({"draft_tokens": 2, "graphs": True}, "leave graphs out"),
    ],
)
def test_what_drafts_cannot_do_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        engine_of(make("qwen2")[0], **changes)


def test_models_with_states_and_routers_are_refused():
    with pytest.raises(ValueError, match=r"draft_tokens = 3: layers of model type 'lfm2' carry states"):
        engine_of(make("lfm2", config=HYBRIDS["lfm2"])[0], draft_tokens=3)
    with pytest.raises(ValueError, match="experts of drafted tokens are not reported"):
        engine_of(make("qwen3_moe")[0], draft_tokens=3, routed=True)


def test_a_drafter_with_foreign_tokens_is_named():
    model, params, ask, _ = reference("qwen2", 0, 0)
    engine = engine_of(model, draft_tokens=2, drafter=lambda: lambda row, ids, most: [31])
    with pytest.raises(ValueError, match=r"drafter: it drafted \[31\] for request '0', tokens that"):
        engine.generate(params, ask)
