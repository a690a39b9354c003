"""Validation metrics of n responses per held-out prompt: mean, best of k and majority of k, by source."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fppo.rewards.scoring import EXTRACTED

if TYPE_CHECKING:
    from fppo.batch import Scored
    from fppo.metrics import Metrics

REWARD, NAMED_REWARD = "reward", "reward_function"  # the weighted sum; a function named "reward"


def summarize(batches: Sequence[Scored], *, n: int) -> Metrics:
    """Metrics of evaluation batches in which `n` rows, in any order, share a number in `groups`.

    By source: val-core/SOURCE/reward/mean@n, best@n/mean and, where rewards return answers, maj@n/mean; for smaller k
    (powers of two) and for named scores the same under val-aux. best@k and maj@k are exact expectations over k of the n
    responses, drawn without replacement. Each prompt counts once, with the named scores of `batch.same_scores`; a score
    named "reward" is called "reward_function" here. Responses without a score are left out of their prompt's numbers,
    best@k and maj@k need k responses with one, and a prompt without scores counts nowhere; val-aux/unscored counts such
    responses, if any. Raises ValueError if a group does not have n rows.
    """
    from fppo import batch, metrics

    values: dict[str, list[float]] = defaultdict(list)
    unscored = 0
    for scored in batch.same_scores(batches):
        named = {NAMED_REWARD if k == REWARD else k: v.tolist() for k, v in scored.named_scores.items()}
        columns = {REWARD: scored.scores.tolist(), **named}
        members: dict[int, list[int]] = defaultdict(list)
        for row, group in enumerate(scored.groups.tolist()):
            members[group].append(row)
        for group, rows in members.items():
            if len(rows) != n:
                raise ValueError(f"prompt {group} has {len(rows)} responses, not n = {n}")
            answers = [scored.extras[row].get(EXTRACTED) for row in rows]
            voted = any(EXTRACTED in scored.extras[row] for row in rows)
            for name, column in columns.items():
                present = [index for index, row in enumerate(rows) if not math.isnan(column[row])]
                unscored += (n - len(present)) * (name == REWARD)
                given = [answers[index] for index in present] if voted else None
                for metric, value in _of_prompt([column[rows[index]] for index in present], given, n).items():
                    level = "core" if name == REWARD and f"@{n}" in metric else "aux"
                    found = values[f"val-{level}/{scored.source[rows[0]]}/{name}/{metric}"]
                    found += [] if value is None else [value]
    means: Metrics = {name: metrics.mean(math.fsum(column), len(column)) for name, column in values.items()}
    return means | ({"val-aux/unscored": metrics.total(unscored)} if unscored else {})


def _of_prompt(scores: Sequence[float], answers: Sequence[str | None] | None, n: int) -> dict[str, float | None]:
    """The metrics of a prompt with `n` responses, from the scores and answers of those with a score; None for a metric
    that needs more of them."""
    result: dict[str, float | None] = {f"mean@{n}": math.fsum(scores) / len(scores) if scores else None}
    for k in sizes(n):
        enough = k <= len(scores)
        result[f"best@{k}/mean"] = best_at_k(scores, k) if enough else None
        if answers is not None:
            result[f"maj@{k}/mean"] = majority_at_k(scores, answers, k) if enough else None
    return result


def sizes(n: int) -> list[int]:
    """The k of best@k and maj@k: powers of two from 2, and n; none for a single response, which the mean covers."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | {n}) if n > 1 else []


def best_at_k(scores: Sequence[float], k: int) -> float:
    """The expected maximum of k of the scores, drawn without replacement.

    With scores in ascending order it is sum_i C(i, k - 1) / C(n, k) s_i, i from 0: the estimator of pass@k
    (Chen et al., 2021, arXiv:2107.03374) for any scores.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} of {n} scores")
    return math.fsum(math.comb(i, k - 1) / math.comb(n, k) * s for i, s in enumerate(sorted(scores)))


def majority_at_k(scores: Sequence[float], answers: Sequence[str | None], k: int) -> float:
    """The expected score of the most frequent answer among k of the responses, drawn without replacement.

    Tied answers share the vote equally; an answer's score is the mean score of its responses. No answer (None) is an
    answer too. Computed exactly by counting, for each answer a and number of votes m, the draws in which a and t others
    get m votes and no answer more.
    """
    n = len(scores)
    if not 1 <= k <= n or len(answers) != n:
        raise ValueError(f"maj@{k} of {n} scores and {len(answers)} answers")
    counts = Counter(answers)
    totals: dict[str | None, float] = defaultdict(float)
    for answer, value in zip(answers, scores, strict=True):
        totals[answer] += value
    wins = {count: _share_of_votes(list(counts.values()), count, k) for count in set(counts.values())}
    return math.fsum(totals[answer] / count * wins[count] for answer, count in counts.items())


def _share_of_votes(counts: Sequence[int], count: int, k: int) -> float:
    """The probability that an answer with `count` responses wins among k drawn; `counts` has the responses of every
    answer. With t ties it wins 1 / (t + 1)."""
    others = list(counts)
    others.remove(count)
    won = 0.0
    for votes in range(1, min(count, k) + 1):
        ways = {(0, 0): 1}  # (responses drawn, ties) -> number of ways
        for other in others:
            after: dict[tuple[int, int], int] = defaultdict(int)
            for (drawn, ties), number in ways.items():
                for more in range(min(other, votes, k - votes - drawn) + 1):
                    after[drawn + more, ties + (more == votes)] += number * math.comb(other, more)
            ways = after
        fair = math.fsum(number / (ties + 1) for (drawn, ties), number in ways.items() if drawn == k - votes)
        won += math.comb(count, votes) * fair
    return won / math.comb(sum(counts), k)
