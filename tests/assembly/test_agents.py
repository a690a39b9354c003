"""The engine of an agent's episodes has the bounds, the limits and the texts that settings give."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest

from fppo.assembly import agents
from fppo.assembly.texts import load_tokenizer
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.serve.service import Bounds
from fppo_kernels.collectives import Axis
from tests import tiny_run
from tests.serve import players

AGENT = {
    "rollout__environment": "agent",
    "rollout__environment__play": "tests.serve.players:counting",
    "rollout__environment__concurrency": 7,
    "rollout__environment__time_limit": 9.0,
    "rollout__environment__rows": "all",
    "rollout__turns__workers": 3,
    "rollout__max_tokens": 5,
    "data__max_prompt_tokens": 11,
    "reward__functions": [],
}


@pytest.fixture
def made(monkeypatch):
    """Arguments of the engine and of the runner."""
    kept = {}

    def noted(name):
        return lambda *args, **keywords: kept.setdefault(name, (args, keywords)) and SimpleNamespace(name=name)

    monkeypatch.setattr(agents, "AgentEngine", noted("engine"))
    monkeypatch.setattr(agents, "AgentRunner", noted("runner"))
    return kept


def engine_of(settings, mesh=LOCAL):
    tokenizer = load_tokenizer(settings.model, settings.data)
    return agents.agent_engine(settings.model, settings.rollout, settings.data, "alone", tokenizer, 13, mesh)


@pytest.mark.parametrize(("turn_tokens", "answer"), [(None, 5), (2, 2)])
def test_it_has_the_limits_of_the_agent_and_the_bounds_of_rows(tmp_path, made, turn_tokens, answer):
    tiny_run.write_task(tmp_path)
    engine_of(tiny_run.settings(tmp_path, **AGENT, rollout__turns__turn_tokens=turn_tokens))
    (play,), limits = made["runner"]
    assert play is players.counting
    assert limits == {"time_limit": 9.0, "workers": 3, "concurrency": 7}
    (alone, runner, texts), rest = made["engine"]
    assert (alone, runner.name) == ("alone", "runner")
    assert rest.pop("bounds") == Bounds(row_tokens=16, answer_tokens=answer)
    assert rest == {"pad_token_id": 13, "rows": "all", "thinking": "keep"}
    assert texts is not None


def test_it_is_played_on_one_rank(tmp_path, made):
    tiny_run.write_task(tmp_path)
    with pytest.raises(ValueError, match=r"rollout.environment.name = 'agent': is played on one rank"):
        engine_of(tiny_run.settings(tmp_path, **AGENT), Mesh({"replicate": Axis(2)}))
    assert made == {}


def test_what_becomes_of_thoughts_is_handed_on(tmp_path, made):
    tiny_run.write_task(tmp_path)
    settings = tiny_run.settings(tmp_path, **AGENT)
    turns = attrs.evolve(settings.rollout.turns, thinking="drop")
    engine_of(attrs.evolve(settings, rollout=attrs.evolve(settings.rollout, turns=turns)))
    assert made["engine"][1]["thinking"] == "drop"
