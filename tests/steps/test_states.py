"""Updates of models whose layers carry states: on every mesh that leaves rows whole those of one process."""

from functools import partial

import attrs
import pytest
import torch

from fppo import losses, metrics, models
from fppo.assembly.parts import check_mesh
from fppo.runtime.mesh import LOCAL, Axis, Mesh, Sharding
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.critic import UpdateCritic
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from tests import tiny
from tests.models.families import make
from tests.models.hybrids import HYBRIDS

OPTIMIZER = adamw(lambda step: 0.01, eps=1.0, max_grad_norm=0.5)
# family, head, axes, stage of the sharding (None: whole parameters), layers recomputed
LAYOUTS = [
    ("qwen3_5_text", "lm", {"shard": 2}, 3, True),
    ("bamba", "value", {"shard": 2}, 3, False),
    ("mamba", "lm", {"shard": 2}, 2, True),
    ("qwen3_next", "lm", {"expert": 2}, None, False),
    ("qwen3_5_text", "lm", {"pipeline": 2}, None, True),
]


def update(name, head, mesh, again):
    model, params = make(name, config=HYBRIDS[name], head=head)
    model = models.place(attrs.evolve(model, checkpoint_layers=again), mesh)
    fn = partial(UpdateActor, loss_fn=losses.ppo_clip) if head == "lm" else UpdateCritic
    state, report = fn(
        forward=Forward(model, mesh=mesh),
        loop=Loop(mini_batch_size=4, micro_batching=MicroBatching(size=2), epochs=2),
        optimizer=OPTIMIZER,
    )(init_state(models.own_params(model, params, mesh), OPTIMIZER), tiny.experience(7, 7))
    return models.whole_params(model, state.params, mesh), metrics.report(report)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(LAYOUTS)))])
def test_every_mesh_makes_the_update_of_one_process(number):
    name, head, axes, stage, again = LAYOUTS[number]
    expected, numbers = update(name, head, LOCAL, False)
    sharding = None if stage is None else Sharding(stage=stage)
    for got, report in simulate(axes, lambda mesh: update(name, head, attrs.evolve(mesh, sharding=sharding), again)):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        prefix = "actor" if head == "lm" else "critic"
        assert report[f"{prefix}/grad_norm"] == pytest.approx(numbers[f"{prefix}/grad_norm"], rel=1e-10)


@pytest.mark.parametrize("axis", ["sequence", "context", "tensor"])
def test_axes_that_cut_rows_or_heads_are_refused(axis):
    model, mesh = models.build(HYBRIDS["bamba"]), Mesh({axis: Axis(2)})
    with pytest.raises(ValueError, match=f"'bamba' on a {axis} axis of 2 ranks: its layers .0. carry states along"):
        Forward(model, mesh=mesh)
    with pytest.raises(ValueError, match="give the ranks to shard or replicate"):
        check_mesh(HYBRIDS["bamba"], "", mesh)


def test_a_model_without_attention_is_refused_on_a_tensor_axis():
    with pytest.raises(ValueError, match="'mamba' on a tensor axis of 2 ranks: its layers"):
        models.check_placed(models.build(HYBRIDS["mamba"]), 2)


def test_layers_with_states_are_not_compiled():
    model, params = make("bamba", config=HYBRIDS["bamba"])
    with pytest.raises(ValueError, match="'bamba' carries states along rows, and fppo does not compile"):
        compute_log_probs(
            params,
            tiny.experience(7, 2),
            forward=Forward(attrs.evolve(model, compile_layers=True)),
            micro_batching=MicroBatching(size=2),
        )
