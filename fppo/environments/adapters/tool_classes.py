"""Adapter for classes whose public methods are tools, as in TRL's `environment_factory`: they have `reset(**row)`, and
may have `get_reward()`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from fppo._errors import printable, shown
from fppo.environments.adapters.objects import Kept, seed_generators
from fppo.environments.protocol import Begin, Reply, Step
from fppo.workers.imports import imported

CALL = r"<tool_call>\s*(\{.*?\})\s*</tool_call>"  # Qwen's form


class ToolClass:
    """Episodes with an object of the class `make` (module:name). The regular expression `call` finds the calls in a
    turn, JSON with "name" and "arguments"; messages of the role tool answer them. A turn without calls ends the
    episode, with `get_reward()` as its reward."""

    def __init__(self, *, make: str | Callable[[], Any], call: str = CALL) -> None:
        self._make = imported(make, "environment", also=type) if isinstance(make, str) else make
        self._call = re.compile(call, re.DOTALL)

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """Make an object and reset it with the row's fields; the text that it returns, if any, is the prompt."""
        seed_generators(seed, 0)
        held = self._make()
        text = held.reset(**row)
        return Begin(Kept(seed, 0, held), [{"role": "user", "content": text}] if text else ())

    def step(self, state: Kept, reply: Reply) -> Step:
        """Answer the calls in a turn; a turn without calls, or a cut one, gets the episode's reward."""
        seed_generators(state.seed, state.turn + 1)
        calls = self._call.findall(reply.text)
        answers = [{"role": "tool", **self._called(state.environment, call)} for call in calls]
        ends = not calls or not reply.end
        reward = state.environment.get_reward() if ends and hasattr(state.environment, "get_reward") else 0.0
        return Step(Kept(state.seed, state.turn + 1, state.environment), answers, reward, not calls)

    def _called(self, instance: Any, text: str) -> dict[str, str]:
        name = "tool"
        try:
            call = json.loads(text)
            name = printable(str(call["name"]), 100)
            if name not in tool_names(type(instance)):
                return {"name": name, "content": f"error: there is no tool {shown(name)}"}
            return {"name": name, "content": str(getattr(instance, name)(**call.get("arguments", {})))}
        except Exception as error:  # the policy's mistakes are answered
            return {"name": name, "content": f"error: {printable(str(error), 400)}"}


def tool_names(kind: type) -> list[str]:
    """The names of a class's methods that are tools: all public methods but reset and get_reward."""
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in methods if not name.startswith("_") and name not in ("reset", "get_reward")]
