"""TextArena: text games of one or more players, one of whom is the policy (pip install textarena)."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import textarena  # pyright: ignore[reportMissingImports]

from fppo.environments.adapters.objects import ANOTHER, LARGE, SMALL, Kept, seed_generators
from fppo.environments.protocol import Begin, Message, Reply, Step
from fppo.workers.imports import imported

_DRAWS = 100  # attempts to draw a game in which the policy gets a move


class TextArena:
    """The TextArena game `game`, for example "KuhnPoker-v0", with `players` players; the seed decides which of them the
    policy is.

    A player sees what is new since its last move. Of TextArena's wrappers only the action wrappers apply, which may put
    a move into brackets. `opponent` (module:function) moves for all other players: it maps the text that a player sees,
    and a seeded `random` module, to a text. A game that is over before the policy's first move is drawn anew. The
    policy's reward comes at the end of the game; the game decides what a cut or invalid move does.
    """

    def __init__(self, *, game: str, players: int = 2, opponent: str | Callable[..., str] | None = None) -> None:
        if players > 1 and opponent is None:
            raise ValueError(f"{game} with {players} players: give opponent = module:function for the others")
        self._game, self._players = game, players
        self._opponent = imported(opponent, "opponent") if isinstance(opponent, str) else opponent

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """Begin the game that the seed draws, and play it up to the policy's first move. The data `row` is not read.
        Raises ValueError if the policy gets no move in any of several games drawn."""
        for number in range(_DRAWS):
            drawn = (seed + number * ANOTHER) % LARGE
            seed_generators(drawn, 0)
            game = _inside(textarena.make(self._game))[0]
            game.reset(num_players=self._players, seed=drawn % SMALL)
            if messages := self._until_policy(game, drawn, False):
                return Begin(Kept(drawn, 0, game), messages)
        raise ValueError(
            f"TextArena's {self._game} with {self._players} players is over before the policy's first move"
        )

    def step(self, state: Kept, reply: Reply) -> Step:
        """Make the policy's move, then the others' until it is the policy's turn again or the game is over."""
        seed_generators(state.seed, state.turn + 1)
        game = state.environment
        done, _ = game.step(self._written(reply.text))
        messages = self._until_policy(game, state.seed, done)
        kept = Kept(state.seed, state.turn + 1, game)
        if messages:
            return Step(kept, messages)
        rewards, info = game.close()
        me = state.seed % self._players
        return Step(kept, (), rewards[me], True, {"invalid": float(info[me].get("invalid_move", False))})

    def _until_policy(self, game: Any, seed: int, done: bool) -> list[Message]:
        """Make the others' moves and return the messages for the policy's next move; none once the game is over
        (`done`)."""
        while not done:
            player, seen = game.get_observation()
            text = seen if isinstance(seen, str) else "\n".join(map(_text_of, seen))
            if player == seed % self._players:
                return [{"role": "user", "content": text}]
            assert self._opponent is not None
            done, _ = game.step(self._written(self._opponent(text, random)))
        return []

    def _written(self, text: str) -> str:
        """A move, rewritten by the game's action wrappers."""
        for write in self._writers:
            text = write(text)
        return text

    @functools.cached_property
    def _writers(self) -> list[Callable[[str], str]]:
        return _inside(textarena.make(self._game))[1]


def _text_of(message: tuple[Any, Any, Any]) -> str:
    """The text of a message (sender, text, kind); some games swap sender and text."""
    return next((x for x in (message[1], message[0]) if isinstance(x, str)), "")


def _inside(game: Any) -> tuple[Any, list[Callable[[str], str]]]:
    """The game without TextArena's wrappers, which do not pickle, and the functions of its action wrappers, outermost
    first."""
    writers: list[Callable[[str], str]] = []
    while isinstance(game, getattr(textarena, "Wrapper", ())):
        if hasattr(type(game), "action"):
            writers.append(game.action)
        game = game.env
    return game, writers
