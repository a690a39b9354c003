"""Scoring with every option at once against its definition, row by row: terms that fail, shape, weigh nothing or name
further numbers, and functions of the whole rollout."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import settings as draws
from hypothesis import strategies as st

from fppo import metrics, rewards
from fppo.batch import Column, Rollout, narrow
from fppo.rewards.functions import RewardTerm, WeightedSum
from fppo.rewards.scoring import EXTRACTED
from tests import tiny

ROWS = 4
BARE = narrow(Rollout, tiny.experience(0, ROWS))
PLAIN = attrs.evolve(
    BARE,
    extras=Column([{"row": row} for row in range(ROWS)]),
    versions=torch.full((ROWS,), 3),
    finish=Column(["stop"] * ROWS),
)


class Words:
    """A tokenizer of numbers."""

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


@attrs.frozen(eq=False)
class Inline:
    """A function of one sample, by the sample's row; None: it fails."""

    numbers: list[float | None]
    answers: bool
    further: bool
    reward_shaping: bool
    reward_inline = True

    def __call__(self, sample: Any) -> Any:
        row = sample.extras["row"]
        number = self.numbers[row]
        if number is None:
            raise RuntimeError("no")
        more = {"more": number + 100} if self.further else {}
        return {"score": number, **more, **({"answer": f"a{row}"} if self.answers else {})}


@attrs.frozen(eq=False)
class Whole:
    """A function of the rollout, which does not know some of its rows."""

    numbers: list[float | None]
    name: str
    reward_shaping: bool
    reward_kind = "tensor"

    def __call__(self, rollout: Rollout) -> Any:
        assert len(rollout.tokens) == ROWS
        scores = torch.tensor([0.0 if x is None else x for x in self.numbers])
        report = {f"reward/{self.name}_own": metrics.mean(5.0)}
        return scores, report, torch.tensor([x is not None for x in self.numbers])


NUMBERS = st.lists(st.sampled_from([None, -1.0, 0.0, 0.5, 2.0]), min_size=ROWS, max_size=ROWS)
TERM = st.tuples(
    st.sampled_from([0.0, 1.0, -0.5, 3.0]), st.booleans(), NUMBERS, st.booleans(), st.booleans(), st.booleans()
)


@draws(max_examples=60)
@given(st.lists(TERM, min_size=1, max_size=3), st.sampled_from([None, -2.0, 0.0]))
def test_every_score_and_metric_is_its_definition(drawn, failure_score):
    terms, columns, further, answers, errors = [], {}, {}, [None] * ROWS, set()
    prefix = {}
    for number, (weight, whole, numbers, shaping, answer, more) in enumerate(drawn):
        name = f"t{number}"
        fn: Any = Whole(numbers, name, shaping) if whole else Inline(numbers, answer, more, shaping)
        terms.append(RewardTerm(name, weight, fn))
        otherwise = math.nan if failure_score is None else failure_score
        columns[name] = [otherwise if x is None else x for x in numbers]
        if not whole:
            prefix[name] = "" if len(drawn) == 1 else f"{name}/"
            errors |= {row for row, x in enumerate(numbers) if x is None}
            if more and any(x is not None for x in numbers):
                further[f"{prefix[name]}more"] = [math.nan if x is None else x + 100 for x in numbers]
            if answer:
                answers = [f"a{row}" if x is not None else answers[row] for row, x in enumerate(numbers)]

    def total(chosen):
        return [sum(x.weight * columns[x.name][row] for x in chosen if x.weight) for row in range(ROWS)]

    with rewards.RewardRunner(WeightedSum(tuple(terms))) as runner:
        scored, report = rewards.score(PLAIN, reward=runner, tokenizer=Words(), failure_score=failure_score)
    expected = total(terms)
    assert scored.scores.tolist() == pytest.approx(expected, nan_ok=True)
    assert scored.scores.dtype == torch.float32
    named = {name: x.tolist() for name, x in scored.named_scores.items()}
    assert named.keys() == (columns | further).keys()
    for key, column in (columns | further).items():
        assert named[key] == pytest.approx(column, nan_ok=True)
    plain = [term for term in terms if not term.fn.reward_shaping]
    if 0 < len(plain) < len(terms):
        assert scored.outcomes.tolist() == pytest.approx(total(plain), nan_ok=True)
    else:
        assert scored.outcomes is None
    kept = [{"row": row} | ({EXTRACTED: answers[row]} if any(answers) else {}) for row in range(ROWS)]
    assert list(scored.extras) == kept
    known = [x for x in expected if not math.isnan(x)]
    numbers = metrics.report(report)
    assert numbers.pop("reward/unscored") == ROWS - len(known)
    assert (numbers.pop("reward/errors"), numbers.pop("reward/timeouts")) == (len(errors), 0)
    for kind, of in {"mean": lambda x: sum(x) / len(x), "max": max, "min": min}.items():
        found = numbers.pop(f"critic/score/{kind}")
        assert not known or found == pytest.approx(of(known))
    for name, column in (columns | further).items():
        there = [x for x in column if not math.isnan(x)]
        found = numbers.pop(f"reward/{name}")
        assert not there or found == pytest.approx(sum(there) / len(there))
    assert numbers == {f"reward/{x.name}_own": 5.0 for x in terms if x.kind == "tensor"}
