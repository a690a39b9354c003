"""Checks of the Triton kernels under Triton's interpreter: `python -m tests.kernels.interpreted NAME`.

In a process of its own, for TRITON_INTERPRET must be set before anything imports triton."""

import sys
import threading
from functools import partial
from types import SimpleNamespace

import attrs
import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from fppo.laws import LawViolation, check_func
from fppo.laws._kernels import bound, carry, example_of, settings
from fppo.laws._search import check
from fppo.laws.kernels import laws_of
from fppo.laws.log_probs import LARGE_LAWS, SUM_LAWS, large_example, sums_example
from fppo.runtime.simulate import simulate
from fppo_kernels import table
from fppo_kernels.glu import eager as plain_glus
from fppo_kernels.glu import triton as glus
from fppo_kernels.log_probs import OPERATION
from fppo_kernels.log_probs import triton as module
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.log_probs.triton import Tiling, choose_tiling, triton
from fppo_kernels.operation import operation_of
from fppo_kernels.rms_norm import eager as plain_norms
from fppo_kernels.rms_norm import triton as norms
from fppo_kernels.table import Kernels

# at every launch the interpreter replaces what triton.language has, and puts it back: here once, and for good
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)  # type: ignore[attr-defined]
SMALL = Tiling(16, 16, 16, warps=4, stages=1, group=2, tiles=3, instances=1)


COUNT = len(OPERATION.features)
OF_TILES = ("values", "gradient of all outputs", "outputs asked for", "frozen head")


def log_probs_examples(numbers, dtype):
    return partial(example_of, OPERATION, numbers, (dtype,), "cpu", None)


def laws_in_float32():
    """As `laws.check_kernel`, in some of its sizes, others than `laws_in_bfloat16`, and over fewer tokens; the
    smallest and the largest of them with the two cases alone that have all that the others have, the second with
    extreme logits, and the largest by the laws that see a tile's mistakes."""
    kernel, laws = Kernels.named(log_probs="triton").log_probs, laws_of(OPERATION)
    full = (6, COUNT - 1)
    check(kernel, laws, log_probs_examples(range(COUNT), torch.float32), sizes=((3, 5),), seeds=COUNT)
    ends = log_probs_examples(full, torch.float32)
    check(kernel, laws, ends, sizes=((1, 1),), seeds=len(full))
    of_tiles = [law for law in laws if law.name in OF_TILES]
    assert len(of_tiles) == len(OF_TILES)
    check(kernel, of_tiles, ends, sizes=OPERATION.sizes[-1:], seeds=len(full))
    sums = bound(SUM_LAWS, OPERATION)
    check(kernel, sums, partial(sums_example, (torch.float32,), "cpu"), sizes=((1100, 4),), seeds=2)
    large = partial(large_example, (torch.float32,), "cpu", 2)  # three by five tiles
    check(kernel, bound(LARGE_LAWS, OPERATION), large, sizes=((150, 2100),), seeds=1)


def check_layer(name, dtype, numbers, small):
    """As `laws.check_kernel`, with long rows in the last kind of example alone; few where each is an instance."""
    kernel, op = getattr(Kernels.named(**{name: "triton"}), name), operation_of(name)
    many, width = op.sizes[-1]
    for sizes, kinds in ((op.sizes[small], numbers), (((many if name == "glu" else 5, width),), numbers[-1:])):
        examples = partial(example_of, op, kinds, (dtype,), "cpu", None)
        check(kernel, laws_of(op), examples, sizes=sizes, seeds=len(kinds))


def layers_in_float32():
    for name in ("rms_norm", "glu", "add_rms_norm", "rotary"):
        check_layer(name, torch.float32, range(3 if name == "glu" else 4), slice(None, -1, 4))


def transforms_of_layers():
    """As `laws.check_func`, in one size."""
    for name in ("rms_norm", "add_rms_norm", "glu", "rotary", "log_probs"):
        op = attrs.evolve(operation_of(name), sizes=((2, 3),), features=(frozenset(),) * 2)
        assert check_func(op, table.get(name, "triton"), dtypes=(torch.float32,))


def layers_in_bfloat16():
    InterpreterBuilder.create_fp_trunc = _cast  # type: ignore[method-assign]
    for name in ("glu", "add_rms_norm", "rotary"):
        check_layer(name, torch.bfloat16, range(3), slice(5, -1))


def layers_of_other_layouts():
    """More rows than instances, leading dimensions, views, and gradients that are not contiguous."""
    norms.INSTANCES = 4
    generator = torch.Generator().manual_seed(0)
    for rows, width in ((1, 7), (5, 3), (2, 1025)):
        x, weight = (torch.randn(s, generator=generator).requires_grad_() for s in ((width, 2, rows), (width,)))

        def normed(module, x=x, weight=weight):
            out = getattr(module, module.__name__.rpartition(".")[2])(x.transpose(0, 2), weight, eps=1e-2, offset=1.0)
            return out, torch.autograd.grad(out.mT.sin().sum() + (out * weight).sum(), [x, weight])

        def activated(module, x=x):
            gate, up = x.flatten(1).t().chunk(2)
            out = getattr(module, module.__name__.rpartition(".")[2])(gate, up, activation="gelu_tanh")
            return out, torch.autograd.grad(out.t().sin().sum(), x)

        def added(add, x=x, weight=weight):
            out = add(x.transpose(0, 2), x.exp().transpose(0, 2), weight, eps=1e-2, offset=1.0)
            return out, torch.autograd.grad(out[0].mT.sin().sum() + (out[1].mT ** 2).sum(), [x, weight])

        torch.testing.assert_close(normed(norms), normed(plain_norms))
        torch.testing.assert_close(added(norms.add_triton), added(plain_norms.add_eager))
        torch.testing.assert_close(activated(glus), activated(plain_glus))


class Fenced(TorchDispatchMode):
    """New tensors are the middles of larger ones, whose other numbers nobody may change."""

    fence = 4096  # numbers before and after
    makers = tuple(getattr(torch.ops.aten, name) for name in ("empty_like", "zeros_like", "new_empty", "new_zeros"))

    def __init__(self):
        super().__init__()
        self.fences = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in self.makers:
            return out
        whole = torch.full((out.numel() + 2 * self.fence,), 3, dtype=out.dtype)
        self.fences += [whole[: self.fence], whole[len(whole) - self.fence :]]
        return whole[self.fence :][: out.numel()].view(out.shape).copy_(out)


def writes_within_tensors():
    """Forward and backward, in widths that are no power of two, the rows' programs write nothing beside their
    results."""
    for name in ("rms_norm", "add_rms_norm", "glu", "rotary", "log_probs"):
        op, kernel = operation_of(name), table.get(name, "triton")
        for rows, width in ((3, 5), (5, 7)):
            drawn = example_of(op, (0,), (torch.float32,), "cpu", None, rows, width, 0)
            example, leaves = carry(drawn, [x for x in op.leaves if x in drawn.inputs])
            with Fenced() as fenced:
                out = op.call(kernel, example.inputs, settings(example), op.outputs)
                torch.autograd.grad(sum(out[x].square().sum() for x in op.sloped), list(leaves.values()))
            assert len(fenced.fences) >= 4, name
            assert all((fence == 3).all() for fence in fenced.fences), f"{name} of {rows} rows, {width} wide"


def layer_refusals():
    wide = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="rms_norm/eager takes any"):
        norms.triton(wide, wide[0], eps=1e-6)
    with pytest.raises(ValueError, match="rows of at most 65536 numbers, got 65537"):
        norms.triton(torch.ones(1, 65537), torch.ones(65537), eps=1e-6)
    with pytest.raises(ValueError, match="glu/eager takes any"):
        glus.triton(wide, wide)
    with pytest.raises(ValueError, match=r"no activation 'relu'; it has \['silu', 'gelu_tanh', 'gelu'\]"):
        glus.triton(torch.ones(2, 3), torch.ones(2, 3), activation="relu")


def _cast(builder, value, dtype):
    if (value.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
        return builder.cast_impl(value, dtype)
    rounded = torch.tensor(value.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    return TensorHandle(rounded, dtype.scalar)


def laws_in_bfloat16():
    """The interpreter cannot multiply bfloat16, so the products are of the same numbers in float32; and where GPUs
    round to bfloat16, it cuts off, which is mended here."""
    InterpreterBuilder.create_fp_trunc = _cast  # type: ignore[method-assign]
    examples = log_probs_examples(range(COUNT), torch.bfloat16)
    check(table.get("log_probs", "triton"), laws_of(OPERATION), examples, sizes=((0, 2), (5, 9)), seeds=COUNT)


def problem(tokens, vocab, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * tokens + vocab)
    leaves = [torch.randn(*shape, generator=generator) for shape in ((tokens, width), (vocab, width), (vocab,))]
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    labels = torch.randint(vocab, (tokens,), generator=generator)
    return leaves, labels, torch.rand(tokens, generator=generator) + 0.5, torch.randn(3, tokens, generator=generator)


def run(fn, leaves, labels, temperature, weights, **settings):
    hidden, weight, bias = leaves
    out = fn(hidden, weight, labels, bias=bias, temperature=temperature, entropy=True, sum_squared=True, **settings)
    return out, torch.autograd.grad((torch.stack(out) * weights).sum(), leaves)


def compare(fn, tokens, vocab, width, **settings):
    leaves, *rest = problem(tokens, vocab, width)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = run(reference, exact, *rest, **settings)
    torch.testing.assert_close(
        run(fn, leaves, *rest, **settings), expected, rtol=1e-4, atol=1e-4, check_dtype=False, msg=lambda m: f"{m}\n"
    )


def tile_boundaries():
    """Sizes just below, at and above those of tiles, splits and slabs."""
    for tokens, vocab in ((15, 15), (16, 16), (17, 17), (33, 47), (32, 48), (1, 49), (49, 97), (0, 5)):
        compare(partial(triton, tiling=SMALL), tokens, vocab, 3, softcap=3.0, scale=0.5)
    for width in (15, 16, 17, 40):
        compare(partial(triton, tiling=SMALL), 17, 33, width)
    slabs = SMALL._replace(slab=16 * 4 * 33, rows=16, columns=32)
    for tokens, vocab in ((33, 65), (32, 64), (16, 31)):
        compare(partial(triton, tiling=slabs), tokens, vocab, 3)


def tensor_descriptors():
    """The path of Hopper and later."""
    for tokens, vocab, width in ((17, 33, 4), (16, 48, 16), (33, 65, 40)):
        compare(partial(triton, tiling=SMALL._replace(descriptors=True)), tokens, vocab, width)


class Locked:
    """A kernel that one thread at a time runs: the interpreter keeps its state in its modules."""

    lock = threading.Lock()

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **settings):
            with self.lock:
                self.kernel[grid](*args, **settings)

        return launch


def split_vocabulary():
    """Ranks with parts of the head give the outputs and the gradients of the whole."""
    module.log_probs_forward, module.log_probs_backward = (
        Locked(module.log_probs_forward),
        Locked(module.log_probs_backward),
    )
    leaves, labels, temperature, weights = problem(5, 40, 4)
    kernel = partial(triton, tiling=SMALL)
    out, (d_hidden, *d_head) = run(reference, leaves, labels, temperature, weights)

    def on_rank(mesh):
        axis = mesh["tensor"]
        parts = [x.detach().chunk(2)[axis.rank].clone().requires_grad_() for x in leaves[1:]]
        share = weights * (axis.rank + 1) / 3
        return run(
            partial(kernel, axis=axis), [leaves[0].detach().requires_grad_(), *parts], labels, temperature, share
        )

    ranks = simulate({"tensor": 2}, on_rank)
    for found, _ in ranks:
        torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ranks[0][1][0] + ranks[1][1][0], d_hidden, rtol=1e-4, atol=1e-5)
    for i, grad in enumerate(d_head):
        torch.testing.assert_close(torch.cat([x[1][1 + i] for x in ranks]), grad, rtol=1e-4, atol=1e-5)


def masked_words():
    """Words with a bias of -inf have probability 0, and their gradients are 0: also where they fill whole splits of the
    vocabulary, of 48 words here."""
    leaves, labels, temperature, weights = problem(4, 100, 3)
    for kernel in (triton, partial(triton, tiling=SMALL)):
        for gone in (slice(50, 100), slice(0, 50), slice(40, 97)):
            kept = torch.ones(100, dtype=torch.bool)
            kept[gone] = False
            (words,) = kept.nonzero(as_tuple=True)
            bias = leaves[2].detach().where(kept, -torch.inf).requires_grad_()
            own = words[labels % len(words)]
            found, grads = run(kernel, [*leaves[:2], bias], own, temperature, weights)
            fewer = [leaves[0], *(x.detach()[words].requires_grad_() for x in leaves[1:])]
            expected, of_fewer = run(reference, fewer, labels % len(words), temperature, weights)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            kept_grads = (grads[0], *(x[words] for x in grads[1:]))
            torch.testing.assert_close(kept_grads, of_fewer, rtol=1e-4, atol=1e-5)
            assert not grads[1][gone].any()
            assert not grads[2][gone].any()


def refusals():
    """Dtypes that the kernel is not for."""
    labels = torch.zeros(2, dtype=torch.int64)
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(ValueError, match=r"takes float32 and bfloat16, .* log_probs/reference take any"):
            triton(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype), labels)


class Wrong:
    """A kernel that gets other arguments."""

    def __init__(self, kernel, **changes):
        self.kernel, self.changes = kernel, changes

    def __getitem__(self, grid):
        def launch(**settings):
            changes = {name: change(settings[name]) for name, change in self.changes.items()}
            self.kernel[grid](**{**settings, **changes})

        return launch


def mistakes():
    """The laws of gradients see a backward program that drops an output's share, or forgets what is in the logits: in
    the case that has all, which the right program keeps in `laws_in_float32`."""
    right, gradients = module.log_probs_backward, [x for x in laws_of(OPERATION) if x.name == "gradient of all outputs"]
    examples = log_probs_examples((6,), torch.float32)

    def check_gradients():
        check(triton, gradients, examples, sizes=((3, 5),), seeds=1)

    flags = [{name: lambda flag: False} for name in ("ENTROPY", "SQUARED", "BIAS", "SOFTCAP")]
    for changes in (*flags, {"temperature": torch.ones_like}, {"scale": lambda scale: 1.0}):
        module.log_probs_backward = Wrong(right, **changes)
        with pytest.raises(LawViolation, match="gradient of"):
            check_gradients()
    module.log_probs_backward = right


CHECKS = {
    fn.__name__: fn
    for fn in (
        laws_in_float32,
        laws_in_bfloat16,
        tile_boundaries,
        tensor_descriptors,
        split_vocabulary,
        masked_words,
        refusals,
        mistakes,
        layers_in_float32,
        transforms_of_layers,
        layers_in_bfloat16,
        layers_of_other_layouts,
        writes_within_tensors,
        layer_refusals,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    assert choose_tiling(torch.ones(1, 1), torch.ones(1, 1)).stages == 1
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(f"{name}: held")
