"""Modules of the user's that register classes of models: imported in every process that builds one, and only there."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoConfig

from fppo.assembly.machine import resolved
from fppo.assembly.run import assemble
from fppo.commands import actions
from fppo.pipeline.step import ppo_step
from fppo.runs import jsonl
from fppo.runs.serving import served_policy
from fppo.settings import files
from fppo.settings.modules import module_problems
from tests import tiny_run

MODULE = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification, Qwen2Config
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification, Qwen2Model


class OwnConfig(Qwen2Config):
    model_type = "{kind}"


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig


class OwnModel(Qwen2Model):
    config_class = OwnConfig


class OwnForTokenClassification(Qwen2ForTokenClassification):
    config_class = OwnConfig


AutoConfig.register("{kind}", OwnConfig)
AutoModel.register(OwnConfig, OwnModel)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
AutoModelForTokenClassification.register(OwnConfig, OwnForTokenClassification)
"""


def own_model(directory, kind):
    """A task whose model is of this kind, as a module of the kind's name registers it in the directory modules."""
    tiny_run.write_task(directory)
    place = directory / "start" / "config.json"
    config = json.loads(place.read_text())
    assert config["model_type"] == "qwen2"
    place.write_text(json.dumps(config | {"model_type": kind, "architectures": ["OwnForCausalLM"]}))
    (directory / "modules").mkdir()
    (directory / "modules" / f"{kind}.py").write_text(MODULE.format(kind=kind))
    return {"model__import": [kind], "module_dirs": [str(directory / "modules")], "device": "cpu"}


def registered(kind):
    try:
        return AutoConfig.for_model(kind).model_type == kind
    except ValueError:
        return False


def test_a_model_of_the_users_own_class_trains_as_the_one_that_it_is_a_copy_of(tmp_path):
    own = own_model(tmp_path / "own", "own_trained")
    tiny_run.write_task(tmp_path / "plain")
    with pytest.raises(ValueError, match="own_trained"), assemble(tiny_run.settings(tmp_path / "own")):
        pass
    actors = []
    for name, changes in (("own", own), ("plain", {})):
        with assemble(tiny_run.settings(tmp_path / name, **changes)) as assembly:
            run, _, _ = ppo_step(assembly.run, program=assembly.program, draw=assembly.draw)
            actors.append(run.actor.params)
    assert actors[0].keys() == actors[1].keys()
    assert all(torch.equal(x, actors[1][name]) for name, x in actors[0].items())


def test_what_says_auto_is_chosen_for_a_model_of_the_users_own_class(tmp_path):
    """By its sizes, which are read before anything else of a run."""
    own = own_model(tmp_path, "own_chosen")
    changes = own | {"model__cpp": "auto", "steps": 10**9, "model__attention": "auto"}
    settings = files.replace(tiny_run.settings(tmp_path), {k.replace("__", "."): x for k, x in changes.items()})
    assert not registered("own_chosen")
    resolved(settings)
    assert registered("own_chosen")


def test_a_served_policy_is_of_the_users_own_class(tmp_path):
    policy = served_policy(tiny_run.settings(tmp_path, **own_model(tmp_path, "own_served")), begins=True)
    assert type(policy.model.whole_config).__name__ == "OwnConfig"


def test_a_module_that_does_not_import_is_named_early(tmp_path):
    """One that is absent when settings are read; one that fails when a run opens what they name."""
    tiny_run.write_task(tmp_path)
    (tmp_path / "own_failing.py").write_text("raise OSError('no such kernel')\n")
    settings = tiny_run.settings(tmp_path, module_dirs=[str(tmp_path)], model__import=["own_failing", "own_absent"])
    (problem,) = module_problems(settings)
    assert str(problem).startswith(
        "model.import = 'own_absent': the module 'own_absent' does not import: there is none"
    )
    text = "model.import 'own_failing': the module 'own_failing' does not import: OSError: no such kernel"
    with pytest.raises(files.SettingsError, match=text), assemble(settings):
        pass
    with pytest.raises(ValueError, match=text):
        served_policy(settings, begins=True)
    with pytest.raises(files.SettingsError, match="must be names of modules, as my_package"):
        tiny_run.settings(tmp_path, model__import=["own_failing.py/x"])


def test_a_module_beside_a_models_files_is_not_imported(tmp_path):
    own_model(tmp_path, "own_beside")
    shutil.move(tmp_path / "modules" / "own_beside.py", tmp_path / "start" / "own_beside.py")
    with pytest.raises(ValueError, match="own_beside"), assemble(tiny_run.settings(tmp_path)):
        pass
    assert not registered("own_beside")


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_import_them_and_the_export_is_of_the_class(tmp_path):
    """Of the policy, the critic and the engine; also those that start again."""
    own = own_model(tmp_path, "own_placed")
    pools = {name: {"ranks": 1} for name in ("a", "c", "e")}
    roles = {"actor": "a", "critic": "c", "rollout": "e"}
    placed = {"placement__pools": pools} | {f"placement__roles__{role}": pool for role, pool in roles.items()}
    settings = tiny_run.settings(tmp_path, output_dir=str(tmp_path / "run"), steps=1, **own, **placed)
    assert actions.train(settings) == 0
    assert [line["step"] for line in jsonl.read(tmp_path / "run" / "metrics.jsonl")][-1] == 1
    assert actions.export(tmp_path / "run", tmp_path / "model", None) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "own_placed"
