"""The short way in gives the run that wiring by hand gives, and its pieces can be rearranged."""

import traceback
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from fppo import advantages, data, laws, losses, models, quickstart, rewards, tree
from fppo.advantages import Advantages
from fppo.key import Key
from fppo.pipeline import Program, RunState, local_passes, pieces, ppo_step, stages, train, with_teacher
from fppo.pipeline.checks import disagreements
from fppo.pipeline.stages import Estimate, RollOut, ScoreWithGreedy
from fppo.pipeline.wiring import wire
from fppo.rollout import EmbeddedEngine, Sampling
from fppo.steps import (
    Forward,
    Loop,
    MicroBatching,
    PolicyTerms,
    UpdateActor,
    UpdateCritic,
    adamw,
    init_state,
    schedule,
)
from tests.parts import EVERY_ESTIMATOR

OPTIMIZER = adamw(schedule("constant", 1e-3))
LOOP = Loop(mini_batch_size=4, micro_batching=MicroBatching(size=4))
SAMPLING = Sampling(n=2, max_tokens=3, temperature=0.8)


@rewards.inline_reward
def length(sample):
    return len(sample.response) + float("5" in sample.response)


@pytest.fixture(scope="module")
def task():
    tokenizer, model, params = quickstart.warmed_up(Key(1), steps=2)
    return tokenizer, model, params, quickstart.prompt_sets(tokenizer)[0]


def _wired(task, **changes):
    tokenizer, model, params, prompts = task
    sizes = {"sampling": SAMPLING, "batch_size": 8, "loop": LOOP}
    shared = {"reward": length, "optimizer": OPTIMIZER, "key": Key(3), **sizes}
    return pieces((model, params), tokenizer, prompts, **{**shared, **changes})


def _by_hand(task, name):
    """As `pieces` does it, in the words of a script."""
    tokenizer, model, params, prompts = task
    policy, terms = Forward(model), PolicyTerms(temperature=0.8)
    sampling = attrs.evolve(SAMPLING, stop_token_ids=(tokenizer.eos_token_id,))
    engine = EmbeddedEngine(model=model, kernels=policy.kernels, pad_token_id=0)
    score = partial(rewards.score, reward=rewards.RewardRunner(length), tokenizer=tokenizer)
    value, critic = None, None
    if name == "gae":
        critic_model, critic_params = models.as_critic(model, params, Key(3))
        value, critic = Forward(critic_model), init_state(critic_params, OPTIMIZER)
    shared = {"loop": LOOP, "optimizer": OPTIMIZER}
    program = Program(
        rollout=stages.RollOut(engine=engine, sampling=sampling),
        score=stages.Score(score=score),
        annotate=stages.Annotate(
            passes=local_passes(policy, value, micro_batching=LOOP.micro_batching, temperature=0.8)
        ),
        estimate=stages.Estimate(advantage_fn=EVERY_ESTIMATOR[name], max_tokens=3, whiten=name == "gae"),
        update_actor=UpdateActor(forward=policy, loss_fn=losses.ppo_clip, terms=terms, **shared),
        update_critic=value and UpdateCritic(forward=value, **shared),
    )
    run = RunState(actor=init_state(params, OPTIMIZER), critic=critic, key=Key(3))
    return run, {"program": program, "draw": partial(data.next_batch, prompts, size=4, key=Key(3).fold("data"))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gae", "grpo"])
def test_it_is_what_a_script_wires_by_hand(task, name):
    wired = _wired(task, advantage=EVERY_ESTIMATOR[name])
    parts = ("rollout", "annotate", "estimate", "update_actor")
    assert disagreements(**{name: getattr(wired.program, name) for name in parts}) == []
    after = train(wired.run, program=wired.program, draw=wired.draw, steps=2)
    run, how = _by_hand(task, name)
    assert tree.digest(after) == tree.digest(train(run, **how, steps=2))
    prompts, more = wired.draw(after.cursor)[0], {"n": 9, "max_tokens": 9, "temperature": 3.0}
    both = (each.rollout for each in (wired.program, how["program"]))
    longer = (attrs.evolve(stage, sampling=attrs.evolve(stage.sampling, **more)) for stage in both)
    rows, expected = (stage(prompts, after.actor.params, key=Key(5), version=2)[0] for stage in longer)
    assert len(set(rows.attention_mask.sum(1).tolist())) > 2
    assert tree.digest(rows) == tree.digest(expected)  # what stands behind responses too
    assert tree.digest(after.actor.params) != tree.digest(wired.run.actor.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_ESTIMATOR)
def test_every_estimator_can_be_wired(task, name):
    wired = _wired(task, advantage=EVERY_ESTIMATOR[name])
    if name == "distill":
        wired = with_teacher(wired, task[1:3], micro_batching=LOOP.micro_batching)
    after, experience, _ = ppo_step(wired.run, program=wired.program, draw=wired.draw)
    assert after.actor.step == 2
    assert experience.advantages.isfinite().all()


def test_a_teacher_of_fewer_tokens_is_refused(task):
    model = quickstart.small_model(8, width=16, layers=1)
    with pytest.raises(ValueError, match="the teacher has 8 tokens, and the policy may sample 15"):
        with_teacher(_wired(task), (model, models.init_params(model, Key(0))), micro_batching=LOOP.micro_batching)


def test_its_pieces_can_be_rearranged(task):
    wired = _wired(task, advantage=advantages.grpo)
    update = attrs.evolve(wired.program.update_actor, terms=PolicyTerms(temperature=0.8, kl_coef=0.1))
    run = tree.replace(wired.run, ref=wired.run.actor.params)
    _, _, report = ppo_step(run, program=attrs.evolve(wired.program, update_actor=update), draw=wired.draw)
    assert "actor/kl_loss" in report


def best_of_group(scores, mask, groups):
    """One of one's own, in the words of the laws."""
    result = advantages.rloo(scores, mask, groups)
    return Advantages(2.0 * result.advantages, result.returns)


@pytest.mark.slow
def test_an_estimator_is_one_function_to_the_laws_and_to_a_pipeline(task):
    laws.check_advantages(best_of_group)
    steps = {}
    for name, fn in {
        "grouped": best_of_group,
        "alone": lambda scores, mask, groups: best_of_group(scores, mask, groups).advantages,
        "rows": lambda rows, rewards: best_of_group(rewards.sum(1), rows.response_mask, rows.groups),
    }.items():
        wired = _wired(task, advantage=fn)
        _, experience, _ = ppo_step(wired.run, program=wired.program, draw=wired.draw)
        steps[name] = experience
    for experience in steps.values():
        assert torch.equal(experience.advantages, steps["rows"].advantages)
        assert torch.equal(experience.returns, steps["rows"].returns)
    assert steps["rows"].advantages.any()


def test_sizes_that_do_not_fit_are_said_at_once(task):
    loop = Loop(mini_batch_size=6, micro_batching=MicroBatching(size=4))
    with pytest.raises(ValueError) as error:
        _wired(task, batch_size=7, loop=loop, advantage=advantages.grpo)
    assert "batch_size=7: give a multiple of Sampling.n = 2" in str(error.value)
    assert "mini_batch_size=6: must divide batch_size = 7" in str(error.value)
    with pytest.raises(ValueError, match="'grpo' compares responses to one prompt; give 2 or more"):
        _wired(task, sampling=attrs.evolve(SAMPLING, n=1), advantage=advantages.grpo)
    with pytest.raises(ValueError, match=r"'<lambda>' has parameters \['score'\], which are no columns"):
        _wired(task, advantage=lambda score, mask: score)


def test_each_step_has_keys_of_its_own(task):
    keys = []

    def noted(state, batch, *, key, donate):
        keys.append(key)
        return tree.replace(state, step=state.step + 1), {}

    wired = _wired(task, advantage=advantages.grpo)
    program, run = attrs.evolve(wired.program, update_actor=noted), wired.run
    for _ in range(2):
        run, *_ = ppo_step(run, program=program, draw=wired.draw)
    assert keys == [wired.run.key.fold("step", number).fold("actor") for number in range(2)]


def test_few_frames_stand_between_a_step_and_a_loss(task):
    """Who debugs a loss of their own reads a short traceback."""
    seen = []

    def loss(log_probs, old_log_probs, advantages, mask):
        names = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()[:-1]]
        start = max(i for i, (_, name) in enumerate(names) if name == "ppo_step")
        seen.append([name for path, name in names[start + 1 :] if "fppo" in path.parts])
        return losses.ppo_clip(log_probs, old_log_probs, advantages, mask)

    wired = _wired(task, advantage=advantages.grpo)
    update = attrs.evolve(wired.program.update_actor, loss_fn=loss)
    ppo_step(wired.run, program=attrs.evolve(wired.program, update_actor=update, check=False), draw=wired.draw)
    assert all(len(frames) <= 7 for frames in seen), seen[0]


def test_the_baseline_of_remax_is_one_greedy_response():
    parts: dict[str, Any] = dict.fromkeys(("score", "passes", "update_actor"))
    rollout: Any = RollOut(engine=None, sampling=Sampling(max_tokens=3, n=4))  # type: ignore[arg-type]
    made = wire(rollout=rollout, estimate=Estimate(advantage_fn=advantages.remax, max_tokens=3), check=False, **parts)
    assert isinstance(made.score, ScoreWithGreedy)
    assert (made.score.sampling.greedy, made.score.sampling.n) == (True, 1)
