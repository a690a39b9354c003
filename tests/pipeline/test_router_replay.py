"""The pass for old log-probs tells which experts the policy chose; the update chooses them again, and the reference."""

from functools import partial

import pytest
import torch

from fppo import batch as batches
from fppo import losses
from fppo.batch import Experience, Scored, extend, narrow
from fppo.commands import actions
from fppo.key import Key
from fppo.pipeline import local_passes, stages
from fppo.pipeline.program import RunState
from fppo.rollout import saved
from fppo.runs import jsonl
from fppo.runtime.mesh import LOCAL
from fppo.runtime.simulate import simulate
from fppo.settings import checks, files
from fppo.steps.actor import UpdateActor
from fppo.steps.forward import Forward, compute_log_probs, compute_outputs
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.train_state import init_state
from fppo.tree import replace
from tests import tiny, tiny_run
from tests.models.families import make

SGD = sgd(lambda step: 0.0)
CUT = MicroBatching(size=2)
BATCH = tiny.experience(3, 6)


def annotated(mesh, replay, source="pass", batch=BATCH):
    model, params = make("qwen3_moe")
    ref = {name: x + (0.7 if name.endswith("gate.weight") else 0.0) * x.flip(0) for name, x in params.items()}
    run = RunState(actor=init_state(params, SGD), ref=ref, key=Key(0))
    rows, report = stages.Annotate(
        passes=local_passes(Forward(model, mesh=mesh), micro_batching=CUT, replay=replay),
        old_log_probs=source,
        replay=replay,
    )(narrow(Scored, batch), run)
    return model, run, rows, report


@pytest.mark.slow
@pytest.mark.parametrize("source", ["pass", "engine", "auto"])
def test_the_reference_and_the_update_choose_what_the_policy_chose(source):
    (model, run, rows, _), (*_, others, _) = simulate({"shard": 2}, partial(annotated, replay="all", source=source))
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
    UpdateActor(
        forward=Forward(model, replay=True),
        loss_fn=loss,
        loop=Loop(mini_batch_size=6, micro_batching=MicroBatching(size=6)),
        optimizer=SGD,
    )(init_state(moved, SGD), experience)
    torch.testing.assert_close(seen[0], rows.ref_log_probs)


def test_the_policys_passes_choose_what_the_rollout_tells():
    model, run, *_ = annotated(LOCAL, "none")
    passed = partial(compute_outputs, micro_batching=CUT, outputs=("log_probs", "routed"))
    free = passed(run.actor.params, BATCH, forward=Forward(model))
    batch = replace(BATCH, routed=passed(run.ref, BATCH, forward=Forward(model)).routed)
    expected = passed(run.actor.params, batch, forward=Forward(model, replay=True)).log_probs
    assert (expected - free.log_probs).abs().max() > 1e-3
    for source, old in (("pass", expected), ("engine", batch.rollout_log_probs)):
        _, _, rows, report = annotated(LOCAL, "rollout", source, batch)
        torch.testing.assert_close(rows.old_log_probs, old, rtol=0, atol=0)
        assert torch.equal(rows.routed, batch.routed)
        assert ("training/rerouted/tokens" in report) == (source == "pass")


@pytest.mark.slow
def test_a_run_replays_what_its_rollout_tells_and_another_run_what_was_saved(tmp_path):
    tiny_run.write_task(tmp_path)
    tiny_run.write_mixture(tmp_path)

    def train(name, steps=2, **changes):
        shared = {"steps": steps, "algorithm__router_replay": "rollout", "actor__experts__balance_coef": 0.1}
        given = tiny_run.settings(tmp_path, output_dir=str(tmp_path / name), **shared, **changes)
        assert actions.train(given) == 0
        return tmp_path / name

    first = train("first", rollout__save=True)
    for line in jsonl.read(first / "metrics.jsonl")[1:]:
        assert 0 <= line["training/rerouted/choices"] <= line["training/rerouted/tokens"] < 0.1
    second = train("second", rollout__from=str(first / "rollouts"))
    batch, same = (jsonl.read(x / "digests.jsonl")[1]["batch"] for x in (first, second))
    assert batch == same
    assert ".routed" in batch
    told = saved.read(first / "rollouts", 1, torch.device("cpu"), vocabulary=99)
    path = saved.path_of(tmp_path / "others", 1)
    path.parent.mkdir()
    batches.save(replace(told, routed=(told.routed + 1) % 4), path)
    line = jsonl.read(train("third", steps=1, rollout__from=str(path.parent)) / "metrics.jsonl")[1]
    assert line["training/rerouted/tokens"] > 0.5
    assert line["training/rollout_probs_diff_max"] > 1e-6
    batches.save(replace(told, routed=None), path)
    with pytest.raises(ValueError, match=r'router_replay = "rollout": .* does not tell which experts the engine chose'):
        train("fourth", steps=1, rollout__from=str(path.parent))


def test_what_does_not_go_together_is_named(tmp_path):
    tiny_run.write_task(tmp_path)
    alone = tiny_run.settings(tmp_path)
    changes = {"rollout.engine": "vllm", "algorithm.router_replay": "rollout"}
    (problem,) = checks.problems(files.replace(alone, changes))
    assert str(problem).startswith(
        "algorithm.router_replay = 'rollout': vLLM tells experts from its model runner V2 alone"
    )
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
    assert [str(problem).split(":")[0] for problem in problems] == [
        "actor.experts.balance_coef = 0.1",
        "actor.experts.bias_rate = 0.1",
        "actor.experts.balance_coef = 0.1",
    ]
    assert "give algorithm.router_replay" in problems[0].text
