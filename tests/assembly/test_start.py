"""The parts of a built run, one by one, of stand-ins: its first state, engines, evaluation, truth and data."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo import advantages, data
from fppo.assembly import run as run_module
from fppo.fleet import HERE, Here, LocalGroup
from fppo.key import Key
from fppo.models.model import Model
from fppo.pipeline.games import Played
from fppo.pipeline.truth import critic_truth, one_answer, right_answers
from fppo.quickstart import CHARACTERS, character_tokenizer, small_model
from fppo.rollout import Sampling
from fppo.rollout.turns.engine import TurnsEngine
from fppo.runtime.mesh import LOCAL
from fppo.settings.learning import AdvantageSettings, AlgorithmSettings, CriticSettings, KlRewardSettings
from fppo.settings.model import ModelSettings
from fppo.settings.placement import EngineSettings
from fppo.settings.rollout import RolloutSettings, TurnsSettings
from fppo.settings.train import DataSettings, EvalSettings
from fppo.steps.train_state import TrainState

RUN: Any = run_module
WORDS = character_tokenizer(CHARACTERS)
MODEL = small_model(len(WORDS), width=16, layers=1)


def state(number: float) -> TrainState:
    return TrainState(params={"w": torch.full((2, 3), number)}, opt={"w": torch.zeros(2, 3)}, step=0)


def roles(**changes: Any) -> Any:
    parts = {
        "actor": SimpleNamespace(state=state(1), model=MODEL),
        "critic": SimpleNamespace(state=state(2), model=MODEL),
        "reference": SimpleNamespace(params={"w": torch.full((2, 3), 3.0)}, model=MODEL),
    }
    return SimpleNamespace(**{**parts, "bases": lambda section: {}, **changes})


@pytest.mark.parametrize("pretrain", [0, 3])
@pytest.mark.parametrize("name", ["gae", "grpo"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_fresh_run_has_the_state_of_its_roles(pretrain, name, alone):
    section, cursor = ModelSettings(), data.DataCursor(position=5)
    own = roles(**dict.fromkeys(("critic", "reference"))) if alone else roles()
    algorithm = AlgorithmSettings(advantage=AdvantageSettings(name=name), kl=KlRewardSettings(coef=0.25))
    run = RUN._fresh(own, section, Key(4), CriticSettings(pretrain=pretrain), algorithm, cursor)
    assert run.actor is own.actor.state
    assert run.critic is (None if alone else own.critic.state)
    assert run.ref is (None if alone else own.reference.params)
    assert (run.kl.coef, run.key, run.cursor is cursor, run.step, run.bases) == (0.25, Key(4), True, 0, None)
    assert (run.pretraining is not None) == bool(pretrain and name == "gae")


@pytest.mark.parametrize("here", [False, True])
def test_the_models_and_shapes_of_a_run_are_those_that_are_here(monkeypatch, here):
    monkeypatch.setattr(RUN, "shape_of", lambda *sections: ("shape", sections))
    monkeypatch.setattr(RUN, "whole_shapes", lambda state, extents: {".w": (state.params["w"][0, 0].item(), extents)})
    section, critic, own = ModelSettings(), CriticSettings(), roles()
    if not here:
        for name in ("actor", "critic", "reference"):
            getattr(own, name).model = "elsewhere"
    whole = SimpleNamespace(actor=own.actor.state, critic=own.critic.state)
    shapes = RUN._shapes(whole, own)
    assert isinstance(MODEL, Model)
    if here:
        assert RUN._models(section, critic, own) == (MODEL, MODEL)
        assert shapes == {
            ".actor.w": (1.0, MODEL.extents),
            ".critic.w": (2.0, MODEL.extents),
            **{f".ref[{name!r}]": extent for name, extent in MODEL.extents.items()},
        }
    else:
        assert RUN._models(section, critic, own) == (("shape", (section,)), ("shape", (section, critic)))
        assert shapes == {}
    assert RUN._models(section, critic, roles(critic=None)) == (MODEL, None)
    assert RUN._shapes(SimpleNamespace(actor=None, critic=None), roles(critic=None, reference=None)) == {}


def test_the_engine_is_where_the_actor_is(monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(RUN, "engine_of", lambda *args: asked.append(args) or "engine")
    monkeypatch.setattr(RUN, "PlacedEngine", lambda group, engine: ("placed", group, engine))

    def make(group: Any) -> Any:
        own = roles(at={"actor": group}, tools="tools", begin="begin")
        return RUN._engine((), EngineSettings(), "options", own, "load", ["w"], 13, "mesh")

    assert make(LocalGroup(Here(LOCAL, torch.device("cpu")))) == "engine"
    assert asked == [("options", MODEL, 13, "mesh", "tools")]
    calls: list[Any] = []
    group = SimpleNamespace(call=lambda *args, **named: calls.append((args, named)) or "made")
    with make(group) as engine:
        assert engine == ("placed", group, "made")
    assert calls == [
        ((RUN.make_engine, HERE, "begin", "options", MODEL, 13), {"stays": True, "label": "make engine"}),
    ]


@pytest.mark.parametrize("vllm", [None, "vllm"])
def test_an_engine_pool_has_an_engine_of_each_group(monkeypatch, vllm):
    monkeypatch.setattr(RUN, "EnginePool", lambda *args, **named: (args, named))
    monkeypatch.setattr(RUN, "make_engine_of_pool", lambda here, **named: (here, named))
    calls: list[Any] = []
    group = SimpleNamespace(call=lambda *args, **named: calls.append((args, named)) or "made")
    options = SimpleNamespace(vllm=vllm, bucket_mb=3)
    own = roles(at={"actor": "group"}, begin="begin")
    section = EngineSettings(rows=7, restarts=2)
    (engines, make, policy), named = RUN._engine([group], section, options, own, "load", ["w"], 13, "mesh")
    assert (engines, make(group)) == ([group], "made")
    ((fn, here), how) = calls[0]
    assert (here, how) == (HERE, {"stays": True, "label": "make engine"})
    given = {"begin": "begin", "load": "load", "options": options, "pad_token_id": 13}
    assert fn("here") == ("here", given)
    assert (policy.group, policy.model, policy.bucket_bytes) == ("group", MODEL, 3 * 2**20)
    assert named == {"names": ["w"], "pad_token_id": 13, "rows": 7, "restarts": 2, "on_host": vllm is not None}


def prompts(count: int) -> Any:
    return [None] * count


@pytest.mark.parametrize(("saved", "held_out"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("may_change", [False, True])
def test_what_a_run_draws_from_is_what_it_reads(saved, held_out, may_change):
    beside = SimpleNamespace(held_out=prompts(3)) if held_out else None
    own = SimpleNamespace(prompts=prompts(2), eval=beside)
    found = RUN._drawn(own, saved=saved, may_change=may_change)
    expected = ({} if saved else {"prompts": 2}) | ({"held-out prompts": 3} if held_out else {})
    assert {name: len(x) for name, x in found.sets.items()} == expected
    assert found.may_change is may_change


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_draw_has_as_many_prompts_as_the_batch_has_groups(shuffle):
    own = SimpleNamespace(prompts="prompts", drawing=SimpleNamespace(order="order", curriculum="curriculum"))
    draw = RUN._draw(own, Key(3), RolloutSettings(batch_size=24, n=4), DataSettings(shuffle=shuffle))
    assert (draw.func, draw.args) == (data.next_batch, ("prompts",))
    how = {"size": 6, "shuffle": shuffle, "order": "order", "curriculum": "curriculum"}
    assert draw.keywords == {"key": Key(3), **how}


SAMPLING = Sampling(n=5, max_tokens=3, temperature=0.5)


@pytest.mark.parametrize(("size", "used"), [(0, 1), (1, 1), (6, 6)])
def test_an_evaluation_measures_with_its_own_temperature(size, used):
    inputs = SimpleNamespace(held_out="held out", sampling=SAMPLING)
    scores = SimpleNamespace(at=lambda temperature: ("score", temperature))
    found = RUN._evaluation(inputs, SimpleNamespace(engine="engine", scoring=scores), size, "truth")
    assert (found.batches.func, found.batches.args) == (data.batches, ("held out", used))
    assert (found.engine, found.truth, found.sampling, found.score) == ("engine", "truth", SAMPLING, ("score", 0.5))
    assert found.measure == (RUN.environment_metrics,)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(
    ("name", "keywords", "gamma"),
    [("gae", {}, 1.0), ("gae", {"gamma": 0.5}, 0.5), ("turn_gae", {"gamma": 0.5}, 1.0)],
)
def test_the_truth_is_of_the_engine_that_is_evaluated(monkeypatch, turns, name, keywords, gamma):
    monkeypatch.setattr(RUN, "game_of", lambda section: ("game", section))
    engine: Any = object.__new__(TurnsEngine) if turns else "engine"
    inputs, section = SimpleNamespace(sampling=SAMPLING, tokenizer=WORDS), TurnsSettings(max_turns=4)
    advantage = AdvantageSettings(name=name, keywords=keywords)
    assert RUN._truth(EvalSettings(), advantage, section, inputs, engine, "passes") is None
    found = RUN._truth(EvalSettings(exact_values=True), advantage, section, inputs, engine, "passes")
    one = attrs.evolve(SAMPLING, n=1)
    assert (found.func, found.args) == (critic_truth, ())
    how = dict(found.keywords)
    known = how.pop("known")
    assert how.pop("engine") is engine
    assert how == {"sampling": one, "passes": "passes"}
    if turns:
        assert isinstance(known.exact, Played)
        assert known.exact.engine is engine
        assert (known.exact.game, known.exact.sampling, known.exact.gamma) == (("game", section), one, gamma)
    else:
        assert (known.exact.func, known.exact.keywords["gamma"]) == (one_answer, gamma)
        answers: partial[Any] = known.exact.keywords["answers"]
        assert (answers.func, answers.keywords) == (right_answers, {"tokenizer": WORDS, "sampling": one})
    rewards, values, mask = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.5]]), torch.ones(1, 2, dtype=torch.bool)
    expected = getattr(advantages, name)(rewards, values, mask, **keywords)
    torch.testing.assert_close(known.estimate(rewards, values, mask).advantages, expected.advantages)
