"""A teacher's log-probs join the scores of a batch, and a step learns from them."""

from __future__ import annotations

import attrs
import pytest
import torch

from fppo import advantages, metrics, models, quickstart, rewards, tree
from fppo.batch import rows
from fppo.key import Key
from fppo.pipeline import PolicyPass, Score, ScoreByTeacher, TeacherPass, iterate, pieces
from fppo.pipeline.draw import concat
from fppo.rewards.functions import WeightedSum
from fppo.rollout import Ask, Sampling
from fppo.steps import Forward, Loop, MicroBatching, adamw, compute_log_probs

MICRO = MicroBatching(size=64)
TOKENIZER = quickstart.character_tokenizer()


def nothing(sample):
    """A reward that is right about half of the responses."""
    return float(len(sample.response) % 2)


def wired(estimator=advantages.reverse_kl, batch=16, **sampling):
    """A run of a tiny policy on sums, with its pieces."""
    model = quickstart.small_model(len(TOKENIZER), width=16, layers=1)
    return pieces(
        (model, models.init_params(model, Key(0))),
        TOKENIZER,
        quickstart.prompt_sets(TOKENIZER)[1],
        reward=rewards.inline_reward(nothing),
        sampling=Sampling(max_tokens=4, **sampling),
        batch_size=batch,
        loop=Loop(mini_batch_size=batch, micro_batching=MICRO),
        optimizer=adamw(lambda step: 1e-2, weight_decay=0.0),
        advantage=estimator,
    )


def teacher_of(width: int, layers: int, seed: int, scale: float = 8.0) -> TeacherPass:
    model = quickstart.small_model(len(TOKENIZER), width=width, layers=layers)
    params = {name: scale * x for name, x in models.init_params(model, Key(seed)).items()}
    return TeacherPass(params=params, policy=PolicyPass(forward=Forward(model), micro_batching=MICRO))


def rollout_of(own):
    asked, _ = own.draw(own.run.cursor)
    return own.engine.generate(own.run.actor.params, Ask(asked, own.sampling, Key(1)))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_have_the_log_probs_of_a_larger_teacher_at_the_temperature_of_sampling(temperature):
    own, teacher = wired(temperature=temperature), teacher_of(32, 2, 3)
    score = ScoreByTeacher(score=own.score, teacher=teacher, temperature=temperature)
    rollout = rollout_of(own)
    scored, report = score(rollout)
    how = {"forward": teacher.policy.forward, "micro_batching": MICRO, "temperature": temperature}
    expected = compute_log_probs(teacher.params, rollout, **how)
    assert torch.equal(scored.teacher_log_probs, expected)
    mask = rollout.response_mask
    apart = [(rollout.rollout_log_probs - expected)[row][mask[row]].mean().item() for row in range(len(mask))]
    assert scored.named_scores["reverse_kl"].tolist() == pytest.approx(apart, rel=1e-5, abs=1e-6)
    assert torch.equal(scored.scores, own.score(rollout)[0].scores)
    numbers = metrics.report(report)
    assert numbers["reward/reverse_kl"] == pytest.approx(sum(apart) / len(apart), rel=1e-5)
    assert numbers["timing_s/teacher"] > 0


@pytest.mark.slow
def test_a_teacher_alone_scores_by_how_far_the_policy_is_from_it():
    own = wired()
    none = rewards.RewardRunner(WeightedSum(()))
    scored, report = ScoreByTeacher(
        score=lambda rollout: rewards.score(rollout, reward=none, tokenizer=TOKENIZER),
        teacher=teacher_of(32, 2, 3),
        alone=True,
    )(rollout_of(own))
    assert list(scored.named_scores) == ["reverse_kl"]
    assert torch.equal(scored.scores, -scored.named_scores["reverse_kl"])
    assert scored.has_score.all()
    numbers = metrics.report(report)
    assert numbers["critic/score/mean"] == pytest.approx(-numbers["reward/reverse_kl"]) != 0


def test_a_reward_of_the_same_name_is_refused():
    own = wired()

    def clashing(rollout):
        scored, report = own.score(rollout)
        return tree.replace(scored, named_scores={"reverse_kl": scored.scores}), report

    with pytest.raises(ValueError, match=r"the reward has a function or a number named 'reverse_kl', .*: rename yours"):
        ScoreByTeacher(score=clashing, teacher=teacher_of(16, 1, 0))(rollout_of(own))


def taught(own, teacher):
    score = Score(score=ScoreByTeacher(score=own.score, teacher=teacher))
    return iterate(own.run, program=attrs.evolve(own.program, score=score), draw=own.draw)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_a_policy_that_is_its_own_teacher_stays_as_it_is(gamma):
    own = wired(
        lambda log_probs, teacher_log_probs, mask: advantages.reverse_kl(
            log_probs, teacher_log_probs, mask, gamma=gamma
        )
    )
    same = TeacherPass(params=own.run.actor.params, policy=PolicyPass(forward=own.policy, micro_batching=MICRO))
    after, experience, report = next(taught(own, same))
    assert metrics.report(report)["actor/teacher_kl"] == 0
    assert not experience.advantages.any()
    assert tree.digest(after.actor.params) == tree.digest(own.run.actor.params)


@pytest.mark.slow
def test_without_a_teacher_its_column_is_named():
    own = wired()
    with pytest.raises(ValueError, match="'reverse_kl' needs teacher_log_probs in the batch"):
        next(iterate(own.run, program=own.program, draw=own.draw))


@pytest.mark.slow
def test_a_policy_comes_closer_to_its_teacher():
    steps = taught(wired(batch=64), teacher_of(16, 1, 0, scale=3.0))
    found = [metrics.report(next(steps)[2])["actor/teacher_kl"] for _ in range(40)]
    steps.close()
    assert 0 < sum(found[-5:]) < 0.75 * sum(found[:5])


def test_draws_of_several_widths_keep_the_teachers_columns():
    own = wired()
    scored, _ = ScoreByTeacher(score=own.score, teacher=teacher_of(16, 1, 0))(rollout_of(own))
    narrow = tree.replace(
        scored,
        **{
            name: getattr(scored, name)[:, :-1]
            for name in ("tokens", "attention_mask", "response_mask", "rollout_log_probs", "sampling_log_probs")
        },
        teacher_log_probs=scored.teacher_log_probs[:, :-1],
    )
    both = concat([scored, narrow], 0)
    assert torch.equal(rows(both, range(16)).teacher_log_probs, scored.teacher_log_probs)
    assert torch.equal(rows(both, range(16, 32)).teacher_log_probs[:, :-1], narrow.teacher_log_probs)
