"""Sketches tell how far two tensors are apart, without either."""

from __future__ import annotations

import pytest
import torch

from fppo.runtime.sketches import size_of, sketch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3000,), (40, 100), (5, 7, 300)])
@pytest.mark.parametrize("apart", [1e-1, 1.0, 100.0])
def test_a_size_is_that_of_the_difference_within_a_few_times(shape, apart, dtype):
    g = torch.Generator().manual_seed(0)
    one = torch.randn(shape, generator=g).to(dtype)
    other = (one + apart * torch.randn(shape, generator=g)).to(dtype)
    size = size_of(sketch(one), sketch(other))
    exact = float((one.double() - other.double()).square().mean().sqrt())
    assert exact / 5 < size.apart < exact * 5
    assert size.of == pytest.approx(max(float(x.double().square().mean().sqrt()) for x in (one, other)))


def test_equal_tensors_are_not_apart_and_those_of_other_shapes_have_no_size():
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert size_of(sketch(x), sketch(x.clone())).apart == 0.0
    assert size_of(sketch(x), sketch(x[:50])) is None
    assert sketch(torch.arange(3)) is None
    assert sketch(torch.tensor([1.0, float("nan")])) is None
