"""Models on 8-bit products: rows, ranks and engines agree as they do on others, and the head is not rounded."""

from functools import partial

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import losses, models, tree
from fppo.grad import value_and_grad
from fppo.key import Key
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask, Sampling
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, Sharding, gradient_sum
from fppo.runtime.simulate import simulate
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs, forward_micro_batch
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state
from fppo_kernels.table import Kernels
from tests import tiny
from tests.rollout.test_embedded import make_prompts

EIGHT, ROWS = Kernels.named(linear="float8"), tiny.experience(1, 5, dtype=torch.float32)
MODEL = models.build(tiny.config(num_hidden_layers=3, vocab_size=32))
# a wide spread of sizes in a layer, so that what is rounded differs between ways to cut it if anything does
PARAMS = tree.map(lambda x: 3 * x if x.dim() == 2 else x, models.init_params(MODEL, Key(0)))


def gradients(params, model, mesh, rows, kernels=EIGHT):
    def loss(params):
        out = forward_micro_batch(params, rows, forward=Forward(model, kernels=kernels, mesh=mesh))
        return out.log_probs.square().sum()

    return value_and_grad(loss)(params)[1]


def gap(found, expected):
    """How far gradients are from each other, of their size."""
    squares = [((found[n] - x).square().sum(), x.square().sum()) for n, x in expected.items()]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


WHOLE = gradients(PARAMS, MODEL, Mesh.local(), ROWS)


def test_it_rounds():
    assert 0.01 < gap(gradients(PARAMS, MODEL, Mesh.local(), ROWS, Kernels.named()), WHOLE) < 0.3


def test_micro_batches_add_up():
    parts = [gradients(PARAMS, MODEL, Mesh.local(), batches.rows(ROWS, [row])) for row in range(5)]
    assert gap({name: sum(part[name] for part in parts) for name in WHOLE}, WHOLE) < 1e-5


@pytest.mark.parametrize("axis", ["tensor", "sequence", "context", "shard"])
def test_ranks_have_the_gradient_of_one(axis):
    """But for numbers that are 2**13 times smaller than others beside them."""

    def run(mesh):
        mesh = attrs.evolve(mesh, sharding=Sharding()) if axis == "shard" else mesh
        model = models.place(MODEL, mesh)
        own = fsdp.shard(PARAMS, mesh) if axis == "shard" else models.own_params(model, PARAMS, mesh)
        grads = gradients(own, model, mesh, ROWS)
        if axis == "shard":  # each rank has all rows
            return tree.map(lambda x: x / 2, fsdp.gather(grads, MODEL.shapes, mesh))
        return models.whole_params(model, gradient_sum(grads, attrs.evolve(mesh, layout=model.layout)), mesh)

    for found in simulate({axis: 2}, run):
        assert gap(found, WHOLE) < 1e-4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_engine_tells_the_trainers_log_probs(dtype):
    model = models.build(tiny.config(num_hidden_layers=3, vocab_size=32), compute_dtype=dtype)
    engine = EmbeddedEngine(model=model, kernels=EIGHT, pad_token_id=0)
    rollout = engine.generate(PARAMS, Ask(make_prompts(), Sampling(max_tokens=6), Key(1)))
    log_probs = partial(compute_log_probs, PARAMS, rollout, micro_batching=MicroBatching(size=6))
    own, plain = (log_probs(forward=Forward(model, kernels=k)) for k in (EIGHT, Kernels.named()))
    apart = (rollout.rollout_log_probs - own).abs().max()
    assert apart < (1e-5 if dtype is None else 1e-2)
    assert (own - plain).abs().max() > 3 * apart


@pytest.mark.slow
def test_it_learns():
    """A few rows by heart, as a model on plain products does."""
    rows = tree.replace(ROWS, advantages=torch.ones_like(ROWS.advantages))
    optimizer, cut = adamw(lambda step: 1e-2), MicroBatching(size=5)
    after = {}
    for name in ("torch", "float8"):
        forward = Forward(MODEL, kernels=Kernels.named(linear=name))
        state, _ = UpdateActor(
            forward=forward,
            loss_fn=losses.gpg,
            loop=Loop(mini_batch_size=5, micro_batching=cut, epochs=25),
            optimizer=optimizer,
        )(init_state(PARAMS, optimizer), rows)
        log_probs = compute_log_probs(state.params, rows, forward=forward, micro_batching=cut)
        after[name] = float(log_probs[rows.response_mask].mean())
    assert after["float8"] > max(-0.5, 2 * after["torch"] - 0.1)
