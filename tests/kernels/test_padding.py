"""Padding goes and comes back; nothing real is lost, wherever the padding stands."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo_kernels import padding


def draw_mask(rows, width, density, seed):
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < density


shapes = {
    "rows": st.integers(1, 6),
    "width": st.integers(1, 9),
    "density": st.floats(0, 1),
    "seed": st.integers(0, 2**31),
}


@given(**shapes)
def test_unpad_lists_each_rows_tokens_in_order(rows, width, density, seed):
    mask = draw_mask(rows, width, density, seed)
    tokens = torch.arange(rows * width).view(rows, width)
    packed = padding.unpad(tokens, mask)
    kept = [[t for t, m in zip(row, keep, strict=True) if m] for row, keep in zip(tokens.tolist(), mask.tolist())]
    assert packed.tokens.tolist() == [t for row in kept for t in row]
    assert packed.positions.tolist() == [i for row in kept for i in range(len(row))]
    assert packed.lengths.lengths == tuple(len(row) for row in kept if row)
    assert packed.lengths.max_length == max(map(len, kept))
    assert packed.lengths.cu_seqlens.dtype == torch.int32
    assert packed.lengths.cu_seqlens.diff().tolist() == list(packed.lengths.lengths)


@given(**shapes)
def test_pad_undoes_unpad_and_its_gradient_selects(rows, width, density, seed):
    mask = draw_mask(rows, width, density, seed)
    x = torch.rand(rows, width, 3, dtype=torch.float64) + 1
    packed = padding.unpad(x, mask)
    flat = packed.tokens.clone().requires_grad_()
    padded = padding.pad(flat, packed.index, (rows, width))
    torch.testing.assert_close(padded, x * mask[..., None], rtol=0, atol=0)
    weight = torch.rand_like(padded)
    (grad,) = torch.autograd.grad((padded * weight).sum(), flat)
    torch.testing.assert_close(grad, weight[mask], rtol=0, atol=0)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        padding.unpad(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))
