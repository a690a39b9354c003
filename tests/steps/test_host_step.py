"""An optimizer's step on the host: the bits of a step on the device, gradients that leave as they are made."""

from functools import partial

import attrs
import pytest
import torch

from fppo import losses, metrics, models, tree
from fppo.key import Key
from fppo.runtime import offload
from fppo.runtime.mesh import Sharding
from fppo.runtime.offload import Lane
from fppo.runtime.simulate import simulate
from fppo.steps import optimizers
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward
from fppo.steps.host_step import HostStep, on_host
from fppo.steps.loop import Loop
from fppo.steps.loss_scale import loss_scaled
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.train_state import init_state
from fppo_kernels.adamw import adamw_
from tests import tiny
from tests.runtime.test_offload import Stream, Watched, alive, rate, size_alive, size_of

CPU = torch.device("cpu")


def signum(params, grads, state, step):
    new = {name: torch.lerp(g, state["m"][name], 0.9) for name, g in grads.items()}
    return {name: p - rate(step) * new[name].sign() for name, p in params.items()}, {"m": new}


MAKES = {
    "adamw": lambda wrap: optimizers.adamw(rate, kernel=wrap(adamw_)),
    "not clipped": lambda wrap: optimizers.adamw(rate, kernel=wrap(adamw_), max_grad_norm=None),
    "scaled": lambda wrap: loss_scaled(optimizers.adamw(rate, kernel=wrap(adamw_)), first=8.0, interval=1),
    "sgd": lambda wrap: optimizers.sgd(rate, momentum=0.9),
    "lion": lambda wrap: optimizers.lion(rate),
    "own": lambda wrap: optimizers.from_function(lambda params: {"m": optimizers.zeros_like(params)}, signum),
}


def plain(kernel):
    return kernel


def updates(forward, make, lane, batch_size=4, **changes):
    """An update on the device and one with its step on the host, each with the optimizer that makes its state."""
    loop = Loop(mini_batch_size=batch_size, **{"micro_batching": MicroBatching(size=2), "epochs": 2} | changes)
    keywords = {"loss_fn": losses.ppo_clip, "terms": PolicyTerms(entropy_coef=0.01, kl_coef=0.1)}
    update, keywords = (UpdateActor, keywords) if forward.model.head == "lm" else (UpdateCritic, {})
    how = partial(update, forward=forward, loop=loop, **keywords)
    away = on_host(make, lane, fixed=forward.model.untrained_params, bucket_bytes=9000)
    here, there = (partial(how(optimizer=each), key=Key(5)) for each in (make(plain), away))
    return here, HostStep(there, lane, forward)


def held(forward, params, make, lane, batch, *, donate=True, **changes):
    """Hold a step on the host to one on the device, twice in a row; return the state after."""
    here, there = updates(forward, make, lane, **changes)
    expected = init_state(params, make(plain))
    got = offload.to_host(expected)
    for _ in range(2):
        before = tree.digest(got)
        expected, wanted = here(expected, batch)
        old, (got, report) = got, there(got, batch, donate=donate)
        assert tree.digest(got) == tree.digest(expected)
        assert metrics.report(report) == metrics.report(wanted)
        assert all(x.numel() == 0 for x in old.params.values()) if donate else tree.digest(old) == before
    assert alive(lane.fetched) == 0
    return got


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    ("name", "dtype", "compute", "late", "donate"),
    [
        ("adamw", torch.float64, None, True, True),
        ("adamw", torch.float32, torch.bfloat16, True, False),
        ("not clipped", torch.float32, torch.bfloat16, False, True),
        ("scaled", torch.float32, torch.float16, True, True),
        ("sgd", torch.float64, None, True, False),
        ("lion", torch.float32, torch.bfloat16, True, True),
        ("own", torch.float64, None, False, False),
    ],
)
def test_a_step_on_the_host_has_the_bits_of_one_on_the_device(head, name, dtype, compute, late, donate):
    model, params = tiny.model_and_params(head, dtype=dtype)
    forward = Forward(attrs.evolve(model, compute_dtype=compute))
    batch = tiny.experience(3, 7, dtype=dtype)
    for size in (1, 4):  # several micro-batches and one
        held(forward, params, MAKES[name], Watched(late), batch, donate=donate, micro_batching=MicroBatching(size=size))


def test_recomputed_layers_and_fixed_parameters_keep_their_bits():
    model, params = tiny.model_and_params()
    fixed = frozenset({"model.embed_tokens.weight"})
    forward = Forward(attrs.evolve(model, checkpoint_layers=True, buffers=fixed))
    after = held(forward, params, MAKES["adamw"], Watched(True), tiny.experience(3, 7))
    assert torch.equal(after.params["model.embed_tokens.weight"], params["model.embed_tokens.weight"])


def test_an_update_that_is_skipped_changes_no_bit():
    model, params = tiny.model_and_params()
    params = params | {"model.norm.weight": params["model.norm.weight"] * torch.inf}
    _, there = updates(Forward(model), MAKES["adamw"], Watched(True))
    state = init_state(params, MAKES["adamw"](plain))
    after, report = there(offload.to_host(state), tiny.experience(3, 4))
    assert metrics.report(report)["actor/skipped"] == 1
    assert tree.digest((after.params, after.opt)) == tree.digest((state.params, state.opt))


def test_gradients_leave_while_the_backward_pass_runs():
    class Leaves(Watched):
        """Notes how many bytes of gradients are alive whenever one leaves."""

        most = 0

        def _copy(self, direction, sources, targets):
            finish = super()._copy(direction, sources, targets)
            self.most = max(self.most, size_alive(self.stored))
            return finish

    model, params = tiny.model_and_params(layers=5)
    batch, lane = tiny.experience(3, 4), Leaves()
    held(Forward(model), params, MAKES["adamw"], lane, batch, micro_batching=MicroBatching(size=4), epochs=1)
    assert lane.most <= size_of(params) / 4
    assert lane.events.count("store") == 2 * len(params)


MESHES = [
    ({"shard": 2}, 1),
    ({"shard": 2}, 2),
    ({"shard": 2}, 3),
    ({"replicate": 2}, None),
    ({"tensor": 2}, None),
    ({"pipeline": 2}, None),
    ({"tensor": 2, "shard": 2}, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "stage"), MESHES)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_each_rank_of_a_mesh_steps_on_its_host(axes, stage, compute):
    model, params = tiny.model_and_params(dtype=torch.float64 if compute is None else torch.float32)
    model = attrs.evolve(model, compute_dtype=compute)
    batch = tiny.experience(3, 8, dtype=params["model.norm.weight"].dtype)

    def run(mesh):
        on = attrs.evolve(mesh, sharding=None if stage is None else Sharding(stage=stage))
        own = models.prepare(model, on).on(on)
        held(Forward(own, mesh=on), models.own_params(own, params, on), MAKES["adamw"], Watched(), batch)

    simulate(axes, run)


def test_streams_are_waited_for_and_then_hold_nothing(monkeypatch):
    current = Stream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    lane = Lane(CPU)
    lane._streams = Stream(), Stream()
    model, params = tiny.model_and_params()
    here, there = updates(Forward(model), MAKES["adamw"], lane)
    state, batch = init_state(params, MAKES["adamw"](plain)), tiny.experience(3, 4)
    after, _ = there(offload.to_host(state), batch, donate=True)
    assert tree.digest(after) == tree.digest(here(state, batch)[0])
    assert not lane._under_way
    assert all(event.waited for stream in lane._streams for event in stream.events)
