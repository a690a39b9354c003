"""Additive metrics: parts in any split merge into the whole, and numbers are those of plain lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import metrics
from fppo.metrics import Max, Mean, Min, Sum, Term

numbers = st.lists(st.floats(-9, 9), min_size=1, max_size=8)


@given(numbers, st.data())
def test_parts_merge_into_the_whole(xs, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(xs), max_size=len(xs)))
    cut = data.draw(st.integers(0, len(xs)))

    def report_of(part, kept):
        x, m = torch.tensor(part), torch.tensor(kept, dtype=torch.bool)
        return {
            "mean": metrics.masked_mean(x, m),
            "max": metrics.masked_max(x, m),
            "min": metrics.masked_min(x, m),
            "sum": metrics.total(x.sum()),
            "term": metrics.term(x.sum()),
            "spent": metrics.spent(*[(float(i), abs(v)) for i, v in enumerate(part)]),
        }

    whole = report_of(xs, mask)
    parts = metrics.merge(report_of(xs[:cut], mask[:cut]), {"own": metrics.mean(3.0)}, report_of(xs[cut:], mask[cut:]))
    kept = [x for x, m in zip(torch.tensor(xs).tolist(), mask, strict=True) if m]
    for report in (whole, parts):
        assert isinstance(report["mean"], Mean)
        assert report["mean"].count == len(kept)
        said = metrics.report(report)
        assert report["mean"].total.item() == pytest.approx(math.fsum(kept), abs=1e-9)
        assert (said["max"], said["min"]) == (max(kept, default=-math.inf), min(kept, default=math.inf))
        assert said["sum"] == pytest.approx(math.fsum(xs), abs=1e-5)
        assert said["term"] == pytest.approx(math.fsum(xs), abs=1e-5)
        assert said["spent"] == pytest.approx(math.fsum(map(abs, xs)), abs=1e-9)
        assert said["mean"] == pytest.approx(math.fsum(kept) / len(kept)) if kept else math.isnan(said["mean"])
    assert metrics.report({"own": parts["own"]})["own"] == 3.0
    spans = parts["spent"].spans[:, 1].tolist()
    assert spans == pytest.approx([abs(x) for x in xs])
    assert all(
        isinstance(parts[name], kind) for name, kind in (("max", Max), ("min", Min), ("sum", Sum), ("term", Term))
    )


def test_a_term_is_a_mean_of_mini_batches_once_settled():
    first, second = ({"t": metrics.term(x), "m": metrics.mean(x, 2.0)} for x in (2.0, 4.0))
    both = metrics.merge(*(metrics.settled(metrics.merge(x, {"t": metrics.term(1.0)})) for x in (first, second)))
    assert metrics.report(both) == {"t": (3.0 + 5.0) / 2, "m": (2.0 + 4.0) / 4}
    with pytest.raises(ValueError, match="is a Mean in one place and a Term in another"):
        metrics.merge(metrics.settled(first), second)


def test_numbers_have_no_gradient_and_are_float64():
    x = torch.ones(3, requires_grad=True)
    for metric in (
        metrics.mean(x.sum()),
        metrics.mean(x.sum(), x.sum()),
        metrics.total(x.sum()),
        metrics.term(x.sum()),
    ):
        assert all(part.dtype == torch.float64 and not part.requires_grad for part in metric)
    assert metrics.spent().value == 0


@given(
    st.floats(-9, 9),
    st.sampled_from([1, 2.0, 7, torch.tensor(3), torch.tensor(2.5), torch.tensor(4, dtype=torch.int32)]),
)
def test_a_mean_has_its_sum_and_its_count_in_float64(value, count):
    for given_ in (value, torch.tensor(value, dtype=torch.float64)):
        made = metrics.mean(given_, count)
        assert [part.dtype for part in made] == [torch.float64] * 2
        assert (made.total.item(), made.count.item()) == (pytest.approx(value), float(count))
        assert metrics.report({"a": made})["a"] == pytest.approx(value / float(count))
