"""Every attention kernel equals the slow program, in value and gradient."""

import contextlib
import importlib
import inspect
import itertools
import sys
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from fppo import laws
from fppo.laws._kernels import TOLERANCES, example_of, words
from fppo.laws._search import check
from fppo.laws.kernels import laws_of
from fppo_kernels import table
from fppo_kernels.attention import FEATURES, OPERATION
from fppo_kernels.attention import flex as flex_file
from fppo_kernels.attention import sdpa as sdpa_file
from fppo_kernels.attention.eager import eager
from fppo_kernels.attention.flex import flex
from fppo_kernels.attention.sdpa import for_any_shape
from fppo_kernels.padding import make_lengths

KERNELS = table.BUILTIN["attention"]
ON_CPUS = [name for name in ("eager", "sdpa", "cpp") if KERNELS[name].refuse() is None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def backward_on_cpus():
    """Flex attention with torch's dense program, which has the backward pass that torch does not offer on CPUs."""
    torchs = importlib.import_module("torch.nn.attention.flex_attention")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "_validate_device", lambda *_: None)
        patch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield


def can(name):
    """What the table says of a kernel, as `check_kernel` takes it."""
    lacks = KERNELS[name].lacks
    return {"lacks": lacks, "dtypes": [x for x in TOLERANCES if words(x) not in lacks]}


# sizes between these are for smaller counter-examples
FEW = attrs.evolve(OPERATION, sizes=((0, 0), (2, 2), (4, 7), (2, 130)))


# of the plain one, which is slow, other tests here hold one query at a time
SLOW = ("eager",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in KERNELS])
def test_kernels_keep_the_laws(name):
    if reason := table.available("attention")[name]:
        pytest.skip(reason)
    kernel = table.get("attention", name)
    if name != "flex":
        own = can(name)
        if name == "eager":  # it is the definition, and that one is in float64
            own["dtypes"] = [torch.float32, torch.bfloat16]
        laws.check_kernel(FEW, kernel, **own, device=DEVICE, wide=16)
        return
    for dtype, cases in ((torch.float32, (8, 11)), (torch.bfloat16, (0, 9))):
        # it compiles for each: few, of several tokens
        examples = partial(example_of, OPERATION, cases, (dtype,), DEVICE, 16)
        check(kernel, laws_of(OPERATION), examples, sizes=FEW.sizes, seeds=len(cases))


@pytest.mark.slow
def test_flex_keeps_the_laws_where_it_has_a_backward_pass():
    with backward_on_cpus():
        cases = range(5, len(OPERATION.features), 3)  # the largest scores, and two that have all features between them
        assert frozenset().union(*(OPERATION.features[case] for case in cases)) == set(FEATURES)
        examples = partial(example_of, OPERATION, cases, (torch.float64,), "cpu", None)
        check(flex, laws_of(OPERATION), examples, sizes=FEW.sizes, seeds=len(cases))


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


@pytest.mark.parametrize("name", [*ON_CPUS, "flex"])
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
    weight = torch.randn(total, heads, 3, dtype=torch.float64, generator=generator)
    leaves = [*inputs, *([sinks] if sinks is not None else [])]
    with backward_on_cpus():
        got, expected = KERNELS[name].load()(*inputs, **settings), loop(*inputs, **settings)
        grads = [torch.autograd.grad((x * weight).sum(), leaves) for x in (got, expected)]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-11)


@given(st.lists(st.integers(0, 90), min_size=1, max_size=9).filter(any), st.integers(0, 2**31))
def test_sequences_of_any_lengths_make_groups(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(sizes), 2, 4), (sum(sizes), 1, 4), (sum(sizes), 1, 3)]
    inputs = [torch.randn(x, dtype=torch.float64, generator=generator).requires_grad_() for x in shapes]
    weight = torch.randn(sum(sizes), 2, 3, dtype=torch.float64, generator=generator)
    found = []
    for kernel in (table.get("attention", "sdpa"), eager):
        out = kernel(*inputs, lengths=make_lengths(sizes), scale=0.7)
        found.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_cudnn_which_plans_every_shape_anew_is_left_out_on_a_gpu():
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        for others in (True, False):
            torch.backends.cuda.enable_flash_sdp(others)
            for device, expected in (("cpu", enabled()), ("cuda", False)):
                with for_any_shape(torch.device(device)):
                    assert enabled() == expected
                    assert torch.backends.cuda.flash_sdp_enabled() == others
            assert enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)


def test_sdpa_runs_where_any_shape_will_do(monkeypatch):
    entered = []
    monkeypatch.setattr(sdpa_file, "for_any_shape", lambda device: contextlib.nullcontext(entered.append(device.type)))
    x = torch.ones(5, 1, 4)
    for sizes in ([5], [2, 3]):
        sdpa_file.sdpa(x, x, x, lengths=make_lengths(sizes), scale=1.0)
    assert entered == ["cpu", "cpu"]


@pytest.mark.parametrize("name", [*ON_CPUS, "flex"])
def test_no_tokens(name):
    x = torch.zeros(0, 2, 4, requires_grad=True)
    out = KERNELS[name].load()(x, x, x, lengths=make_lengths([]), scale=1.0)
    assert out.shape == (0, 2, 4)
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (40, 3)])
def test_garbage_in_another_sequence_does_not_leak(sizes):  # but 0 * nan under the dense mask of eager
    x = torch.randn(sum(sizes), 2, 4)
    attention, lengths = table.get("attention", "sdpa"), make_lengths(sizes)
    for own in (slice(0, sizes[0]), slice(sizes[0], None)):
        spoiled = torch.full_like(x, torch.nan)
        spoiled[own] = x[own]
        found = []
        for y in (spoiled, x):
            leaf = y.clone().requires_grad_()
            out = attention(leaf, leaf, leaf, lengths=lengths, scale=1.0)[own]
            found.append((out, torch.autograd.grad(out.sum(), leaf)[0][own]))
        torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("window", [15, 61, 97, 128, 150])
@pytest.mark.parametrize("name", ON_CPUS)
def test_wide_windows_end_where_they_should(name, window):
    """A token of a window of w sees itself and the w - 1 before it: its values say which."""
    sizes = (140, 3, 70)
    total = sum(sizes)
    zeros = torch.zeros(total, 1, 8, dtype=torch.float64)  # so that all keys that are seen weigh the same
    value = torch.eye(total, dtype=torch.float64)[:, None].requires_grad_()
    found = KERNELS[name].load()(zeros, zeros, value, lengths=make_lengths(sizes), scale=1.0, window=window)
    expected = torch.zeros(total, total, dtype=torch.float64)
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        for i in range(end - size, end):
            first = max(end - size, i - window + 1)
            expected[i, first : i + 1] = 1 / (i + 1 - first)
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-12, atol=1e-14)
    (grad,) = torch.autograd.grad(found[:, 0, 0].sum() + 2 * found[:, 0, 139].sum(), [value])
    torch.testing.assert_close(grad[:, 0, 0], expected.sum(0), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad[:, 0, 139], 2 * expected.sum(0), rtol=1e-12, atol=1e-13)


def stand_in(query, key, value, ends, ends_of_keys, longest, longest_key, *, scale, window_size, softcap=None, **rest):
    """What flash attention for sequences of different lengths is documented to compute, with its own arguments."""
    assert ends.dtype == ends_of_keys.dtype == torch.int32
    lengths, keys = (make_lengths(x.diff().tolist()) for x in (ends, ends_of_keys))
    assert (longest, longest_key) == (lengths.max_length, keys.max_length)
    left, right = window_size
    causal = rest.pop("causal", right == 0)
    assert causal
    assert right in (-1, 0)
    assert not rest.keys() - {"deterministic", "enable_gqa"}
    assert key.shape[1] == query.shape[1] or rest.get("enable_gqa", True)
    window = None if left == -1 else left + 1
    settings = {"scale": scale, "window": window, "softcap": softcap or None, "key_lengths": keys}
    return eager(query, key, value, lengths=lengths, **settings)


@pytest.mark.slow
def test_flash_hands_its_arguments_on(monkeypatch):
    def flash_attn_varlen_func(*args, softmax_scale, **settings):
        return stand_in(*args, scale=softmax_scale, **settings)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.delitem(sys.modules, "fppo_kernels.attention.flash", raising=False)
    flash = table.BUILTIN["attention"]["flash"].load()
    monkeypatch.delitem(sys.modules, "fppo_kernels.attention.flash")  # it holds the stand-in
    laws.check_kernel(FEW, flash, **can("flash"))
    x = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match=r"not torch\.float32; attention/sdpa does"):
        flash(x, x, x, lengths=make_lengths([1]), scale=1.0)
    with pytest.raises(ValueError, match="no sinks; attention/sdpa"):
        flash(x, x, x, lengths=make_lengths([1]), scale=1.0, sinks=torch.zeros(1))
    wide = torch.ones(1, 1, 264, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="up to 256, got 264"):
        flash(wide, wide, wide, lengths=make_lengths([1]), scale=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False])
def test_varlen_hands_its_arguments_on(monkeypatch, grouped):
    module = pytest.importorskip("fppo_kernels.attention.varlen")
    monkeypatch.setattr(module, "varlen_attn", stand_in)
    monkeypatch.setattr(module, "GROUPED", grouped)
    laws.check_kernel(FEW, module.varlen, **can("varlen"))
    x = torch.ones(1, 1, 8, dtype=torch.bfloat16)
    for feature, told in (({"softcap": 1.0}, "soft cap"), ({"sinks": torch.zeros(1)}, "sinks")):
        with pytest.raises(ValueError, match=f"no {told}; attention/sdpa"):
            module.varlen(x, x, x, lengths=make_lengths([1]), scale=1.0, **feature)


@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(0, 6), max_size=5),
    groups=st.integers(1, 2),
    window=st.none() | st.integers(1, 7),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_flex_has_the_values(sizes, groups, window, softcap, sink, seed):
    """As it runs on a CPU, without a backward pass."""
    generator = torch.Generator().manual_seed(seed)
    query, *kv = (torch.randn(sum(sizes), n, 16, generator=generator) for n in (2 * groups, 2, 2))
    sinks = torch.randn(2 * groups, generator=generator) if sink else None
    settings = {"lengths": make_lengths(sizes), "scale": 0.7, "window": window, "softcap": softcap, "sinks": sinks}
    torch.testing.assert_close(flex(query, *kv, **settings), eager(query, *kv, **settings), rtol=1e-5, atol=1e-5)


def test_flex_says_that_it_has_no_backward_pass_on_a_cpu():
    x = torch.ones(1, 1, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"attention/flex cannot do this here: .*backward.* attention/sdpa can"):
        flex(x, x, x, lengths=make_lengths([1]), scale=1.0)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 20),
    block=st.sampled_from([2, 4, 8]),
)
def test_flex_looks_at_the_blocks_that_hold_what_is_seen(sizes, window, block):
    total, sequence = sum(sizes), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))

    def seen(batch, head, query, key):
        inside = (sequence[query] == sequence[key]) & (query >= key)
        return inside if window is None else inside & (query - key < window)

    found = flex_file._mask(tuple(sizes), tuple(sizes), window, torch.device("cpu"), block)
    expected = create_block_mask(seen, None, None, total, total, device="cpu", BLOCK_SIZE=block)
    assert found.shape == expected.shape
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (getattr(expected, f"{kind}_{part}") for part in ("num_blocks", "indices"))
        torch.testing.assert_close(getattr(found, f"{kind}_num_blocks"), counts)
        real = torch.arange(indices.shape[-1]) < counts[..., None]
        torch.testing.assert_close(getattr(found, f"{kind}_indices")[real], indices[real])
    place = torch.arange(total)
    arguments = torch.tensor(0), torch.tensor(0), place[:, None], place[None]
    torch.testing.assert_close(found.mask_mod(*arguments), expected.mask_mod(*arguments))


def test_what_flex_plans_in_inference_serves_training():
    with torch.inference_mode():
        mask = flex_file._mask((3, 2, 7), (5, 2, 8), None, torch.device("cpu"))
    limits = [inspect.getclosurevars(mask.mask_mod).nonlocals[name] for name in ("limit", "last")]
    for x in (mask.kv_indices, mask.full_kv_indices, mask.q_indices, *limits):
        assert isinstance(x, torch.Tensor)
        assert not x.is_inference()
