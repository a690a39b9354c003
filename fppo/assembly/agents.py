"""The engine for episodes of an agent that settings name. Only runs with an agent import this: it needs a server."""

from __future__ import annotations

from fppo.assembly.environments import PATH, agent_of
from fppo.assembly.inputs import Inputs
from fppo.assembly.texts import chat_options
from fppo.data import vocabulary_size
from fppo.fields import WrongSetting
from fppo.rollout.engine import Engine
from fppo.runtime.mesh import AXES, Mesh, ranks_on
from fppo.serve.agents import AgentRunner
from fppo.serve.engine import AgentEngine
from fppo.serve.service import Bounds
from fppo.serve.texts import texts_of


def agent_engine(inputs: Inputs, engine: Engine, pad_token_id: int, mesh: Mesh) -> AgentEngine:
    """The engine whose responses an agent plays; use it in a `with` statement.

    Raises ValueError, naming the setting, for an agent that does not import, and for several ranks.
    """
    rollout, rows, tokenizer = inputs.settings.rollout, inputs.settings.data, inputs.tokenizer
    section = rollout.environment
    agent = agent_of(section)
    if ranks_on(mesh, AXES) > 1:
        raise WrongSetting(f"{PATH}.name", section.name, "is played on one rank: give the mesh one")
    texts = texts_of(
        tokenizer,
        vocabulary=vocabulary_size(inputs.config),
        chat=tokenizer.chat_template is not None,
        options=chat_options(rows),
    )
    return AgentEngine(
        engine,
        AgentRunner(
            agent.play,
            time_limit=agent.time_limit,
            workers=rollout.turns.workers,
            concurrency=agent.concurrency,
        ),
        texts,
        pad_token_id=pad_token_id,
        bounds=Bounds(
            row_tokens=rows.max_prompt_tokens + rollout.max_tokens,
            answer_tokens=rollout.turns.turn_tokens or rollout.max_tokens,
        ),
        rows=agent.rows,
        thinking=rollout.turns.thinking,
    )
