"""The pass for old log-probs tells which experts the policy chose; the update chooses them again, and the reference."""

from functools import partial

import pytest
import torch

from fppo import losses
from fppo.batch import Experience, Scored, extend, narrow
from fppo.key import Key
from fppo.pipeline import stages
from fppo.pipeline.program import RunState
from fppo.runtime.simulate import simulate
from fppo.settings import checks, files
from fppo.steps.actor import update_actor
from fppo.steps.forward import Forward, compute_log_probs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.train_state import init_state
from tests import tiny, tiny_run
from tests.models.families import make

SGD = sgd(lambda step: 0.0)
CUT = MicroBatching(size=2)
BATCH = tiny.experience(3, 6)


def annotated(mesh, replay, source="pass"):
    model, params = make("qwen3_moe")
    ref = {name: x + (0.7 if name.endswith("gate.weight") else 0.0) * x.flip(0) for name, x in params.items()}
    run = RunState(actor=init_state(params, SGD), ref=ref, key=Key(0))
    rows, _ = stages.annotate(
        narrow(Scored, BATCH),
        run,
        forward=Forward(model, mesh=mesh),
        critic=None,
        micro_batching=CUT,
        old_log_probs=source,
        replay=replay,
    )
    return model, run, rows


@pytest.mark.parametrize("source", ["pass", "engine", "auto"])
def test_the_reference_and_the_update_choose_what_the_policy_chose(source):
    (model, run, rows), (*_, others) = simulate({"shard": 2}, partial(annotated, replay="all", source=source))
    assert torch.equal(rows.routed, others.routed)
    plain = annotated(Forward(model).mesh, "none")[2]
    assert plain.routed is None
    torch.testing.assert_close(annotated(Forward(model).mesh, "old_log_probs")[2].ref_log_probs, plain.ref_log_probs)
    again = partial(compute_log_probs, forward=Forward(model, replay=True), micro_batching=CUT)
    torch.testing.assert_close(again(run.ref, rows), rows.ref_log_probs)
    assert (rows.ref_log_probs - plain.ref_log_probs).abs().max() > 1e-3  # it would have chosen others
    torch.testing.assert_close(again(run.actor.params, rows), plain.old_log_probs)
    moved = run.ref  # a policy that has moved
    seen = []

    def loss(log_probs, old_log_probs, advantages, mask):
        seen.append(log_probs.detach())
        return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)

    experience = extend(
        Experience,
        rows,
        **{name: getattr(BATCH, name) for name in ("token_rewards", "advantages", "returns")},
    )
    update_actor(
        init_state(moved, SGD),
        experience,
        forward=Forward(model, replay=True),
        loss_fn=loss,
        loop=Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6)),
        optimizer=SGD,
    )
    torch.testing.assert_close(seen[0], rows.ref_log_probs)


def test_what_does_not_go_together_is_named(tmp_path):
    tiny_run.write_task(tmp_path)
    alone = tiny_run.settings(tmp_path)
    problems = checks.problems(
        files.replace(
            alone,
            {
                "actor.experts.balance_coef": 0.1,
                "actor.experts.bias_rate": 0.1,
                "model.compile_layers": True,
            },
        )
    )
    assert [line.split(":")[0] for line in problems] == [
        "actor.experts.balance_coef = 0.1",
        "actor.experts.bias_rate = 0.1",
        "actor.experts.balance_coef = 0.1",
    ]
    assert "give algorithm.router_replay" in problems[0]
