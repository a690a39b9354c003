"""Rows of requests inside an engine, with their contexts and draws, and checks of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fppo.batch import RowInputs
from fppo.data.stops import StopReader
from fppo.rollout.reading import RowContext, RowRead
from fppo.rollout.records import check_stops, tensor_of
from fppo.rollout.requests import End, FinishedRequest, Request
from fppo.rollout.scores import DrawnScores, PromptScores, ScoredPrompt, TopTokens


@attrs.define(eq=False)
class SharedPrompt:
    """A prompt of several requests, prefilled once."""

    missing: int  # rows that have not begun to draw
    read: RowRead | None = None  # once it is prefilled
    asked: dict[str, ScoredPrompt] = attrs.field(factory=dict)  # by the names of those requests that score it
    scores: dict[str, PromptScores] = attrs.field(factory=dict)

    def taken(self, new: RowRead | None) -> RowRead:
        """Give a row the prefilled prompt; `new` is the result, if it was prefilled just now."""
        if self.read is None:
            assert new is not None
            self.read, self.scores = new, dict(zip(self.asked, new.scores, strict=True))
        self.missing -= 1
        return self.read

    def left(self, name: str) -> PromptScores | None:
        """Remove a request that begins to draw or is cancelled, and return its scores of the prompt, if any."""
        self.asked.pop(name, None)
        return self.scores.pop(name, None)

    def settle(self) -> None:
        """Keep the prefilled prompt for rows that begin later, in memory of its own, or drop it if there are none."""
        if self.read is not None:
            self.read = self.read._replace(context=self.read.context.apart()) if self.missing else None


@attrs.define(eq=False)
class OpenRow:
    """A request and its progress."""

    request: Request
    ids: list[int]  # of the whole row, with what it has drawn
    inputs: RowInputs | None
    kind: int  # index of its kind of sampling
    context: RowContext | None = None  # its cached tokens, while it waits
    prompt: SharedPrompt | None = None  # until it begins to draw
    feed: deque[int] = attrs.field(factory=deque)  # tokens to run one by one before it draws
    pending: int = 0  # the next token to be run
    fed: int = 0
    tokens: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    sampling_log_probs: list[float] = attrs.field(factory=list)
    versions: list[int] = attrs.field(factory=list)
    experts: list[Tensor] = attrs.field(factory=list)
    uniforms: list[float] = attrs.field(factory=list)  # of the next draws
    prompt_scores: PromptScores | None = None
    drawn: list[tuple[float, list[int], list[float]]] = attrs.field(factory=list)  # scores of its draws
    stops: frozenset[int] = attrs.field(init=False)
    reader: StopReader | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        sampling = self.request.sampling
        self.stops = frozenset(sampling.stop_token_ids)
        self.reader = None if sampling.stop_texts is None else StopReader(sampling.stop_texts)

    @property
    def name(self) -> str:
        """The request's name."""
        return self.request.name

    @property
    def owner(self) -> str | None:
        """The owner of the row; owners get places in turn."""
        return self.request.adapter if self.request.owner is None else self.request.owner

    @property
    def top(self) -> int:
        """The number of likeliest tokens to report for each draw of the row; 0: none."""
        return 0 if self.request.scores is None else self.request.scores.drawn_top

    @property
    def left(self) -> int:
        """The number of tokens that the row may still draw."""
        return self.request.sampling.max_tokens - len(self.tokens)

    @property
    def most(self) -> int:
        """The number of tokens that the row may come to have."""
        return len(self.ids) + self.left

    @property
    def unread(self) -> list[int]:
        """The row's tokens after its context, which have not run yet."""
        return self.ids if self.context is None else self.ids[self.context.length :]

    def take(self, token: int, log_prob: float, sampling_log_prob: float, version: int) -> End | None:
        """Append a drawn token. Returns how the request ends with it; None if it continues."""
        self.ids.append(token)
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.sampling_log_probs.append(sampling_log_prob)
        self.versions.append(version)
        self.pending = token
        if (self.reader is not None and self.reader.ends(0, token)) or token in self.stops:
            return "stop"
        return None if self.left else "length"

    def ended(self, end: End, dtype: torch.dtype) -> FinishedRequest:
        """The request's result, with log-probs in `dtype`."""
        return FinishedRequest(
            name=self.name,
            tokens=tensor_of(self.tokens, torch.int64),
            log_probs=tensor_of(self.log_probs, dtype),
            sampling_log_probs=tensor_of(self.sampling_log_probs, dtype),
            versions=tensor_of(self.versions, torch.int32),
            end=end,
            fed=self.fed,
            experts=torch.cat(self.experts) if self.experts else None,
            prompt_scores=self.prompt_scores,
            drawn_scores=self._drawn_scores(dtype) if self.top else None,
        )

    def _drawn_scores(self, dtype: torch.dtype) -> DrawnScores:
        log_probs, ids, top = zip(*self.drawn, strict=True) if self.drawn else ((), [[]], [[]])
        likeliest = TopTokens(torch.tensor(ids, dtype=torch.int64), torch.tensor(top, dtype=dtype))
        return DrawnScores(torch.tensor(log_probs, dtype=dtype), TopTokens(*(x[: len(log_probs)] for x in likeliest)))


@attrs.frozen(eq=False)
class KeptRow:
    """An ended request, which others may continue."""

    ids: Sequence[int]
    inputs: RowInputs | None
    context: RowContext | None = None  # None: to be computed anew
    adapter: str | None = None  # the adapter that computed the context


def check_adapters(
    requests: Sequence[Request], adapters: Container[str], kept: Mapping[str, KeptRow], size: int
) -> None:
    """Raise ValueError for unknown adapters, for requests that continue a row of another adapter, and for targets
    outside a vocabulary of `size` tokens."""
    for request in requests:
        if request.adapter is not None and request.adapter not in adapters:
            text = f"there is no adapter {request.adapter!r}: `put` it first"
            raise ValueError(f"request {request.name!r}: {text}")
        before = kept.get(request.after) if request.after is not None else None
        if before is not None and before.adapter != request.adapter:
            text = f"after = {request.after!r} was by adapter {before.adapter!r}, not by {request.adapter!r}"
            raise ValueError(f"request {request.name!r}: {text}; one goes on by the same adapter")
        targets = None if request.scores is None else request.scores.targets
        if targets is not None and targets.numel() and int(targets.max()) >= size:
            text = f"scores.targets has ids that the model's vocabulary of {size} tokens does not have"
            raise ValueError(f"request {request.name!r}: {text}")


def check_without(requests: Sequence[Request], engine: str) -> None:
    """Raise ValueError for requests with an adapter or scores. `engine` describes an engine without these, for the
    error."""
    for request in requests:
        wrong = [name for name in ("adapter", "scores") if getattr(request, name) is not None]
        if wrong:
            text = f"{wrong[0]} is for the embedded engine, and {engine} has none; leave it out"
            raise ValueError(f"request {request.name!r}: {text}")


def check_names(requests: Sequence[Request], kept: Container[str], used: Container[str]) -> None:
    """Raise ValueError for names that are `used`, `kept` or given twice, and for an `after` that is not kept."""
    seen: set[str] = set()
    for request in requests:
        if request.name in used or request.name in kept or request.name in seen:
            text = "is open, or kept: release it, or give another name"
            raise ValueError(f"request {request.name!r}: that name {text}")
        if request.after is not None and request.after not in kept:
            text = "is not kept, or has not ended: give keep = True to a request that others go on after"
            raise ValueError(f"request {request.name!r}: after = {request.after!r} {text}")
        seen.add(request.name)


def check_tokens(
    request: Request, before: int, *, size: int, limit: int | None, why: str = "a row of the model has at most"
) -> None:
    """Raise ValueError for tokens outside a vocabulary of `size` tokens, and for a row that may outgrow an engine's
    `limit`. `before` counts the row's tokens before the request; `why` is the error's text before the limit."""
    check_stops(request.sampling, size)
    if request.ids and not 0 <= min(request.ids) <= max(request.ids) < size:
        text = f"tokens that the model's vocabulary of {size} tokens does not have"
        raise ValueError(f"request {request.name!r}: {text}")
    given, most = before + len(request.ids), request.sampling.max_tokens
    if limit is not None and given + most > limit:
        raise ValueError(
            f"request {request.name!r} has {given} tokens; with max_tokens = {most} its row may reach {given + most}, "
            f"but {why} {limit}: lower max_tokens or leave long prompts out"
        )
