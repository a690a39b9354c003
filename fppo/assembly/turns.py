"""Responses of several turns, as a run's settings ask for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from fppo.assembly.texts import chat_options
from fppo.fields import only
from fppo.rollout.engine import Engine
from fppo.rollout.turns import tools
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.games import Game
from fppo.rollout.turns.observations import PlainText, Within, chat_template
from fppo.rollout.turns.runner import ToolRunner
from fppo.runtime.mesh import Mesh
from fppo.settings.rollout import TurnsSettings
from fppo.settings.train import DataSettings


@contextlib.contextmanager
def in_turns(
    section: TurnsSettings,
    rows: DataSettings,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    pad_token_id: int,
    mesh: Mesh,
    *,
    vocabulary: int,
) -> Iterator[Engine]:
    """The engine with the settings' tool, for as long as the context lasts; the engine itself without one. What
    the policy is told holds tokens below `vocabulary`.

    Raises ValueError if there is no such tool, or the chat template does not take its messages.
    """
    if section.respond is None:
        yield engine
        return
    respond = tools.resolve(section.respond)
    roles = ("tool",) if section.failure else ()
    chat = rows.chat
    encode = chat_template(tokenizer, roles=roles, options=chat_options(rows)) if chat else PlainText(tokenizer)
    how = only(section, "failure", "time_limit", "workers")
    with ToolRunner(respond, **how, inline=section.respond in tools.TOOLS) as ready:
        yield TurnsEngine(
            engine=engine,
            tools=ready,
            encode=Within(encode, vocabulary),
            tokenizer=tokenizer,
            **only(section, "max_turns", "turn_tokens"),
            draws=respond.draws if isinstance(respond, Game) else None,
            pad_token_id=pad_token_id,
            mesh=mesh,
        )


def game_of(turns: TurnsSettings) -> Game:
    """The game that answers the policy's turns. Raises ValueError if something else does."""
    name = str(turns.respond)
    game = tools.resolve(name)
    if not isinstance(game, Game):
        text = f"rollout.turns.respond = {name!r} is no rollout.Game, whose ways to be played are known"
        raise ValueError(f"eval.exact_values = True: {text}")
    return game
