"""Rollout engines: they answer prompts with the training parameters themselves, or with a copy elsewhere.

In: parameters and an `Ask` (prompts, sampling settings, a key). Out: a `Rollout` with tokens, masks and log-probs. A
draw is a function of the key, the row and the position, whatever the order of rows. Names are imported at their first
use, so that worker processes and `--help` load no torch.
Begin with `embedded.EmbeddedEngine`; `vllm` runs vLLM, `turns` conversations with tools and games.
"""

from typing import TYPE_CHECKING

from fppo._lazy import lazily

if TYPE_CHECKING:
    from fppo.rollout.embedded import EmbeddedEngine
    from fppo.rollout.engine import Ask, Engine, OnFinished, Sampling
    from fppo.rollout.interrupt import InterruptibleEngine
    from fppo.rollout.pool import EnginePool, PlacedEngine, Policy
    from fppo.rollout.requests import AdapterRequests, FinishedRequest, QueueFull, Request, RequestEngine, Requests
    from fppo.rollout.scores import Scores
    from fppo.rollout.spread import FetchingEngine, SpreadEngine
    from fppo.rollout.sync import SyncError, reshard
    from fppo.rollout.turns.engine import TurnsEngine
    from fppo.rollout.turns.games import Chance, End, Game, Turn
    from fppo.rollout.turns.observations import PlainText, chat_template
    from fppo.rollout.turns.runner import ToolRunner
    from fppo.rollout.vllm.engine import VllmEngine
    from fppo.rollout.vllm.host import EngineFailure
    from fppo.rollout.vllm.options import VllmOptions

__all__ = [
    "AdapterRequests",
    "Ask",
    "Chance",
    "EmbeddedEngine",
    "End",
    "Engine",
    "EngineFailure",
    "EnginePool",
    "FetchingEngine",
    "FinishedRequest",
    "Game",
    "InterruptibleEngine",
    "OnFinished",
    "PlacedEngine",
    "PlainText",
    "Policy",
    "QueueFull",
    "Request",
    "RequestEngine",
    "Requests",
    "Sampling",
    "Scores",
    "SpreadEngine",
    "SyncError",
    "ToolRunner",
    "Turn",
    "TurnsEngine",
    "VllmEngine",
    "VllmOptions",
    "chat_template",
    "reshard",
]

__getattr__ = lazily(__name__, __file__)
