"""Rewards that begin while other rows are still generated: samples are judged as they finish, on a thread beside."""

from __future__ import annotations

import copy
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from fppo.rewards.functions import Part
from fppo.rewards.runner import Judged, Outcomes, RewardRunner, judged, log_failures
from fppo.rewards.scoring import sample_of
from fppo.workers.sample import Outcome, Sample

if TYPE_CHECKING:
    from fppo.batch import Prompts
    from fppo.rollout.engine import OnFinished


class _Row(NamedTuple):
    """A finished row: what it will be known by, and how to make a sample of it."""

    key: Hashable
    sample: Callable[[], Sample]


class EarlyJudge:
    """A runner whose functions of single samples begin as soon as rows finish; close it, or use it in a `with`.

    `listen` gives an engine what it calls for each row that ends. `outcomes` and `judge` then wait for those of their
    samples that were heard of, and call the functions on the rest, and functions of the batch on all: the result is the
    runner's own, whatever was heard, and in whatever order. A sample is one that was heard of if its tokens, its finish
    and the very objects of its ground truth and extras are the same. Functions that run in this process as plain calls
    are left for the end, since there they would hold generation up; without `early` all are. Several threads may judge;
    one at a time listens.
    """

    def __init__(self, runner: RewardRunner, tokenizer: Any, *, early: bool = True) -> None:
        self._runner = runner
        begun = [p for p in runner.parts if p.kind == "sample" and (p.asynchronous or not p.inline)]
        self._early = begun if early else []
        # of its own: a tokenizer that one thread decodes with may refuse to encode in another
        self._tokenizer = copy.deepcopy(tokenizer) if self._early else tokenizer
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._rollout = 0  # its number
        self._begin(None)

    def _begin(self, held: Any) -> None:
        self._rollout += 1
        self._held = held  # the objects that keys know by their ids
        self._queue: deque[_Row] = deque()
        self._open: Counter[Hashable] = Counter()  # heard of, and not judged yet
        self._done: dict[Hashable, list[list[Outcome]]] = defaultdict(list)  # one outcome for each early part
        self._error: BaseException | None = None

    def __enter__(self) -> EarlyJudge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The functions of the reward."""
        return self._runner.parts

    def listen(self, prompts: Prompts, n: int) -> OnFinished | None:
        """What an engine is to call as `f(row, response_tokens, finish)` for rows of its rollout, `n` for each prompt,
        when they finish; None if nothing can be judged early. What was heard of other rollouts is forgotten."""
        if not self._early or self._closed:
            return None
        tokens, mask = prompts.tokens.cpu(), prompts.attention_mask.cpu().bool()
        asked = [tuple(ids[keep].tolist()) for ids, keep in zip(tokens, mask, strict=True)]
        with self._changed:
            self._begin(prompts)
            rollout = self._rollout
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="early rewards", daemon=True)
                self._thread.start()

        def finished(row: int, response: list[int], finish: str) -> None:
            number = row // n
            key = _key(asked[number], response, finish, prompts.ground_truth[number], prompts.extras[number])
            heard = _Row(key, lambda: sample_of(asked[number], response, finish, prompts, number, self._tokenizer))
            with self._changed:
                if self._rollout == rollout:
                    self._queue.append(heard)
                    self._open[key] += 1
                    self._changed.notify_all()

        return finished

    def outcomes(self, samples: Sequence[Sample]) -> Outcomes:
        """What became of every sample with every function, as `RewardRunner.outcomes`."""
        found = self._take(
            [_key(s.prompt_tokens, s.response_tokens, s.finish, s.ground_truth, s.extras) for s in samples]
        )
        left = [number for number in range(len(samples)) if number not in found]
        result: Outcomes = {}
        for part in self.parts:
            if part.kind == "tensor":
                continue
            if part not in self._early:
                result[part.name] = self._runner.outcomes_of(part, samples)
                continue
            place = self._early.index(part)
            late = self._runner.outcomes_of(part, [samples[number] for number in left])
            whole = {number: each[place] for number, each in found.items()} | dict(zip(left, late, strict=True))
            result[part.name] = [whole[number] for number in range(len(samples))]
        return result

    def judge(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> Judged:
        """Every function on every sample, as `RewardRunner.judge`."""
        del groups
        found = judged(self.parts, self.outcomes(samples), samples)
        log_failures(found.failures, len(samples))
        return found

    def close(self) -> None:
        """Ends the thread, once it is done with what it is at. The runner stays open."""
        with self._changed:
            self._closed = True
            self._begin(None)
            self._changed.notify_all()

    def _take(self, keys: Sequence[Hashable]) -> dict[int, list[Outcome]]:
        """The outcomes of those samples that were heard of, by number, once all of these are judged."""
        known = set(keys)
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not any(self._open[key] for key in known))
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return {number: self._done[key].pop() for number, key in enumerate(keys) if self._done.get(key)}

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._queue)
                if self._closed:
                    return
                rows, rollout = list(self._queue), self._rollout
                self._queue.clear()
            found: list[list[Outcome]] = []
            problem = None
            try:
                samples = [row.sample() for row in rows]
                columns = [self._runner.outcomes_of(part, samples) for part in self._early]
                found = [list(each) for each in zip(*columns, strict=True)]
            except BaseException as error:  # for the thread that judges
                problem = error
            with self._changed:
                if self._rollout == rollout:
                    self._settle(rows, found, problem)
                    self._changed.notify_all()

    def _settle(self, rows: Sequence[_Row], found: Sequence[list[Outcome]], problem: BaseException | None) -> None:
        if problem is not None:
            self._begin(self._held)
            self._error = problem
            return
        for row, outcomes in zip(rows, found, strict=True):
            self._done[row.key].append(outcomes)
            self._open[row.key] -= 1


def _key(prompt: Sequence[int], response: Sequence[int], finish: str, truth: Any, extras: Any) -> Hashable:
    return tuple(prompt), tuple(response), finish, id(truth), id(extras)
