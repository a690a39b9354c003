"""Padding goes and comes back; nothing real is lost, wherever the padding stands, and each mistake breaks its law."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import laws
from fppo.laws.padding import _laws
from fppo_kernels import padding, table


def draw_mask(rows, width, density, seed):
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < density


shapes = {
    "rows": st.integers(0, 6),
    "width": st.integers(0, 9),
    "density": st.floats(0, 1),
    "seed": st.integers(0, 2**31),
}


@pytest.mark.slow
@pytest.mark.parametrize("unpad", table.BUILTIN["unpad"])
@pytest.mark.parametrize("pad", table.BUILTIN["pad"])
def test_padding_keeps_the_laws(unpad, pad):
    laws.check_padding(table.get("unpad", unpad), table.get("pad", pad))


@given(**shapes, multiple=st.integers(1, 8))
def test_unpad_lists_each_rows_tokens_in_order(rows, width, density, seed, multiple):
    mask = draw_mask(rows, width, density, seed)
    tokens = torch.arange(rows * width).view(rows, width)
    packed = padding.unpad(tokens, mask, columns={"name": tokens.double()}, multiple=multiple)
    kept = [[t for t, m in zip(row, keep, strict=True) if m] for row, keep in zip(tokens.tolist(), mask.tolist())]
    real = [t for row in kept for t in row]
    fill = len(packed.tokens) - len(real)
    assert 0 <= fill < multiple
    assert len(packed.tokens) % multiple == 0
    assert packed.tokens.tolist() == real + [0] * fill
    assert packed.columns["name"].tolist() == real + [0] * fill
    assert packed.index.tolist() == real
    assert packed.positions.tolist() == [i for row in kept for i in range(len(row))] + list(range(fill))
    assert packed.labels.tolist() == [t for row in kept for t in [*row[1:], -100][: len(row)]] + [-100] * fill
    assert packed.lengths.lengths == tuple(n for n in [*map(len, kept), fill] if n)
    assert packed.lengths.max_length == max([*map(len, kept), fill])
    assert packed.lengths.cu_seqlens.dtype == torch.int32
    assert packed.lengths.cu_seqlens.diff().tolist() == list(packed.lengths.lengths)


@given(**shapes, multiple=st.sampled_from([1, 4]))
def test_pad_undoes_unpad_and_its_gradient_selects(rows, width, density, seed, multiple):
    mask = draw_mask(rows, width, density, seed)
    x = torch.rand(rows, width, 3, dtype=torch.float64) + 1
    packed = padding.unpad(mask.long(), mask, columns={"x": x}, multiple=multiple)
    flat = packed.columns["x"].clone().requires_grad_()
    padded = padding.pad(flat, packed.index, (rows, width))
    torch.testing.assert_close(padded, x * mask[..., None], rtol=0, atol=0)
    weight = torch.rand_like(padded)
    (grad,) = torch.autograd.grad((padded * weight).sum(), flat)
    real = int(mask.sum())
    torch.testing.assert_close(grad[:real], weight[mask], rtol=0, atol=0)
    assert not grad[real:].any()


@pytest.mark.usefixtures("unhooked")
def test_what_does_not_fit_is_refused():
    tokens, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="does not fit tokens"):
        padding.unpad(tokens, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"does not fit scores \(2,\)"):
        padding.unpad(tokens, mask, columns={"scores": torch.zeros(2)})
    with pytest.raises(ValueError, match="pass other tensors as columns"):
        padding.unpad(torch.zeros(2, 3, 4), mask)
    with pytest.raises(ValueError, match="multiple must be at least 1, got 0"):
        padding.unpad(tokens, mask, multiple=0)
    with pytest.raises(ValueError, match="4 rows do not fill the 6 places"):
        padding.pad(torch.zeros(4), torch.arange(6), (2, 3))


def test_what_is_sent_to_a_gpu_is_pinned_and_not_waited_for():
    calls = []

    class Host(torch.Tensor):
        def pin_memory(self):
            calls.append("pinned")
            return self

        def to(self, device, *, non_blocking):
            calls.append((device.type, non_blocking))
            return self

    for device in ("cuda", "cpu"):
        padding.sent(Host(), device)
    assert calls == ["pinned", ("cuda", True), ("cpu", True)]
    x = torch.arange(3)
    assert padding.sent(x, "cpu") is x


def keeps_empty_rows(tokens, mask, **settings):
    packed, sizes = padding.unpad(tokens, mask, **settings), mask.sum(1).tolist()
    ends = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    return packed._replace(lengths=padding.Lengths(ends, tuple(sizes), max(sizes, default=0)))


def positions_from_the_column(tokens, mask, **settings):
    packed = padding.unpad(tokens, mask, **settings)
    return packed._replace(positions=torch.cat([packed.index % mask.shape[1], packed.positions[len(packed.index) :]]))


def labels_across_a_boundary(tokens, mask, **settings):
    packed = padding.unpad(tokens, mask, **settings)
    labels = packed.tokens.roll(-1)
    labels[-1:] = padding.IGNORE
    return packed._replace(labels=labels)


def labels_of_the_token_before(tokens, mask, **settings):
    packed = padding.unpad(tokens, mask, **settings)
    return packed._replace(labels=packed.tokens.roll(1).where(packed.positions > 0, padding.IGNORE))


def columns_from_the_left(tokens, mask, *, columns=None, multiple=1):
    packed = padding.unpad(tokens, mask, columns=columns, multiple=multiple)
    cut = {name: x.flatten(0, 1)[: len(packed.tokens)] for name, x in (columns or {}).items()}
    return packed._replace(columns=cut)


def columns_without_gradient(tokens, mask, *, columns=None, multiple=1):
    return padding.unpad(tokens, mask, columns={k: x.detach() for k, x in (columns or {}).items()}, multiple=multiple)


def forgets_the_multiple(tokens, mask, *, columns=None, multiple=1):
    return padding.unpad(tokens, mask, columns=columns)


def trusts_the_places_blindly(tokens, mask, *, places=None, **settings):
    places = places and places._replace(sizes=(sum(places.sizes),))
    return padding.unpad(tokens, mask, places=places, **settings)


def fill_joins_the_last_row(tokens, mask, **settings):
    packed = padding.unpad(tokens, mask, **settings)
    sizes = list(packed.lengths.lengths)
    if len(packed.tokens) > len(packed.index) > 0:
        sizes[-2:] = [sum(sizes[-2:])]
    return packed._replace(lengths=padding.make_lengths(sizes))


def from_the_left(x, index, shape):
    return padding.pad(x, torch.arange(len(index)), shape)


def ones_elsewhere(x, index, shape):
    return padding.pad(x - 1, index, shape) + 1


def pads_without_gradient(x, index, shape):
    return padding.pad(x.detach(), index, shape)


def empties_its_argument(x, index, shape):
    out = padding.pad(x, index, shape)
    x.data.zero_()
    return out


MISTAKES = [
    (keeps_empty_rows, padding.pad, "packed order", "lengths.cu_seqlens has the shape"),
    (positions_from_the_column, padding.pad, "packed order", "positions.* is 1, expected 0"),
    (labels_across_a_boundary, padding.pad, "labels", r"labels\[0\] is .*, expected -100"),
    (labels_of_the_token_before, padding.pad, "labels", "labels.* is -100, expected"),
    (columns_from_the_left, padding.pad, "columns", "column 'wide'"),
    (columns_without_gradient, padding.pad, "columns", "the gradient by a column"),
    (forgets_the_multiple, padding.pad, "multiple", "with multiple=2, tokens has the shape"),
    (trusts_the_places_blindly, padding.pad, "places", "with places, labels|with places, lengths"),
    (fill_joins_the_last_row, padding.pad, "multiple", "with multiple=2, lengths.cu_seqlens has the shape"),
    (padding.unpad, from_the_left, "round trip", r"pad\(unpad\(tokens\)\)"),
    (padding.unpad, ones_elsewhere, "round trip", "is 1, expected 0"),
    (padding.unpad, pads_without_gradient, "columns", "the gradient by x"),
    (padding.unpad, empties_its_argument, "purity", "pad changed its argument"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("unpad", "pad", "law", "words"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_in_padding_breaks_its_law(unpad, pad, law, words):
    with pytest.raises(laws.LawViolation, match=words) as caught:
        laws.check_padding(unpad, pad)
    assert caught.value.law == law
    assert f'{unpad.__name__} with {pad.__name__} breaks the law "{law}"' in str(caught.value)
    assert caught.value.example["mask"].shape[1] <= 2


def test_every_law_of_padding_is_broken_by_a_mistake():
    assert {law for _, _, law, _ in MISTAKES} == {law.name for law in _laws(padding.pad)}
