"""An engine whose responses are episodes of an agent, which speaks to the policy over HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from fppo.batch import Rollout
from fppo.rollout.engine import Ask, Engine
from fppo.rollout.records import number_rows
from fppo.rollout.turns.engine import Thinking
from fppo.rollout.turns.episode import data_row, seeds_of
from fppo.serve.agents import Plays, RowChoice
from fppo.serve.app import app_of
from fppo.serve.episodes import Episodes, row_number
from fppo.serve.loop import EngineLoop
from fppo.serve.openai import router_of
from fppo.serve.rows import rollout_of_played
from fppo.serve.server import LOOPBACK, bound_socket, new_key, serving
from fppo.serve.service import Bounds, Service, Sources
from fppo.serve.texts import Texts

SEED = "seed"  # the key under which a row has a number that the responses to its prompt share


class AgentEngine:
    """An engine whose responses are episodes of an agent; use it in a `with` statement.

    For every response the agent is called with the prompt's data row, the URL of an endpoint and its key, and the
    policy's answers there are the response: `turn_ids` number its answers, and `turn_rewards` hold the agent's score at
    the last token, nan where it failed. The row has a "seed" of 62 bits, which depends on the key and the prompt alone.
    The prompt is what the agent sends, and not that of `ask`.

    `ask.sampling` draws the answers, whatever options of sampling the agent asks for; max_tokens is the agent's own,
    and its stops end answers beside those of `ask.sampling`. A row has at most `ask.sampling.max_tokens` tokens,
    including the text between answers, and `bounds.row_tokens` with its prompt. An agent that edits its history begins
    another row: a response is the row with the most tokens of the policy's, or with rows = "all" all rows of the
    episode (`Rollout.episodes`): then there may be more rows than were asked for, and the score is at the last token of
    the last one. With `thinking = "drop"` every answer to a chat is a row, whose prompt is the conversation as the chat
    template renders it, and all rows are taken. Rows are not reported early, and `ask.newer` is asked for weights
    between steps of decoding.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Plays,
        texts: Texts,
        *,
        pad_token_id: int,
        bounds: Bounds | None = None,
        rows: RowChoice = "longest",
        thinking: Thinking = "keep",
        model: str = "policy",
    ) -> None:
        self._engine, self._agent, self._pad = engine, agent, pad_token_id
        self._all, self._anew = rows == "all" or thinking == "drop", thinking == "drop"
        self._bounds, self._key, self._numbers = bounds or Bounds(), new_key(), itertools.count()
        self._texts, self._model = texts, model
        self._episodes = Episodes(self._bounds.recorded_tokens)
        self._service: Service | None = None
        self._opened = ExitStack()
        self._url = ""

    def __enter__(self) -> Self:
        self._opened.enter_context(self._agent)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout, with `token_versions`. Raises whatever the engine raised while the agents played."""
        number, numbers = next(self._numbers), number_rows(ask, torch.device("cpu")).tolist()
        names = [f"{number}-{row}" for row in numbers]
        sources = self._sources(ask)
        service = self._serve(sources)
        loop = EngineLoop(self._engine, params, version=ask.version, newer=ask.newer).start()
        try:
            service.attach(loop, sources)
            urls = [f"{self._url}/e/{name}/v1" for name in names]
            played = self._agent.play(self._rows(ask), urls, self._key, f"{self._url}/v1")
        finally:
            service.attach(None)
            loop.stop()
        if loop.failure is not None:
            raise loop.failure
        taken = [self._episodes.take(name if x.name is None else x.name) for name, x in zip(names, played, strict=True)]
        for name in self._episodes.names():  # of clients other than the agent's
            self._episodes.take(name)
        return rollout_of_played(ask, taken, played, pad_token_id=self._pad, every=self._all)

    def _sources(self, ask: Ask) -> Sources:
        most = ask.sampling.max_tokens
        bounds = attrs.evolve(self._bounds, response_tokens=most, answer_tokens=min(self._bounds.answer_tokens, most))
        return Sources(
            texts=self._texts,
            sampling=attrs.evolve(ask.sampling, n=1),
            key=ask.key,
            bounds=bounds,
            model=self._model,
            keeps_sampling=True,
            repeats=True,
            anew=self._anew,
            row_of=_row_of,
        )

    def _serve(self, sources: Sources) -> Service:
        """The service, whose server starts with the first rollout."""
        if self._service is None:
            self._service = Service(sources, self._episodes)
            app = app_of([router_of(self._service)], key=self._key, bounds=self._bounds)
            self._url = self._opened.enter_context(serving(app, bound_socket(LOOPBACK, 0)))
        return self._service

    def _rows(self, ask: Ask) -> list[dict[str, Any]]:
        """The data rows of all responses."""
        rows = [{**data_row(ask.prompts, row), SEED: seed} for row, seed in enumerate(seeds_of(ask, SEED))]
        return [row for row in rows for _ in range(ask.sampling.n)]


def _row_of(name: str) -> int:
    """The number by which an episode's answers are drawn: its row, in a name "ROLLOUT-ROW" of this engine, else
    `row_number`."""
    first, _, number = name.partition("-")
    return int(number) if first.isdigit() and number.isdigit() else row_number(name)
