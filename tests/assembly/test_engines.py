"""Engines are made of the options that name them: with stand-ins for vLLM, tools and environments."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly import engines, rewards
from fppo.assembly.engines import EngineOptions, answering, engine_of, game_of, make_engine, make_engine_of_pool
from fppo.assembly.parts import Tools
from fppo.data import ChatOptions
from fppo.fleet import Here
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.interrupt import InterruptibleEngine
from fppo.rollout.spread import FetchingEngine, SpreadEngine
from fppo.rollout.turns.engine import TurnsEngine
from fppo.rollout.turns.games import Game
from fppo.rollout.turns.observations import PlainText
from fppo.rollout.vllm.host import EngineFailure
from fppo.runtime.mesh import LOCAL
from fppo.runtime.offload import Lane
from fppo.settings.model import ModelSettings
from fppo.settings.reward import JudgeSettings
from fppo.settings.rollout import EnvironmentSettings, RolloutSettings, TurnsSettings, VllmSettings
from fppo.settings.train import DataSettings
from fppo_kernels.table import Kernels

CPU = torch.device("cpu")
MESH = attrs.evolve(LOCAL)
MODEL = small_model(15, width=16, layers=1)
TOOLS = Tools(Kernels.named(), Lane(CPU))
EMBEDDED = EngineOptions(vllm=None, cache_gb=None, bucket_mb=3, routed=False, exact=False, on_host=False)
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
    return log


@pytest.mark.parametrize("on_host", [False, True])
def test_vllm_is_open_for_as_long_as_the_engine_and_gets_parameters_from_the_host(vllm, on_host):
    options = attrs.evolve(VLLM, on_host=on_host)
    with engine_of(options, MODEL, 13, MESH, TOOLS) as found:
        assert vllm == [(VLLM.vllm, MODEL, 13, MESH), "opened"]
        assert isinstance(found, SpreadEngine)
        assert (found.mesh is MESH, found.pad_token_id, found.together) == (True, 13, ())
        assert isinstance(found.engine, FetchingEngine) is on_host
        inner = found.engine.engine if on_host else found.engine
        assert isinstance(inner, Stub)
    assert vllm[-1] == "closed"


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize(("cache", "expected"), [(None, None), (0.25, 2**28), (1.5, 3 * 2**29)])
def test_the_embedded_engine_has_the_trainers_tools(monkeypatch, on_host, routed, cache, expected):
    checked: list[Any] = []
    monkeypatch.setattr(engines, "check_engine", checked.append)
    monkeypatch.setattr(engines, "EmbeddedEngine", lambda **named: SimpleNamespace(**named, together=("tensor",)))
    options = attrs.evolve(EMBEDDED, on_host=on_host, routed=routed, cache_gb=cache)
    with engine_of(options, MODEL, 13, MESH, TOOLS) as found:
        assert checked == [MODEL]
        assert (found.mesh is MESH, found.pad_token_id, found.together) == (True, 13, ("tensor",))
        assert isinstance(found.engine, FetchingEngine) is on_host
        inner = found.engine.engine if on_host else found.engine
        assert not on_host or found.engine.lane is TOOLS.lane
    own = vars(inner)
    assert own.pop("mesh") is MESH
    assert own == {
        "model": MODEL,
        "kernels": TOOLS.kernels,
        "pad_token_id": 13,
        "cache_bytes": expected,
        "routed": routed,
        "exact": False,
        "together": ("tensor",),
    }


@pytest.mark.parametrize("exact", [False, True])
def test_an_exact_engine_is_probed_on_this_machine(monkeypatch, exact):
    probed: list[Any] = []
    monkeypatch.setattr(engines, "check_engine", lambda model: None)
    monkeypatch.setattr(engines, "EmbeddedEngine", lambda **named: SimpleNamespace(**named, together=()))
    monkeypatch.setattr(engines, "probe_exact", lambda *args: probed.append(args))
    found = engines.embedded_engine(attrs.evolve(EMBEDDED, exact=exact), MODEL, 0, MESH, TOOLS)
    assert found.engine.exact is exact
    assert probed == ([(MODEL, TOOLS.kernels)] if exact else [])


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


WORDS = character_tokenizer(CHARACTERS)
SECTION = ModelSettings(path="p")


class Run:
    """An answerer of turns, which is open for a while."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.args, self.named, self.log = args, named, []

    def __enter__(self) -> Run:
        self.log.append("opened")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("closed")


@pytest.fixture
def turns(monkeypatch):
    """Stand-ins for what answers turns, and for the vocabulary of the model."""
    monkeypatch.setattr(engines, "vocabulary_size_of", lambda model: 12)
    monkeypatch.setattr(engines, "ToolRunner", Run)
    monkeypatch.setattr(engines, "environment_runner", lambda *args: Run(*args))
    monkeypatch.setattr(engines, "chat_options", lambda rows: ChatOptions())


def answered(rollout: RolloutSettings, rows: DataSettings) -> Any:
    alone: Any = "alone"
    return answering(SECTION, rollout, rows, alone, WORDS, 13, MESH)


@pytest.mark.parametrize("interrupt", [0, 4])
def test_one_turn_is_the_engines_own_unless_newer_weights_interrupt_it(turns, interrupt):
    with answered(RolloutSettings(interrupt=interrupt), DataSettings()) as found:
        engine: Any = found
        if not interrupt:
            assert engine == "alone"
            return
        assert isinstance(engine, InterruptibleEngine)
        assert (engine.engine, engine.every, engine.pad_token_id) == ("alone", 4, 13)


TURNS = TurnsSettings(
    max_turns=5,
    turn_tokens=2,
    failure="no",
    time_limit=7.0,
    workers=2,
    concurrency=9,
    retries=3,
)


@pytest.mark.parametrize(("name", "inline"), [("calculator", True), ("tests.rollout.functions:adder", False)])
def test_a_tool_answers_turns_with_its_limits(turns, name, inline):
    rollout = RolloutSettings(turns=attrs.evolve(TURNS, respond=name))
    with answered(rollout, DataSettings(max_prompt_tokens=99)) as found:
        engine: Any = found
        assert isinstance(engine, TurnsEngine)
        limits = {"failure": "no", "time_limit": 7.0, "workers": 2, "concurrency": 9, "retries": 3}
        assert engine.tools.tools.named == {**limits, "inline": inline}
        assert (engine.engine, engine.pad_token_id, engine.mesh is MESH) == ("alone", 13, True)
        assert (engine.max_turns, engine.turn_tokens, engine.thinking, engine.draws) == (5, 2, "keep", None)
        assert isinstance(engine.encode.encode, PlainText)
        assert (engine.encode.vocabulary, engine.tokenizer) == (12, WORDS)
        assert engine.prompt([{"role": "user", "content": "12"}]) == WORDS.encode("12")
        assert engine.tools.tools.log == ["opened"]
    assert engine.tools.tools.log == ["opened", "closed"]


def test_a_game_has_draws_of_its_own(turns, monkeypatch):
    game = Game(node=lambda state: pytest.fail("nobody plays"), draws=3)
    monkeypatch.setattr(engines.tools, "resolve", lambda name: game)
    with answered(RolloutSettings(turns=attrs.evolve(TURNS, respond="my:game")), DataSettings()) as found:
        engine: Any = found
        assert engine.draws == 3
    assert game_of(attrs.evolve(TURNS, respond="my:game")) is game
    monkeypatch.setattr(engines.tools, "resolve", lambda name: print)
    with pytest.raises(ValueError, match=r"eval\.exact_values = True: rollout\.turns\.respond = 'my:game' is no"):
        game_of(attrs.evolve(TURNS, respond="my:game"))


@pytest.mark.parametrize(("failure", "roles"), [("no", ("tool",)), ("", ())])
def test_the_chat_template_of_a_tool_is_asked_about_its_messages(turns, monkeypatch, failure, roles):
    asked: list[Any] = []
    checked: list[Any] = []
    monkeypatch.setattr(engines, "chat_template", lambda words, **named: asked.append(named) or PlainText(words))
    monkeypatch.setattr(engines, "_check_thinking_drop", lambda *args: checked.append(args))
    for thinking in ("keep", "drop"):
        own = attrs.evolve(TURNS, respond="tests.rollout.functions:adder", failure=failure, thinking=thinking)
        with answered(RolloutSettings(turns=own), DataSettings(chat=True)) as found:
            engine: Any = found
            assert engine.thinking == thinking
    assert asked == [{"roles": roles, "options": ChatOptions()}] * 2
    assert len(checked) == 1


def test_an_environment_plays_with_its_prompts_and_its_own_failures(turns):
    world = EnvironmentSettings(name="tests.rollout.environments:Count", failure="raise")
    rollout = RolloutSettings(turns=TURNS, environment=world, interrupt=6)
    with answered(rollout, DataSettings(max_prompt_tokens=99)) as found:
        around: Any = found
        assert (around.every, around.pad_token_id) == (6, 13)
        engine = around.engine
        assert engine.tools.tools.args == (world, TURNS)
        assert (engine.prompt_tokens, engine.failure, engine.draws) == (99, "raise", None)
        assert (engine.max_turns, engine.turn_tokens, engine.pad_token_id, engine.mesh is MESH) == (5, 2, 13, True)
        assert (engine.encode.vocabulary, engine.engine) == (12, "alone")
    assert engine.tools.tools.log == ["opened", "closed"]


def test_an_agent_plays_by_a_server_of_its_own(turns, monkeypatch):
    agents = pytest.importorskip("fppo.assembly.agents")
    asked: list[Any] = []

    @contextlib.contextmanager
    def opened(*args: Any):
        asked.append(args)
        yield "agent's engine"

    monkeypatch.setattr(agents, "agent_engine", opened)
    rollout = RolloutSettings(environment=EnvironmentSettings(name="agent", keywords={"play": "my:play"}))
    rows = DataSettings()
    with answered(rollout, rows) as found:
        engine: Any = found
        assert engine == "agent's engine"
    assert asked == [(SECTION, rollout, rows, "alone", WORDS, 13, MESH)]


JUDGE = JudgeSettings(path="j", max_rows=5, max_tokens=7, max_prompt_tokens=11)
PARAMS = {"w": torch.ones(1)}


@pytest.mark.parametrize("on_host", [False, True])
def test_a_judge_is_answered_by_an_engine_of_its_own(monkeypatch, on_host):
    checked: list[Any] = []
    host = {"w": torch.zeros(1)}
    monkeypatch.setattr(rewards, "check_engine", checked.append)
    monkeypatch.setattr(rewards, "to_host", lambda x: host)
    here = Here(MESH, CPU)
    with rewards._judge_engine(here, JUDGE, TOOLS.kernels, MODEL, PARAMS, 13, on_host=on_host) as found:
        engine, params, together = found
    inner: Any = engine.engine if on_host else engine
    assert isinstance(engine, FetchingEngine) is on_host
    assert (inner.model, inner.kernels, inner.pad_token_id, inner.max_rows) == (MODEL, TOOLS.kernels, 13, 5)
    assert inner.mesh is MESH
    assert together == inner.together
    assert torch.equal(params["w"], host["w"] if on_host else PARAMS["w"])
    assert checked == [MODEL]


@pytest.mark.parametrize(("given", "limit"), [(None, 18), (40, 40)])
def test_a_judge_on_vllm_has_rows_as_long_as_a_question_and_its_answer(monkeypatch, given, limit):
    log: list[Any] = []
    monkeypatch.setattr(rewards, "vllm_engine", lambda *args: log.append(args) or Stub(log))
    section = attrs.evolve(JUDGE, engine="vllm", vllm=VllmSettings(max_model_len=given, max_rows=3))
    with rewards._judge_engine(Here(MESH, CPU), section, TOOLS.kernels, MODEL, PARAMS, 13, on_host=True) as found:
        engine, params, together = found
        assert isinstance(engine, Stub)
        assert (params, together) == (PARAMS, ())
    assert log[0] == (VllmSettings(max_model_len=limit, max_rows=3), MODEL, 13, LOCAL)
    assert log[1:] == ["opened", "closed"]

    def fails(*_: Any) -> Any:
        raise EngineFailure("it died")

    monkeypatch.setattr(rewards, "vllm_engine", fails)
    with (
        pytest.raises(EngineFailure, match=r"reward\.judge: it died"),
        rewards._judge_engine(Here(MESH, CPU), section, TOOLS.kernels, MODEL, PARAMS, 13, on_host=True),
    ):
        pass
