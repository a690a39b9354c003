"""The edge at which reward functions run: some here, the rest in worker processes with a time limit."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from fppo.rewards.functions import Part, Reward, as_sum
from fppo.workers.calls import Mode, call
from fppo.workers.pool import WorkerPool
from fppo.workers.sample import Outcome, Sample

_log = logging.getLogger("fppo.rewards")

Outcomes = dict[str, list[Outcome]]  # by part, one entry per sample


class Failure(NamedTuple):
    """A sample that scored 0 because its function raised, ended its process, or took too long."""

    part: str
    number: int
    kind: str  # "error" or "timeout"
    text: str


class Judged(NamedTuple):
    """What the functions said of a list of samples; one entry per sample in every list."""

    scores: dict[str, list[float]]  # by part; 0 where it failed
    named: dict[str, list[float]]  # the parts' further numbers
    answers: list[str | None]
    failures: tuple[Failure, ...]


class Judge(Protocol):
    """What scoring needs of a reward that is ready to judge. `groups` say which samples answer the same prompt."""

    @property
    def parts(self) -> tuple[Part, ...]: ...

    def judge(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> Judged: ...


class Scorer(Protocol):
    """What calls the functions that judge samples."""

    @property
    def parts(self) -> tuple[Part, ...]: ...

    def outcomes(self, samples: Sequence[Sample]) -> Outcomes: ...


class RewardRunner:
    """A reward, ready to judge; close it, or use it in a `with` statement.

    Functions marked inline run in this process. All others run in `workers` processes, which are killed and started
    again when one call takes more than `time_limit` seconds, in Python or C: a call on one sample, or on all of them
    for a function of the batch. A call on several samples that raises or takes too long is repeated on its halves
    until the sample at fault is alone. Coroutines run up to `concurrency` at a time. Loading the functions may take
    `start_limit` seconds. A function must not depend on what it was called on before. Several threads may judge: the
    processes serve one at a time.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        time_limit: float = 10.0,
        workers: int = 1,
        concurrency: int = 64,
        start_limit: float = 120.0,
    ) -> None:
        if not time_limit > 0 or workers < 1 or concurrency < 1:
            raise ValueError(
                f"time_limit = {time_limit}, workers = {workers}, concurrency = {concurrency}: all must be above 0"
            )
        self.parts: tuple[Part, ...] = as_sum(reward).parts
        self._time_limit, self._concurrency = time_limit, concurrency
        outside = [(part.name, part.fn) for part in self.parts if not part.inline]
        self._numbers = {name: number for number, (name, _) in enumerate(outside)}
        self._pool, self._one_at_a_time = None, threading.Lock()
        if outside:
            self._pool = WorkerPool(outside, workers=workers, time_limit=time_limit, start_limit=start_limit)

    def start(self) -> None:
        """Starts the worker processes ahead of the first batch, without waiting for them."""
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> RewardRunner:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def judge(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> Judged:
        """Every function on every sample; functions of the whole rollout are not called here, and none asks for groups.

        An exception, an ended process and a call that takes too long score 0, are counted and logged. Raises ValueError
        for a result that is no score (None, nan, inf, text, a list of the wrong length), naming function and sample.
        """
        del groups
        found = judged(self.parts, self.outcomes(samples), samples)
        log_failures(found.failures, len(samples))
        return found

    def outcomes(self, samples: Sequence[Sample]) -> Outcomes:
        """What became of every sample with every function, but for functions of the whole rollout."""
        return {part.name: self.outcomes_of(part, samples) for part in self.parts if part.kind != "tensor"}

    def outcomes_of(self, part: Part, samples: Sequence[Sample]) -> list[Outcome]:
        """What became of every sample with one function."""
        mode = Mode(part.kind, part.asynchronous, self._time_limit, self._concurrency)
        if not samples:
            return []
        if self._pool is not None and not part.inline:
            with self._one_at_a_time:
                return self._pool.run(self._numbers[part.name], mode, samples)
        found: dict[int, Outcome] = {}
        with asyncio.Runner() as loop:
            call(part.fn, samples, mode, loop, found.__setitem__, _nothing)
        return [found[number] for number in range(len(samples))]


def _nothing(*_: Any) -> None:
    pass


def judged(parts: Sequence[Part], outcomes: Mapping[str, Sequence[Outcome]], samples: Sequence[Sample]) -> Judged:
    """What all the functions said, from what became of each sample with each of them.

    Raises ValueError for a result that is no score, and for names that some samples have and others lack.
    """
    scores: dict[str, list[float]] = {}
    named: dict[str, list[float]] = {}
    answers: list[str | None] = [None] * len(samples)
    failures: list[Failure] = []
    for part in parts:
        if part.kind == "tensor":
            continue
        found = outcomes[part.name]
        _check(part.name, found, samples)
        scores[part.name] = [outcome.score for outcome in found]
        prefix = "" if len(parts) == 1 else f"{part.name}/"
        named |= {prefix + name: column for name, column in _columns(part.name, found).items()}
        answers = [a if o.answer is None else o.answer for a, o in zip(answers, found, strict=True)]
        failures += [
            Failure(part.name, number, o.kind, o.text)
            for number, o in enumerate(found)
            if o.kind in ("error", "timeout")
        ]
    return Judged(scores, named, answers, tuple(failures))


def _check(name: str, outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> None:
    """Raises ValueError for results that are no scores."""
    bad = [number for number, outcome in enumerate(outcomes) if outcome.kind == "bad"]
    if bad:
        first = samples[bad[0]]
        raise ValueError(
            f"the reward {name!r} returned {outcomes[bad[0]].text} for sample {bad[0]} "
            f"({len(bad)} of {len(samples)} samples are so): it must return a finite number, "
            'or a dict of them with "score" and maybe the text "answer". '
            f"The sample's response: {first.response[:100]!r}, its ground truth: {str(first.ground_truth)[:100]!r}"
        )


def _columns(name: str, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The named numbers as columns. Raises ValueError if some samples have names that others lack."""
    valued = [(number, outcome) for number, outcome in enumerate(outcomes) if outcome.kind == "value"]
    names = list(valued[0][1].named) if valued else []
    for number, outcome in valued:
        if set(outcome.named) != set(names):
            raise ValueError(
                f"the reward {name!r} returned the names {sorted(names)} for sample {valued[0][0]}, but "
                f"{sorted(outcome.named)} for sample {number}: give every sample the same"
            )
    return {key: [outcome.named.get(key, 0.0) for outcome in outcomes] for key in names}


def log_failures(failures: Sequence[Failure], count: int) -> None:
    """One warning for each function that failed on some of `count` samples."""
    for part in dict.fromkeys(failure.part for failure in failures):
        mine = [failure for failure in failures if failure.part == part]
        first = mine[0]
        _log.warning(
            "the reward %r failed on %d of %d samples, which score 0; sample %d: %s",
            part,
            len(mine),
            count,
            first.number,
            first.text,
        )
