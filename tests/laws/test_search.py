"""The search for counter-examples: what it draws, how it compares, and what it says."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import laws
from fppo.laws import _kernels, _search
from fppo.laws._search import (
    Breach,
    Law,
    LawExample,
    Suite,
    check,
    check_suite,
    describe,
    differ,
    draw_mask,
    first_breach,
    fn_name,
    impure,
    short,
    spoil,
    stain,
    unchanged,
    widen,
)
from fppo.laws.verdicts import _verdict as verdict

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
SEEDED = partial(torch.Generator().manual_seed, 0)


def example_of(**extras):
    inputs = {"x": torch.arange(12.0).double().view(3, 4), "mask": MASK, "ids": torch.arange(3)}
    return LawExample(inputs, extras, torch.ones(3, 4).double(), "token-mean")


@given(
    a=st.floats(-1e3, 1e3),
    gap=st.sampled_from([0.0, 0.9, 1.1, -0.9, -1.1]),
    tolerance=st.sampled_from([0.0, 1e-9, 1e-3]),
    relative=st.sampled_from([None, 0.0, 0.1]),
)
def test_tensors_differ_beyond_the_tolerance_and_its_share_of_what_is_expected(a, gap, tolerance, relative):
    expected = torch.tensor([[0.5, a], [2.0, -1.0]]).double()
    actual = expected.clone()
    actual[0, 1] += gap * (tolerance + (tolerance if relative is None else relative) * abs(a))
    reason = differ("it", expected, actual, tolerance, relative)
    bound = tolerance + (tolerance if relative is None else relative) * abs(a)
    if bound > 1e-12 * abs(a) or gap == 0 or bound == 0:
        assert (reason is not None) == (abs(gap) > 1 and bound > 0)
    if reason is not None:
        assert reason.startswith("it[0, 1] is ")


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("expected", "actual", "place"),
    [
        ([1.0, 2.0, 3.0], [1.1, 2.5, 3.2], 1),
        ([1.0, 2.0, 3.0], [1.1, NAN, 3.2], 1),
        ([1.0, INF, 3.0], [1.1, 2.5, 3.2], 1),
        ([1.0, 2.0, NAN], [9.0, 2.0, 3.0], 2),
        ([NAN, INF, -INF], [NAN, INF, -INF], None),
        ([NAN, INF, -INF], [NAN, -INF, -INF], 1),
        ([1e300, 0.0, 0.0], [1e300, 1e-300, 0.0], 1),
    ],
)
def test_the_largest_difference_is_shown_and_nan_agrees_with_nan_alone(expected, actual, place):
    reason = differ("it", *(torch.tensor(x, dtype=torch.float64) for x in (expected, actual)), 0.0)
    assert reason is None if place is None else (reason or "").startswith(f"it[{place}] is ")


def test_shapes_are_compared_first_and_numbers_are_shown_with_the_digits_that_tell_them_apart():
    one = torch.ones(2)
    assert differ("it", one, torch.ones(2, 1)) == "it has the shape [2, 1], expected [2]"
    assert differ("it", torch.ones(0), torch.ones(0)) is None
    assert differ("it", torch.tensor(1.0), torch.tensor(1.5)) == "it is 1.5, expected 1"
    assert (
        differ("it", torch.tensor(1.0).double(), torch.tensor(1.0).double() + 1e-6, 0.0) == "it is 1.000001, expected 1"
    )
    small = torch.tensor(1.0).double()
    assert differ("it", small, small + 1e-12, 0.0) == "it is 1.0000000000010001, expected 1"
    assert differ("it", torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0) == "it[1] is 3, expected 2"
    assert differ("it", torch.tensor([True]), torch.tensor([False]), 0.0) == "it[0] is 0, expected 1"


@pytest.mark.parametrize("kind", ["nan", "mixed"])
def test_garbage_stands_where_it_should_and_is_of_every_kind(kind):
    x = torch.arange(400.0).double().view(20, 20)
    where = (x % 3) == 0
    found = spoil(x, where, SEEDED(), kind)
    assert torch.equal(found[~where], x[~where])
    inside = found[where]
    if kind == "nan":
        assert inside.isnan().all()
        return
    kinds = {"nan" if math.isnan(v) else v for v in inside.tolist()}
    assert kinds == {"nan", INF, -INF, 1e300}
    assert spoil(x.float(), where, SEEDED(), kind).dtype == torch.float32


def test_garbage_flips_some_bools_and_no_integers():
    flags, where = torch.ones(50, dtype=torch.bool), torch.arange(50) % 2 == 0
    found = spoil(flags, where, SEEDED())
    assert found[~where].all()
    assert 0 < int((~found[where]).sum()) < 25
    assert torch.equal(spoil(torch.arange(50), where, SEEDED()), torch.arange(50))


def test_stains_are_finite_of_some_tens_and_outside_the_mask_alone():
    wide, row, whole = torch.zeros(3, 4, 2).double(), torch.zeros(3).double(), torch.arange(12).view(3, 4)
    example = example_of(wide=wide, row=row, whole=whole)
    found = stain(example, SEEDED())
    x, given = found.inputs["x"], example.inputs["x"]
    assert torch.equal(x[MASK], given[MASK])
    assert (x[~MASK] != given[~MASK]).all()
    assert 10 < float(x[~MASK].abs().max()) < 200
    assert (found.extras["wide"][MASK] == 0).all()
    assert (found.extras["wide"][~MASK] != 0).all()
    assert (found.extras["row"] != 0).tolist() == [False, True, False]
    for name in ("mask", "ids"):
        assert torch.equal(found.inputs[name], example.inputs[name])
    assert torch.equal(found.extras["whole"], whole)
    assert torch.equal(found.weights, example.weights)
    assert found.mode == "token-mean"
    assert torch.equal(x, short(x))


def test_padding_is_added_on_the_right_of_two_dimensions_and_more():
    x = torch.ones(2, 3)
    assert torch.equal(widen(x, 2)[:, :3], x)
    assert widen(x, 2).shape == (2, 5)
    assert widen(x, 2)[:, 3:].isnan().all()
    assert (widen(x, 1, 0.5)[:, 3:] == 0.5).all()
    assert not widen(x.bool(), 2)[:, 3:].any()
    assert widen(x.bool(), 2).dtype == torch.bool
    assert (widen(x.long(), 2)[:, 3:] == 0).all()
    assert widen(torch.ones(2, 3, 4), 2).shape == (2, 5, 4)
    assert widen(torch.ones(2, 3, 4), 2)[:, 3:].isnan().all()
    row = torch.ones(3)
    assert widen(row, 2) is row


@given(rows=st.integers(1, 6), width=st.integers(1, 7), seed=st.integers(0, 50))
def test_masks_are_full_ragged_or_with_holes_by_the_seed(rows, width, seed):
    mask = draw_mask(rows, width, seed, torch.Generator().manual_seed(seed))
    assert mask.shape == (rows, width)
    if seed % 3 == 0:
        assert mask.all()
    if seed % 3 == 1:
        assert mask[:, 0].all()
        assert not (mask[:, 1:] & ~mask[:, :-1]).any()


def test_masks_with_holes_have_holes_and_empty_rows_and_ragged_ones_every_length():
    many = [draw_mask(60, 4, kind, torch.Generator().manual_seed(9)) for kind in range(3)]
    assert {*many[1].sum(1).tolist()} == {1, 2, 3, 4}
    holes = many[2]
    assert (holes[:, 1:] & ~holes[:, :-1]).any()
    assert not holes.any(1).all()
    assert 0.5 < float(holes.double().mean()) < 0.7


def test_sizes_and_seeds_meet_every_kind_of_mask_in_small_and_larger_batches():
    assert _search.SIZES[0] == (1, 1)
    assert [a * b for a, b in _search.SIZES] == sorted(a * b for a, b in _search.SIZES)
    assert {rows for rows, _ in _search.SIZES} >= {1, 2, 3, 4, 6}
    assert {width for _, width in _search.SIZES} >= {1, 2, 3, 4, 5, 7}
    assert _search.SEEDS == 6  # each kind of mask with near and far policies
    made = Suite((), lambda rows, width, seed: example_of(n=torch.tensor([rows, width, seed])))
    assert [x.extras["n"].tolist() for _, x in made.examples()] == [
        [rows, width, seed] for rows, width in _search.SIZES for seed in range(6)
    ]
    assert [seed for seed, _ in made.examples()][:8] == [0, 1, 2, 3, 4, 5, 0, 1]


def test_an_example_is_mapped_whole_and_changed_by_name():
    example = example_of(more=torch.ones(3))
    doubled = example.map(lambda x: x * 2)
    assert torch.equal(doubled.inputs["x"], 2 * example.inputs["x"])
    assert torch.equal(doubled.extras["more"], torch.full((3,), 2.0))
    assert (doubled.weights == 2).all()
    assert doubled.mode == "token-mean"
    put = example.put(x=torch.zeros(1), more=torch.zeros(2))
    assert [*put.inputs] == [*example.inputs]
    assert (put.inputs["x"].shape, put.extras["more"].shape) == ((1,), (2,))
    assert torch.equal(put.inputs["ids"], example.inputs["ids"])
    assert put.mode == "token-mean"
    assert example.size == "3 x 4"
    assert LawExample({"y": torch.ones(2, 5, 1)}, {}, torch.ones(1)).size == "2 x 5 x 1"


@pytest.mark.parametrize("name", ["x", "mask", "ids", "more"])
def test_a_changed_argument_is_named(name):
    example = example_of(more=torch.ones(3))
    copy = example.map(torch.clone)
    assert unchanged(example, copy) is None
    x = {**example.inputs, **example.extras}[name]
    x.view(-1)[-1] = ~x.view(-1)[-1] if x.dtype == torch.bool else x.view(-1)[-1] + 1
    assert unchanged(example, copy) == f"it changed its argument {name}"


def test_side_effects_are_found_in_the_first_call_and_differences_in_the_second():
    example, calls = example_of(), []
    assert impure(example, lambda: calls.append(1) or 3, lambda a, b: None if a == b == 3 else "no") is None
    assert len(calls) == 2
    assert impure(example, lambda: torch.rand(()), lambda a, b: None) == "it drew from torch's global generator"
    assert impure(example, lambda: example.inputs["x"].add_(1), lambda a, b: None) == "it changed its argument x"
    pair = iter((5, 7))
    assert impure(example, lambda: next(pair), lambda a, b: f"{b}, before {a}") == (
        "a second call gave another result: 7, before 5"
    )


def test_every_law_is_given_an_example_of_its_own_and_a_generator_by_the_seed():
    drawn = []

    def spoils(fn, example, generator):
        drawn.append((float(example.inputs["x"].sum()), int(torch.randint(10**6, (), generator=generator))))
        example.inputs["x"].zero_()

    law = Law("spoils", "", spoils)
    examples = [(seed, example_of()) for seed in (4, 5, 4)]
    assert first_breach(print, law, examples) is None
    assert first_breach(print, law, examples) is None
    total = float(example_of().inputs["x"].sum())
    expected = [int(torch.randint(10**6, (), generator=torch.Generator().manual_seed(seed))) for seed in (4, 5, 4)]
    assert drawn == [(total, number) for number in expected] * 2


def test_the_first_example_that_breaks_a_law_is_shown_as_the_law_changed_it():
    def breach(fn, example, generator):
        n = int(example.extras["n"])
        changed = example.put(n=torch.tensor(-n))
        return {0: None, 1: Breach("changed", changed), 2: "plain"}.get(n)

    law = Law("n", "", breach)
    at = lambda *ns: [(0, example_of(n=torch.tensor(n))) for n in ns]  # noqa: E731
    assert first_breach(print, law, at(0, 0)) is None
    for ns, reason, shown in (((0, 1, 2), "changed", -1), ((0, 2, 1), "plain", 2)):
        found = first_breach(print, law, at(*ns))
        assert found is not None
        size, (text, example) = found
        assert (size, text, int(example.extras["n"])) == ("3 x 4", reason, shown)

    def raises(fn, example, generator):
        raise KeyError("x")

    assert first_breach(print, Law("", "", raises), at(0))[1].reason == "it raised KeyError: 'x'"  # type: ignore[index]


def nothing(fn, example, generator):
    return None


def broken(fn, example, generator):
    return "it is wrong"


def test_a_violation_names_the_first_broken_law_the_way_out_and_the_others():
    made = lambda rows, width, seed: example_of(n=torch.tensor([rows, width, seed]))  # noqa: E731
    held, first, second, third = (
        Law("held", "a", nothing),
        Law("first", "what holds", broken, "give first=False"),
        Law("second", "c", broken),
        Law("third", "d", broken),
    )
    with pytest.raises(laws.LawViolation) as caught:
        check(max, [held, first, second, third], made, sizes=((2, 3), (4, 5)), seeds=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == 'max breaks the law "first": what holds.'
    assert lines[1:4] == [
        "  it is wrong",
        "  If that is meant: give first=False.",
        "  The smallest counter-example, 3 x 4, as it was used:",
    ]
    assert lines[-1] == '  It also breaks: "second", "third"'
    assert caught.value.law == "first"
    assert caught.value.example["n"].tolist() == [2, 3, 0]
    assert caught.value.example.keys() == {"x", "mask", "ids", "n"}
    with pytest.raises(laws.LawViolation) as caught:
        check(max, [second], made, name="mine")
    assert str(caught.value).startswith('mine breaks the law "second": c.')
    assert "If that is meant" not in str(caught.value)
    assert "It also breaks" not in str(caught.value)
    suite = Suite((held, second), made, ("print({})",), ((7, 1),))
    with pytest.raises(laws.LawViolation) as caught:
        check_suite(max, suite)
    assert caught.value.example["n"].tolist() == [7, 1, 0]
    assert str(caught.value).splitlines()[-1] == "    print(max)"
    check_suite(max, Suite((held,), made))


def test_the_lines_of_an_example_run_where_four_digits_are_exact():
    example = LawExample(
        {"x": torch.tensor([[0.1234, -2.0]], dtype=torch.float64), "mask": torch.tensor([[True, False]])},
        {},
        torch.ones(1, 2),
        "m",
    )
    lines = describe(example._replace(mode=None), "f", ("y = {}(x, weights)",))
    assert lines == [
        "from torch import float32, float64, inf, nan, tensor",
        "x       = tensor([[0.1234, -2.0]], dtype=float64)",
        "mask    = tensor([[True, False]])",
        "weights = tensor([[1.0, 1.0]], dtype=float32)",
        "y = f(x, weights)",
    ]
    assert describe(example, "partial(f)", ("{}",))[0] == "from functools import partial"
    assert "weights" not in "".join(describe(example, "f", ("{}(x)",)))
    rounded = [
        "weight_mode = 'm'",
        "x    = [[0.1234, -2.0]]",
        "mask = [[True, False]]",
        "(all of it is in the error's .example)",
    ]
    assert describe(example, "f", ()) == rounded
    odd = example.put(x=torch.tensor([[0.12345, -2.0]], dtype=torch.float64))
    assert describe(odd, "f", ("{}",))[1] in ("x    = [[0.1235, -2.0]]", "x    = [[0.1234, -2.0]]")
    assert describe(odd, "f", ("{}",))[-1] == "(all of it is in the error's .example)"
    large = example.put(x=torch.zeros(1, 1001))._replace(mode=None)
    assert describe(large, "f", ("{}",))[0] == "x    = float32 [1, 1001]"
    assert describe(example.put(x=torch.zeros(1, 1000)), "f", ("{}",))[-1] == "f"


class Radius:
    def __call__(self, x):
        return x


def test_names_are_those_of_functions_and_without_addresses():
    assert fn_name(fn_name) == "fn_name"
    assert fn_name(partial(fn_name, radius=0.1)) == "partial(fn_name, radius=0.1)"
    assert fn_name(Radius()) == "Radius"
    assert fn_name(partial(max, key=Radius())) == "partial(max, key=Radius)"
    assert "0x" not in fn_name(partial(Radius().__call__))
    long = fn_name(partial(max, key="k" * 200))
    assert len(long) == _search.WRITTEN + 3
    assert long.endswith("...")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_kernels_may_differ_by_the_tolerance_times_the_largest_number_or_1(dtype, bound):
    for largest in (0.5, 8.0):
        expected = torch.tensor([largest, 0.25]).double()
        for factor, slack, seen in ((1.1, 1.0, True), (0.9, 1.0, False), (1.1, 2.0, False), (2.2, 2.0, True)):
            actual = expected + torch.tensor([0.0, factor * bound * max(1.0, largest)])
            reason = _kernels.apart("it", expected, actual, dtype, slack)
            assert (reason is not None) == seen
            assert not seen or (reason or "").startswith(f"in {_kernels.words(dtype)}, it[1] is ")
    assert _kernels.apart("it", torch.ones(0), torch.ones(0), dtype) is None


def test_dtypes_of_a_check_have_a_tolerance():
    assert _kernels.checked([torch.float32, torch.bfloat16]) == (torch.float32, torch.bfloat16)
    for dtypes in ((), (torch.float64, torch.float16), (torch.int64,)):
        with pytest.raises(ValueError, match="dtypes must be some of"):
            _kernels.checked(dtypes)


def test_examples_are_rounded_to_float32_in_every_dtype_and_numbers_stay():
    third = torch.tensor([1 / 3]).double()
    example = LawExample(
        {"x": third, "ids": torch.tensor([3])}, {"scale": torch.tensor(1 / 3, dtype=torch.float64)}, third
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        placed = _kernels.place(example, dtype, "cpu")
        assert torch.equal(placed.inputs["x"], third.float().to(dtype))
        assert placed.weights.dtype == dtype
        assert placed.inputs["ids"].dtype == torch.int64
        assert placed.extras["scale"].item() == 1 / 3
    assert _kernels.exact(placed).inputs["x"].dtype == torch.float64
    assert _kernels.settings(example) == {"scale": 1 / 3}
    assert torch.equal(_kernels.settings(example._replace(extras={"t": third}))["t"], third)


def test_gradients_are_zeros_where_nothing_depends_on_a_leaf():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert [g.tolist() for g in _kernels.grads((3 * x).sum(), [x, y])] == [[3.0, 3.0], [0.0, 0.0]]
    assert [g.tolist() for g in _kernels.grads(torch.ones(()), [x])] == [[0.0, 0.0]]
    example, leaves = _kernels.carry(example_of(more=torch.ones(3)), ("more", "x", "none"))
    assert {*leaves} == {"more", "x"}
    assert example.inputs["x"] is leaves["x"]
    assert example.extras["more"].requires_grad
    assert not example.inputs["mask"].requires_grad


MILD = Law("mild", "", broken, mild=nothing, note="a convention")


def verdict_of(law, examples=None, name="f"):
    suite = Suite((law,), lambda *x: example_of())
    return verdict(print, law, suite, examples or [(0, example_of())], name)


def test_a_violation_says_if_the_law_s_weaker_form_holds():
    with pytest.raises(laws.LawViolation) as caught:
        check(max, [MILD, Law("bare", "b", broken)], lambda *x: example_of())
    lines = str(caught.value).splitlines()
    assert lines[1:3] == ["  it is wrong", "  A note, no fault: a convention."]
    assert lines[-1] == '  It also breaks: "bare"'
    with pytest.raises(laws.LawViolation) as caught:
        check(max, [Law("bare", "b", broken), MILD], lambda *x: example_of())
    assert "A note" not in str(caught.value)


def test_a_verdict_is_a_note_where_the_weaker_form_holds_and_no_call_raised():
    def raises(fn, example, generator):
        raise RuntimeError("never")

    assert verdict_of(Law("held", "", nothing, mild=broken)).outcome == "holds"
    assert verdict_of(Law("held", "", nothing)).reason is None
    found = verdict_of(MILD)
    assert (found.outcome, found.reason, found.size) == ("note", "it is wrong; a convention", "3 x 4")
    assert verdict_of(Law("bare", "", broken)).outcome == "fault"
    worse = verdict_of(MILD._replace(mild=lambda *x: "it is worse"))
    assert (worse.outcome, worse.reason) == ("fault", "it is worse")
    assert verdict_of(MILD._replace(breach=raises, mild=nothing)).outcome == "note"
    free = verdict_of(MILD._replace(breach=raises, mild=_search.nothing))
    assert (free.outcome, free.reason) == ("fault", "it raised RuntimeError: never")
    assert verdict_of(MILD._replace(mild=_search.nothing)).outcome == "note"


def test_a_verdict_of_a_kind_takes_batches_of_so_many_tokens_and_the_laws_that_are_named():
    seen = []

    def loss(log_probs, old, advantages, mask):
        seen.append(int(mask.sum()))
        x, a = log_probs.where(mask, 0.0), advantages.detach().where(mask, 0.0)
        return (-a * x).where(mask, 0.0), {}

    found = laws.verdicts(loss, kind="policy_loss", tokens=12, only=("purity", "per token"), name="mine")
    assert [x.law for x in found] == ["per token", "purity"]
    assert min(seen) >= 12
    seen.clear()
    laws.verdicts(loss, kind="policy_loss", only=("per token",))
    assert min(seen) < 2
    assert len(seen) == len(_search.SIZES) * _search.SEEDS
    with pytest.raises(ValueError, match=r"the kind 'policy_loss' has no law 'puritan'; did you mean.*purity"):
        laws.verdicts(loss, kind="policy_loss", only=("puritan",))
    kinds = set()

    def single(log_probs, old, advantages, mask):
        kinds.add(log_probs.dtype)
        return loss(log_probs, old, advantages, mask)

    laws.verdicts(single, kind="policy_loss", dtype=torch.float32, only=("per token",))
    assert kinds == {torch.float32}
    with pytest.raises(ValueError, match="takes neither a reference nor a dtype"):
        laws.verdicts(loss, kind="whiten", dtype=torch.float32)
