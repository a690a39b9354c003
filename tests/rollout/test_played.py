"""Rollouts of turns against a loop over one episode at a time, written out by hand, over an engine without a model."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from typing import NamedTuple

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fppo import tree
from fppo.batch import Column, Prompts, Rollout
from fppo.data.examples import MESSAGES
from fppo.data.stops import StopTexts
from fppo.environments.calls import PlayedStep
from fppo.environments.protocol import Reply
from fppo.episodes import joined
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.generated import generated
from fppo.rollout.turns.engine import TurnsEngine
from fppo.runtime.mesh import AXES, LOCAL, place_on
from fppo.runtime.simulate import simulate
from tests.rollout.test_generated import LETTERS, Generating, alone, newer, told

SPECIAL = (3, 12, 13, 14)
ROW_IDS = (5, 2)


class Opened(Generating):
    """An engine that is open for requests, of which nothing is left in the end."""

    @contextlib.contextmanager
    def open(self, params, *, version=0, most_waiting=None):
        with generated(self, params, version=version, most_waiting=most_waiting, together=AXES) as requests:
            yield requests
        assert requests.counts == (0, 0, 0)


class Letters:
    """A tokenizer of letters, of which some are special."""

    all_special_ids = SPECIAL
    response_template = "a turn is read in parts"

    def parse_response(self, text, prefix):
        return {"content": text[::-1][:3] + "abcdefg"[len(prefix) % 7], "thinking": ""}

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        assert not clean_up_tokenization_spaces
        return "".join(chr(97 + x) for x in ids if not (skip_special_tokens and x in SPECIAL))


def letters(text):
    return [ord(x) - 97 for x in text]


def encoded(messages, end):
    """An observation: the messages' letters behind a token that says which one ended the turn."""
    return [*letters("".join(x["content"] for x in messages)), *([18 + end % 2] if messages else [])]


def prompt_of(messages):
    """A conversation as a prompt: 24 before what the policy said."""
    return [x for one in messages for x in ([24] if one["role"] == "assistant" else []) + letters(one["content"])]


class Player:
    """Answers by what was said and the state, which counts the calls: messages, none, the end, or a failure."""

    def __init__(self, kind, shuffled):
        self.kind, self.shuffled, self.seeds, self.rows, self.open_calls = kind, shuffled, {}, {}, []
        self.asked = Counter()

    @property
    def judges(self):
        return self.kind != "tool"

    @contextlib.contextmanager
    def open(self):
        yield self

    def begun(self, data):
        if self.kind == "tool":
            return PlayedStep(data[MESSAGES])
        if self.kind == "failing" and data["mark"] == 1:
            return PlayedStep(done=True, failed=True)
        own = [{"role": "user", "content": "bc" * data["mark"] + "d"}]
        return PlayedStep((data["mark"],), () if self.kind == "own prompt" else own)

    def stepped(self, state, reply):
        number = (sum(reply.ids) + len(state) + len(reply.text) + len(reply.end)) % 7
        state = (*state, number)
        if number == 0:
            return PlayedStep(state, done=True, reward=1.5, info={"last": 0.0})
        if number == 1:
            return PlayedStep(state, done=self.judges, failed=True)
        said = [{"role": "tool", "content": "efghij"[: number - 2]}] if number > 2 else []
        return PlayedStep(state, said, number / 4, False, {"last": float(number), f"at {number}": 1.0})

    def reset(self, number, row, seed):
        self.seeds[number], self.rows[number] = seed, dict(row)
        self.open_calls.append((number, self.begun(row)))

    def step(self, number, state, reply):
        assert isinstance(reply, Reply)
        self.asked[number] += 1
        self.open_calls.append((number, self.stepped(state, reply)))

    def taken(self, *, wait):
        self.shuffled.shuffle(self.open_calls)
        count = len(self.open_calls) if wait else self.shuffled.randint(0, len(self.open_calls))
        found, self.open_calls = self.open_calls[:count], self.open_calls[count:]
        return found


def ended_by(sampling, ids):
    """The text that ended a turn, or its last token."""
    text = None if sampling.stop_texts is None else sampling.stop_texts.last(ids)
    return chr(97 + ids[-1]) if text is None else text


class Episode:
    """A row's episode, played alone."""

    def __init__(self, rules, row, group, prompts, player):
        self.rules, self.ids, self.columns, self.rewards, self.info = rules, [], [], {}, {}
        self.prompts, self.failures, self.finish, self.row, self.group = list(prompts), 0, "", row, group
        self.player, self.said, self.lost, self.turns, self.since = player, [], False, [], 0
        self.versions, self.given = [], None

    def play(self, state, most):
        rules, turn, since, request = self.rules, 1, 0, 0
        while True:
            request += 1
            row_id = ROW_IDS[self.group] * rules["n"] + self.row % rules["n"]
            key = Key(3) if request == 1 else Key(3).fold("turn", request)
            left = most - len(self.ids)
            if len(self.prompts) > 1:
                left = min(left, len(self.prompts[0]) + most - len(self.prompts[-1]))
            before = self.prompts[-1] if self.fresh else [*self.prompts[-1], *self.ids[self.start :]]
            tokens, end = alone(
                before, key, row_id, rules["offset"] if request == 1 else 0, rules["sampling"], min(left, rules["most"])
            )
            self.fresh = False
            self.columns += [(token, True, turn - 1) for token in tokens]
            self.versions += [6 + newer(before)] * len(tokens)
            self.ids += tokens
            self.finish = end
            lost = math.nan if rules["failure"] == "drop" else 0.0
            judges, last = self.player.judges, request == rules["turns"]
            if self.lost:
                self.rewards[len(self.ids) - 1] = lost
                return
            if not judges and (end != "stop" or last):
                return
            own = self.ids[since:]
            content = own[:-1] if own[-1] in SPECIAL and end == "stop" else own
            text = Letters().decode(content)
            self.asked += 1
            ended = "" if end != "stop" else ended_by(rules["sampling"], own)
            played = self.player.stepped(state, Reply(text, tuple(own), ended))
            state = played.state
            self.failures += played.failed
            self.info |= played.info
            if judges:
                self.rewards[len(self.ids) - 1] = lost if played.failed else played.reward
            if played.done or end != "stop":
                return
            observed = encoded(played.messages, self.ids[-1])
            turn += bool(played.messages) or judges
            if played.messages:
                self.turns.append(text)
                since = self.since = len(self.ids) + len(observed)
            if last:
                return
            room = most - len(self.ids) - len(observed)
            prompt = None
            if played.messages and rules["anew"]:
                parts = Letters().parse_response(Letters().decode(own), Letters().decode(self.prompts[-1]))
                self.said += [{"role": "assistant", "content": parts["content"]}, *played.messages]
                prompt = prompt_of(self.said)
                room = min(room, len(self.prompts[0]) + most - len(prompt))
            if room < 1:
                self.finish = "length"
                return
            self.columns += [(token, False, -1) for token in observed]
            self.versions += [0] * len(observed)
            self.ids += observed
            if prompt is not None:
                self.prompts.append(prompt)
                self.fresh, self.start = True, len(self.ids)

    fresh, start, asked = True, 0, 0

    def texts(self):
        """The policy's answers, turn by turn."""
        last = self.ids[self.since :]
        last = last[:-1] if last and last[-1] in SPECIAL and self.finish == "stop" else last
        return [*self.turns, *([Letters().decode(last)] if self.ids[self.since :] else [])]


def by_hand(rules, asked, limits, player):
    """The episodes of two prompts, n of each."""
    found = []
    for group, (prompt, most) in enumerate(zip(asked, limits, strict=True)):
        said = [{"role": "user", "content": Letters().decode(prompt, skip_special_tokens=True)}]
        for draw in range(rules["n"]):
            row = group * rules["n"] + draw
            begun = player.begun({"mark": group, MESSAGES: said})
            episode = Episode(rules, row, group, [prompt], player)
            episode.said = list(said)
            episode.lost, episode.failures = begun.failed, int(begun.failed)
            if player.judges and begun.messages:
                given = prompt_of(begun.messages)
                if len(given) > rules["prompt_tokens"]:
                    episode.lost, episode.failures = True, 1
                else:
                    episode.prompts, episode.said = [given], list(begun.messages)
                    episode.given = list(begun.messages)
            episode.play(begun.state, most)
            found.append(episode)
    return found


def prompts_of(asked, pictures):
    width = max(map(len, asked))
    return Prompts(
        tokens=torch.tensor([[0] * (width - len(x)) + x for x in asked]),
        attention_mask=torch.tensor([[False] * (width - len(x)) + [True] * len(x) for x in asked]),
        row_ids=torch.tensor(ROW_IDS),
        ids=Column(["i", "j"]),
        ground_truth=Column([7, 8]),
        source=Column(["s", "t"]),
        extras=Column([{"mark": 0}, {"mark": 1}]),
        inputs=Column(pictures) if pictures else None,
    )


RULES = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 2]),
        "turns": st.integers(1, 4),
        "most": st.sampled_from([2, 5, 40]),
        "offset": st.sampled_from([0, 2]),
        "failure": st.sampled_from(["drop", "score"]),
        "anew": st.booleans(),
        "prompt_tokens": st.sampled_from([2, 3, 99]),
        "sampling": st.sampled_from(
            [
                Sampling(stop_token_ids=(3, 5, 7, 9, 11)),
                Sampling(temperature=0.5, stop_token_ids=tuple(range(3, 20))),
                Sampling(stop_token_ids=(5, 7, 9, 11)),  # a turn that is cut may end with the special token
                Sampling(stop_token_ids=(3, 7, 9), stop_texts=StopTexts((b"e", b"fg"), LETTERS)),
            ]
        ),
    }
)
ASKED = st.lists(st.lists(st.integers(0, 16), min_size=1, max_size=3), min_size=2, max_size=2)
KINDS = st.sampled_from(["tool", "environment", "own prompt", "failing"])


class RankOfPlay(NamedTuple):
    """A rank's rollout, its player, its engine, and the rows whose ends it has heard of."""

    rollout: Rollout
    player: Player
    inner: Generating
    heard: dict[int, tuple[list[int], str]]


def played_on(mesh, rules, kind, ask, seed):
    """The rollout of a rank, whose player answers in an order of its own."""
    place = place_on(mesh, AXES)
    player, heard = Player(kind, random.Random(seed + 100 * place)), {}
    inner = (Opened if seed % 3 else Generating)(routed=seed in ROUTED, versioned=seed in VERSIONED)
    engine = TurnsEngine(
        engine=inner,
        tools=player,
        encode=encoded,
        tokenizer=Letters(),
        max_turns=rules["turns"],
        pad_token_id=1,
        turn_tokens=rules["most"],
        prompt=prompt_of,
        prompt_tokens=rules["prompt_tokens"],
        failure=rules["failure"],
        thinking="drop" if rules["anew"] else "keep",
        draws=2 if seed > 6 else None,
        mesh=mesh,
    )
    ask = attrs.evolve(ask, on_finished=lambda row, ids, finish: heard.update({row: (list(ids), finish)}))
    return RankOfPlay(engine.generate({"x": torch.tensor(0.0)}, ask), player, inner, heard)


VERSIONED, ROUTED = (2, 5, 8), (1, 2, 6, 7)


@pytest.mark.slow
@settings(max_examples=120)
@given(
    RULES,
    ASKED,
    KINDS,
    st.sampled_from([None, [3, 12]]),
    st.sampled_from([6, 25]),
    st.integers(0, 9),
    st.sampled_from([1, 1, 2, 3]),
)
def test_rollouts_are_those_of_one_episode_at_a_time(rules, asked, kind, limits, most, seed, ranks):
    """Whoever is answered first, and on however many ranks: tokens, turns, log-probs, rewards, prompts, experts,
    failures, and who hears of a row's end."""
    rules = rules | {"most": min(rules["most"], most)}
    pictures = ["one", "two"] if seed % 2 and not rules["anew"] else None  # stand for the inputs of images
    ask = Ask(
        prompts_of(asked, pictures),
        attrs.evolve(rules["sampling"], n=rules["n"], max_tokens=most),
        Key(3),
        version=6,
        limits=None if limits is None else torch.tensor(limits),
        offset=rules["offset"],
    )
    every = (
        [played_on(LOCAL, rules, kind, ask, seed)]
        if ranks == 1
        else simulate({"replicate": ranks}, lambda mesh: played_on(mesh, rules, kind, ask, seed))
    )
    (rollout, player, inner, heard), *others = every
    for other in others:
        assert tree.digest(other.rollout) == tree.digest(rollout)
        assert not heard.keys() & other.heard.keys()
        heard |= other.heard
        player.asked += other.player.asked
        player.seeds |= other.player.seeds
        player.rows |= other.player.rows
    assert (rollout.routed is not None) == (seed in ROUTED)
    if rollout.routed is not None:  # each token's is the token itself; the last one's is that of the one before
        seen = rollout.attention_mask.bool()
        last = seen & ~F.pad(seen, (0, 1))[:, 1:]
        expected_experts = rollout.tokens.where(~last, rollout.tokens.roll(1, 1)).where(seen, 0)
        assert torch.equal(rollout.routed[..., 0, 0].long(), expected_experts)
    bounds = [min(x, most) for x in limits or [most] * 2]
    expected = by_hand(rules, asked, bounds, Player(kind, None))
    if rules["anew"]:
        numbers = rollout.episodes.tolist()
        width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
        found = {}
        for row, number in enumerate(numbers):
            ids = rollout.tokens[row, :width][rollout.attention_mask[row, :width].bool()].tolist()
            found.setdefault(number, []).append(ids)
        assert [*found.values()] == [each.prompts for each in expected]
        rollout = joined(rollout)
    width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
    row_ids = [ROW_IDS[each.group] * rules["n"] + each.row % rules["n"] for each in expected]
    versioned = seed in VERSIONED and any(version == 7 for each in expected for version in each.versions)
    assert (rollout.token_versions is not None) == versioned
    assert rollout.row_ids.tolist() == row_ids
    assert rollout.groups.tolist() == [ROW_IDS[each.group] for each in expected]
    firsts = [6 if not (versioned and rules["anew"]) else each.versions[0] for each in expected]
    assert rollout.versions.tolist() == firsts
    for row, each in enumerate(expected):
        seen, length = rollout.attention_mask[row].bool(), len(each.ids)
        assert rollout.tokens[row, :width][seen[:width]].tolist() == each.prompts[0]
        assert rollout.tokens[row, width:][seen[width:]].tolist() == each.ids
        assert rules["anew"] or {*rollout.tokens[row, width:][~seen[width:]].tolist()} <= {1}
        rest = rollout.response_mask.shape[1] - length
        assert rollout.response_mask[row].tolist() == [*(chosen for _, chosen, _ in each.columns), *[False] * rest]
        assert rollout.turn_ids[row].tolist() == [*(turn for *_, turn in each.columns), *[-1] * rest]
        numbers = [-token / 8 - told(rules["sampling"]) if chosen else 0.0 for token, chosen, _ in each.columns]
        assert torch.equal(rollout.rollout_log_probs[row], torch.tensor([*numbers, *[0.0] * rest]))
        assert torch.equal(rollout.sampling_log_probs[row], 2 * torch.tensor([*numbers, *[0.0] * rest]))
        assert rollout.finish[row] == each.finish
        assert rollout.extras[row].get(MESSAGES) == each.given
        assert not versioned or rollout.token_versions[row].tolist() == [*each.versions, *[0] * rest]
        if player.judges:
            rewards = torch.tensor([each.rewards.get(place, 0.0) for place in range(length + rest)])
            assert torch.equal(rollout.turn_rewards[row].nan_to_num(99.0), rewards.nan_to_num(99.0))
            assert rollout.extras[row]["environment"] == each.info
        else:
            assert rollout.turn_rewards is None
            assert seed > 6 or heard[row] == (each.ids, each.finish)
        assert rollout.extras[row].get("tool_failures", 0) == each.failures
        assert rollout.extras[row]["mark"] == each.group
    assert not (player.judges or seed > 6) or not heard
    drawn = Key(3).fold("draws").uniform(torch.tensor(row_ids), 2).tolist()
    for row, each in enumerate(expected if seed > 6 else ()):
        opening = Letters().decode(asked[each.group], skip_special_tokens=True)
        found = {"opening": opening, "draws": drawn[row], "turns": each.texts()}
        assert rollout.extras[row]["episode"] == found
        assert player.rows[row][MESSAGES][-1]["draws"] == drawn[row]
    uniform = Key(3).fold("environment").uniform(torch.tensor(ROW_IDS), 1)[:, 0]
    seeds = (uniform * (1 << 62)).long().tolist()
    assert player.asked == Counter({each.row: each.asked for each in expected if each.asked})
    for each in inner.asked if pictures else ():
        groups = [number * each.sampling.n // rules["n"] for number in each.prompts.row_ids.tolist()]
        assert [*each.prompts.inputs] == [pictures[ROW_IDS.index(group)] for group in groups]
    assert player.seeds == {each.row: seeds[each.group] for each in expected}
    for each in expected:
        own = {"ground_truth": 7 + each.group, "source": "st"[each.group], "id": "ij"[each.group], "mark": each.group}
        assert {name: x for name, x in player.rows[each.row].items() if name != MESSAGES} == own
