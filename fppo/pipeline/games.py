"""Exact values of games that a policy plays in turns, from all ways to play a game, as tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fppo.advantages import GameTree, game_values, token_rewards
from fppo.batch import Column, Prompts, Rollout
from fppo.data.stops import token_pieces
from fppo.pipeline.passes import required
from fppo.pipeline.truth import Continued, PolicyOf, Truth
from fppo.rollout.engine import Sampling
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.games import EPISODE, End, Game, State, Turn

MOST = 100_000  # the most places in the ways to play from one batch's prompts

Ids = tuple[int, ...]
Spell = Callable[[str], Sequence[Ids]]  # all token sequences for a text as a whole turn
States = list[tuple[float, State]]  # weighted; they differ only in what the policy cannot see


@attrs.frozen(kw_only=True)
class Played:
    """A game, and the engine by which the policy plays it, as `exact` of `truth.Known`."""

    game: Game
    engine: TurnsEngine
    sampling: Sampling
    gamma: float = 1.0

    def __call__(self, asked: Prompts, rollout: Rollout, of_policy: PolicyOf) -> Iterator[Truth]:
        """The exact values of the rollout's responses, one to each prompt, by dynamic programming over every turn that
        the policy can take and every move of chance. A token's value is the expected return before it; its advantage is
        the expected return after it, minus that value.

        Raises ValueError for a game that does not fit the limits of responses, or has too many ways to be played.
        """
        prompts = [tuple(x[seen].tolist()) for x, seen in zip(asked.tokens.cpu(), asked.attention_mask.cpu())]
        ways = Ways(self)
        for prompt, extra in zip(prompts, rollout.extras, strict=True):
            ways.add(prompt, extra[EPISODE]["opening"])
        log_probs = required(of_policy(ways.rows(rollout.tokens.device)).log_probs).detach()
        exact = game_values(log_probs.cpu()[ways.row, ways.column].double().exp(), ways.tree(), gamma=self.gamma)
        mask = rollout.response_mask
        values, said = torch.zeros(2, *mask.shape, dtype=torch.float64)
        for row, prompt in enumerate(prompts):
            for column, place, token in ways.followed(prompt, rollout, row):
                values[row, column] = exact.values[place]
                said[row, column] = 0.0 if token is None else exact.action_values[token]
        ends = [self.game.end(extra[EPISODE], finish) for extra, finish in zip(rollout.extras, rollout.finish)]
        rewards = token_rewards(torch.tensor(ends, dtype=torch.float64, device=mask.device), mask)
        values, advantages = (x.to(mask.device) for x in (values, said - values))
        yield Truth(rollout, None, values, rewards, advantages)


def spellings(tokenizer: Any, sampling: Sampling) -> Spell:
    """Make the function that lists all token sequences for a text as a whole turn. Each token adds some text. The turn
    ends with the text itself if it completes one of `sampling.stop_texts`, else with a special stop token."""
    stops = sampling.stop_texts
    special = set(tokenizer.all_special_ids)
    by_first: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
    for token, piece in enumerate(token_pieces(tokenizer) if stops is None else stops.pieces):
        by_first[piece[:1]].append((token, piece))

    def ways(text: bytes) -> Iterator[Ids]:
        if not text:
            yield ()
            return
        for token, piece in by_first[text[:1]]:
            if text.startswith(piece):
                yield from ((token, *rest) for rest in ways(text[len(piece) :]))

    @cache
    def spelled(text: str) -> Sequence[Ids]:
        whole = [ids for ids in ways(text.encode()) if not any(sampling.stopped(ids[:i]) for i in range(1, len(ids)))]
        ends = [(token,) for token in sampling.stop_token_ids if token in special]
        return [way for ids in whole for way in ([ids] if ids and sampling.stopped(ids) else [ids + x for x in ends])]

    return spelled


class _Path(NamedTuple):
    """A response so far: its prompt, its tokens, and which of them the policy chose."""

    prompt: Ids
    tokens: Ids = ()
    chosen: tuple[bool, ...] = ()

    def on(self, ids: Ids, chosen: bool) -> _Path:
        """The path extended by the tokens `ids`; `chosen`: the policy chose them."""
        return _Path(self.prompt, self.tokens + ids, self.chosen + (chosen,) * len(ids))


class Ways:
    """All ways to play from some prompts, as a tree and as rows of tokens. Each token of the tree has a row and a
    column."""

    def __init__(self, played: Played) -> None:
        self._game, self._engine, self._most = played.game, played.engine, played.sampling.max_tokens
        self._turn_tokens = min(self._engine.turn_tokens or self._most, self._most)
        self._spell = spellings(self._engine.tokenizer, played.sampling)
        self._paths: list[_Path] = []  # the finished ones
        self._places: dict[_Path, int] = {}
        self._tokens: dict[tuple[int, int], int] = {}  # by place and token
        self._ends: list[float] = []
        self._links: list[tuple[int, int, float]] = []
        self.row: list[int] = []  # of each token of the tree
        self.column: list[int] = []

    def add(self, prompt: Ids, opening: str) -> None:
        """Add all ways to play from a prompt, whose text `opening` is the game's first state. Raises ValueError for a
        game that does not begin with a turn that shows nothing."""
        if _Path(prompt) in self._places:
            return
        nodes = self._game.outlook([(1.0, opening)])
        turns = [(w, node) for w, node in nodes if isinstance(node, Turn)]
        if len(turns) < len(nodes) or any(turn.shown for _, turn in turns):
            raise ValueError(f"the game from {opening!r} must begin with a turn that shows '', for the prompt is there")
        self._turn(_Path(prompt), turns, 1)

    def tree(self) -> GameTree:
        """Build the tree of all ways added so far."""
        by, to, chance = zip(*self._links, strict=True) if self._links else ((), (), ())
        return GameTree(
            at=torch.tensor([place for place, _ in self._tokens]),
            ends=torch.tensor(self._ends, dtype=torch.float64),
            by=torch.tensor(by, dtype=torch.int64),
            to=torch.tensor(to, dtype=torch.int64),
            chance=torch.tensor(chance, dtype=torch.float64),
            places=len(self._places),
            height=max(sum(path.chosen) for path in self._paths),
        )

    def rows(self, device: torch.device) -> Continued:
        """Build rows of all ways on `device`, for a pass in which the policy computes the log-probs of their tokens."""
        pad = self._engine.pad_token_id

        def padded(rows: Sequence[Sequence[int] | Sequence[bool]], value: int | bool, side: str) -> Tensor:
            return pad_sequence(list(map(torch.tensor, rows)), True, value, side)

        asked, said = ([getattr(path, name) for path in self._paths] for name in ("prompt", "tokens"))
        tokens = torch.cat([padded(asked, pad, "left"), padded(said, pad, "right")], 1)
        there = [[[True] * len(ids) for ids in rows] for rows in (asked, said)]
        attended = torch.cat([padded(there[0], False, "left"), padded(there[1], False, "right")], 1)
        chosen = padded([path.chosen for path in self._paths], False, "right")
        return Continued(
            tokens=tokens.to(device),
            attention_mask=attended.to(device),
            response_mask=chosen.to(device),
            ground_truth=Column([None] * len(tokens)),
        )

    def followed(self, prompt: Ids, rollout: Rollout, row: int) -> Iterator[tuple[int, int, int | None]]:
        """Follow the response of a row through the tree. Yields, for each token that the policy chose: its column, the
        number of its place in the tree, and its own number there; None for a token that the game does not allow."""
        mask = rollout.response_mask
        columns = rollout.attention_mask[row, -mask.shape[1] :].nonzero().flatten().tolist()
        tokens, chosen = rollout.tokens[row, -mask.shape[1] :].tolist(), mask[row].tolist()
        for number, column in enumerate(columns):
            before = columns[:number]
            path = _Path(prompt, tuple(tokens[i] for i in before), tuple(chosen[i] for i in before))
            place = self._places.get(path)
            if chosen[column] and place is not None:
                yield column, place, self._tokens.get((place, tokens[column]))

    def _turn(self, path: _Path, turns: list[tuple[float, Turn]], number: int) -> int:
        """Add turn `number` after `path`, weighted turns that look the same to the policy, and all that follows; return
        the place where it begins."""
        first = turns[0][1]
        if any(turn.actions.keys() != first.actions.keys() for _, turn in turns):
            allowed = [list(turn.actions) for _, turn in turns]
            raise ValueError(f"turns that show the same, {first.shown!r}, must allow the same texts; they do {allowed}")
        if not first.actions or number > self._engine.max_turns:
            text = f"rollout.turns.max_turns = {self._engine.max_turns}" if first.actions else "it allows nothing"
            raise ValueError(f"the game has a turn {number}, which shows {first.shown!r}: {text}")
        options: list[tuple[Ids, States]] = []
        room = max(0, min(self._turn_tokens, self._most - len(path.tokens)))
        for text in first.actions:
            ways = [ids for ids in self._spell(text) if len(ids) <= room]
            if not ways:
                raise ValueError(
                    f"in turn {number} of the game {text!r} cannot be said in {room} tokens, of rollout.max_tokens = "
                    f"{self._most} and rollout.turns.turn_tokens = {self._turn_tokens}, the end of the turn among them"
                )
            options += [(ids, [(w, turn.actions[text]) for w, turn in turns]) for ids in ways]
        return self._place(path, options, number)

    def _place(self, path: _Path, options: list[tuple[Ids, States]], number: int) -> int:
        """Add the place after a path in turn `number` at which one of `options` follows, token sequences with the
        weighted states that they lead to; return it."""
        place = self._places.setdefault(path, len(self._places))
        if place >= MOST:
            raise ValueError(f"the game can be played in too many ways, with over {MOST:,} tokens: give it fewer turns")
        for token in dict.fromkeys(ids[0] for ids, _ in options):
            edge = self._tokens.setdefault((place, token), len(self._tokens))
            self.row.append(len(self._paths))
            self.column.append(len(path.tokens))
            self._ends.append(0.0)
            after, more = path.on((token,), True), [(ids[1:], to) for ids, to in options if ids[0] == token]
            before = len(self._links)
            if more[0][0]:
                self._links.append((edge, self._place(after, more, number), 1.0))
            else:
                self._finished(after, edge, more[0][1], number)
            if len(self._links) == before:
                self._paths.append(after)
        return place

    def _finished(self, path: _Path, edge: int, states: States, number: int) -> None:
        """Record the outcome of turn `number`, whose last token, number `edge` of the tree, ends `path`: the turn leads
        to one of the weighted `states`. Keeps their mean score, 0 where the game goes on, and adds and links the turns
        that follow."""
        nodes, whole = self._game.outlook(states), sum(w for w, _ in states)
        self._ends[edge] = sum(w * node.score for w, node in nodes if isinstance(node, End)) / whole
        shown: dict[Ids, list[tuple[float, Turn]]] = defaultdict(list)
        for weight, node in nodes:
            if isinstance(node, Turn):
                message = {"role": "tool", "content": node.shown}
                shown[tuple(self._engine.encode([message], path.tokens[-1]))].append((weight, node))
        for ids, turns in shown.items():
            place = self._turn(path.on(ids, False), turns, number + 1)
            self._links.append((edge, place, sum(w for w, _ in turns) / whole))
