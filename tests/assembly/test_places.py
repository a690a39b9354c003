"""Where the tensors, meshes and tools of a built run come from, and an evaluation beside the run that it is of."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from fppo import models, tree
from fppo.assembly.run import assemble, assemble_evaluation
from fppo.assembly.supervised import COMMAND, assemble_supervised
from fppo.key import Key
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.runtime.mesh import LOCAL
from fppo.settings import files
from tests import tiny_run
from tests.assembly.walk import placed, walked
from tests.runs.test_supervised import settings_of


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The tiny task, and models of the same shape with weights of their own."""
    directory = tmp_path_factory.mktemp("task")
    tiny_run.write_task(directory)
    tokenizer = character_tokenizer(CHARACTERS)
    for number, name in enumerate(("critic", "reference", "teacher", "judge"), 1):
        model = small_model(len(tokenizer), width=16, layers=1)
        models.save(model, models.init_params(model, Key(number)), directory / name, tokenizer=tokenizer)
    scorer = models.build(small_model(len(tokenizer), width=16, layers=1).config, "value")
    models.save(scorer, models.init_params(scorer, Key(7)), directory / "scorer")
    return directory


JUDGED = {
    "reward__judge__path": "judge",
    "reward__judge__chat": False,
    "reward__judge__template": "{prompt}{response}",
    "reward__judge__pattern": r"(\d)",
}


def settings(task, **changes):
    """Settings whose paths are in the task's directory."""
    own = {name: str(task / x) if name.endswith("_path") and isinstance(x, str) else x for name, x in changes.items()}
    return tiny_run.settings(task, **{"device": "cpu", **own})


def loaded(task, name: str, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The digests of a model's parameters in its files."""
    return tree.digest({x: tensor.to(dtype) for x, tensor in models.load(task / name)[1].items()})


@pytest.mark.slow
def test_every_role_begins_with_the_weights_of_its_own_path(task):
    paths = {"model__critic_path": "critic", "model__ref_path": "reference", "model__ref_dtype": "bfloat16"}
    with assemble(settings(task, **paths)) as made:
        run = made.run
    assert tree.digest(run.actor.params) == loaded(task, "start")
    assert tree.digest(run.ref) == loaded(task, "reference", torch.bfloat16)
    own, critic = loaded(task, "critic"), tree.digest(run.critic.params)
    shared = own.keys() & critic.keys()
    assert {name: critic[name] for name in shared} == {name: own[name] for name in shared}
    assert shared == own.keys() - {"['lm_head.weight']"}
    assert critic.keys() - shared == {"['score.weight']", "['score.bias']"}
    with assemble(settings(task)) as made:
        policy, beside, ref = (tree.digest(x) for x in (made.run.actor.params, made.run.critic.params, made.run.ref))
    assert policy == ref == loaded(task, "start")
    assert all(beside[name] == policy[name] for name in beside.keys() & policy.keys())
    assert (run.step, run.actor.step, run.critic.step, run.ahead, run.bases) == (0, 0, 0, (), None)


@pytest.mark.slow
def test_heads_adapters_and_draws_follow_from_the_seed(task):
    """One seed gives one state; another one gives another head, and other factors of adapters."""
    made = {}
    for seed in (0, 0, 1):
        for name, changes in {
            "whole": {},
            "adapted": {"model__lora__rank": 2, "model__lora__targets": ["q_proj"]},
        }.items():
            with assemble(settings(task, seed=seed, **changes)) as run:
                state = run.run
            made.setdefault((name, seed), []).append(
                (tree.digest(state.actor.params), tree.digest(state.critic.params))
            )
    for name in ("whole", "adapted"):
        first, again = made[name, 0]
        (other,) = made[name, 1]
        assert first == again
        for role, changed in ((0, name == "adapted"), (1, True)):
            assert first[role].keys() == other[role].keys()
            assert (first[role] != other[role]) is changed


@pytest.mark.slow
def test_the_shapes_of_a_run_are_those_of_its_tensors(task):
    """Whole ones, of everything that a mesh may cut: parameters and moments of actor and critic, and the reference."""
    for changes in ({}, {"model__lora__rank": 2}, {"model__offload": "all"}):
        with assemble(settings(task, actor__optimizer__name="adamw", **changes)) as made:
            run, shapes = made.run, made.shapes
        tensors = {path: x for path, x in tree.leaves_with_paths(run) if isinstance(x, torch.Tensor) and x.dim()}
        cut = {path: tuple(x.shape) for path, x in tensors.items() if path.startswith((".actor", ".critic", ".ref"))}
        assert {path: tuple(x) for path, x in shapes.items() if len(tuple(x))} == cut


def beside(task, **changes):
    """Two meshes of one rank, and where in a built run each of them is."""
    mesh, sampling = attrs.evolve(LOCAL), attrs.evolve(LOCAL)
    assert mesh is not sampling
    with assemble(settings(task, **changes), mesh=mesh, sampling_mesh=sampling) as made:
        whole = {"program": made.program, "evaluate": made.evaluate, "mesh": made.mesh}
        return placed(whole, {id(mesh): "trains", id(sampling): "samples"})


@pytest.mark.parametrize(
    "changes",
    [
        {"model__teacher_path": "teacher", "algorithm__advantage": "distill", "actor__epochs": 1, **tiny_run.NO_KL},
        {"reward__model__path": "scorer", **JUDGED},
        {"rollout__turns__respond": "tests.rollout.functions:adder", "rollout__interrupt": 0},
    ],
    ids=["teacher", "scorers", "tools"],
)
def test_what_samples_and_scores_has_the_groups_of_its_own_mesh(task, changes):
    found = beside(task, **changes)
    trains = {path for path, names in found.items() if names == {"trains"}}
    samples = {path for path, names in found.items() if names == {"samples"}}
    assert {path: names for path, names in found.items() if path not in trains | samples} == {}
    assert {path for path in trains if not path.startswith(("program.annotate", "program.update", "mesh"))} == set()
    there = ("program.rollout", "program.reward.", "program.teacher", "evaluate")
    assert {path for path in samples if not path.startswith(there)} == set()
    assert "program.annotate.passes.policy.forward.mesh" in trains
    assert {"program.rollout.mesh", "evaluate.mesh"} <= samples


EVALUATED: list[dict[str, Any]] = [
    {},
    {"eval__n": 2, "eval__temperature": 0.5, "eval__top_k": 4, "eval__stop": ["9"], "eval__max_prompts": 7},
    {"rollout__batch_size": 16, "eval__n": 4, "eval__temperature": 0.5, "eval__max_tokens": 2},
    {"rollout__cache_gb": 0.25, "model__offload": "all", "model__forward_token_budget": 99},
    {"reward__model__path": "scorer", "reward__model__offload": True, "reward__failure_score": -1.0},
    {**JUDGED, "reward__judge__offload": True, "seed": 3},
    {"rollout__turns__respond": "tests.rollout.functions:adder", "rollout__turns__max_turns": 5},
    {"rollout__environment": "tests.rollout.environments:Count", "reward__functions": []},
    {"model__teacher_path": "teacher", "algorithm__advantage": "distill", "actor__epochs": 1, **tiny_run.NO_KL},
    {"model__attention": "eager", "model__compute_dtype": "bfloat16"},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", EVALUATED, ids=[str(number) for number in range(len(EVALUATED))])
def test_an_evaluation_by_itself_is_the_one_of_the_run(task, changes):
    """All that it holds: prompts, sampling, engine, scores and what is measured."""
    of = settings(task, **changes)
    with assemble(of) as made:
        expected = walked({"evaluate": made.evaluate})
        words = made.inputs.tokenizer.get_vocab()
    with assemble_evaluation(of) as alone:
        assert walked({"evaluate": alone.evaluate}) == expected
        assert alone.tokenizer.get_vocab() == words
        assert (alone.device.type, alone.bases) == ("cpu", None)


def test_an_evaluation_without_prompts_is_refused(task):
    with (
        pytest.raises(ValueError, match=r"data\.eval_path is not set"),
        assemble_evaluation(settings(task, data__eval_path=[])),
    ):
        pass


@pytest.mark.slow
def test_an_adapters_base_is_named_by_its_files(task):
    with assemble(settings(task, model__lora__rank=2, model__critic_path="critic")) as made:
        bases = made.run.bases
    with assemble_evaluation(settings(task, model__lora__rank=2)) as alone:
        assert {role: str(base) for role, base in (alone.bases or {}).items()} == {"actor": str(bases["actor"])}
    assert {role: base.source for role, base in bases.items()} == {
        "actor": str(task / "start"),
        "critic": str(task / "critic"),
    }
    assert len({base.digest for base in bases.values()}) == 2
    assert {base.dtype for base in bases.values()} == {"float32"}
    assert bases["actor"].adapter.startswith("rank 2, alpha 16, standard scaling, of ")


@pytest.mark.parametrize(
    ("changes", "sets"),
    [
        ({}, {"prompts": 24, "held-out prompts": 24}),
        ({"data__eval_path": [], "eval__max_prompts": None}, {"prompts": 24}),
    ],
)
def test_the_prompts_that_a_run_draws_from_are_noted(task, changes, sets):
    with assemble(settings(task, data__may_change=True, **changes)) as made:
        drawn = made.drawn
    assert {name: len(prompts) for name, prompts in drawn.sets.items()} == sets
    assert drawn.may_change
    assert {name.partition(",")[0] for name in drawn.notes()} == set(sets)
    assert drawn.notes() == drawn.notes()
    assert drawn.made_by is None


def test_a_supervised_run_has_the_policys_weights_and_the_shapes_of_its_state(task, tmp_path):
    tiny_run.write_task(tmp_path)
    rows = '{"prompt": "1+1=", "response": "2", "from": "s"}\n' * 4
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    of, made = assemble_supervised(settings_of(tmp_path))
    run = made.run
    assert tree.digest(run.actor.params) == loaded(task, "start")
    tensors = {path: x for path, x in tree.leaves_with_paths(run) if isinstance(x, torch.Tensor) and x.dim()}
    assert {path: tuple(x) for path, x in made.shapes.items() if len(tuple(x))} == {
        path: tuple(x.shape) for path, x in tensors.items()
    }
    assert (made.drawn.made_by, run.critic, run.ref, run.bases, run.step) == (COMMAND, None, None, None, 0)
    assert {name: len(x) for name, x in made.drawn.sets.items()} == {"prompts": 4, "held-out prompts": 4}
    assert made.drawn.notes()["made by"] == COMMAND
    assert files.flat(files.to_dict(of))["model.attention"] != "auto"
