"""Attention over a sharded row is attention over the whole row, in value and in the sum of the ranks' gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.laws import LawViolation, check_ulysses
from fppo.runtime.simulate import simulate
from fppo_kernels import collectives, table, ulysses
from fppo_kernels.collectives import Axis
from fppo_kernels.padding import make_lengths

KERNELS = {name: table.get("attention", name) for name in ("sdpa", "eager")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_keeps_its_laws(name):
    check_ulysses(attention=KERNELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@settings(max_examples=10)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    per_rank=st.integers(1, 3),
    divisor=st.integers(0, 7),
    window=st.none() | st.integers(1, 10),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_is_the_attention_of_the_whole_row(name, ranks, sizes, per_rank, divisor, window, softcap, with_sinks, seed):
    attention, generator = KERNELS[name], torch.Generator().manual_seed(seed)
    lengths = make_lengths([*sizes, -sum(sizes) % ranks])
    total, heads = sum(lengths.lengths), per_rank * ranks
    counts = [n for n in range(1, heads + 1) if heads % n == 0]
    kv_heads = counts[divisor % len(counts)]

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inputs = [draw(total, heads, 4), draw(total, kv_heads, 4), draw(total, kv_heads, 3)]
    inputs += [draw(heads)] if with_sinks else []
    weights = draw(total, heads, 3)

    def run(mesh):
        axis = mesh["sequence"]
        leaves = [x.clone().requires_grad_() for x in inputs]
        q, k, v = (ulysses.slice_sequence(x, axis) for x in leaves[:3])
        sinks = leaves[3] if with_sinks else None
        kernel = ulysses.ulysses(attention, axis)
        out = kernel(q, k, v, lengths=lengths, scale=0.7, window=window, softcap=softcap, sinks=sinks)
        out = ulysses.gather_sequence(out, axis)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

    (expected,) = simulate({}, run)
    found = simulate({"sequence": ranks}, run)
    for out, *_ in found:
        torch.testing.assert_close(out, expected[0], rtol=1e-10, atol=1e-12)
    for shares, grad in zip(zip(*found, strict=True), expected, strict=True):
        if grad is not expected[0]:
            torch.testing.assert_close(torch.stack(shares).sum(0), grad, rtol=1e-9, atol=1e-11)


@given(ranks=st.sampled_from([1, 2, 4]), rows=st.integers(0, 3), dim=st.integers(-2, 1), seed=st.integers(0, 2**31))
def test_gathering_undoes_slicing_and_slices_share_the_gradient(ranks, rows, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(rows * ranks, ranks, 3, generator=generator, dtype=torch.float64).movedim(0, dim)
    weights = torch.randn(whole.shape, generator=generator, dtype=torch.float64)

    def run(mesh):
        x = whole.clone().requires_grad_()
        own = ulysses.slice_sequence(x, mesh["sequence"], dim=dim)
        assert own.shape[dim] == rows
        again = ulysses.gather_sequence(own, mesh["sequence"], dim=dim)
        return again.detach(), torch.autograd.grad((again * weights).sum(), x)[0]

    found = simulate({"sequence": ranks}, run)
    assert all(torch.equal(again, whole) for again, _ in found)
    assert torch.equal(torch.stack([share for _, share in found]).sum(0), weights)


def test_one_rank_is_the_attention_itself():
    assert ulysses.ulysses(KERNELS["sdpa"], Axis()) is KERNELS["sdpa"]


def test_what_does_not_divide_is_an_error_that_says_so():
    attention, x = ulysses.ulysses(KERNELS["sdpa"], Axis(4, 0)), torch.zeros(2, 6, 4)
    with pytest.raises(ValueError, match=r"6 query heads do not divide by the 4 ranks .* whose size divides 6"):
        attention(x, x, x, lengths=make_lengths([8]), scale=1.0)
    x = torch.zeros(2, 4, 4)
    with pytest.raises(ValueError, match="lengths are those of 7 tokens, but 4 slices of 2 hold 8: pad the row"):
        attention(x, x, x, lengths=make_lengths([7]), scale=1.0)
    with pytest.raises(ValueError, match="4 query heads do not divide by 3 key heads"):
        attention(x, x[:, :3], x[:, :3], lengths=make_lengths([8]), scale=1.0)
    with pytest.raises(ValueError, match="a row of 7 tokens does not divide by 2 ranks"):
        ulysses.slice_sequence(torch.zeros(7), Axis(2, 0))


def tiled_heads(attention, axis):
    """Key heads repeated in the wrong order: as a whole, and not each one."""
    if axis.size == 1:
        return attention

    def wrong(query, key, value, **keywords):
        times = axis.size if key.shape[1] < axis.size else 1
        return ulysses.ulysses(attention, axis)(query, *(x.repeat(1, times, 1) for x in (key, value)), **keywords)

    return wrong


def own_slice_alone(attention, axis):
    """Tokens see their own slice only."""
    if axis.size == 1:
        return attention

    def wrong(query, key, value, *, lengths, **keywords):
        return attention(query, key, value, lengths=make_lengths([len(query)]), **keywords)

    return wrong


def lost_gradient(attention, axis):
    def wrong(x, axis, *, split_dim, concat_dim):
        """Keeps of the gradient what did not leave the rank."""
        out = collectives.all_to_all(x.detach(), axis, split_dim=split_dim, concat_dim=concat_dim)
        own = x.tensor_split(axis.size, split_dim)[axis.rank]
        parts = list(out.tensor_split(axis.size, concat_dim))
        parts[axis.rank] = own
        return torch.cat(parts, concat_dim)

    return ulysses.ulysses(attention, axis, wrong)


def all_sinks(attention, axis):
    """Every rank takes the first heads' sinks."""
    if axis.size == 1:
        return attention

    def first(query, key, value, *, sinks=None, **keywords):
        sinks = None if sinks is None else sinks.roll(int(axis.rank > 0))
        return ulysses.ulysses(attention, axis)(query, key, value, sinks=sinks, **keywords)

    return first


@pytest.mark.parametrize(
    ("wrap", "law"),
    [(tiled_heads, "values"), (own_slice_alone, "values"), (lost_gradient, "shares"), (all_sinks, "values")],
)
def test_the_laws_see_mistakes(wrap, law):
    with pytest.raises(LawViolation) as caught:
        check_ulysses(wrap)
    assert caught.value.law == law
