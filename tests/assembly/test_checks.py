"""All models of a run are held against its mesh, its tokens and its rows before any weights are read."""

from __future__ import annotations

from typing import Any

import pytest

from fppo import models
from fppo.assembly.checks import EVALUATE, TRAIN, check_models
from fppo.assembly.inputs import Inputs
from fppo.key import Key
from fppo.quickstart import character_tokenizer, small_model
from fppo.runtime.mesh import Mesh
from fppo.settings import files
from fppo_kernels.collectives import Axis
from tests import tiny_run
from tests.models.families import LONGROPE


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    wide = small_model(40, width=16, layers=1)
    models.save(wide, models.init_params(wide, Key(0)), tmp_path / "wide", tokenizer=character_tokenizer())
    return tmp_path


def wrong(task: Any, *parts: Any, mesh: Any = None, trains: bool = True, **changes: Any) -> list[str]:
    """What is found wrong with a run of these settings."""
    given = {"mesh": mesh} if mesh is not None else {}
    try:
        Inputs(settings=tiny_run.settings(task, **changes), trains=trains, **given).need(*parts or (check_models,))
    except files.SettingsError as error:
        return list(error.problems)
    return []


def test_every_model_that_a_run_uses_is_held_to_the_policys_tokens(task):
    paths = {"model__critic_path": str(task / "wide"), "model__ref_path": str(task / "wide")}
    (both,) = wrong(task, **paths)
    assert "critic has 40 tokens" in both
    assert "reference has 40 tokens" in both
    said = "\n".join(wrong(task, **paths, reward__model__path=str(task / "start")))
    assert "start is not a reward model" in said
    assert "critic has 40 tokens" in said
    (alone,) = wrong(task, **paths, **tiny_run.NO_KL)  # there is no reference
    assert "reference" not in alone
    assert wrong(task, trains=False, **paths) == wrong(task) == []


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_judge_in_this_process_is_held_to_the_mesh(task, engine):
    """One of vLLM is not cut by it."""
    tiny_run.write_task(task, layers=2)  # the policy; the judge has one layer
    judge = {"reward__judge__path": str(task / "wide"), "reward__judge__chat": False, "reward__judge__engine": engine}
    found = wrong(task, mesh=Mesh({"pipeline": Axis(2)}), **tiny_run.NO_KL, **judge)
    assert found == (
        ["mesh.pipeline = 2: the model has 1 layers, and a stage has one at least; give at most 1 stages"]
        if engine == "embedded"
        else []
    )


def test_each_rows_length_is_that_of_the_model_that_reads_it(task):
    """With the tokens of the truth for a critic that sees it, and the teacher's own prompts."""
    models.build(LONGROPE).config.save_pretrained(task / "long")  # 12 positions, by its rope
    sizes = {"data__max_prompt_tokens": 8, "rollout__max_tokens": 4, "model__path": str(task / "long")}
    sizes |= {"model__tokenizer": str(task / "start"), "data__eval_path": []}

    def lengths(**changes: Any) -> list[str]:
        return [line for line in wrong(task, **{**sizes, **changes}) if "allow rows of" in line]

    assert lengths() == []
    assert [line.split(" allow")[0] for line in lengths(critic__privileged=3)] == [
        "critic.privileged = 3, data.max_prompt_tokens = 8 and rollout.max_tokens = 4"
    ]
    assert lengths(critic__privileged=3, critic__reads="hidden") == []
    taught = {"algorithm__advantage": "distill", "model__teacher_path": str(task / "long"), **tiny_run.NO_KL}
    taught |= {"data__teacher_prompt": "{prompt}", "actor__epochs": 1}
    assert lengths(**taught, data__teacher_prompt_tokens=8) == []
    assert len(lengths(**taught, data__teacher_prompt_tokens=9)) == 1


def test_a_base_in_codes_is_held_to_the_meshes_of_all_that_stand_on_it(task):
    pools = {"a": {"ranks": 1}, "b": {"ranks": 2, "tensor": 2}}
    changes = {"placement__pools": pools, "placement__roles__actor": "a", "placement__roles__critic": "b"}
    changes |= {"model__lora__rank": 4, "model__lora__base": "nf4"}
    (found,) = wrong(task, **changes)
    assert found.startswith("placement.pools.b: model.lora.base = 'nf4'")
    assert wrong(task, **changes, model__lora__critic_rank=0) == []


def test_an_evaluation_reads_the_policy_alone(task):
    """Neither the critic's nor the reference's files, nor the prompts to train on."""
    gone = {"model__critic_path": "./nowhere", "model__ref_path": "./nowhere", "data__path": ["nowhere.jsonl"]}
    assert wrong(task, *EVALUATE, trains=False, **gone) == []
    assert len(wrong(task, *TRAIN, **gone)) == 2
