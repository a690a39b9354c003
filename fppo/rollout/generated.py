"""Requests for an engine that has only `generate`: all waiting requests are answered together, to their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fppo.batch import Column, Prompts, Rollout, RowInputs
from fppo.data.stops import StopReader
from fppo.rollout.engine import Ask, Engine
from fppo.rollout.requests import (
    DrawnTokens,
    End,
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
    yield GeneratedRequests(engine.generate, params, version, most_waiting, together)


class _Continued:
    """A row's tokens, its images, and how many of its tokens an engine has run."""

    def __init__(self, ids: Sequence[int], inputs: RowInputs | None, ran: int) -> None:
        self.ids, self.inputs, self.ran = [*ids], inputs, ran


class _OpenRow(NamedTuple):
    """A request, its row, and what it has drawn so far."""

    request: Request
    row: _Continued
    reader: StopReader | None
    pieces: list[_AnsweredPart]

    @property
    def drawn(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def left(self) -> int:
        return self.request.sampling.max_tokens - self.drawn

    def finished(self, end: End) -> FinishedRequest:
        none = torch.zeros(0, dtype=torch.int64)
        pieces = self.pieces or [_AnsweredPart(none, none.float(), none.float(), none.int())]
        *columns, experts = zip(*pieces, strict=True)
        tokens, log_probs, others, versions = (torch.cat(column) for column in columns)
        found = [own for own in experts if own is not None]
        return FinishedRequest(
            name=self.request.name,
            tokens=tokens,
            log_probs=log_probs,
            sampling_log_probs=others,
            versions=versions,
            end=end,
            fed=self.row.ran if self.pieces else 0,
            experts=torch.cat(found) if found else None,
        )


class _AnsweredPart(NamedTuple):
    """Consecutive tokens of one answer, on the host."""

    tokens: Tensor  # int64 [T]
    log_probs: Tensor
    sampling_log_probs: Tensor
    versions: Tensor  # int32
    experts: Tensor | None = None  # [M, L, k] of the M tokens that ran for it first


class GeneratedRequests:
    """`Requests` that `generate` answers: a step answers all waiting requests to their ends, or up to so many tokens of
    each. The prompt of a request is all tokens of its row so far, which are computed anew."""

    def __init__(
        self,
        generate: Callable[[Mapping[str, Tensor], Ask], Rollout],
        params: Mapping[str, Tensor],
        version: int,
        most_waiting: int | None = None,
        together: tuple[str, ...] = (),
    ) -> None:
        self._generate, self._params, self._version = generate, params, version
        self._most_waiting, self._together = most_waiting, together
        self._waiting: dict[str, _OpenRow] = {}
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
        """Queue requests, all of them or none, for the next step; see `Requests.add` for its errors."""
        waiting = len(self._waiting) + len(requests)
        if self._most_waiting is not None and waiting > self._most_waiting:
            raise QueueFull(f"{waiting} requests would wait, and at most {self._most_waiting} may: add them later")
        check_names(requests, self._kept, self._waiting)
        check_without(requests, "an engine that only generates")
        for request in requests:
            had = _Continued((), request.inputs, 0) if request.after is None else self._kept[request.after]
            row, texts = _Continued([*had.ids, *request.ids], had.inputs, had.ran), request.sampling.stop_texts
            reader = None if texts is None else StopReader(texts)
            self._waiting[request.name] = _OpenRow(request, row, reader, [])

    def step(self, most: int | None = None) -> StepResult:
        """Draw all tokens of every request that waits, or up to `most` of each, and return those that ended; see
        `Requests.step`."""
        finished, self._cancelled = self._cancelled, []
        alike: dict[Any, list[_OpenRow]] = {}
        for row in self._waiting.values():
            request, how = row.request, row.request.sampling
            drawn = how.per_token, how.stop_token_ids, id(how.stop_texts), request.key, request.position + row.drawn
            alike.setdefault(drawn, []).append(row)
        done = [each for group in alike.values() for each in self._answered(group, most)]
        if most is not None:
            return StepResult(DrawnTokens(version=self._version), [*finished, *done])
        drawn = [
            (one.name, *token)
            for one in done
            for token in zip(one.tokens.tolist(), one.log_probs.tolist(), one.sampling_log_probs.tolist(), strict=True)
        ]
        columns = [[*column] for column in zip(*drawn, strict=True)] if drawn else [[], [], [], []]
        return StepResult(DrawnTokens(*columns, version=self._version), [*finished, *done])

    def _answered(self, group: Sequence[_OpenRow], most: int | None) -> list[FinishedRequest]:
        """Draw up to `most` tokens of rows that draw alike (None: all), and return the requests that ended."""
        group, n = _samples(group)
        first, rows = group[0], [each.row for each in group[::n]]
        limits = torch.tensor([each.left for each in group[::n]])
        limits = limits if most is None else limits.clamp(max=most)
        ask = Ask(
            prompts=_prompts(rows, [each.request.row // n for each in group[::n]]),
            sampling=attrs.evolve(first.request.sampling, n=n, max_tokens=int(limits.max())),
            key=first.request.key,
            version=self._version,
            limits=limits,
            offset=first.request.position + first.drawn,
        )
        rollout = self._generate(self._params, ask)
        done: list[FinishedRequest] = []
        for place, each in enumerate(group):
            end = self._taken(each, rollout, place)
            done += [] if end is None else [self._closed(each, end)]
        return done

    def _taken(self, each: _OpenRow, rollout: Rollout, index: int) -> End | None:
        """Give a row its tokens in a rollout. Returns how it ends with them; None if it goes on."""
        width, row = rollout.response_mask.shape[1], each.row
        mask = rollout.response_mask[index]
        tokens = rollout.tokens[index, -width:][mask].cpu()
        reader, count, by_text = each.reader, len(tokens), False
        if reader is not None:  # an engine does not see the part of a text that was drawn before
            ends = [reader.ends(0, token) for token in tokens.tolist()]
            by_text = any(ends)
            count = ends.index(True) + 1 if by_text else count
        versions = torch.full_like(tokens, int(rollout.versions[index]), dtype=torch.int32)
        if rollout.token_versions is not None:
            versions = rollout.token_versions[index][mask].cpu()
        stopped = by_text or rollout.finish[index] == "stop"
        row.ids += tokens[:count].tolist()
        experts, ran = None, len(row.ids) - 1
        if rollout.routed is not None:
            experts = rollout.routed[index][rollout.attention_mask[index].bool()][row.ran : ran].cpu()
        log_probs, others = (x[index][mask].cpu() for x in (rollout.rollout_log_probs, rollout.sampling_log_probs))
        each.pieces.append(_AnsweredPart(tokens[:count], log_probs[:count], others[:count], versions[:count], experts))
        row.ran = ran
        return "stop" if stopped else None if each.left else "length"

    def _closed(self, each: _OpenRow, end: End) -> FinishedRequest:
        del self._waiting[each.request.name]
        if each.request.keep:
            self._kept[each.request.name] = each.row
        return each.finished(end)

    def cancel(self, names: Sequence[str]) -> None:
        """End these requests; the next step reports them as "cancelled". Other names are ignored."""
        rows = [self._waiting[name] for name in dict.fromkeys(names) if name in self._waiting]
        self._cancelled += [self._closed(each, "cancelled") for each in rows]

    def release(self, names: Sequence[str]) -> None:
        """Forget the kept contexts of these ended requests. Other names are ignored."""
        for name in names:
            self._kept.pop(name, None)

    def update(self, params: Mapping[str, Tensor], version: int) -> None:
        """Continue with newer parameters of this version, which later tokens report."""
        self._params, self._version = params, version


def _samples(group: Sequence[_OpenRow]) -> tuple[list[_OpenRow], int]:
    """Sort rows by number. Also returns n if each n adjacent rows are samples of one prompt, else 1."""
    group = sorted(group, key=lambda each: each.request.row)
    first = group[0]
    n = next((i for i, each in enumerate(group) if not _same_prompt(first, each)), len(group))
    parts = [group[i : i + n] for i in range(0, len(group), n)]
    whole = all(
        [each.request.row for each in part] == list(range(part[0].request.row, part[0].request.row + n))
        and part[0].request.row % n == 0
        and all(_same_prompt(part[0], each) for each in part)
        for part in parts
    )
    return group, n if whole else 1


def _same_prompt(a: _OpenRow, b: _OpenRow) -> bool:
    return a.left == b.left and a.row.ids == b.row.ids and a.row.inputs is b.row.inputs


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
