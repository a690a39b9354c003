"""Where roles are made and asked, and what each gets, with stand-ins for groups, models and loaders."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fppo import tree
from fppo.assembly import learning, roles
from fppo.assembly import teacher as teachers
from fppo.assembly.adapters import adapted_critic, base_of_role, load_policy
from fppo.assembly.learning import learning_of
from fppo.assembly.parts import Tools, make_tools
from fppo.assembly.roles import PassOptions, Roles, make_roles
from fppo.data import with_teacher_prompt
from fppo.fleet import HERE, Here, LocalGroup
from fppo.key import Key
from fppo.quickstart import small_model
from fppo.runtime.mesh import LOCAL
from fppo.runtime.offload import Lane, OnHost
from fppo.settings.learning import ActorSettings, CriticSettings
from fppo.settings.model import ModelSettings
from fppo.settings.modules import kernels_named
from fppo.steps.clock import Clock
from fppo.steps.critic import as_it_is
from fppo.steps.loss_scale import LossScaled
from fppo.steps.micro_batching import MicroBatching
from fppo_kernels.table import Kernels
from tests import tiny_run

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MODEL = small_model(15, width=16, layers=1)
KERNELS = Kernels.named()


def options(**changes: Any) -> PassOptions:
    usual = {"remove_padding": True, "share_prompts": "auto", "graphs": True, "temperature": 0.5, "replay": "all"}
    return PassOptions(**{**usual, "micro_batching": MicroBatching(size=3), **changes})


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("share", ["auto", True, False])
def test_passes_are_recorded_on_a_gpu_and_then_share_prompts_only_if_they_must(
    monkeypatch, graphs, device, able, share
):
    monkeypatch.setattr(roles, "records", lambda model, mesh: able and (model, mesh) == (MODEL, LOCAL))
    monkeypatch.setattr(roles, "graphs", lambda model, device: (model, device))
    of, here = options(graphs=graphs, share_prompts=share, remove_padding=share is not False), Here(LOCAL, device)
    recorded = graphs and able and device is GPU
    assert of.record(here, MODEL) == ((MODEL, GPU) if recorded else None)
    forward = of.forward(here, KERNELS, MODEL)
    assert (forward.model, forward.kernels, forward.mesh) == (MODEL, KERNELS, LOCAL)
    assert forward.remove_padding is (share is not False)
    assert forward.share_prompts == (False if recorded and share == "auto" else share)


@pytest.mark.parametrize("run", ["none", "rollout", "old_log_probs", "all"])
@pytest.mark.parametrize("of_pass", ["rollout", "all"])
def test_a_policys_pass_replays_where_the_run_does(monkeypatch, run, of_pass):
    replays = run == of_pass
    monkeypatch.setattr("fppo.steps.experts.check_routers", lambda *_: None)
    forward, fetch = options().forward(Here(LOCAL, CPU), KERNELS, MODEL), object()
    made = options(replay=run).policy(forward, "record", fetch, of_pass)
    assert made.forward.replay is replays
    assert made.forward.model is MODEL
    assert (made.micro_batching, made.temperature, made.fetch, made.record) == (
        *(MicroBatching(size=3), 0.5),
        *(fetch, "record"),
    )


class Group:
    """A group that notes its calls; what is made there is of this group."""

    def __init__(self, name: str, calls: list[Any], ranks: int = 2) -> None:
        self.name, self.ranks, self._calls = name, ranks, calls

    def call(self, fn: Any, *args: Any, stays: Any = (), label: str = "", **named: Any) -> Any:
        self._calls.append((self.name, label, fn, args, stays))
        state = SimpleNamespace(params=f"params of {label}")
        return SimpleNamespace(model=f"model of {label}", state=state, of=(self.name, label))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes the roles of settings on groups: the roles, and the calls by label."""
    monkeypatch.setattr(roles, "Group", Group)
    monkeypatch.setattr(roles, "at_once", lambda work: {name: do() for name, do in work.items()})

    def make(places: dict[str, str], **changes: Any) -> Any:
        calls: list[Any] = []
        groups = {name: Group(name, calls) for name in set(places.values())}
        settings = tiny_run.settings(tmp_path, model__path="p", **changes)
        at: Any = {role: groups[name] for role, name in places.items()}
        found = make_roles(settings, "kernels", LocalGroup(), at)
        assert (found.tools.kernels, found.tools.lane.device) == ("kernels", torch.device("cpu"))
        assert all(stays is True for *_, stays in calls)
        for name, label, fn, args, _ in calls:
            if label == "make tools":
                assert (fn, args) == (found.begin, (HERE,))
                assert (fn.func, fn.keywords["names"]) == (make_tools, kernels_named(settings))
            else:
                assert args[0] is HERE
                assert args[1].of == (name, "make tools")
        return settings, found, {label: (name, fn, args[2:]) for name, label, fn, args, _ in calls}

    return make


def same(one: Any, other: Any) -> bool:
    return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)


EVERYWHERE = {"actor": "a", "critic": "c", "reference": "r"}


def test_every_role_is_made_on_its_own_group_of_its_own_settings(made):
    settings, found, calls = made(EVERYWHERE, model__offload="moments", critic__offload="all", steps=7)
    assert set(calls) == {"make tools", "make actor", "make critic", "make reference"}
    model, key = settings.model, Key(settings.seed)
    passes = PassOptions(
        remove_padding=True,
        share_prompts="auto",
        graphs=False,
        micro_batching=MicroBatching(token_budget=16384),
        temperature=1.0,
        replay="none",
    )
    how = partial(learning_of, batch_size=8, n=1, offload_activations=False)
    group, fn, (load, of_actor, learns, section, source, watched) = calls["make actor"]
    assert (group, fn) == ("a", roles.make_actor)
    assert same(load, partial(load_policy, model, settings.critic, key))
    assert (of_actor, section, source, watched) == (passes, settings.actor, "pass", None)
    assert learns == how("actor", settings.actor, steps=7, offload="moments")
    group, fn, (load, of_critic, learns, section, view) = calls["make critic"]
    assert (group, fn) == ("c", roles.make_critic)
    assert same(load, partial(adapted_critic, model, settings.critic, key))
    assert (of_critic, section) == (passes, settings.critic)
    assert learns == how("critic", settings.critic, steps=7, offload="all")
    assert same(view, partial(roles.view_of, 0, model, settings.data))
    group, fn, (load, of_reference, section) = calls["make reference"]
    assert (group, fn) == ("r", roles.make_reference)
    assert same(load, partial(load_policy, model, settings.critic, key))
    assert (of_reference, section) == (passes, model)
    assert {role: group.name for role, group in found.at.items()} == EVERYWHERE
    assert (found.actor.of, found.critic.of, found.reference.of) == (
        *(("a", "make actor"), ("c", "make critic")),
        ("r", "make reference"),
    )
    assert (found.placed, found.others) == (True, ["critic", "reference"])


def test_a_reference_beside_the_actor_gets_its_model_and_parameters(made):
    _, found, calls = made({"actor": "a", "critic": "c"})
    assert calls["make reference"][0] == "a"
    assert calls["make reference"][2][3:] == ("model of make actor", "params of make actor")
    assert found.at["reference"] is found.at["actor"]


@pytest.mark.parametrize(
    ("places", "rank", "beside"),
    [
        ({"actor": "a", "critic": "a"}, None, True),
        ({"actor": "a", "critic": "a"}, 0, False),
        ({"actor": "a", "critic": "c"}, None, False),
    ],
)
def test_a_critic_beside_an_adapted_actor_stands_on_its_model(made, places, rank, beside):
    _, found, calls = made(places, model__lora__rank=2, model__lora__critic_rank=rank)
    assert calls["make critic"][2][5:] == (("model of make actor",) if beside else ())
    assert found.critic.of[1] == "make critic"


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({"algorithm__advantage": "grpo", "rollout__n": 2}, {"actor", "reference"}),
        (tiny_run.NO_KL, {"actor", "critic"}),
        (tiny_run.NO_KL | {"actor__kl_coef": 0.1}, {"actor", "critic", "reference"}),
    ],
)
def test_a_role_is_made_where_the_run_has_it(made, changes, there):
    _, found, calls = made({"actor": "a", "critic": "c"}, **changes)
    assert set(calls) == {"make tools", *(f"make {role}" for role in there)}
    assert {name for name in ("critic", "reference") if getattr(found, name) is not None} == there - {"actor"}


def of_squares(scores, mask, sum_squared_probs):
    """An estimator of the user's that reads sums of squares, and no old log-probs."""
    return (scores[:, None] * (1 - sum_squared_probs)).where(mask, 0.0)


@pytest.mark.parametrize(
    ("changes", "source", "offload"),
    [
        ({"model__offload": "all", "critic__reads": "hidden"}, "pass", "none"),
        ({"model__offload": "all"}, "pass", "all"),
        ({"algorithm__old_log_probs": "engine"}, "engine", "none"),
        (
            {"algorithm__old_log_probs": "engine", "algorithm__advantage": "optimal_token_baseline", "rollout__n": 2}
            | tiny_run.NO_KL,
            "pass",
            None,
        ),
        (tiny_run.NO_KL | {"actor__epochs": 1, "actor__mini_batch_size": 8}, "update", "none"),
        (
            {"algorithm__advantage": "tests.assembly.test_roles:of_squares"}
            | (tiny_run.NO_KL | {"actor__epochs": 1, "actor__mini_batch_size": 8}),
            "update",
            None,
        ),
    ],
)
def test_old_log_probs_and_offloading_are_those_that_fit_together(made, changes, source, offload):
    _, _, calls = made(EVERYWHERE, **changes)
    assert calls["make actor"][2][4] == source
    assert offload is None or calls["make critic"][2][2].offload == offload


def test_only_an_update_of_one_step_is_watched(made):
    once = tiny_run.NO_KL | {"actor__epochs": 1, "actor__mini_batch_size": 8}
    for changes, watched in ((once, True), ({}, False), (once | {"rollout__gap": "off"}, False)):
        _, _, calls = made(EVERYWHERE, **changes)
        assert (calls["make actor"][2][5] is not None) is watched


def parts_of(name: str, **more: Any) -> Any:
    return SimpleNamespace(policy=f"{name} policy", update=f"{name} update", balance=f"{name} balance", **more)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("of_its_own", [True, False])
def test_every_pass_and_update_runs_on_the_group_of_its_role(monkeypatch, ranks, of_its_own):
    calls: list[Any] = []
    monkeypatch.setattr(roles, "Group", Group)
    at: Any = {role: Group(role, calls, ranks) for role in ("actor", "critic", "reference")}
    critic = parts_of("critic", values="critic values", confidence=None, hidden="critic hidden", model="c")
    whole = Roles(
        actor=parts_of("actor", model="m"),
        reference=parts_of("reference") if of_its_own else None,
        critic=critic,
        at=at,
        tools="tools",
        begin="begin",
    )
    passes = whole.passes(CriticSettings(), "words")
    assert (passes.confidence, passes.truth_signs) == (None, None)
    for name in ("policy", "reference", "values", "hidden"):
        getattr(passes, name)(name)
    whole.update_actor()("state")
    whole.update_critic()("state")
    whole.hold()("params")
    passes.balance("rows")
    beside = "reference" if of_its_own else "actor"
    assert [(name, label, fn, args, stays) for name, label, fn, args, stays in calls] == [
        ("actor", "old_log_prob", "actor policy", ("policy",), ()),
        (beside, "ref", f"{beside} policy", ("reference",), ()),
        ("critic", "values", "critic values", ("values",), ()),
        ("critic", "values", "critic hidden", ("hidden",), ()),
        ("actor", "update_actor", "actor update", ("state",), (0,)),
        ("critic", "update_critic", "critic update", ("state",), (0,)),
        ("actor", "hold", tree.copy, ("params",), True),
        *([("actor", "balance", "actor balance", ("rows",), ())] if ranks > 1 else []),
    ]
    calls.clear()
    adapted = ModelSettings(path="p", lora=SimpleNamespace(used=True))
    whole.bases(adapted)
    assert [(name, label, args) for name, label, _, args, _ in calls] == [
        ("actor", "base", ("actor", "m")),
        ("critic", "base", ("critic", "c")),
    ]
    assert all(same(fn, partial(base_of_role, adapted)) for _, _, fn, *_ in calls)
    assert whole.bases(ModelSettings(path="p", lora=SimpleNamespace(used=False))) == {}


@pytest.mark.parametrize("offload", ["none", "moments", "all"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_state_waits_where_its_role_says_and_has_a_clock(monkeypatch, offload, role):
    sent = []
    monkeypatch.setattr(learning, "to_host", lambda x: sent.append(x) or x)
    section = ActorSettings() if role == "actor" else CriticSettings()
    how = learning_of(role, section, batch_size=8, n=1, steps=3, offload=offload, offload_activations=False)
    params = {"w": torch.ones(2)}
    tools: Any = Tools(KERNELS, Lane(CPU))
    state = how.state(params, how.optimizer_on(tools, MODEL))
    assert state.params is params
    assert (state.step, state.clock.first, state.clock.step) == (0, Clock().first, Clock().step)
    assert sent == {"none": [], "moments": [state.opt], "all": [state]}[offload]


@pytest.mark.parametrize("offload", ["none", "moments", "all"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_optimizer_is_that_of_its_role_where_its_state_is(monkeypatch, offload, role):
    asked = []
    monkeypatch.setattr(learning, "optimizer_of", lambda *args, **named: asked.append((args, named)) or "made")
    section = ActorSettings() if role == "actor" else CriticSettings()
    how = learning_of(role, section, batch_size=8, n=1, steps=3, offload=offload, offload_activations=False)
    tools: Any = Tools(KERNELS, Lane(CPU))
    assert how.optimizer_on(tools, None) == "made"
    own = {"setting": f"{role}.optimizer", "kernel": KERNELS.adamw}
    own["on_host"] = None if offload == "none" else tools.lane
    assert asked == [((section.optimizer, how.updates), own)]
    assert how.updates == 3 * section.updates(8, 1)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_loss_is_scaled_for_a_model_that_computes_in_float16(dtype):
    how = learning_of("actor", ActorSettings(), batch_size=8, n=1, steps=3, offload="none", offload_activations=False)
    tools: Any = Tools(KERNELS, Lane(CPU))
    optimizer = how.optimizer_on(tools, SimpleNamespace(compute_dtype=dtype))
    assert isinstance(optimizer.init({"w": torch.ones(1)}), LossScaled) is (dtype == torch.float16)
    assert not isinstance(how.optimizer_on(tools, None).init({"w": torch.ones(1)}), LossScaled)


@pytest.mark.parametrize("offload", ["none", "moments", "all"])
@pytest.mark.parametrize("activations", [True, False])
def test_an_update_keeps_on_the_host_what_its_role_says(monkeypatch, offload, activations):
    monkeypatch.setattr(learning, "HostActivations", lambda stage, lane: ("activations", stage, lane))
    monkeypatch.setattr(learning, "Offloaded", lambda stage, lane: ("state", stage, lane))
    section = ActorSettings(epochs=3)
    how = learning_of("critic", section, batch_size=8, n=1, steps=3, offload=offload, offload_activations=activations)
    lane: Any = "lane"
    update: Any = "update"
    expected = ("activations", "update", "lane") if activations else "update"
    expected = ("state", expected, "lane") if offload == "all" else expected
    forward: Any = "forward"
    made = how.measured(update, forward, lane)
    assert (made.stage, made.role, made.forward, made.epochs) == (expected, "critic", "forward", 3)


@pytest.mark.parametrize(("prompted", "view"), [(True, with_teacher_prompt), (False, as_it_is)])
@pytest.mark.parametrize(
    ("own", "common", "away"), [(None, "none", False), (None, "all", True), (False, "all", False), (True, "none", True)]
)
def test_a_teacher_is_where_its_section_says_and_reads_its_own_prompts(monkeypatch, prompted, view, own, common, away):
    section = ModelSettings(path="p", teacher_path="t", teacher_offload=own, offload=common, remove_padding=False)
    params, host = {"w": torch.ones(1)}, {"w": torch.zeros(1)}
    asked = []
    monkeypatch.setattr(teachers, "load_teacher", lambda *args: asked.append(args) or (MODEL, params))
    monkeypatch.setattr(teachers, "to_host", lambda x: host)
    here, batching = Here(LOCAL, CPU), MicroBatching(size=5)
    made = teachers.make_teacher(here, section, names={}, micro_batching=batching, prompted=prompted)
    assert asked == [(section, LOCAL)]
    assert made.view is view
    assert torch.equal(made.params["w"], host["w"] if away else params["w"])
    assert made.policy.micro_batching == batching
    forward = made.policy.forward
    assert (forward.model, forward.mesh, forward.remove_padding, forward.share_prompts) == (MODEL, LOCAL, False, "auto")
    assert isinstance(made.policy.fetch({}), OnHost) is away
