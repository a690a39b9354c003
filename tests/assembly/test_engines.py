"""Engines where they are made, with a stand-in for vLLM, and what answers turns."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import engines, rewards
from fppo.assembly.engines import EngineOptions, engine_of, game_of, make_engine, make_engine_of_pool
from fppo.assembly.inputs import Inputs
from fppo.assembly.parts import Tools
from fppo.assembly.run import assemble
from fppo.fleet import Here
from fppo.quickstart import small_model
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.spread import FetchingEngine, SpreadEngine
from fppo.rollout.turns.observations import ChatTemplate, PlainText
from fppo.rollout.vllm.host import EngineFailure
from fppo.runtime.mesh import LOCAL
from fppo.runtime.offload import Lane
from fppo.settings.rollout import TurnsSettings, VllmSettings
from fppo_kernels.table import Kernels
from tests import tiny_run

CPU = torch.device("cpu")
MESH = attrs.evolve(LOCAL)
MODEL = small_model(15, width=16, layers=1)
TOOLS = Tools(Kernels.named(), Lane(CPU))
HOW = {"halve_on_oom": False, "routed": False, "exact": False, "draft_tokens": 0, "on_host": False}
EMBEDDED = EngineOptions(vllm=None, cache_bytes=None, bucket_mb=3, **HOW)
VLLM = attrs.evolve(EMBEDDED, vllm=VllmSettings(bucket_mb=5, send="changed", probe="never", max_rows=7))


class Stub:
    """A vLLM that is not there."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __enter__(self) -> Stub:
        self.log.append("opened")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("closed")

    def generate(self, *args: Any) -> None: ...


@pytest.fixture
def vllm(monkeypatch):
    """A log of what vLLMs were made of, and when they were opened and closed."""
    log: list[Any] = []
    monkeypatch.setattr(engines, "vllm_engine", lambda *args: log.append(args) or Stub(log))
    monkeypatch.setattr(rewards, "vllm_engine", lambda *args: log.append(args) or Stub(log))
    return log


@pytest.mark.parametrize("on_host", [False, True])
def test_vllm_is_open_for_as_long_as_the_engine_and_gets_parameters_from_the_host(vllm, on_host):
    options = attrs.evolve(VLLM, on_host=on_host)
    with engine_of(options, MODEL, 13, MESH, TOOLS) as found:
        assert vllm == [(VLLM.vllm, MODEL, 13, MESH), "opened"]
        assert isinstance(found, SpreadEngine)
        assert (found.mesh is MESH, found.pad_token_id, found.together) == (True, 13, ())
        assert isinstance(found.engine, FetchingEngine) is on_host
    assert vllm[-1] == "closed"


def test_an_engine_beside_the_actor_has_the_ranks_own_mesh_and_tools():
    begun: list[Any] = []
    here = Here(MESH, CPU)
    generate: Any = make_engine(
        here, lambda at: begun.append(at) or TOOLS, attrs.evolve(EMBEDDED, on_host=True), MODEL, 13
    )
    engine = generate.__self__
    assert begun == [here]
    assert (engine.mesh is MESH, engine.pad_token_id) == (True, 13)
    assert isinstance(engine.engine, FetchingEngine)
    assert engine.engine.engine.kernels is TOOLS.kernels


@pytest.mark.parametrize("options", [EMBEDDED, VLLM, attrs.evolve(EMBEDDED, on_host=True)])
def test_an_engine_of_a_pool_has_a_model_of_its_own_where_parameters_come(vllm, options):
    loaded, begun, device = [], [], torch.device("meta")
    here = Here(MESH, device)

    def load(mesh, place):
        loaded.append((mesh is MESH, place))
        return MODEL

    generate: Any = make_engine_of_pool(here, lambda at: begun.append(at) or TOOLS, load, options, 13)
    assert begun == [here]
    engine = generate.__self__
    if options.vllm is None:
        assert loaded == [(True, device)]
        assert isinstance(engine.engine, EmbeddedEngine)  # what is sent is on the device
        assert engine.mesh is MESH
        return
    assert loaded == [(True, CPU)]
    assert vllm == [(options.vllm, MODEL, 13, MESH)]
    assert isinstance(engine, Stub)


@pytest.mark.parametrize("chat", [False, True])
def test_a_tool_answers_in_the_form_of_its_rows(tmp_path, chat):
    tiny_run.write_task(tmp_path)
    shown = "{% for m in messages %}={{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    (tmp_path / "start" / "chat_template.jinja").write_text(shown)
    tool = {"rollout__turns__respond": "calculator", "rollout__stop": ["="]}
    with assemble(tiny_run.settings(tmp_path, data__chat=chat, **tool)) as made:
        engine: Any = made.program.rollout.engine
        assert isinstance(engine.encode.encode, ChatTemplate if chat else PlainText)
        assert (engine.thinking, engine.draws) == ("keep", None)


def test_exact_values_are_those_of_a_game():
    with pytest.raises(ValueError, match=r"eval\.exact_values = True: rollout\.turns\.respond = 'calculator' is no"):
        game_of(TurnsSettings(respond="calculator"))


@pytest.mark.parametrize(("given", "limit"), [(None, 18), (40, 40)])
def test_a_judge_on_vllm_has_rows_as_long_as_a_question_and_its_answer(tmp_path, vllm, monkeypatch, given, limit):
    tiny_run.write_task(tmp_path)
    judge = {"path": str(tmp_path / "start"), "max_tokens": 7, "max_prompt_tokens": 11, "engine": "vllm", "chat": False}
    changes = {f"reward__judge__{name}": x for name, x in judge.items()}
    settings = tiny_run.settings(tmp_path, **changes, reward__judge__vllm__max_model_len=given)
    inputs, here = Inputs(settings=settings), Here(MESH, CPU)
    with rewards.judge_of(here, inputs) as found:
        assert list(found) == ["judge"]
    assert (vllm[0][0].max_model_len, vllm[0][2], vllm[0][3], vllm[1:]) == (limit, 1, LOCAL, ["opened", "closed"])

    def fails(*_: Any) -> Any:
        raise EngineFailure("it died")

    monkeypatch.setattr(rewards, "vllm_engine", fails)
    with pytest.raises(EngineFailure, match=r"reward\.judge: it died"), rewards.judge_of(here, inputs):
        pass
