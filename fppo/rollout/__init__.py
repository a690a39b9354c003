"""Rollout: engines that answer prompts, on the training parameters themselves or elsewhere.

In: parameters and an `Ask`: prompts, how to sample, a key. Out: a `Rollout` with tokens, masks and log-probs; a draw is
a function of the key, the row and the position, whatever the order of rows.
A name is imported when it is first used: worker processes and `--help` come through here, and load no torch.
Begin with `embedded.EmbeddedEngine`; `vllm` has another's engine, `turns` conversations with tools and games.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fppo.rollout.embedded import EmbeddedEngine as EmbeddedEngine
    from fppo.rollout.engine import Ask as Ask
    from fppo.rollout.engine import Engine as Engine
    from fppo.rollout.engine import OnFinished as OnFinished
    from fppo.rollout.engine import Sampling as Sampling
    from fppo.rollout.interrupt import InterruptibleEngine as InterruptibleEngine
    from fppo.rollout.placed import PlacedEngine as PlacedEngine
    from fppo.rollout.pool import EnginePool as EnginePool
    from fppo.rollout.pool import Policy as Policy
    from fppo.rollout.spread import FetchingEngine as FetchingEngine
    from fppo.rollout.spread import SpreadEngine as SpreadEngine
    from fppo.rollout.sync import SyncError as SyncError
    from fppo.rollout.sync import reshard as reshard
    from fppo.rollout.turns.engine import TurnsEngine as TurnsEngine
    from fppo.rollout.turns.engine import turn_metrics as turn_metrics
    from fppo.rollout.turns.games import Chance as Chance
    from fppo.rollout.turns.games import End as End
    from fppo.rollout.turns.games import Game as Game
    from fppo.rollout.turns.games import Turn as Turn
    from fppo.rollout.turns.observations import PlainText as PlainText
    from fppo.rollout.turns.observations import chat_template as chat_template
    from fppo.rollout.turns.runner import ToolRunner as ToolRunner
    from fppo.rollout.vllm.engine import VllmEngine as VllmEngine
    from fppo.rollout.vllm.host import EngineFailure as EngineFailure
    from fppo.rollout.vllm.options import VllmOptions as VllmOptions

__all__ = [
    "Ask",
    "Chance",
    "EmbeddedEngine",
    "End",
    "Engine",
    "EngineFailure",
    "EnginePool",
    "FetchingEngine",
    "Game",
    "InterruptibleEngine",
    "OnFinished",
    "PlacedEngine",
    "PlainText",
    "Policy",
    "Sampling",
    "SpreadEngine",
    "SyncError",
    "ToolRunner",
    "Turn",
    "TurnsEngine",
    "VllmEngine",
    "VllmOptions",
    "chat_template",
    "reshard",
    "turn_metrics",
]
_HOMES = {
    "embedded": ("EmbeddedEngine",),
    "engine": ("Ask", "Engine", "OnFinished", "Sampling"),
    "interrupt": ("InterruptibleEngine",),
    "placed": ("PlacedEngine",),
    "pool": ("EnginePool", "Policy"),
    "spread": ("FetchingEngine", "SpreadEngine"),
    "sync": ("SyncError", "reshard"),
    "turns.engine": ("TurnsEngine", "turn_metrics"),
    "turns.games": ("Chance", "End", "Game", "Turn"),
    "turns.observations": ("PlainText", "chat_template"),
    "turns.runner": ("ToolRunner",),
    "vllm.engine": ("VllmEngine",),
    "vllm.host": ("EngineFailure",),
    "vllm.options": ("VllmOptions",),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
