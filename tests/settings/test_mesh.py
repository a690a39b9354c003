"""What does not go with an axis of the mesh is named before anything is loaded."""

import pytest

from fppo.settings import checks, files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.remove_padding": False}, "mesh.tensor = 2: a tensor axis cuts packed rows"),
        ({"model.compile_layers": True}, "mesh.tensor = 2: its layers exchange tokens, which torch.compile does not"),
        ({"model.log_probs": "liger"}, "model.log_probs = 'liger': it cannot split the vocabulary"),
        ({"actor.optimizer.name": "muon"}, "actor.optimizer.name = 'muon': it needs whole matrices"),
        ({"critic.optimizer.name": "muon"}, "critic.optimizer.name = 'muon': it needs whole matrices"),
        ({"mesh.shard": 2}, "(replicate 1, shard 2, sequence 1, tensor 2) do not multiply"),
    ],
)
def test_a_tensor_axis(changes, words):
    base = {"mesh.tensor": 2, "algorithm.advantage": "gae"}
    assert checks.mesh_problems(files.replace(files.from_dict({}), base), 2) == []
    (said,) = checks.mesh_problems(files.replace(files.from_dict({}), base | changes), 2)
    assert words in said
