"""Records against definitions by hand: episodes as a list of all answers, rollouts token by token."""

from __future__ import annotations

import math
from itertools import count

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.key import Key
from fppo.rollout.requests import FinishedRequest
from fppo.serve.agents import PlayedEpisode
from fppo.serve.episodes import EpisodeRow, Episodes, RecordedTurn, of_ids, of_messages, of_text
from fppo.serve.rows import rollout_of_played, rollout_of_rows
from tests.serve.test_agents import asked, prompts


def answer(tokens, name="", *, version=0, end="stop", noise=0.0, dtype=torch.float32):
    numbers = torch.arange(len(tokens), dtype=dtype) / 8 + noise
    return FinishedRequest(
        name=name,
        tokens=torch.tensor(tokens),
        log_probs=-1 - numbers,
        sampling_log_probs=-2 - numbers,
        versions=torch.arange(version, version + len(tokens), dtype=torch.int32),
        end=end,
        fed=0,
    )


class AllAnswers:
    """Episodes as their documentation has them: every answer with its whole conversation, looked through one by one."""

    def __init__(self, most):
        self.most, self.rows, self.answers, self.busy = most, {}, {}, []
        self.unnamed, self.dropped, self.forgotten, self.made = set(), [], [], {}
        self.names = (f"unnamed-{number}" for number in count() if f"unnamed-{number}" not in self.rows)

    def scope(self, name):
        return None if name is None or name in self.unnamed else name

    def free(self, name):
        taken = {*self.rows.get(name, {}), *(number for other, number in self.busy if other == name)}
        return min(set(range(9)) - taken)

    def begin(self, name, kind, head, items, cuts):
        found = None
        for size in range(1, len(items)):
            if cuts is None or size in cuts:
                place = self.answers.get((self.scope(name), kind, head, items[:size]))
                found = found if place is None else (*place, size)
        if found is None:
            if name is None:
                name = next(self.names)
                self.unnamed.add(name)
            start = (name, self.free(name), (), (), 0, None, None)
        else:
            name, number, turns, request, size = found
            row = self.rows[name][number]
            before = sum((ids for ids, _ in row[:turns]), ())
            end = before[-1]
            if len(row) == turns and (name, number) not in self.busy:
                start = (name, number, tuple(row), before, size, request, end)
            else:
                start = (name, self.free(name), (), before, size, request, end)
        self.rows[name] = self.rows.pop(name, {})
        self.busy.append(start[:2])
        return start

    def commit(self, start, ids, request, kind, head, items):
        name, number, row = start[:3]
        self.busy.remove((name, number))
        self.rows.setdefault(name, {})[number] = [*row, (ids, request)]
        self.made.setdefault(name, []).append(request)
        self.answers[self.scope(name), kind, head, items] = (name, number, len(row) + 1, request)
        for old in [*self.rows][:-1]:
            if self.size() > self.most and self.rows[old] and old not in {busy for busy, _ in self.busy}:
                self.dropped.append((old, self.shown(old)))
                self.forget(old)

    def abandon(self, start):
        self.busy.remove(start[:2])
        if not self.rows.get(start[0]) and start[0] not in {name for name, _ in self.busy}:
            self.forget(start[0])

    def size(self):
        return sum(len(ids) for rows in self.rows.values() for row in rows.values() for ids, _ in row)

    def shown(self, name):
        return [(number, [ids for ids, _ in row]) for number, row in sorted(self.rows.get(name, {}).items())]

    def forget(self, name):
        self.rows.pop(name, None)
        self.forgotten += self.made.pop(name, [])
        self.answers = {key: place for key, place in self.answers.items() if place[0] != name}
        if name not in {busy for busy, _ in self.busy}:
            self.unnamed.discard(name)


def shown(rows):
    return [(row.number, [turn.ids for turn in row.turns]) for row in rows]


NAMES = st.sampled_from([None, None, "a", "unnamed-0"])
SAID = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=2)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "on", "on", "on", "end", "end", "end", "leave", "take"]),
        NAMES,
        SAID,
        st.booleans(),
    ),
    max_size=30,
)


def letters_of(said):
    return "".join("abcdefgh"[x - 1] for x in said)


def conversation_of(kind, said):
    """A conversation in both forms: the library's, and as its kind, what else must be equal, items and cuts."""
    if kind == "ids":
        return of_ids(said), ("ids", (), tuple(said), None)
    if kind == "text":
        return of_text(letters_of(said)), ("text", (), tuple(said), None)
    tools = () if kind == "chat" else ({"type": "function"},)
    roles = ["assistant" if x < 0 else "user" for x in said]
    messages = [{"role": role, "content": str(abs(x))} for role, x in zip(roles, said, strict=True)]
    last = max((place for place, role in enumerate(roles) if role == "assistant"), default=None)
    return of_messages(messages, tools), ("chat", kind, tuple(said), [] if last is None else [last + 1])


@pytest.mark.slow
@settings(max_examples=150)
@given(STEPS, st.sampled_from([("ids", "text"), ("chat", "tools")]), st.sampled_from([6, 15, 1000]))
def test_episodes_are_those_of_looking_through_all_answers(steps, kinds, most):
    """Whatever is asked, gone on with, answered, left or taken, in any order: places, rows, and what is dropped."""
    plain, dropped, forgotten, requests = AllAnswers(most), [], [], count()
    episodes = Episodes(
        most,
        on_dropped=lambda name, rows: dropped.append((name, shown(rows))),
        on_forgotten=forgotten.extend,
    )
    busy, said = [], [[1]]  # places, and all conversations so far
    for step, name, new, other in steps:
        if step in ("ask", "on"):
            own = new if step == "ask" else [*said[(sum(new) + len(said)) % len(said)], *new]
            conversation, as_items = conversation_of(kinds[other], own)
            start, expected = episodes.begin(name, conversation), plain.begin(name, *as_items)
            row = () if start.row is None else tuple(turn.ids for turn in start.row.turns)
            got = (start.name, start.number, row, start.before, start.items_seen, start.after, start.end)
            assert got == (*expected[:2], tuple(ids for ids, _ in expected[2]), *expected[3:])
            prompt = 0 if not row else len(start.row.prompt)
            assert start.used == (len(start.before) - prompt if row else 0)
            key = Key(0) if start.number == 0 else Key(0).fold("row", start.number)
            assert start.key_of(Key(0)) == (key.fold("turn", len(row) + 1) if row else key)
            busy.append((start, expected, conversation, as_items, own))
        elif step == "take":
            taken = [*plain.rows, "nobody"][0]
            assert shown(episodes.take(taken)) == plain.shown(taken)
            plain.forget(taken)
        elif busy and step == "leave":
            start, expected, *_ = busy.pop()
            episodes.abandon(start)
            plain.abandon(expected)
        elif busy and step == "end":
            start, expected, conversation, (of, head, items, _), own = busy.pop(0)
            request, drawn = f"{next(requests)}", [*new, 7]
            reply = [-x for x in new[:1]] if of == "chat" else drawn
            more = {
                "chat": of_messages([{"role": "assistant", "content": str(new[0])}], ()),
                "ids": of_ids(drawn),
                "text": of_text(letters_of(drawn)),
            }[of]
            before = (
                tuple(own[start.items_seen :]) if start.row is not None else (*start.before, *own[start.items_seen :])
            )
            turn = RecordedTurn(tuple(map(abs, before)), answer(drawn, request), "")
            episodes.commit(start, turn, conversation.with_answer(more.items))
            plain.commit(expected, turn.ids, request, of, head, (*items, *reply))
            said.append([*own, *reply])
        assert episodes.names() == [each for each, rows in plain.rows.items() if rows]
        assert {each: shown(episodes.rows(each)) for each in plain.rows} == {x: plain.shown(x) for x in plain.rows}
        assert dropped == plain.dropped
        assert sorted(forgotten) == sorted(plain.forgotten)


IDS = st.lists(st.integers(3, 50), min_size=1, max_size=3)
TURNS = st.lists(
    st.tuples(st.lists(st.integers(3, 50), max_size=2), IDS, st.integers(0, 5), st.sampled_from(["stop", "length"])),
    min_size=1,
    max_size=3,
)
ROWS = st.lists(st.tuples(IDS, TURNS), min_size=1, max_size=4)


def row_of(number, prompt, turns, *, dtype=torch.float32):
    made = [
        RecordedTurn(
            tuple(before if place else prompt),
            answer(drawn, version=version, end=end, noise=place + number / 16, dtype=dtype),
            "",
        )
        for place, (before, drawn, version, end) in enumerate(turns)
    ]
    return EpisodeRow(number, tuple(made))


def by_hand(row, first_turn):
    """A row's response as a list of (token, drawn, log-prob, other log-prob, version, turn)."""
    found = []
    for number, turn in enumerate(row.turns):
        found += [(token, False, 0.0, 0.0, 0, -1) for token in (turn.before if number else ())]
        x = turn.answer
        lists = (x.tokens.tolist(), x.log_probs.tolist(), x.sampling_log_probs.tolist(), x.versions.tolist())
        found += [
            (token, True, a, b, version, first_turn + number) for token, a, b, version in zip(*lists, strict=True)
        ]
    return found


@settings(max_examples=40)
@given(ROWS, st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.float64]), st.data())
def test_a_rollout_has_each_recorded_row_token_by_token(drawn, numbered, rewarded, dtype, data):
    rows = [row_of(number, *each, dtype=dtype if number else torch.float32) for number, each in enumerate(drawn)]
    size = len(rows)
    episodes = [data.draw(st.integers(0, 1)) for _ in rows] if rewarded else None
    more = {"row_ids": [9 + x for x in range(size)], "groups": [x // 2 for x in range(size)]} if numbered else {}
    if rewarded:
        more |= {"rewards": [0.5 + x for x in range(size)], "episodes": episodes}
    if numbered:
        columns = {"ids": ["i"] * size, "ground_truth": [3] * size, "source": ["s"] * size, "extras": [{"a": 1}] * size}
        more["columns"] = columns
    rollout = rollout_of_rows(rows, pad_token_id=2, **more)
    width, prompt = max(len(by_hand(row, 0)) for row in rows), max(len(row.prompt) for row in rows)
    assert rollout.tokens.shape == (size, prompt + width)
    assert rollout.rollout_log_probs.dtype == (dtype if size > 1 else torch.float32)
    before = {}
    for place, row in enumerate(rows):
        episode = place if episodes is None else episodes[place]
        response = by_hand(row, before.get(episode, 0))
        before[episode] = before.get(episode, 0) + len(row.turns)
        left, right = prompt - len(row.prompt), width - len(response)
        assert rollout.tokens[place].tolist() == [*[2] * left, *row.prompt, *(x[0] for x in response), *[2] * right]
        seen = [False] * left + [True] * (len(row.prompt) + len(response)) + [False] * right
        assert rollout.attention_mask[place].tolist() == seen
        names = ("response_mask", "rollout_log_probs", "sampling_log_probs", "token_versions", "turn_ids")
        for name, column, nothing in zip(names, (1, 2, 3, 4, 5), (False, 0.0, 0.0, 0, -1), strict=True):
            assert getattr(rollout, name)[place].tolist() == [*(x[column] for x in response), *[nothing] * right], name
        assert rollout.versions[place] == row.turns[0].answer.versions[0]
        assert rollout.finish[place] == row.turns[-1].answer.end
        if rewarded:
            expected = [0.0] * width
            expected[len(response) - 1] = 0.5 + place
            assert rollout.turn_rewards[place].tolist() == expected
    numbers = [9 + x for x in range(size)] if numbered else [*range(size)]
    assert rollout.row_ids.tolist() == numbers
    assert rollout.groups.tolist() == ([x // 2 for x in range(size)] if numbered else numbers)
    assert [*rollout.ids] == (["i"] * size if numbered else numbers)
    assert [*rollout.ground_truth] == [3 if numbered else None] * size
    assert [*rollout.source] == ["s" if numbered else "serve"] * size
    assert [*rollout.extras] == [{"a": 1} if numbered else {}] * size
    assert (rollout.turn_rewards is None, rollout.episodes is None) == (not rewarded, not rewarded)
    assert episodes is None or rollout.episodes.tolist() == episodes


EPISODE = st.tuples(st.lists(st.tuples(IDS, TURNS), max_size=3), st.booleans())


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(EPISODE, min_size=1, max_size=5), st.sampled_from([1, 2]), st.sampled_from(["longest", "all"]))
def test_episodes_become_the_rows_of_a_rollout(drawn, n, how):
    """The chosen rows, each beside its own prompt; the score of an episode is at the last token of its last row."""
    drawn = (drawn * n)[: len(drawn) - len(drawn) % n or n]
    ask = asked(prompts(len(drawn) // n, mark=[f"m{i}" for i in range(len(drawn) // n)]), n=n)
    ask = attrs.evolve(ask, sampling=attrs.evolve(ask.sampling, n=n))
    episodes = [[row_of(number, *each) for number, each in enumerate(rows)] for rows, _ in drawn]
    played = [PlayedEpisode(2.0 + x, {"b": float(x)}, failed) for x, (_, failed) in enumerate(drawn)]
    played = [x._replace(score=math.nan) if x.failed else x for x in played]
    numbers = [3 * n + x for x in range(len(drawn))]
    rollout = rollout_of_played(ask, episodes, played, pad_token_id=2, every=how == "all")
    expected = []
    for place, rows in enumerate(episodes):
        own = [row for row in rows if how == "all" or row is max(rows, key=said)][: None if how == "all" else 1]
        expected += [(place, row, row is own[-1]) for row in own] or [(place, None, True)]
    assert len(rollout.tokens) == len(expected)
    for at, (place, row, last) in enumerate(expected):
        prompt = [place // n + 2] if row is None else [*row.prompt]
        mask = rollout.attention_mask[at]
        width = rollout.response_mask.shape[1]
        assert rollout.tokens[at, :-width][mask[:-width]].tolist() == prompt
        assert rollout.response_mask[at].sum() == (1 if row is None else said(row))
        score = rollout.turn_rewards[at].sum()
        wanted = (math.nan if row is None else played[place].score) if last else 0.0
        assert (score.isnan() and math.isnan(wanted)) or score == wanted
        assert rollout.groups[at] == place // n + 3
        assert rollout.ids[at] == f"id {place // n}"
        info = {"b": float(place), "rows": float(len(episodes[place]))}
        more = {"tool_failures": 1} if played[place].failed else {}
        assert rollout.extras[at] == {"mark": f"m{place // n}", "environment": info, **more}
        assert rollout.row_ids[at] == (at if how == "all" else numbers[place])
        assert how == "longest" or rollout.episodes[at] == numbers[place]
        assert row is not None or (rollout.versions[at], rollout.finish[at]) == (4, "length")


def said(row):
    return sum(len(turn.answer.tokens) for turn in row.turns)
