"""What does not go with an axis of the mesh is named before anything is loaded."""

import pytest

from fppo.settings import checks, files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.remove_padding": False}, "mesh.tensor = 2: a tensor axis cuts packed rows"),
        ({"model.compile_layers": True}, "mesh.tensor = 2: its layers exchange tokens, which torch.compile does not"),
        ({"model.log_probs": "liger"}, "model.log_probs = 'liger': it cannot split the vocabulary"),
        ({"actor.optimizer.name": "muon"}, "actor.optimizer.name = 'muon': it needs whole parameters"),
        ({"critic.optimizer.name": "muon"}, "critic.optimizer.name = 'muon': it needs whole parameters"),
        (
            {"mesh.shard": 2},
            "(pipeline 1, replicate 1, shard 2, expert 1, sequence 1, context 1, tensor 2) do not multiply",
        ),
        ({"mesh.virtual_stages": 2}, "mesh.virtual_stages = 2: its stages are those of a pipeline rank"),
        ({"critic.token_budget": "auto"}, "critic.token_budget = 'auto': ranks of mesh.tensor exchange what"),
        ({"rollout.cache_gb": "auto"}, "rollout.cache_gb = 'auto': ranks of mesh.tensor decode together"),
    ],
)
def test_a_tensor_axis(changes, words):
    base = {"mesh.tensor": 2, "algorithm.advantage": "gae"}
    assert checks.mesh_problems(files.replace(files.from_dict({}), base), 2) == []
    (said,) = checks.mesh_problems(files.replace(files.from_dict({}), base | changes), 2)
    assert words in str(said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.compile_layers": True}, "mesh.pipeline = 2: torch.compile has not been tried"),
        ({"mesh.tensor": 2}, "shard unset, expert 1, sequence 1, context 1, tensor 2) do not multiply"),
        ({"mesh.virtual_stages": 0}, "mesh.virtual_stages = 0"),
    ],
)
def test_a_pipeline_axis(changes, words):
    base = {"mesh.pipeline": 2, "mesh.virtual_stages": 2, "rollout.batch_size": 2}
    assert checks.mesh_problems(files.replace(files.from_dict({}), base), 2) == []
    settings = files.replace(files.from_dict({}), base | changes)
    said = [line for line in (*checks.mesh_problems(settings, 2), *checks.problems(settings)) if words in str(line)]
    assert len(said) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model.remove_padding": False},
            "mesh.context = 2: a context axis deals packed rows; set model.remove_padding",
        ),
        ({"mesh.sequence": 2}, "mesh.context = 2: mesh.sequence = 2 cuts the same rows; give one of them, of 4 ranks"),
        ({"actor.mini_batch_size": 1}, "mini_batch_size = 1: some ranks would have nothing to do"),
        ({"mesh.context": 1, "mesh.ring": True}, "mesh.ring = True: nothing reads it here: it is for mesh.context > 1"),
    ],
)
def test_a_context_axis(changes, words):
    base = {"mesh.context": 2, "mesh.shard": 2, "algorithm.advantage": "grpo"}
    assert checks.mesh_problems(files.replace(files.from_dict({}), base | {"mesh.ring": True}), 4) == []
    settings = files.replace(files.from_dict({}), base | changes)
    (said,) = checks.mesh_problems(settings, settings.mesh.least_ranks)
    assert words in str(said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.compile_layers": True}, "mesh.expert = 2: its layers exchange tokens, which torch.compile does not"),
        (
            {"actor.optimizer.name": "muon"},
            "actor.optimizer.name = 'muon': it needs whole parameters, which mesh.expert cuts",
        ),
    ],
)
def test_an_expert_axis(changes, words):
    alone = files.from_dict({"mesh": {"expert": 2}})
    assert checks.mesh_problems(alone, 2) == []
    settings = files.replace(alone, changes)
    assert any(words in str(line) for line in checks.mesh_problems(settings, settings.mesh.others))


@pytest.mark.parametrize("axis", ["replicate", "shard", "expert", "sequence", "context", "tensor", "pipeline"])
def test_an_axis_without_ranks_is_named_once(axis):
    settings = files.from_dict({"mesh": {axis: 0}})
    assert checks.mesh_problems(settings, 2) == []
    assert [x.text for x in checks.problems(settings) if x.path.startswith("mesh")] == ["must be 1 or more"]
