"""Serve a policy by OpenAI's protocol to programs that know nothing of training; its answers are recorded.

In: an engine that is open for requests, a tokenizer, a key, bounds. Out: answers over HTTP, and episodes: rows of ids
with masks, log-probs and versions, as rollouts.
A name is imported when it is first used: worker processes, which play agents, load no torch.
Begin with `service.Service`, the way from a request to an answer; `app` has the key and the bounds of all routes,
`openai` the routes of this protocol, `loop` the thread that decodes, `engine` an engine of agents to train.
"""

from typing import TYPE_CHECKING

from fppo._lazy import lazily

if TYPE_CHECKING:
    from fppo.serve.agents import Agent, AgentRunner
    from fppo.serve.app import app_of
    from fppo.serve.engine import AgentEngine
    from fppo.serve.episodes import EpisodeRow, Episodes
    from fppo.serve.loop import EngineLoop
    from fppo.serve.openai import router_of
    from fppo.serve.rows import rollout_of_rows
    from fppo.serve.server import bound_socket, new_key, serving
    from fppo.serve.service import Bounds, Service, Sources
    from fppo.serve.texts import Texts, texts_of

__all__ = [
    "Agent",
    "AgentEngine",
    "AgentRunner",
    "Bounds",
    "EngineLoop",
    "EpisodeRow",
    "Episodes",
    "Service",
    "Sources",
    "Texts",
    "app_of",
    "bound_socket",
    "new_key",
    "rollout_of_rows",
    "router_of",
    "serving",
    "texts_of",
]

__getattr__ = lazily(__name__, __file__)
