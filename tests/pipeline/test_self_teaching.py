"""A policy teaches itself behind prompts made of what is known after scoring."""

from __future__ import annotations

import math
from functools import partial

import attrs
import pytest
import torch

from fppo import advantages, losses, metrics, models, quickstart, rewards, tree
from fppo.key import Key
from fppo.pipeline import PromptByFeedback, evaluate, follow, iterate, pieces, ppo_step, self_taught
from fppo.rollout import Sampling
from fppo.steps import DistillTerm, Loop, MicroBatching, Top, sgd

MICRO = MicroBatching(size=64)
TOKENIZER = quickstart.character_tokenizer()
WHOLE = Top(len(TOKENIZER), len(TOKENIZER))


def checker(sample):
    right = len(sample.response) % 2
    return {"score": float(right), "answer": "7"} if right else {"score": 0.0, "feedback": "98"}


def own_pieces(estimator=advantages.reverse_kl, reward=checker):
    model = quickstart.small_model(len(TOKENIZER), width=16, layers=1)
    params = {name: 4 * x for name, x in models.init_params(model, Key(0)).items()}
    return pieces(
        (model, params),
        TOKENIZER,
        quickstart.prompt_sets(TOKENIZER)[1],
        reward=rewards.inline_reward(reward),
        sampling=Sampling(max_tokens=4, n=4),
        batch_size=16,
        loop=Loop(mini_batch_size=16, micro_batching=MICRO),
        optimizer=sgd(lambda step: 0.5),
        advantage=estimator,
    )


def prompted(fn, limit=20):
    return PromptByFeedback(fn=fn, encode=TOKENIZER.encode, tokenizer=TOKENIZER, limit=limit)


def said(group, number):
    """The checker's words before the prompt, for wrong responses."""
    feedback = group.each[number].feedback
    return feedback["checker"] + group.prompt if feedback else None


def test_a_function_gets_a_group_and_rows_without_feedback_are_left_out():
    seen = []

    def fn(group, number):
        seen.append((group, number))
        return said(group, number)

    own = self_taught(own_pieces(), prompted(fn))
    _, rows, report = ppo_step(own.run, program=own.program, draw=own.draw)
    wrong = rows.scores == 0
    assert 0 < wrong.sum() < 16
    assert [number for _, number in seen] == [0, 1, 2, 3] * 4
    responses = [[x.response for x in group.each] for group, _ in seen[::4]]
    width, mask = rows.response_mask.shape[1], rows.attention_mask
    texts = [TOKENIZER.decode(x[-width:][y[-width:]], skip_special_tokens=True) for x, y in zip(rows.tokens, mask)]
    assert [x for group in responses for x in group] == texts
    group = seen[0][0]
    assert group.ground_truth == rows.ground_truth[0]
    assert [x.score for x in group.each] == rows.scores[:4].tolist()
    assert [x.named["checker"] for x in group.each] == rows.scores[:4].tolist()
    assert torch.equal(rows.taught, wrong)
    assert not rows.response_mask[~wrong].any()  # left out of what is trained
    assert rows.response_mask[wrong].any(1).all()
    numbers = metrics.report(report)
    assert numbers["teacher/taught"] == pytest.approx(wrong.float().mean().item())
    assert numbers["teacher/over_long"] == 0


def test_what_is_trained_and_what_the_student_reads_do_not_depend_on_the_teachers_prompt():
    found = []
    for fn in (lambda group, number: "11+11=", lambda group, number: f"{group.ground_truth}={group.prompt}"):
        own = self_taught(own_pieces(), prompted(fn))
        _, rows, _ = ppo_step(own.run, program=own.program, draw=own.draw)
        found.append(rows)
    for name in ("tokens", "attention_mask", "response_mask", "old_log_probs", "scores", "row_ids"):
        assert torch.equal(*(getattr(rows, name) for rows in found)), name
    assert not torch.equal(*(rows.teacher_log_probs for rows in found))


@pytest.mark.parametrize("term", [None, losses.reverse_kl, losses.forward_kl])
def test_a_teacher_that_reads_the_same_moves_nothing(term):
    own = own_pieces(partial(advantages.reverse_kl, coef=float(term is None)))
    given = {} if term is None else {"distill": DistillTerm(divergence=term, whole=True), "top": WHOLE}
    own = self_taught(own, prompted(lambda group, number: group.prompt), **given)
    after, _, report = ppo_step(own.run, program=own.program, draw=own.draw)
    assert metrics.report(report)["actor/teacher_kl"] == 0
    assert tree.digest(after.actor.params) == tree.digest(own.run.actor.params)


@pytest.mark.parametrize("decay", [0.75, 1.0])
def test_the_teacher_is_the_average_by_hand_and_teaches(decay):
    term = DistillTerm(divergence=losses.jensen_shannon)
    own = self_taught(own_pieces(), prompted(said), decay=decay, distill=term, top=Top(3, len(TOKENIZER)))
    expected = {name: x.double() for name, x in own.run.actor.params.items()}
    runs, before = iterate(own.run, program=own.program, draw=own.draw, donate=True), own.run
    for _ in range(3):
        run, rows, _ = next(runs)
        expected = {name: decay * x + (1 - decay) * run.actor.params[name] for name, x in expected.items()}
        for name, x in expected.items():
            torch.testing.assert_close(run.teacher[name].double(), x, rtol=1e-5, atol=1e-6)
        assert rows.teacher_top_ids.shape == (*rows.response_mask.shape, 3)
        assert run.actor.params.keys() == run.teacher.keys()
        before = run
    assert not torch.equal(*(x["model.norm.weight"] for x in (before.actor.params, before.teacher)))


def test_follow_keeps_its_bits_at_a_decay_of_one_and_is_the_policy_at_zero():
    average, params = {"a": torch.tensor([0.1, 0.3])}, {"a": torch.tensor([0.7, -0.2])}
    assert follow(average, params, decay=1.0) is average
    assert torch.equal(follow(average, params, decay=0.0)["a"], params["a"])


def test_prompts_over_the_limit_and_faults_of_a_function():
    own = self_taught(own_pieces(), prompted(lambda group, number: group.prompt * 9))
    _, rows, report = ppo_step(own.run, program=own.program, draw=own.draw)
    assert metrics.report(report)["teacher/over_long"] == 16
    assert not rows.taught.any()
    own = self_taught(own_pieces(), prompted(lambda group, number: group.each[7].response))
    with pytest.raises(ValueError, match=r"data\.teacher_prompt: IndexError for response 0 to '.*=': .*; return text"):
        ppo_step(own.run, program=own.program, draw=own.draw)


def test_an_evaluation_needs_no_teacher():
    own = self_taught(own_pieces(), prompted(said), decay=0.5)
    greedy = attrs.evolve(own.sampling, greedy=True, n=1)
    batches = [own.draw(own.run.cursor)[0]]
    report = metrics.report(evaluate(own.run, batches=batches, engine=own.engine, sampling=greedy, score=own.score))
    assert all(math.isfinite(x) for x in report.values())
