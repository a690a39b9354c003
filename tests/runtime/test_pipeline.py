"""A function cut into stages has the value and the gradient of the whole one, by any schedule."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo.grad import value_and_grad
from fppo.runtime import pipeline
from fppo.runtime.pipeline import Wire, pipeline_forward, pipeline_value_and_grad
from fppo.runtime.schedule import Action, Schedule, all_forward, clocked, one_f_one_b
from fppo.runtime.simulate import simulate

WIDTH = 3


def stage_of(params, stage, received, micro, *, stages, rows):
    """tanh(x W_stage), the last one with a loss over a number that all stages have."""
    x = rows[micro] if received is None else received
    out = (x @ params[f"w{stage}"]).tanh()
    if stage < stages - 1:
        return out
    loss = (out * params["both"]).sum()
    return loss, {"rows": len(x), "sum": out.sum()}


def case(stages, micros):
    generator = torch.Generator().manual_seed(stages + 10 * micros)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    params = {f"w{stage}": draw(WIDTH, WIDTH) for stage in range(stages)} | {"both": draw(WIDTH)}
    return params, [draw(micro % 3, WIDTH) for micro in range(1, micros + 1)]  # one without rows


def whole(params, rows, stages):
    total = 0.0
    for x in rows:
        for stage in range(stages):
            x = (x @ params[f"w{stage}"]).tanh()
        total = total + (x * params["both"]).sum()
    return total


def on_ranks(ranks, chunks, micros, schedule, fn=stage_of):
    stages = ranks * chunks
    params, rows = case(stages, micros)

    def wires(micro):
        return Wire((len(rows[micro]), WIDTH), torch.float64, torch.device("cpu"))

    def run(mesh):
        axis = mesh["pipeline"]
        own = {name: x for name, x in params.items() if name == "both" or int(name[1:]) % ranks == axis.rank}
        call = lambda *args: fn(*args, stages=stages, rows=rows)  # noqa: E731
        return pipeline_value_and_grad(call, own, schedule, axis=axis, wires=wires), pipeline_forward(
            call, own, all_forward(ranks, micros, chunks), axis=axis, wires=wires
        )

    return params, rows, simulate({"pipeline": ranks}, run)


def assert_same(ranks, chunks, micros, schedule, fn=stage_of):
    params, rows, found = on_ranks(ranks, chunks, micros, schedule, fn)
    loss, expected = value_and_grad(whole)(params, rows, ranks * chunks)
    for rank, ((reports, grads), outputs) in enumerate(found):
        assert len(reports) == len(outputs) == (micros if rank == ranks - 1 else 0)
        for name, grad in grads.items():
            if name != "both" or rank == ranks - 1:
                torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-13)
    reports, outputs = found[-1][0][0], found[-1][1]
    torch.testing.assert_close(sum(value for value, _ in reports), loss, rtol=1e-12, atol=1e-12)
    assert [aux["rows"] for _, aux in reports] == [len(x) for x in rows]
    assert not any(x.requires_grad for value, aux in reports for x in (value, aux["sum"]))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(reports, outputs, strict=True))


@given(ranks=st.integers(2, 4), chunks=st.integers(1, 3), groups=st.integers(1, 3), more=st.integers(0, 3))
def test_stages_together_are_the_whole(ranks, chunks, groups, more):
    micros = groups * ranks + (more if chunks == 1 else 0)
    assert_same(ranks, chunks, micros, one_f_one_b(ranks, micros, chunks))


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (3, 1), (2, 2)])
def test_losses_of_earlier_stages_add_to_the_gradient(ranks, chunks):
    """Every second stage has one, as routers have."""
    stages, micros = ranks * chunks, 2 * ranks

    def with_own(params, stage, received, micro, *, stages, rows):
        out = stage_of(params, stage, received, micro, stages=stages, rows=rows)
        under_grad = torch.is_grad_enabled() and stage < stages - 1 and stage % 2 == 0
        return (out, out.square().sum() * (1 + stage)) if under_grad else out

    def summed(params, rows):
        total = whole(params, rows, stages)
        for x in rows:
            for stage in range(stages - 1):
                x = (x @ params[f"w{stage}"]).tanh()
                total = total + x.square().sum() * (1 + stage) * (stage % 2 == 0)
        return total

    with torch.no_grad():  # of the forward passes; the others turn gradients on
        params, rows, found = on_ranks(ranks, chunks, micros, one_f_one_b(ranks, micros, chunks), with_own)
    _, expected = value_and_grad(summed)(params, rows)
    for (_, grads), _ in found:
        for name in grads.keys() - {"both"}:
            torch.testing.assert_close(grads[name], expected[name], rtol=1e-12, atol=1e-13)


def test_a_schedule_of_ones_own_runs():
    """All forward, then all backward, the last rank in another order than the first sends."""
    forward = all_forward(2, 3).actions
    order = [(2, 0, 1), (1, 2, 0)]
    own = tuple(
        (*passes, *(Action("backward", rank, micro) for micro in order[rank])) for rank, passes in enumerate(forward)
    )
    assert_same(2, 1, 3, Schedule(own))


def test_a_loss_without_gradients_gives_zeros():
    def constant(params, stage, received, micro, *, stages, rows):
        out = stage_of(params, stage, received, micro, stages=stages, rows=rows)
        return (out[0].detach(), out[1]) if stage == stages - 1 else out

    _, _, found = on_ranks(2, 1, 2, one_f_one_b(2, 2), constant)
    assert all((grad == 0).all() for (_, grads), _ in found for grad in grads.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_bfloat16_add_up_in_the_dtype_that_is_asked_for(ranks):
    """In bfloat16 256 + 1 is 256: the gradients of 300 micro-batches would stop there."""
    micros, one = 300, torch.ones(1, dtype=torch.bfloat16)

    def stage(params, number, received, micro):
        if number < ranks - 1:
            return params["w"] * 1.0
        return ((params["w"] if received is None else received + params["w"]).sum().float(), {})

    def run(mesh):
        wire = Wire((1,), torch.bfloat16, torch.device("cpu"))
        schedule = one_f_one_b(ranks, micros, 1)
        own = {"axis": mesh["pipeline"], "wires": lambda micro: wire}
        return [
            pipeline_value_and_grad(stage, {"w": one}, schedule, **own, dtypes=kind)[1]["w"]
            for kind in ([torch.float32], None)
        ]

    for wide, narrow in simulate({"pipeline": ranks}, run) if ranks > 1 else simulate({}, run):
        assert (wide.dtype, wide.item()) == (torch.float32, micros)
        assert (narrow.dtype, narrow.item()) == (torch.bfloat16, 256.0)


def test_what_the_next_stage_does_not_expect_is_refused():
    def wide(params, stage, received, micro, *, stages, rows):
        out = stage_of(params, stage, received, micro, stages=stages, rows=rows)
        return out if stage == stages - 1 else out.float()

    with pytest.raises(ValueError, match=r"stage 0 gives torch.float32 \[1, 3\], but its neighbour expects torch.f"):
        on_ranks(2, 1, 2, one_f_one_b(2, 2), wide)


def test_what_was_sent_is_not_kept():
    """A stage keeps of its result what its backward pass reads, here nothing."""
    alive = []

    def shifted(params, stage, received, micro, *, stages, rows):
        x = rows[micro] if received is None else received
        if stage == stages - 1:
            return (x * params["both"]).sum(), None
        out = x + params[f"w{stage}"].sum()
        alive.append(sum(x() is not None for x in sent))
        sent.append(weakref.ref(out))
        return out

    sent = []
    on_ranks(
        2,
        1,
        4,
        Schedule(tuple((*a, *(Action("backward", *x[1:]) for x in a)) for a in all_forward(2, 4).actions)),
        shifted,
    )
    assert max(alive) == 1


def lost_term(self, grads):
    add(self, [None if self._counts[place] == 1 else grad for place, grad in enumerate(grads)])


add = pipeline._Sum.add
take = pipeline._Mail.take


def own_gradient(self, action):
    x = take(self, action)
    return torch.ones_like(x) if action.kind == "backward" else x


@pytest.mark.parametrize(
    ("home", "name", "mistake"),
    [
        (pipeline._Sum, "add", lost_term),
        (pipeline._Mail, "take", own_gradient),
    ],
)
def test_a_mistake_is_seen(home, name, mistake, monkeypatch):
    monkeypatch.setattr(home, name, mistake)
    with pytest.raises(AssertionError):
        assert_same(3, 1, 4, one_f_one_b(3, 4))


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([1.0, 2.0]))
def test_a_rank_keeps_as_many_results_as_there_are_ranks_behind_it(ranks, micros, backward):
    """What 1F1B is for: r of n ranks keeps min(n - r, m) of m, and waits for (n - 1) / (m + n - 1) of the time."""
    clock = clocked(one_f_one_b(ranks, micros), backward=backward)
    assert clock.kept == tuple(min(ranks - rank, micros) for rank in range(ranks))
    assert clock.bubble == pytest.approx((ranks - 1) / (micros + ranks - 1))
    assert clock.time == pytest.approx((1 + backward) * (micros + ranks - 1))
    assert clocked(all_forward(ranks, micros)).kept == (0,) * ranks
