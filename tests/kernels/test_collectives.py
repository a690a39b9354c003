"""Collectives keep their laws, and the laws see the usual mistakes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.laws import LawViolation, check_all_to_all, check_collective, check_collectives
from fppo.laws import collectives as laws
from fppo.runtime.simulate import simulate
from fppo_kernels import collectives
from fppo_kernels.collectives import Axis
from fppo_kernels.table import Kernels


@pytest.fixture
def two_dtypes(monkeypatch):
    """Two of the laws' dtypes: one whose sums are rounded, and one without gradients."""
    monkeypatch.setattr(laws, "DTYPES", (torch.bfloat16, torch.int64))


@pytest.mark.slow
@pytest.mark.usefixtures("two_dtypes")
def test_all_keep_their_laws_also_on_three_ranks():
    check_collectives(ranks=(1, 3))


@pytest.mark.slow
def test_the_records_all_to_all_keeps_its_laws():
    check_all_to_all(Kernels.named().all_to_all, ranks=(1, 2))


@given(
    ranks=st.sampled_from([2, 4, 8]),
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    dims=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    seed=st.integers(0, 2**31),
)
def test_products_with_a_collective_are_products_with_its_gradient(ranks, shape, dims, seed):
    """Sum over ranks <f(x), y> = <x, f^T(y)>, to 1e-12, for numbers that are not whole."""
    shape = [n * ranks for n in shape]
    split, concat = (d % len(shape) for d in dims)
    calls = [
        lambda x, a: collectives.all_gather(x, a, dim=concat),
        lambda x, a: collectives.reduce_scatter(x, a, dim=split),
        collectives.all_reduce,
        lambda x, a: collectives.all_to_all(x, a, split_dim=split, concat_dim=concat),
        lambda x, a: collectives.broadcast(x, a, source=seed % ranks),
        lambda x, a: collectives.permute(x, a, shift=1 + seed % ranks),
    ]

    def products(mesh):
        axis, found = mesh["shard"], []
        generator = torch.Generator().manual_seed(seed + axis.rank)
        for call in calls:
            x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
            out = call(x, axis)
            y = torch.randn(out.shape, generator=generator, dtype=torch.float64)
            (grad,) = torch.autograd.grad((out * y).sum(), x)
            found.append([(out * y).sum().detach(), (x * grad).sum().detach()])
        return torch.tensor(found)

    left, right = torch.stack(simulate({"shard": ranks}, products)).sum(0).unbind(1)
    torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


def test_sizes_that_do_not_divide_are_named():
    x = torch.zeros(3, 5)
    with pytest.raises(
        ValueError, match=r"reduce_scatter: dimension 1 of a tensor \[3, 5\] has the size 5, which 2 ranks"
    ):
        collectives.reduce_scatter(x, Axis(2, 0), dim=1)
    with pytest.raises(ValueError, match=r"all_to_all: dimension 0 .* size 3, .* pad it to a multiple of 2"):
        collectives.all_to_all(x, Axis(2, 0), split_dim=0, concat_dim=1)
    with pytest.raises(ValueError, match=r"exchange: x has 3 rows, but sent = \[2, 2\] has 4"):
        collectives.exchange(x, Axis(2, 0), sent=[2, 2], received=[1, 1])
    with pytest.raises(ValueError, match=r"exchange: x has 3 rows, but sent = \[1, 1\] has 2"):
        collectives.exchange(x, Axis(2, 0), sent=[1, 1], received=[1, 1])


class WithBackward(torch.autograd.Function):
    """A collective forward, something else backward."""

    @staticmethod
    def forward(ctx, x, fn, backward):
        ctx.backward_fn = backward
        return fn(x)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.backward_fn(grads[0]), None, None


def reversed_gather(x, axis, *, dim=0):
    return x if axis.size == 1 else collectives.all_gather(x, axis, dim=dim).flip(dim)


def mean_scatter(x, axis, *, dim=0):
    return x if axis.size == 1 else collectives.reduce_scatter(x, axis, dim=dim) // axis.size


def gradient_of_one(x, axis):
    """The gradient of an all_reduce as if only this rank had used the sum."""
    return x if axis.size == 1 else WithBackward.apply(x, lambda x: collectives.all_reduce(x, axis), lambda g: g)


def gather_without_sum(x, axis, *, dim=0):
    """The gradient of an all_gather as this rank's part of its own gradient."""
    if axis.size == 1:
        return x
    own = slice(axis.rank * x.shape[dim], (axis.rank + 1) * x.shape[dim])

    def backward(grad):
        return grad.movedim(dim, 0)[own].movedim(0, dim)

    return WithBackward.apply(x, lambda x: collectives.all_gather(x, axis, dim=dim), backward)


def same_dims_backward(x, axis, *, split_dim, concat_dim):
    def call(x):
        return collectives.all_to_all(x, axis, split_dim=split_dim, concat_dim=concat_dim)

    return x if axis.size == 1 else WithBackward.apply(x, call, call)


def kept_gradient(x, axis, *, source=0):
    return (
        x
        if axis.size == 1
        else WithBackward.apply(x, lambda x: collectives.broadcast(x, axis, source=source), lambda g: g)
    )


def wrong_way(x, axis, *, shift=1):
    return collectives.permute(x, axis, shift=-shift)


def in_other_order(x, axis, *, sent, received):
    if axis.size == 1:
        return x
    out = collectives.exchange(x, axis, sent=sent, received=received)
    return torch.cat(out.split(received)[::-1])


def one_way(x, axis, *, sent, received):
    def call(x):
        return collectives.exchange(x, axis, sent=sent, received=received)

    return x if axis.size == 1 else WithBackward.apply(x, call, lambda g: x.new_zeros(x.shape))


def in_place(x, axis):
    return x if axis.size == 1 else x.data.copy_(collectives.all_reduce(x.detach(), axis)) + x - x.detach()


def copies_on_one_rank(x, axis):
    return collectives.all_reduce(x, axis).clone()


def truncates(x, axis, *, dim=0):
    size = x.shape[dim] // axis.size * axis.size
    return x if axis.size == 1 else collectives.reduce_scatter(x.narrow(dim, 0, size), axis, dim=dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "name", "law"),
    [
        (reversed_gather, "all_gather", "values"),
        (mean_scatter, "reduce_scatter", "values"),
        (gradient_of_one, "all_reduce", "transpose"),
        (gather_without_sum, "all_gather", "transpose"),
        (same_dims_backward, "all_to_all", "transpose"),
        (kept_gradient, "broadcast", "transpose"),
        (in_other_order, "exchange", "values"),
        (one_way, "exchange", "transpose"),
        (wrong_way, "permute", "values"),
        (in_place, "all_reduce", "purity"),
        (copies_on_one_rank, "all_reduce", "one rank"),
        (truncates, "reduce_scatter", "uneven sizes"),
    ],
)
@pytest.mark.usefixtures("two_dtypes")
def test_the_laws_see_mistakes(kernel, name, law, monkeypatch):
    monkeypatch.setattr(laws, "CASES", 4)
    with pytest.raises(LawViolation) as caught:
        check_collective(kernel, name, ranks=(1, 3))
    assert f'"{law}"' in str(caught.value)


def test_there_is_no_other_collective():
    with pytest.raises(ValueError, match="no collective 'scatter'; there are"):
        check_collective(collectives.all_gather, "scatter")


def test_of_what_all_ranks_compute_alike_one_gradient_counts():
    def run(mesh):
        x = torch.arange(3.0).requires_grad_()
        out = collectives.same(collectives.all_reduce(x, mesh["tensor"]), mesh["tensor"])
        return out.detach(), torch.autograd.grad((out * torch.tensor([1.0, 2.0, 3.0])).sum(), x)[0]

    for out, grad in simulate({"tensor": 2}, run):
        assert out.tolist() == [0.0, 2.0, 4.0]
        assert grad.tolist() == [1.0, 2.0, 3.0]


def test_a_message_goes_by_the_lane_of_its_direction_where_there_is_one(monkeypatch):
    """A lane has two ranks, in rank order; without one the message goes by the axis's group."""
    went = []
    for name, end in (("isend", "group_dst"), ("irecv", "group_src")):
        monkeypatch.setattr(
            torch.distributed, name, lambda x, *, group, name=name, end=end, **to: went.append((name, group, to[end]))
        )
    axis = Axis(4, 1, "all", lanes={(0, 1): "0 to 1", (1, 0): "1 to 0", (1, 2): "1 to 2", (2, 1): "2 to 1"})
    for other in (0, 2, 3):
        collectives.send(torch.ones(1), axis, target=other)
        collectives.receive(torch.ones(1), axis, source=other)
    assert went == [
        *(("isend", "1 to 0", 0), ("irecv", "0 to 1", 0)),
        *(("isend", "1 to 2", 1), ("irecv", "2 to 1", 1)),
        *(("isend", "all", 3), ("irecv", "all", 3)),
    ]
