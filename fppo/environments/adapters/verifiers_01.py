"""verifiers 0.1: `MultiTurnEnv` with `env_response` and a rubric. Later versions have no step, but an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import dill
import verifiers  # pyright: ignore[reportMissingImports]
from verifiers.types import AssistantMessage  # pyright: ignore[reportMissingImports]

from fppo.environments.protocol import Begin, Message, Reply, Step
from fppo.workers.imports import imported


class Verifiers:
    """The verifiers environment that `env` makes with `arguments`; `env` is a name for `load_environment`, or
    module:function. A row's "number", or else the seed, chooses a row of the environment's data set."""

    def __init__(self, *, env: str | Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> None:
        make: Any = imported(env, "environment") if isinstance(env, str) and ":" in env else env
        given = dict(arguments or {})
        self._env: Any = make(**given) if callable(make) else verifiers.load_environment(make, **given)
        self._rows, self._loop = self._env.get_dataset(), asyncio.new_event_loop()

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        return self._loop.run_until_complete(self._reset(int(row.get("number", seed)) % len(self._rows)))

    def step(self, state: bytes, reply: Reply) -> Step:
        return self._loop.run_until_complete(self._step(dill.loads(state), reply))

    async def _reset(self, number: int) -> Begin:
        state = await self._env.init_state(dict(self._rows[number]), _NoClient(), "policy", {})
        await self._env.setup_state(state)
        return Begin(dill.dumps(state), [_plain(message) for message in state["prompt"]])

    async def _step(self, state: Any, reply: Reply) -> Step:
        said, prompt = AssistantMessage(content=reply.text), state.get("read", state["prompt"])
        turn = {"prompt": prompt, "completion": [said], "is_truncated": not reply.end, "extras": {}}
        turn |= dict.fromkeys(("response", "tokens", "reward", "advantage")) | {"trajectory_id": state["trajectory_id"]}
        state["trajectory"].append(turn)
        if reply.end and not await self._env.is_completed(state):
            new = await self._env.env_response([*prompt, said], state)
            if not await self._env.is_completed(state):
                state["read"] = [*prompt, said, *new]
                return Step(dill.dumps(state), [_plain(message) for message in new])
        await self._env.render_completion(state)
        await self._env.rubric.score_rollout(state)
        return Step(dill.dumps(state), (), state["reward"], True, dict(state.get("metrics") or {}))


class _NoClient(verifiers.Client):  # the policy answers in its place
    __init__ = object.__init__


_NoClient.__abstractmethods__ = frozenset()


def _plain(message: Any) -> Message:
    fields = message if isinstance(message, dict) else message.model_dump()
    return {"role": fields["role"], "content": fields["content"]}
