"""A seat at a game, for runs without files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from fppo.batch import Column, Rollout
from fppo.rollout import Ask, Engine, Game, PlainText, ToolRunner, TurnsEngine
from fppo.rollout.turns.games import EPISODE
from fppo.tree import replace


@attrs.frozen
class Seat:
    """An engine that plays a game in turns of one token; the ground truths of its rollouts are the episodes."""

    turns: TurnsEngine
    ends: tuple[int, ...]  # the tokens that are turns

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout; see `Engine`."""
        sampling = attrs.evolve(ask.sampling, stop_token_ids=self.ends)
        rollout = self.turns.generate(params, attrs.evolve(ask, sampling=sampling))
        return replace(rollout, ground_truth=Column([extra[EPISODE] for extra in rollout.extras]))


def seat(engine: Engine, tokenizer: Any, *, game: Game, actions: str, turns: int) -> Engine:
    """The engine at the game, whose turns are one of the characters of `actions` each."""
    at_game = TurnsEngine(
        engine=engine,
        tools=ToolRunner(game, inline=True),
        encode=PlainText(tokenizer),
        tokenizer=tokenizer,
        max_turns=turns,
        turn_tokens=1,
        pad_token_id=0,
        draws=game.draws,
    )
    return Seat(at_game, tuple(tokenizer.convert_tokens_to_ids(list(actions))))
