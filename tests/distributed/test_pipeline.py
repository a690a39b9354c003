"""A pipeline of real gloo processes computes what one of simulated ranks does, bit for bit."""

import attrs
import pytest
import torch.distributed as dist

from fppo import losses, metrics, models, tree
from fppo.key import Key
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from tests import tiny
from tests.distributed import processes


def results(mesh):
    """Digests of an interleaved update, and what it and a pass report."""
    assert sorted(mesh["pipeline"].lanes) == ([(0, 1), (1, 0)] if dist.is_initialized() else [])
    mesh = attrs.evolve(mesh, virtual_stages=2)
    model = models.build(tiny.config(num_hidden_layers=4))
    placed = models.place(model, mesh)
    params = models.own_params(placed, models.init_params(model, Key(0)), mesh)
    batch, cut, optimizer = tiny.experience(3, 7), MicroBatching(size=2), adamw(lambda step: 0.1)
    forward = Forward(placed, mesh=mesh)
    before = compute_log_probs(params, batch, forward=forward, micro_batching=cut)
    state, report = UpdateActor(
        forward=forward,
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=4, micro_batching=cut, epochs=2),
        optimizer=optimizer,
    )(init_state(params, optimizer), batch)
    return tree.digest(state), metrics.report(report), before.tolist()


@pytest.mark.slow
def test_a_pipeline_of_processes_is_that_of_simulated_ranks():
    real, simulated = processes.run({"pipeline": 2}, results), simulate({"pipeline": 2}, results)
    for found, expected in zip(real, simulated, strict=True):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], nan_ok=True, rel=0, abs=0)
        assert found[2] == expected[2]
