"""Checks of the kernels named "fixed" under Triton's interpreter: `python -m tests.kernels.interpreted_fixed NAME`.

The interpreter multiplies by numpy, whose products depend on the place of a row in a tile, by a unit in the last place.
So tiles are multiplied here as in a loop over their inner numbers, in order: what is held is that programs have the
same tiles, blocks and orders for any rows. Whether a GPU's products depend on the place of a row, it alone can tell."""

import sys
from functools import partial

import attrs
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fppo.laws._kernels import example_of
from fppo.laws._search import check
from fppo.laws.kernels import laws_of
from fppo.rollout import exact_probe
from fppo.rollout.embedded import EmbeddedEngine
from fppo_kernels import table
from fppo_kernels._fixed import INTERPRETED
from fppo_kernels.operation import operation_of
from fppo_kernels.padding import make_lengths
from fppo_kernels.table import EXACT, Kernels
from tests.kernels.interpreted import _cast
from tests.models.families import make

FLOATS = (torch.float32, torch.bfloat16)


def _in_order(builder, left, right, total, precision, imprecise):
    """A product of tiles that adds in the order of the inner dimension."""
    out = total.data.copy()
    for column, row in zip(left.data.astype(out.dtype).T, right.data.astype(out.dtype), strict=True):
        out += column[:, None] * row
    return TensorHandle(out, total.dtype.scalar)


InterpreterBuilder.create_dot = _in_order  # type: ignore[method-assign]
InterpreterBuilder.create_fp_trunc = _cast  # type: ignore[method-assign]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def keeps_laws(name, dtype, sizes, numbers=None):
    """As `laws.check_kernel`, in these sizes and cases."""
    op = operation_of(name)
    numbers = range(len(op.features)) if numbers is None else numbers
    examples = partial(example_of, op, numbers, (dtype,), "cpu", None)
    check(table.get(name, "fixed"), laws_of(op), examples, sizes=sizes, seeds=len(numbers))


def laws_of_linear():
    for dtype, sizes in (
        (torch.float32, ((0, 2), (3, 5), (33, 130))),
        (torch.float64, ((5, 3),)),
        (FLOATS[1], ((5, 3),)),
    ):
        keeps_laws("linear", dtype, sizes)


def laws_of_attention():
    keeps_laws("attention", torch.float32, ((0, 0), (3, 3)))
    keeps_laws("attention", torch.float32, ((2, 130),), (8, 11))
    keeps_laws("attention", torch.float64, ((2, 40),), (7, 9))
    keeps_laws("attention", torch.bfloat16, ((2, 2),), (3, 9))


def laws_of_decode_attention():
    keeps_laws("decode_attention", torch.float32, ((1, 1), (2, 130)))
    keeps_laws("decode_attention", torch.float64, ((3, 9),), (5, 7))
    keeps_laws("decode_attention", torch.bfloat16, ((3, 9),), (3,))


def laws_of_log_probs():
    keeps_laws("log_probs", torch.float32, ((3, 5),))
    keeps_laws("log_probs", torch.float32, ((33, 5000),), (6, 9))  # two splits of the vocabulary
    keeps_laws("log_probs", torch.bfloat16, ((5, 9),), (6,))


def rows_keep_bits(fn, *columns):
    """A row has the same bits alone, and in parts of a batch that begin anywhere, as in the whole."""
    whole = fn(*columns)
    for begin, size in ((0, 1), (13, 1), (69, 1), (1, 2), (63, 2), (5, 13), (60, 10)):
        part = slice(begin, begin + size)
        for found, expected in zip(fn(*(x[part] for x in columns)), whole, strict=True):
            assert torch.equal(found, expected[part]), (begin, size)


def rows_of_products():
    """Forward, and the gradient for the input; also of half of the outputs, and of a transposed weight."""
    linear = table.get("linear", "fixed")
    for dtype, width, out in ((torch.float32, 70, 130), (torch.float64, 33, 5), (torch.bfloat16, 40, 30)):
        weight, bias = drawn(out, width, dtype=dtype), drawn(out, dtype=dtype)

        def both(x, grad, weight=weight, bias=bias):
            x = x.clone().requires_grad_()
            found = linear(x, weight, bias)
            return found.detach(), *torch.autograd.grad(found, x, grad)

        x = drawn(70, width, dtype=dtype)
        rows_keep_bits(both, x, drawn(70, out, dtype=dtype))
        half = (out + 1) // 2
        assert torch.equal(linear(x, weight[:half]), linear(x, weight)[:, :half])
        assert torch.equal(linear(x[1:], weight.t().contiguous().t()), linear(x, weight)[1:])


def rows_of_log_probs():
    kernel = table.get("log_probs", "fixed")
    for dtype in FLOATS:
        weight = drawn(4200, 9, dtype=dtype)  # nine tiles, so two splits

        def numbers(hidden, labels, temperature, weight=weight):
            return kernel(hidden, weight, labels, temperature=temperature, entropy=True, sum_squared=True)

        temperature = drawn(70).abs() + 0.5
        rows_keep_bits(numbers, drawn(70, 9, dtype=dtype), torch.arange(70) * 59 % 4200, temperature)


def rows_of_layers():
    """Norms, gated activations and rotary positions; norms of sums are those of the sums."""
    norm, add, glu, rotary = (table.get(op, "triton") for op in ("rms_norm", "add_rms_norm", "glu", "rotary"))
    for dtype in FLOATS:
        x, y, weight = (drawn(*shape, dtype=dtype) for shape in ((70, 37), (70, 37), (37,)))
        rows_keep_bits(lambda x, weight=weight: (norm(x, weight, eps=1e-6),), x)
        rows_keep_bits(lambda x, y, weight=weight: add(x, y, weight, eps=1e-6), x, y)
        assert torch.equal(add(x, y, weight, eps=1e-6)[0], norm(x + y, weight, eps=1e-6))
        for kind in ("silu", "gelu_tanh", "gelu"):
            rows_keep_bits(lambda x, y, kind=kind: (glu(x, y, activation=kind),), x, y)
        heads = (drawn(70, count, 12, dtype=dtype) for count in (4, 2))
        rows_keep_bits(rotary, *heads, *(drawn(70, 12, dtype=dtype, seed=seed) for seed in (1, 2)))


SEQUENCES = (3, 40, 1, 67)  # tokens; blocks have 32 or 64
HEADS = ({"window": None}, {"window": 37}, {"window": 5, "softcap": 2.0, "sinks": 4}, {"window": None, "groups": 3})


def packed_attention(how, dtype):
    """Packed queries, keys and values; keywords of attention; and those of decode attention."""
    count = 4 if how.get("groups") is None else 6
    inputs = [drawn(sum(SEQUENCES), n, width, dtype=dtype) for n, width in ((count, 24), (2, 24), (2, 20))]
    sinks = drawn(count) if "sinks" in how else None
    of_head = {"scale": 0.3, "softcap": how.get("softcap"), "sinks": sinks}
    return inputs, {**of_head, "window": how["window"]}, of_head


def attention_of_any_part():
    """A query's result is the same in a sequence of its own, and in a chunk after cached keys of which it is the
    last."""
    attention = table.get("attention", "fixed")
    for dtype, ways in zip(FLOATS, (HEADS, HEADS[2:3]), strict=True):
        for how in ways:
            inputs, keywords, _ = packed_attention(how, dtype)
            together = attention(*inputs, lengths=make_lengths(SEQUENCES), **keywords).split(SEQUENCES)
            for size, whole, *rows in zip(SEQUENCES, together, *(x.split(SEQUENCES) for x in inputs), strict=True):
                assert torch.equal(attention(*rows, lengths=make_lengths([size]), **keywords), whole)
                for cached in {size // 3, size - 1}:
                    chunks = {"lengths": make_lengths([size - cached]), "key_lengths": make_lengths([size])}
                    assert torch.equal(attention(rows[0][cached:], *rows[1:], **chunks, **keywords), whole[cached:])


def attention_of_one_token():
    """Decoding over a padded cache, of which some columns were not written, has the bits of the packed pass: with
    padding of any width, and with rows that begin before the window."""
    attention, decoding = table.get("attention", "fixed"), table.get("decode_attention", "fixed")
    last = torch.tensor(SEQUENCES).cumsum(0) - 1
    for dtype, ways in zip(FLOATS, (HEADS, HEADS[2:3]), strict=True):
        for how in ways:
            inputs, keywords, of_head = packed_attention(how, dtype)
            expected = attention(*inputs, lengths=make_lengths(SEQUENCES), **keywords)[last]
            query, *pair = inputs
            for before, after in ((0, 0), (9, 5)):
                end = max(SEQUENCES) + before
                caches = [x.new_full((4, 2, end + after, x.shape[-1]), torch.nan) for x in pair]
                bias = query.new_zeros(4, end + after)
                for row, (size, *parts) in enumerate(zip(SEQUENCES, *(x.split(SEQUENCES) for x in pair), strict=True)):
                    bias[row, : end - size] = -torch.inf
                    for cache, part in zip(caches, parts, strict=True):
                        cache[row, :, end - size : end] = part.transpose(0, 1)
                start = max(before, end - (how["window"] or end))
                whole = decoding(query[last], *caches, bias, start=start, end=end, **of_head)
                assert torch.equal(whole, expected)
                for row in (1, 3):
                    own = query[last[row : row + 1]], *(x[row : row + 1] for x in caches)
                    assert torch.equal(
                        decoding(*own, bias[row : row + 1], start=start, end=end, **of_head)[0], whole[row]
                    )
                    if how["window"] is None:  # without a bias a row begins at `start`
                        alone = decoding(*own, start=end - SEQUENCES[row], end=end, **of_head)
                        assert torch.equal(alone[0], whole[row])


def placed_anywhere():
    """Tensors that begin at odd places of memory, and keys that programs cannot address, change no bit."""
    linear, attention = table.get("linear", "fixed"), table.get("attention", "fixed")
    x, weight = drawn(9, 20), drawn(11, 20)
    odd = torch.empty(1000)[1:]

    def moved(x):
        return odd[: x.numel()].view(x.shape).copy_(x)

    assert torch.equal(linear(moved(x), weight), linear(x, weight))
    assert torch.equal(linear(x, moved(weight)), linear(x, weight))
    inputs = [drawn(9, n, 6) for n in (4, 2, 2)]
    how = {"lengths": make_lengths([4, 5]), "scale": 0.3}
    expected = attention(*inputs, **how)
    assert torch.equal(
        attention(inputs[0], *(torch.cat([x, x[..., :1]], -1)[..., :-1] for x in inputs[1:]), **how), expected
    )
    assert torch.equal(
        attention(inputs[0], *(x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[1:]), **how), expected
    )


def refusals():
    x, weight = drawn(2, 3), drawn(4, 3)
    for kernel in ("linear", "attention", "decode_attention"):
        fn, how = table.get(kernel, "fixed"), {"lengths": make_lengths([2])} if kernel == "attention" else {}
        how = {"start": 0, "end": 1} if kernel == "decode_attention" else how
        how |= {} if kernel == "linear" else {"scale": 1.0}
        third = () if kernel == "linear" else (weight,)
        with pytest.raises(ValueError, match=f"{kernel}/fixed takes tensors of one of .* got .*float16"):
            fn(x.half(), weight.half(), *(x.half() for x in third), **how)
        with pytest.raises(ValueError, match=f"{kernel}/fixed takes tensors of one of"):
            fn(x, weight.bfloat16(), *third, **how)


def engine_of(name):
    """An engine of a tiny model with the exact kernels of a GPU."""
    kernels = Kernels.named(**EXACT["cuda"])
    return EmbeddedEngine(model=make(name)[0], kernels=kernels, pad_token_id=0, exact=True)


def probe():
    """The probe, with its rollouts of a small instance, accepts them, without and with windows; and it names a kernel
    that is not exact."""
    exact_probe.MANY = 70
    for name in ("qwen2", "mistral"):
        engine = engine_of(name)
        exact_probe.probe_exact(engine.model, engine.kernels)
    linear = engine.kernels.linear
    by_rows = attrs.evolve(engine.kernels, linear=lambda x, *rest: linear(x, *rest) * (1 + 1e-3 * (len(x) > 64)))
    with pytest.raises(ValueError, match=r"rollout\.exact: linear of .* gives a row other bits"):
        exact_probe.probe_exact(engine.model, by_rows)


CHECKS = {
    fn.__name__: fn
    for fn in (
        laws_of_linear,
        laws_of_attention,
        laws_of_decode_attention,
        laws_of_log_probs,
        rows_of_products,
        rows_of_log_probs,
        rows_of_layers,
        attention_of_any_part,
        attention_of_one_token,
        placed_anywhere,
        refusals,
        probe,
    )
}

if __name__ == "__main__":
    assert INTERPRETED
    for check_name in sys.argv[1:] or CHECKS:
        CHECKS[check_name]()
        print(f"{check_name}: held", flush=True)
