"""Kernels keep the laws of torch.func, and each mistake in a derivative breaks the law it is there for."""

import attrs
import pytest
import torch

from fppo import laws
from fppo.laws import LawViolation
from fppo_kernels import table
from fppo_kernels.log_probs import OPERATION, chunked
from fppo_kernels.log_probs.reference import reference
from fppo_kernels.operation import TRANSFORMS, operation_of
from fppo_kernels.transforms import TwoPass, run

SMALL = attrs.evolve(OPERATION, features=OPERATION.features[:1], sizes=((1, 2), (2, 2), (3, 5)))

SLOW = {("log_probs", "cpp"), ("log_probs", "compiled"), ("attention", "eager")}


def kernels():
    """Every kernel that runs here, with its operation."""
    for op, implementations in table.BUILTIN.items():
        for name, implementation in implementations.items():
            if implementation.refuse() is None and operation_of(op).draw is not None:
                slow = [pytest.mark.slow] if (op, name) in SLOW else []
                yield pytest.param(op, name, id=f"{op}-{name}", marks=slow)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), kernels())
def test_kernels_go_through_the_transforms_of_their_record(op, name):
    operation, implementation = operation_of(op), table.BUILTIN[op][name]
    dtype = torch.float32 if "float64" in implementation.lacks else torch.float64
    arguments = {"dtypes": (dtype,), "lacks": implementation.lacks}
    if op in ("log_probs", "attention"):  # every second size: those between are for smaller counter-examples
        operation = attrs.evolve(operation, sizes=operation.sizes[4:5])
    if implementation.opaque:
        with pytest.raises(LawViolation, match=f"{op}/{name} has no derivatives under torch.func"):
            laws.check_func(operation, implementation.load(), **arguments)
    else:
        assert laws.check_func(operation, implementation.load(), **arguments) == bool(operation.transforms)


def test_transforms_have_names():
    with pytest.raises(ValueError, match="jvq"):
        laws.check_func("glu", table.get("glu", "eager"), transforms=("jvq",))
    assert not laws.check_func("gae", table.get("gae", "loop"))
    assert set(operation_of("adamw").transforms) < set(TRANSFORMS)


class _PlainFunction(torch.autograd.Function):
    """A function as most are written: torch.func refuses it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


class _WrongTangent(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]

    @staticmethod
    def jvp(ctx, *tangents):
        return 1.001 * tangents[0]


class _StopsSecond(_WrongTangent):
    """The gradient of the gradient is lost, as where a backward pass is written for one derivative alone."""

    @staticmethod
    def forward(x):
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0].detach())
        ctx.save_for_forward(inputs[0].detach())

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * 2 * ctx.saved_tensors[0].detach()

    @staticmethod
    def jvp(ctx, *tangents):
        return tangents[0] * 2 * ctx.saved_tensors[0]


class _FirstOfAMap(_WrongTangent):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return x.movedim(in_dims[0], 0)[:1].expand_as(x.movedim(in_dims[0], 0)).clone(), 0


def through(function):
    def kernel(hidden, weight, labels, **settings):
        out = reference(hidden, weight, labels, **settings)
        return out._replace(log_probs=function.apply(out.log_probs))

    return kernel


def squared(hidden, weight, labels, **settings):
    out = reference(hidden, weight, labels, **settings)
    return out._replace(log_probs=out.log_probs.square())


@pytest.mark.parametrize(
    ("kernel", "law", "op"),
    [
        (through(_PlainFunction), "grad", SMALL),
        (through(_WrongTangent), "jvp", SMALL),
        (through(_FirstOfAMap), "vmap", SMALL),
        (through(_StopsSecond), "hessian", attrs.evolve(SMALL, reference=squared)),
    ],
)
def test_each_mistake_breaks_its_law(kernel, law, op):
    with pytest.raises(LawViolation) as caught:
        laws.check_func(op, kernel)
    assert caught.value.law == law


def _cubes(pieces, forget=()):
    """x^3 y by two passes, a row at a time; `forget` leaves out a gradient of the pass back."""

    def back(options, tensors, kept, grads, needed):
        (x, y), (grad,) = tensors, grads
        return grad * 3 * x**2 * y, (grad * x**3).sum(0)

    return TwoPass(
        forward=lambda options, x, y: ((x**3 * y,), ()),
        backward=back,
        definition=lambda options, x, y: (x**3 * y,),
        rows=(True, False),
        piece=pieces,
    )


@pytest.mark.parametrize("piece", [1, 2, 5, 100])
def test_derivatives_of_pieces_add_up(piece):
    """Second and third derivatives of an operation whose definition is differentiated some rows at a time."""
    x, y = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = y[0]
    passes = _cubes(piece)
    fn = lambda x, y: run(passes, None, x, y)[0].square().sum()  # noqa: E731
    plain = lambda x, y: (x**3 * y).square().sum()  # noqa: E731
    for argnum in (0, 1):
        found, expected = (torch.func.hessian(f, argnums=argnum)(x, y) for f in (fn, plain))
        torch.testing.assert_close(found, expected)
    thrice = [torch.func.grad(torch.func.grad(torch.func.grad(lambda s, f=f: f(s * x, y)))) for f in (fn, plain)]
    torch.testing.assert_close(*(each(torch.tensor(1.3, dtype=torch.float64)) for each in thrice))
    of = lambda x, y: run(passes, None, x, y)[0]  # noqa: E731
    leaves = x.requires_grad_(), y.requires_grad_()
    assert torch.autograd.gradcheck(of, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(of, leaves, check_fwd_over_rev=True)


def test_memory_of_a_hessian_vector_product_is_that_of_a_piece(monkeypatch):
    """No derivative of chunked log-probs holds logits of more tokens than a piece."""
    seen = []

    def definition(options, *tensors):
        seen.append(len(tensors[0]))
        return chunked._definition(options, *tensors)

    monkeypatch.setattr(chunked, "_PASSES", attrs.evolve(chunked._PASSES, piece=4, definition=definition))
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 3, dtype=torch.float64, generator=draw) for n in (10, 7))
    labels = torch.randint(7, (10,), generator=draw)
    fn = lambda h, w: chunked.chunked(h, w, labels).log_probs.square().sum()  # noqa: E731
    torch.func.jvp(torch.func.grad(fn, argnums=(0, 1)), (hidden, weight), (hidden, weight))
    assert seen
    assert max(seen) == 4


class _Beside(torch.autograd.Function):
    """The first of two arguments, off by little in a map over it alone."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x, other):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        del ctx, inputs, output

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None

    @staticmethod
    def vmap(info, in_dims, x, other):
        return x * (1 + 1e-6 * (in_dims[1] is None)), in_dims[0]


def test_a_map_over_one_argument_that_shares_the_others_is_seen():
    glu = table.get("glu", "eager")

    def kernel(gate, up, *, activation):
        return glu(_Beside.apply(gate, up), up, activation=activation)

    with pytest.raises(LawViolation, match=r"vmap\(grad\) over the first"):
        laws.check_func("glu", kernel, transforms=("vmap",))
