"""Sizes and rates of steps, and who is asked by which key: the numbers that a run reports about itself."""

import math
import statistics
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Column, Prompts, Rollout, Scored, extend
from fppo.key import Key
from fppo.models import flops
from fppo.pipeline import measure, stages
from fppo.pipeline.evaluate import evaluate
from fppo.pipeline.measure import Measured, batch_metrics, token_metrics
from fppo.pipeline.pretrain import explained_variance
from fppo.pipeline.supervised import lengths_of
from fppo.rollout.engine import Sampling
from fppo.steps.outputs import Forward
from fppo.steps.supervised import demonstrations
from tests import tiny


def spread_of(numbers):
    return [statistics.fmean(numbers), max(numbers), min(numbers)]


@given(st.integers(0, 99), st.integers(1, 5))
def test_numbers_of_a_batch_are_those_of_a_loop(seed, rows):
    batch = tiny.experience(seed, rows)
    batch = attrs.evolve(batch, finish=Column(["length" if i % 2 else "stop" for i in range(rows)]))
    mask, width = batch.response_mask, batch.response_mask.shape[1]
    columns = ("token_rewards", "advantages", "returns", "values")
    filled = {name: getattr(batch, name).where(mask, 100.0) for name in columns[1:]}  # what is outside counts nowhere
    seen = attrs.evolve(batch, **filled)
    numbers = metrics.report({**batch_metrics(seen, max_tokens=9), **token_metrics(seen)})
    attended = batch.attention_mask.tolist()
    expected = {
        "response_length": [sum(row[-width:]) for row in attended],
        "prompt_length": [sum(row[:-width]) for row in attended],
    }
    if mask.any():
        expected["critic/rewards"] = [sum(r) for r, m in zip(batch.token_rewards.tolist(), mask.tolist()) if any(m)]
        expected |= {f"critic/{name}": getattr(batch, name)[mask].tolist() for name in columns[1:]}
    for name, values in expected.items():
        assert [numbers[f"{name}/{kind}"] for kind in ("mean", "max", "min")] == pytest.approx(spread_of(values))
    assert numbers["response_length/clip_ratio"] == pytest.approx((rows // 2) / rows)
    assert numbers["response_length/limit"] == 9
    assert numbers["perf/total_num_tokens"] == sum(map(sum, attended))
    if mask.any():
        errors, returns = (batch.returns - batch.values)[mask].tolist(), batch.returns[mask].tolist()
        left, every = (statistics.pvariance(x) * len(x) for x in (errors, returns))
        assert numbers["critic/vf_explained_var"] == pytest.approx(1 - left / (every + 1e-5))


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_repetition_and_groups_without_a_signal_are_those_of_a_loop(seed, rows, size, scored):
    """Of two tokens, so that three in a row come again; holes in the mask part them; nan is no score."""
    batch = tiny.experience(seed, rows, response=9)
    tokens, scores = batch.tokens % 2 + seed % 2 * (2**20), (batch.scores * 2).round()
    scores = scores.where((batch.row_ids != 0) | torch.tensor(scored), torch.nan)
    batch = attrs.evolve(batch, tokens=tokens, scores=scores, groups=batch.row_ids // size)
    numbers = metrics.report(batch_metrics(batch, max_tokens=9))
    again = runs = 0
    for row, mask in zip(tokens[:, -9:].tolist(), batch.response_mask.tolist()):
        seen = set()
        for t in range(7):
            if all(mask[t : t + 3]):
                again, runs = again + (tuple(row[t : t + 3]) in seen), runs + 1
                seen.add(tuple(row[t : t + 3]))
    assert numbers["rollout/repeated"] == (
        pytest.approx(again / runs) if runs else pytest.approx(math.nan, nan_ok=True)
    )
    groups: dict[int, list[float]] = {}
    for group, score in zip(batch.groups.tolist(), scores.tolist()):
        groups.setdefault(group, []).extend([] if math.isnan(score) else [score])
    several = [len({*each}) == 1 for each in groups.values() if len(each) > 1]
    assert numbers.get("rollout/groups/alike") == (pytest.approx(statistics.fmean(several)) if several else None)


def test_a_critic_that_knows_explains_all_and_a_constant_one_nothing():
    returns, mask = torch.tensor([[0.0, 3.0, 9.0], [1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]] * 2)
    for values, share in ((returns, 1.0), (torch.ones_like(returns), 0.0), (-returns, -3.0)):
        found = metrics.report({"share": explained_variance(values, returns, mask)})["share"]
        assert found == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize("peak", [None, 4e9])
def test_rates_are_the_work_of_all_epochs_by_the_seconds_of_the_update(peak, monkeypatch):
    """Of what is computed: the share of the work that rows do together is left out."""
    model, _ = tiny.model_and_params()
    batch, times = tiny.experience(0, 3), iter([10.0, 12.0])
    monkeypatch.setattr(measure, "now", lambda: next(times))
    monkeypatch.setattr(flops, "peak_flops", lambda device: peak)

    def update(state, batch, *, key, donate):
        return state + 1, {"perf/shared_flops/actor": metrics.mean(1.0, 4.0), "own": metrics.mean(7.0)}

    stage = Measured(stage=update, role="actor", forward=Forward(model), epochs=3)
    after, report = stage(1, batch, key=Key(0), donate=False)
    numbers, heads = metrics.report(report), int(batch.response_mask.sum())
    work = 3 * flops.train_flops(model, batch.attention_mask.sum(1).tolist(), head_tokens=heads) * 0.75
    assert (after, numbers["own"]) == (2, 7.0)
    assert numbers["perf/tflops/actor"] == pytest.approx(work / 2.0 / 1e12)
    share = numbers["perf/mfu/actor"]
    assert share != share if peak is None else share == pytest.approx(work / 2.0 / peak)


def test_lengths_of_demonstrations_are_those_of_their_rows():
    batch = demonstrations([[5], [6, 7, 8]], [[1, 2, 3], [4]], pad_token_id=0, imitated=[[True, False, True], [True]])
    numbers = metrics.report(lengths_of(batch))
    assert numbers == {
        "perf/total_num_tokens": 8.0,
        "row_length/mean": 4.0,
        "row_length/max": 4.0,
        "response_length/mean": 1.5,
    }


def test_numbers_of_environments_are_means_over_the_episodes_that_have_them():
    extras = [{"environment": {"won": 1.0, "steps": 3.0}}, {"environment": {"steps": 6.0}}, {}, {"environment": "text"}]
    rollout = attrs.evolve(batches.narrow(Rollout, tiny.experience(0, 4)), extras=Column(extras))
    numbers = metrics.report(stages.environment_metrics(rollout))
    assert numbers == {"environment/steps": 4.5, "environment/won": 1.0}


class Recording:
    """An engine that keeps what it was asked."""

    def __init__(self):
        self.asked = []

    def generate(self, params, ask):
        self.asked.append(ask)
        rows = batches.repeat(ask.prompts, ask.sampling.n)
        mask = torch.ones(len(rows.tokens), 1, dtype=torch.bool)
        zeros = torch.zeros(mask.shape)
        return extend(
            Rollout,
            rows,
            tokens=torch.cat([rows.tokens, mask.long()], 1),
            attention_mask=torch.cat([rows.attention_mask, mask], 1),
            response_mask=mask,
            rollout_log_probs=zeros,
            sampling_log_probs=zeros,
            groups=rows.row_ids,
            versions=torch.full((len(mask),), ask.version),
            finish=Column(["stop"] * len(mask)),
        )


def scored(rollout):
    return extend(Scored, rollout, scores=torch.ones(len(rollout.tokens)), named_scores={}), {}


def prompts(count):
    return batches.narrow(Prompts, attrs.evolve(tiny.experience(0, count), row_ids=torch.arange(count)))


def test_each_batch_of_an_evaluation_is_asked_of_the_policy_by_a_key_of_its_own():
    """By the same keys at every step, so that evaluations differ by the policy alone."""
    engine, sampling, asked = Recording(), Sampling(n=2), [prompts(2), prompts(1)]
    for step, version in ((0, 0), (7, 5)):
        run = SimpleNamespace(key=Key(3), step=step, actor=SimpleNamespace(params={}, step=version))
        evaluate(run, batches=asked, engine=engine, sampling=sampling, score=scored)
    assert [ask.key for ask in engine.asked] == [Key(3).fold("evaluate", number) for number in (0, 1)] * 2
    assert [ask.version for ask in engine.asked] == [0, 0, 5, 5]
    assert all(ask.sampling == sampling for ask in engine.asked)


def test_an_evaluation_reports_what_failed_and_what_is_measured_beside_the_scores():
    """Counts of all batches together; and all responses go on, in batches."""
    reports = iter([(1.0, 2.0), (4.0, 8.0)])

    def score(rollout):
        errors, timeouts = next(reports)
        rows, _ = scored(rollout)
        return rows, {"reward/errors": metrics.total(errors), "reward/timeouts": metrics.total(timeouts)}

    measured = [lambda rollout: {"own": metrics.total(float(len(rollout.row_ids)))}]
    run, kept = SimpleNamespace(key=Key(3), step=1, actor=SimpleNamespace(params={}, step=1)), []
    how = {"engine": Recording(), "sampling": Sampling(n=2), "score": score, "measure": measured}
    report = evaluate(run, batches=[prompts(2), prompts(1)], on_scored=kept.append, **how)
    numbers = metrics.report(report)
    found = {name: numbers.pop(f"val-aux/{name}") for name in ("errors", "timeouts", "own")}
    assert found == {"errors": 5.0, "timeouts": 10.0, "own": 6.0}
    assert "val-core/test/reward/mean@2" in numbers
    assert [[len(rows.row_ids) for rows in each] for each in kept] == [[4, 2]]


def test_greedy_baselines_are_asked_of_the_policy_that_made_the_rollout():
    engine, greedy = Recording(), Sampling(greedy=True)
    rollout = attrs.evolve(batches.narrow(Rollout, tiny.experience(0, 4)), versions=torch.full((4,), 6))
    stages.ScoreWithGreedy(score=scored, engine=engine, sampling=greedy)(rollout, params={}, prompts=prompts(2))
    ((ask,),) = (engine.asked,)
    assert (ask.version, ask.sampling) == (6, greedy)


def test_a_rollout_is_asked_by_the_key_the_version_and_the_newer_weights_that_are_given():
    engine = Recording()
    newer = lambda: None  # noqa: E731
    stages.RollOut(engine=engine, sampling=Sampling(n=2))(prompts(2), {}, key=Key(9), version=4, newer=newer)
    ((ask,),) = (engine.asked,)
    assert (ask.key, ask.version, ask.newer) == (Key(9), 4, newer)
