"""Requests for an engine that has only `generate`: all waiting requests are answered together, to their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fppo.batch import Column, Prompts, Rollout, RowInputs
from fppo.rollout.engine import Ask, Engine
from fppo.rollout.requests import (
    DrawnTokens,
    FinishedRequest,
    QueueFull,
    Request,
    RequestCounts,
    Requests,
    StepResult,
)
from fppo.rollout.rows import check_names, check_without


def opened(
    engine: Engine,
    params: Mapping[str, Tensor],
    *,
    version: int = 0,
    most_waiting: int | None = None,
    together: tuple[str, ...] = (),
) -> AbstractContextManager[Requests]:
    """Open an engine for requests, by its own `open` or, if it has none, by `generated`. Only `generated` reads
    `together`: the mesh axes whose ranks must all make the same calls."""
    if hasattr(engine, "open"):
        return engine.open(params, version=version, most_waiting=most_waiting)  # type: ignore[attr-defined]
    return generated(engine, params, version=version, most_waiting=most_waiting, together=together)


@contextmanager
def generated(
    engine: Engine, params: Mapping[str, Tensor], *, version: int, most_waiting: int | None, together: tuple[str, ...]
) -> Iterator[Requests]:
    """Open an engine without `open` for requests, which `engine.generate` answers. The arguments are those of
    `opened`."""
    yield GeneratedRequests(engine, params, version, most_waiting, together)


class _Continued:
    """A row's tokens, its images, and how many of its tokens an engine has run."""

    def __init__(self, ids: Sequence[int], inputs: RowInputs | None, ran: int) -> None:
        self.ids, self.inputs, self.ran = [*ids], inputs, ran


class GeneratedRequests:
    """`Requests` that `engine.generate` answers. A step answers all waiting requests to their ends. The prompt of a
    request is all tokens of its row so far, which are computed anew."""

    def __init__(
        self,
        engine: Engine,
        params: Mapping[str, Tensor],
        version: int,
        most_waiting: int | None,
        together: tuple[str, ...],
    ) -> None:
        self._engine, self._params, self._version = engine, params, version
        self._most_waiting, self._together = most_waiting, together
        self._waiting: dict[str, tuple[Request, _Continued]] = {}
        self._kept: dict[str, _Continued] = {}
        self._cancelled: list[FinishedRequest] = []

    @property
    def together(self) -> tuple[str, ...]:
        """Mesh axes whose ranks answer together, and so must make the same calls."""
        return self._together

    @property
    def limit(self) -> int | None:
        """None: the engine itself refuses rows that are too long."""
        return None

    @property
    def counts(self) -> RequestCounts:
        """The numbers of requests. No request is drawing, since a step answers requests to their ends."""
        return RequestCounts(len(self._waiting), 0, len(self._kept))

    def add(self, requests: Sequence[Request]) -> None:
        """Implement `Requests.add`."""
        waiting = len(self._waiting) + len(requests)
        if self._most_waiting is not None and waiting > self._most_waiting:
            raise QueueFull(f"{waiting} requests would wait, and at most {self._most_waiting} may: add them later")
        check_names(requests, self._kept, self._waiting)
        check_without(requests, "an engine that only generates")
        for request in requests:
            had = _Continued((), request.inputs, 0) if request.after is None else self._kept[request.after]
            self._waiting[request.name] = request, _Continued([*had.ids, *request.ids], had.inputs, had.ran)

    def step(self) -> StepResult:
        """Implement `Requests.step`."""
        finished, self._cancelled = self._cancelled, []
        waiting, self._waiting = [*self._waiting.values()], {}
        alike: dict[Any, list[tuple[Request, _Continued]]] = {}
        for request, row in waiting:
            how = request.sampling
            drawn = how.temperature, how.top_k, how.top_p, how.greedy, request.key, request.position
            alike.setdefault((*drawn, how.stop_token_ids, id(how.stop_texts)), []).append((request, row))
        done = [each for group in alike.values() for each in self._answered(group)]
        drawn = [
            (one.name, *token)
            for one in done
            for token in zip(one.tokens.tolist(), one.log_probs.tolist(), one.sampling_log_probs.tolist(), strict=True)
        ]
        columns = [[*column] for column in zip(*drawn, strict=True)] if drawn else [[], [], [], []]
        return StepResult(DrawnTokens(*columns, version=self._version), [*finished, *done])

    def _answered(self, group: Sequence[tuple[Request, _Continued]]) -> list[FinishedRequest]:
        group, n = _samples(group)
        first, rows = group[0][0], [row for _, row in group[::n]]
        limits = torch.tensor([request.sampling.max_tokens for request, _ in group[::n]])
        ask = Ask(
            prompts=_prompts(rows, [request.row // n for request, _ in group[::n]]),
            sampling=attrs.evolve(first.sampling, n=n, max_tokens=int(limits.max())),
            key=first.key,
            version=self._version,
            limits=limits,
            offset=first.position,
        )
        rollout = self._engine.generate(self._params, ask)
        return [self._finished(request, row, rollout, place) for place, (request, row) in enumerate(group)]

    def _finished(self, request: Request, row: _Continued, rollout: Rollout, place: int) -> FinishedRequest:
        width = rollout.response_mask.shape[1]
        mask = rollout.response_mask[place]
        tokens = rollout.tokens[place, -width:][mask].cpu()
        versions = torch.full_like(tokens, int(rollout.versions[place]), dtype=torch.int32)
        if rollout.token_versions is not None:
            versions = rollout.token_versions[place][mask].cpu()
        row.ids += tokens.tolist()
        experts, ran = None, len(row.ids) - 1
        if rollout.routed is not None:
            experts = rollout.routed[place][rollout.attention_mask[place].bool()][row.ran : ran].cpu()
        if request.keep:
            self._kept[request.name] = _Continued(row.ids, row.inputs, ran)
        return FinishedRequest(
            name=request.name,
            tokens=tokens,
            log_probs=rollout.rollout_log_probs[place][mask].cpu(),
            sampling_log_probs=rollout.sampling_log_probs[place][mask].cpu(),
            versions=versions,
            end=rollout.finish[place],
            fed=ran,
            experts=experts,
        )

    def cancel(self, names: Sequence[str]) -> None:
        """Implement `Requests.cancel`."""
        for name in names:
            request, row = self._waiting.pop(name, (None, None))
            if request is None or row is None:
                continue
            if request.keep:
                self._kept[name] = row
            nothing = torch.zeros(0)
            none = torch.zeros(0, dtype=torch.int64)
            self._cancelled.append(
                FinishedRequest(
                    name=name,
                    tokens=none,
                    log_probs=nothing,
                    sampling_log_probs=nothing,
                    versions=none.int(),
                    end="cancelled",
                    fed=0,
                )
            )

    def release(self, names: Sequence[str]) -> None:
        """Implement `Requests.release`."""
        for name in names:
            self._kept.pop(name, None)

    def update(self, params: Mapping[str, Tensor], version: int) -> None:
        """Implement `Requests.update`."""
        self._params, self._version = params, version


def _samples(group: Sequence[tuple[Request, _Continued]]) -> tuple[list[tuple[Request, _Continued]], int]:
    """Sort requests by row. Also returns n if each n adjacent requests are samples of one prompt, else 1."""
    group = sorted(group, key=lambda each: each[0].row)
    first = group[0]
    n = next((i for i, each in enumerate(group) if not _same_prompt(first, each)), len(group))
    parts = [group[i : i + n] for i in range(0, len(group), n)]
    whole = all(
        [request.row for request, _ in part] == list(range(part[0][0].row, part[0][0].row + n))
        and part[0][0].row % n == 0
        and all(_same_prompt(part[0], each) for each in part)
        for part in parts
    )
    return group, n if whole else 1


def _same_prompt(a: tuple[Request, _Continued], b: tuple[Request, _Continued]) -> bool:
    most = a[0].sampling.max_tokens == b[0].sampling.max_tokens
    return most and a[1].ids == b[1].ids and a[1].inputs is b[1].inputs


def _prompts(rows: Sequence[_Continued], numbers: Sequence[int]) -> Prompts:
    """Make prompts of the rows' tokens so far, padded on the left; `numbers` are their row ids."""
    tokens = [torch.tensor(row.ids) for row in rows]
    there = [torch.ones(len(row.ids), dtype=torch.bool) for row in rows]
    nothing, inputs = Column([None] * len(rows)), [row.inputs for row in rows]
    return Prompts(
        tokens=pad_sequence(tokens, batch_first=True, padding_side="left"),
        attention_mask=pad_sequence(there, batch_first=True, padding_side="left"),
        row_ids=torch.tensor(numbers),
        ids=nothing,
        ground_truth=nothing,
        source=Column([""] * len(rows)),
        extras=Column([{}] * len(rows)),
        inputs=Column(inputs) if any(x is not None for x in inputs) else None,
    )
