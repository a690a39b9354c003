"""Agents: programs that speak to an OpenAI-compatible endpoint. Worker processes import this module; it loads no torch.

An agent is `play(row, base_url, api_key)`, a function or a coroutine: it makes a client from the URL and the key, does
its work, and returns a score: a number, or a dict with "score" and other named numbers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from fppo.workers.imports import imported
from fppo.workers.runner import FunctionRunner, WorkerFunction
from fppo.workers.sample import Sample, name_of, sample_of

_log = logging.getLogger("fppo.serve")
_CALL = "call"  # the key under which a worker's sample holds the arguments
RowChoice = Literal["longest", "all"]  # the rows of an episode that are trained on
Play = Callable[[Mapping[str, Any], str, str], Any]


class Agent:
    """An agent that settings name: `play` is "module:function".

    In each process at most `concurrency` episodes are played at a time, for at most `time_limit` seconds. An agent that
    edits its history begins another row; `rows` is "longest" or "all", as `AgentEngine` has it. Raises ValueError for a
    name that does not import, and for invalid bounds.
    """

    def __init__(self, *, play: str, concurrency: int = 64, time_limit: float = 300.0, rows: str = "longest") -> None:
        self.play: Play = imported(play, "rollout.environment.play")
        self.concurrency, self.time_limit = concurrency, time_limit
        if concurrency < 1 or not time_limit > 0:
            text = f"concurrency = {concurrency}, time_limit = {time_limit}: both must be above 0"
            raise ValueError(f"rollout.environment.{text}")
        if rows not in ("longest", "all"):
            raise ValueError(f'rollout.environment.rows = {rows!r}: give "longest" or "all"')
        self.rows: RowChoice = rows


class PlayedEpisode(NamedTuple):
    """The score of an episode, nan where the agent failed, and its other numbers."""

    score: float
    numbers: Mapping[str, float]
    failed: bool
    name: str | None = None  # of the episode, where a client names its own


class Plays(Protocol):
    """A player of episodes: `play` gets a data row and a URL for each episode; a player whose client names the episodes
    itself uses the URL `base`."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...

    def play(
        self, rows: Sequence[Mapping[str, Any]], urls: Sequence[str], key: str, base: str
    ) -> list[PlayedEpisode]: ...


class AgentCall:
    """An agent as worker processes call it: a coroutine, whatever the agent is."""

    def __init__(self, play: Play, concurrency: int) -> None:
        self._play, self._concurrency = play, concurrency
        self.__name__ = name_of(play)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return AgentCall, (self._play, self._concurrency)  # threads stay in their process

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._concurrency, "agent")

    async def __call__(self, sample: Sample) -> Any:
        arguments = sample.extras[_CALL]
        if inspect.iscoroutinefunction(self._play):
            return await self._play(*arguments)
        result = await asyncio.get_running_loop().run_in_executor(self._threads, self._play, *arguments)
        return await result if inspect.isawaitable(result) else result


class AgentRunner(FunctionRunner):
    """An agent, ready to play; close it, or use it in a `with` statement.

    It runs in `workers` processes, or with `inline` in this one, with `concurrency` episodes at a time in each. An
    episode that raises, or takes longer than `time_limit` seconds, has no score. Failures are logged.
    """

    def __init__(
        self,
        play: Play,
        *,
        time_limit: float = 300.0,
        workers: int = 1,
        concurrency: int = 64,
        start_limit: float = 120.0,
        inline: bool = False,
    ) -> None:
        self._calls = WorkerFunction(name_of(play), AgentCall(play, concurrency), True, inline)
        super().__init__(
            [self._calls],
            role="agent",
            time_limit=time_limit,
            workers=workers,
            concurrency=concurrency,
            start_limit=start_limit,
        )

    def play(self, rows: Sequence[Mapping[str, Any]], urls: Sequence[str], key: str, base: str) -> list[PlayedEpisode]:
        """Play an episode for each row, at a URL of its own, and return their scores; `base` is not read."""
        del base
        samples = [sample_of({_CALL: (dict(row), url, key)}) for row, url in zip(rows, urls, strict=True)]
        outcomes = self.logged_outcomes(self._calls, samples, "episodes", _log)
        return [
            PlayedEpisode(x.score, x.named, False) if x.kind == "value" else PlayedEpisode(float("nan"), {}, True)
            for x in outcomes
        ]
