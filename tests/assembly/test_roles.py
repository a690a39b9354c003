"""Roles where they are made: beside others, apart from them, and on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fppo import models, tree
from fppo.assembly import roles
from fppo.assembly.adapters import load_policy
from fppo.assembly.parts import Tools
from fppo.assembly.roles import PassOptions, make_reference, make_roles
from fppo.fleet import Group, Here, LocalGroup
from fppo.key import Key
from fppo.quickstart import character_tokenizer, small_model
from fppo.runtime.mesh import LOCAL
from fppo.runtime.offload import Lane
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.packed import sorted_rows
from fppo_kernels.table import Kernels
from tests import tiny, tiny_run
from tests.fleet.threads import Threads

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = small_model(15, width=16, layers=1)
KERNELS = Kernels.named()
HERE = Here(LOCAL, CPU)


def options(**changes: Any) -> PassOptions:
    usual = {"remove_padding": True, "share_prompts": "auto", "graphs": True, "temperature": 0.5, "replay": "none"}
    return PassOptions(**{**usual, "micro_batching": MicroBatching(size=3), **changes})


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("share", ["auto", True, False])
def test_passes_are_recorded_on_a_gpu_and_then_share_prompts_only_if_they_must(monkeypatch, graphs, device, share):
    monkeypatch.setattr(roles, "graphs", lambda model, device: (model, device))
    of, here = options(graphs=graphs, share_prompts=share), Here(LOCAL, device)
    recorded = graphs and device is GPU
    assert of.record(here, MODEL) == ((MODEL, GPU) if recorded else None)
    assert of.forward(here, KERNELS, MODEL).share_prompts == (False if recorded and share == "auto" else share)


@pytest.mark.parametrize(("path", "loads"), [(None, 1), ("other", 0)])
def test_a_reference_apart_from_an_adapted_policy_begins_as_that_or_has_a_path_of_its_own(tmp_path, path, loads):
    """Then nothing of the policy is loaded for it."""
    tiny_run.write_task(tmp_path)
    other = small_model(15, width=32, layers=2)
    params = models.init_params(other, Key(5))
    models.save(other, params, tmp_path / "other")
    changes = {"model__lora__rank": 2, "model__ref_path": path and str(tmp_path / path)}
    settings, loaded = tiny_run.settings(tmp_path, **changes), []

    def load(*at: Any) -> Any:
        loaded.append(at)
        return load_policy(settings.model, settings.critic, Key(0), *at)

    made = make_reference(HERE, Tools(KERNELS, Lane(CPU)), load, options(), settings.model)
    assert loaded == [(LOCAL, CPU)] * loads
    if path is None:
        assert made.params == {}  # the base alone, which a fresh adapter does not change
        assert len(made.model.layers) == 1
    else:
        assert tree.digest(made.params) == tree.digest(params)
        assert len(made.model.layers) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_work_is_balanced_over_the_ranks_of_the_actors_group(tmp_path, ranks):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, device="cpu")
    with Group("actor", Threads(shard=ranks)) as group:
        made = make_roles(settings, KERNELS, LocalGroup(HERE), {"actor": group})
        passes = made.passes(settings.critic, character_tokenizer())
        report = passes.balance(sorted_rows(tiny.experience(0, 8)))
    assert list(report) == (["perf/imbalance"] if ranks > 1 else [])
