"""From scores to advantages: what is in the rewards, which rows count, and what the metrics are means of."""

from functools import partial

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import advantages, losses, metrics
from fppo import batch as batches
from fppo._errors import RunFailed
from fppo.batch import Annotated, Column, Prompts, Rollout, Scored, extend, narrow
from fppo.losses import KLState
from fppo.pipeline import stages
from fppo.pipeline.draw import equal_groups
from fppo.rollout.engine import Sampling
from fppo.steps.actor import PolicyTerms, UpdateActor, rollout_gap
from fppo.steps.forward import Forward
from fppo.steps.loop import Loop
from fppo.steps.micro_batching import MicroBatching
from fppo.steps.optimizers import sgd
from fppo.steps.schedules import schedule
from fppo.steps.train_state import init_state
from tests import tiny
from tests.parts import EVERY_ESTIMATOR, GROUPED

NAN = float("nan")
REFUSING = {
    "gdpo": "'gdpo' compares the reward's functions one by one",
    "distill": "'reverse_kl' reads no token rewards",
    "grpo_process": "'grpo_process' reads no token rewards",
}
each_name = pytest.mark.parametrize("name", EVERY_ESTIMATOR)


def rows_of(scores, *, n, seed=3, **changes):
    """Annotated rows with these scores, n in each group, all of tokens, with all columns that estimators read."""
    scores = torch.tensor(scores, dtype=torch.float32)
    rows = narrow(Annotated, tiny.experience(seed, len(scores)))
    g = torch.Generator().manual_seed(seed)
    mask = rows.response_mask.clone()
    mask[:, 0] = True
    old = -torch.rand(mask.shape, generator=g, dtype=torch.float64).where(mask, 0.0) - 0.1
    columns = {
        "response_mask": mask,
        "scores": scores,
        "named_scores": {"a": scores, "b": scores * 2 + 1},
        "groups": torch.arange(len(scores)) // n,
        "old_log_probs": old.where(mask, 0.0),
        "ref_log_probs": (old - 0.3 * torch.rand(mask.shape, generator=g)).where(mask, 0.0),
        "rollout_log_probs": (old + torch.rand(mask.shape, generator=g)).where(mask, 0.0),
        "values": torch.rand(mask.shape, generator=g, dtype=torch.float64).where(mask, 0.0),
        "sum_squared_probs": torch.rand(mask.shape, generator=g, dtype=torch.float64).where(mask, 0.0),
        "baselines": torch.full_like(scores, 0.25),
        "teacher_log_probs": -torch.rand(mask.shape, generator=g, dtype=torch.float64).where(mask, 0.0),
    }
    return extend(Annotated, rows, **(columns | changes))


def estimated(rows, name="grpo", **how):
    advantage_fn = EVERY_ESTIMATOR[name] if isinstance(name, str) else name
    advantage_fn = partial(advantage_fn, **how.pop("bound", {}))
    kl = how.pop("kl", KLState(coef=0.0))
    return stages.Estimate(advantage_fn=advantage_fn, **{"max_tokens": 6, **how})(rows, kl)


# a KL in the rewards


@given(st.integers(0, 99), st.floats(0.01, 1.0))
def test_the_kl_in_the_rewards_is_the_coefficient_times_that_of_the_old_policy(seed, coef):
    """Of the policy before the update, not of the engine's, and by the coefficient as it was before the step."""
    rows = rows_of([1.0, 0.0, -2.0, 0.5], n=2, seed=seed)
    adaptive = partial(losses.update_kl, kind="adaptive", target=0.01, horizon=20)
    experience, kl, report = estimated(
        rows, "reinforce_plus_plus", kl=KLState(coef=coef), kl_in_reward=True, update_kl=adaptive
    )
    expected, means = torch.zeros(rows.old_log_probs.shape, dtype=torch.float64), []
    for b in range(4):
        at = rows.response_mask[b].nonzero().flatten().tolist()
        kls = [(rows.old_log_probs[b, t] - rows.ref_log_probs[b, t]).item() for t in at]
        means.append(sum(kls) / len(kls))
        for t, k in zip(at, kls, strict=True):
            expected[b, t] = -coef * k + (rows.scores[b].item() if t == at[-1] else 0.0)
    torch.testing.assert_close(experience.token_rewards.double(), expected, rtol=1e-5, atol=1e-6)
    numbers = metrics.report(report)
    assert numbers["actor/reward_kl_penalty"] == pytest.approx(sum(means) / 4)
    assert numbers["actor/reward_kl_penalty_coeff"] == pytest.approx(coef)
    error = min(max(sum(means) / 4 / 0.01 - 1, -0.2), 0.2)
    assert float(kl.coef) == pytest.approx(coef * (1 + error * 4 / 20))


@each_name
def test_every_estimator_sees_a_kl_in_the_rewards_or_refuses_it(name):
    rows = rows_of([1.0, 0.0, 0.0, 0.5, 2.0, 1.0], n=3)
    plain, _, _ = estimated(rows, name)
    run = partial(estimated, rows, name, kl=KLState(coef=0.3), kl_in_reward=True)
    if name in REFUSING:
        with pytest.raises(ValueError, match=rf"{REFUSING[name]}.*actor\.kl_coef"):
            run()
        return
    assert not torch.allclose(run()[0].advantages, plain.advantages, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in losses.KL_KINDS if kind not in losses.REWARD_KINDS])
def test_a_kl_in_the_rewards_is_k1(kind):
    """Of the others' values the penalties do not add up to the gradient of any divergence."""
    rows = rows_of([1.0, 0.0], n=2)
    with pytest.raises(ValueError, match=r"kl_in_reward=True with kl_kind='.*give 'k1'"):
        estimated(rows, kl=KLState(coef=0.1), kl_in_reward=True, kl_kind=kind)
    estimated(rows, kl_kind=kind)  # as a metric any will do


def test_gpg_counts_the_rows_that_scored_and_not_their_kl():
    """alpha is rows / rows with a score: 4 of one right row in four, with a KL in all rewards as without."""
    rows = rows_of([1.0, 0.0, 0.0, 0.0], n=4)
    plain, _, _ = estimated(rows, "gpg")
    torch.testing.assert_close(plain.advantages[0][rows.response_mask[0]].max().item(), 3.0)
    found, _, _ = estimated(rows, "gpg", kl=KLState(coef=1e-6), kl_in_reward=True)
    torch.testing.assert_close(found.advantages, plain.advantages, rtol=1e-4, atol=1e-4)


def test_gpg_counts_outcomes_where_a_penalty_shapes_the_scores():
    penalised = rows_of([0.9, -0.1, -0.2, -0.3], n=4, outcomes=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    found, _, _ = estimated(penalised, "gpg")
    assert found.advantages.max().item() == pytest.approx(4 * (0.9 - 0.075))


# rewards of steps


@each_name
@given(st.integers(0, 99))
def test_a_score_that_is_a_reward_of_the_last_token_is_that_score(name, seed):
    """Bit for bit, whatever the estimator: also beside an environment's turns."""
    rows = rows_of([1.0, 0.1, NAN, 0.5, 2.0, 1.0], n=3, seed=seed)
    last = rows.scores[:, None].where(batches.last_tokens(rows.response_mask), torch.nan)
    plain, _, _ = estimated(rows, name)
    for same in (last, torch.full_like(last, torch.nan)):
        found, _, _ = estimated(attrs.evolve(rows, process_rewards=same), name)
        for column in ("token_rewards", "advantages", "returns"):
            assert torch.equal(getattr(found, column), getattr(plain, column)), column


def test_rewards_of_steps_reach_estimators_of_tokens_and_their_sums_those_of_groups():
    """The last token gets what the steps leave of the score, and no rounding error."""
    rows = rows_of([0.3, 1.3, 1.0, 0.5], n=2)
    mask = torch.ones_like(rows.response_mask)
    steps = torch.full(mask.shape, torch.nan)
    steps[:2, 0], steps[:2, 1], steps[0, -1] = 0.1, 0.2, 0.0
    turns = torch.zeros_like(steps).index_fill(1, torch.tensor([1]), 0.25)
    rows = attrs.evolve(rows, response_mask=mask, process_rewards=steps, turn_rewards=turns)
    expected = torch.zeros_like(steps)
    expected[:2, 0], expected[:2, 1], expected[2:, 1] = 0.1, 0.2, 0.25
    expected[1, -1], expected[2, -1], expected[3, -1] = 1.0, 0.75, 0.25
    found, _, _ = estimated(rows, "reinforce_plus_plus")
    torch.testing.assert_close(found.token_rewards, expected)
    assert (found.token_rewards != 0).sum() == (expected != 0).sum()
    torch.testing.assert_close(found.returns, expected.flip(1).cumsum(1).flip(1))
    by_group, _, _ = estimated(attrs.evolve(rows, process_rewards=None, turn_rewards=None), "grpo")
    torch.testing.assert_close(estimated(rows, "grpo")[0].advantages, by_group.advantages)


# rows without a score


@each_name
@pytest.mark.parametrize("whiten", [False, True])
def test_a_row_without_a_score_counts_nowhere(name, whiten):
    """All others have what they have in a batch without it: in groups, whitening and the loss mask."""
    scores = [1.0, 0.0, NAN, 0.5, 2.0, 1.0, -1.0, NAN]
    whole = rows_of(scores, n=4)
    kept = [i for i, x in enumerate(scores) if x == x]
    takes = name not in REFUSING
    how = {"kl": KLState(coef=0.2 if takes else 0.0), "kl_in_reward": takes, "whiten": whiten}
    found, _, report = estimated(whole, name, **how)
    alone, _, wanted = estimated(batches.rows(whole, kept), name, **how)
    assert not found.response_mask[[2, 7]].any()
    assert not found.advantages[[2, 7]].any()
    assert not found.returns[[2, 7]].any()
    for column in ("advantages", "returns", "response_mask", "token_rewards"):
        torch.testing.assert_close(getattr(batches.rows(found, kept), column), getattr(alone, column))
    numbers, others = metrics.report(report), metrics.report(wanted)
    for key in others:
        if key.startswith("critic/"):
            assert numbers[key] == pytest.approx(others[key]), key


@pytest.mark.parametrize("name", [*GROUPED, "one of three arguments"])
def test_a_row_whose_group_has_no_other_score_has_no_advantage(name):
    """It is alone because the others failed: its score, were it taken for the advantage, would say nothing."""
    rows = rows_of([100.0, NAN, NAN, 1.0, 0.0, 3.0], n=3)
    fn = (lambda scores, mask, groups: advantages.rloo(scores, mask, groups)) if name not in GROUPED else name
    found, _, _ = estimated(rows, fn)
    assert found.response_mask[0].any()
    assert found.advantages[3:].any()
    if name not in ("reinforce_plus_plus_baseline", "gdpo"):
        assert not found.advantages[0].any()
    without, _, _ = estimated(batches.rows(rows, [3, 4, 5]), fn)
    torch.testing.assert_close(found.advantages[3:], without.advantages)


def test_a_row_whose_baseline_failed_leaves_too():
    rows = rows_of([1.0, 0.0], n=1, baselines=torch.tensor([NAN, 0.5]))
    found, _, _ = estimated(rows, "remax")
    assert not found.response_mask[0].any()
    assert found.advantages.isfinite().all()
    assert found.advantages[1].any()


def test_the_filter_compares_what_has_a_score():
    """One score is nothing to compare; of two that differ beside a failed one the group stays."""
    rows = rows_of([1.0, NAN, NAN, 1.0, NAN, 0.0, NAN, NAN, NAN], n=3)
    assert equal_groups(rows).tolist() == [True] * 3 + [False] * 3 + [True] * 3


class Greedy:
    """An engine whose answer to a prompt has as many tokens as the prompt's number says."""

    def generate(self, params, ask):
        prompts, numbers = ask.prompts, [int(i) + 1 for i in ask.prompts.ids]
        mask = torch.arange(max(numbers)) < torch.tensor(numbers)[:, None]
        return _answers(prompts, mask, prompts.row_ids)


def _answers(prompts, mask, groups):
    zeros = torch.zeros(mask.shape)
    return extend(
        Rollout,
        prompts,
        tokens=torch.cat([prompts.tokens, mask.long()], 1),
        attention_mask=torch.cat([prompts.attention_mask, mask], 1),
        response_mask=mask,
        rollout_log_probs=zeros,
        sampling_log_probs=zeros,
        groups=groups,
        versions=torch.zeros(len(mask), dtype=torch.int64),
        finish=Column(["stop"] * len(mask)),
    )


@pytest.mark.parametrize(("count", "n"), [(3, 2), (2, 3), (4, 1)])
def test_a_greedy_baseline_is_that_of_the_rows_own_prompt(count, n):
    """By what the baselines are, and by the advantages: a row that says what the greedy one says has none."""
    prompts = Prompts(
        tokens=torch.ones(count, 1, dtype=torch.int64),
        attention_mask=torch.ones(count, 1, dtype=torch.bool),
        row_ids=torch.arange(count),
        ids=Column(map(str, range(count))),
        ground_truth=Column([None] * count),
        source=Column(["test"] * count),
        extras=Column([{}] * count),
    )
    rows = batches.repeat(prompts, n)
    lengths = torch.arange(count).repeat_interleave(n) + 1
    rollout = _answers(rows, torch.arange(count) < lengths[:, None], rows.row_ids)

    def score(rollout):
        return extend(Scored, rollout, scores=rollout.response_mask.sum(1).float(), named_scores={}), {}

    stage = stages.ScoreWithGreedy(score=score, engine=Greedy(), sampling=Sampling(max_tokens=count))
    scored, report = stage(rollout, params={}, prompts=prompts)
    assert scored.baselines.tolist() == lengths.tolist()
    assert metrics.report(report)["critic/baseline/mean"] == pytest.approx((count + 1) / 2)
    zeros = torch.zeros(rollout.response_mask.shape)
    found, _, _ = estimated(extend(Annotated, scored, old_log_probs=zeros), "remax")
    assert not found.advantages.any()


def test_first_responses_without_any_score_end_the_run():
    """As of a judge that gives no number; a later policy has shown that it can be scored."""
    rows = rows_of([NAN, NAN], n=2)
    with pytest.raises(RunFailed, match=r"none of the first 2 responses has a score.*\['a', 'b'\] gave none"):
        estimated(rows)
    later = attrs.evolve(rows, versions=torch.tensor([0, 1]))
    assert not estimated(later)[0].response_mask.any()


# outcomes


def test_shaping_is_no_outcome_for_the_filter():
    """Wrong answers of different lengths are equals, and so are scores that differ by a rounding."""
    outcomes = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    rows = rows_of([-0.5, -0.1, 0.0, 0.7, -0.3, 0.0], n=3, outcomes=outcomes)
    assert equal_groups(rows).tolist() == [True] * 3 + [False] * 3
    assert equal_groups(rows, by="a").tolist() == [False] * 6  # a part that is named is compared as it is
    high = torch.tensor(100.0)
    near = rows_of([100.0, float(torch.nextafter(high, high + 1)), 100.0, 99.0], n=2)
    assert equal_groups(near).tolist() == [True, True, False, False]


def test_a_right_response_is_one_by_its_outcome():
    """VAPO's likelihood is of right responses: a penalty that takes all of the score off leaves them right."""
    model, params = tiny.model_and_params()
    base = tiny.experience(1, 4)
    shaped = attrs.evolve(base, scores=torch.tensor([-0.5, -1.0, 0.0, -0.1]), outcomes=torch.tensor([1.0, 0, 0, 0]))
    plain = attrs.evolve(base, scores=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    update = UpdateActor(
        forward=Forward(model),
        loss_fn=losses.ppo_clip,
        loop=Loop(mini_batch_size=4, micro_batching=MicroBatching(size=4)),
        optimizer=(optimizer := sgd(schedule("constant", 0.1))),
        terms=PolicyTerms(nll_coef=0.5),
    )
    reports = [metrics.report(update(init_state(params, optimizer), each)[1]) for each in (shaped, plain)]
    assert reports[0]["actor/nll_loss"] == reports[1]["actor/nll_loss"] > 0


# metrics


def test_rewards_are_those_of_the_rows_in_the_loss():
    """A dropped row is no reward of 0, and a rejected last token takes no reward with it."""
    rows = rows_of([1.0, 3.0, 5.0, 7.0], n=2, finish=Column(["length", "stop", "stop", "stop"]))
    last = {b: rows.response_mask[b].nonzero().flatten()[-1].item() for b in range(4)}
    rows = attrs.evolve(rows, response_mask=rows.response_mask.clone())
    rows.response_mask[1, :2] = True
    last[1] = rows.response_mask[1].nonzero().flatten()[-1].item()

    def reject(old, rollout, mask):
        kept = mask.clone()
        kept[1, last[1]] = False
        return losses.Correction(weights=None, mask=kept, metrics={})

    _, _, report = estimated(rows, "rloo", drop=[cut], correct=reject)
    numbers = metrics.report(report)
    found = [numbers[f"critic/rewards/{kind}"] for kind in ("mean", "min", "max")]
    assert found == pytest.approx([5.0, 3.0, 7.0])


def cut(rows):
    return torch.tensor([reason == "length" for reason in rows.finish])


def test_the_gap_to_the_engine_is_the_trainers_probability_over_the_engines():
    log_probs, engines = torch.tensor([[0.5, 0.125, 1.0]]).log(), torch.tensor([[0.25, 0.5, 0.1]]).log()
    numbers = metrics.report(rollout_gap(log_probs, engines, torch.tensor([[True, True, False]])))
    found = [numbers[f"training/rollout_{name}"] for name in ("ratio_mean", "ratio_max", "probs_diff_mean")]
    assert found == pytest.approx([(2.0 + 0.25) / 2, 2.0, (0.25 + 0.375) / 2])


def test_a_correction_gets_the_policys_log_probs_before_the_engines():
    rows = rows_of([1.0, 0.0], n=2)
    rows, seen = attrs.evolve(rows, rollout_log_probs=rows.old_log_probs - 1.0), []

    def correct(old, rollout, mask):
        seen.append((old, rollout))
        return losses.Correction(weights=None, mask=mask, metrics={})

    estimated(rows, "rloo", correct=correct)
    ((old, engines),) = seen
    assert torch.equal(old, rows.old_log_probs)
    assert torch.equal(engines, rows.rollout_log_probs)


def test_a_row_that_is_alone_in_its_group_from_the_start_stays():
    """As a prompt of one response beside others of several: nothing is missing, and there is no score to compare."""
    rows = rows_of([1.0, 0.0, 2.0], n=2)
    found, _, _ = estimated(rows)
    assert torch.equal(found.response_mask, rows.response_mask)
    assert found.advantages[:2].any()
    assert not found.advantages[2].any()
