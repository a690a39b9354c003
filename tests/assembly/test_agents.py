"""The engine of an agent's episodes."""

from __future__ import annotations

from typing import Any

import pytest

from fppo.assembly import agents
from fppo.assembly.inputs import Inputs
from fppo.runtime.mesh import Mesh
from fppo_kernels.collectives import Axis
from tests import tiny_run


def test_it_is_played_on_one_rank(tmp_path):
    tiny_run.write_task(tmp_path)
    world = {"rollout__environment": "agent", "rollout__environment__play": "tests.serve.players:counting"}
    inputs = Inputs(settings=tiny_run.settings(tmp_path, **world, reward__functions=[]))
    alone: Any = None
    with pytest.raises(ValueError, match=r"rollout.environment.name = 'agent': is played on one rank"):
        agents.agent_engine(inputs, alone, 13, Mesh({"replicate": Axis(2)}))
