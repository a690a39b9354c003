"""Each law of estimators, whitening, weights and corrections sees each result that is off by little in each call."""

import math
from functools import partial

import pytest
import torch

from fppo import advantages, losses
from fppo.advantages import Advantages
from fppo.laws import temporal, weights
from fppo.laws._rows import reference_differs
from fppo.laws._search import SEEDS, SIZES, LawExample
from fppo.laws.estimators import advantages_suite, token_example, whiten_suite
from fppo.laws.temporal import gae_suite, temporal_suite
from fppo.losses import Correction, loss_weights
from tests.laws.test_sharpness import LITTLE, Once, reason, some

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
SCORES = torch.tensor([0.7, -1.4, 2.1, 0.5]).double()
GROUPED = {law.name: law for law in advantages_suite().laws}
LONG = {law.name: law for law in temporal_suite().laws}
GAE = {law.name: law for law in gae_suite(dtypes=(torch.float64,)).laws}


def grouped(mask=MASK, scores=SCORES, groups=(0, 1, 0, 1)):
    return LawExample({"scores": scores, "mask": mask, "groups": torch.tensor(groups)}, {}, mask.double())


def tokens(mask=MASK, seed=3):
    drawn = token_example(("rewards", "values"), *mask.shape, seed)
    return drawn.put(mask=mask)._replace(weights=mask.double())


def centred(scores, mask, groups):
    """The score less the mean of its group, of rows with tokens; two results."""
    live = mask.any(1)
    means = [
        scores[(groups == g) & live].mean() if ((groups == g) & live).any() else scores.new_zeros(()) for g in groups
    ]
    rows = (scores.where(live, 0.0) - torch.stack(means)).where(live, 0.0)
    out = rows[:, None].where(mask, 0.0)
    return Advantages(out, 2 * out)


def sums(rewards, values, mask):
    """The sum of later rewards less the value, over tokens of the mask; two results."""
    later = rewards.where(mask, 0.0).flip(1).cumsum(1).flip(1)
    return Advantages((later - values).where(mask, 0.0), later.where(mask, 0.0))


def off(part, when, amount=LITTLE, of=centred):
    def estimator(*columns):
        result = list(of(*columns))
        if when(*columns):
            mask = next(x for x in columns if x.dtype == torch.bool)
            result[part] = result[part] + amount * mask
        return tuple(result)

    return estimator


def first_moved(*columns):
    return float(columns[0].flatten()[0]) != float(SCORES[0])


SEEN = {
    "masked garbage": {"nan": lambda *x: some(x[0], inf=False), "inf": lambda *x: some(x[0], inf=True)},
    "padding width": {
        "1 more": lambda *x: x[1].shape[1] == 5,
        "3 more": lambda *x: x[1].shape[1] == 7,
    },
    "row order": {"moved": first_moved},
    "purity": {"again": None},
    "group names": {"others": lambda *x: x[2].max() > 900},
}


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(("name", "when"), [(name, when) for name, calls in SEEN.items() for when in calls])
def test_a_group_estimator_that_is_off_by_little_in_some_calls_is_seen(name, when, part):
    estimator = off(part, SEEN[name][when] or Once())
    found = next((x for x in (reason(GROUPED[name], estimator, grouped(), seed=s) for s in range(6)) if x), None)
    assert ("the advantages", "the returns")[part] in (found or "")


TOKEN_SEEN = {
    "masked garbage": {
        f"{kind} {i}": lambda *x, i=i, inf=kind == "inf": some(x[i], inf=inf) for kind in ("nan", "inf") for i in (0, 1)
    },
    "padding width": {
        "1 more": lambda *x: x[2].shape[1] == 5,
        "3 more": lambda *x: x[2].shape[1] == 7,
        "nan 0": lambda *x: x[0].isnan().any(),
        "nan 1": lambda *x: x[1].isnan().any(),
    },
    "purity": {"again": None},
    "masked steps": {f"row of {n}": lambda *x, n=n: x[2].shape == (1, n) for n in (2, 3)},
}


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(("name", "when"), [(name, when) for name, calls in TOKEN_SEEN.items() for when in calls])
def test_an_estimator_along_tokens_that_is_off_by_little_in_some_calls_is_seen(name, when, part):
    found = reason(LONG[name], off(part, TOKEN_SEEN[name][when] or Once(), of=sums), tokens())
    assert ("the advantages", "the returns")[part] in (found or "") or name == "masked steps"
    assert found is not None


@pytest.mark.parametrize("laws_of", [GROUPED, LONG])
def test_laws_see_nothing_in_what_is_right_nor_in_rounding(laws_of):
    fn, example = (centred, grouped()) if laws_of is GROUPED else (sums, tokens())
    for name, law in laws_of.items():
        assert reason(law, fn, example) is None, name
        if name != "equal rewards":
            assert reason(law, off(0, lambda *x: True, 1e-12, of=fn), example) is None, name


@pytest.mark.parametrize("part", [0, 1])
def test_outside_the_mask_results_are_exactly_0(part):
    def outside(*columns):
        result = list(centred(*columns))
        result[part] = result[part].where(columns[1], 1e-300)
        return tuple(result)

    found = reason(GROUPED["zero outside the mask"], outside, grouped())
    assert found is not None
    assert found.startswith(f"outside the mask {('the advantages', 'the returns')[part]}")


@pytest.mark.parametrize("part", [0, 1])
def test_each_result_is_finite_of_the_shape_and_in_the_dtype(part):
    def changed(change):
        def estimator(*columns):
            result = list(centred(*columns))
            result[part] = change(result[part])
            return tuple(result)

        return estimator

    law = GROUPED["shape"]
    for change, words in (
        (lambda x: x[:, :1], "it returned a shape [4, 1], expected [B, T] = [4, 4]"),
        (lambda x: x * torch.nan, "the result is not finite"),
        (lambda x: x + torch.inf, "the result is not finite"),
        (lambda x: x.float(), "float64 arguments gave float32: keep their precision; if that is meant"),
        (lambda x: x.half(), "float64 arguments gave float16: keep their precision"),
    ):
        found = reason(law, changed(change), grouped())
        assert found is not None
        assert words in found
        assert ("dtype=" in found) == ("float32:" in found)


def test_garbage_in_a_group_is_the_score_of_a_row_without_tokens():
    seen = []

    def estimator(scores, mask, groups):
        seen.append((scores, mask, groups))
        return centred(scores, mask, groups)

    assert reason(GROUPED["masked garbage"], estimator, grouped()) is None
    plain, nan, mixed = seen
    for scores, mask, groups in seen:
        assert torch.equal(scores[:3], SCORES[:3])
        assert torch.equal(mask, MASK)
        assert torch.equal(groups, plain[2])
    assert nan[0][3].isnan()
    assert float(mixed[0][3]) != 0.5


def test_finite_garbage_is_seen_inside_the_mask_alone():
    law = GROUPED["masked garbage"]
    uses = lambda *x: abs(float(x[0][3])) > 1  # noqa: E731
    assert "with finite numbers where the mask is False" in (reason(law, off(0, uses), grouped(), mild=True) or "")
    assert "the returns" in (reason(law, off(1, uses), grouped(), mild=True) or "")
    outside = lambda s, m, g: tuple(x.where(m, s[:, None]) for x in centred(s, m, g))  # noqa: E731
    assert reason(law, outside, grouped(), mild=True) is None
    assert reason(law, outside, grouped()) is not None


def test_padding_is_nan_or_in_the_weaker_form_0_which_is_compared_inside_the_mask():
    law = LONG["padding width"]
    for columns in (5, 7):
        wide = off(1, lambda *x, n=columns: x[2].shape[1] == n and not x[0].isnan().any(), of=sums)
        assert "the returns" in (reason(law, wide, tokens(), mild=True) or "")
    nan = off(1, lambda *x: x[0].isnan().any(), of=sums)
    assert reason(law, nan, tokens(), mild=True) is None
    assert reason(law, nan, tokens()) is not None
    outside = lambda r, v, m: tuple(x.where(m, float(m.shape[1])) for x in sums(r, v, m))  # noqa: E731
    assert reason(law, outside, tokens(), mild=True) is None
    assert reason(law, outside, tokens()) is not None


def test_equal_rewards_are_tried_in_groups_of_two_and_three_and_in_float32_in_all_sizes():
    law, seen = GROUPED["equal rewards"], []
    full = torch.ones(5, 2, dtype=torch.bool)

    def estimator(scores, mask, groups):
        seen.append((scores.tolist(), groups.tolist(), scores.dtype))
        return torch.zeros(mask.shape)

    example = grouped(full, torch.zeros(5).double(), (0, 1, 2, 3, 4))
    assert reason(law, estimator, example) is None
    assert seen == [([0.1, 0.1, 0.7, 0.7, 0.7], [0, 0, 1, 1, 1], torch.float64)]
    tiny = lambda s, m, g: 1e-300 * m.double()  # noqa: E731
    assert "is 1e-300, expected 0" in (reason(law, tiny, example) or "")
    assert reason(law, tiny, grouped()) is None  # a row has no tokens
    assert reason(law, tiny, grouped(full[:1], torch.zeros(1).double(), (0,))) is None
    seen.clear()
    one = grouped(full[:1], torch.zeros(1).double(), (0,))
    assert reason(law, estimator, one, mild=True) is None
    assert {len(scores) for scores, _, _ in seen} == set(range(2, 17))
    assert {round(scores[0], 3) for scores, _, _ in seen} == {0.1, 0.3, 0.7, 0.9}
    assert all(len(set(scores)) == len(set(groups)) == 1 and kind == torch.float32 for scores, groups, kind in seen)
    for size in (2, 16):
        for value, fault in ((2e-3, True), (-2e-3, True), (5e-4, False)):
            grows = lambda s, m, g, n=size, v=value: v * m * (len(s) == n)  # noqa: E731
            assert (reason(law, grows, one, mild=True) is not None) == fault
    assert reason(law, lambda s, m, g: 1.0 * m, example, mild=True) is None  # tried once, with the smallest examples


def test_higher_scores_have_no_lower_advantages_in_a_group_of_rows_with_tokens():
    law = GROUPED["higher scores"]
    assert "rows 2 and 0 are of one group, with the scores 2.1 and 0.7" in (
        reason(law, lambda s, m, g: -centred(s, m, g)[0], grouped()) or ""
    )
    apart = lambda s, m, g: (s * torch.where(g == 0, 1.0, -1.0))[:, None].where(m, 0.0)  # noqa: E731
    assert reason(law, apart, grouped()) is None  # the other row of group 1 has no tokens
    assert reason(law, apart, grouped(MASK | True)) is not None
    assert reason(law, lambda s, m, g: (s + 10 * g)[:, None].where(m, 0.0), grouped()) is None
    flat = lambda s, m, g: torch.zeros(m.shape).double()  # noqa: E731
    assert reason(law, flat, grouped(MASK | True)) is None
    per_token = lambda s, m, g: (s / m.sum(1).clamp(min=1))[:, None].where(m, 0.0)  # noqa: E731
    lengths = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    assert reason(law, per_token, grouped(lengths, torch.tensor([2.0, 1.0]).double(), (0, 0))) is not None
    sum_of_row = lambda s, m, g: s[:, None].where(m, 0.0) / m.sum(1, keepdim=True)  # noqa: E731
    assert reason(law, sum_of_row, grouped(lengths, torch.tensor([2.0, 0.4]).double(), (0, 0))) is None
    for drop, seen in ((1e-6, True), (1e-12, False)):
        lower = lambda s, m, g, d=drop: (-d * s)[:, None].where(m, 0.0)  # noqa: E731
        assert (reason(law, lower, grouped(MASK | True)) is not None) == seen


def test_unequal_rewards_all_differ_and_are_tried_where_a_group_has_two_rows():
    law, seen = GROUPED["unequal rewards"], []

    def estimator(scores, mask, groups):
        seen.append(scores)
        return torch.zeros(mask.shape)

    assert "all advantages are 0, although all scores differ" in (reason(law, estimator, grouped()) or "")
    assert len(set(seen[0].tolist())) == 4
    assert reason(law, estimator, grouped(groups=(0, 1, 2, 2))) is None  # one of the two has no tokens
    assert reason(law, lambda s, m, g: 1e-9 * m, grouped()) is None


def test_groups_have_other_names_in_another_order():
    seen = []

    def estimator(scores, mask, groups):
        seen.append(groups.tolist())
        return centred(scores, mask, groups)

    assert reason(GROUPED["group names"], estimator, grouped()) is None
    plain, other = seen
    assert len({*zip(plain, other)}) == len({*plain}) == len({*other})
    assert (plain[0] < plain[1]) != (other[0] < other[1])
    assert not {*plain} & {*other}


def test_examples_of_groups_have_what_their_laws_need():
    """Groups of several rows and of one, mixed with others, equal and unequal scores, rows without tokens."""
    suite = advantages_suite()
    examples = [x for _, x in suite.examples()]
    assert len(examples) == len(SIZES) * SEEDS
    sizes, spread, kinds = set(), set(), set()
    for x in examples:
        scores, mask, groups = x.inputs.values()
        counts = groups.unique(return_counts=True)[1].tolist()
        sizes |= {*counts}
        spread |= {round(s / 0.7) for s in scores.tolist()}
        kinds.add((not mask.any(1).all().item(), mask.all().item()))
        assert x.weights.dtype == torch.float64
        assert scores.dtype == torch.float64
    assert sizes >= {1, 2, 3, 4}
    assert spread == {-2, -1, 0, 1, 2}
    assert kinds >= {(True, False), (False, True), (False, False)}
    several = [x.inputs["groups"].tolist() for x in examples if len(x.mask) > 5]
    assert any(groups != sorted(groups) for groups in several)
    assert any(len({*groups}) > 1 for groups in several)
    for least in (2, 3):
        for _, x in advantages_suite(group_rows=least).examples():
            live = x.inputs["groups"][x.mask.any(1)]
            assert live.unique(return_counts=True)[1].min() >= least


@pytest.mark.parametrize("part", [0, 1])
def test_a_reference_of_an_estimator_is_met_exactly_or_nearly(part):
    law = advantages_suite(reference=centred).laws[-1]
    every = MASK | True
    for amount, strict, nearly in ((1e-3, True, True), (1e-7, True, False), (1e-12, False, False)):
        other = off(part, lambda *x: True, amount)
        assert (reason(law, other, grouped(every)) is not None) == strict
        assert (reason(law, other, grouped(every), mild=True) is not None) == (nearly and part == 0)
        assert reason(law, other, grouped(), mild=True) is None  # a row has no tokens
        assert reason(law, other, grouped(every, groups=(0, 1, 0, 2)), mild=True) is None  # a group of one row
    alone = lambda *x: centred(*x)[0]  # noqa: E731
    assert reason(law, alone, grouped()) is None
    assert reason(law, lambda *x: alone(*x) + LITTLE * x[1], grouped()) is not None
    assert reason(temporal_suite(reference=sums).laws[-1], off(part, lambda *x: True, of=sums), tokens()) is not None


def gae(rewards, values, mask, *, gamma, lam):
    return advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)


def gae_off(part, when):
    def estimator(rewards, values, mask, *, gamma, lam):
        result = list(gae(rewards, values, mask, gamma=gamma, lam=lam))
        if when(mask, gamma, lam):
            result[part] = result[part] + LITTLE * mask
        return tuple(result)

    return estimator


DISCOUNTS = ((1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.0, 1.0), (0.9, 1.0), (0.1, 0.1))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("discounts", DISCOUNTS)
def test_gae_is_its_definition_for_each_discount_in_each_row(discounts, part):
    law = GAE["definition"]
    assert reason(law, gae, tokens()) is None
    found = reason(law, gae_off(part, lambda m, *how: how == discounts), tokens())
    assert found is not None
    assert found.startswith(f"gamma={discounts[0]}, lam={discounts[1]}: in row 0, counting tokens")
    assert ("the advantages", "the returns")[part] in found

    def last_row(rewards, values, mask, *, gamma, lam):
        result = list(gae(rewards, values, mask, gamma=gamma, lam=lam))
        result[part] = result[part] + LITTLE * (mask & (torch.arange(len(mask)) == 2)[:, None])
        return tuple(result)

    assert "in row 2, " in (reason(law, last_row, tokens()) or "")


def test_gae_is_held_in_its_dtypes_to_their_tolerances():
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        law = next(x for x in gae_suite(dtypes=(dtype,)).laws if x.name == "definition")
        for factor, seen in ((1.1, True), (0.4, False)):
            shifted = lambda r, v, m, *, gamma, lam, n=factor * bound * 10: (  # noqa: E731
                gae(r, v, m, gamma=gamma, lam=lam)[0] + n * m,
                gae(r, v, m, gamma=gamma, lam=lam)[1],
            )
            example = tokens()
            big = example.put(values=example.inputs["values"] * 0, rewards=(example.inputs["rewards"] * 0 + 10.0))
            one = big.put(mask=torch.tensor([[True] + [False] * 3] * 4))
            assert (reason(law, shifted, one) is not None) == seen, (dtype, factor)
        other = torch.float32 if dtype == torch.float64 else torch.float64
        cast = lambda *x, k=other, **how: tuple(y.to(k) for y in gae(*x, **how))  # noqa: E731
        assert "arguments gave" in (reason(law, cast, tokens()) or "")


def test_gae_with_lam_1_is_the_return_less_the_value_and_0_outside():
    law = GAE["return minus value"]
    assert reason(law, gae, tokens()) is None
    assert reason(law, gae_off(0, lambda m, *how: how == (1.0, 1.0)), tokens()) is not None
    outside = lambda *x, **how: (gae(*x, **how)[0].where(x[2], 1.0), gae(*x, **how)[1])  # noqa: E731
    assert reason(law, outside, tokens()) is not None
    assert reason(law, outside, tokens(), mild=True) is None
    assert reason(law, gae_off(0, lambda *x: True), tokens(), mild=True) is not None


@pytest.mark.parametrize("part", [0, 1])
def test_masked_steps_can_be_deleted_with_a_discount(part):
    for n in (2, 3):
        found = reason(
            GAE["masked steps"], gae_off(part, lambda m, g, lam, n=n: m.shape == (1, n) and g == 0.9), tokens()
        )
        assert "against itself without its masked steps" in (found or "")
    assert reason(GAE["masked steps"], gae_off(part, lambda m, g, lam: lam != 0.7), tokens()) is None


def test_long_rows_of_gae_are_checked_around_the_blocks_of_scans(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        temporal, "check_suite", lambda fn, suite: sizes.append((suite.sizes, [x.name for x in suite.laws]))
    )
    temporal.check_gae(gae)
    (short, names), (long, more) = sizes
    assert short == (*SIZES, (0, 3))
    assert names.count("definition") == len(more) == 2
    assert {*more} == {"long rows"}
    widths = [width for _, width in long]
    assert {63, 65, 127, 128, 129} < {*widths}
    assert max(widths) > 2 * 128


def test_the_definition_of_gae_is_the_sum_of_discounted_errors():
    row, gamma, lam = torch.tensor([True, False, True, True]), 0.9, 0.7
    rewards, values = torch.tensor([1.0, 50.0, 2.0, -3.0]).double(), torch.tensor([0.5, 70.0, -1.0, 4.0]).double()
    r, v = [1.0, 2.0, -3.0], [0.5, -1.0, 4.0, 0.0]
    errors = [r[t] + gamma * v[t + 1] - v[t] for t in range(3)]
    wanted = [sum((gamma * lam) ** (u - t) * errors[u] for u in range(t, 3)) for t in range(3)]
    assert temporal._definition(rewards, values, row, gamma, lam).tolist() == pytest.approx(wanted)


NUMBERS = torch.tensor([[1.0, 2.5, -3.0, 9.0], [0.5, 9.0, 4.0, -1.0]]).double()
KEPT = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).bool()


def whiten(x, mask, shift_mean=True, eps=0.0):
    kept = x[mask]
    var = kept.var() if len(kept) > 1 else x.new_zeros(())
    done = (x - kept.mean()) * ((var + eps).rsqrt() if var + eps > 1e-20 else 0.0)
    done = torch.zeros_like(done) if bool((kept == kept[:1]).all()) else done
    return (done if shift_mean else done + kept.mean()).where(mask, 0.0)


@pytest.mark.parametrize("kind", [{}, {"shift_mean": False}, {"eps": 0.1}, {"shift_mean": False, "eps": 0.1}], ids=str)
def test_whitening_is_held_to_its_mean_its_variance_and_what_shifts_and_scales(kind):
    found = {law.name: law for law in whiten_suite(**kind).laws}
    example = LawExample({"x": NUMBERS, "mask": KEPT}, {}, KEPT.double())
    fn = partial(whiten, **kind)
    moments, moved, equal = (found[name] for name in ("mean and variance", "shift and scale", "equal numbers"))
    for law in found.values():
        assert reason(law, fn, example) is None, law.name
    more = lambda n: lambda x, m: (fn(x, m) + n).where(m, 0.0)  # noqa: E731
    wide = lambda n: lambda x, m: ((fn(x, m) - fn(x, m)[m].mean()) * n + fn(x, m)[m].mean()).where(m, 0.0)  # noqa: E731
    for amount, seen in ((1e-6, True), (1e-11, False)):
        assert ("the mean" in (reason(moments, more(amount), example) or "")) == seen
        assert ("the variance" in (reason(moments, wide(1 + amount), example) or "")) == seen
    one = LawExample({"x": NUMBERS[:, :1], "mask": torch.tensor([[True], [False]])}, {}, torch.ones(2, 1))
    assert reason(moments, more(1.0), one) is None
    calls = {
        "+ 100": lambda x: x.mean() > 50,
        "* 1e-6": lambda x: x.abs().max() < 1e-4,
        "* 1e6": lambda x: x.max() > 1e5,
    }
    for when in calls.values():
        shifted = lambda x, m, w=when: (fn(x, m) + LITTLE * (0.1 + x.sign()) * bool(w(x))).where(m, 0.0)  # noqa: E731
        assert reason(moved, shifted, example) is not None
    constant = lambda n: lambda x, m: (fn(x, m) + n * bool((x == 0.1).all())).where(m, 0.0)  # noqa: E731
    assert reason(equal, constant(1e-6), example) is not None
    assert (reason(equal, constant(1e-12), example) is not None) == (kind == {})


@pytest.mark.parametrize("mode", losses.MODES)
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_weights_are_the_mode_s_in_parts_of_each_size(mode, rows):
    mask = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    example = LawExample({"per_token": torch.linspace(-1, 2, 20).double().view(5, 4), "mask": mask}, {}, mask.double())
    law = weights.Law("", "", partial(weights._definition, mode))
    assert reason(law, loss_weights, example) is None

    def some_rows(mask, mode, *, totals, horizon=None):
        right = loss_weights(mask, mode, totals=totals, horizon=horizon)
        return right * (1 + LITTLE) if len(mask) == rows else right

    assert "as by the mode's definition" in (reason(law, some_rows, example) or "")

    def outside(mask, mode, *, totals, horizon=None):
        right = loss_weights(mask, mode, totals=totals, horizon=horizon)
        return right.where(mask, 2e-9) if len(mask) == rows else right

    assert "a weight outside the mask" in (reason(law, outside, example) or "")


def test_each_mode_has_a_law_and_the_horizon_is_that_of_its_own():
    seen = []

    def fn(mask, mode, *, totals, horizon=None):
        seen.append((mode, horizon))
        return loss_weights(mask, mode, totals=totals, horizon=horizon)

    weights.check_weights(fn)
    assert {*seen} == {(mode, 7.0 if mode.endswith("norm") else None) for mode in losses.MODES}
    seen.clear()
    weights.check_weights(fn, modes=("token-sum",))
    assert {*seen} == {("token-sum", None)}


def correction(part=None, when=lambda *x: False, amount=LITTLE):
    """Truncated ratios, that drop tokens whose ratio is below 0.2; off in one part in some calls."""

    def correct(old, rollout, mask):
        gap = (old - rollout).where(mask, 0.0)
        kept = mask & (gap > math.log(0.2))
        ratio = gap.exp().clamp(max=1.5).where(kept, 0.0)
        if when(old, rollout, mask):
            if part == "weights":
                ratio = ratio + amount * kept
            else:
                kept = kept & (kept.cumsum(1).cumsum(0) > 1)
                ratio = ratio.where(kept, 0.0)
        return Correction(ratio, kept, {})

    return correct


CORRECTED = {
    name: weights.Law(name, "", breach)
    for name, breach in {
        "masked garbage": weights._garbage,
        "inside": weights._inside,
        "equal policies": weights._equal_policies,
        "reference": partial(reference_differs, weights._corrected, correction()),
    }.items()
}


def of_policies():
    generator = torch.Generator().manual_seed(0)
    old, gap = (torch.randn(4, 4, generator=generator).double() for _ in range(2))
    return LawExample({"old_log_probs": old, "rollout_log_probs": old + gap, "mask": MASK}, {}, MASK.double())


@pytest.mark.parametrize("part", ["weights", "mask"])
def test_a_correction_that_is_off_by_little_in_some_calls_is_seen(part):
    dirty = [lambda *x, i=i: not (x[i].isfinite() & (x[i] < 1e3)).all() for i in (0, 1)]
    seen = {
        "masked garbage": dirty,
        "equal policies": [lambda o, r, m: torch.equal(o, r)],
        "reference": [lambda *x: True],
    }
    for name, calls in seen.items():
        for when in calls:
            found = reason(CORRECTED[name], correction(part, when), of_policies())
            assert ("the weight" if part == "weights" else "the") in (found or ""), name
            assert reason(CORRECTED[name], correction(), of_policies()) is None


def test_a_correction_keeps_tokens_of_the_mask_and_gives_weights_to_those_that_it_keeps():
    own = correction()
    more = lambda o, r, m: own(o, r, m)._replace(mask=own(o, r, m).mask | ~m)  # noqa: E731
    assert reason(CORRECTED["inside"], more, of_policies()) == "it keeps a token that is not in the mask"
    weigh = lambda o, r, m: own(o, r, m)._replace(weights=own(o, r, m).weights + 2e-9 * ~m)  # noqa: E731
    assert "a weight outside of what it keeps" in (reason(CORRECTED["inside"], weigh, of_policies()) or "")
    bare = lambda o, r, m: Correction(None, m, {})  # noqa: E731
    assert reason(CORRECTED["equal policies"], bare, of_policies()) is None
    assert "the weight" in (reason(CORRECTED["reference"], bare, of_policies()) or "")
