"""Runs that train adapters: resumed bit for bit on their base alone, exported for PEFT or merged."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fppo import metrics, tree
from fppo.assembly.checks import TRAIN
from fppo.assembly.inputs import Inputs
from fppo.assembly.run import assemble
from fppo.commands import actions
from fppo.key import Key
from fppo.models import bases, lora, lora_files
from fppo.pipeline.train import iterate
from fppo.runs import jsonl, session
from fppo.runtime.checkpoint import CheckpointError
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.simulate import simulate
from fppo.settings import files
from fppo_kernels.collectives import Axis
from tests import tiny_run

LORA = {"model__lora__rank": 2, "model__lora__alpha": 4.0, "actor__optimizer__schedule": "constant"}


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert actions.train(tiny_run.settings(task, output_dir=str(directory), **LORA)) == 0
    return directory


def _digests(directory):
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


@pytest.mark.slow
def test_a_run_holds_one_base_and_trains_the_factors_and_the_value_head(task, tmp_path):
    settings = tiny_run.settings(task, output_dir=str(tmp_path), model__lora__critic_rank=1, **LORA)
    with assemble(settings) as assembly:
        actor, critic, run = assembly.model, assembly.critic_model, assembly.run
        assert critic is not None
        assert lora.same_base(actor, critic)
        assert run.ref == {}
        assert run.actor.params.keys() == actor.shapes.keys() == run.actor.opt.mu.keys()
        assert {n.rpartition(".")[2] for n in run.actor.params} == {"lora_A", "lora_B"}
        assert {n for n in run.critic.params if "lora" not in n} == {"score.weight", "score.bias"}
        assert {x.shape[-2] for n, x in run.critic.params.items() if n.endswith("lora_A")} == {1}
        assert sorted(run.bases) == ["actor", "critic"]
    for critic_dtype, kept in ((None, torch.bfloat16), ("float32", torch.float32)):
        changes = {"model__compute_dtype": "bfloat16", "critic__compute_dtype": critic_dtype}
        with assemble(tiny_run.settings(task, output_dir=str(tmp_path), **LORA, **changes)) as assembly:
            assert {x.dtype for x in assembly.model.frozen.params.values()} == {kept}  # as wide as its widest passes
            assert {x.dtype for x in assembly.run.actor.params.values()} == {torch.float32}


def test_a_critic_starts_from_an_adapter_in_files_with_its_own_rank_scale_and_targets(task, tmp_path):
    """On the policy's base, with the value head of a fresh critic; what does not fit is an error before any work."""
    settings = tiny_run.settings(task, output_dir=str(tmp_path / "run"), **LORA)
    with assemble(settings) as assembly:
        head = {n: x for n, x in assembly.run.critic.params.items() if "lora" not in n}
        plain, base = assembly.model.plain, assembly.model.frozen.params
    own, adapter = lora.adapt(plain, base, lora.Lora(3, 6.0, ("q_proj", "down_proj")), key=Key(7))
    adapter = {name: x + 0.1 for name, x in adapter.items()}
    lora_files.save(own, adapter, tmp_path / "own", base="anywhere")
    changes = LORA | {"output_dir": str(tmp_path / "run"), "model__lora__critic_path": str(tmp_path / "own")}
    with assemble(tiny_run.settings(task, **changes)) as assembly:
        critic = assembly.run.critic.params
        assert lora.same_base(assembly.model, assembly.critic_model)
        assert assembly.critic_model.frozen.lora.scale == 2.0
        assert {name: x.tolist() for name, x in critic.items()} == {n: x.tolist() for n, x in (adapter | head).items()}
        assert {x.shape[-2] for name, x in assembly.run.actor.params.items() if name.endswith("lora_A")} == {2}
    wrong = changes | {"model__lora__critic_path": str(tmp_path)}
    with pytest.raises(files.SettingsError, match=r"model.lora.critic_path = .* holds no PEFT adapter"):
        Inputs(settings=tiny_run.settings(task, **wrong)).need(*TRAIN)


def test_an_exclusion_of_a_run_is_named_with_its_setting(task, tmp_path):
    changes = LORA | {"output_dir": str(tmp_path), "model__lora__exclude": ["q_prj"]}
    with pytest.raises(files.SettingsError, match=r"model.lora.exclude: exclude \['q_prj'\] .* did you mean 'q_proj'"):
        Inputs(settings=tiny_run.settings(task, **changes)).need(*TRAIN)


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit_without_the_base_in_its_checkpoints(task, whole, tmp_path):
    parts = tmp_path / "parts"
    for steps in (2, 4):
        actions.train(tiny_run.settings(task, output_dir=str(parts), steps=steps, **LORA))
    assert _digests(parts) == _digests(whole)
    assert actions.replay(whole, 4) == 0
    stored = [name for file in parts.rglob("checkpoints/**/*.safetensors") for name in load_file(file)]
    assert any("lora_A" in name for name in stored)
    assert not any(name.endswith("proj.weight']") or "embed" in name for name in stored)
    lines = jsonl.read(whole / "metrics.jsonl")
    assert lines[-1]["actor/grad_norm"] > 0
    assert lines[-1]["critic/grad_norm"] > 0


@pytest.mark.slow
def test_a_run_with_its_moments_on_the_host_is_the_run_without(task, whole, tmp_path):
    changes = {"model__offload": "moments", "critic__offload": "moments", "model__offload_activations": True}
    assert actions.train(tiny_run.settings(task, output_dir=str(tmp_path), steps=2, **LORA, **changes)) == 0
    assert _digests(tmp_path) == {step: state for step, state in _digests(whole).items() if step <= 2}


@pytest.mark.slow
def test_another_base_and_another_adapter_are_refused_by_name(task, whole, tmp_path):
    other, run = tmp_path / "other", tmp_path / "run"
    shutil.copytree(task / "start", other)
    shutil.copytree(whole, run)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name][0, 0] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    for changes, message in (
        ({"model__path": str(other)}, "model.path: the actor's adapter in .* was trained on the weights of .*start"),
        ({"model__lora__alpha": 8.0}, "is rank 2, alpha 4, standard .* the settings give rank 2, alpha 8"),
        ({"model__lora__rank": 3}, "the settings give rank 3"),
        ({"model__compute_dtype": "bfloat16"}, "has base weights in float32, the settings give bfloat16"),
        ({"model__lora__rank": 0, "model__lora__alpha": 16.0}, "of another model or other settings"),
    ):
        given = tiny_run.settings(task, output_dir=str(run), steps=5, **{**LORA, **changes})
        with pytest.raises((ValueError, CheckpointError), match=message):
            actions.train(given)
    moved = tmp_path / "moved"  # the same weights elsewhere are the same base
    shutil.copytree(task / "start", moved)
    settings = tiny_run.settings(task, output_dir=str(run), model__path=str(moved), **LORA)
    with assemble(settings) as assembly:
        assert session.restore(settings, assembly).step == 4


@pytest.fixture(scope="module")
def kept(whole, tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept") / "adapter"
    assert actions.export(whole, directory, None) == 0
    return str(directory)


def _first_step(settings, mesh=LOCAL):
    with assemble(settings, mesh=mesh) as assembly:
        run, _, report = next(iterate(assembly.run, program=assembly.program, draw=assembly.draw))
        return assembly.run.ref, run.ref, metrics.report(report)["actor/reward_kl_penalty"]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float", pytest.param("nf4", marks=pytest.mark.slow)])
def test_the_reference_is_the_policy_as_it_starts(task, kept, tmp_path, base):
    """Also where it starts from an adapter, which is no step away from itself, whatever the update does to it."""
    changes = {"output_dir": str(tmp_path), "model__lora__path": kept, "model__lora__base": base}
    before, after, kl = _first_step(tiny_run.settings(task, **changes))
    assert kl == pytest.approx(0, abs=1e-6)
    assert before
    assert tree.digest(before) == tree.digest(after)
    none, _, kl = _first_step(tiny_run.settings(task, **changes, model__lora__reference="base"))
    assert none == {}
    assert abs(kl) > 1e-4
    both = simulate({"shard": 2}, lambda mesh: _first_step(tiny_run.settings(task, **changes), mesh)[2])
    assert both == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.slow
def test_a_reference_that_is_the_start_goes_on_in_a_resumed_run(task, kept, tmp_path):
    """It is a part of the state: what a run that goes on compares with is not the policy as it goes on."""
    settings = partial(tiny_run.settings, task, output_dir=str(tmp_path / "run"), model__lora__path=kept)
    assert actions.train(settings(steps=2)) == 0
    with assemble(settings(steps=4)) as assembly:
        start, actor = tree.digest(assembly.run.ref), tree.digest(assembly.run.actor.params)
        restored = session.restore(settings(steps=4), assembly)
        assert tree.digest(restored.ref) == start
        assert tree.digest(restored.actor.params) != actor


@pytest.mark.slow
def test_an_adapter_is_exported_for_peft_or_merged_and_starts_another_run(task, whole, tmp_path):
    assert actions.evaluate(tiny_run.settings(task, output_dir=str(whole), **LORA)) == 0
    assert actions.export(whole, tmp_path / "adapter", None) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4.0, str(task / "start"))
    assert (whole / "model" / "adapter_config.json").read_text() == json.dumps(config, indent=2, sort_keys=True) + "\n"
    weights = [load_file(place / "adapter_model.safetensors") for place in (whole / "model", tmp_path / "adapter")]
    assert tree.digest(weights[0]) == tree.digest(weights[1])
    assert actions.export(whole, tmp_path / "merged", None, merge=True) == 0
    changes = {"model__lora__path": str(tmp_path / "adapter"), "critic__optimizer__lr": 1e-4}
    with assemble(tiny_run.settings(task, output_dir=str(tmp_path / "next"), **changes)) as assembly:
        adapter, model = assembly.run.actor.params, assembly.model
        with assemble(tiny_run.settings(task, output_dir=str(whole), **LORA)) as before:
            last = session.load(before, whole / "checkpoints", 4).actor.params
        assert tree.digest(adapter) == tree.digest({name: last[name] for name in adapter})
        expected = lora.merged(model, adapter)
        assert assembly.critic_model.frozen.lora.rank == 2
    got = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).named_parameters())
    for name, x in expected.items():
        torch.testing.assert_close(got[name].detach(), x.cpu(), rtol=1e-6, atol=1e-7)
    assert actions.export(whole, tmp_path / "critic", None, "critic", merge=True) == 0
    with pytest.raises(ValueError, match=r"value head, which PEFT.*--merge"):
        actions.export(whole, tmp_path / "critic 2", None, "critic")


@pytest.mark.slow
def test_a_run_on_a_quantised_base_goes_on_bit_for_bit_and_is_exported_as_it_was_trained(task, tmp_path, capsys):
    pytest.importorskip("bitsandbytes", reason="pip install 'fppo[quantised]'")
    settings = partial(tiny_run.settings, task, model__lora__base="nf4", steps=2, **LORA)
    run, parts = tmp_path / "run", tmp_path / "parts"
    with assemble(settings(output_dir=str(run))) as assembly:
        assert bases.base_kind(assembly.model) == "nf4"
        assert lora.same_base(assembly.model, assembly.critic_model)
        assert assembly.run.ref == {}
        model = assembly.model
    for where, steps in ((run, 2), (parts, 1), (parts, 2)):
        assert actions.train(settings(output_dir=str(where), steps=steps)) == 0
    assert _digests(parts) == _digests(run)
    shown = capsys.readouterr()
    assert "7 weights in nf4" in shown.out + shown.err
    with pytest.raises(
        ValueError, match=r"model\.lora\.base: .* has base weights in nf4 and float32, the settings give float32:"
    ):
        actions.train(settings(output_dir=str(run), model__lora__base="float", steps=3))
    assert actions.export(run, tmp_path / "adapter", None) == 0
    assert "it is another policy" in capsys.readouterr().err
    assert actions.export(run, tmp_path / "merged", None, merge=True) == 0
    assert "start rounded to nf4" in capsys.readouterr().err
    adapter = lora_files.load(model, tmp_path / "adapter", like=_zeros(model))
    got = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).named_parameters())
    for name, x in lora.merged(model, adapter).items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0)


def _zeros(model):
    return {name: torch.zeros(shape) for name, shape in model.shapes.items()}


def test_what_does_not_go_with_adapters_is_named_at_once(task):
    wrong = {
        "model__offload": "all",
        "model__compile_layers": True,
        "model__ref_dtype": "bfloat16",
        "actor__experts__bias_rate": 0.1,
    }
    with pytest.raises(files.SettingsError) as caught:
        tiny_run.settings(task, **LORA, **wrong)
    for name in wrong:
        assert f"{name.replace('__', '.')} = " in str(caught.value)
    for changes, words in (
        ({"model__lora__rank": 2, "critic__offload": "all"}, "critic.offload = 'all': the base of adapters stays on"),
        ({"model__lora__alpha": 4.0}, "model.lora.alpha = 4.0: nothing reads it here"),
        ({"model__lora__base": "nf4"}, "model.lora.base = 'nf4': nothing reads it here"),
        ({"model__lora__send": "alone"}, "model.lora.send = 'alone': nothing reads it here"),
        ({"model__lora__send": "alone", "model__lora__rank": 2}, "model.lora.send = 'alone': nothing reads it here"),
        (
            {
                "model__lora__send": "alone",
                "model__lora__rank": 2,
                "rollout__engine": "vllm",
                "rollout__vllm__send": "changed",
            },
            "rollout.vllm.send = 'changed': nothing reads it here",
        ),
        ({"model__lora__rank": 2, "model__lora__reference": "base"}, "model.lora.reference = 'base': nothing reads it"),
        (
            {"model__lora__path": "x", "model__ref_path": "y", "model__lora__reference": "base"},
            "model.lora.reference = 'base': nothing reads it here: it is for no model.ref_path",
        ),
        ({"model__lora__path": "x", "model__lora__rank": 4}, "model.lora.rank = 4: the adapter in model.lora.path"),
    ):
        with pytest.raises(files.SettingsError, match=words):
            tiny_run.settings(task, **changes)


@pytest.mark.slow
def test_a_tensor_axis_that_would_cut_what_has_one_scale_is_refused_before_any_work(task):
    asked = partial(tiny_run.settings, task, **LORA)
    mesh = Mesh({"tensor": Axis(2)})
    words = "model.lora.base = 'nf4': a tensor axis of 2 ranks does not go with nf4: model.layers.0.self_attn.q_proj"
    with pytest.raises(files.SettingsError) as caught:
        Inputs(settings=asked(model__lora__base="nf4"), mesh=mesh).need(*TRAIN)
    assert [line.startswith(words) for line in caught.value.problems] == [True]
    Inputs(settings=asked(model__lora__base="int8"), mesh=mesh).need(*TRAIN)
    pools = {"placement__pools": {"a": {"ranks": 2, "tensor": 2}}, "placement__roles__actor": "a"}
    with pytest.raises(files.SettingsError, match="placement.pools.a: " + re.escape(words)):
        Inputs(settings=asked(model__lora__base="nf4", **pools)).need(*TRAIN)
