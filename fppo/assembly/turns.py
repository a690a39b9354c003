"""Responses of several turns, as a run's settings ask for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from fppo.assembly.texts import chat_options, vocabulary_size_of
from fppo.rollout.engine import Engine
from fppo.rollout.turns import tools
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.games import Game
from fppo.rollout.turns.observations import PlainText, Within, chat_template
from fppo.rollout.turns.runner import ToolRunner
from fppo.runtime.mesh import Mesh
from fppo.settings.train import TrainSettings


@contextlib.contextmanager
def in_turns(
    settings: TrainSettings, engine: Engine, tokenizer: PreTrainedTokenizerBase, pad_token_id: int, mesh: Mesh
) -> Iterator[Engine]:
    """The engine with the settings' tool, for as long as the context lasts; the engine itself without one.

    Raises ValueError if there is no such tool, or the chat template does not take its messages.
    """
    section = settings.rollout.turns
    if section.respond is None:
        yield engine
        return
    respond = tools.resolve(section.respond)
    roles = ("tool",) if section.failure else ()
    chat = settings.data.chat
    encode = chat_template(tokenizer, roles=roles, options=chat_options(settings)) if chat else PlainText(tokenizer)
    with ToolRunner(
        respond,
        failure=section.failure,
        time_limit=section.time_limit,
        workers=section.workers,
        inline=section.respond in tools.TOOLS,
    ) as ready:
        yield TurnsEngine(
            engine=engine,
            tools=ready,
            encode=Within(encode, vocabulary_size_of(settings)),
            tokenizer=tokenizer,
            max_turns=section.max_turns,
            turn_tokens=section.turn_tokens,
            draws=respond.draws if isinstance(respond, Game) else None,
            pad_token_id=pad_token_id,
            mesh=mesh,
        )


def game_of(settings: TrainSettings) -> Game:
    """The game that answers the policy's turns. Raises ValueError if something else does."""
    name = str(settings.rollout.turns.respond)
    game = tools.resolve(name)
    if not isinstance(game, Game):
        text = f"rollout.turns.respond = {name!r} is no rollout.Game, whose ways to be played are known"
        raise ValueError(f"eval.exact_values = True: {text}")
    return game
