"""Each law sees each part of a result that is off by little, in each of the calls that it makes, and no law another's.

The functions are right but for one part (the loss, its gradient, a metric), in calls of one kind.
"""

from functools import partial

import pytest
import torch

from fppo import laws
from fppo.laws import whole
from fppo.laws._rows import metrics_differ
from fppo.laws._search import LawExample
from fppo.laws.losses import COMMON, POLICY, VALUES, policy_suite, value_suite
from fppo.metrics import Max, Mean, Min, Sum, masked_mean, total

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]]).bool()
FULL = torch.ones(3, 4, dtype=torch.bool)
LITTLE = 1e-6


def example_of(mask=MASK, names=POLICY, dtype=torch.float64, **extras):
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(4, *mask.shape, generator=generator, dtype=torch.float64).to(dtype)
    inputs = dict(zip(names, numbers[:3], strict=True)) | {"mask": mask}
    return LawExample(inputs, extras, numbers[3].abs().add(0.1).where(mask, 0.0))


def reason(law, fn, example, *, mild=False, seed=0):
    """What a law says of a function on one example, which it leaves as it is."""
    given, copy = example.map(torch.clone), example.map(torch.clone)
    breach = (law.mild if mild else law.breach)(fn, given, torch.Generator().manual_seed(seed))
    for name, x in copy.inputs.items():
        assert torch.equal(x, given.inputs[name]), name
    return breach if breach is None or isinstance(breach, str) else breach.reason


def right(first, second, third, mask, **extras):
    """REINFORCE, with a metric of each kind."""
    x, a = first.where(mask, 0.0), third.detach().where(mask, 0.0)
    report = {"mean": masked_mean(x, mask), "sum": total(x.detach().sum())}
    return (-a * x).where(mask, 0.0), report


def off(part, when, amount=LITTLE, of=right):
    """`of`, but for one part by `amount` in calls for which `when` holds."""

    def loss_fn(first, second, third, mask, **extras):
        loss, report = of(first, second, third, mask, **extras)
        if not when(first, second, third, mask, **extras):
            return loss, report
        if part == "loss":
            loss = loss + amount * mask
        if part == "gradient":
            x = first.where(mask, 0.0)
            loss = loss + (amount * (x - x.detach())).where(mask, 0.0)
        if part in report:
            metric = report[part]
            report = {**report, part: metric._replace(**{metric._fields[0]: metric[0] + amount})}
        return loss, report

    return loss_fn


class Once:
    """True from the second call on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **extras):
        self.calls += 1
        return self.calls > 1


def moved(first, second, third, mask):
    return float(first[0, 0]) != float(example_of().inputs["log_probs"][0, 0])


def some(x, *, inf):
    found = x.isinf().any() if inf else x.isnan().any() and not x.isinf().any()
    return bool(found)


# law -> (the parts that it sees, the kinds of calls in which it sees them, the reason's words)
SEEN = {
    "masked garbage": (
        ("loss", "gradient", "mean", "sum"),
        {
            **{f"nan {i}": lambda *x, i=i: some(x[i], inf=False) for i in range(3)},
            **{f"inf {i}": lambda *x, i=i: some(x[i], inf=True) for i in range(3)},
        },
        "where the mask is False, ",
    ),
    "padding width": (
        ("loss", "gradient", "mean", "sum"),
        {
            "1 more": lambda *x: x[3].shape[1] == 5,
            "3 more": lambda *x: x[3].shape[1] == 7,
            **{f"nan {i}": lambda *x, i=i: x[i].isnan().any() for i in range(3)},
        },
        "more columns of padding, ",
    ),
    "row order": (("loss", "gradient", "mean", "sum"), {"moved": moved}, "with the rows in the order "),
    "micro-batches": (
        ("loss", "gradient"),
        {"of 2": lambda *x: len(x[3]) == 2, "of 1": lambda *x: len(x[3]) == 1, "whole": lambda *x: len(x[3]) == 3},
        "in micro-batches of ",
    ),
    "metrics add": (("mean", "sum"), {"of 1": lambda *x: len(x[3]) == 1}, "merged over single rows, "),
    "empty mask": (("gradient",), {"empty": lambda *x: not x[3].any()}, ""),
    "purity": (("loss", "gradient", "mean", "sum"), {"again": None}, "a second call gave another result: "),
    "REINFORCE": (("gradient",), {"equal": lambda *x: torch.equal(x[0], x[1])}, "the gradient at old == new"),
}
LAWS = {law.name: law for law in policy_suite().laws}
CASES = [(name, part, when) for name, (parts, calls, _) in SEEN.items() for part in parts for when in calls]


@pytest.mark.parametrize(("name", "part", "when"), CASES)
def test_a_part_of_a_loss_that_is_off_by_little_in_some_calls_is_seen(name, part, when):
    _, calls, words = SEEN[name]
    if name == "empty mask":  # where a gradient inside the mask is none: one of its own outside
        fn = empty_gradient
    else:
        fn = off(part, calls[when] or Once())
    # one of four orders of three rows leaves them as they are
    found = next((x for x in (reason(LAWS[name], fn, example_of(), seed=s) for s in range(4)) if x), None)
    assert found is not None
    assert words in found
    shown = {"mean": "metric mean, total", "sum": "metric sum, value", "gradient": "the gradient", "loss": "loss"}
    assert shown[part] in found


def empty_gradient(first, second, third, mask):
    loss, report = right(first, second, third, mask)
    return (loss if mask.any() else LITTLE * (first - first.detach())), report


@pytest.mark.parametrize("part", ["loss", "gradient", "mean", "sum"])
@pytest.mark.parametrize("name", LAWS)
def test_laws_see_nothing_in_what_is_right_and_in_what_does_not_depend_on_the_call(name, part):
    """A constant error is seen by the laws alone that know what is right."""
    assert reason(LAWS[name], right, example_of()) is None
    found = reason(LAWS[name], off(part, lambda *x: True), example_of())
    knows = {"REINFORCE": ("gradient",), "empty mask": (), "micro-batches": (), "metrics add": ("mean", "sum")}
    assert (found is not None) == (part in knows.get(name, ())), found


def test_garbage_changes_no_bit_but_weights_and_finite_numbers_may_round():
    garbage, padding = LAWS["masked garbage"], LAWS["padding width"]
    tiny = off("loss", lambda *x: x[0].isnan().any(), 1e-15)
    assert reason(garbage, tiny, example_of()) is not None
    assert reason(padding, tiny, example_of()) is None

    def leaks(amount):
        def fn(first, second, third, mask):
            loss, report = right(first, second, third, mask)
            outside = first.detach().where(~mask, 0.0).sum()
            return loss + (amount * outside).where(mask, 0.0), report

        return fn

    assert reason(garbage, leaks(1e-6), example_of(), mild=True) is not None
    assert reason(garbage, leaks(1e-13), example_of(), mild=True) is None
    assert reason(garbage, off("mean", lambda *x: x[0].abs().max() > 10), example_of(), mild=True) is None
    assert reason(garbage, off("loss", lambda *x: x[0].abs().max() > 10), example_of(), mild=True) is not None
    assert reason(garbage, off("gradient", lambda *x: x[0].abs().max() > 10), example_of(), mild=True) is not None


def test_what_padding_holds_in_the_weaker_form_is_0():
    padding = LAWS["padding width"]
    assert reason(padding, off("loss", lambda *x: any(y.isnan().any() for y in x[:3])), example_of(), mild=True) is None
    for columns in (5, 7):
        for part in ("loss", "gradient", "mean"):
            wide = off(part, lambda *x, n=columns: x[3].shape[1] == n and not x[0].isnan().any())
            assert reason(padding, wide, example_of(), mild=True) is not None


def test_extra_columns_are_spoiled_where_no_token_is():
    """[B, T] outside the mask, [B] in rows without tokens; what is in the mask stays."""
    mask = torch.cat([MASK, torch.zeros_like(MASK[:1])])
    seen = []

    def fn(first, second, third, mask, *, column, row):
        seen.append((column.clone(), row.clone()))
        return right(first, second, third, mask)

    column, row = torch.arange(16.0).double().view(4, 4), torch.arange(4.0).double()
    example = example_of(mask, column=column, row=row)
    assert reason(LAWS["masked garbage"], fn, example) is None
    for kind, (wide, narrow) in zip(("plain", "nan", "mixed"), seen, strict=True):
        assert torch.equal(wide[mask], column[mask])
        assert torch.equal(narrow[:3], row[:3])
        spoiled = torch.cat([wide[~mask], narrow[3:]])
        assert spoiled.isnan().all() if kind == "nan" else spoiled.isfinite().all() == (kind == "plain"), kind


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_outside_the_mask_is_exactly_0(where):
    def fn(first, second, third, mask):
        loss, report = right(first, second, third, mask)
        if where == "loss":
            return loss.where(mask, 1e-300), report
        reaches = first.where(~mask, 0.0).sum()
        return loss + (1e-300 * (reaches - reaches.detach())).where(mask, 0.0), report

    assert f"outside the mask the {where}" in (reason(LAWS["zero outside the mask"], fn, example_of()) or "")


@pytest.mark.parametrize("where", [1, 2])
def test_a_gradient_of_any_size_that_reaches_a_constant_is_seen(where):
    def fn(*columns):
        leak = columns[where].where(columns[3], 0.0)
        loss, report = right(*columns)
        return loss + 1e-30 * leak, report

    name = POLICY[where]
    assert f"a gradient reaches {name}; detach it" in (reason(LAWS["constants"], fn, example_of()) or "")
    assert reason(LAWS["constants"], lambda *x: (right(*x)[0].detach(), {}), example_of()) is None


def test_the_loss_of_an_empty_mask_is_0():
    found = reason(LAWS["empty mask"], lambda *x: (right(*x)[0] + 1e-300 * (not x[3].any()), {}), example_of())
    assert "the loss of an empty mask" in (found or "")


@pytest.mark.parametrize("place", range(4))
def test_an_argument_that_is_changed_is_named(place):
    def fn(*columns):
        result = right(*columns)
        x = columns[place].detach()
        x = x.numpy()  # a change of which torch's gradients see nothing
        x[1, 1] = not x[1, 1] if place == 3 else x[1, 1] + 1e-9
        return result

    names = list(example_of().inputs)
    if place == 0:  # a leaf of its own
        return
    breach = LAWS["purity"].breach(fn, example_of(), torch.Generator())
    assert breach == f"it changed its argument {names[place]}"


def test_an_extra_that_is_changed_is_named():
    def fn(*columns, more):
        more.add_(1e-9)
        return right(*columns)

    breach = LAWS["purity"].breach(fn, example_of(more=torch.ones(3).double()), torch.Generator())
    assert breach == "it changed its argument more"


LEAF = torch.ones((), requires_grad=True)
ONE = torch.ones(())
RESULTS = {
    "a list": (lambda loss: [loss, {}], "it returned a list"),
    "three": (lambda loss: (loss, {}, {}), "it returned a tuple"),
    "a number": (lambda loss: (1.0, {}), "it returned a tuple"),
    "a column more": (lambda loss: (loss[..., None], {}), r"the loss has shape [3, 4, 1], expected [B, T] = [3, 4]"),
    "no metrics": (lambda loss: (loss, None), "metrics are a NoneType, expected a dict"),
    "a second float": (lambda loss: (loss, {"a": total(1.0), "b": 1.0}), "metric b is a float"),
    "a pair": (lambda loss: (loss, {"a": (ONE, ONE)}), "metric a is a tuple"),
    "total": (lambda loss: (loss, {"a": Mean(LEAF, ONE)}), "metric a carries a gradient"),
    "count": (lambda loss: (loss, {"a": Mean(ONE, LEAF)}), "metric a carries a gradient"),
    **{kind.__name__: (lambda loss, k=kind: (loss, {"a": k(LEAF)}), "a gradient") for kind in (Sum, Max, Min)},
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_of_another_form_is_named(name):
    change, words = RESULTS[name]
    assert words in (reason(LAWS["per token"], lambda *x: change(right(*x)[0]), example_of()) or "")
    good = {"a": Mean(ONE, ONE), "b": Sum(ONE), "c": Max(ONE), "d": Min(ONE)}
    assert reason(LAWS["per token"], lambda *x: (right(*x)[0], good), example_of()) is None


def test_precision_is_that_of_the_arguments_where_enough_tokens_show_it():
    law, cast = LAWS["precision"], lambda x, dtype: x.to(dtype) if x.is_floating_point() else x
    inner = lambda *x: (right(*(cast(y, torch.float32) for y in x))[0].double(), {})  # noqa: E731
    outer = lambda *x: (right(*x)[0].float(), {})  # noqa: E731
    wide = lambda *x: (right(*x)[0].double(), {})  # noqa: E731
    assert "to the bit" in (reason(law, inner, example_of()) or "")
    six, five = (example_of(torch.arange(8).view(1, 8) < n) for n in (6, 5))
    assert "to the bit" in (reason(law, inner, six) or "")
    assert reason(law, inner, five) is None
    assert reason(law, lambda *x: (inner(*x)[0].detach(), {}), six) is None  # the law of the gradient says it
    assert reason(law, outer, five) == "float64 arguments gave a loss in float32"
    single = example_of(dtype=torch.float32)
    assert reason(law, wide, single) == "float32 arguments gave a loss in float64"
    assert reason(law, right, single) is None


def test_a_loss_without_gradient_where_the_policies_are_equal_is_seen():
    law = LAWS["gradient"]
    squared = lambda x, y, a, m: ((x - y.detach()).square().where(m, 0.0), {})  # noqa: E731
    six, five = (example_of(torch.arange(8).view(1, 8) < n) for n in (6, 5))
    found = law.breach(squared, six, torch.Generator())
    assert "no gradient reaches log_probs, although old_log_probs are equal" in found.reason
    assert torch.equal(found.example.inputs["log_probs"], found.example.inputs["old_log_probs"])
    assert law.breach(squared, five, torch.Generator()) is None
    assert reason(law, right, six) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", ["loss", "gradient"])
def test_a_reference_is_met_to_the_tolerance_of_the_dtype(part, dtype):
    """2 times the tolerance is too much, a half of it is not; metrics are free."""
    bound = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    law = policy_suite(reference=right, dtype=dtype).laws[-1]
    assert law.name == "reference"
    ones = LawExample(
        {name: torch.ones(2, 3, dtype=dtype) for name in POLICY} | {"mask": torch.ones(2, 3).bool()},
        {},
        torch.ones(2, 3, dtype=dtype),
    )
    always = lambda *x: True  # noqa: E731
    assert f"the {part}" in (reason(law, off(part, always, 3 * bound), ones) or "")
    assert reason(law, off(part, always, bound / 2), ones) is None
    assert reason(law, off("mean", always), ones) is None
    if part == "gradient":
        again = policy_suite(dtype=dtype).laws[-1]
        assert again.name == "REINFORCE"
        assert reason(again, off(part, always, 3 * bound), ones) is not None
        assert reason(again, off(part, always, bound / 2), ones) is None


def test_reinforce_along_rows_is_that_of_one_advantage_and_one_weight():
    """A loss that averages over the row is right for these alone."""

    def by_row(first, second, third, mask):
        x, a = first.where(mask, 0.0), third.detach().where(mask, 0.0)
        count = mask.sum(1, keepdim=True).clamp(min=1)
        mean = a.sum(1, keepdim=True) / count
        return (-mean * x.sum(1, keepdim=True) / count).where(mask, 0.0), {}

    token, row = policy_suite().laws[-1], policy_suite(reinforce="row").laws[-1]
    assert reason(token, by_row, example_of()) is not None
    assert reason(token, by_row, example_of(), mild=True) is None
    assert reason(row, by_row, example_of()) is None
    for amount in (1 + LITTLE, -1.0, 0.0):
        wrong = lambda *x, n=amount: (n * by_row(*x)[0], {})  # noqa: E731
        assert reason(row, wrong, example_of()) is not None
    assert "reinforce=" not in row.way_out.replace("give reinforce=None", "")


def test_squared_errors_are_those_at_the_old_value():
    law = value_suite().laws[-1]
    example = example_of(names=VALUES)
    half = lambda v, o, r, m: ((0.5 * (v - r).square()).where(m, 0.0), {})  # noqa: E731
    assert law.name == "squared error"
    assert reason(law, half, example) is None
    assert reason(law, off("gradient", lambda *x: torch.equal(x[0], x[1]), of=half), example) is not None
    assert reason(law, off("gradient", lambda *x: not torch.equal(x[0], x[1]), of=half), example) is None
    assert [x.name for x in value_suite(outputs=2).laws] == [x.name for x in COMMON]
    assert [x.name for x in value_suite(squared=False).laws] == [x.name for x in COMMON]


def test_metrics_are_compared_name_by_name_and_field_by_field():
    a = {"x": Mean(torch.tensor(1.0), torch.tensor(2.0)), "y": Max(torch.tensor(3.0))}
    assert metrics_differ(a, dict(reversed(a.items()))) is None
    assert metrics_differ(a, {"x": a["x"]}) == "metrics are ['x'], expected ['x', 'y']"
    assert metrics_differ({"x": a["x"]}, a) == "metrics are ['x', 'y'], expected ['x']"
    for name, field in (("x", "total"), ("x", "count"), ("y", "value")):
        for more, seen in ((1e-6, True), (1e-11, False)):
            other = {**a, name: a[name]._replace(**{field: getattr(a[name], field).double() + more})}
            found = metrics_differ(a, other)
            assert (found is not None) == seen
            assert not seen or found.startswith(f"metric {name}, {field} is ")
    assert metrics_differ(a, {**a, "y": Max(torch.tensor(3.1))}, 0.1) is None


WHOLE = {law.name: law for law in (*whole.LAWS, whole.POLICY_LAW)}


def summed(first, second, third, mask, *, pieces, whole):
    loss, _ = right(first, second, third, mask)
    return loss.sum() / whole.sum().clamp(min=1)


def whole_off(part, when, amount=LITTLE, of=summed):
    def fn(first, second, third, mask, *, pieces, whole):
        loss = of(first, second, third, mask, pieces=pieces, whole=whole)
        if not when(first, second, third, mask, pieces, whole):
            return loss
        x = first.where(mask, 0.0).sum()
        return loss + (amount if part == "loss" else amount * (x - x.detach()))

    return fn


WHOLE_SEEN = {
    "masked garbage": {
        **{f"nan {i}": lambda *x, i=i: some(x[i], inf=False) for i in range(3)},
        **{f"inf {i}": lambda *x, i=i: some(x[i], inf=True) for i in range(3)},
    },
    "padding width": {
        "1 more": lambda *x: x[3].shape[1] == 5,
        "3 more": lambda *x: x[3].shape[1] == 7,
        **{f"nan {i}": lambda *x, i=i: x[i].isnan().any() for i in range(3)},
    },
    "row order": {"moved": lambda *x: moved(*x[:4])},
    "purity": {"again": None},
    "micro-batches": {
        "of 1": lambda *x: len(x[3]) == 1,
        "of 2": lambda *x: len(x[3]) == 2,
        "two pieces": lambda *x: x[4] == 2,
        "four pieces": lambda *x: x[4] == 4,
    },
    "width of micro-batches": {"narrow": lambda *x: x[3].shape[1] < 4, "two": lambda *x: len(x[3]) == 2},
    "uneven micro-batches": {"of 1": lambda *x: len(x[3]) == 1, "of 3": lambda *x: len(x[3]) == 3},
    "rows without tokens": {"more": lambda *x: len(x[3]) == 5, "whole": lambda *x: len(x[5]) == 5},
    "empty micro-batch": {"empty": lambda *x: not x[3].any()},
}
FOUR = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("name", "part", "when"),
    [(n, p, w) for n, calls in WHOLE_SEEN.items() for p in ("loss", "gradient") for w in calls],
)
def test_a_whole_loss_that_is_off_by_little_in_some_calls_is_seen(name, part, when):
    call = WHOLE_SEEN[name][when]
    if (name, part) == ("empty micro-batch", "gradient"):
        fn = lambda *x, pieces, whole: (  # noqa: E731
            summed(*x, pieces=pieces, whole=whole) + (0 if x[3].any() else LITTLE * (x[0] - x[0].detach()).sum())
        )
    else:
        fn = whole_off(part, call or Once())
    mask = FOUR if "micro-batches" in name else MASK
    found = next((x for x in (reason(WHOLE[name], fn, example_of(mask), seed=s) for s in range(4)) if x), None)
    assert found is not None
    assert part in found


@pytest.mark.parametrize("name", WHOLE)
def test_laws_of_whole_losses_see_nothing_in_what_is_right(name):
    assert reason(WHOLE[name], summed, example_of(FOUR)) is None
    for part in ("loss", "gradient"):
        found = reason(WHOLE[name], whole_off(part, lambda *x: True, 1e-13), example_of(FOUR))
        assert found is None or name == "empty micro-batch", found


def test_cuts_of_a_whole_loss_are_the_even_ones_and_the_uneven_ones():
    shown = {even: [[len(x) for x in cut] for cut in whole._cuts(6, even=even)] for even in (True, False)}
    assert shown == {True: [[1] * 6, [2] * 3, [3, 3]], False: [[1, 5], [2, 4], [4, 2], [5, 1]]}
    for even in (True, False):
        assert all(torch.equal(torch.cat(cut), torch.arange(6)) for cut in whole._cuts(6, even=even))


def test_a_micro_batch_is_cut_to_its_own_longest_row():
    widths = []

    def fn(first, second, third, mask, *, pieces, whole):
        widths.append((len(mask), mask.shape[1], pieces, tuple(whole.shape)))
        return summed(first, second, third, mask, pieces=pieces, whole=whole)

    assert reason(WHOLE["width of micro-batches"], fn, example_of(FOUR)) is None
    assert widths == [
        (4, 4, 1, (4, 4)),
        *[(1, n, 4, (4, 4)) for n in (3, 3, 2, 1)],
        (2, 3, 2, (4, 4)),
        (2, 2, 2, (4, 4)),
    ]


def test_a_whole_loss_is_a_finite_number_in_the_dtype_of_its_arguments():
    law = WHOLE["number"]
    keep = {"pieces": 1, "whole": MASK}
    for change, words in (
        (lambda x: x[None], "it returned a tensor [1], expected a 0-d tensor"),
        (lambda x: 1.0, "it returned a float, expected a 0-d tensor"),
        (lambda x: x.float(), "float64 arguments gave a loss in float32"),
        (lambda x: x * torch.nan, "the loss is nan"),
        (lambda x: x + torch.inf, "the loss is inf"),
    ):
        assert reason(law, lambda *x, c=change, **k: c(summed(*x, **k)), example_of()) == words
    empty = torch.cat([MASK, torch.zeros_like(MASK[:1])])
    assert reason(law, lambda *x, **k: summed(*x, **k) * torch.nan, example_of(empty)) is None
    assert summed(*example_of().inputs.values(), **keep).dim() == 0


@pytest.mark.parametrize("where", [1, 2])
def test_a_gradient_that_a_whole_loss_gives_to_a_constant_is_seen(where):
    def fn(*x, pieces, whole):
        return summed(*x, pieces=pieces, whole=whole) + 1e-30 * x[where].where(x[3], 0.0).sum()

    assert f"a gradient reaches {POLICY[where]}; detach it" in (reason(WHOLE["constants"], fn, example_of()) or "")


def test_weights_of_reinforce_are_above_0_and_free_of_advantages():
    law, value = whole.POLICY_LAW, whole.VALUE_LAW
    scaled = lambda f: lambda *x, pieces, whole: f(x) * summed(*x, pieces=pieces, whole=whole)  # noqa: E731
    for good in (lambda x: 3.0, lambda x: 1.0 + x[0].detach().abs().sum()):
        assert reason(law, scaled(good), example_of()) is None
    for bad in (lambda x: -1.0, lambda x: 0.0, lambda x: 1.0 + LITTLE * x[2].square().sum()):
        assert reason(law, scaled(bad), example_of()) is not None
    one = lambda *x, pieces, whole: summed(*x[:3], x[3] & (torch.arange(4) < 2), pieces=1, whole=whole)  # noqa: E731
    assert "a token's gradient is not below 0" in (reason(law, one, example_of()) or "")
    clipped = laws.whole_loss(lambda x, y, a, m: right(x - 10 * (x - y.detach()).detach(), y, a, m), "token-mean")
    assert reason(law, clipped, example_of()) is None
    half = laws.whole_loss(lambda v, o, r, m: ((v - r).square().where(m, 0.0), {}), "token-mean")
    example = example_of(names=VALUES)
    assert reason(value, half, example) is None
    for fn in (
        lambda *x, **k: -half(*x, **k),
        lambda *x, **k: (1.0 + LITTLE * x[2].square().sum()) * half(*x, **k),
        lambda *x, **k: half(x[0], x[1], x[2] + LITTLE, x[3], **k),
    ):
        assert reason(value, fn, example) is not None
    short = lambda *x, pieces, whole: half(*x[:3], x[3] & (torch.arange(4) < 2), pieces=1, whole=whole)  # noqa: E731
    assert "a token's gradient is not above 0" in (reason(value, short, example) or "")


def test_a_reference_of_a_whole_loss_is_met_exactly_or_nearly():
    *_, law = whole.whole_suite(reference=summed).laws
    for part in ("loss", "gradient"):
        for amount, strict, nearly in ((1e-5, True, True), (1e-8, True, False), (1e-11, False, False)):
            fn = whole_off(part, lambda *x: True, amount)
            assert (reason(law, fn, example_of()) is not None) == strict
            assert (reason(law, fn, example_of(), mild=True) is not None) == nearly
    empty = torch.cat([MASK, torch.zeros_like(MASK[:1])])
    assert reason(law, whole_off("loss", lambda *x: True, 1.0), example_of(empty)) is None


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_the_whole_loss_of_a_token_loss_is_its_weighted_sum(mode):
    """By the totals of the whole, of which a micro-batch has a part."""
    fn = laws.whole_loss(right, mode, horizon=5 if mode.endswith("norm") else None)
    example = example_of()
    first, second, third, mask = example.inputs.values()
    per_token = right(first, second, third, mask)[0]
    size = int(mask.sum()) if mode == "token-mean" else 3 * 5
    for rows in (slice(0, 3), slice(1, 3)):
        found = fn(*(x[rows] for x in (first, second, third, mask)), pieces=2, whole=mask)
        torch.testing.assert_close(found, per_token[rows].sum() / size)
    assert partial(fn).func.__name__ == f"right, {mode}"
