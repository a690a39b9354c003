"""A loss scale: it changes no number, agrees over ranks, resumes, and saves gradients in float16."""

from functools import partial

import attrs
import pytest
import torch

from fppo import losses, metrics, models, tree
from fppo.runtime import fsdp
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.loss_scale import loss_scaled
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.muon import muon
from fppo.steps.optimizers import Optimizer, adamw, lion, sgd
from fppo.steps.train_state import init_state, optimizer_step
from tests import tiny
from tests.models.families import make

MODEL, PARAMS = tiny.model_and_params()
LOOP = Loop(mini_batch_size=2, micro_batching=MicroBatching(size=1))
WHOLE = Loop(mini_batch_size=4, micro_batching=MicroBatching(size=4))
SGD = sgd(lambda step: 1.0, max_grad_norm=None)


def updated(state, optimizer, *, model=MODEL, batch=None, loop=LOOP, mesh=LOCAL, donate=False):
    """The state after an update of the actor on a batch, and its metrics."""
    batch, forward = batch or tiny.experience(state.step, 4), Forward(model, mesh=mesh)
    return UpdateActor(forward=forward, loss_fn=losses.ppo_clip, loop=loop, optimizer=optimizer)(
        state, batch, donate=donate
    )


@pytest.mark.parametrize(
    "optimizer",
    [adamw(lambda step: 0.01), muon(lambda step: 0.01), lion(lambda step: 0.01), SGD],
    ids=["adamw", "muon", "lion", "sgd"],
)
def test_a_scale_changes_no_number(optimizer):
    """Neither of the parameters nor of what is reported; the norm that gradients are clipped to is theirs."""
    plain, expected = updated(init_state(PARAMS, optimizer), optimizer)
    for first in (1.0, 3.0, 2.0**16):
        scaled = loss_scaled(optimizer, first=first)
        state, found = updated(init_state(PARAMS, scaled), scaled)
        for name, x in plain.params.items():
            torch.testing.assert_close(state.params[name], x, rtol=1e-12, atol=1e-12, msg=name)
        numbers = metrics.report(found)
        assert numbers.pop("actor/loss_scale") == first
        assert numbers == pytest.approx(metrics.report(expected), rel=1e-12, abs=1e-12, nan_ok=True)


def test_the_critics_loss_is_scaled_too():
    model, params = tiny.model_and_params("value")
    ends = []
    for optimizer in (SGD, loss_scaled(SGD)):
        forward = Forward(model)
        state, _ = UpdateCritic(forward=forward, loop=LOOP, optimizer=optimizer)(
            init_state(params, optimizer), tiny.experience(0, 4)
        )
        ends.append(state.params)
    for name, x in ends[0].items():
        torch.testing.assert_close(ends[1][name], x, rtol=1e-12, atol=1e-12, msg=name)


def test_it_halves_where_a_gradient_is_not_finite_and_doubles_after_so_many_that_are():
    optimizer = loss_scaled(adamw(lambda step: 0.01), first=8.0, interval=3)
    good = {name: 8.0 * x for name, x in PARAMS.items()}
    bad = {name: x.clone() for name, x in good.items()}
    next(iter(bad.values())).view(-1)[1] = torch.inf
    state, scales = init_state(PARAMS, optimizer), []
    for grads in (good, good, bad, good, good, good, good, bad, bad, bad, bad, bad):
        before = tree.digest((state.params, state.opt.inner))
        state, report = optimizer_step(state, grads, optimizer=optimizer)
        numbers = metrics.report(report)
        assert numbers["skipped"] == float(grads is bad)
        assert (tree.digest((state.params, state.opt.inner)) == before) is (grads is bad)
        scales.append((numbers["loss_scale"], state.opt.scale.item()))
    after = [8, 8, 4, 4, 4, 8, 8, 4, 2, 1, 1, 1]
    assert scales == list(zip([8, *after[:-1]], after, strict=True))
    most = loss_scaled(SGD, first=2.0**23, interval=1)
    state = init_state(PARAMS, most)
    for _ in range(2):
        state, _ = optimizer_step(state, good, optimizer=most)
        assert state.opt.scale.item() == 2.0**24


def test_training_resumes_donates_and_is_pure(tmp_path):
    """With a scale that changes in every update."""
    optimizer = loss_scaled(adamw(lambda step: 0.01), first=4.0, interval=1)
    state = init_state(PARAMS, optimizer)

    def step(state, donate=False):
        return updated(state, optimizer, loop=WHOLE, donate=donate)[0]

    tiny.check_training(step, state, tmp_path)
    assert step(state).opt.scale.item() == 8.0


@pytest.mark.parametrize("axes", [{"shard": 2}, {"replicate": 2}], ids=str)
def test_ranks_agree_where_one_of_them_alone_overflows(axes):
    """The rows of one data rank make gradients that float32 does not hold once they are scaled."""
    params = {name: x.float() for name, x in PARAMS.items()}
    batch = tiny.experience(0, 4, dtype=torch.float32)
    advantages = batch.advantages.clone()
    advantages[batch.attention_mask.sum(1).argmax()] = 1e38
    batch = tree.replace(batch, advantages=advantages)
    optimizer = loss_scaled(adamw(lambda step: 0.01), first=2.0**16)

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding() if mesh["shard"].size > 1 else None)
        state, report = updated(
            init_state(fsdp.shard(params, mesh), optimizer), optimizer, batch=batch, loop=WHOLE, mesh=mesh
        )
        same = all(torch.equal(state.params[n], x) for n, x in fsdp.shard(params, mesh).items())
        return same, state.opt.scale.item(), metrics.report(report)["actor/skipped"]

    assert simulate(axes, run) == [(True, 2.0**15, 1.0)] * 2


def test_passes_in_float16_lose_small_gradients_without_it():
    """They are those of float32 with it, to the dtype's rounding; master weights stay in float32."""
    params = {name: x.float() for name, x in PARAMS.items()}
    batch = tiny.experience(1, 4, dtype=torch.float32)
    small = tree.replace(batch, advantages=1e-6 * batch.advantages)
    half, moved = attrs.evolve(MODEL, compute_dtype=torch.float16), {}
    for name, model, optimizer in (
        ("exact", MODEL, SGD),
        ("lost", half, SGD),
        ("scaled", half, loss_scaled(SGD, first=2.0**18)),
    ):
        state, _ = updated(init_state(params, optimizer), optimizer, model=model, batch=small)
        assert all(x.dtype == torch.float32 for x in state.params.values())
        moved[name] = torch.cat([(state.params[n].double() - x.double()).flatten() for n, x in params.items()])
    error = {name: float((x - moved["exact"]).norm() / moved["exact"].norm()) for name, x in moved.items()}
    assert error["scaled"] < 0.02 < 0.2 < error["lost"]


def test_an_optimizer_that_does_not_say_what_it_skips_is_refused():
    mute = Optimizer(lambda params: {}, lambda params, grads, state, step, *, mesh, donate: (params, state, {}))
    optimizer = loss_scaled(mute)
    with pytest.raises(ValueError, match="must say what it skips"):
        optimizer_step(init_state(PARAMS, optimizer), PARAMS, optimizer=optimizer)
    with pytest.raises(ValueError, match="interval=0"):
        loss_scaled(SGD, interval=0)


def test_a_scale_changes_no_number_of_routers_on_stages_before_the_last():
    """Whose losses are not a part of the last stage's, and scaled where they are."""
    model, params = make("qwen3_moe")
    terms = PolicyTerms(router_z_coef=0.5)

    def run(mesh, optimizer):
        placed = models.place(model, mesh)
        own = models.own_params(placed, params, mesh)
        update = UpdateActor(
            forward=Forward(placed, mesh=mesh), loss_fn=losses.ppo_clip, loop=WHOLE, optimizer=optimizer, terms=terms
        )
        return update(init_state(own, optimizer), tiny.experience(0, 4))[0].params

    both = [simulate({"pipeline": 2}, partial(run, optimizer=x)) for x in (SGD, loss_scaled(SGD, first=2.0**10))]
    for plain, scaled in zip(*both, strict=True):
        for name, x in plain.items():
            torch.testing.assert_close(scaled[name], x, rtol=1e-9, atol=1e-9, msg=name)
