from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages
from fppo.advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    lite_ppo,
    maxrl,
    opo,
    pkpo,
    qae,
    reinforce_plus_plus_baseline,
    rloo,
)
from fppo.laws import references
from tests.advantages._data import cases, close, spoil

ESTIMATORS = {
    "grpo": grpo,
    "grpo without std": partial(grpo, scale="none"),
    "rloo": rloo,
    "maxrl": maxrl,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "grpo_passk without std": partial(grpo_passk, scale="none"),
    "lite_ppo": lite_ppo,
    "qae": qae,
    "pkpo": pkpo,
    "pkpo of 3": partial(pkpo, k=3),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": lambda s, m, g: gdpo({"a": s, "b": -s.abs()}, m, g, weights={"a": 1.0, "b": 0.5}),
}
WHITENS = ("reinforce_plus_plus_baseline", "gdpo")
SHIFTED = {"gdpo": lambda s, m, g: gdpo({"a": s, "b": -s}, m, g, weights={"a": 1.0, "b": 0.5})}
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


DEFINED = {
    "grpo": {},
    "grpo without std": {"scale": "none"},
    "rloo": {},
    "maxrl": {},
    "opo": {},
    "opo, left out": {"leave_one_out": True},
    "gpg": {},
    "grpo_passk": {},
    "grpo_passk without std": {"scale": "none"},
    "lite_ppo": {},
    "qae": {},
    "qae of 3 in 4": {"quantile": 0.75},
    "pkpo": {},
    "pkpo of 3": {"k": 3},
    "reinforce_plus_plus_baseline": {},
}


@pytest.mark.parametrize("name", DEFINED)
@given(case=cases(min_group=2), alone=cases())
def test_estimator_is_its_definition(name, case, alone):
    function = name.split(" ")[0].removesuffix(",")
    own, reference = (partial(getattr(of, function), **DEFINED[name]) for of in (advantages, references.advantages))
    for batch in (case, alone):
        result, expected = (fn(batch.scores, batch.mask, batch.groups) for fn in (own, reference))
        close(result.advantages, expected.advantages, 1e-7 if "plus" in name else 1e-10)
        close(result.returns, expected.returns)


@given(cases())
def test_gdpo_is_its_definition(case):
    other = torch.randn(len(case.scores), generator=case.generator).double()
    named = {"a": case.scores, "b": other, "unused": torch.full_like(case.scores, torch.nan)}
    for scores, weights in ((named, {"a": 2.0, "b": 0.5}), ({"a": case.scores, "b": other}, None)):
        arguments = (scores, case.mask, case.groups)
        result, expected = (of.gdpo(*arguments, weights=weights) for of in (advantages, references.advantages))
        close(result.advantages, expected.advantages, 1e-7)
        close(result.returns, expected.returns)


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
@given(case=cases(), shift=st.floats(-100.0, 100.0))
def test_a_row_without_another_to_compare_with_has_no_advantage(name, case, shift):
    """Also where the group's others have no tokens, and whatever its score."""
    fn, present = ESTIMATORS[name], case.mask.any(1)
    sizes = torch.stack([(present & (case.groups == group)).sum() for group in case.groups])
    alone, scores = present & (sizes == 1), case.scores.clone()
    scores[alone] += shift
    result, plain = (fn(x, case.mask, case.groups).advantages for x in (scores, case.scores))
    if name not in WHITENS:
        assert not result[alone].any()
    if name not in ("gpg", "lite_ppo"):  # which look at all scores of the batch
        close(result, plain, 1e-9)
    everyone = fn(scores, case.mask, torch.arange(len(case.groups))).advantages
    assert not everyone.any()


OF_RATIOS = ("maxrl", "gpg", "lite_ppo")  # or of all groups' scores


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in OF_RATIOS])
@given(case=cases(), shifts=st.lists(st.integers(-1000, 1000), min_size=4, max_size=4))
def test_a_constant_added_to_the_scores_of_a_group_changes_no_advantage(name, case, shifts):
    ids = case.groups.unique()
    shift = torch.tensor(shifts, dtype=torch.float64)[torch.searchsorted(ids, case.groups)]
    fn = SHIFTED.get(name, ESTIMATORS[name])
    plain, shifted = (fn(x, case.mask, case.groups).advantages for x in (case.scores, case.scores + shift))
    close(shifted, plain, 1e-5 if name in ("grpo_passk", *WHITENS) else 1e-8)


def test_gpg_compares_whatever_constant_the_scores_have():
    scores, mask, groups = torch.tensor([0.0, 2.0, 5.0]), torch.ones(3, 1, dtype=torch.bool), torch.tensor([0, 0, 1])
    for shift in (0.0, 50.0):
        result = gpg(scores + shift, mask, groups, outcomes=scores).advantages[:, 0]
        close(result, torch.tensor([-1.5, 1.5, 0.0]))


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


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 2), (4, 3)])
def test_the_mean_gradient_of_pkpo_is_that_of_the_best_score_of_k(n, k):
    """Over all groups of n draws from three responses, each with its chance."""
    logits = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    scores, log_p = torch.tensor([0.0, 1.0, 0.4], dtype=torch.float64), logits.log_softmax(0)
    tuples = [torch.tensor(draw) for draw in product(range(3), repeat=k)]
    best = torch.stack([log_p[rows].sum().exp() * scores[rows].max() for rows in tuples]).sum()
    (expected,) = torch.autograd.grad(best, logits, retain_graph=True)
    mask, groups, found = torch.ones(n, 1, dtype=torch.bool), torch.zeros(n, dtype=torch.int64), torch.zeros(3).double()
    for draw in product(range(3), repeat=n):
        rows = torch.tensor(draw)
        step = (pkpo(scores[rows], mask, groups, k=k).advantages[:, 0] * log_p[rows]).mean()
        found += log_p[rows].sum().exp().detach() * torch.autograd.grad(step, logits, retain_graph=True)[0]
    close(found, expected)


def test_qae_teaches_by_rare_successes_or_by_the_last_failures():
    mask, groups = torch.ones(5, 1, dtype=torch.bool), torch.zeros(5, dtype=torch.int64)
    for right in range(1, 5):
        scores = (torch.arange(5) < right).double()
        found = qae(scores, mask, groups, quantile=0.4).advantages[:, 0]
        hard = right <= 3  # at most 1 - 0.4 of 5
        assert ((found != 0) == ((scores == 1) if hard else (scores == 0))).all()


def test_impossible_scalars_of_estimators_are_named():
    given_ = torch.zeros(2), torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="k must be at least 2, got 1; for k = 1 take rloo"):
        pkpo(*given_, k=1)
    for quantile in (0.0, 1.0):
        with pytest.raises(ValueError, match="quantile must be above 0 and below 1"):
            qae(*given_, quantile=quantile)
