"""Alarms: what the metrics of a run say when it goes wrong.

In: records of steps, as in metrics.jsonl, oldest first. Out: for each alarm the first step at which it rings, with a
sentence. Numbers that are missing or not finite count as not logged. Begin with `ring`; `ALARMS` has the alarms by
name.

An alarm looks at a `Heard`, which takes one record at a time: the first and the newest numbers of each quantity. So
what it says of a step never changes later, and a step costs the same however long the run is. Slow alarms compare the
mean of a quantity's newest `WINDOW` numbers with that of its first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import attrs

from fppo.pipeline.train import StepRecord

Record = Mapping[str, Any]
Numbers = tuple[float, ...]

WINDOW = 6  # steps of a mean; the standard error of one number's mean over them is 0.4 of its deviation
FIRST, NEWEST = 2 * WINDOW, 20  # numbers of a quantity that are kept
SURE = 4.0  # standard errors of a change that is not chance; a run asks this of a few numbers in thousands of steps
SCORE = "critic/score/mean"
HELD_OUT = "val-core/*/reward/mean@*"
PARTS = ("reward/*",)
NOT_PARTS = (
    *(f"reward/{x}" for x in ("errors", "timeouts", "unscored", "reverse_kl")),
    "reward/judge_*",
    "reward/model_*",
)


# quantities that are no metrics: the mean of the held-out rewards, and that of the newest scores at an evaluation; the
# share of groups without a signal; the explained variance of returns that differ; the engine's gap without a lag
EVALUATED, TRAINED, SILENT, EXPLAINED, GAP = "held out", "trained", "silent", "explained", "gap"


@attrs.frozen
class Line:
    """A quantity: its first and its newest numbers, oldest first, and the record that logged the last one."""

    first: Numbers = ()
    newest: Numbers = ()
    record: int = 0  # counted from 1

    def after(self, x: float, record: int) -> Line:
        """The line with one more number."""
        first = (*self.first, x) if len(self.first) < FIRST else self.first
        return Line(first, (*self.newest[1 - NEWEST :], x), record)


@attrs.frozen
class Heard:
    """A run as alarms know it: how many records it has, its quantities, and which alarms rang."""

    records: int = 0
    lines: Mapping[str, Line] = MappingProxyType({})
    rung: frozenset[str] = frozenset()

    def line(self, name: str) -> Line:
        """A quantity, empty if it was never logged."""
        return self.lines.get(name, Line())

    def now(self, name: str) -> float | None:
        """The number of the newest record."""
        line = self.line(name)
        return line.newest[-1] if line.newest and line.record == self.records else None


@attrs.frozen(kw_only=True)
class Alarm:
    """A check at the newest record, and the names (or patterns) of all metrics that it reads."""

    reads: tuple[str, ...]
    check: Callable[[Heard], str | None]


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
    heard, found = Heard(), list[Finding]()
    for record in records:
        heard, new = hear(heard, record)
        found += new
    return found


def hear(heard: Heard, record: Record) -> tuple[Heard, list[Finding]]:
    """Take one more record, and return what is known then, and the alarms that ring at it and have not rung before."""
    if not isinstance(record.get("step"), int):
        return heard, []
    number, lines = heard.records + 1, dict(heard.lines)
    for name, x in _quantities(record).items():
        lines[name] = lines.get(name, Line()).after(x, number)
    if lines.get(EVALUATED, Line()).record == number:
        trained = lines.get(SCORE, Line()).newest[-WINDOW:]
        lines[TRAINED] = lines.get(TRAINED, Line()).after(_mean(trained) if trained else math.nan, number)
    now = Heard(number, lines, heard.rung)
    texts = {name: alarm.check(now) for name, alarm in ALARMS.items() if name not in heard.rung}
    found = [Finding(step=record["step"], alarm=name, text=text) for name, text in texts.items() if text is not None]
    return attrs.evolve(now, rung=now.rung.union(each.alarm for each in found)) if found else now, found


def _quantities(record: Record) -> dict[str, float]:
    """The quantities that a record logs, by name."""
    own = {name: x for name in record if _matches(name, ALL_READ) and (x := _number(record, name)) is not None}
    held = [x for name, x in own.items() if _matches(name, (HELD_OUT,))]
    found = {EVALUATED: _mean(held) if held else None, SILENT: _silent(own)}
    if _differ(own, "critic/returns/min", "critic/returns/max"):
        found[EXPLAINED] = own.get("critic/vf_explained_var")
    if own.get("rollout/lag", 0.0) <= 0:
        found[GAP] = own.get("rollout_corr/k3_kl")
    return own | {name: x for name, x in found.items() if x is not None}


def _silent(own: Mapping[str, float]) -> float | None:
    alike, kept = (own.get(f"rollout/groups/{name}") for name in ("alike", "kept"))
    if alike is not None or kept is not None:
        return max(alike or 0.0, 0.0 if kept is None else 1 - kept)
    ends = [own.get(f"critic/score/{name}") for name in ("min", "max")]
    return None if None in ends else float(ends[0] == ends[1])


def _differ(own: Mapping[str, float], low: str, high: str) -> bool:
    a, b = own.get(low), own.get(high)
    return a is None or b is None or a < b


@cache
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Alarms:
    """An observer that prints an alarm on standard error at the first step at which it rings. `before` are the records
    of the run's earlier steps, whose alarms were printed then."""

    def __init__(self, before: Iterable[Record] = ()) -> None:
        self._heard = Heard()
        for record in before:
            self._heard, _ = hear(self._heard, record)

    def __call__(self, record: StepRecord) -> list[Finding]:
        """Look at a step, and return the alarms that ring first at it."""
        self._heard, found = hear(self._heard, {**record.metrics, "step": record.run.step})
        for each in found:
            print(each, file=sys.stderr, flush=True)
        return found


def _number(record: Record, name: str) -> float | None:
    x = record.get(name)
    return float(x) if isinstance(x, int | float) and math.isfinite(x) else None


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


def change(heard: Heard, name: str, window: int = WINDOW) -> Change | None:
    """The change of a metric that the newest step logged; None with fewer than 2 * `window` numbers.

    Its error is estimated from differences of successive steps, so that a trend does not count as noise.
    """
    line = heard.line(name)
    if heard.now(name) is None or len(line.first) < 2 * window:
        return None
    early, late = line.first[:window], line.newest[-window:]
    jumps = [(b - a) * (b - a) for part in (early, late) for a, b in pairwise(part)]
    return Change(_mean(early), _mean(late), math.sqrt(_mean(jumps) / window))  # a jump's variance is twice a number's


def _lasts(heard: Heard, name: str, steps: int, holds: Callable[[float], bool]) -> float | None:
    """The newest number of a quantity, if it and those of the `steps` - 1 logged before hold; else None."""
    last = heard.line(name).newest[-steps:]
    return heard.now(name) if len(last) == steps and all(map(holds, last)) else None


def _learns(heard: Heard) -> bool:
    """Whether the score in training has risen, beyond chance, since the first steps."""
    score = change(heard, SCORE)
    return score is not None and score.after - score.before > max(2 * score.error, 0.02 * abs(score.before))


# alarms


def parts_apart(heard: Heard, share: float = 0.15) -> str | None:
    """Two parts of the reward have changed beyond chance, and by more than `share` of their size: one up, one down.

    Parts that are traded against each other on purpose do so, too, such as a penalty for length: 15 % keeps small
    trades silent.
    """
    names = [name for name in heard.lines if _matches(name, PARTS) and not _matches(name, NOT_PARTS)]
    changes = {name: x for name in names if (x := change(heard, name)) is not None}
    up = [name for name, x in changes.items() if x.is_rise(share)]
    down = [name for name, x in changes.items() if x.reverse.is_rise(share)]
    if not up or not down:
        return None
    a, b = changes[up[0]], changes[down[0]]
    text = (
        f"{up[0]} rose from {a.before:.3g} to {a.after:.3g} while {down[0]} fell from {b.before:.3g} to {b.after:.3g}"
    )
    return f"{text}; read the responses of the highest score: they may earn the one by giving up the other"


def grows(heard: Heard, name: str, factor: float, least: float) -> str | None:
    """A metric of the responses has grown beyond chance, to more than `factor` times its first mean and by `least`,
    while the newest held-out reward is not above the first (by 0.02 of it). Needs two evaluations."""
    x = change(heard, name)
    if x is None or not x.is_rise(0.0) or x.after < factor * x.before or x.after - x.before < least:
        return None
    scores = heard.line(EVALUATED)
    if len(scores.newest) < 2:
        return None
    first, last = scores.first[0], scores.newest[-1]
    if last > first + 0.02 * abs(first):
        return None
    text = f"{name} grew from {x.before:.3g} to {x.after:.3g}, and the held-out reward went from {first:.3g} to"
    return f"{text} {last:.3g}; read the longest responses, and see whether the reward pays for length"


def held_out_apart(heard: Heard, share: float = 0.3, evaluations: int = 3) -> str | None:
    """In each of the last evaluations the score in training exceeded the held-out reward by `share` of the larger, and
    by that much more than at the first one. In 20 small runs without a fault it was at most 0.09 of the larger, and at
    least 0.41 in 4 whose prompts held the answer. A run that learns its prompts by heart reaches 0.45."""
    scores, held_out = heard.line(SCORE).first, heard.line(EVALUATED)
    if heard.now(EVALUATED) is None or len(scores) < WINDOW or len(held_out.first) <= evaluations:
        return None
    first = _mean(scores[:WINDOW]) - held_out.first[0]
    pairs = list(zip(heard.line(TRAINED).newest, held_out.newest, strict=True))[-evaluations:]
    if not all(a - b - max(first, 0.0) > share * max(abs(a), abs(b)) for a, b in pairs):
        return None
    score, held = pairs[-1]
    text = f"{SCORE} is {score:.3g} and the held-out reward {held:.3g}, apart by {score - held:.2g},"
    return f"{text} at first by {first:.2g}; look for answers in the prompts of training, or a gamed reward"


def entropy_collapses(heard: Heard, share: float = 0.1) -> str | None:
    """The entropy has been below `share` of its first mean for `WINDOW` steps, while the score has not risen. A policy
    that learns may become certain."""
    name = "actor/entropy"
    first = heard.line(name).first
    if len(first) < 2 * WINDOW:
        return None
    start = _mean(first[:WINDOW])
    x = _lasts(heard, name, WINDOW, lambda x: x < share * start)
    if x is None or _learns(heard):
        return None
    text = f"{name} is {x:.2g}, and was {start:.2g}, while {SCORE} has not risen"
    return f"{text}; read whether all responses are alike, and try a smaller actor.optimizer.lr or actor.entropy_coef"


def clipped(heard: Heard, share: float = 0.2, steps: int = 3) -> str | None:
    """More than `share` of the tokens were clipped in each of `steps` steps, beyond what docs/metrics.md calls
    healthy."""
    x = _lasts(heard, "actor/pg_clipfrac", steps, lambda x: x > share)
    if x is None:
        return None
    text = f"actor/pg_clipfrac has been above {share:g} for {steps} steps, and is {x:.2g}: much of the ratio is outside"
    return (
        f"{text} of the clip; try a smaller actor.optimizer.lr or larger mini-batches, and check the loss by fppo.laws"
    )


def ratio_off(heard: Heard, most: float = 0.1, steps: int = 3, at_once: float = 1.0) -> str | None:
    """Old and new log-probs were more than `most` nats a token apart in each of `steps` steps: 5 times what is healthy,
    in either direction. Or they are more than `at_once` apart: such an update has ruined the policy."""
    name = "actor/ppo_kl"
    sudden = _lasts(heard, name, 1, lambda x: abs(x) > at_once)
    x = _lasts(heard, name, steps, lambda x: abs(x) > most) if sudden is None else sudden
    if x is None:
        return None
    bound = f"beyond {most:g} for {steps} steps, and is {x:.2g}" if sudden is None else f"as far as {x:.2g} in one step"
    text = f"{name} has been {bound}: the ratio is not near 1"
    return f"{text}; try a smaller actor.optimizer.lr, and check your loss and its mask by laws.check_policy_loss"


def no_signal(heard: Heard, share: float = 0.8, steps: int = 2 * WINDOW) -> str | None:
    """In each of `steps` steps more than `share` of the groups had no signal, while the score has not risen. Without
    groups, a batch without a signal is one whose scores are all equal."""
    x = _lasts(heard, SILENT, steps, lambda x: x > share)
    if x is None or _learns(heard):
        return None
    score = heard.now(SCORE)
    at = "" if score is None else f", and {SCORE} is {score:.3g}"
    text = f"{x:.0%} of the groups have rewards that are all alike (rollout/groups/alike), for {steps} steps{at}"
    return f"{text}; nothing is learned from them: take prompts that are neither too hard nor too easy"


def critic_worse(heard: Heard, steps: int = NEWEST) -> str | None:
    """The critic explained less than the mean of the returns would in each of `steps` steps, those left out whose
    returns were all equal: then there is nothing to explain."""
    x = _lasts(heard, EXPLAINED, steps, lambda x: x < 0)
    if x is None:
        return None
    text = f"critic/vf_explained_var has been below 0 for {steps} steps, and is {x:.2g}: the critic is worse than a"
    return f"{text} constant; try more critic.epochs, another rate, critic.pretrain, or an estimator without a critic"


def engine_gap(heard: Heard, most: float = 0.05, least: float = 1e-3, factor: float = 100.0) -> str | None:
    """For three steps the engine's log-probs were further from the trainer's than 16 bits explain (`most` nats), or
    than `least` and `factor` times the median of the first three. Steps with a known lag are left out."""
    first = sorted(heard.line(GAP).first[:3])
    bound = most if len(first) < 3 else min(most, max(least, factor * first[1]))
    x = _lasts(heard, GAP, 3, lambda x: x > bound)
    if x is None:
        return None
    text = (
        f"rollout_corr/k3_kl has been above {bound:.2g} for 3 steps, and is {x:.2g}, with no lag: the engine does not"
    )
    return f"{text} sample from the policy that is trained; see whether it gets the newest weights, and its dtype"


def _of(name: str, factor: float, least: float) -> Alarm:
    """The alarm of `grows`."""
    return Alarm(reads=(name, HELD_OUT), check=lambda heard: grows(heard, name, factor, least))


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
