"""What keeps rows from sharing prompts is named where that is asked for, and said in a line where it is left open."""

import attrs
import pytest

from fppo import models
from fppo.assembly.announce import sharing_lines
from fppo.settings import checks, files
from fppo.settings.resolve import Machine, resolved, sharing_hindrances
from fppo.settings.train import TrainSettings
from fppo_kernels.table import Kernels
from tests import tiny
from tests.models.hybrids import HYBRIDS

H100 = Machine(device="cuda", capability=(9, 0))
HINDRANCES = [
    ({"model.remove_padding": False}, "model.remove_padding = False runs padded rows as they are"),
    ({"mesh.context": 2}, "mesh.context = 2 deals the packed row in blocks"),
    ({"algorithm.router_replay": "old_log_probs"}, "algorithm.router_replay = 'old_log_probs' replays what routers"),
]


def settings_of(changes):
    return files.replace(TrainSettings(), changes)


def said(changes, *, model=None, kernels=None):
    model = tiny.model_and_params("lm")[0] if model is None else model
    settings = settings_of(changes)
    lines = sharing_lines(
        settings.model, settings.rollout.n, sharing_hindrances(settings), model, kernels or Kernels.named()
    )
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize(("changes", "words"), HINDRANCES)
def test_settings_that_share_nothing(changes, words):
    own = settings_of(changes | {"model.share_prompts": True})
    (line,) = (line for line in map(str, checks.problems(own)) if line.startswith("model.share_prompts"))
    assert words in line
    assert line.startswith("model.share_prompts = True: ")
    assert line.endswith("leave one of them out")
    assert f"prompts computed anew for each response: {words}" in said(changes | {"rollout.n": 4})
    assert not said(changes)  # one response to each prompt
    assert not said(changes | {"rollout.n": 4, "model.share_prompts": False})


def test_models_and_kernels_that_share_nothing():
    changes = {"rollout.n": 4}

    def mine(query, key, value, *, lengths, scale): ...

    assert not said(changes)
    assert "carry states" in said(changes, model=models.build(HYBRIDS["qwen3_next"]))
    assert "no keyword key_lengths" in said(changes, kernels=attrs.evolve(Kernels.named(), attention=mine))
    assert "model.graphs records passes" in said(changes | {"model.graphs": True})


def test_recorded_passes_and_shared_prompts_are_one_or_the_other():
    both = settings_of({"model.graphs": True, "model.share_prompts": True})
    assert any("model.share_prompts = True lets rows share tokens" in str(problem) for problem in checks.problems(both))
    assert resolved(settings_of({"model.share_prompts": True}), H100)[0].model.graphs is False
    assert resolved(settings_of({}), H100)[0].model.graphs is True
