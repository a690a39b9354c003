"""Passes and updates over the stages of a pipeline are those of the whole model."""

from functools import cache, partial

import attrs
import pytest
import torch

from fppo import losses, metrics, models, tree
from fppo.key import Key
from fppo.runtime.layout import Layout
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.runtime.offload import Lane, OnHost
from fppo.runtime.schedule import Action, Schedule, all_forward
from fppo.runtime.simulate import simulate
from fppo.steps import stages as staging
from fppo.steps.actor import PolicyTerms, SelectiveLoss, UpdateActor
from fppo.steps.forward import (
    Forward,
    compute_outputs,
    compute_values,
    forward_micro_batch,
)
from fppo.steps.loop import Loop, Objective, update
from fppo.steps.loss_scale import loss_scaled
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.optimizers import adamw, lion
from fppo.steps.packed import indices_of
from fppo.steps.scores import compute_reward_scores
from fppo.steps.supervised import UpdateSupervised
from fppo.steps.train_state import init_state
from tests import tiny

BATCH = tiny.experience(3, 6)
MESHES = [
    ({"pipeline": 2, "shard": 2}, 2),
    pytest.param({"pipeline": 2, "tensor": 2}, 1, marks=pytest.mark.slow),
]
OUTPUTS = ("log_probs", "entropy", "sum_squared_probs")


@cache
def deep(head="lm", layers=4, **changes):
    model = models.build(tiny.config(num_hidden_layers=layers), head=head)
    params = models.init_params(model, Key(0))
    noise = Key(0).fold("noise").generator()
    wide = {n: p.double() + 0.1 * torch.randn(p.shape, generator=noise, dtype=torch.float64) for n, p in params.items()}
    return attrs.evolve(model, **changes), wide


def ready(mesh, virtual=1, stage=3):
    sharding = Sharding(stage=stage) if mesh["shard"].size > 1 else None
    return attrs.evolve(mesh, sharding=sharding, virtual_stages=virtual)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "virtual"), MESHES, ids=str)
def test_outputs_values_and_scores_are_those_of_one_process(axes, virtual):
    (policy, policy_params), (critic, critic_params) = deep(), deep("value")

    def run(mesh):
        mesh = ready(mesh, virtual) if mesh.axes else mesh
        cut, found = {"micro_batching": MicroBatching(size=2)}, []
        for model, params in ((policy, policy_params), (critic, critic_params)):
            placed = models.place(model, mesh)
            own, forward = models.own_params(placed, params, mesh), Forward(placed, mesh=mesh)
            if model is policy:
                found += compute_outputs(own, BATCH, forward=forward, outputs=OUTPUTS, temperature=0.8, **cut)[:3]
            else:
                found += [compute_values(own, BATCH, forward=forward, **cut)]
                found += [compute_reward_scores(own, BATCH, forward=forward, **cut)]
        return found

    (expected,) = simulate({}, run)
    for found in simulate(axes, run):
        for x, wanted in zip(found, expected, strict=True):
            tolerance = 1e-11 if x.dtype == torch.float64 else 1e-6
            torch.testing.assert_close(x, wanted, rtol=tolerance, atol=tolerance)


def updated(mesh, update, *, optimizer, virtual=1, layers=4, **loop):
    """Whole parameters and metrics after two mini-batches."""
    mesh = ready(mesh, virtual)
    model, params = deep(layers=layers)
    placed = models.place(model, mesh)
    state, report = update(
        forward=Forward(placed, mesh=mesh),
        loop=Loop(mini_batch_size=4, micro_batching=MicroBatching(size=2), **loop),
        optimizer=optimizer,
    )(init_state(models.own_params(placed, params, mesh), optimizer), BATCH, key=Key(1))
    return models.whole_params(placed, state.params, mesh), metrics.report(report)


def assert_same(axes, update, *, optimizer=None, layers=4, **settings):
    optimizer = optimizer or adamw(lambda step: 0.1, betas=(0.0, 0.9), eps=1.0)
    call = partial(updated, update=update, optimizer=optimizer, layers=layers)
    ((params, report),) = simulate({}, call)
    for got, numbers in simulate(axes, partial(call, **settings)):
        assert numbers == pytest.approx(report, rel=1e-10, abs=1e-10, nan_ok=True)
        for name, x in params.items():
            torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-10, msg=name)


def likely(log_probs, old_log_probs, advantages, mask, *, noise):
    return mask & (noise > (log_probs.where(mask, 0.0).sum() / mask.sum()).exp())


UPDATES = {
    "supervised": UpdateSupervised,
    "selective": partial(UpdateActor, loss_fn=SelectiveLoss(losses.kl_cov, likely)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_one_process(name):
    """The supervised one with a loss that is scaled."""
    own = loss_scaled(adamw(lambda step: 0.1, betas=(0.0, 0.9), eps=1.0)) if name == "supervised" else None
    assert_same({"pipeline": 2}, UPDATES[name], optimizer=own, virtual=2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_ranks_with_some_of_the_rows_select_tokens_and_weigh_rows_of_all(axis):
    """By all of a mini-batch, as one process does, and each takes those of its own rows."""
    update = partial(UPDATES["selective"], terms=PolicyTerms(nll_coef=0.5, temperature=0.7))
    assert_same({axis: 2}, update)


@pytest.mark.slow
def test_more_ranks_than_stages_on_each_take_turns_too():
    """Two micro-batches, and a blank one, as stages in turns need as many as there are ranks."""
    assert_same({"pipeline": 3}, UpdateSupervised, virtual=2, layers=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "optimizer"),
    [({"pipeline": 2, "shard": 2}, muon(lambda step: 0.1)), ({"pipeline": 2, "tensor": 2}, lion(lambda step: 0.1))],
    ids=["muon, of whole matrices", "lion, of elements"],
)
def test_optimizers_are_those_of_one_process(axes, optimizer):
    assert_same(axes, partial(UpdateActor, loss_fn=losses.gpg), optimizer=optimizer)


def backward_last(ranks, micros, virtual_stages):
    """All forward, then all backward."""
    every = all_forward(ranks, micros, virtual_stages)
    back = [[Action("backward", *action[1:]) for action in reversed(actions)] for actions in every.actions]
    return Schedule(tuple((*actions, *own) for actions, own in zip(every.actions, back, strict=True)))


def test_a_schedule_of_ones_own_runs():
    assert_same({"pipeline": 2}, partial(UpdateActor, loss_fn=losses.gpg), stage_schedule=backward_last, virtual=2)


WIDE = "without bfloat16 products the sums of torch's own depend on where in memory the weights lie"


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason=WIDE)
@pytest.mark.parametrize(("stage", "again"), [(1, True), (2, False), (3, False), (3, True)])
def test_bfloat16_stages_on_shards_have_the_bits_of_whole_parameters(stage, again):
    """Two ranks of whole parameters, and two of shards with the same casts: each has one micro-batch."""
    model, params = deep(compute_dtype=torch.bfloat16, checkpoint_layers=again)
    params = {name: x.float() for name, x in params.items()}
    optimizer = adamw(lambda step: 0.1, eps=1.0, max_grad_norm=None)  # shards add up a norm in another order

    def run(mesh):
        mesh = ready(mesh, stage=stage)
        placed = models.place(model, mesh)
        state, _ = UpdateActor(
            forward=Forward(placed, mesh=mesh),
            loss_fn=losses.gpg,
            loop=Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6)),
            optimizer=optimizer,
        )(init_state(models.own_params(placed, params, mesh), optimizer), tiny.experience(3, 6, dtype=torch.float32))
        return tree.digest(models.whole_params(placed, state.params, mesh))

    found = [*simulate({"pipeline": 2, "shard": 2}, run), *simulate({"pipeline": 2, "replicate": 2}, run)]
    assert all(digest == found[0] for digest in found)


def test_parameters_on_the_host_are_fetched_by_layer():
    model, params = deep()

    def run(mesh, host):
        mesh = ready(mesh) if mesh.axes else mesh
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        if host:
            own = OnHost(own, Lane(torch.device("cpu")))
        forward = Forward(placed, mesh=mesh)
        return compute_outputs(own, BATCH, forward=forward, micro_batching=MicroBatching(size=3)).log_probs

    (expected,) = simulate({}, partial(run, host=False))
    for found in simulate({"pipeline": 2, "shard": 2}, partial(run, host=True)):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_what_does_not_go_with_a_pipeline_is_refused():
    model, params = deep()

    def run(mesh, placed=None):
        placed = placed or models.place(model, mesh)
        forward = Forward(placed, mesh=mesh)
        return forward_micro_batch(models.own_params(placed, params, mesh), BATCH, forward=forward)

    with pytest.raises(ValueError, match=r"call compute_outputs .*on all"):
        simulate({"pipeline": 2}, run)
    with pytest.raises(ValueError, match="the mesh has a pipeline axis of 2 ranks, and the model is one for 1: give"):
        simulate({"pipeline": 2}, partial(run, placed=model))
    with pytest.raises(ValueError, match="the model has 4 layers, and 8 pipeline stages take at least one each"):
        simulate({"pipeline": 4}, lambda mesh: models.place(model, ready(mesh, 2)))


def plain_sum(out, rows, weights):
    """A loss without metrics, and one metric of each kind."""
    loss = (weights * out.log_probs).sum()
    kinds = {"sum": metrics.total(len(rows.tokens)), "max": metrics.masked_max(out.log_probs, rows.response_mask)}
    return loss, {**kinds, "min": metrics.masked_min(out.log_probs, rows.response_mask), "term": metrics.term(loss)}


@pytest.mark.parametrize("loss", [plain_sum, lambda *args: (plain_sum(*args)[0], {})])
def test_an_objective_of_ones_own_runs_with_metrics_of_any_kind(loss):
    assert_same({"pipeline": 2}, lambda **how: partial(update, objective=Objective(loss=loss), **how))


@pytest.mark.parametrize("mistake", ["copies", "metrics", "received"])
def test_a_mistake_is_seen(mistake, monkeypatch):
    if mistake == "copies":
        monkeypatch.setattr(Layout, "owns", lambda self, name, **_: True)
    elif mistake == "metrics":
        monkeypatch.setattr(staging, "_metrics_of_last", lambda report, axis, device: report)
    else:
        of = staging.stage_of
        monkeypatch.setattr(staging, "stage_of", lambda model, number: of(model, 0))
    with pytest.raises((AssertionError, ValueError)):
        assert_same({"pipeline": 2}, partial(UpdateActor, loss_fn=losses.gpg), virtual=2)


def test_the_length_between_stages_is_that_of_a_slice():
    model, _ = deep()
    tokens = int(BATCH.attention_mask.sum())

    def length(mesh, model=model, **how):
        return indices_of(BATCH, None, Forward(model, mesh=mesh, **how)).length

    assert length(LOCAL) == tokens
    assert length(LOCAL, remove_padding=False) == BATCH.tokens.numel()
    found = simulate({"sequence": 3}, length)
    assert found == [-(-tokens // 3)] * 3
    cut = simulate({"tensor": 2}, lambda mesh: length(mesh, models.place(model, mesh)))
    assert cut == [-(-tokens // 2)] * 2
