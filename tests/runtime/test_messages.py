"""What one simulated rank sends another arrives in order, and what never comes is found."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.runtime.simulate import simulate
from fppo.runtime.watch import watched
from fppo_kernels import collectives


@st.composite
def exchanges(draw):
    """For each rank the messages that it sends, to whom and of which size, and how many receives it posts at a time."""
    ranks = draw(st.integers(2, 4))
    target = st.integers(0, ranks - 2)
    sent = [draw(st.lists(st.tuples(target, st.integers(0, 3)), max_size=6)) for _ in range(ranks)]
    return [[((rank + 1 + to) % ranks, size) for to, size in each] for rank, each in enumerate(sent)], draw(
        st.integers(1, 3)
    )


@given(exchanges())
def test_messages_between_two_ranks_arrive_in_order(exchange):
    every, ahead = exchange

    def run(mesh):
        axis = watched(mesh)[0]["pipeline"]
        own = [(to, torch.full((size,), float(10 * axis.rank + i))) for i, (to, size) in enumerate(every[axis.rank])]
        sent = [collectives.send(x, axis, target=to) for to, x in own]
        found = {}
        for source in [rank for rank in reversed(range(axis.size)) if rank != axis.rank]:
            sizes = [size for to, size in every[source] if to == axis.rank]
            found[source] = []
            for first in range(0, len(sizes), ahead):
                places = [torch.empty(size) for size in sizes[first : first + ahead]]
                begun = [collectives.receive(place, axis, source=source) for place in places]
                found[source] += [transfer.wait() for transfer in reversed(begun)][::-1]
        for transfer, (_, x) in zip(sent, own, strict=True):
            assert torch.equal(transfer.wait(), x)
            assert transfer.done()
        return found

    for rank, found in enumerate(simulate({"pipeline": len(every)}, run)):
        for source, got in found.items():
            numbers = [10.0 * source + i for i, (to, _) in enumerate(every[source]) if to == rank]
            sizes = [size for to, size in every[source] if to == rank]
            assert [x.tolist() for x in got] == [[n] * size for n, size in zip(numbers, sizes, strict=True)]


def one_message(mesh, late, shape=(1,), dtype=torch.float32):
    """A message that is sent before its receive begins, or `late`."""
    axis = mesh["pipeline"]

    def send():
        return collectives.send(torch.ones(shape, dtype=dtype), axis, target=1)

    def receive():
        return collectives.receive(torch.empty(1), axis, source=0)

    first = receive() if late and axis.rank else None if late or axis.rank else send()
    collectives.all_reduce(torch.ones(1), axis)
    transfer = first or (receive if axis.rank else send)()
    return transfer.wait().sum().item()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wrong", [{"shape": (2,)}, {"dtype": torch.float64}], ids=str)
def test_what_does_not_fit_its_place_is_an_error(wrong, late):
    assert simulate({"pipeline": 2}, partial(one_message, late=late)) == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=r"receive from rank 0 over 'pipeline': a send of .* meets a receive of"):
        simulate({"pipeline": 2}, partial(one_message, late=late, **wrong))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda axis, message: axis.rank and message.wait(), "rank 0 has ended; rank 1 waits in a receive from rank 0"),
        (
            lambda axis, message: message.wait(),
            "rank 0 waits in a receive from rank 1 .*; rank 1 waits in a receive from rank 0",
        ),
        (
            lambda axis, message: message.wait() if axis.rank else collectives.all_reduce(torch.ones(1), axis),
            "rank 0 waits in all_reduce .*; rank 1 waits in a receive",
        ),
    ],
    ids=["ended", "each other", "a collective"],
)
def test_a_message_that_never_comes_is_a_deadlock(run, message):
    def on_rank(mesh):
        axis = mesh["pipeline"]
        run(axis, collectives.receive(torch.empty(1), axis, source=1 - axis.rank))

    with pytest.raises(RuntimeError, match=message):
        simulate({"pipeline": 2}, on_rank)


def test_a_rank_that_waits_for_a_message_stops_at_anothers_error():
    def run(mesh):
        if mesh["pipeline"].rank == 0:
            raise KeyError("spilled")
        collectives.receive(torch.empty(1), mesh["pipeline"], source=0).wait()

    with pytest.raises(KeyError, match="spilled"):
        simulate({"pipeline": 2}, run)


def test_the_bytes_of_a_message_count_where_it_is_sent():
    def run(mesh):
        mesh, watch = watched(mesh)
        axis = mesh["pipeline"]
        if axis.rank == 0:
            collectives.send(torch.ones(3), axis, target=1).wait()
        else:
            collectives.receive(torch.empty(3), axis, source=0).wait()
        return watch.traffic()["pipeline"][:2]

    assert simulate({"pipeline": 2}, run) == [(1, 12), (1, 0)]
