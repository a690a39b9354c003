"""Responses of several turns, as a run's settings ask for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from fppo.assembly.texts import chat_options
from fppo.rollout.engine import Engine
from fppo.rollout.turns import tools
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.observations import PlainText, chat_template
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
            encode=encode,
            tokenizer=tokenizer,
            max_turns=section.max_turns,
            turn_tokens=section.turn_tokens,
            pad_token_id=pad_token_id,
            mesh=mesh,
        )
