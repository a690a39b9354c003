"""What the command line loads: models that run as in transformers, each read once."""

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.assembly import engines, parts
from fppo.assembly.parts import bare_model, check_kernels
from fppo.assembly.run import assemble
from fppo.key import Key
from fppo.pipeline.checks import field
from fppo.pipeline.step import ppo_step
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.runtime.offload import OnHost
from fppo.settings import modules
from fppo.steps import Forward, MicroBatching, compute_log_probs
from fppo.steps.loss_scale import LossScaled
from tests import tiny_run
from tests.models.families import LONGROPE


def test_rows_that_may_outgrow_the_rope_are_refused_before_any_work(tmp_path):
    settings = tiny_run.settings(tmp_path, data__max_prompt_tokens=9, rollout__max_tokens=4)
    with pytest.raises(ValueError, match=r"max_prompt_tokens = 9 and rollout\.max_tokens = 4 allow rows of 13.*'phi3'"):
        parts.check_length(LONGROPE, settings.data, settings.rollout, settings.eval)
    shorter = attrs.evolve(settings.data, max_prompt_tokens=8)
    parts.check_length(LONGROPE, shorter, settings.rollout, settings.eval)
    with pytest.raises(ValueError, match=r"critic\.privileged = 2, data\.max_prompt_tokens = 8 .* allow rows of 14"):
        parts.check_length(LONGROPE, shorter, settings.rollout, settings.eval, privileged=2)


def test_the_embedded_engine_is_held_against_transformers_before_a_run(tmp_path, monkeypatch):
    tiny_run.write_task(tmp_path)
    checked = []
    monkeypatch.setattr(engines, "check_engine", lambda model: checked.append(model.config.model_type))
    with assemble(tiny_run.settings(tmp_path)):
        assert checked == ["qwen2"]


def actor_after_a_step(settings):
    with assemble(settings) as assembly:
        run, experience, _ = ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
    return run, experience


@pytest.mark.slow
def test_a_reference_in_bfloat16_takes_half_the_memory(tmp_path):
    tiny_run.write_task(tmp_path)
    run, exact = actor_after_a_step(tiny_run.settings(tmp_path))
    half, close = actor_after_a_step(tiny_run.settings(tmp_path, model__ref_dtype="bfloat16"))
    assert {x.dtype for x in run.ref.values()} == {torch.float32}
    assert {x.dtype for x in half.ref.values()} == {torch.bfloat16}
    assert {x.dtype for x in half.actor.params.values()} == {torch.float32}
    assert tree.digest(close.old_log_probs) == tree.digest(exact.old_log_probs)
    assert close.ref_log_probs.dtype == torch.float32
    assert 0 < (close.ref_log_probs - exact.ref_log_probs).abs().max() < 0.05


@pytest.mark.slow
def test_a_reference_that_computes_in_bfloat16_anyway_may_be_kept_in_it(tmp_path):
    tiny_run.write_task(tmp_path)
    runs = [
        actor_after_a_step(tiny_run.settings(tmp_path, model__compute_dtype="bfloat16", model__ref_dtype=dtype))[0]
        for dtype in ("float32", "bfloat16")
    ]
    assert tree.digest(runs[0].actor) == tree.digest(runs[1].actor)


def test_a_reference_of_its_own_is_read_in_its_dtype(tmp_path):
    tiny_run.write_task(tmp_path)
    changes = {"model__ref_dtype": "bfloat16", "model__ref_path": str(tmp_path / "start")}
    with assemble(tiny_run.settings(tmp_path, **changes)) as assembly:
        assert {x.dtype for x in assembly.run.ref.values()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_reference_may_have_another_size_than_the_policy(tmp_path):
    tiny_run.write_task(tmp_path)
    wide = small_model(len(character_tokenizer(CHARACTERS)), width=32, layers=2)
    params = models.init_params(wide, Key(3))
    models.save(wide, params, tmp_path / "wide")
    _, batch = actor_after_a_step(tiny_run.settings(tmp_path, model__ref_path=str(tmp_path / "wide")))
    own = compute_log_probs(params, batch, forward=Forward(wide), micro_batching=MicroBatching(size=8))
    torch.testing.assert_close(batch.ref_log_probs, own, rtol=1e-5, atol=1e-5)


def test_a_reference_equal_to_the_policy_is_not_read_again(tmp_path, monkeypatch):
    tiny_run.write_task(tmp_path)
    read, load = [], models.load
    monkeypatch.setattr(models, "load", lambda path, *args, **kwargs: read.append(path) or load(path, *args, **kwargs))
    with assemble(tiny_run.settings(tmp_path, algorithm__advantage="grpo", rollout__n=4)) as assembly:
        run = assembly.run
    assert len(read) == 1
    assert all(torch.equal(x, run.actor.params[name]) for name, x in run.ref.items())
    assert not {x.data_ptr() for x in run.ref.values()} & {x.data_ptr() for x in run.actor.params.values()}


@pytest.mark.slow
def test_the_critic_has_its_own_dtype_and_recomputation(tmp_path):
    tiny_run.write_task(tmp_path)
    own = {"critic__compute_dtype": "bfloat16", "critic__checkpoint_layers": "selective"}
    with assemble(tiny_run.settings(tmp_path, **own)) as assembly:
        model, critic = assembly.model, assembly.critic_model
    assert (model.compute_dtype, model.checkpoint_layers) == (None, False)
    assert (critic.compute_dtype, critic.checkpoint_layers) == (torch.bfloat16, "selective")
    shared = {"model__compute_dtype": "bfloat16", "model__checkpoint_layers": True}
    for changes, expected in (
        (shared, (torch.bfloat16, True)),
        (shared | {"critic__compute_dtype": "float32", "critic__checkpoint_layers": False}, (None, False)),
    ):
        with assemble(tiny_run.settings(tmp_path, **changes)) as assembly:
            critic = assembly.critic_model
        assert (critic.compute_dtype, critic.checkpoint_layers) == expected


@pytest.mark.slow
def test_float16_scales_the_loss_of_the_models_that_compute_in_it(tmp_path):
    tiny_run.write_task(tmp_path)
    for changes, scaled in (
        ({"model__compute_dtype": "float16"}, [1, 1]),
        ({"critic__compute_dtype": "float16"}, [0, 1]),
    ):
        with assemble(tiny_run.settings(tmp_path, **changes)) as assembly:
            run = assembly.run
        assert [isinstance(state.opt, LossScaled) for state in (run.actor, run.critic)] == scaled
    half = tiny_run.settings(tmp_path, model__compute_dtype="float16")
    names = modules.kernels_named(half) | {"model.log_probs": "triton"}
    (actor, _), (exact, _) = (actor_after_a_step(settings) for settings in (half, tiny_run.settings(tmp_path)))
    assert actor.actor.opt.steady > 0
    for name, x in exact.actor.params.items():
        torch.testing.assert_close(actor.actor.params[name], x, rtol=0, atol=1e-2)
    with pytest.raises(ValueError, match=r"log_probs/triton (has no float16|cannot run here)"):
        check_kernels(names, bare_model(half.model), half.mesh)


@pytest.mark.slow
def test_each_role_is_on_the_host_or_not(tmp_path):
    """Where it is changes no number."""
    tiny_run.write_task(tmp_path)
    expected, _ = actor_after_a_step(tiny_run.settings(tmp_path))
    cases = [
        ({"critic__offload": "all"}, {"critic"}),
        ({"critic__offload": "moments", "model__ref_offload": True}, {"ref"}),
        ({"model__offload": "all", "critic__offload": "none"}, {"actor", "ref"}),
        ({"model__offload": "moments", "model__ref_offload": False}, set()),
    ]
    for changes, fetched in cases:
        with assemble(tiny_run.settings(tmp_path, **changes)) as assembly:
            passes = field(assembly.program.annotate, "passes")
            run_of = {"actor": passes.policy, "ref": passes.reference, "critic": passes.values}
            run, _, _ = ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
        assert {role for role, fn in run_of.items() if isinstance(fn.fetch({}), OnHost)} == fetched
        assert tree.digest(run) == tree.digest(expected)


@pytest.mark.parametrize("reason", [None, "no C++ compiler (g++ or clang++) is installed"])
def test_layers_are_compiled_where_there_is_a_compiler(tmp_path, monkeypatch, reason):
    tiny_run.write_task(tmp_path)
    monkeypatch.setattr("fppo.models.inner.needs_compiler", lambda: reason)
    assembling = assemble(tiny_run.settings(tmp_path, model__compile_layers=True))
    if reason:
        with pytest.raises(ValueError, match=r"layers cannot be compiled here: no C\+\+ compiler"), assembling:
            pass
        return
    with assembling as assembly:
        assert all(model.compile_layers for model in (assembly.model, assembly.critic_model))


@pytest.mark.slow
def test_passes_without_a_gradient_have_a_budget_of_their_own(tmp_path):
    tiny_run.write_task(tmp_path)
    for changes, expected in (({}, 33), ({"model__forward_token_budget": 77}, 77)):
        settings = tiny_run.settings(tmp_path, actor__token_budget=33, **changes)
        with assemble(settings) as assembly:
            update, annotate = assembly.program.update_actor, assembly.program.annotate
        for fn in (field(annotate, "passes").policy, field(annotate, "passes").values):
            assert fn.micro_batching.token_budget == expected
        assert field(update, "loop").micro_batching.token_budget == 33
        assert parts.forward_micro_batching_of(settings.model, settings.actor).token_budget == expected


@pytest.mark.slow
def test_a_reward_model_is_kept_in_its_dtype(tmp_path):
    tiny_run.write_task(tmp_path)
    judge = small_model(len(character_tokenizer(CHARACTERS)), width=16, layers=1)
    judge = models.build(judge.config, "value")
    models.save(judge, models.init_params(judge, Key(1)), tmp_path / "judge")
    scores = []
    for dtype in ("float32", "bfloat16"):
        changes = {"reward__model__path": str(tmp_path / "judge"), "reward__model__dtype": dtype}
        scores.append(actor_after_a_step(tiny_run.settings(tmp_path, **changes))[1].scores)
    assert 0 < (scores[0] - scores[1]).abs().max() < 0.05
