"""Updates and passes that run out of memory: cut in half and repeated, with the numbers of those that fitted."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import losses, tree
from fppo._errors import RunFailed
from fppo.key import Key
from fppo.metrics import report
from fppo.runtime import fsdp
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs, compute_values
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny
from tests.limited import FailingAt, Limited

OPTIMIZER = adamw(schedule("constant", 1e-3))
AUTO = MicroBatching(token_budget=16384, halve_on_oom=True)
ROWS = 16


def stage(head, cut, *, epochs=2):
    """An update of mini-batches of 8 rows, its first state, and a batch."""
    model, params = tiny.model_and_params(head)
    make = partial(UpdateActor, loss_fn=losses.ppo_clip) if head == "lm" else UpdateCritic
    loop = Loop(mini_batch_size=8, micro_batching=cut, epochs=epochs)
    update = make(forward=Forward(model), optimizer=OPTIMIZER, loop=loop)
    return update, init_state(params, OPTIMIZER), tiny.experience(3, ROWS, prompt=12, response=20)


def peak_of(cut, head="lm"):
    """The most bytes that are alive in an update."""
    update, state, batch = stage(head, cut)
    with Limited() as limited:
        update(state, batch, key=Key(1))
    return limited.peak


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_an_update_under_a_limit_is_the_update_without_one(head, share):
    update, state, batch = stage(head, AUTO)
    whole, numbers = update(state, batch, key=Key(1))
    least, most = peak_of(MicroBatching(size=1), head), peak_of(AUTO, head)
    with Limited(limit := least + share * (most - least)) as limited:
        fitted, found = update(state, batch, key=Key(1))
    assert limited.failures > 0, "the limit is too wide to test anything"
    with Limited(limit) as limited:
        update(tree.replace(state, token_budget=fitted.token_budget), batch, key=Key(1))
    assert limited.failures == 0, "an update begins with what fitted the one before"
    assert 0 < fitted.token_budget < sum(batch.attention_mask.sum(1).tolist())
    assert whole.token_budget == AUTO.token_budget
    for name, x in whole.params.items():
        torch.testing.assert_close(fitted.params[name], x, rtol=1e-10, atol=1e-12)
    same = {name: x for name, x in report(numbers).items() if not name.startswith("perf/")}
    assert {name: x for name, x in report(found).items() if name in same} == pytest.approx(same, rel=1e-9, abs=1e-12)


@pytest.mark.slow
def test_a_row_that_does_not_fit_by_itself_is_named_with_what_helps():
    update, state, batch = stage("lm", AUTO)
    longest = int(batch.attention_mask.sum(1).max())
    with (
        Limited(0.9 * peak_of(MicroBatching(size=1))),
        pytest.raises(RunFailed, match=r"actor: one row of \d+ tokens") as error,
    ):
        update(state, batch, key=Key(1))
    assert "model.checkpoint_layers" in str(error.value)
    assert int(str(error.value).split("one row of ")[1].split()[0]) <= longest


@pytest.mark.slow
def test_a_fixed_budget_is_not_changed():
    update, state, batch = stage("lm", MicroBatching(token_budget=16384))
    with Limited(0.9 * peak_of(AUTO)), pytest.raises(torch.OutOfMemoryError):
        update(state, batch, key=Key(1))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
    ids=repr,
)
def test_a_host_without_memory_fails_in_several_ways(error):
    update, state, batch = stage("lm", AUTO)

    def full(*args, **kwargs):
        raise error

    with pytest.raises(RunFailed, match="one row of"):
        attrs.evolve(update, loss_fn=full)(state, batch, key=Key(1))


def test_another_error_of_a_pass_is_not_repeated():
    update, state, batch = stage("lm", AUTO)
    calls = []

    def wrong(*args, **kwargs):
        calls.append(1)
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        attrs.evolve(update, loss_fn=wrong)(state, batch, key=Key(1))
    assert len(calls) == 1


def on_ranks(run, modes, *, stage=3, prefetch=True):
    """What `run(mesh, mode)` returns on each of two ranks that share their parameters."""

    def ranked(mesh, mode):
        return run(attrs.evolve(mesh, sharding=Sharding(stage=stage, prefetch=prefetch)), mode)

    return simulate({"shard": 2}, ranked, modes)


def on_shards(mesh, mode, model, params, batch, cut, *, epochs=1, budget=None):
    """An actor's update of a rank's shards within a mode: parameters, the budget that is remembered, and metrics."""
    state = tree.replace(init_state(fsdp.shard(params, mesh), OPTIMIZER), token_budget=budget)
    loop = Loop(mini_batch_size=8, micro_batching=cut, epochs=epochs)
    actor = UpdateActor(forward=Forward(model, mesh=mesh), optimizer=OPTIMIZER, loop=loop, loss_fn=losses.ppo_clip)
    with mode:
        state, found = actor(state, batch, key=Key(1))
    whole = fsdp.gather(state.params, model.shapes, mesh)
    return {name: x.detach() for name, x in whole.items()}, state.token_budget, report(found)


def check_equal(found, expected):
    """Hold the result of `on_shards` on each rank against another."""
    for (params, _, numbers), (wanted, _, others) in zip(found, expected, strict=True):
        for name, x in wanted.items():
            torch.testing.assert_close(params[name], x, rtol=1e-10, atol=1e-12)
        same = {name: x for name, x in others.items() if not name.startswith("perf/")}
        assert {name: x for name, x in numbers.items() if name in same} == pytest.approx(same, rel=1e-9, abs=1e-12)


OTHERS = [
    pytest.param(*case, marks=pytest.mark.slow) for case in ((1, True, False), (2, False, False), (3, True, False))
]


@pytest.mark.parametrize(("stage", "prefetch", "again"), [(3, True, True), *OTHERS])
def test_ranks_that_share_parameters_wait_for_one_that_runs_out_anywhere(stage, prefetch, again):
    """In any operation of a pass, forward or backward, also as it gathers parameters."""
    model, params = tiny.model_and_params("lm")
    model = attrs.evolve(model, checkpoint_layers=again)
    batch, cut = tiny.experience(3, 8, prompt=6, response=8), MicroBatching(token_budget=60, halve_on_oom=True)
    run = partial(on_shards, model=model, params=params, batch=batch, cut=cut)
    ranked = partial(on_ranks, run, stage=stage, prefetch=prefetch)
    expected = ranked(counts := [FailingAt(), FailingAt()])
    assert [budget for _, budget, _ in expected] == [60, 60]
    for place in range(6):
        modes = [FailingAt(), FailingAt()]
        modes[place % 2].number = place * counts[place % 2].calls // 7  # the last seventh is the optimizer's step
        found = ranked(modes)
        (budget,) = {budget for _, budget, _ in found}
        assert budget < 60, "the ranks remember one budget"
        check_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "share", "short"), [(1, 0.5, (1,)), (3, 0.3, (0, 1))])
def test_an_update_of_shards_under_a_limit_is_the_update_without_one(stage, share, short):
    batch = tiny.experience(3, ROWS, prompt=12, response=20)
    run = partial(on_shards, **dict(zip(("model", "params"), tiny.model_and_params("lm"))), batch=batch, epochs=2)
    ranked = partial(on_ranks, stage=stage)
    expected = ranked(partial(run, cut=AUTO), most := [Limited(), Limited()])
    ranked(partial(run, cut=MicroBatching(size=1)), least := [Limited(), Limited()])
    limits = [
        low.peak + share * (high.peak - low.peak) if rank in short else float("inf")
        for rank, (low, high) in enumerate(zip(least, most, strict=True))
    ]
    found = ranked(partial(run, cut=AUTO), modes := [Limited(limit) for limit in limits])
    assert [mode.failures > 0 for mode in modes] == [rank in short for rank in range(2)]
    check_equal(found, expected)
    (budget,) = {budget for _, budget, _ in found}
    assert budget < AUTO.token_budget
    ranked(partial(run, cut=AUTO, budget=budget), modes := [Limited(limit) for limit in limits])
    assert [mode.failures for mode in modes] == [0, 0], "an update begins with what fitted the one before"


@pytest.mark.parametrize("stage", [1, 3])
def test_passes_without_a_gradient_wait_for_a_rank_that_runs_out(stage):
    """One rank has more rows than the other."""
    model, params = tiny.model_and_params("lm")
    batch, cut = tiny.experience(3, ROWS, prompt=6, response=8), MicroBatching(token_budget=60, halve_on_oom=True)

    def run(mesh, mode):
        rows = batches.rows(batch, range(ROWS) if mesh["shard"].rank else range(5))
        shards, forward = fsdp.shard(params, mesh), Forward(model, mesh=mesh)
        with mode:
            return compute_log_probs(shards, rows, forward=forward, micro_batching=cut)

    expected = on_ranks(run, counts := [FailingAt(), FailingAt()], stage=stage)
    for place in range(4):
        modes = [FailingAt(), FailingAt()]
        modes[place % 2].number = place * counts[place % 2].calls // (8 if place % 2 else 12)  # not in a blank pass
        for found, wanted in zip(on_ranks(run, modes, stage=stage), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "compute"), [("lm", compute_log_probs), ("value", compute_values)])
def test_passes_without_a_gradient_are_cut_where_they_do_not_fit(head, compute):
    model, params = tiny.model_and_params(head)
    batch = tiny.experience(3, ROWS, prompt=30, response=30)
    run = partial(compute, params, batch, forward=Forward(model))
    whole = run(micro_batching=AUTO)
    peaks = []
    for cut in (MicroBatching(size=1), AUTO):
        with Limited() as limited:
            run(micro_batching=cut)
        peaks.append(limited.peak)
    with Limited(peaks[0] + 0.5 * (peaks[1] - peaks[0])) as limited:
        found = run(micro_batching=AUTO)
    assert 0 < limited.failures < 6
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)
    with Limited(0.9 * peaks[0]), pytest.raises(RunFailed, match=r"a pass for .*: one row of .* does not fit"):
        run(micro_batching=AUTO)


def test_only_a_token_budget_can_be_halved():
    with pytest.raises(ValueError, match="give token_budget in place of size"):
        MicroBatching(size=1, halve_on_oom=True)
