"""Whole steps on simulated meshes are those of one process."""

import attrs
import pytest
import torch

from fppo import metrics, models, tree
from fppo.assembly.run import assemble
from fppo.pipeline import gap
from fppo.pipeline.train import iterate
from fppo.runs import session
from fppo.runtime.digests import digest
from fppo.runtime.mesh import LOCAL, Sharding
from fppo.runtime.simulate import simulate
from tests import tiny_run


def steps(settings, mesh, count):
    """The records of `count` steps; parameters whole, in float32."""
    with assemble(settings, mesh=mesh) as assembly:
        found = []
        for run, experience, report in iterate(
            assembly.run, program=assembly.program, draw=assembly.draw, donate=False
        ):
            whole = {"actor": models.whole_params(assembly.model, run.actor.params, mesh)}
            if run.critic is not None:
                whole["critic"] = run.critic.params
            if assembly.critic_model is not None:
                whole["critic"] = models.whole_params(assembly.critic_model, run.critic.params, mesh)
            found.append((whole, experience, metrics.report(report), run.kl))
            if run.step == count:
                held_out = metrics.report(assembly.evaluate(run))
                return found, held_out
    raise AssertionError


def same(a, b, at=1e-5):
    for (path, x), (other, y) in zip(tree.leaves_with_paths(a), tree.leaves_with_paths(b), strict=True):
        assert path == other
        if isinstance(x, torch.Tensor):
            assert x.shape == y.shape, path
            assert torch.allclose(x.double(), y.double(), rtol=at, atol=at, equal_nan=True), path
        elif isinstance(x, float):
            assert x == pytest.approx(y, rel=1e-4, abs=1e-5, nan_ok=True), path
        else:
            assert x == y, path


SCORED = {"reward__functions": ["tests.rewards.functions:length"]}  # where nothing is right, advantages are rounding


def numbers(report):
    return {name: value for name, value in report.items() if not name.startswith(tiny_run.UNLIKE)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"shard": 2}, {"eval__exact_values": True}),
        pytest.param(
            {"replicate": 2, "shard": 2},
            {"algorithm__advantage": "grpo", "rollout__n": 2, "actor__kl_coef": 0.1, **SCORED},
            marks=pytest.mark.slow,
        ),
        pytest.param({"shard": 2, "sequence": 2}, {"mesh__stage": 2}, marks=pytest.mark.slow),
        ({"sequence": 2}, {"algorithm__advantage": "remax"}),
        ({"shard": 2}, {"algorithm__old_log_probs": "auto"}),
        ({"shard": 2}, {"critic__reads": "confidence", "eval__exact_values": True, "algorithm__whiten": False}),
        pytest.param({"shard": 4}, {"mesh__stage": 1, "actor__loss__name": "clip_cov"}, marks=pytest.mark.slow),
        ({"tensor": 2}, {"model__checkpoint_layers": True}),
        ({"context": 2}, {"mesh__context": 2, "actor__kl_coef": 0.1, "algorithm__old_log_probs": "pass"}),
        pytest.param(
            {"shard": 2, "tensor": 2},
            {"mesh__stage": 2, "actor__entropy_coef": 0.01, "actor__kl_coef": 0.1},
            marks=pytest.mark.slow,
        ),
        ({"sequence": 2}, {"critic__reads": "hidden", **SCORED}),
        ({"pipeline": 2}, {"critic__reads": "hidden", "actor__micro_batch_size": 1, **SCORED}),
        pytest.param(
            {"pipeline": 2, "shard": 2},
            {"actor__loss__name": "clip_cov", "actor__kl_coef": 0.1},
            marks=pytest.mark.slow,
        ),
        (
            {"shard": 3},
            {
                "algorithm__advantage": "grpo",
                "rollout__n": 2,
                "rollout__filter__groups": True,
                "rollout__filter__max_draws": 2,
                "rollout__filter__truncated": True,
                "algorithm__correction": "rollout",
                **SCORED,
            },
        ),
    ],
)
def test_steps_on_a_mesh_are_those_of_one_process(tmp_path, axes, changes, monkeypatch):
    """Rollouts, rewards, log-probs and updates are spread; tokens, advantages, states and metrics are the same."""
    monkeypatch.setattr(gap, "WHOLE_STEPS", 1)
    tiny_run.write_task(tmp_path, layers=axes.get("pipeline", 1))
    # gradients that are zero but for rounding stay small, which Adam would make steps of full size
    smooth = {"actor__optimizer__eps": 1e-3, "critic__optimizer__eps": 1e-3}
    settings = tiny_run.settings(tmp_path, device="cpu", **smooth, **changes)
    (expected, held_out) = steps(settings, LOCAL, 2)
    stage = settings.mesh.stage

    def on_rank(mesh):
        return steps(settings, attrs.evolve(mesh, sharding=Sharding(stage=stage)), 2)

    for found, evaluated in simulate(axes, on_rank):
        assert evaluated == pytest.approx(held_out, rel=1e-4, abs=1e-5, nan_ok=True)
        for (params, experience, report, kl), (params_1, experience_1, report_1, kl_1) in zip(
            expected, found, strict=True
        ):
            assert torch.equal(experience.tokens, experience_1.tokens)
            same(experience, experience_1)
            same(params, params_1)
            same(kl, kl_1)
            same(numbers(report), numbers(report_1))


def digests_of_whole(run, assembly):
    """The digests of a state, of which ranks have parts."""
    return digest(run, "sums", device=assembly.device, mesh=assembly.mesh, shapes=assembly.shapes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "axes"),
    [
        ({"shard": 2}, {"shard": 1}),
        pytest.param({"shard": 2}, {"shard": 4}, marks=pytest.mark.slow),
        ({"shard": 2}, {"replicate": 2, "shard": 2}),
        ({"shard": 2}, {"shard": 2, "sequence": 2}),
        pytest.param({"shard": 2}, {"shard": 2, "tensor": 2}, marks=pytest.mark.slow),
        ({"tensor": 2}, {"shard": 3}),
        pytest.param({"pipeline": 2, "tensor": 2}, {"shard": 4}, marks=pytest.mark.slow),
        ({"shard": 2}, {"pipeline": 2}),
    ],
)
def test_a_run_saved_on_two_ranks_goes_on_on_any_mesh(tmp_path, saving, axes):
    """The state that another mesh loads is bit-equal, and the next step that of the mesh that saved."""
    tiny_run.write_task(tmp_path, layers=2 if "pipeline" in saving | axes else 1)
    settings = tiny_run.settings(tmp_path, device="cpu", actor__kl_coef=0.1, critic__popart=0.3)

    def go_on(mesh, saving):
        mesh = attrs.evolve(mesh, sharding=Sharding())
        with assemble(settings, mesh=mesh) as assembly:
            if saving:
                run, *_ = next(iterate(assembly.run, program=assembly.program, draw=assembly.draw))
                session.checkpoint.begin_save(
                    run, tmp_path / "saved", run.step, mesh=mesh, shapes=assembly.shapes, free=session.AHEAD
                ).wait()
            else:
                run = session.load(assembly, tmp_path / "saved", 1)
            state = digests_of_whole(run, assembly)
            run, experience, _ = next(iterate(run, program=assembly.program, draw=assembly.draw))
            return state, models.whole_params(assembly.model, run.actor.params, mesh), experience

    (state, params, experience), *_ = simulate(saving, lambda mesh: go_on(mesh, True))
    for loaded, params_1, experience_1 in simulate(axes, lambda mesh: go_on(mesh, False)):
        assert loaded == state
        same(experience, experience_1)
        same(params, params_1)
