"""A step by what it hands from stage to stage: keys, states, columns and metrics, with stages that only write down."""

from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo import metrics
from fppo.data.cursor import DataCursor
from fppo.key import Key
from fppo.losses import KLState
from fppo.pipeline.pretrain import Pretrain, Pretraining
from fppo.pipeline.program import Program, RunState
from fppo.pipeline.step import ppo_step
from fppo.steps.clock import Clock
from fppo.steps.train_state import TrainState
from tests import tiny

BATCH = attrs.evolve(
    tiny.experience(0, 4), hidden=torch.ones(4, 6, 3), truth_signs=torch.ones(4, 6, 2), versions=torch.full((4,), 5)
)


class Stages:
    """Stages that note what they were called with; the update of a role adds 1 to its parameter."""

    def __init__(self):
        self.calls = {}

    def sample(self, run, *, draw, rollout, score):
        self.calls["sample"] = (run, draw, rollout, score)
        return BATCH, DataCursor(position=99), {"own/sample": metrics.mean(1.0)}

    def annotate(self, scored, run):
        self.calls["annotate"] = (scored, run)
        return scored, {"own/annotate": metrics.mean(2.0)}

    def estimate(self, annotated, kl):
        self.calls["estimate"] = (annotated, kl)
        return annotated, KLState(coef=float(kl.coef) + 1), {"own/estimate": metrics.mean(3.0)}

    def update(self, role):
        def stage(state, batch, *, key, donate):
            self.calls[role] = (state, batch, key, donate)
            after = attrs.evolve(state, params={"w": state.params["w"] + 1}, step=state.step + 2)
            return after, {f"own/{role}": metrics.mean(4.0), f"{role}/skipped": metrics.mean(0.0, 2.0)}

        return stage

    def program(self, **changes):
        parts = {"rollout": "rollout", "score": "score", "sample": self.sample, "annotate": self.annotate}
        updates = {"update_actor": self.update("actor"), "update_critic": self.update("critic")}
        return Program(**{**parts, "estimate": self.estimate, **updates, "check": False, **changes})


def state(step, **changes):
    return TrainState(params={"w": torch.full((1,), float(step))}, opt=None, step=step, **changes)


def run_of(step=3, **changes):
    start = {"actor": state(7), "critic": state(11), "key": Key(2), "kl": KLState(coef=0.5), "step": step}
    return RunState(**{**start, **changes})


@pytest.mark.parametrize("donate", [False, True])
def test_stages_get_what_those_before_them_made(donate):
    stages, run = Stages(), run_of()
    after, experience, report = ppo_step(run, program=stages.program(), draw="draw", donate=donate)
    assert stages.calls["sample"] == (run, "draw", "rollout", "score")
    assert stages.calls["annotate"] == (BATCH, run)
    assert stages.calls["estimate"] == (BATCH, run.kl)
    for role, own in (("critic", run.critic), ("actor", run.actor)):
        seen, batch, key, gives_up = stages.calls[role]
        assert seen is own
        assert (key, gives_up) == (Key(2).fold("step", 3).fold(role), donate)
        assert (batch.hidden is None, batch.truth_signs is None) == ((role == "actor",) * 2)
        assert torch.equal(batch.advantages, BATCH.advantages)
    assert experience is BATCH
    assert (after.actor.params["w"].item(), after.actor.step) == (8, 9)
    assert (after.critic.params["w"].item(), after.critic.step) == (12, 13)
    assert (after.step, after.cursor.position, float(after.kl.coef), after.key) == (4, 99, 1.5, Key(2))
    numbers = metrics.report(report)
    assert {name for name in numbers if not name.startswith("timing_s/")} == {
        *("own/sample", "own/annotate", "own/estimate", "own/actor", "own/critic"),
        *("actor/skipped", "critic/skipped", "rollout/lag", "rollout/lag/max"),
    }
    assert (numbers["rollout/lag"], numbers["rollout/lag/max"]) == (2.0, 2.0)  # 7 updates, sampled after 5
    assert {name for name in numbers if name.startswith("timing_s/")} == {
        *("timing_s/adv", "timing_s/update_actor", "timing_s/update_critic")
    }


@pytest.mark.parametrize(
    ("step", "changes", "updated"),
    [
        (0, {}, {"actor", "critic"}),
        (1, {"critic_warmup": 2}, {"critic"}),
        (2, {"critic_warmup": 2}, {"actor", "critic"}),
        (1, {"critic_warmup": 2, "freeze_critic": True}, {"critic"}),
        (2, {"critic_warmup": 2, "freeze_critic": True}, {"actor"}),
    ],
)
def test_steps_in_which_a_role_waits(step, changes, updated):
    stages, run = Stages(), run_of(step)
    after, _, report = ppo_step(run, program=stages.program(**changes), draw=None)
    assert stages.calls.keys() & {"actor", "critic"} == updated
    for role in ("actor", "critic"):
        moved = getattr(after, role) is not getattr(run, role)
        assert moved == (role in updated)
        assert (f"own/{role}" in report) == (role in updated)


@pytest.mark.parametrize(
    ("progress", "over"), [(Pretraining(), 0), (Pretraining(steps=3), 1), (Pretraining(over=1), 1)]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_steps_of_a_critics_pretraining(progress, over, frozen):
    """At most three steps: the policy waits, and the critic learns returns of its own; then it may stay as it is."""
    stages, returns = Stages(), torch.randn(4, 6)
    rule = Pretrain(limit=3, returns_of=lambda experience: returns)
    run = run_of(pretraining=progress)
    program = stages.program(pretrain=rule, freeze_critic=frozen)
    after, experience, report = ppo_step(run, program=program, draw=None)
    assert after.pretraining.over == over
    updated = {"critic"} if not over else {"actor"} if frozen else {"actor", "critic"}
    assert stages.calls.keys() & {"actor", "critic"} == updated
    assert torch.equal(experience.returns, BATCH.returns if over else returns)
    if not over:
        assert torch.equal(stages.calls["critic"][1].returns, returns)
    assert ("critic/pretrain/over" in report) == (not progress.over)
    with pytest.raises(ValueError, match="belong together"):
        ppo_step(run_of(), program=program, draw=None)


def test_a_batch_that_waits_is_the_steps_and_leaves_the_cursor():
    waiting = [SimpleNamespace(batch=lambda: BATCH, metrics={"own/waited": metrics.mean(float(i))}) for i in range(2)]
    stages, run = Stages(), run_of(ahead=tuple(waiting), cursor=DataCursor(position=5))
    after, _, report = ppo_step(run, program=stages.program(), draw=None)
    assert "sample" not in stages.calls
    assert (after.cursor.position, after.ahead) == (5, (waiting[1],))
    assert metrics.report({"x": report["own/waited"]})["x"] == 0.0


def test_states_with_clocks_are_at_the_step_and_between_steps_afterwards():
    stages = Stages()
    run = run_of(actor=state(7, clock=Clock(first=1)), critic=None)
    after, _, _ = ppo_step(run, program=stages.program(update_critic=None, steps=20), draw=None)
    seen = stages.calls["actor"][0].clock
    assert (seen.first, seen.step, seen.steps) == (1, 3, 20)
    assert (after.actor.clock.first, after.actor.clock.step, after.actor.clock.steps) == (1, 0, 0)
    assert after.critic is None
    with pytest.raises(ValueError, match=r"TrainState\.clock needs Program\.steps"):
        ppo_step(run, program=stages.program(update_critic=None), draw=None)
    with pytest.raises(ValueError, match="it would never learn"):
        ppo_step(run_of(), program=stages.program(update_critic=None), draw=None)
