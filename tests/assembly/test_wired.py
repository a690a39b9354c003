"""The wires of a built run: what each of its parts is made of, with stand-ins that only note what they are given."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from fppo import losses
from fppo.advantages import grpo
from fppo.assembly import learning, program, roles
from fppo.assembly import run as run_module
from fppo.assembly.functions import policy_loss
from fppo.assembly.learning import learning_of
from fppo.assembly.parts import Tools
from fppo.assembly.pools import RolePlaces
from fppo.assembly.program import ScoredEngine, pretrain_of, program_of
from fppo.assembly.roles import PassOptions, make_actor, make_critic, make_reference
from fppo.fleet import Here, LocalGroup
from fppo.key import Key
from fppo.models import lora
from fppo.models.adapted import Lora
from fppo.pipeline.draw import SampleGroups, SampleSaved, Saving, equal_groups, truncated
from fppo.pipeline.gap import WatchAnnotate
from fppo.pipeline.program import SampleBatch
from fppo.pipeline.stages import Annotate, LeaveAgreed, LeaveDisputed, RollOut, Score, ScoreWithGreedy, turn_metrics
from fppo.quickstart import small_model
from fppo.rollout import EnginePool, Sampling
from fppo.runtime.mesh import LOCAL
from fppo.runtime.offload import Lane, OnHost
from fppo.settings.learning import ActorSettings, CriticSettings, ExpertSettings
from fppo.settings.model import ModelSettings
from fppo.settings.train import TrainSettings
from fppo.steps.actor import PolicyTerms
from fppo.steps.clock import Clock
from fppo.steps.critic import as_it_is
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels.table import Kernels
from tests import tiny_run
from tests.assembly.log import Log

RUN: Any = run_module
CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = small_model(15, width=16, layers=1)
VALUES = small_model(15, width=16, layers=1)
SAMPLING = Sampling(n=2, max_tokens=5, temperature=0.75)


# the program


def wired(tmp_path: Any, monkeypatch: Any, *, first: bool = True, pool: bool = False, **changes: Any) -> Any:
    """The program of settings, and what it was made of."""
    settings = tiny_run.settings(tmp_path, model__path="p", **changes)
    weights: list[Any] = []
    estimator = partial(grpo)
    own: Any = SimpleNamespace(
        update_actor=lambda: "update actor",
        update_critic=lambda: "update critic",
        together="together",
        hold=lambda: "hold",
    )
    terms = [SimpleNamespace(name=name, weight=weight) for name, weight in (("a", 0.5), ("b", 2.0))]
    runner = SimpleNamespace(terms=terms, make_on_finished="on finished")
    inputs: Any = SimpleNamespace(
        advantage=lambda given: weights.append(given) or estimator,
        sampling=SAMPLING,
        drawing=SimpleNamespace(learn="learn"),
        prompts=SimpleNamespace(pad_token_id=13),
    )
    scores: Any = SimpleNamespace(runner=runner, at=lambda temperature: ("score", temperature))
    monkeypatch.setattr(program, "is_first", lambda mesh: first and mesh == "mesh")
    alone = object.__new__(EnginePool) if pool else "alone"
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=77))
    scored: Any = ScoredEngine("engine", alone, scores)  # pyright: ignore
    made = program_of(settings, own, inputs, "passes", scored, model, "mesh", GPU)  # pyright: ignore
    assert weights == [{"a": 0.5, "b": 2.0}]
    return settings, made, estimator, alone


def plain(stage: Any) -> dict[str, Any]:
    """The fields of a stage, with functions and what they are bound to as plain values."""
    return {name: _plain(x) for name, x in attrs.asdict(stage, recurse=False).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return [_plain(x) for x in value] if isinstance(value, list) else value


WHOLE = {
    "rollout__temperature": 0.75,
    "rollout__n": 2,
    "rollout__max_tokens": 5,
    "rollout__gap": "stop",
    "rollout__filter__groups": True,
    "rollout__filter__by": "exact_match",
    "rollout__filter__max_draws": 6,
    "rollout__filter__truncated": True,
    "rollout__turns__respond": "tests.rollout.functions:adder",
    "rollout__save": True,
    "critic__reads": "hidden",
    "critic__ensemble": 3,
    "critic__leave_agreed": 0.375,
    "critic__leave_disputed": 0.25,
    "critic__freeze": True,
    "critic__pretrain": 2,
    "actor__entropy_coef": 0.01,
    "steps": 9,
    "algorithm__kl__coef": 0.03,
    "algorithm__kl__kind": "k1+",
    "algorithm__kl__target": 0.3,
    "algorithm__kl__horizon": 70,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("pool", [True, False])
def test_a_program_has_all_that_settings_and_roles_say(tmp_path, monkeypatch, first, pool):
    settings, made, estimator, alone = wired(tmp_path, monkeypatch, first=first, pool=pool, **WHOLE)
    assert made.rollout == RollOut(
        engine="engine", sampling=SAMPLING, measure=(turn_metrics,), make_on_finished="on finished"
    )
    assert made.score == Score(score=("score", 0.75))
    annotate = Annotate(passes="passes", old_log_probs="pass", sum_squared=False, replay="none", together="together")
    assert made.annotate == WatchAnnotate(stage=annotate, limit=1e-4, then="stop")
    assert isinstance(made.estimate, LeaveDisputed)
    assert isinstance(made.estimate.stage, LeaveAgreed)
    assert (made.estimate.share, made.estimate.stage.share) == (0.25, 0.375)
    assert plain(made.estimate.stage.stage) == {
        "advantage_fn": _plain(estimator),
        "max_tokens": 5,
        "kl_in_reward": True,
        "kl_kind": "k1+",
        "update_kl": (losses.update_kl, (), {"kind": "adaptive", "target": 0.3, "horizon": 70}),
        "correct": None,
        "drop": [(equal_groups, (), {"by": "exact_match"}), truncated],
        "whiten": False,
    }
    sample = SampleGroups(pad_token_id=13, max_draws=6, by="exact_match", learn="learn")
    directory = tmp_path / "run" / "rollouts"
    assert made.sample == (Saving(stage=sample, directory=directory) if first else sample)
    assert (made.update_actor, made.update_critic) == ("update actor", "update critic")
    assert (made.together, made.hold, made.interrupts, made.check) == ("together", "hold", False, False)
    assert (made.critic_warmup, made.steps, made.freeze_critic) == (0, 9, True)
    rule = pretrain_of(settings.critic, settings.algorithm)
    assert plain(made.pretrain) == plain(rule)
    if pool:
        assert made.bring == alone.bring
    else:
        assert made.bring("params") is None


def test_a_program_without_all_of_that_has_what_is_left(tmp_path, monkeypatch):
    changes = {"algorithm__old_log_probs": "engine", "algorithm__whiten": True, "critic__warmup_steps": 2}
    changes |= {"algorithm__router_replay": "all", "rollout__gap": "off", "rollout__max_tokens": 5}
    _, made, *_ = wired(tmp_path, monkeypatch, **changes, **tiny_run.NO_KL)
    assert made.rollout.measure == ()
    assert made.score == Score(score=("score", 1.0))
    assert made.annotate == Annotate(passes="passes", old_log_probs="engine", replay="all", together="together")
    assert (made.estimate.kl_in_reward, made.estimate.whiten, made.estimate.drop) == (False, True, [])
    assert made.sample == SampleBatch("learn")
    assert (made.pretrain, made.critic_warmup, made.freeze_critic) == (None, 2, False)
    _, grouped, *_ = wired(tmp_path, monkeypatch, algorithm__advantage="grpo", rollout__n=2, critic__warmup_steps=2)
    assert grouped.critic_warmup == 0
    _, again, *_ = wired(tmp_path, monkeypatch, rollout__from="there", rollout__gap="off")
    saved = SampleSaved(directory=tmp_path.__class__("there"), vocabulary=77, device=GPU)
    assert again.sample == saved
    _, ahead, *_ = wired(tmp_path, monkeypatch, rollout__ahead=1, rollout__interrupt=4)
    assert ahead.interrupts is True
    assert not isinstance(made.score, ScoreWithGreedy)


# the run


@pytest.fixture
def log(monkeypatch):
    return Log(monkeypatch, RUN)


GIVEN = {
    "model__path": "p",
    "model__lora__rank": 2,
    "model__share_prompts": False,
    "rollout__n": 4,
    "rollout__batch_size": 24,
    "rollout__turns__respond": "tests.rollout.functions:adder",
    "rollout__turns__failure": "",
    "actor__mini_batch_size": 12,
    "critic__mini_batch_size": 12,
    "eval__n": 3,
    "eval__temperature": 0.5,
    "seed": 6,
    "data__may_change": True,
}


@pytest.mark.parametrize("engines", [[], ["e 0", "e 1"]], ids=["alone", "pool"])
@pytest.mark.parametrize("changes", [{}, {"rollout__turns__respond": None, "rollout__turns__failure": "error"}])
def test_a_run_is_built_of_its_parts(tmp_path, monkeypatch, log, engines, changes):
    settings = tiny_run.settings(tmp_path, **{**GIVEN, **changes})
    plain_settings = TrainSettings(model=ModelSettings(cpp=settings.model.cpp))
    seen: list[Any] = []
    monkeypatch.setattr(RUN, "resolved", lambda of, device=None: seen.append((of, device)) or (of, [f"of {device}"]))
    evaluation = SimpleNamespace(held_out="held out")
    inputs = SimpleNamespace(
        device=GPU,
        kernels=Kernels.named(),
        tokenizer="words",
        prompts=SimpleNamespace(pad_token_id=13),
        drawing=SimpleNamespace(begin="cursor"),
        eval=evaluation,
    )
    own: Any = SimpleNamespace(
        actor=SimpleNamespace(model=MODEL),
        critic=SimpleNamespace(model=VALUES),
        others=["critic", "reference"],
        passes=lambda *args: ("passes", *args),
        begin="begin",
    )
    results: dict[str, Any] = {"read_inputs": inputs, "batch_device_of": CPU, "make_roles": own, "engine_options": None}
    names = (
        "input_lines",
        "clock_lines",
        "model_lines",
        "sharing_lines",
        "_fresh",
        "program_of",
        "_draw",
        "_truth",
        "_evaluation",
    )
    for name in (*results, *names, "_drawn", "_shapes", "sharing_hindrances", "said_of_old_log_probs", "idle_lines"):
        log.stub(name, results.get(name, [name] if name.endswith("lines") else None))
    for name in ("scoring", "answering", "_engine_pool" if engines else "_engine"):
        log.stub(name, enters=True)
    of_placed = SimpleNamespace(of=lambda *args: ("placed", *args))
    monkeypatch.setattr(RUN, "Placed", of_placed)
    said: list[Any] = []
    groups: Any = {"actor": "group"}
    mesh, sampling = attrs.evolve(LOCAL), attrs.evolve(LOCAL)
    places = RolePlaces(groups, engines)
    how: dict[str, Any] = {"mesh": mesh, "sampling_mesh": sampling, "device": GPU, "places": places}
    with RUN.assemble(settings, kernels="own kernels", announce=said.append, **how) as made:
        pass
    section, rollout, key = settings.model, settings.rollout, Key(6)
    assert seen == [(settings, GPU), (plain_settings, GPU)]
    assert log.of("read_inputs") == ((settings,), {"mesh": mesh, "kernels": "own kernels", "device": GPU})
    assert log.of("batch_device_of") == ((groups, GPU, settings.model_roles), {})
    rows = settings.data if settings.in_turns else None
    differing = RUN.files.differing(settings, plain_settings)
    assert log.of("input_lines") == (
        (inputs, section, settings.placement, differing, [f"of {GPU}"], "<said_of_old_log_probs>", ["idle_lines"]),
        {"thinking": "keep", "rows": rows},
    )
    (given, kernels, local, at), named = log.of("make_roles")
    assert (given, local, at, named) == (settings, LocalGroup(Here(mesh, CPU)), groups, {})
    assert kernels is inputs.kernels
    hindrances = "<sharing_hindrances>"
    assert log.of("sharing_lines") == ((section, 4, hindrances, MODEL, inputs.kernels), {})
    assert log.of("model_lines") == ((MODEL, "p", ["critic", "reference"]), {})
    assert said == [["input_lines", "clock_lines"], ["model_lines", "sharing_lines"]]
    assert log.of("_fresh") == ((own, section, key, settings.critic, settings.algorithm, "cursor"), {})
    options = log.calls["engine_options"]
    assert options == [((rollout, section), {"routed": False, "held_out": True})]
    if engines:
        (given, make, of, chosen, roles_, extents, pad), named = log.of("_engine_pool")
        assert (given, of, chosen, roles_) == (engines, settings.placement.engines, "<engine_options>", own)
        assert (extents, pad, named) == (MODEL.extents, 13, {})
        load = make.keywords.pop("load")
        assert (make.func, make.args) == (RUN.make_engine_of_pool, ())
        assert make.keywords == {"begin": "begin", "options": "<engine_options>", "pad_token_id": 13}
    else:
        (given, of, chosen, roles_, load, *last), named = log.of("_engine")
        assert (given, of, chosen, roles_) == (engines, settings.placement.engines, "<engine_options>", own)
        assert (last, named) == ([MODEL.extents, 13, sampling], {})
    assert (load.func, load.args, load.keywords) == (RUN.policy_model, (section, settings.critic, key), {})
    alone = "<_engine_pool>" if engines else "<_engine>"
    assert log.of("scoring") == ((settings, "words", sampling, CPU, groups), {})
    answers = (section, rollout, settings.data, alone, "words", 13, sampling)
    assert log.of("answering") == (answers, {})
    passes = "passes", settings.critic, "words"
    truth = (settings.eval, settings.algorithm.advantage, rollout.turns, inputs, "<answering>", passes)
    assert log.of("_truth") == (truth, {})
    scored = ScoredEngine("<answering>", alone, "<scoring>")  # pyright: ignore
    parts = (settings, own, inputs, passes, scored, MODEL, mesh, CPU)
    assert log.of("program_of") == (parts, {})
    assert log.of("_draw") == ((inputs, key.fold("data"), rollout, settings.data), {})
    assert log.of("_evaluation") == ((evaluation, scored, 8, "<_truth>"), {})
    assert log.of("_drawn") == ((inputs,), {"saved": False, "may_change": True})
    assert log.of("_shapes") == (("<_fresh>", own), {})
    assert made.calls == places.calls
    whole = {x.name: getattr(made, x.name) for x in attrs.fields(RUN.Assembly) if x.name != "calls"}
    assert whole == {
        "run": "<_fresh>",
        "program": "<program_of>",
        "draw": "<_draw>",
        "evaluate": "<_evaluation>",
        "inputs": inputs,
        "model": MODEL,
        "critic_model": VALUES,
        "mesh": mesh,
        "device": CPU,
        "shapes": "<_shapes>",
        "drawn": "<_drawn>",
        "placed": ("placed", own, GPU),
    }


@pytest.mark.parametrize("on_host", [False, True])
def test_an_evaluation_by_itself_is_built_of_its_parts(tmp_path, monkeypatch, log, on_host):
    settings = tiny_run.settings(tmp_path, **GIVEN)
    seen: list[Any] = []
    monkeypatch.setattr(RUN, "resolved", lambda of, device=None: seen.append((of, device)) or (of, []))
    inputs = SimpleNamespace(
        device=GPU, kernels=Kernels.named(), tokenizer="words", held_out=SimpleNamespace(pad_token_id=13)
    )
    options = SimpleNamespace(on_host=on_host)
    results = {"read_eval_inputs": inputs, "policy_model": MODEL, "engine_options": options}
    for name in (*results, "_evaluation", "bases_of", "base_of_role"):
        log.stub(name, results.get(name))
    for name in ("scoring", "answering", "engine_of"):
        log.stub(name, enters=True)
    mesh = attrs.evolve(LOCAL)
    monkeypatch.setattr(RUN, "Lane", lambda device: ("lane", device))
    with RUN.assemble_evaluation(settings, mesh=mesh, device=GPU) as made:
        pass
    section, rollout = settings.model, settings.rollout
    assert seen == [(settings, GPU)]
    assert log.of("read_eval_inputs") == ((settings,), {"mesh": mesh, "device": GPU})
    assert log.of("policy_model") == ((section, settings.critic, Key(6), mesh, GPU), {})
    assert log.of("engine_options") == ((rollout, section), {"routed": False, "held_out": True})
    tools = Tools(inputs.kernels, ("lane", GPU))  # pyright: ignore
    assert log.of("engine_of") == ((options, MODEL, 13, mesh, tools), {})
    assert log.of("scoring") == ((settings, "words", mesh, GPU), {})
    assert log.of("answering") == ((section, rollout, settings.data, "<engine_of>", "words", 13, mesh), {})
    scored = ScoredEngine("<answering>", "<engine_of>", "<scoring>")  # pyright: ignore
    assert log.of("_evaluation") == ((inputs, scored, 8), {})
    assert log.of("base_of_role") == ((section, "actor", MODEL), {})
    assert log.of("bases_of") == (({"actor": "<base_of_role>"},), {})
    assert (made.evaluate, made.tokenizer, made.model, made.bases) == ("<_evaluation>", "words", MODEL, "<bases_of>")
    assert made.device == (CPU if on_host else GPU)


# the roles


def passes_of(**changes: Any) -> PassOptions:
    usual = {"remove_padding": True, "share_prompts": "auto", "graphs": True, "temperature": 0.5, "replay": "none"}
    return PassOptions(**{**usual, "micro_batching": MicroBatching(size=3), **changes})


@pytest.fixture
def stand_ins(monkeypatch):
    """No router is there, all passes are recorded, and the host is a word."""
    monkeypatch.setattr("fppo.steps.experts.check_routers", lambda *_: None)
    monkeypatch.setattr(roles, "records", lambda model, mesh: True)
    monkeypatch.setattr(roles, "graphs", lambda model, device: ("recorder", model))
    monkeypatch.setattr(roles, "on_device", lambda params, device: params)
    monkeypatch.setattr(learning, "to_host", lambda x: x)
    monkeypatch.setattr(learning, "Offloaded", lambda stage, lane: stage)


TOOLS = Tools(Kernels.named(), Lane(CPU))
HERE = Here(LOCAL, GPU)


@pytest.mark.parametrize("replay", ["none", "rollout", "old_log_probs", "all"])
@pytest.mark.parametrize("offload", ["none", "all"])
def test_an_actor_is_made_as_its_sections_say(stand_ins, replay, offload):
    section = ActorSettings(
        entropy_coef=0.1,
        kl_coef=0.2,
        kl_kind="k2",
        positive_nll_coef=0.3,
        experts=ExpertSettings(balance_coef=0.4, z_coef=0.5),
        epochs=3,
    )
    how = learning_of("actor", section, batch_size=8, n=1, steps=2, offload=offload, offload_activations=False)
    params, loaded = {"w": torch.ones(2)}, []
    made = make_actor(
        HERE,
        TOOLS,
        lambda *at: loaded.append(at) or (MODEL, params),
        passes_of(replay=replay),
        how,
        section,
        "engine",
        lambda *, stage: ("watched", stage),
    )
    assert loaded == [(LOCAL, GPU)]
    watched: Any = made.update
    update = watched[1].stage
    assert (watched[0], watched[1].role, watched[1].epochs) == ("watched", "actor", 3)
    assert update.terms == PolicyTerms(
        temperature=0.5,
        entropy_coef=0.1,
        kl_coef=0.2,
        kl_kind="k2",
        nll_coef=0.3,
        balance_coef=0.4,
        router_z_coef=0.5,
    )
    assert (update.loss_fn, update.loop, update.old_log_probs) == (policy_loss(section.loss), how.loop, "engine")
    assert (update.record, update.forward.replay) == (("recorder", MODEL), replay != "none")
    assert watched[1].forward == attrs.evolve(update.forward, replay=False)
    policy: Any = made.policy
    assert (policy.record, policy.forward.replay, policy.temperature) == (("recorder", MODEL), replay == "rollout", 0.5)
    assert isinstance(policy.fetch({}), OnHost) is (offload == "all")
    assert made.balance.keywords["forward"] == watched[1].forward  # pyright: ignore
    assert made.model is MODEL
    assert made.state.params is params
    assert isinstance(made.state.clock, Clock)
    bare = make_actor(HERE, TOOLS, lambda *at: (MODEL, params), passes_of(), how, section, "pass", None)
    assert bare.update.stage.old_log_probs == "pass"  # pyright: ignore


@pytest.mark.parametrize("offload", ["none", "all"])
@pytest.mark.parametrize("popart", [0.0, 0.3])
@pytest.mark.parametrize("loss", ["mse", "two_hot"])
def test_a_critic_that_is_a_model_sees_and_reads_alike_in_passes_and_updates(stand_ins, offload, popart, loss):
    section = CriticSettings(popart=popart, loss=attrs.evolve(CriticSettings().loss, name=loss))
    how = learning_of("critic", section, batch_size=8, n=1, steps=2, offload=offload, offload_activations=False)
    params, loaded, view = {"w": torch.ones(2)}, [], lambda rows: rows

    def load(*at):
        loaded.append(at)
        return VALUES, params

    made = make_critic(HERE, TOOLS, load, passes_of(), how, section, lambda: view, MODEL)
    assert loaded == [(LOCAL, GPU, MODEL)]
    head = roles.value_head_of(section.loss)
    update: Any = made.update
    assert (made.state.scale is not None) is bool(popart)
    if popart:
        assert update.rate == popart
        update = update.stage
    assert update.role == "critic"
    of, values = update.stage, made.values
    assert (of.loop, _plain(of.loss_fn)) == (how.loop, _plain(head.loss_fn))
    for each in (of, values):
        assert (each.view, each.record, each.forward.model) == (view, ("recorder", VALUES), VALUES)
        assert _plain(each.forward.read) == _plain(head.read)
    assert values.micro_batching == MicroBatching(size=3)
    assert isinstance(values.fetch({}), OnHost) is (offload == "all")
    assert (made.confidence, made.hidden, made.model) == (None, None, VALUES)


@pytest.mark.parametrize("reads", ["confidence", "hidden"])
def test_a_critic_without_a_model_learns_from_what_it_reads(stand_ins, reads):
    section = CriticSettings(reads=reads, loss=attrs.evolve(CriticSettings().loss, name="two_hot"))
    how = learning_of("critic", section, batch_size=8, n=1, steps=2, offload="none", offload_activations=False)
    params = {"w": torch.ones(2)}
    made = make_critic(HERE, TOOLS, lambda *at: (None, params), passes_of(), how, section, lambda: as_it_is)
    head = roles.value_head_of(section.loss)
    update: Any = made.update
    assert type(update).__name__ == ("UpdateConfidence" if reads == "confidence" else "UpdateHidden")
    assert (update.loop, _plain(update.loss_fn)) == (how.loop, _plain(head.loss_fn))
    own: Any = made.confidence if reads == "confidence" else made.hidden
    assert {name: _plain(x) for name, x in own.keywords.items()} == {"read": _plain(head.read)}
    assert (made.confidence is None, made.hidden is None) == (reads != "confidence", reads != "hidden")
    assert (made.values, made.model) == (None, None)


@pytest.mark.parametrize(("common", "own", "away"), [("all", None, True), ("all", False, False), ("none", True, True)])
def test_a_reference_is_where_its_own_setting_says_and_replays_with_all(stand_ins, monkeypatch, common, own, away):
    asked: list[Any] = []
    params, host = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    monkeypatch.setattr(roles, "load_reference", lambda *args: asked.append(args) or (VALUES, params))
    monkeypatch.setattr(roles, "to_host", lambda x: host)
    section = ModelSettings(path="p", offload=common, ref_offload=own)

    def none(*_):
        raise AssertionError("no adapted policy is loaded")

    for replay in ("none", "rollout", "all"):
        made = make_reference(HERE, TOOLS, none, passes_of(replay=replay), section, MODEL, params)
        assert asked.pop() == (section, LOCAL, (MODEL, params))
        policy: Any = made.policy
        assert policy.forward.replay is (replay == "all")
        assert (policy.record, policy.temperature, policy.forward.model) == (("recorder", VALUES), 0.5, VALUES)
        assert isinstance(policy.fetch({}), OnHost) is away
        assert made.params is (host if away else params)
        assert made.model is VALUES
    make_reference(HERE, TOOLS, none, passes_of(), section)
    assert asked.pop() == (section, LOCAL, None)


@pytest.mark.parametrize(("path", "loads"), [(None, True), ("elsewhere", False)])
def test_a_reference_apart_from_an_adapted_policy_begins_as_that_does(stand_ins, monkeypatch, path, loads):
    asked, loaded = [], []
    adapted = lora.without_base(MODEL, Lora(2, 8.0, ("q_proj",)))
    monkeypatch.setattr(roles, "load_reference", lambda *args: asked.append(args[2]) or (MODEL, {}))
    settings: Any = SimpleNamespace(used=True)
    section = ModelSettings(path="p", ref_path=path, lora=settings)
    make_reference(HERE, TOOLS, lambda *at: loaded.append(at) or (adapted, {}), passes_of(), section)
    assert loaded == ([(LOCAL, GPU)] if loads else [])
    assert asked == [(adapted, {}) if loads else None]
