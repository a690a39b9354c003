"""Updates with sharded parameters on real gloo processes: those of one process."""

import importlib
from pathlib import Path

import attrs
import pytest
import torch

from fppo import batch as batches
from fppo import losses, metrics, tree
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh, Sharding
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny
from tests.distributed import processes
from tests.limited import FailingAt

SETTINGS = [(3, False), (3, True), (3, "selective"), (2, False), (1, False)]
SHORT = (3, False, True)


def share(mesh):
    """The rows of 7 whose log-probs this data rank computes: all of one rank; of several, the first has none."""
    ranks = mesh["replicate"].size * mesh["shard"].size
    rank = mesh["replicate"].rank * mesh["shard"].size + mesh["shard"].rank
    return [row for row in range(7) if ranks == 1 or row % (ranks - 1) == rank - 1]


def update(mesh, stage, checkpoint_layers, short=False):
    """The whole actor after two steps, its metrics, and the log-probs before it. With `short` the second of two ranks
    runs out of memory once; of four each has one row in a mini-batch, which cannot be cut."""
    model, params = tiny.model_and_params("lm")
    model = attrs.evolve(model, checkpoint_layers=checkpoint_layers)
    mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
    shards = fsdp.shard(params, mesh)
    batch, forward, cut = tiny.experience(7, 7), Forward(model, mesh=mesh), MicroBatching(size=2)
    log_probs = compute_log_probs(shards, batches.rows(batch, share(mesh)), forward=forward, micro_batching=cut)
    optimizer = adamw(schedule("constant", 1e-2), eps=1e-2, max_grad_norm=0.5)
    cut = MicroBatching(token_budget=30, halve_on_oom=True) if short else cut
    actor = UpdateActor(
        forward=forward,
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=4, micro_batching=cut),
        optimizer=optimizer,
        terms=PolicyTerms(entropy_coef=0.01),
    )
    fails = short and mesh["shard"].rank == 1 and mesh["replicate"].size == 1
    with FailingAt(200 if fails else -1):
        state, report = actor(init_state(shards, optimizer), batch)
    assert (state.token_budget is not None) == short
    trees = {name: fsdp.gather(x, model.shapes, mesh) for name, x in (("p", state.params), ("m", state.opt.mu))}
    return dict(tree.leaves_with_paths(trees)), metrics.report(report), log_probs


def updates(mesh):
    return [update(mesh, *settings) for settings in (*SETTINGS, SHORT)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({"shard": 2}, id="2"),
        pytest.param({"replicate": 2, "shard": 2}, id="2x2", marks=pytest.mark.slow),
    ],
)
def test_processes_with_sharded_parameters_do_the_update_of_one(axes):
    expected, numbers, log_probs = update(Mesh.local(), 3, False)
    ranks_results = processes.run(axes, updates)
    first = [tree.digest(found) for found, *_ in ranks_results[0]]
    for rank, results in enumerate(ranks_results):
        assert [tree.digest(found) for found, *_ in results] == first  # all ranks stay equal, bit for bit
        ranks = axes["shard"] * axes.get("replicate", 1)
        rows = [row for row in range(7) if row % (ranks - 1) == rank - 1]
        for settings, (found, found_numbers, found_log_probs) in zip((*SETTINGS, SHORT), results, strict=True):
            assert found.keys() == expected.keys()
            for path, leaf in expected.items():
                message = f"stage {settings}, {path}, rank {rank}"
                torch.testing.assert_close(found[path], leaf, rtol=1e-10, atol=1e-10, msg=message)
            for name, number in numbers.items():
                assert found_numbers[name] == pytest.approx(number, rel=1e-8, abs=1e-10, nan_ok=True), name
            torch.testing.assert_close(found_log_probs, log_probs[rows], rtol=1e-10, atol=1e-10)


def ways(mesh):
    """What the benchmark of compiled graphs tells of its ways, small, and without a compiler of programs."""
    compare = importlib.import_module("whole_graph").compare
    mesh = attrs.evolve(mesh, sharding=Sharding())
    return compare(mesh, size="tiny", count=1, backend="aot_eager", repeats=1)


@pytest.mark.slow
def test_a_pass_that_torch_sees_whole_has_the_gradient_of_one_by_layers(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "experiments" / "bench")
    for results in processes.run({"shard": 2}, ways):
        layers, graph = results.values()
        assert graph["difference"] < 1e-5
        assert (graph["captured"], graph["breaks"], len(graph["graphs"])) == (1, 0, 2)
        assert graph["bytes"] == layers["bytes"] > 0
