"""Alarms: what the metrics of a run say when it goes wrong.

In: records of steps, as in metrics.jsonl, oldest first. Out: for each alarm the first step at which it rings, with a
sentence. An alarm looks at a history from its newest step, so what it says of a step never changes later. Numbers that
are missing or not finite count as not logged. Begin with `ring`; `ALARMS` has the alarms by name.

Slow alarms compare the mean over the newest `WINDOW` steps that logged a number with that over the first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice, pairwise
from typing import Any

import attrs

from fppo.pipeline.train import StepRecord

Record = Mapping[str, Any]
History = Sequence[Record]
Check = Callable[[History], str | None]

WINDOW = 6  # steps of a mean; the standard error of one number's mean over them is 0.4 of its deviation
SURE = 4.0  # standard errors of a change that is not chance; a run asks this of a few numbers in thousands of steps
SCORE = "critic/score/mean"
HELD_OUT = "val-core/*/reward/mean@*"
PARTS = ("reward/*",)
NOT_PARTS = (
    *(f"reward/{x}" for x in ("errors", "timeouts", "unscored", "reverse_kl")),
    "reward/judge_*",
    "reward/model_*",
)


@attrs.frozen(kw_only=True)
class Alarm:
    """A check of a history's newest step, and the names (or patterns) of all metrics that it reads."""

    reads: tuple[str, ...]
    check: Check


@attrs.frozen(kw_only=True)
class Finding:
    """An alarm, the first step at which it rang, and why."""

    step: int
    alarm: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.text} (alarm {self.alarm})"


def ring(records: Iterable[Record]) -> list[Finding]:
    """The alarms that ring in these records, each once, in order of steps. Records without a step are left out."""
    history, silent, found = list[Record](), dict(ALARMS), list[Finding]()
    for record in records:
        found += _newly(history, record, silent)
    return found


def _newly(history: list[Record], record: Record, silent: dict[str, Alarm]) -> list[Finding]:
    """Append a record to a history, and move alarms that ring at it from `silent` to the result."""
    if not isinstance(record.get("step"), int):
        return []
    history.append({name: x for name, x in record.items() if name == "step" or _matches(name, ALL_READ)})
    texts = {name: alarm.check(history) for name, alarm in silent.items()}
    found = [Finding(step=record["step"], alarm=name, text=text) for name, text in texts.items() if text is not None]
    for each in found:
        del silent[each.alarm]
    return found


@cache
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Alarms:
    """An observer that prints an alarm on standard error at the first step at which it rings. `before` are the records
    of the run's earlier steps, whose alarms were printed then."""

    def __init__(self, before: Iterable[Record] = ()) -> None:
        self._history, self._silent = list[Record](), dict(ALARMS)
        for record in before:
            _newly(self._history, record, self._silent)

    def __call__(self, record: StepRecord) -> None:
        """Look at a step."""
        for each in _newly(self._history, {**record.metrics, "step": record.run.step}, self._silent):
            print(each, file=sys.stderr, flush=True)


# numbers of a history


def _number(record: Record, name: str) -> float | None:
    x = record.get(name)
    return float(x) if isinstance(x, int | float) and math.isfinite(x) else None


def _numbers(records: Iterable[Record], name: str) -> Iterator[float]:
    return (x for record in records if (x := _number(record, name)) is not None)


def _mean(numbers: Sequence[float]) -> float:
    """The mean; unlike the library's it may be infinite."""
    return sum(numbers) / len(numbers)


@attrs.frozen
class Change:
    """The mean of a metric over its first steps and over its newest, and the standard error of their difference."""

    before: float
    after: float
    error: float

    def is_rise(self, share: float) -> bool:
        """Whether the mean rose beyond chance, and by more than a `share` of the larger of the two."""
        rise = self.after - self.before
        return rise > SURE * self.error and rise > share * max(abs(self.before), abs(self.after))

    @property
    def reverse(self) -> Change:
        """The change seen from the other end: its rise is a fall."""
        return Change(self.after, self.before, self.error)


def change(history: History, name: str, window: int = WINDOW) -> Change | None:
    """The change of a metric that the newest step logged; None with fewer than 2 * `window` numbers.

    Its error is estimated from differences of successive steps, so that a trend does not count as noise.
    """
    if _number(history[-1], name) is None:
        return None
    first = list(islice(_numbers(history, name), 2 * window))
    if len(first) < 2 * window:
        return None
    early, late = first[:window], list(islice(_numbers(reversed(history), name), window))
    jumps = [(b - a) * (b - a) for line in (early, late) for a, b in pairwise(line)]
    return Change(_mean(early), _mean(late), math.sqrt(_mean(jumps) / window))  # a jump's variance is twice a number's


def _lasts(history: History, name: str, steps: int, holds: Callable[[float], bool]) -> float | None:
    """The newest number of a metric, if it and those of the `steps` - 1 logged before hold; else None."""
    newest = _number(history[-1], name)
    if newest is None:
        return None
    last = list(islice(_numbers(reversed(history), name), steps))
    return newest if len(last) == steps and all(map(holds, last)) else None


def _held_out(record: Record) -> float | None:
    """The mean held-out reward over the sources of an evaluation."""
    found = [x for name in record if _matches(name, (HELD_OUT,)) and (x := _number(record, name)) is not None]
    return _mean(found) if found else None


def _learns(history: History) -> bool:
    """Whether the score in training has risen, beyond chance, since the first steps."""
    score = change(history, SCORE)
    return score is not None and score.after - score.before > max(2 * score.error, 0.02 * abs(score.before))


# alarms


def parts_apart(history: History, share: float = 0.15) -> str | None:
    """Two parts of the reward have changed beyond chance, and by more than `share` of their size: one up, one down.

    Parts that are traded against each other on purpose do so, too, such as a penalty for length: 15 % keeps small
    trades silent.
    """
    names = [name for name in history[-1] if _matches(name, PARTS) and not _matches(name, NOT_PARTS)]
    if len(names) < 2:
        return None
    changes = {name: x for name in names if (x := change(history, name)) is not None}
    up = [name for name, x in changes.items() if x.is_rise(share)]
    down = [name for name, x in changes.items() if x.reverse.is_rise(share)]
    if not up or not down:
        return None
    a, b = changes[up[0]], changes[down[0]]
    text = (
        f"{up[0]} rose from {a.before:.3g} to {a.after:.3g} while {down[0]} fell from {b.before:.3g} to {b.after:.3g}"
    )
    return f"{text}; read the responses of the highest score: they may earn the one by giving up the other"


def grows(history: History, name: str, factor: float, least: float) -> str | None:
    """A metric of the responses has grown beyond chance, to more than `factor` times its first mean and by `least`,
    while the newest held-out reward is not above the first (by 0.02 of it). Needs two evaluations."""
    x = change(history, name)
    if x is None or not x.is_rise(0.0) or x.after < factor * x.before or x.after - x.before < least:
        return None
    scores = [score for record in history if (score := _held_out(record)) is not None]
    if len(scores) < 2 or scores[-1] > scores[0] + 0.02 * abs(scores[0]):
        return None
    text = f"{name} grew from {x.before:.3g} to {x.after:.3g}, and the held-out reward went from {scores[0]:.3g} to"
    return f"{text} {scores[-1]:.3g}; read the longest responses, and see whether the reward pays for length"


def held_out_apart(history: History, share: float = 0.3, evaluations: int = 3) -> str | None:
    """In each of the last evaluations the score in training exceeded the held-out reward by `share` of the larger, and
    by that much more than at the first one. In 20 small runs without a fault it was at most 0.09 of the larger, and at
    least 0.41 in 4 whose prompts held the answer. A run that learns its prompts by heart reaches 0.45."""
    if _held_out(history[-1]) is None or len([*islice(_numbers(history, SCORE), WINDOW)]) < WINDOW:
        return None
    places = [place for place, record in enumerate(history) if _held_out(record) is not None]
    if len(places) <= evaluations:
        return None
    start = _mean(list(islice(_numbers(history, SCORE), WINDOW)))
    first = start - (_held_out(history[places[0]]) or 0.0)
    pairs = [_scores(history[: place + 1]) for place in places[-evaluations:]]
    if not all(a - b - max(first, 0.0) > share * max(abs(a), abs(b)) for a, b in pairs):
        return None
    score, held = pairs[-1]
    text = f"{SCORE} is {score:.3g} and the held-out reward {held:.3g}, apart by {score - held:.2g},"
    return f"{text} at first by {first:.2g}; look for answers in the prompts of training, or a gamed reward"


def _scores(history: History) -> tuple[float, float]:
    """The mean score of the newest steps of training, nan without any, and the newest step's held-out reward."""
    trained = list(islice(_numbers(reversed(history), SCORE), WINDOW))
    return _mean(trained) if trained else math.nan, _held_out(history[-1]) or 0.0


def entropy_collapses(history: History, share: float = 0.1) -> str | None:
    """The entropy has been below `share` of its first mean for `WINDOW` steps, while the score has not risen. A policy
    that learns may become certain."""
    name = "actor/entropy"
    first = list(islice(_numbers(history, name), 2 * WINDOW))
    if len(first) < 2 * WINDOW:
        return None
    start = _mean(first[:WINDOW])
    x = _lasts(history, name, WINDOW, lambda x: x < share * start)
    if x is None or _learns(history):
        return None
    text = f"{name} is {x:.2g}, and was {start:.2g}, while {SCORE} has not risen"
    return f"{text}; read whether all responses are alike, and try a smaller actor.optimizer.lr or actor.entropy_coef"


def clipped(history: History, share: float = 0.2, steps: int = 3) -> str | None:
    """More than `share` of the tokens were clipped in each of `steps` steps, beyond what docs/metrics.md calls
    healthy."""
    x = _lasts(history, "actor/pg_clipfrac", steps, lambda x: x > share)
    if x is None:
        return None
    text = f"actor/pg_clipfrac has been above {share:g} for {steps} steps, and is {x:.2g}: much of the ratio is outside"
    return (
        f"{text} of the clip; try a smaller actor.optimizer.lr or larger mini-batches, and check the loss by fppo.laws"
    )


def ratio_off(history: History, most: float = 0.1, steps: int = 3) -> str | None:
    """Old and new log-probs were more than `most` nats a token apart in each of `steps` steps: 5 times what is healthy,
    in either direction."""
    x = _lasts(history, "actor/ppo_kl", steps, lambda x: abs(x) > most)
    if x is None:
        return None
    text = f"actor/ppo_kl has been beyond {most:g} for {steps} steps, and is {x:.2g}: the ratio is not near 1"
    return f"{text}; try a smaller actor.optimizer.lr, and check your loss and its mask by laws.check_policy_loss"


def no_signal(history: History, share: float = 0.8, steps: int = 2 * WINDOW) -> str | None:
    """In each of `steps` steps more than `share` of the groups had no signal, while the score has not risen. Without
    groups, a batch without a signal is one whose scores are all equal."""
    last = list(islice((x for record in reversed(history) if (x := _silent(record)) is not None), steps))
    if _silent(history[-1]) is None or len(last) < steps or min(last) <= share or _learns(history):
        return None
    score = _number(history[-1], SCORE)
    at = "" if score is None else f", and {SCORE} is {score:.3g}"
    text = f"{last[0]:.0%} of the groups have rewards that are all alike (rollout/groups/alike), for {steps} steps{at}"
    return f"{text}; nothing is learned from them: take prompts that are neither too hard nor too easy"


def _silent(record: Record) -> float | None:
    alike, kept = (_number(record, f"rollout/groups/{name}") for name in ("alike", "kept"))
    if alike is not None or kept is not None:
        return max(0.0 if alike is None else alike, 0.0 if kept is None else 1 - kept)
    ends = [_number(record, f"critic/score/{name}") for name in ("min", "max")]
    return None if None in ends else float(ends[0] == ends[1])


def critic_worse(history: History, steps: int = 20) -> str | None:
    """The critic explained less than the mean of the returns would in each of `steps` steps, those left out whose
    returns were all equal: then there is nothing to explain."""
    name, ends = "critic/vf_explained_var", ("critic/returns/min", "critic/returns/max")
    varied = [record for record in islice(reversed(history), 4 * steps) if _differ(record, *ends)]
    if not varied or varied[0] is not history[-1]:
        return None
    x = _lasts(varied[::-1], name, steps, lambda x: x < 0)
    if x is None:
        return None
    text = f"{name} has been below 0 for {steps} steps, and is {x:.2g}: the critic is worse than a constant"
    return f"{text}; try more critic.epochs, another rate, critic.pretrain, or an estimator without a critic"


def _differ(record: Record, low: str, high: str) -> bool:
    a, b = _number(record, low), _number(record, high)
    return a is None or b is None or a < b


def engine_gap(history: History, most: float = 0.05, least: float = 1e-3, factor: float = 100.0) -> str | None:
    """For three steps the engine's log-probs were further from the trainer's than 16 bits explain (`most` nats), or
    than `least` and `factor` times the median of the first three. Steps with a known lag are left out."""
    name, lag = "rollout_corr/k3_kl", "rollout/lag"
    if (_number(history[-1], lag) or 0.0) > 0:
        return None
    level = [record for record in islice(reversed(history), 32) if not (_number(record, lag) or 0.0) > 0][::-1]
    first = sorted(islice(_numbers((r for r in history if not (_number(r, lag) or 0.0) > 0), name), 3))
    bound = most if len(first) < 3 else min(most, max(least, factor * first[1]))
    x = _lasts(level, name, 3, lambda x: x > bound)
    if x is None:
        return None
    text = (
        f"{name} has been above {bound:.2g} for 3 steps, and is {x:.2g}, with no lag: the engine does not sample from"
    )
    return f"{text} the policy that is trained; see whether it gets the newest weights, and its dtype"


def _of(name: str, factor: float, least: float) -> Alarm:
    """The alarm of `grows`."""
    return Alarm(reads=(name, HELD_OUT), check=lambda history: grows(history, name, factor, least))


ALARMS: Mapping[str, Alarm] = {
    "parts": Alarm(reads=PARTS, check=parts_apart),
    "length": _of("response_length/mean", 1.5, 1.0),
    "repetition": _of("rollout/repeated", 2.0, 0.1),
    "held_out": Alarm(reads=(SCORE, HELD_OUT), check=held_out_apart),
    "entropy": Alarm(reads=("actor/entropy", SCORE), check=entropy_collapses),
    "clip": Alarm(reads=("actor/pg_clipfrac",), check=clipped),
    "ratio": Alarm(reads=("actor/ppo_kl",), check=ratio_off),
    "groups": Alarm(
        reads=("rollout/groups/alike", "rollout/groups/kept", "critic/score/min", "critic/score/max", SCORE),
        check=no_signal,
    ),
    "critic": Alarm(
        reads=("critic/vf_explained_var", "critic/returns/min", "critic/returns/max"),
        check=critic_worse,
    ),
    "engine": Alarm(reads=("rollout_corr/k3_kl", "rollout/lag"), check=engine_gap),
}
ALL_READ = tuple(sorted({pattern for alarm in ALARMS.values() for pattern in alarm.reads}))
