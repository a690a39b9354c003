"""Attention of one more token per row: each kernel keeps the laws, and equals a loop; each mistake breaks its law."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import laws
from fppo.laws.kernels import laws_of
from fppo_kernels import table
from fppo_kernels.decode_attention import OPERATION
from fppo_kernels.decode_attention.eager import eager

NAMES = [name for name, reason in table.available("decode_attention").items() if reason is None]


@pytest.mark.parametrize("name", NAMES)
def test_kernels_keep_the_laws(name):
    laws.check_kernel("decode_attention", table.get("decode_attention", name))


def loop(query, keys, values, bias, *, start, end, scale, softcap, sinks):
    """One row, one head at a time."""
    rows, heads, _ = query.shape
    groups, out = heads // keys.shape[1], torch.zeros(rows, heads, values.shape[3], dtype=query.dtype)
    for row in range(rows):
        seen = [c for c in range(start, end) if bias is None or bias[row, c] == 0]
        for head in range(heads):
            scores = keys[row, head // groups, seen] @ query[row, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum() + (0 if sinks is None else sinks[head].exp())
            out[row, head] = scores.exp() @ values[row, head // groups, seen] / total
    return out


@pytest.mark.parametrize("name", NAMES)
@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    widths=st.tuples(st.sampled_from([1, 6, 32, 64]), st.sampled_from([1, 5, 32, 128])),
    columns=st.tuples(st.integers(0, 5), st.integers(1, 20), st.integers(0, 5)),  # before, seen, after
    padded=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_one_row_and_head_at_a_time(name, rows, kv_heads, groups, widths, columns, padded, softcap, sink, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    start, end, size = columns[0], sum(columns[:2]), sum(columns)
    inputs = [draw(rows, kv_heads * groups, widths[0])]
    inputs += [draw(rows, kv_heads, size, width) for width in widths]
    pads = torch.randint(0, end, (rows, 1), generator=generator)
    bias = torch.zeros(rows, size, dtype=torch.float64).masked_fill(torch.arange(size) < pads, -torch.inf)
    settings = {"start": start, "end": end, "scale": 0.3, "softcap": softcap}
    settings["sinks"] = draw(kv_heads * groups) if sink else None
    got = table.get("decode_attention", name)(*inputs, bias if padded else None, **settings)
    torch.testing.assert_close(got, loop(*inputs, bias if padded else None, **settings), rtol=1e-10, atol=1e-12)


def reads_all_columns(query, keys, values, bias=None, *, start, end, **settings):
    return eager(query, keys, values, bias, start=0, end=keys.shape[2], **settings)


def sees_padding(query, keys, values, bias=None, **settings):
    return eager(query, keys, values, None, **settings)


def mean_over_rows(query, keys, values, bias=None, **settings):
    return eager(query + 0.01 * query.mean(0), keys, values, bias, **settings)


def heads_in_another_order(query, keys, values, bias=None, **settings):
    return eager(query, keys.flip(1), values.flip(1), bias, **settings)


def no_sinks(query, keys, values, bias=None, *, sinks=None, **settings):
    return eager(query, keys, values, bias, **settings)


def heads_first(query, keys, values, bias=None, **settings):
    return eager(query, keys, values, bias, **settings).transpose(0, 1)


def scales_the_query(query, keys, values, bias=None, *, scale, **settings):
    return eager(query.mul_(scale), keys, values, bias, scale=1.0, **settings)


MISTAKES = [
    (heads_first, "shape"),
    (scales_the_query, "purity"),
    (reads_all_columns, "unseen columns"),
    (sees_padding, "unseen columns"),
    (mean_over_rows, "rows apart"),
    (heads_in_another_order, "values"),
    (no_sinks, "values"),
]


@pytest.mark.parametrize(("mistake", "law"), MISTAKES, ids=lambda x: getattr(x, "__name__", ""))
def test_each_mistake_breaks_its_law(mistake, law):
    with pytest.raises(laws.LawViolation) as caught:
        laws.check_kernel("decode_attention", mistake, dtypes=(torch.float64,))
    assert caught.value.law == law


def test_every_law_is_broken_by_a_mistake():
    assert {law.name for law in laws_of(OPERATION)} == {law for _, law in MISTAKES}


@pytest.mark.skipif("cpp" not in NAMES, reason="needs a C++ compiler")
def test_the_program_refuses_what_it_does_not_compute():
    query, keys = torch.ones(1, 1, 4), torch.ones(1, 1, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="float32, float64 or bfloat16, of one dtype"):
        table.get("decode_attention", "cpp")(query, keys, keys, start=0, end=3, scale=1.0)


@given(st.data())
def test_spans_give_queries_rows_and_columns_of_their_own(data):
    """By one query at a time, which reads its part of its row."""
    rows, columns, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    query, keys, values = draw(count, 4, 32), draw(rows, 2, columns, 32), draw(rows, 2, columns, 3)
    spans = []
    for _ in range(count):
        start = data.draw(st.integers(0, columns - 1))
        spans.append([data.draw(st.integers(0, rows - 1)), start, data.draw(st.integers(start + 1, columns))])
    end = max(span[2] for span in spans)
    kernels = [table.get("decode_attention", name) for name in NAMES]
    kernels = [kernel for kernel in kernels if table.takes_spans(kernel)]
    assert len(kernels) == sum(name in ("eager", "cpp") for name in NAMES)
    for kernel in kernels:
        found = kernel(query, keys, values, start=0, end=end, scale=0.3, spans=torch.tensor(spans))
        for own, one, (row, first, last) in zip(found, query, spans, strict=True):
            cache = keys[row, None], values[row, None]
            alone = kernel(one[None], *cache, start=first, end=last, scale=0.3)[0]
            torch.testing.assert_close(own, alone, rtol=0, atol=0 if kernel.__name__ == "cpp" else 1e-12)
