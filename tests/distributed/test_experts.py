"""Updates and `fppo train` on real processes with an expert axis: a tiny Qwen3-MoE has the numbers of one process."""

import math
from functools import partial

import attrs
import pytest
import torch

from fppo import losses, metrics, models, tree
from fppo.commands import cli
from fppo.runs import jsonl
from fppo.runtime import checkpoint
from fppo.runtime.mesh import Mesh, Sharding
from fppo.settings import files
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import adamw
from fppo.steps.train_state import init_state, whole_shapes
from tests import tiny, tiny_run
from tests.distributed import processes
from tests.distributed.ranks import Ranks
from tests.models.families import make


def update(mesh, stage, directory=None):
    """The whole actor after two steps, its metrics, and how many numbers the rank held of state; saved, if there is a
    directory."""
    model, params = make("qwen3_moe")
    mesh = attrs.evolve(mesh, sharding=Sharding(stage=stage))
    model, optimizer = models.place(model, mesh), adamw(lambda step: 0.1, eps=1.0, max_grad_norm=0.5)
    state, report = UpdateActor(
        forward=Forward(model, mesh=mesh),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=4, micro_batching=MicroBatching(size=1)),
        optimizer=optimizer,
    )(init_state(models.own_params(model, params, mesh), optimizer), tiny.experience(7, 7))
    if directory is not None:
        checkpoint.begin_save(state, directory, stage, mesh=mesh, shapes=whole_shapes(state, model.extents)).wait()
    whole = {what: models.whole_params(model, x, mesh) for what, x in (("p", state.params), ("m", state.opt.mu))}
    held = sum(x.numel() for x in tree.tensors(state))
    return dict(tree.leaves_with_paths(whole)), metrics.report(report), held


def updates(mesh, directory):
    return [update(mesh, stage, directory) for stage in (1, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [{"expert": 2}, pytest.param({"shard": 2, "expert": 2}, marks=pytest.mark.slow)],
    ids=["2", "2x2"],
)
def test_processes_that_share_dense_parameters_do_the_update_of_one(axes, tmp_path):
    expected, numbers, whole = update(Mesh.local(), 3)
    _, params = make("qwen3_moe")
    template = init_state(params, adamw(lambda step: 0.1))
    for results in processes.run(axes, partial(updates, directory=tmp_path)):
        for stage, (found, found_numbers, held) in enumerate(results, 1):
            for path, leaf in expected.items():
                torch.testing.assert_close(found[path], leaf, rtol=1e-10, atol=1e-10, msg=f"stage {stage}, {path}")
            for name, number in numbers.items():
                assert found_numbers[name] == pytest.approx(number, rel=1e-8, abs=1e-10, nan_ok=True), name
            assert held <= 1.1 * whole / math.prod(axes.values())
            saved = checkpoint.load(template, tmp_path, stage)
            assert tree.digest(saved.params) == tree.digest({name: found[f"['p']['{name}']"] for name in params})


def numbers(directory):
    """The metrics by step, without what depends on the clock or the machine."""
    lines = jsonl.read(directory / "metrics.jsonl")
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(tiny_run.UNLIKE)} for line in lines}


@pytest.mark.slow
def test_a_run_on_an_expert_axis_has_the_numbers_of_one_process(tmp_path):
    """With replayed experts and their losses; it is resumed by one process from what both ranks have written."""
    tiny_run.write_task(tmp_path)
    tiny_run.write_mixture(tmp_path)
    shared = {
        "actor__optimizer__schedule": "constant",
        "algorithm__router_replay": "old_log_probs",
        "actor__experts__balance_coef": 0.01,
        "actor__experts__z_coef": 0.001,
    }

    def write(name, **changes):
        file = tmp_path / f"{name}.toml"
        files.save(tiny_run.settings(tmp_path, output_dir=str(tmp_path / name), **shared, **changes), file)
        return str(file)

    log = tmp_path / "log"
    assert cli.main(["train", write("one")]) == 0
    assert Ranks(["train", write("both", mesh__expert=2), "--steps", "3"], 2, log).end(300) == [0, 0], log.read_text()
    assert cli.main(["train", write("both")]) == 0
    found, expected = numbers(tmp_path / "both"), numbers(tmp_path / "one")
    assert any("actor/expert_load/0" in line for line in expected.values())
    for step, line in expected.items():
        same = {k: v for k, v in line.items() if isinstance(v, float) and k != "time"}
        assert {k: found[step][k] for k in same} == pytest.approx(same, rel=1e-3, abs=1e-4, nan_ok=True), step
