"""Every attention kernel equals the slow program, in value and gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo_kernels import table
from fppo_kernels.padding import make_lengths

KERNELS = [name for name, reason in table.available("attention").items() if reason is None]


def loop(query, key, value, *, lengths, scale, window, softcap, sinks):
    """Attention one query, one head at a time."""
    groups = query.shape[1] // key.shape[1]
    out = []
    start = 0
    for length in lengths.lengths:
        for i in range(length):
            first = 0 if window is None else max(0, i - window + 1)
            seen = slice(start + first, start + i + 1)
            heads = []
            for head in range(query.shape[1]):
                scores = key[seen, head // groups] @ query[start + i, head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                exp = scores.exp()
                total = exp.sum() + (0 if sinks is None else sinks[head].exp())
                heads.append((exp[:, None] * value[seen, head // groups]).sum(0) / total)
            out.append(torch.stack(heads))
        start += length
    return torch.stack(out)


@pytest.mark.parametrize("name", KERNELS)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    window=st.none() | st.integers(1, 7),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_one_query_at_a_time(name, sizes, kv_heads, groups, window, softcap, sink, seed):
    generator = torch.Generator().manual_seed(seed)
    total, heads = sum(sizes), kv_heads * groups

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    inputs = [draw(total, heads, 4), draw(total, kv_heads, 4), draw(total, kv_heads, 3)]
    sinks = draw(heads) if sink else None
    settings = {"lengths": make_lengths(sizes), "scale": 0.7, "window": window, "softcap": softcap, "sinks": sinks}
    got, expected = table.get("attention", name)(*inputs, **settings), loop(*inputs, **settings)
    weight = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    leaves = [*inputs, *([sinks] if sinks is not None else [])]
    grads = [torch.autograd.grad((x * weight).sum(), leaves) for x in (got, expected)]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", KERNELS)
def test_no_tokens(name):
    x = torch.zeros(0, 2, 4, requires_grad=True)
    out = table.get("attention", name)(x, x, x, lengths=make_lengths([]), scale=1.0)
    assert out.shape == (0, 2, 4)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "eager"])  # 0 * nan under a dense mask
def test_garbage_in_another_sequence_does_not_leak(name):
    x = torch.randn(7, 2, 4)
    spoiled = x.clone()
    spoiled[3:] = torch.nan
    attention, lengths = table.get("attention", name), make_lengths([3, 4])
    out, clean = (attention(y, y, y, lengths=lengths, scale=1.0) for y in (spoiled, x))
    torch.testing.assert_close(out[:3], clean[:3], rtol=0, atol=0)
