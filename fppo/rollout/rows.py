"""Rows of requests inside an engine, with their contexts and draws, and checks of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from fppo.batch import RowInputs
from fppo.data.stops import StopReader
from fppo.rollout.prefill import PrefillResult, RowContext
from fppo.rollout.records import check_stops
from fppo.rollout.requests import DraftCounts, End, FinishedRequest, Request
from fppo.rollout.scores import DrawnScores, PromptScores, ScoredPrompt, TopTokens


@attrs.define(eq=False)
class SharedPrompt:
    """A prompt of several requests, prefilled once."""

    missing: int  # rows that have not begun to draw
    read: PrefillResult | None = None  # once it is prefilled
    requested_scores: dict[str, ScoredPrompt] = attrs.field(factory=dict)  # by the names of requests that score it
    scores: dict[str, PromptScores] = attrs.field(factory=dict)

    def begin(self, rows: Sequence[OpenRow], read: PrefillResult) -> None:
        """Give rows that begin to draw their scores of the prefilled prompt. It is kept, in memory of its own, for rows
        that begin later."""
        if self.read is None:
            kept = len(rows) < self.missing
            self.read = read._replace(context=read.context.apart()) if kept else None  # may need too much memory
            self.scores = dict(zip(self.requested_scores, read.scores, strict=True))
        self.missing -= len(rows)
        for row in rows:
            row.prompt_scores = self.release(row.name)
        if not self.missing:
            self.read = None

    def release(self, name: str) -> PromptScores | None:
        """Remove a request that begins to draw or is cancelled, and return its scores of the prompt, if any."""
        self.requested_scores.pop(name, None)
        return self.scores.pop(name, None)


class PlacedTokens(NamedTuple):
    """Consecutive tokens that a row drew while it had a place among those that decode, copied to the host, and how many
    of its tokens went through the model there (`fed`)."""

    tokens: Tensor  # int64 [T]
    log_probs: Tensor  # [T]
    sampling_log_probs: Tensor  # [T]
    fed: int = 0
    experts: Tensor | None = None  # [fed, L, k]


@attrs.define(eq=False)
class OpenRow:
    """A request and its progress: what it has drawn, and how many tokens the model has read (`fed`).

    `parts` are stretches of drawn tokens, one for each time that the row had a place; `versions` has the policy's
    version of each, and `experts` what its routers chose, [fed, L, k], if that is reported. `drawn` has for each draw
    its log-prob, the likeliest tokens and their log-probs, if the request asks for these.
    """

    request: Request
    ids: list[int]  # of the whole row, with what it has drawn
    inputs: RowInputs | None
    kind: int  # index of its kind of sampling
    context: RowContext | None = None  # its cached tokens, while it waits
    prompt: SharedPrompt | None = None  # until it begins to draw
    queued_tokens: deque[int] = attrs.field(factory=deque)  # tokens to run one by one before it draws
    fed: int = 0
    parts: list[PlacedTokens] = attrs.field(factory=list)  # what it has drawn; what it draws in its place comes with it
    versions: list[int] = attrs.field(factory=list)  # of the policies that drew the parts
    experts: list[Tensor] = attrs.field(factory=list)
    prompt_scores: PromptScores | None = None
    drawn: list[tuple[float, list[int], list[float]]] = attrs.field(factory=list)  # scores of its draws
    reader: StopReader | None = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        texts = self.request.sampling.stop_texts
        self.reader = None if texts is None else StopReader(texts)

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
    def count(self) -> int:
        """The number of tokens in its parts."""
        return sum(len(part.tokens) for part in self.parts)

    @property
    def tokens_left(self) -> int:
        """The number of tokens that the row may still draw."""
        return self.request.sampling.max_tokens - self.count

    @property
    def max_length(self) -> int:
        """The number of tokens that the row may come to have."""
        return len(self.ids) + self.tokens_left

    @property
    def uncached_ids(self) -> list[int]:
        """The row's tokens after its context, which have not run yet."""
        return self.ids if self.context is None else self.ids[self.context.length :]

    def end(self) -> End | None:
        """How the row ended with the last token in its parts; None if it goes on."""
        drawn = self.ids[len(self.ids) - self.count :]
        if drawn and self.request.sampling.stopped(drawn):
            return "stop"
        return None if self.tokens_left else "length"

    def take(self, part: PlacedTokens, version: int) -> None:
        """Append the tokens that the row drew while it had a place, by the policy of this version."""
        self.ids += part.tokens.tolist()
        self.parts.append(part)
        self.versions.append(version)
        self.fed += part.fed
        if part.experts is not None:
            self.experts.append(part.experts)

    def ended(self, end: End, dtype: torch.dtype, drafts: DraftCounts | None = None) -> FinishedRequest:
        """The request's result, with log-probs in `dtype`, and the counts of its `drafts`."""
        nothing = torch.zeros(0, dtype=dtype)
        drawn = [(part, version) for part, version in zip(self.parts, self.versions, strict=True) if len(part.tokens)]
        versions = [torch.full_like(part.tokens, version, dtype=torch.int32) for part, version in drawn]
        return FinishedRequest(
            name=self.name,
            tokens=_cat([part.tokens for part, _ in drawn], nothing.long()),
            log_probs=_cat([part.log_probs for part, _ in drawn], nothing),
            sampling_log_probs=_cat([part.sampling_log_probs for part, _ in drawn], nothing),
            versions=_cat(versions, nothing.int()),
            end=end,
            fed=self.fed,
            drafts=drafts,
            experts=torch.cat(self.experts) if self.experts else None,
            prompt_scores=self.prompt_scores,
            drawn_scores=self._drawn_scores(dtype) if self.top else None,
        )

    def _drawn_scores(self, dtype: torch.dtype) -> DrawnScores:
        log_probs, ids, top = zip(*self.drawn, strict=True) if self.drawn else ((), [[]], [[]])
        likeliest = TopTokens(torch.tensor(ids, dtype=torch.int64), torch.tensor(top, dtype=dtype))
        return DrawnScores(torch.tensor(log_probs, dtype=dtype), TopTokens(*(x[: len(log_probs)] for x in likeliest)))


def _cat(parts: Sequence[Tensor], nothing: Tensor) -> Tensor:
    return torch.cat([*parts]) if len(parts) > 1 else next(iter(parts), nothing)


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
    request: Request,
    earlier_tokens: int,
    *,
    size: int,
    limit: int | None,
    limit_text: str = "a row of the model has at most",
) -> None:
    """Raise ValueError for tokens outside a vocabulary of `size` tokens, and for a row that may outgrow an engine's
    `limit`. `earlier_tokens` counts the row's tokens before the request; `limit_text` is the error's text before the
    limit."""
    check_stops(request.sampling, size)
    if request.ids and not 0 <= min(request.ids) <= max(request.ids) < size:
        text = f"tokens that the model's vocabulary of {size} tokens does not have"
        raise ValueError(f"request {request.name!r}: {text}")
    given, most = earlier_tokens + len(request.ids), request.sampling.max_tokens
    if limit is not None and given + most > limit:
        raise ValueError(
            f"request {request.name!r} has {given} tokens; with max_tokens = {most} its row may reach {given + most}, "
            f"but {limit_text} {limit}: lower max_tokens or leave long prompts out"
        )
