from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.advantages import gdpo, gpg, grpo, grpo_passk, maxrl, opo, reinforce_plus_plus_baseline, rloo, whiten
from tests.advantages._data import cases, close, spoil


def members(case):
    """{group id: its rows that have tokens}, from the definition."""
    found = {}
    for b, g in enumerate(case.groups.tolist()):
        if case.mask[b].any():
            found.setdefault(g, []).append(b)
    return found


def slow(case, number):
    """Row advantages from number(scores of the group, lengths of the group, i), spread over the mask."""
    result = torch.zeros_like(case.tokens[0])
    for rows in members(case).values():
        scores, lengths = case.scores[rows], case.mask[rows].sum(1)
        for i, b in enumerate(rows):
            result[b] = torch.where(case.mask[b], number(scores, lengths, i), 0.0)
    return result


def slow_grpo(s, _, i):
    d = s - s[0]  # the mean of three times 0.7 is not 0.7
    return s[i] / (1 + 1e-6) if len(s) == 1 else (d[i] - d.mean()) / (d.std() + 1e-6)


def slow_dr_grpo(s, _, i):
    return s[i] if len(s) == 1 else s[i] - s.mean()


def slow_maxrl(s, _, i):
    if len(s) == 1:
        return s[i]
    d = s - s[0]
    mean = s[0] + d.mean()
    return (d[i] - d.mean()) / mean if mean > 1e-6 else 0.0


def slow_rloo(s, _, i):
    others = [s[j] for j in range(len(s)) if j != i]
    return s[i] - sum(others) / len(others) if others else s[i]


def slow_opo(s, lengths, i):
    return s[i] if len(s) == 1 else s[i] - (s * lengths).sum() / lengths.sum()


def slow_passk(s, _, i):
    ranked = sorted(s.tolist(), reverse=True)
    return (ranked[0] - ranked[1] if s[i] == ranked[0] else 0.0) / (s.std() + 1e-6)


def slow_gpg(case):
    rows = [b for group in members(case).values() for b in group]
    alpha = len(rows) / max(sum(case.scores[b].item() != 0 for b in rows), 1) if rows else 1.0
    return alpha * slow(case, slow_dr_grpo)


ESTIMATORS = {
    "grpo": grpo,
    "grpo without std": partial(grpo, scale="none"),
    "rloo": rloo,
    "maxrl": maxrl,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "grpo_passk without std": partial(grpo_passk, scale="none"),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": lambda s, m, g: gdpo({"a": s, "b": -s.abs()}, m, g, weights={"a": 1.0, "b": 0.5}),
}
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


@pytest.mark.parametrize(
    ("fn", "number"),
    [
        (grpo, slow_grpo),
        (partial(grpo, scale="none"), slow_dr_grpo),
        (rloo, slow_rloo),
        (maxrl, slow_maxrl),
        (opo, slow_opo),
    ],
)
@given(case=cases())
def test_estimator_is_its_definition(fn, number, case):
    result = fn(case.scores, case.mask, case.groups)
    close(result.advantages, slow(case, number))
    close(result.returns, case.scores[:, None].where(case.mask, 0.0))


@given(cases())
def test_gpg_is_its_definition(case):
    close(gpg(case.scores, case.mask, case.groups).advantages, slow_gpg(case))


@given(cases(min_group=2))
def test_grpo_passk_is_its_definition(case):
    close(grpo_passk(case.scores, case.mask, case.groups).advantages, slow(case, slow_passk))


def test_grpo_passk_refuses_a_lonely_row():
    with pytest.raises(ValueError, match="group 5 has one"):
        grpo_passk(torch.zeros(3), torch.ones(3, 1, dtype=torch.bool), torch.tensor([4, 5, 4]))


@given(cases())
def test_reinforce_plus_plus_baseline_and_gdpo_are_their_definitions(case):
    raw = slow(case, slow_dr_grpo)
    close(reinforce_plus_plus_baseline(case.scores, case.mask, case.groups).advantages, whiten(raw, case.mask), 1e-7)
    other = case._replace(scores=torch.randn(len(case.scores), generator=case.generator).double())
    named = {"a": case.scores, "b": other.scores, "unused": torch.full_like(case.scores, torch.nan)}
    result = gdpo(named, case.mask, case.groups, weights={"a": 2.0, "b": 0.5})
    expected = 2.0 * slow(case, slow_grpo) + 0.5 * slow(other, slow_grpo)
    close(result.advantages, whiten(expected, case.mask), 1e-7)
    close(result.returns, (2.0 * case.scores + 0.5 * other.scores)[:, None].where(case.mask, 0.0))
    del named["unused"]
    both = whiten(slow(case, slow_grpo) + slow(other, slow_grpo), case.mask)
    close(gdpo(named, case.mask, case.groups).advantages, both, 1e-7)


@each_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(min_group=2))
def test_equal_rewards_give_exactly_zero(name, dtype, case):
    """Each group has its own reward, whose sums round: the advantage is 0, not rounding over epsilon."""
    mask = torch.ones_like(case.mask)
    rewards = (case.groups.to(dtype) + 0.1) / 3.0
    result = ESTIMATORS[name](rewards, mask, case.groups).advantages
    assert result.dtype == dtype
    assert not result.any()


@each_estimator
@given(case=cases(min_group=2))
def test_row_order_and_names_of_groups_change_nothing(name, case):
    fn = ESTIMATORS[name]
    plain = fn(case.scores, case.mask, case.groups).advantages
    order = torch.randperm(len(case.mask), generator=case.generator)
    close(fn(case.scores[order], case.mask[order], case.groups[order]).advantages, plain[order])
    contiguous = torch.argsort(case.groups, stable=True)
    sorted_ = fn(case.scores[contiguous], case.mask[contiguous], case.groups[contiguous]).advantages
    close(sorted_, plain[contiguous])
    close(fn(case.scores, case.mask, 5 - case.groups).advantages, plain)


@each_estimator
@given(case=cases(min_group=2))
def test_rows_without_tokens_count_nowhere(name, case):
    fn, present = ESTIMATORS[name], case.mask.any(1)
    scores = spoil(case.scores, ~present, case.generator)
    result = fn(scores, case.mask, case.groups)
    assert not result.advantages[~case.mask].any()
    assert not result.returns[~case.mask].any()
    if present.any():
        alone = fn(case.scores[present], case.mask[present], case.groups[present])
        close(result.advantages[present], alone.advantages)


@each_estimator
def test_a_lonely_row_keeps_its_score(name):
    scores, groups = torch.tensor([0.5, 3.0, 1.5]).double(), torch.tensor([8, 2, 8])
    mask = torch.ones(3, 2, dtype=torch.bool)
    if "passk" in name:
        pytest.skip("refuses it")
    result = ESTIMATORS[name](scores, mask, groups).advantages[1, 0].item()
    if name in ("grpo", "grpo without std", "rloo", "opo", "gpg"):
        assert result == pytest.approx(3.0, rel=2e-6)
    else:  # whitened afterwards
        assert result > 0


def test_no_rows_and_no_gradient():
    mask = torch.zeros(0, 3, dtype=torch.bool)
    assert grpo(torch.zeros(0), mask, torch.zeros(0, dtype=torch.int64)).advantages.shape == (0, 3)
    scores = torch.randn(4, requires_grad=True)
    groups, mask = torch.tensor([0, 0, 1, 1]), torch.ones(4, 2, dtype=torch.bool)
    for fn in ESTIMATORS.values():
        assert not any(x.requires_grad for x in fn(scores, mask, groups))


@pytest.mark.usefixtures("unhooked")
def test_bad_arguments_are_named():
    scores, mask, groups = torch.zeros(2), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"unknown scale 'sdt'; did you mean 'std'\?"):
        grpo(scores, mask, groups, scale="sdt")
    with pytest.raises(ValueError, match=r"groups must be int64 \[B\] = \[2\]"):
        rloo(scores, mask, groups[:1])
    with pytest.raises(ValueError, match=r"scores must be floating \[B\] = \[2\]"):
        rloo(torch.zeros(2, 3), mask, groups)
    with pytest.raises(ValueError, match=r"did you mean 'accuracy'\?"):
        gdpo({"accuracy": scores, "format": scores}, mask, groups, weights={"acuracy": 1.0})
    with pytest.raises(ValueError, match="at least one named score"):
        gdpo({}, mask, groups)


SIZES = st.floats(1e-3, 1e4)


def nudged(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The numbers, some of them an ulp higher, some an ulp lower."""
    infinite = torch.randint(-1, 2, x.shape, generator=generator) * torch.inf
    return torch.where(infinite == 0, x, torch.nextafter(x, infinite.nan_to_num(nan=0.0).to(x.dtype)))


@each_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=cases(min_group=2), size=SIZES)
def test_a_rounding_between_equal_scores_is_no_advantage(name, dtype, case, size):
    """Scores that differ by an ulp are equal: no division by a standard deviation or a gap makes a signal of it."""
    mask = torch.ones_like(case.mask)
    equal = (size * (3.0 + (case.groups % 5).to(torch.float64))).to(dtype)
    result = ESTIMATORS[name](nudged(equal, case.generator), mask, case.groups).advantages
    assert not result.any()


def test_a_rounding_between_the_best_scores_leaves_no_winner():
    scores, mask = torch.tensor([100.0, 100.0, 3.0]), torch.ones(3, 2, dtype=torch.bool)
    groups = torch.zeros(3, dtype=torch.int64)
    scores[0] = torch.nextafter(scores[0], torch.tensor(torch.inf))
    assert not grpo_passk(scores, mask, groups).advantages.any()


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk", "gdpo"])
def test_scores_that_differ_by_more_than_roundings_are_compared(name):
    """A part in ten thousand of the score is no rounding in float32."""
    scores, mask = torch.tensor([100.0, 100.01]), torch.ones(2, 1, dtype=torch.bool)
    assert ESTIMATORS[name](scores, mask, torch.zeros(2, dtype=torch.int64)).advantages.any()


def test_gpg_counts_outcomes_and_compares_scores():
    """A penalty in the scores makes none of them 0; alpha counts the rows by their outcomes."""
    outcomes = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    mask, groups = torch.ones(4, 2, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    plain = gpg(outcomes - 1e-3, mask, groups, outcomes=outcomes).advantages
    close(plain, torch.tensor([3.0, -1.0, -1.0, -1.0]).double()[:, None].expand(4, 2))
