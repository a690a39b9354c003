"""Several teachers: each row has one of them, or all by weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from fppo import batch as batches
from fppo._errors import did_you_mean
from fppo.batch import Rollout
from fppo.pipeline.teacher import TeacherFn
from fppo.steps.outputs import TokenOutputs

Weights = Mapping[str, float]  # by a teacher's name; those that are not named have none
Weigh = Callable[[Rollout], Sequence[Weights]]
RowFn = Callable[[Mapping[str, Any]], str | Weights]  # of a row's fields: its teacher, or weights of several


@attrs.frozen(kw_only=True)
class SeveralTeachers:
    """A teacher made of several, whose log-prob of a token is sum_k w_k log q_k(token), [B, T].

    `weigh` gives the weights of each row. The divergence of sampled tokens is then sum_k w_k KL(policy || q_k), which
    is the same for weights that add up to 1. Each teacher reads only the rows in which it has a weight. Distributions
    are those of a row's only teacher. Raises ValueError for names that are none of a teacher, weights that do not add
    up to 1, and distributions of rows with several teachers.
    """

    teachers: Mapping[str, TeacherFn]
    weigh: Weigh

    def __call__(self, rows: Rollout, temperature: float) -> TokenOutputs:
        """What the teachers say of all rows, under softmax(logits / temperature)."""
        weights = [self._checked(each) for each in self.weigh(rows)]
        found: dict[str, torch.Tensor] = {}
        for name, teacher in self.teachers.items():
            asked = [number for number, each in enumerate(weights) if each.get(name)]
            if not asked:
                continue
            out = teacher(rows if len(asked) == len(weights) else batches.rows(rows, asked), temperature)
            shares = [weights[number][name] for number in asked]
            for column, x in ((column, x) for column, x in out._asdict().items() if x is not None):
                if column != "log_probs" and set(shares) != {1.0}:
                    raise ValueError(f"rows have several teachers, {self._names}, whose distributions are not mixed")
                factors = torch.tensor(shares, dtype=x.dtype, device=x.device).view(-1, *[1] * (x.dim() - 1))
                whole = found.setdefault(column, x.new_zeros(len(weights), *x.shape[1:]))
                found[column] = whole.index_add(0, torch.tensor(asked, device=x.device), factors * x)
        return TokenOutputs()._replace(**found)

    @property
    def _names(self) -> str:
        return ", ".join(self.teachers)

    def _checked(self, weights: Weights) -> Weights:
        if unknown := [name for name in weights if name not in self.teachers]:
            text = did_you_mean(str(unknown[0]), self.teachers)
            raise ValueError(f"a row's teacher is {unknown[0]!r}, and model.teachers has no such name; {text}")
        if min(weights.values(), default=0.0) < 0 or abs(sum(weights.values()) - 1) > 1e-6:
            raise ValueError(f"a row's teachers have the weights {dict(weights)}: give some of at least 0, 1 in all")
        return weights


def by_field(field: str) -> Weigh:
    """Weigh by the name of a teacher in a field of each row; "source" is the name of its data set."""

    def weigh(rows: Rollout) -> list[Weights]:
        found = rows.source if field == "source" else [extra.get(field) for extra in rows.extras]
        return [{str(name): 1.0} for name in found]

    return weigh


def by_function(fn: RowFn) -> Weigh:
    """Weigh by a function of each row's fields, with its "source" and "ground_truth"."""

    def weigh(rows: Rollout) -> list[Weights]:
        columns = zip(rows.extras, rows.source, rows.ground_truth, strict=True)
        found = [fn({**extra, "source": source, "ground_truth": truth}) for extra, source, truth in columns]
        return [{each: 1.0} if isinstance(each, str) else each for each in found]

    return weigh


def by_weights(weights: Weights) -> Weigh:
    """Weigh all rows alike."""
    return lambda rows: [weights] * len(rows.tokens)
