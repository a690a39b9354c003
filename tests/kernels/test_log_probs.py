"""Every log-prob kernel is at most twice as far from the exact result as the reference is, for values and gradients."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fppo.runtime.simulate import simulate
from fppo_kernels import table
from fppo_kernels.log_probs.chunked import Tiles, chunked
from fppo_kernels.log_probs.reference import reference

CPP = table.available("log_probs")["cpp"]
# the compiled and the Triton kernel have tests of their own
KERNELS = ("reference", "chunked", *(() if CPP else ("cpp",)))


def slow(hidden, weight, labels, *, bias, temperature, softcap, scale):
    """log p(label), entropy and sum p^2 token by token."""
    rows = []
    for n, label in enumerate(labels.tolist()):
        logits = torch.stack([hidden[n] @ weight[v] + (0 if bias is None else bias[v]) for v in range(len(weight))])
        logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / (temperature[n] if isinstance(temperature, torch.Tensor) else temperature)
        probs = logits.exp() / logits.exp().sum()
        rows.append(torch.stack([probs[label].log(), -(probs * probs.log()).sum(), (probs**2).sum()]))
    return torch.stack(rows, 1)


def problem(seed, tokens, width, vocab, with_bias, temperature, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [draw(tokens, width), draw(vocab, width)] + ([draw(vocab)] if with_bias else [])
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    labels = torch.randint(vocab, (tokens,), generator=generator)
    if temperature == "per token":
        temperature = torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5
    return leaves, labels, temperature, draw(3, tokens)


def run(fn, leaves, labels, temperature, weights, *, softcap, scale):
    hidden, weight, *bias = leaves
    bias = bias[0] if bias else None
    settings = {"bias": bias, "temperature": temperature, "softcap": softcap, "scale": scale}
    if fn is slow:
        out = fn(hidden, weight, labels, **settings)
    else:
        out = torch.stack(fn(hidden, weight, labels, entropy=True, sum_squared=True, **settings))
    grads = [torch.autograd.grad((out[i] * weights[i]).sum(), leaves, retain_graph=True) for i in range(3)]
    return out.detach(), grads


settings = {
    "tokens": st.integers(1, 9),
    "width": st.integers(1, 6),
    "vocab": st.integers(2, 12),
    "with_bias": st.booleans(),
    "temperature": st.sampled_from([1.0, 0.6, "per token"]),
    "softcap": st.sampled_from([None, 3.0]),
    "scale": st.sampled_from([1.0, 0.25]),
    "seed": st.integers(0, 2**31),
}


@pytest.mark.parametrize("name", KERNELS)
@given(**settings)
def test_float64_equals_the_slow_program(name, tokens, width, vocab, with_bias, temperature, softcap, scale, seed):
    parts = problem(seed, tokens, width, vocab, with_bias, temperature)
    got = run(table.get("log_probs", name), *parts, softcap=softcap, scale=scale)
    expected = run(slow, *parts, softcap=softcap, scale=scale)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "reference"])
@given(**settings)
def test_rounds_no_worse_than_the_reference(name, tokens, width, vocab, with_bias, temperature, softcap, scale, seed):
    dtype = torch.float32
    leaves, *rest = problem(seed, tokens, width, vocab, with_bias, temperature, dtype)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    reference = table.get("log_probs", "reference")
    exact, rounded, got = (
        run(fn, xs, *rest, softcap=softcap, scale=scale)
        for fn, xs in ((reference, exact_leaves), (reference, leaves), (table.get("log_probs", name), leaves))
    )
    flat = [[r[0], *(g for grads in r[1] for g in grads)] for r in (exact, rounded, got)]
    for i, (e, r, g) in enumerate(zip(*flat, strict=True)):
        assert g.dtype == (torch.float32 if i == 0 else dtype)
        eps = torch.finfo(g.dtype).eps
        slack = 8 * eps * e.abs().max() + 8 * torch.finfo(torch.float32).eps * max(1.0, math.log(vocab))
        assert (g - e).abs().max() <= 2 * (r - e).abs().max() + slack


@pytest.mark.parametrize("name", KERNELS)
def test_no_tokens_and_a_vocabulary_of_one(name):
    kernel = table.get("log_probs", name)
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    out = kernel(hidden, weight, torch.zeros(0, dtype=torch.int64), entropy=True)
    assert out.log_probs.shape == out.entropy.shape == (0,)
    assert out.sum_squared is None
    grads = torch.autograd.grad(out.log_probs.sum(), [hidden, weight])
    assert grads[0].shape == (0, 3)
    assert not grads[1].any()
    sure = kernel(torch.randn(2, 3), torch.randn(1, 3), torch.zeros(2, dtype=torch.int64), entropy=True)
    assert not sure.log_probs.any()
    assert not sure.entropy.any()


@pytest.mark.parametrize("name", KERNELS)
def test_extreme_logits_stay_finite(name):
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    out = table.get("log_probs", name)(hidden, weight, torch.tensor([0, 0]), entropy=True, sum_squared=True)
    assert out.log_probs.tolist() == [0.0, -600.0]
    grads = torch.autograd.grad(torch.stack(out).sum(), [hidden, weight])
    assert all(x.isfinite().all() for x in [*out, *grads])


@pytest.mark.parametrize("name", KERNELS)
def test_log_probs_and_entropy_are_in_their_range(name):
    out = table.get("log_probs", name)(
        torch.randn(50, 4) * 3, torch.randn(7, 4), torch.randint(7, (50,)), entropy=True, sum_squared=True
    )
    assert (out.log_probs <= 0).all()
    assert ((out.entropy >= 0) & (out.entropy <= math.log(7) + 1e-6)).all()
    assert ((out.sum_squared >= 1 / 7 - 1e-6) & (out.sum_squared <= 1 + 1e-6)).all()


@given(**settings, of_tokens=st.integers(1, 9), slab=st.integers(1, 400), block=st.integers(1, 60))
def test_tiles_change_nothing(
    tokens, width, vocab, with_bias, temperature, softcap, scale, seed, of_tokens, slab, block
):
    parts = problem(seed, tokens, width, vocab, with_bias, temperature)
    tiled = partial(chunked, tiles=Tiles(of_tokens, slab, block))
    expected = run(slow, *parts, softcap=softcap, scale=scale)
    torch.testing.assert_close(run(tiled, *parts, softcap=softcap, scale=scale), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(CPP is not None, reason=str(CPP))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_program_in_cpp_hands_on_what_is_no_number(dtype):
    """In one token, and over several parts of a row and splits of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(n, 4, generator=generator).to(dtype).requires_grad_() for n in (3, 2500)]
    leaves[0].data[1, 2] = torch.nan
    labels, results = torch.tensor([0, 2400, 7]), []
    for name in ("chunked", "cpp"):
        kernel = partial(table.get("log_probs", name), entropy=True, sum_squared=True)
        out = torch.stack(kernel(*leaves, labels, temperature=torch.tensor([1.0, 2.0, 0.5]), bias=leaves[1][:, 0]))
        results.append((out, torch.autograd.grad(out.nan_to_num().sum(), leaves[:1])[0]))
    (out, slope), (expected, expected_slope) = results[1], results[0]
    assert out.isnan().any(0).tolist() == [False, True, False]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(slope[[0, 2]], expected_slope[[0, 2]], rtol=tolerance, atol=tolerance)


def test_what_nothing_uses_costs_chunked_nothing_backward():
    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    hidden, weight = torch.ones(5, 3, requires_grad=True), torch.ones(7, 3, requires_grad=True)
    for asked in ({}, {"entropy": True, "sum_squared": True}):
        out = chunked(hidden, weight, torch.arange(5), **asked)
        calls.append([])
        with Count():
            torch.autograd.grad(out.log_probs.sum(), [hidden, weight])
    assert calls[0].count("aten._softmax.default") == 1
    assert calls[0] == calls[1]


def test_chunked_holds_no_full_logits():
    tokens, vocab, slab = 256, 4096, 1 << 18
    bytes_of = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            bytes_of.extend(x.nbytes for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    with Watch():
        hidden = torch.zeros(tokens, 1, requires_grad=True)
        weight = torch.zeros(vocab, 1, requires_grad=True)
        out = chunked(
            hidden, weight, torch.zeros(tokens, dtype=torch.int64), entropy=True, tiles=Tiles(8192, slab, 1 << 20)
        )
        assert out.entropy is not None
        torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), [hidden, weight])
    assert max(bytes_of) == slab < 4 * tokens * vocab


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_an_output_that_one_rank_uses_has_its_gradient_on_all(name):
    (hidden, weight), labels, temperature, _ = problem(0, 5, 3, 6, False, 0.7)
    kernel = partial(table.get("log_probs", name), temperature=temperature, entropy=True)
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    out = kernel(*leaves, labels)
    d_hidden, d_weight = torch.autograd.grad((out.log_probs + out.entropy).sum(), leaves)

    def on_rank(mesh):
        axis = mesh["tensor"]
        own = [hidden.detach().clone().requires_grad_(), weight.detach().chunk(2)[axis.rank].clone().requires_grad_()]
        result = kernel(*own, labels, axis=axis)
        used = result.log_probs if axis.rank == 0 else result.entropy
        return torch.autograd.grad(used.sum(), own)

    first, second = simulate({"tensor": 2}, on_rank)
    torch.testing.assert_close(first[0] + second[0], d_hidden, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.cat([first[1], second[1]]), d_weight, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", ["reference", "chunked"])
@given(**(settings | {"vocab": st.integers(1, 5)}), world=st.sampled_from([2, 4]), more=st.integers(0, 3))
def test_a_split_vocabulary_changes_nothing(
    name, world, more, tokens, width, vocab, with_bias, temperature, softcap, scale, seed
):
    parts = problem(seed, tokens, width, world * vocab + more, with_bias, temperature)
    (hidden, *head), labels, temperatures, weights = parts
    kernel = table.get("log_probs", name)
    expected, expected_grads = run(kernel, *parts, softcap=softcap, scale=scale)

    def on_rank(mesh):
        axis = mesh["tensor"]
        leaves = [hidden.detach().clone().requires_grad_()]
        leaves += [x.detach().tensor_split(world)[axis.rank].clone().requires_grad_() for x in head]
        # the ranks' losses add up to the whole one
        shares = weights * torch.arange(1, world + 1)[axis.rank] / sum(range(1, world + 1))
        return run(partial(kernel, axis=axis), leaves, labels, temperatures, shares, softcap=softcap, scale=scale)

    ranks = simulate({"tensor": world}, on_rank)
    for out, _ in ranks:
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    for output, (d_hidden, *d_head) in enumerate(expected_grads):
        found = [grads[output] for _, grads in ranks]
        torch.testing.assert_close(sum(grads[0] for grads in found), d_hidden, rtol=1e-10, atol=1e-11)
        for i, grad in enumerate(d_head):
            torch.testing.assert_close(torch.cat([grads[1 + i] for grads in found]), grad, rtol=1e-10, atol=1e-11)


EXCLUDED = {"first": slice(0, 1100), "last": slice(1400, 2500), "scattered": slice(3, 2500, 7)}


def excluding(fn, leaves, labels, temperature, weights, *, softcap=None, scale=1.0):
    """Outputs and gradients of a kernel, together and of the log-probs alone."""
    out, grads = run(fn, leaves, labels, temperature, weights, softcap=softcap, scale=scale)
    alone = fn(*leaves[:2], labels, bias=leaves[2], temperature=temperature, softcap=softcap, scale=scale).log_probs
    return out, [*grads, torch.autograd.grad((alone * weights[0]).sum(), leaves)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("where", EXCLUDED)
@pytest.mark.parametrize("temperature", [1.0, "per token"])
def test_tokens_that_the_head_excludes_add_nothing_and_get_no_gradient(name, where, temperature):
    """By a bias of -inf, as of a vocabulary that is padded: also where they fill whole splits of the vocabulary."""
    (hidden, weight, bias), labels, temperature, weights = problem(0, 3, 4, 2500, True, temperature)
    gone = torch.zeros(2500, dtype=torch.bool)
    gone[EXCLUDED[where]] = True
    kept = (~gone).nonzero().flatten()
    labels = labels % len(kept)
    bias = bias.detach().where(~gone, -torch.inf).requires_grad_()
    kernel = partial(chunked, tiles=Tiles(2, 4096, 128)) if name == "chunked" else table.get("log_probs", name)
    out, grads = excluding(kernel, [hidden, weight, bias], kept[labels], temperature, weights)
    fewer = [hidden, *(x.detach()[kept].requires_grad_() for x in (weight, bias))]
    expected, expected_grads = excluding(reference, fewer, labels, temperature, weights)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    for (d_hidden, *d_head), (of_hidden, *of_head) in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(d_hidden, of_hidden, rtol=1e-9, atol=1e-11)
        for found, other in zip(d_head, of_head, strict=True):
            torch.testing.assert_close(found[kept], other, rtol=1e-9, atol=1e-11)
            assert not found[gone].any()


@pytest.mark.parametrize("name", KERNELS)
def test_a_rank_whose_part_of_the_vocabulary_is_excluded_changes_nothing(name):
    (hidden, weight, bias), labels, temperature, weights = problem(1, 3, 4, 12, True, 0.8)
    bias = torch.cat([bias.detach()[:6], torch.full((6,), -torch.inf, dtype=torch.float64)])
    kernel = table.get("log_probs", name)

    def on_rank(mesh):
        axis = mesh["tensor"]
        head = [x.detach().chunk(2)[axis.rank].clone().requires_grad_() for x in (weight, bias)]
        leaves = [hidden.detach().clone().requires_grad_(), *head]
        return run(partial(kernel, axis=axis), leaves, labels % 6, temperature, weights / 2, softcap=None, scale=1.0)

    fewer = [hidden, *(x.detach()[:6].clone().requires_grad_() for x in (weight, bias))]
    expected, _ = run(reference, fewer, labels % 6, temperature, weights, softcap=None, scale=1.0)
    for out, grads in simulate({"tensor": 2}, on_rank):
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
        assert all(x.isfinite().all() for each in grads for x in each)


def test_an_excluded_label_has_no_probability():
    (hidden, weight, _), _, *_ = problem(2, 2, 4, 6, True, 1.0)
    bias = torch.tensor([0.0] * 5 + [-torch.inf], dtype=hidden.dtype)
    for name in KERNELS:
        found = table.get("log_probs", name)(hidden, weight, torch.tensor([5, 0]), bias=bias, entropy=True)
        assert found.log_probs.isinf().tolist() == [True, False], name
        assert found.entropy.isfinite().all(), name


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(40, 64, 3000), (1, 8, 5), (7, 128, 2049)])
def test_log_probs_of_16_bits_are_sums_in_float32(name, dtype, size):
    """Hidden states and weights have 16 bits; logits of up to 30 are not rounded to them."""
    tokens, width, vocab = size
    (hidden, weight), labels, _, _ = problem(3, tokens, width, vocab, False, 1.0, dtype)
    fn = table.get("log_probs", name)
    found = fn(hidden, weight, labels, entropy=True, sum_squared=True)
    exact = reference(hidden.double(), weight.double(), labels, entropy=True, sum_squared=True)
    for own, wanted in zip(found, exact, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.double(), wanted, rtol=1e-5, atol=3e-5)
