"""TextArena: games in text of one or several players, of whom the policy is one (pip install textarena)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import textarena  # pyright: ignore[reportMissingImports]

from fppo.environments.adapters.objects import SMALL, Kept, seed_generators
from fppo.environments.protocol import Begin, Message, Reply, Step
from fppo.workers.imports import imported


class TextArena:
    """The game `game`, as "KuhnPoker-v0-raw", in which the policy is a player drawn by the seed.

    The others are `opponent`, module:function of the text that a player sees and a `random` module that is seeded, for
    a text. Rewards are those of the game's end; a cut or invalid move is what the game makes of it.
    """

    def __init__(self, *, game: str, players: int = 2, opponent: str | Callable[..., str] | None = None) -> None:
        if players > 1 and opponent is None:
            raise ValueError(f"{game} with {players} players: give opponent = module:function for the others")
        self._game, self._players = game, players
        self._opponent = imported(opponent, "opponent") if isinstance(opponent, str) else opponent

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """The game up to the policy's first move."""
        seed_generators(seed, 0)
        game = textarena.make(self._game)
        game.reset(num_players=self._players, seed=seed % SMALL)
        messages, _ = self._until_policy(game, seed, False)
        return Begin(Kept(seed, 0, game), messages)

    def step(self, state: Kept, reply: Reply) -> Step:
        """The game after a move, and those of the others."""
        seed_generators(state.seed, state.turn + 1)
        game = state.held
        done, _ = game.step(reply.text)
        messages, done = self._until_policy(game, state.seed, done)
        kept = Kept(state.seed, state.turn + 1, game)
        if not done:
            return Step(kept, messages)
        rewards, info = game.close()
        me = state.seed % self._players
        return Step(kept, (), float(rewards[me]), True, {"invalid": float(info[me].get("invalid_move", False))})

    def _until_policy(self, game: Any, seed: int, done: bool) -> tuple[list[Message], bool]:
        while not done:
            player, seen = game.get_observation()
            text = "\n".join(message for _, message, _ in seen)
            if player == seed % self._players:
                return [{"role": "user", "content": text}], False
            assert self._opponent is not None
            done, _ = game.step(self._opponent(text, random))
        return [], True
