"""Updates on real gloo processes with a sequence or a context axis: those of one process."""

import attrs
import pytest
import torch

from fppo import losses, metrics, tree
from fppo.runtime.mesh import Mesh
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny
from tests.distributed import processes


def update(mesh):
    """The actor after two steps."""
    model, params = tiny.model_and_params("lm")
    optimizer = adamw(schedule("constant", 1e-2), eps=1e-2, max_grad_norm=0.5)
    state, report = UpdateActor(
        forward=Forward(model, mesh=mesh),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=7, micro_batching=MicroBatching(size=3), epochs=2),
        optimizer=optimizer,
        terms=PolicyTerms(entropy_coef=0.01),
    )(init_state(params, optimizer), tiny.experience(7, 7))
    leaves = {path: x for path, x in tree.leaves_with_paths(state) if isinstance(x, torch.Tensor)}
    return leaves, metrics.report(report), str(tree.digest(state))


def update_both_ways(mesh):
    """The same with keys that travel and with keys that are gathered."""
    travelled, gathered = (update(attrs.evolve(mesh, ring=ring)) for ring in (True, False))
    for path, leaf in gathered[0].items():
        torch.testing.assert_close(travelled[0][path], leaf, rtol=1e-10, atol=1e-10, msg=path)
    return gathered


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "update_on"), [({"shard": 2, "sequence": 2}, update), ({"context": 2}, update_both_ways)]
)
def test_processes_with_parts_of_the_tokens_do_the_update_of_one(axes, update_on):
    leaves, numbers, _ = update(Mesh.local())
    found = processes.run(axes, update_on)
    assert len({digest for *_, digest in found}) == 1
    for found_leaves, found_numbers, _ in found:
        assert found_leaves.keys() == leaves.keys()
        for path, leaf in leaves.items():
            torch.testing.assert_close(found_leaves[path], leaf, rtol=1e-10, atol=1e-10, msg=path)
        for name, number in numbers.items():
            torch.testing.assert_close(found_numbers[name], number, rtol=1e-8, atol=1e-10, equal_nan=True, msg=name)
