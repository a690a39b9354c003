"""An engine without a model, for the tests of what stands around one: it says what it is made to say, step by step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch

from fppo.rollout.requests import DrawnTokens, FinishedRequest, QueueFull, Request, RequestCounts, StepResult

Says = Callable[[Request, Sequence[int]], Sequence[int]]  # of a request and all ids before its answer


def by_key(vocabulary: int, first: int = 2) -> Says:
    """Tokens by the key, the row and the position alone."""

    def says(request: Request, before: Sequence[int]) -> list[int]:
        del before
        places = torch.arange(request.position, request.position + request.sampling.max_tokens)
        draws = request.key.uniform(torch.tensor([request.row]), places)[0]
        return [first + int(x * (vocabulary - first)) for x in draws.tolist()]

    return says


class Parrot:
    """A `RequestEngine` whose answers are those of `says`, up to a stop or their limit.

    While `held` is set it takes requests in, and draws nothing. `calls` note what it was called with. With `fails` a
    step raises.
    """

    def __init__(self, says: Says, *, limit: int | None = None) -> None:
        self.says, self.limit = says, limit
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.requests: list[Request] = []
        self.fails: Exception | None = None
        self.free = threading.Event()
        self.free.set()
        self.versions: list[int] = []

    @contextlib.contextmanager
    def open(self, params, *, version=0, most_waiting=None):
        self.versions.append(version)
        yield _Open(self, version, most_waiting)
        self.calls.append(("closed", ()))

    def generate(self, params, ask):
        raise NotImplementedError


class _Open:
    together = ()

    def __init__(self, engine, version, most):
        self.engine, self.version, self.most = engine, version, most
        self.limit = engine.limit
        self.live: dict[str, tuple[Request, list[int], list[tuple[int, int]]]] = {}
        self.contexts: dict[str, tuple[int, ...]] = {}
        self.cancelled: list[str] = []

    @property
    def counts(self):
        return RequestCounts(0, len(self.live), len(self.contexts))

    def add(self, requests):
        self.engine.calls.append(("add", tuple(r.name for r in requests)))
        waiting = len(self.live.keys() - {*self.cancelled}) + len(requests)
        if self.most is not None and waiting > self.most:
            raise QueueFull(f"{len(requests)} requests more than the {self.most} that may wait")
        for request in requests:
            if request.after is not None and request.after not in self.contexts:
                raise ValueError(f"request {request.name!r} is after {request.after!r}, which is not kept")
        for request in requests:
            before = (*self.contexts.get(request.after, ()), *request.ids)
            self.engine.requests.append(request)
            self.live[request.name] = (request, [*before], [])

    def step(self):
        if self.engine.fails is not None:
            raise self.engine.fails
        if not self.engine.free.wait(0.002) or not self.live:
            return StepResult(DrawnTokens(), self._cancelled())
        names, tokens, finished = [], [], self._cancelled()
        for name, (request, before, drawn) in list(self.live.items()):
            said = self.engine.says(request, before)
            token = said[len(drawn)]
            drawn.append((token, self.version))
            names.append(name)
            tokens.append(token)
            texts, ids = request.sampling.stop_texts, [t for t, _ in drawn]
            stopped = token in request.sampling.stop_token_ids or (texts is not None and texts.last(ids) is not None)
            if stopped or len(drawn) == min(request.sampling.max_tokens, len(said)):
                finished.append(self._finished(name, "stop" if stopped else "length"))
                self.contexts[name] = (*before, *ids)
        log_probs = [log_prob(t) for t in tokens]
        return StepResult(DrawnTokens(names, tokens, log_probs, log_probs, self.version), finished)

    def _cancelled(self):
        ended, self.cancelled = [x for x in self.cancelled if x in self.live], []
        return [self._finished(name, "cancelled") for name in ended]

    def _finished(self, name, end):
        _, _, drawn = self.live.pop(name)
        tokens = [t for t, _ in drawn]
        log_probs = torch.tensor([log_prob(t) for t in tokens])
        versions = torch.tensor([v for _, v in drawn], dtype=torch.int32)
        own = {"tokens": torch.tensor(tokens, dtype=torch.int64), "log_probs": log_probs, "versions": versions}
        return FinishedRequest(name=name, sampling_log_probs=log_probs / 2, end=end, fed=0, **own)

    def cancel(self, names):
        self.engine.calls.append(("cancel", tuple(names)))
        self.cancelled += names

    def release(self, names):
        self.engine.calls.append(("release", tuple(names)))
        for name in names:
            self.contexts.pop(name, None)

    def update(self, params, version):
        self.version = version


def log_prob(token: int) -> float:
    return -float(token) / 64
