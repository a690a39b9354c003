"""Roles on groups of their own give the bits of one process, or of SPMD on the same mesh, in any order of work."""

import contextlib
import math
import os
import re
import signal

import attrs
import pytest
import torch

from fppo import metrics, models, tree
from fppo.assembly.checks import TRAIN
from fppo.assembly.inputs import Inputs
from fppo.assembly.parts import device_of
from fppo.assembly.pools import RolePlaces, batch_device_of
from fppo.assembly.run import assemble
from fppo.fleet import HERE, Group, Processes, RankSpec, at_once
from fppo.key import Key
from fppo.pipeline import in_turn
from fppo.pipeline.train import iterate
from fppo.quickstart import small_model
from fppo.rollout import EnginePool
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import simulate
from fppo.settings import files
from tests import tiny_run
from tests.fleet.test_processes import pid
from tests.fleet.threads import Threads


def digest(state):
    return tree.digest(state)


def reversed_turn(work):
    return in_turn(dict(reversed(work.items())))


def steps(assembly, groups, count=3, ahead=0):
    """What `count` steps give: digests of the states, where they are, and of batches; metrics."""
    found = []

    def of(role, state):
        return groups[role].call(digest, state) if role in groups else digest(state)

    for run, experience, report in iterate(
        assembly.run, program=assembly.program, draw=assembly.draw, ahead=ahead, donate=True
    ):
        states = {role: state and of(role, state) for role, state in (("actor", run.actor), ("critic", run.critic))}
        numbers = {name: x for name, x in metrics.report(report).items() if not name.startswith(tiny_run.UNLIKE)}
        found.append((states, tree.digest(experience), tree.digest(run.kl), numbers))
        if run.step == count:
            held_out = metrics.report(assembly.evaluate(run)) if assembly.evaluate else {}
            return found, {name: x for name, x in held_out.items() if not name.startswith(tiny_run.UNLIKE)}
    raise AssertionError


def placed(settings, ranks, ahead=0, engines=(), together=at_once):
    """Those steps with roles on these ranks, and with these engines."""
    with contextlib.ExitStack() as opened:
        groups = {role: opened.enter_context(Group(role, each)) for role, each in ranks.items()}
        others = [opened.enter_context(Group(f"engine {i}", each)) for i, each in enumerate(engines)]
        places = RolePlaces(groups, others)
        made = opened.enter_context(assemble(settings, places=places))
        watched = made.program.annotate  # the program's own way to run stages is given to both
        annotate = attrs.evolve(watched, stage=attrs.evolve(watched.stage, together=together))
        program = attrs.evolve(made.program, annotate=annotate, together=together)
        return steps(attrs.evolve(made, program=program), groups, ahead=ahead)


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    model = models.build(small_model(15, width=16, layers=1).config, "value")
    models.save(model, models.init_params(model, Key(1)), tmp_path / "judge")
    return tmp_path


def judged(task, **changes):
    """Settings with a reward model too."""
    return tiny_run.settings(task, reward__model__path=str(task / "judge"), **changes)


def test_axes_that_do_not_fit_the_model_of_a_pool_are_named_before_it_is_loaded(task):
    def problems(**changes):
        names = {"actor": "a", "critic": "c", "reward": "j"}
        roles = {f"placement__roles__{role}": pool for role, pool in names.items()}
        pools = {pool: {"ranks": math.prod(changes.get(pool, {}).values())} | changes.get(pool, {}) for pool in "acj"}
        with pytest.raises(files.SettingsError) as caught:
            Inputs(settings=judged(task, placement__pools=pools, **roles)).need(*TRAIN)
        return list(caught.value.problems)

    (sequence,) = problems(c={"sequence": 3})
    assert re.match(r"placement.pools.c: mesh.sequence = 3 does not divide the model's \d attention heads", sequence)
    reward, tensor, expert = problems(a={"tensor": 3}, c={"expert": 2}, j={"sequence": 3})
    assert reward.startswith("placement.pools.j: mesh.sequence = 3 does not divide")
    assert tensor.startswith(
        "placement.pools.a: mesh.tensor = 3: a tensor axis of 3 ranks does not divide the model's "
    )
    assert "; give one of [1" in tensor
    assert expert.startswith("placement.pools.c: mesh.expert = 2: ")


def test_batches_are_on_the_host_if_all_models_are_elsewhere(task, monkeypatch):
    """By a stand-in for a GPU, which nothing uses."""
    pools = {"placement__pools": {"a": {"ranks": 1, "gpus": 0.5}, "c": {"ranks": 1, "gpus": 0.5}}}
    roles = {"placement__roles__actor": "a", "placement__roles__critic": "c", "device": "auto"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings, gpu, cpu = judged(task, **pools, **roles), torch.device("cuda"), torch.device("cpu")
    without = files.replace(settings, {f"placement.pools.{x}.gpus": 0 for x in "ac"})
    assert device_of("auto", settings.placement) == gpu
    assert device_of("auto", without.placement) == cpu
    for places, home in (("actor critic reward", cpu), ("actor critic", gpu), ("actor reward", gpu), ("critic", gpu)):
        assert batch_device_of(places.split(), gpu, settings.model_roles) == home
    assert batch_device_of(["actor", "reward"], gpu, settings.model_roles - {"critic"}) == cpu


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({}, at_once),
        pytest.param({"eval__exact_values": True}, reversed_turn, marks=pytest.mark.slow),
        pytest.param(
            {"critic__reads": "hidden", "critic__ensemble": 2, "eval__exact_values": True},
            in_turn,
            marks=pytest.mark.slow,
        ),
        pytest.param({"rollout__ahead": 1}, at_once, marks=pytest.mark.slow),
    ],
)
def test_roles_on_ranks_of_their_own_are_one_process(task, changes, together):
    make = tiny_run.settings if "eval__exact_values" in changes else judged
    settings, ahead = make(task, device="cpu", actor__kl_coef=0.1, **changes), changes.get("rollout__ahead", 0)
    with assemble(settings) as assembly:
        expected = steps(assembly, {}, ahead=ahead)
    every = ("actor", "critic", "reference", "reward")
    found = placed(settings, {role: Threads() for role in every}, ahead, together=together)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "context", "expert", "pipeline"])
def test_roles_on_meshes_of_their_own_are_those_meshes(task, axis):
    if axis == "expert":
        tiny_run.write_mixture(task)
    if axis == "pipeline":
        tiny_run.write_task(task, layers=2)
    replay = {"algorithm__router_replay": "rollout"} if axis == "expert" else {}
    settings = (tiny_run.settings if axis in ("expert", "pipeline") else judged)(task, device="cpu", **replay)

    def on_rank(mesh):
        with assemble(settings, mesh=attrs.evolve(mesh, sharding=Sharding())) as assembly:
            return steps(assembly, {})

    expected = simulate({axis: 2}, on_rank)[0]
    assert placed(settings, {role: Threads(**{axis: 2}) for role in ("actor", "critic", "reward")}) == expected


@pytest.mark.slow
def test_roles_and_engines_in_processes_of_their_own_are_one_process_though_an_engine_is_killed(task, monkeypatch):
    settings = tiny_run.settings(task, device="cpu")  # whose batches are one request each
    with assemble(settings) as assembly:
        expected = steps(assembly, {})
    answer, asked = EnginePool._answer, []

    def killing(self, replica, work, prompts):
        asked.append(replica.group.name)
        if len(asked) == 2:
            os.kill(replica.group.call(pid, HERE), signal.SIGKILL)
        return answer(self, replica, work, prompts)

    monkeypatch.setattr(EnginePool, "_answer", killing)
    ranks = {"actor": Processes(RankSpec(patience=120.0)), "critic": Processes(RankSpec(patience=120.0))}
    with pytest.warns(
        RuntimeWarning,
        match=r"'engine [01]': rank 0 of 1 .* ended by SIGKILL, perhaps for want of memory; others answer for it",
    ):
        assert placed(settings, ranks, engines=[Processes(RankSpec(patience=120.0)) for _ in range(2)]) == expected
