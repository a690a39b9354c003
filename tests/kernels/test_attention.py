"""Every attention kernel equals the slow program, in value and gradient."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import laws
from fppo.laws.attention import FEATURES
from fppo_kernels import table
from fppo_kernels.attention.eager import eager
from fppo_kernels.attention.flex import flex
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


def features(name):
    return [x for x in FEATURES if x not in table.BUILTIN["attention"][name].lacks]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("sdpa", "eager")])
def test_gpu_kernels_keep_the_laws(name):
    laws.check_attention(
        table.get("attention", name), features=features(name), dtypes=(torch.bfloat16,), device="cuda", head_dim=16
    )


def stand_in(query, key, value, ends, ends_of_keys, longest, longest_key, *, scale, window_size, softcap=None, **rest):
    """What flash attention for sequences of different lengths is documented to compute, with its own arguments."""
    assert torch.equal(ends, ends_of_keys)
    assert ends.dtype == torch.int32
    lengths = make_lengths(ends.diff().tolist())
    assert longest == longest_key == lengths.max_length
    left, right = window_size
    causal = rest.pop("causal", right == 0)
    assert causal
    assert right in (-1, 0)
    assert not rest.keys() - {"deterministic", "enable_gqa"}
    assert key.shape[1] == query.shape[1] or rest.get("enable_gqa", True)
    window = None if left == -1 else left + 1
    return eager(query, key, value, lengths=lengths, scale=scale, window=window, softcap=softcap or None)


def test_flash_hands_its_arguments_on(monkeypatch):
    def flash_attn_varlen_func(*args, softmax_scale, **settings):
        return stand_in(*args, scale=softmax_scale, **settings)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.delitem(sys.modules, "fppo_kernels.attention.flash", raising=False)
    flash = table.BUILTIN["attention"]["flash"].load()
    monkeypatch.delitem(sys.modules, "fppo_kernels.attention.flash")  # it holds the stand-in
    laws.check_attention(flash, features=features("flash"), dtypes=(torch.bfloat16,))
    x = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match=r"not torch\.float32; attention/sdpa does"):
        flash(x, x, x, lengths=make_lengths([1]), scale=1.0)
    with pytest.raises(ValueError, match="no sinks; attention/sdpa"):
        flash(x, x, x, lengths=make_lengths([1]), scale=1.0, sinks=torch.zeros(1))
    wide = torch.ones(1, 1, 264, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="up to 256, got 264"):
        flash(wide, wide, wide, lengths=make_lengths([1]), scale=1.0)


@pytest.mark.parametrize("grouped", [True, False])
def test_varlen_hands_its_arguments_on(monkeypatch, grouped):
    module = pytest.importorskip("fppo_kernels.attention.varlen")
    monkeypatch.setattr(module, "varlen_attn", stand_in)
    monkeypatch.setattr(module, "GROUPED", grouped)
    laws.check_attention(module.varlen, features=features("varlen"), dtypes=(torch.bfloat16,))
    x = torch.ones(1, 1, 8, dtype=torch.bfloat16)
    for feature, words in (({"softcap": 1.0}, "soft cap"), ({"sinks": torch.zeros(1)}, "sinks")):
        with pytest.raises(ValueError, match=f"no {words}; attention/sdpa"):
            module.varlen(x, x, x, lengths=make_lengths([1]), scale=1.0, **feature)


@given(
    sizes=st.lists(st.integers(0, 6), max_size=5),
    groups=st.integers(1, 2),
    window=st.none() | st.integers(1, 7),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_flex_has_the_values(sizes, groups, window, softcap, sink, seed):
    """All that a CPU can tell: there it has no backward pass."""
    generator = torch.Generator().manual_seed(seed)
    query, *kv = (torch.randn(sum(sizes), n, 16, generator=generator) for n in (2 * groups, 2, 2))
    sinks = torch.randn(2 * groups, generator=generator) if sink else None
    settings = {"lengths": make_lengths(sizes), "scale": 0.7, "window": window, "softcap": softcap, "sinks": sinks}
    torch.testing.assert_close(flex(query, *kv, **settings), eager(query, *kv, **settings), rtol=1e-5, atol=1e-5)
