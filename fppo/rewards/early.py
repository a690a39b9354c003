"""Score samples on a thread as soon as they finish, while other rows are still generated."""

from __future__ import annotations

import copy
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fppo.rewards.functions import RewardTerm
from fppo.rewards.runner import Outcomes, RewardResults, RewardRunner, log_failures, results_of
from fppo.rewards.scoring import sample_of
from fppo.workers.sample import Outcome, Sample

if TYPE_CHECKING:
    from fppo.batch import Prompts
    from fppo.rollout.engine import OnFinished


class _Row(NamedTuple):
    """A finished row: its key, and a function that makes its sample."""

    key: Hashable
    sample: Callable[[], Sample]


class EarlyRewardRunner:
    """A runner that calls functions of single samples as soon as rows finish; close it, or use it in a `with`.

    `make_on_finished` gives the engine a callback for finished rows. `outcomes` and `run` wait for the samples scored
    early, then call the functions on the rest, and functions of the batch on all: the results equal the runner's own,
    whatever rows came early, in any order. A sample matches a finished row by its tokens, its finish and the identity
    of its ground truth and extras. Inline functions run at the end, since they would delay generation; without `early`
    all do. Several threads may run samples; one rollout at a time reports its rows.
    """

    def __init__(self, runner: RewardRunner, tokenizer: Any, *, early: bool = True) -> None:
        self._runner = runner
        can_be = [t for t in runner.terms if t.kind == "sample" and (t.asynchronous or not t.inline)]
        self._early = can_be if early else []
        # a copy: a tokenizer in use by one thread may refuse to encode in another
        self._tokenizer = copy.deepcopy(tokenizer) if self._early else tokenizer
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._rollout = 0  # the number of the current rollout
        self._begin(None)

    def _begin(self, prompts: Prompts | None) -> None:
        self._rollout += 1
        self._prompts = prompts  # kept alive: keys hold the ids of its objects
        self._queue: deque[_Row] = deque()
        self._open: Counter[Hashable] = Counter()  # finished rows without outcomes
        self._done: dict[Hashable, list[list[Outcome]]] = defaultdict(list)  # one outcome for each early term
        self._patience = [self._runner.patience() for _ in self._early]
        self._error: BaseException | None = None

    def __enter__(self) -> EarlyRewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def terms(self) -> tuple[RewardTerm, ...]:
        """The terms of the reward."""
        return self._runner.terms

    def make_on_finished(self, prompts: Prompts, n: int) -> OnFinished | None:
        """The engine's callback `f(row, response_tokens, finish)` for finished rows of a rollout with `n` responses per
        prompt; None if nothing can run early. Rows of earlier rollouts are dropped."""
        if not self._early or self._closed:
            return None
        tokens, mask = prompts.tokens.cpu(), prompts.attention_mask.cpu().bool()
        ids_of_prompts = [tuple(ids[keep].tolist()) for ids, keep in zip(tokens, mask, strict=True)]
        with self._changed:
            self._begin(prompts)
            rollout = self._rollout
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="early rewards", daemon=True)
                self._thread.start()

        def on_finished(row: int, response: list[int], finish: str) -> None:
            number = row // n
            prompt = ids_of_prompts[number]
            key = _key(prompt, response, finish, prompts.ground_truth[number], prompts.extras[number])
            finished = _Row(key, lambda: sample_of(prompt, response, finish, prompts, number, self._tokenizer))
            with self._changed:
                if self._rollout == rollout:
                    self._queue.append(finished)
                    self._open[key] += 1
                    self._changed.notify_all()

        return on_finished

    def outcomes(self, samples: Sequence[Sample]) -> Outcomes:
        """The outcome of every function on every sample, as `RewardRunner.outcomes`."""
        early = self._take(
            [_key(s.prompt_tokens, s.response_tokens, s.finish, s.ground_truth, s.extras) for s in samples]
        )
        left = [number for number in range(len(samples)) if number not in early]
        patience = self._patience
        outcomes: Outcomes = {}
        for term in self.terms:
            if term.kind == "tensor":
                continue
            if term not in self._early:
                outcomes[term.name] = self._runner.outcomes_of(term, samples)
                continue
            place = self._early.index(term)
            rest = [samples[number] for number in left]
            late = self._runner.outcomes_of(term, rest, patience[place] if early else None)
            whole = {number: each[place] for number, each in early.items()} | dict(zip(left, late, strict=True))
            outcomes[term.name] = [whole[number] for number in range(len(samples))]
        return outcomes

    def run(self, samples: Sequence[Sample], groups: Sequence[int] = ()) -> RewardResults:
        """Call every function on every sample, as `RewardRunner.run`."""
        del groups
        results = results_of(self.terms, self.outcomes(samples), samples)
        log_failures(results.failures, len(samples))
        return results

    def close(self) -> None:
        """End the thread after its current call. The runner stays open."""
        with self._changed:
            self._closed = True
            self._begin(None)
            self._changed.notify_all()

    def _take(self, keys: Sequence[Hashable]) -> dict[int, list[Outcome]]:
        """Wait for the samples whose rows finished early, by their keys, and return their outcomes by sample index."""
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
                rows, rollout, patience = list(self._queue), self._rollout, self._patience
                self._queue.clear()
            outcomes: list[list[Outcome]] = []
            problem = None
            try:
                samples = [row.sample() for row in rows]
                terms = zip(self._early, patience, strict=True)
                columns = [self._runner.outcomes_of(term, samples, left) for term, left in terms]
                outcomes = [list(each) for each in zip(*columns, strict=True)]
            except BaseException as error:  # raised in the thread that takes outcomes
                problem = error
            with self._changed:
                if self._rollout == rollout:
                    self._settle(rows, outcomes, problem)
                    self._changed.notify_all()

    def _settle(self, rows: Sequence[_Row], outcomes: Sequence[list[Outcome]], problem: BaseException | None) -> None:
        if problem is not None:
            self._begin(self._prompts)
            self._error = problem
            return
        for row, own in zip(rows, outcomes, strict=True):
            self._done[row.key].append(own)
            self._open[row.key] -= 1


def _key(prompt: Sequence[int], response: Sequence[int], finish: str, truth: Any, extras: Any) -> Hashable:
    return tuple(prompt), tuple(response), finish, id(truth), id(extras)
