"""Requests to an engine that only generates: each is answered as if it were alone, whatever is answered with it."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.data.stops import StopTexts
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.generated import opened
from fppo.rollout.records import Response, number_rows, rollout_of
from fppo.rollout.requests import QueueFull, Request
from fppo.rollout.scores import Scores

LETTERS = tuple(bytes([97 + token]) for token in range(26))
SAMPLINGS = (
    Sampling(stop_token_ids=(3, 5)),
    Sampling(stop_token_ids=(3,)),
    Sampling(temperature=0.5, stop_token_ids=(3, 5)),
    Sampling(top_k=4, stop_token_ids=(3, 5)),
    Sampling(top_p=0.5, stop_token_ids=(3, 5)),
    Sampling(min_p=0.5, stop_token_ids=(3, 5)),
    Sampling(greedy=True, stop_token_ids=(3, 5)),
    Sampling(stop_texts=StopTexts((b"e",), LETTERS)),
    Sampling(stop_texts=StopTexts((b"g",), LETTERS)),
)


def told(sampling):
    """A number in which samplings differ."""
    cut = (sampling.top_k or 0) + 2 * sampling.top_p + 16 * sampling.min_p
    return sampling.temperature + cut + 7 * sampling.greedy


def alone(prompt, key, row, position, sampling, most):
    """The answer to a prompt: tokens by it, the key, the row and the position; their log-probs by the sampling too."""
    draws = key.uniform(torch.tensor([row]), torch.arange(position, position + most))[0].tolist()
    tokens = []
    for draw in draws:
        tokens.append((int(20 * draw) + sum(prompt)) % 20)
        stopped = tokens[-1] in sampling.stop_token_ids
        if stopped or (sampling.stop_texts is not None and sampling.stop_texts.last(tokens) is not None):
            return tokens, "stop"
    return tokens, "length"


def newer(prompt):
    """How much newer than the asked version the weights are that answer a prompt: those of long ones came meanwhile."""
    return int(len(prompt) > 4)


class Generating:
    """An engine that answers prompts at once, with experts where it tells these, and a version for each token."""

    def __init__(self, *, routed, versioned):
        self.routed, self.versioned, self.asked = routed, versioned, []

    def generate(self, params, ask):
        self.asked.append(ask)
        n, prompts, answers = ask.sampling.n, ask.prompts, list[Response]()
        rows = number_rows(ask, torch.device("cpu"))
        for place, row in enumerate(rows.tolist()):
            prompt = prompts.tokens[place // n][prompts.attention_mask[place // n]].tolist()
            most = min(ask.sampling.max_tokens, int(ask.limits[place // n]))
            own, end = alone(prompt, ask.key, row, ask.offset, ask.sampling, most)
            tokens = torch.tensor(own)
            log_probs = -tokens / 8.0 - told(ask.sampling) - params["x"]
            experts = torch.tensor([*prompt, *own][:-1]).to(torch.uint8)[:, None, None] if self.routed else None
            answers.append(Response(tokens, log_probs, 2 * log_probs, end, experts=experts))
        made = rollout_of(ask, answers, pad_token_id=0, device=torch.device("cpu"))
        if not self.versioned:
            return made
        later = torch.tensor(
            [newer(prompts.tokens[place // n][prompts.attention_mask[place // n]]) for place in range(len(rows))]
        )
        versions = (ask.version + later[:, None]).int().where(made.response_mask, 0)
        return attrs.evolve(made, token_versions=versions)


REQUEST = st.tuples(
    st.sampled_from([(4,), (4, 6), (9, 9, 9)]),
    st.sampled_from(SAMPLINGS),
    st.integers(1, 5),
    st.integers(0, 1),
    st.integers(0, 5),
    st.sampled_from([0, 0, 3]),
    st.sampled_from(["fresh", "fresh", "on", "cancel"]),
    st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=80)
@given(st.lists(st.lists(REQUEST, max_size=6), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_each_request_is_answered_as_if_it_were_alone(rounds, routed, versioned):
    engine = Generating(routed=routed, versioned=versioned)
    version, held, images = 5, {}, object()
    with opened(engine, {"x": torch.tensor(0.0)}, version=version, most_waiting=6) as requests:
        for number, each in enumerate(rounds):
            new, expected, kept = [], {}, dict(held)
            for place, (ids, sampling, most, key, row, position, how, keep) in enumerate(each):
                name, after = f"{number}.{place}", next(iter(held), None) if how == "on" else None
                fixed = {"sampling": attrs.evolve(sampling, max_tokens=most), "key": Key(key), "row": row}
                pictured = images if place % 2 and after is None else None
                request = Request(
                    name=name, ids=ids, position=position, after=after, keep=keep, inputs=pictured, **fixed
                )
                new.append(request)
                before, ran = held.get(after, ((), 0))
                prompt = (*before, *ids)
                if how == "cancel":
                    expected[name] = ([], "cancelled", [], 0, 0)
                    whole = prompt
                else:
                    tokens, end = alone(prompt, Key(key), row, position, sampling, most)
                    whole = (*prompt, *tokens)
                    expected[name] = (tokens, end, [*whole[ran:-1]], len(whole) - 1, newer(prompt))
                    ran = len(whole) - 1
                if keep:
                    kept[name] = (whole, ran)
            requests.add(new)
            requests.cancel([x.name for x, one in zip(new, each, strict=True) if one[-2] == "cancel"])
            waiting = sum(one[-2] != "cancel" for one in each)
            assert requests.counts == (waiting, 0, len(held) + cancelled(each))
            drawn, finished = requests.step()
            held = kept
            assert requests.counts == (0, 0, len(held))
            assert {one.name: (one.tokens.tolist(), one.end) for one in finished} == {
                name: one[:2] for name, one in expected.items()
            }
            pairs = [(name, token) for name, token in zip(drawn.names, drawn.tokens, strict=True)]
            assert sorted(pairs) == sorted((name, token) for name, one in expected.items() for token in one[0])
            assert drawn.version == version
            by_name = {request.name: request for request in new}
            for one in finished:
                expected_log_probs = -one.tokens / 8.0 - told(by_name[one.name].sampling) - number
                assert torch.equal(one.log_probs, expected_log_probs)
                assert torch.equal(one.sampling_log_probs, 2 * expected_log_probs)
                own = version + (expected[one.name][4] if versioned else 0)
                assert one.versions.tolist() == [own] * len(one.tokens)
                assert one.fed == expected[one.name][3]
                if routed and one.end != "cancelled":
                    assert one.experts.flatten().tolist() == expected[one.name][2]
            version += 1
            requests.update({"x": torch.tensor(number + 1.0)}, version)
    for ask in engine.asked:
        assert ask.prompts.inputs is None or {*ask.prompts.inputs} <= {None, images}


def cancelled(each):
    return sum(one[-2] == "cancel" and one[-1] for one in each)


def test_equal_prompts_are_asked_once_where_their_rows_are_samples_of_one():
    engine = Generating(routed=False, versioned=False)
    how = {"sampling": Sampling(max_tokens=2), "key": Key(0)}
    with opened(engine, {"x": torch.tensor(0.0)}) as requests:
        requests.add([Request(name=f"{row}", ids=(4 + row // 2,), row=row, **how) for row in (3, 0, 2, 1)])
        requests.step()
    (ask,) = engine.asked
    assert (ask.sampling.n, ask.prompts.tokens.tolist(), ask.prompts.row_ids.tolist()) == (2, [[4], [5]], [0, 1])


def test_what_it_cannot_do_and_too_many_are_refused():
    how = {"sampling": Sampling(max_tokens=2), "key": Key(0), "ids": (3, 4)}
    with opened(Generating(routed=False, versioned=False), {}, most_waiting=2) as requests:
        for more, text in (({"adapter": "a"}, "adapter is for"), ({"scores": Scores(prompt=True)}, "scores is for")):
            with pytest.raises(ValueError, match=text):
                requests.add([Request(name="x", **how, **more)])
        requests.add([Request(name="a", **how), Request(name="b", **how)])
        with pytest.raises(QueueFull):
            requests.add([Request(name="c", **how)])


@pytest.mark.parametrize(
    ("rows", "images", "asked"),
    [
        ((0, 1), "aa", [(0,)]),  # two samples of a prompt
        ((1, 2), "aa", [(1, 2)]),  # of two prompts
        ((2, 3, 4, 5), "aabb", [(1, 2)]),
        ((0, 1), "ab", [(0, 1)]),
        ((0, 1, 2, 3), "abab", [(0, 1, 2, 3)]),
    ],
)
def test_samples_of_a_prompt_are_asked_for_at_once_and_rows_of_others_by_themselves(rows, images, asked):
    engine, shown, key = Generating(routed=False, versioned=False), {name: object() for name in images}, Key(0)
    sampling = Sampling(max_tokens=4)
    with opened(engine, {"x": torch.tensor(0.0)}) as requests:
        how = {"ids": (4, 6), "sampling": sampling, "key": key}
        requests.add([Request(name=f"{i}", row=i, inputs=shown[x], **how) for i, x in zip(rows, images)])
        answers = {int(one.name): one.tokens.tolist() for one in requests.step().finished}
    assert answers == {row: alone((4, 6), key, row, 0, sampling, 4)[0] for row in rows}
    assert [tuple(ask.prompts.row_ids.tolist()) for ask in engine.asked] == asked
    (ask,) = engine.asked
    assert [*ask.prompts.inputs] == [shown[x] for x in images][:: ask.sampling.n]
