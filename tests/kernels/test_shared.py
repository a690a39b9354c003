"""Attention over a row that holds prompts once is attention over the sequences written out."""

import importlib
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.laws import LawViolation, check_shared
from fppo.laws import shared as laws
from fppo.laws._kernels import words
from fppo_kernels import shared, table
from fppo_kernels.attention import FEATURES
from fppo_kernels.attention.eager import eager
from fppo_kernels.padding import make_lengths
from fppo_kernels.shared import Branch, read, readings, share, shared_attention

from .test_attention import DEVICE, backward_on_cpus

KERNELS = table.BUILTIN["attention"]
ON_CPUS = [name for name in ("eager", "sdpa", "cpp") if KERNELS[name].refuse() is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x == "flex" else x for x in KERNELS])
def test_every_kernel_keeps_the_laws_with_shared_pieces(name, monkeypatch):
    if (reason := table.available("attention")[name]) and name != "flex":
        pytest.skip(reason)
    lacks, kernel = KERNELS[name].lacks, KERNELS[name].load()
    features = [x for x in FEATURES if x not in lacks]
    assert "key_lengths" in features
    on_gpu = DEVICE == "cuda" and name != "cpp"
    if name == "flex":  # slow: sizes between these are for smaller counter-examples
        monkeypatch.setattr(laws, "SIZES", ((0, 0), (2, 2), (8, 6)))
    kinds = (torch.float32,) if name == "flex" and on_gpu else (torch.float64, torch.float32, torch.bfloat16)
    dtype = next(x for x in kinds if words(x) not in lacks)
    with backward_on_cpus():
        check_shared(
            attention=kernel,
            features=features,
            dtypes=(dtype,),
            device=DEVICE if on_gpu else "cpu",
            head_dim=16 if on_gpu else 4,
        )


def forests(most=6):
    """Lists of pieces: any size, each after one before it or none."""
    piece = st.tuples(st.integers(1, 5), st.integers(0, 10))
    made = st.lists(piece, min_size=1, max_size=most)
    return made.map(lambda drawn: [Branch(size, at % (i + 1) - 1) for i, (size, at) in enumerate(drawn)])


def paths_of(pieces):
    """The tokens of the row that each piece sees, by following parents one token at a time."""
    begins = [sum(piece.size for piece in pieces[:i]) for i in range(len(pieces))]
    paths = []
    for number in range(len(pieces)):
        path, at = [], number
        while at >= 0:
            path = [*range(begins[at], begins[at] + pieces[at].size), *path]
            at = pieces[at].parent
        paths.append(path)
    return paths


@given(forests(9))
def test_keys_are_those_on_the_way_to_each_piece(pieces):
    made, paths = share(pieces), paths_of(pieces)
    assert made.keys.tokens.tolist() == [token for path in paths for token in path]
    assert made.keys.total == sum(made.lengths.lengths)
    assert made.lengths.lengths == tuple(piece.size for piece in pieces)
    assert made.key_lengths.lengths == tuple(map(len, paths))


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=20))))
def test_each_reading_adds_to_its_token_once(drawn):
    count, tokens = drawn
    made = readings(torch.tensor(tokens, dtype=torch.int64), count)
    assert all(len(set(own.tolist())) == len(own) for own, _ in made.rounds)
    x, weights = (torch.randn(n, 2, dtype=torch.float64).requires_grad_() for n in (count, len(tokens)))
    out, plain = read(x, made), x[tokens]
    assert torch.equal(out, plain)
    grads = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (out, plain)]
    torch.testing.assert_close(*grads, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ON_CPUS)
@given(
    pieces=forests(),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    window=st.none() | st.integers(1, 7),
    softcap=st.sampled_from([None, 2.0]),
    sink=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_forest_has_values_and_gradients_of_its_sequences(
    name, pieces, kv_heads, groups, window, softcap, sink, seed
):
    generator, paths = torch.Generator().manual_seed(seed), paths_of(pieces)
    total, heads = sum(piece.size for piece in pieces), kv_heads * groups

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = draw(total, heads, 4), draw(total, kv_heads, 4), draw(total, kv_heads, 3)
    sinks = draw(heads) if sink else None
    how = {"scale": 0.7, "window": window, "softcap": softcap, "sinks": sinks}
    weights = torch.randn(total, heads, 3, dtype=torch.float64, generator=generator)
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    made = share(pieces)
    got = shared_attention(KERNELS[name].load(), made)(q, k, v, lengths=made.lengths, **how)
    expected = torch.cat(
        [
            eager(q[path], k[path], v[path], lengths=make_lengths([len(path)]), **how)[-piece.size :]
            for path, piece in zip(paths, pieces, strict=True)
        ]
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad((x * weights).sum(), leaves) for x in (got, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-11)


def other_prompt(pieces, device="cpu", share=shared.share):
    """Responses to the second prompt read the keys of the first, as far as it goes."""
    right = share(pieces, device)
    paths = paths_of(pieces)
    tokens = [
        paths[0][i] if pieces[number].parent > 0 and i < min(len(paths[0]), len(path) - pieces[number].size) else token
        for number, path in enumerate(paths)
        for i, token in enumerate(path)
    ]
    return right._replace(keys=readings(torch.tensor(tokens, dtype=torch.int64), right.keys.total))


def one_reader(pieces, device="cpu", share=shared.share):
    """A prompt's keys have gradients from one response alone."""
    right = share(pieces, device)
    return right._replace(keys=right.keys._replace(rounds=right.keys.rounds[:1]))


def alone(pieces, device="cpu", share=shared.share):
    """Responses see their own tokens alone."""
    return share([piece._replace(parent=-1) for piece in pieces], device)


MISTAKES = [(other_prompt, "values"), (one_reader, "gradients"), (alone, "values")]


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "law"), MISTAKES)
def test_the_laws_see_mistakes(wrong, law, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fppo.laws.shared"), "share", wrong)
    with pytest.raises(LawViolation) as caught:
        check_shared()
    assert caught.value.law == law


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name"), enumerate(("query", "key", "value", "sinks")))
def test_the_laws_see_a_gradient_that_one_argument_lacks(place, name):
    def constant(made):
        def attend(*args, **settings):
            given = [*args, settings.pop("sinks", None)]
            given[place] = None if given[place] is None else given[place].detach()
            return shared_attention(eager, made)(*given[:3], sinks=given[3], **settings)

        return attend

    with pytest.raises(LawViolation, match=f"the gradient by {name}") as caught:
        check_shared(constant)
    assert caught.value.law == "gradients"


@pytest.mark.slow
def test_the_laws_see_gradients_in_two_orders():
    """As atomics would add them: here, in an order that changes with each call."""
    calls = iter(range(10**6))

    def attend(made):
        turned = made._replace(keys=made.keys._replace(rounds=made.keys.rounds[:: 1 if next(calls) % 2 else -1]))
        return shared_attention(partial(eager), turned)

    with pytest.raises(LawViolation) as caught:
        check_shared(attend)
    assert caught.value.law == "one order"


def test_gradients_in_bfloat16_are_summed_wide():
    """One prompt token of 300 responses: bfloat16 would stop at 256 times the smallest."""
    made = share([Branch(1), *(Branch(1, 0) for _ in range(300))])
    x = torch.zeros(301, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(read(x, made.keys).sum(), x)
    assert grad[0].item() == torch.tensor(301.0).bfloat16().item()


def test_what_does_not_fit_is_named():
    def mine(query, key, value, *, lengths, scale, **settings): ...

    with pytest.raises(ValueError, match="the attention kernel mine has no keyword key_lengths, which shared prompts"):
        shared_attention(mine, share([Branch(2)]))
    with pytest.raises(ValueError, match="piece 1 has 2 tokens and follows piece 1: give it 1 or more tokens"):
        share([Branch(1), Branch(2, 1)])
    with pytest.raises(ValueError, match="piece 0 has 0 tokens and follows piece -1"):
        share([Branch(0)])
    x = torch.zeros(3, 1, 2)
    with pytest.raises(ValueError, match="lengths are those of 1 sequences of 3 tokens, and the row has 2 pieces of 3"):
        shared_attention(eager, share([Branch(1), Branch(2, 0)]))(x, x, x, lengths=make_lengths([3]), scale=1.0)
