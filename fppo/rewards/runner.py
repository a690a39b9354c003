"""Run reward functions in worker processes, and gather their outcomes as results."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from fppo._errors import RunFailed, printable, shown
from fppo.rewards.functions import Reward, RewardTerm, as_sum
from fppo.workers.runner import FunctionRunner
from fppo.workers.sample import Outcome, Sample, StepRewards

_log = logging.getLogger("fppo.rewards")

Outcomes = dict[str, list[Outcome]]  # by term, one entry per sample


class Failure(NamedTuple):
    """A sample (`number`) without a score: the function of a term raised, ended its process, or took too long."""

    term: str
    number: int
    kind: str  # "error" or "timeout"
    text: str


class RewardResults(NamedTuple):
    """The results of a reward's functions for a list of samples: scores, further named numbers, extracted answers,
    failures, steps, and feedback; one entry per sample in every list but that of failures."""

    scores: dict[str, list[float]]  # by term; nan where it failed
    named: dict[str, list[float]]  # the terms' further numbers; nan where it failed
    answers: list[str | None]
    failures: tuple[Failure, ...]
    steps: dict[str, list[StepRewards | None]]  # by term, of those that gave steps
    feedback: list[dict[str, str]]  # by term, of those that said something


class Runner(Protocol):
    """The protocol of runners for `score`. Samples with an equal number in `groups` answer the same prompt."""

    @property
    def terms(self) -> tuple[RewardTerm, ...]: ...

    def run(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> RewardResults: ...


class RewardRunner(FunctionRunner):
    """A runner of a reward's functions; close it, or use it in a `with` statement.

    Functions marked inline run in this process, all others in worker processes (`FunctionRunner`). A call takes one
    sample, or all of them for a function of the batch. A call on several samples that raises or takes too long is
    repeated on halves until the faulty sample is isolated. Functions must not depend on earlier calls.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        time_limit: float = 10.0,
        batch_limit: float | None = None,
        workers: int = 1,
        concurrency: int = 64,
        start_limit: float = 120.0,
    ) -> None:
        self.terms: tuple[RewardTerm, ...] = as_sum(reward).terms
        super().__init__(
            self.terms,
            role="reward",
            time_limit=time_limit,
            batch_limit=batch_limit,
            workers=workers,
            concurrency=concurrency,
            start_limit=start_limit,
        )

    def run(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> RewardResults:
        """Call every function on every sample, except functions of the whole rollout; `groups` are not read.

        A sample gets no score (nan, counted and logged) after an exception, an ended process or a timeout. Raises
        ValueError, naming function and sample, for an invalid result (None, nan, inf, text, a list of the wrong
        length).
        """
        del groups
        results = results_of(self.terms, self.outcomes(samples), samples)
        log_failures(results.failures, len(samples))
        return results

    def outcomes(self, samples: Sequence[Sample]) -> Outcomes:
        """The outcome of every function on every sample, except functions of the whole rollout."""
        return {term.name: self.outcomes_of(term, samples) for term in self.terms if term.kind != "tensor"}


def results_of(
    terms: Sequence[RewardTerm], outcomes: Mapping[str, Sequence[Outcome]], samples: Sequence[Sample]
) -> RewardResults:
    """Assemble results from the outcomes of all functions on all samples.

    Raises ValueError for an invalid score, and for names of numbers that some samples have and others lack.
    """
    scores: dict[str, list[float]] = {}
    named: dict[str, list[float]] = {}
    answers: list[str | None] = [None] * len(samples)
    failures: list[Failure] = []
    steps: dict[str, list[StepRewards | None]] = {}
    feedback: list[dict[str, str]] = [{} for _ in samples]
    for term in terms:
        if term.kind == "tensor":
            continue
        column = outcomes[term.name]
        _check(term.name, column, samples)
        scores[term.name] = [outcome.score if outcome.kind == "value" else math.nan for outcome in column]
        prefix = "" if len(terms) == 1 else f"{term.name}/"
        named |= {prefix + name: numbers for name, numbers in _columns(term.name, column).items()}
        if any(outcome.steps is not None for outcome in column):
            steps[term.name] = [outcome.steps for outcome in column]
        answers = [a if o.answer is None else o.answer for a, o in zip(answers, column, strict=True)]
        for said, outcome in zip(feedback, column, strict=True):
            said |= {} if outcome.feedback is None else {term.name: outcome.feedback}
        failures += [
            Failure(term.name, number, o.kind, o.text)
            for number, o in enumerate(column)
            if o.kind in ("error", "timeout")
        ]
    return RewardResults(scores, named, answers, tuple(failures), steps, feedback)


def _check(name: str, outcomes: Sequence[Outcome], samples: Sequence[Sample]) -> None:
    """Raise ValueError for outcomes of the function `name` that are no scores."""
    faults = [_fault(outcome, sample) for outcome, sample in zip(outcomes, samples, strict=True)]
    bad = [number for number, fault in enumerate(faults) if fault is not None]
    if bad:
        first = samples[bad[0]]
        raise ValueError(
            f"the reward {name!r} returned {faults[bad[0]]} ({len(bad)} of {len(samples)} samples; the response "
            f"of sample {bad[0]} is {first.response[:100]!r}, the ground truth "
            f"{str(first.ground_truth)[:100]!r})"
        )


def _fault(outcome: Outcome, sample: Sample) -> str | None:
    """The fault of a result that is no score, or whose steps are not those of its sample; None for all others."""
    if outcome.steps is None:
        return outcome.text if outcome.kind == "bad" else None
    (rewards, ends), tokens, size = outcome.steps, len(sample.response_tokens), len(sample.response)
    if ends is None:
        wrong = len(rewards) != tokens
        return f"{len(rewards)} numbers for {tokens} response tokens; it must return one for each" if wrong else None
    if len(ends) != len(rewards):
        return f"{len(rewards)} rewards of steps with {len(ends)} ends; each step has one end"
    places = [min(size, 1) - 1, *ends]
    if any(a >= b for a, b in pairwise(places)) or places[-1] > size:
        rule = "they must ascend and be characters of the response"
        return f"steps that end at {shown(list(ends))}; {rule}, from {min(size, 1)} to {size}"
    return None


def _columns(name: str, outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The named numbers of outcomes as columns. Raises ValueError if samples differ in names."""
    valued = [(number, outcome) for number, outcome in enumerate(outcomes) if outcome.kind == "value"]
    names = list(valued[0][1].named) if valued else []
    for number, outcome in valued:
        if set(outcome.named) != set(names):
            raise ValueError(
                f"the reward {name!r} returned the names {_some(names)} for sample {valued[0][0]}, but "
                f"{_some(outcome.named)} for sample {number}: give every sample the same"
            )
    return {key: [outcome.named.get(key, math.nan) for outcome in outcomes] for key in names}


def _some(names: Iterable[str]) -> str:
    return printable(str(sorted(names)), 400)


def log_failures(failures: Sequence[Failure], count: int) -> None:
    """Log one warning for each function that failed on some of `count` samples."""
    for term in dict.fromkeys(failure.term for failure in failures):
        mine = [failure for failure in failures if failure.term == term]
        first = mine[0]
        _log.warning(
            "the reward %r failed on %d of %d samples; sample %d: %s",
            term,
            len(mine),
            count,
            first.number,
            first.text,
        )


def check_failures(failures: Sequence[Failure], count: int) -> None:
    """Raise RunFailed, a ValueError, for a function that failed on all of `count` samples."""
    for term in dict.fromkeys(failure.term for failure in failures):
        mine = [failure for failure in failures if failure.term == term]
        if len(mine) == count:
            raise RunFailed(
                f"the reward {term!r} failed on every one of the first {count} responses, so there is nothing to learn "
                f"from; the first: {mine[0].text}"
            )
