"""An estimate with every option at once against its definition, token by token, with rows that leave one by one."""

import inspect
import math
import statistics
from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages, losses, metrics
from fppo.advantages import Advantages, token_rewards
from fppo.advantages.columns import COLUMNS, WEIGHTS, OfRows, whitens
from fppo.advantages.experience import estimate
from fppo.batch import Annotated, narrow
from fppo.losses import Correction, KLState
from tests import tiny

ROWS, COEF = 6, 0.3


def rows_of(seed: int) -> Annotated:
    """Row 1 has no score, row 2 is dropped, and a correction rejects some tokens; log-probs differ in all sources."""
    g = torch.Generator().manual_seed(seed)
    rows = narrow(Annotated, tiny.experience(seed, ROWS))
    shape = rows.response_mask.shape
    noise = lambda: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    scores = torch.randn(ROWS, generator=g)
    scores[1] = torch.nan
    old = -noise().abs()
    return attrs.evolve(
        rows,
        scores=scores,
        old_log_probs=old,
        ref_log_probs=old + 0.2 * noise(),
        rollout_log_probs=old + 0.1 * noise(),
        teacher_log_probs=old + 0.3 * noise(),
    )


def own(rewards: torch.Tensor, mask: torch.Tensor) -> Advantages:
    """An estimator whose numbers tell each token from all others, and which says what it was called with."""
    places = torch.arange(mask.numel(), dtype=torch.float64).view(mask.shape)
    return Advantages((2 * rewards.double() + places.sin()).where(mask, 0.0), (rewards.double() - 1).where(mask, 0.0))


@given(st.integers(0, 99), st.booleans(), st.booleans())
def test_every_column_and_metric_is_its_definition(seed, whiten, in_reward):
    rows = rows_of(seed)
    rejected = torch.rand(rows.response_mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    seen = []

    def correct(old, rollout, mask):
        seen.append((old, rollout, mask))
        return Correction((old - rollout).exp(), mask & ~rejected, {"own/metric": metrics.mean(5.0)})

    def move(kl, divergence, count):
        return KLState(coef=float(kl.coef) + float(divergence) + 10 * float(count))

    found, kl, report = estimate(
        rows,
        KLState(coef=COEF),
        advantage_fn=own,
        kl_in_reward=in_reward,
        update_kl=move,
        correct=correct,
        drop=[lambda rows: torch.arange(ROWS) == 2, lambda rows: torch.zeros(ROWS, dtype=torch.bool)],
        whiten=whiten,
    )
    responses, tokens = rows.response_mask.tolist(), rows.response_mask.nonzero().tolist()
    kls = {(i, t): (rows.old_log_probs - rows.ref_log_probs)[i, t].item() for i, t in tokens}
    means = [[kls[i, t] for t in range(len(row)) if row[t]] for i, row in enumerate(responses) if any(row)]
    divergence = statistics.fmean(statistics.fmean(each) for each in means) if means else 0.0
    scored = [(i, t) for i, t in tokens if i != 1]
    undropped = [(i, t) for i, t in scored if i != 2]
    final = [(i, t) for i, t in undropped if not rejected[i, t]]
    last = {i: t for i, t in scored}
    rewards = {
        (i, t): (rows.scores[i].item() if last[i] == t else 0.0) - (COEF * kls[i, t] if in_reward else 0.0)
        for i, t in scored
    }
    width = len(responses[0])
    raw = {(i, t): 2 * rewards[i, t] + math.sin(i * width + t) for i, t in final}
    if whiten and len(raw) > 1:
        middle, spread = statistics.fmean(raw.values()), statistics.stdev(raw.values())
        raw = {place: (x - middle) / spread for place, x in raw.items()}
    for name, expected in (
        ("token_rewards", rewards),
        ("advantages", raw),
        ("returns", {place: rewards[place] - 1 for place in final}),
    ):
        column = torch.zeros(rows.response_mask.shape, dtype=torch.float64)
        for place, x in expected.items():
            column[place] = x
        torch.testing.assert_close(getattr(found, name).double(), column, rtol=1e-5, atol=1e-6, msg=name)
    assert found.response_mask.nonzero().tolist() == [list(place) for place in final]
    torch.testing.assert_close(found.correction_weights, (rows.old_log_probs - rows.rollout_log_probs).exp())
    ((old, rollout, mask),) = seen
    assert torch.equal(old, rows.old_log_probs)
    assert torch.equal(rollout, rows.rollout_log_probs)
    assert mask.nonzero().tolist() == [list(place) for place in undropped]
    assert float(kl.coef) == pytest.approx(COEF + divergence + 10 * len(means))
    taught = (rows.old_log_probs - rows.teacher_log_probs).tolist()
    sums = {
        "actor/reward_kl_penalty": (divergence * len(means), len(means)),
        "actor/reward_kl_penalty_coeff": (COEF, 1),
        "actor/teacher_kl": (sum(taught[i][t] for i, t in tokens), len(tokens)),
        "rollout/dropped": (len(scored) - len(undropped), len(scored)),
        "own/metric": (5.0, 1),
    }
    assert report.keys() == sums.keys()
    for name, (total, count) in sums.items():
        assert report[name].count.item() == count, name
        assert report[name].total.item() == pytest.approx(total, abs=1e-9), name


def test_the_kind_of_the_divergence_is_the_one_given():
    rows = rows_of(3)
    reports = {}
    for kind in losses.KL_KINDS:
        _, _, report = estimate(rows, KLState(coef=0.0), advantage_fn=own, kl_kind=kind)
        each = losses.kl_estimate(rows.old_log_probs, rows.ref_log_probs, kind, mask=rows.response_mask)
        expected = losses.sequence_kl(each, rows.response_mask)
        assert metrics.report(report)["actor/reward_kl_penalty"] == pytest.approx(
            float(expected.total / expected.count)
        )
        reports[kind] = float(expected.total)
    assert len({round(x, 9) for kind, x in reports.items() if "+" not in kind}) == 4


class Reads:
    """An estimator of one column, which keeps what it got."""

    def __init__(self, name: str) -> None:
        self.__signature__ = inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)])
        self.seen = None

    def __call__(self, **columns) -> torch.Tensor:
        ((_, self.seen),) = columns.items()
        return torch.zeros(ROWS, 6)


@pytest.mark.parametrize("name", [*COLUMNS, WEIGHTS])
def test_an_estimator_gets_the_column_of_its_parameters_name(name):
    """No two of which are equal here; the returns of one that gives advantages alone are its rows' whole rewards."""
    rows = rows_of(0)
    g = torch.Generator().manual_seed(9)
    scores = {x: torch.randn(ROWS, generator=g) for x in ("scores", "outcomes", "baselines")}
    dense = {x: torch.randn(ROWS, 6, generator=g) for x in ("values", "sum_squared_probs")}
    named = {"a": torch.tensor([1.0, torch.nan, 2.0, 3.0, 4.0, 5.0])}
    turns = torch.arange(6).expand(ROWS, 6)
    rows = attrs.evolve(rows, **scores, **dense, named_scores=named, turn_ids=turns)
    rewards = token_rewards(rows.scores, rows.response_mask).double()
    if name in ("rewards", "scores", "rows"):  # others would not see what a penalty adds to the scores
        rewards = rewards - torch.rand(rewards.shape, generator=g).where(rows.response_mask, 0.0)
    correct = lambda old, rollout, mask: Correction(old - 2 * rollout, mask, {})  # noqa: E731
    fn = Reads(name)
    result = OfRows(fn, correct)(rows, rewards)
    expected = {
        "rows": rows,
        "rewards": rewards,
        "scores": rewards.sum(1),
        "named_scores": {"a": torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0, 5.0])},
        "outcomes": rows.outcomes,
        "mask": rows.response_mask,
        "log_probs": rows.old_log_probs,
        WEIGHTS: rows.old_log_probs - 2 * rows.rollout_log_probs,
    }.get(name, getattr(rows, name, None))
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(fn.seen, expected, rtol=0, atol=0, equal_nan=True)
    elif name == "rows":
        assert fn.seen is rows
    else:
        assert torch.equal(fn.seen["a"], expected["a"])
    assert torch.equal(result.returns, rewards.sum(1)[:, None].where(rows.response_mask, 0.0))


def test_estimators_with_a_critic_and_those_that_whiten_themselves_are_whitened():
    names = ["gae", "turn_gae", "td", "vtrace", "grpo", "rloo", "remax", "gpg", "opo", "gdpo", "reinforce_plus_plus"]
    fns = {name: getattr(advantages, name) for name in [*names, "reinforce_plus_plus_baseline", "discounted_returns"]}
    expected = ["gae", "turn_gae", "td", "vtrace", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    fns["td"] = partial(advantages.td, steps=2)
    for wrapped in (lambda fn: fn, lambda fn: partial(fn), OfRows):
        assert [name for name, fn in fns.items() if whitens(wrapped(fn))] == expected
