"""Joint passes of several runs give each run what it gets alone."""

from __future__ import annotations

from importlib.util import find_spec

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo.models import bases
from fppo.serve.tinker.decode import LaterVerb
from fppo.serve.tinker.futures import FailedRequest, Payload
from fppo.serve.tinker.journal import JournalRecord
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import (
    Adapters,
    StepParams,
    TrainingRun,
    create_run,
    forward_backward,
    forward_backward_together,
    optim_step,
    together_hindrance,
)
from fppo.steps.micro_batching import MicroBatching
from tests import tiny
from tests.models import families
from tests.serve.tinker import served
from tests.serve.tinker.made import base, data
from tests.serve.tinker.test_futures import Clock
from tests.serve.tinker.test_runs import CUSTOM
from tests.serve.tinker.test_training import VERBS, World

KINDS = [
    Adapters(2),
    Adapters(3, seed=1, unembed=False),
    Adapters(1, seed=2, attention=False),
    Adapters(2, seed=3, mlp=False, unembed=False, alpha=8.0),
    Adapters(4, seed=4, attention=False, mlp=False),
]


def begun(mine, adapters: Adapters, steps: int = 1) -> TrainingRun:
    """A run after some steps, so that both factors of its adapters are in use."""
    run = create_run(mine, adapters)
    for step in range(steps):
        run, _ = forward_backward(run, data(90 + step + 7 * adapters.seed, 3), Loss("cross_entropy"))
        run, _ = optim_step(run, StepParams(learning_rate=0.05, eps=1e-8))
    return run


def same(asked, together) -> None:
    """Hold joint results against those of each run alone, to 1e-10."""
    for (run, part, loss), (joint, outputs) in zip(asked, together, strict=True):
        alone, expected = forward_backward(run, part, loss)
        assert joint.grads is not None
        assert alone.grads is not None
        for name, grad in alone.grads.items():
            torch.testing.assert_close(joint.grads[name], grad, rtol=0.0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        assert outputs.metrics == pytest.approx(expected.metrics, abs=1e-10)
        torch.testing.assert_close(list(outputs.per_datum), list(expected.per_datum), rtol=0.0, atol=1e-6)


@given(
    seed=st.integers(0, 2**20),
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=5),
    names=st.lists(st.sampled_from(["cross_entropy", "ppo", "dro", "gspo"]), min_size=5, max_size=5),
    micro=st.sampled_from([MicroBatching(size=2), MicroBatching(token_budget=20), MicroBatching(token_budget=10**6)]),
    shared=st.sampled_from([0, 6]),
    width=st.sampled_from([None, 2]),
)
@settings(max_examples=8)
def test_runs_of_one_base_get_what_they_get_alone(seed, kinds, names, micro, shared, width):
    mine = attrs.evolve(base(), micro_batching=micro)
    asked = []
    for number, (adapters, name) in enumerate(zip(kinds, names, strict=False)):
        wide = width if name == "cross_entropy" else None
        part = data(seed + number, 1 + (seed + number) % 4, shared=shared, width=wide)
        asked.append((begun(mine, adapters, steps=number % 3), part, Loss(name)))
    run, part, loss = asked[0]
    asked[0] = (forward_backward(run, part, loss)[0], part, loss)  # with gradients of a request before
    same(asked, forward_backward_together(asked))


@pytest.mark.parametrize("checkpoint_layers", [True, "selective"])
def test_layers_that_are_recomputed_use_each_run_s_adapter(checkpoint_layers):
    model, params = tiny.model_and_params(dtype=torch.float64)
    mine = base(model=attrs.evolve(model, checkpoint_layers=checkpoint_layers), params=params)
    asked = [(begun(mine, kind), data(n, 3, shared=4), Loss("ppo")) for n, kind in enumerate(KINDS[:3])]
    same(asked, forward_backward_together(asked))


def test_custom_losses_see_their_own_data_alone():
    asked = [(begun(base(), KINDS[0]), data(1, 2), Loss("custom", {}, CUSTOM))]
    mine = asked[0][0].base
    asked.append((begun(mine, KINDS[1]), data(2, 3), Loss("cross_entropy")))
    same(asked, forward_backward_together(asked))


def test_runs_that_take_part_in_no_joint_pass_say_why():
    mine = base()
    whole, adapted = create_run(mine, Adapters(0)), create_run(mine, Adapters(2))
    assert together_hindrance(adapted) is None
    asked = [(run, data(1, 2), Loss("cross_entropy")) for run in (adapted, whole)]
    with pytest.raises(ValueError, match="trains all weights"):
        forward_backward_together(asked)
    with pytest.raises(ValueError, match="two bases"):
        forward_backward_together([asked[0], (create_run(base(), Adapters(2)), data(1, 2), Loss("ppo"))])
    model, params = bases.quantise(mine.model, {n: x.float() for n, x in mine.params.items()}, "int8")
    assert together_hindrance(create_run(base(model=model, params=params), Adapters(2))) == "its base is quantised"
    experts, weights = families.make("glm4_moe")
    reason = together_hindrance(create_run(base(model=experts, params=weights), Adapters(2)))
    assert reason is not None
    assert "routers of experts" in reason


def test_a_server_s_joint_passes_leave_each_run_where_its_own_would(tmp_path):
    joint, alone = World(tmp_path / "joint", Clock(), joint=True), World(tmp_path / "alone", Clock())
    names = [joint.create(number)[0] for number in range(3)]
    assert [alone.create(number)[0] for number in range(3)] == names
    asked = [(name, 1, VERBS["pass"]) for name in names]
    assert {joint.runs.joins(name, verb) for name, _, verb in asked} == {"tiny"}
    before = joint.runs.value(names[0])
    joint.runs.join(asked)
    assert joint.runs.value(names[0]) is before  # until each is done
    outcomes = [joint.did(*each) for each in asked]
    assert all(isinstance(x, Payload) for x in outcomes)
    for name in names:
        alone.did(name, 1, VERBS["pass"])
        ours, theirs = joint.runs.value(name), alone.runs.value(name)
        torch.testing.assert_close(ours.grads, theirs.grads, rtol=1e-4, atol=1e-6)
        assert joint.held(name).done == 1
    joint.runs.join([(name, 2, VERBS["pass"]) for name in names])
    joint.runs.join([])  # a request that is not done after all is not done by the next one of its number
    assert isinstance(joint.did(names[0], 2, VERBS["wrong"]), FailedRequest)
    for world in (joint, alone):
        world.runs.close()


def test_a_request_that_fails_in_a_joint_pass_costs_no_other_run_its_own(tmp_path):
    world = World(tmp_path, Clock(), joint=True)
    one, other = (world.create(number)[0] for number in range(2))
    world.runs.join([(one, 1, VERBS["wrong"]), (other, 1, VERBS["pass"])])
    assert isinstance(world.did(one, 1, VERBS["wrong"]), FailedRequest)
    assert isinstance(world.did(other, 1, VERBS["pass"]), Payload)
    assert world.runs.value(other).grads is not None
    world.runs.close()


def test_what_is_not_to_be_joined_is_done_by_itself(tmp_path):
    world, plain = World(tmp_path / "a", Clock(), joint=True), World(tmp_path / "b", Clock())
    run, whole = world.create(0)[0], world.create(1, rank=0)[0]
    later = LaterVerb(JournalRecord(1, "pass", b"pass"))  # of an earlier server, which it may have ended
    assert [world.runs.joins(run, verb) for verb in (VERBS["forward"], VERBS["step"], later)] == [None, None, None]
    assert world.runs.joins(whole, VERBS["pass"]) is None
    assert plain.runs.joins(plain.create(0)[0], VERBS["pass"]) is None
    for each in (world, plain):
        each.runs.close()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tinker") is None, reason="needs tinker")
def test_clients_that_train_at_the_same_time_get_what_they_get_alone(tmp_path):
    from tests.serve.tinker.test_client import OURS, STEP, client_of, ours, theirs

    seeds = range(4)
    with served.served(tmp_path, joint=True) as host, client_of(host) as client:
        trainers = [client.create_lora_training_client("tiny", rank=4, seed=n).result() for n in seeds]
        taken = []
        join, host.service.runs.join = host.service.runs.join, lambda asked: (taken.append(len(asked)), join(asked))
        for step in range(3):
            pending = [trainer.forward_backward(theirs(step + n), "ppo") for n, trainer in enumerate(trainers)]
            pending += [trainer.optim_step(STEP) for trainer in trainers]
            for each in pending:
                each.result()
        for n, trainer in enumerate(trainers):
            run = create_run(served.base().base, Adapters(4, seed=n))
            for step in range(3):
                run, _ = forward_backward(run, ours(step + n), Loss("ppo"))
                run, _ = optim_step(run, OURS)
            torch.testing.assert_close(host.params(trainer.model_id), dict(run.state.params), rtol=1e-3, atol=1e-4)
    assert sum(taken) > 0  # some were joined
