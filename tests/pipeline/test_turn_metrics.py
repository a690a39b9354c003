"""Numbers of turns, observations and failures against loops over the rows, and those of a rollout and of its age."""

import math
from itertools import groupby
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Column, Rollout, Scored, extend
from fppo.key import Key
from fppo.pipeline import stages
from fppo.pipeline.step import ppo_step
from fppo.rollout.engine import Sampling
from fppo.rollout.turns.engine import FAILURES
from tests import tiny
from tests.pipeline.test_step import BATCH, Stages, run_of


def rollout_of(seed: int, rows: int) -> Rollout:
    """Rows in which observations stand between turns, and a column of responses is not used at all."""
    g = torch.Generator().manual_seed(seed)
    whole = batches.narrow(Rollout, tiny.experience(seed, rows, response=9))
    seen = whole.attention_mask[:, -9:]
    chosen = seen & (torch.rand(seen.shape, generator=g) < 0.6)
    failed = torch.randint(0, 3, (rows,), generator=g).tolist()
    extras = Column({FAILURES: n} if n else {} for n in failed)
    return attrs.evolve(whole, response_mask=chosen, extras=extras)


@given(st.integers(0, 99), st.integers(1, 4), st.booleans())
def test_turns_observations_and_failures_are_counted_row_by_row(seed, rows, environment):
    rollout = rollout_of(seed, rows)
    seen, chosen = rollout.attention_mask[:, -9:].tolist(), rollout.response_mask.tolist()
    turns = [sum(key for key, _ in groupby(row)) for row in chosen]
    if environment:
        ids = torch.arange(9).expand(rows, 9) // 4
        ids = ids.where(rollout.response_mask, -1)
        rollout = attrs.evolve(rollout, turn_rewards=torch.zeros(rows, 9), turn_ids=ids)
        turns = [max(row) + 1 for row in ids.tolist()]
    observed = [sum(s and not c for s, c in zip(*both, strict=True)) for both in zip(seen, chosen, strict=True)]
    failures = "environment/failures" if environment else "rollout/tool_failures"
    assert metrics.report(stages.turn_metrics(rollout)) == pytest.approx(
        {
            "rollout/turns/mean": sum(turns) / rows,
            "rollout/turns/max": max(turns),
            "rollout/observation_tokens/mean": sum(observed) / rows,
            failures: sum(extra.get(FAILURES, 0) for extra in rollout.extras),
        }
    )


def test_the_kept_mass_is_what_sampling_left_of_the_policys_probability():
    """The policy's over the sampler's probability of each token, over the mask, beside what is measured."""
    rollout = rollout_of(5, 3)
    g = torch.Generator().manual_seed(0)
    shape = rollout.response_mask.shape
    kept = torch.rand(shape, generator=g, dtype=torch.float64) * 0.5 + 0.5
    sampled = -torch.rand(shape, generator=g, dtype=torch.float64)
    rollout = attrs.evolve(rollout, sampling_log_probs=sampled, rollout_log_probs=sampled + kept.log())
    asked = []

    class Engine:
        def generate(self, params, ask):
            asked.append(ask)
            return rollout

    measure = [lambda rows: {"own/a": metrics.total(2.0)}, lambda rows: {"own/a": metrics.total(3.0)}]
    stage = stages.RollOut(engine=Engine(), sampling=Sampling(max_tokens=9, n=2), measure=measure)
    prompts = SimpleNamespace()
    newer = object()
    found, report = stage(prompts, {}, key=Key(3), version=7, newer=newer)
    assert found.tokens is rollout.tokens
    mask = rollout.response_mask
    assert report["rollout/kept_mass"].count == mask.sum()
    assert metrics.report(report) == {"rollout/kept_mass": pytest.approx(kept[mask].mean().item()), "own/a": 5.0}
    (ask,) = asked
    assert (ask.prompts, ask.sampling, ask.key, ask.version, ask.newer) == (prompts, stage.sampling, Key(3), 7, newer)


def test_drafts_are_counted_and_left_behind():
    rollout = rollout_of(5, 3)
    passes = rollout.response_mask.sum() - 4
    rollout = attrs.evolve(rollout, drafts=torch.tensor([[6, 3], [0, 0], [4, 1]]))
    engine = SimpleNamespace(generate=lambda params, ask: rollout)
    found, report = stages.RollOut(engine=engine, sampling=Sampling())(SimpleNamespace(), {}, key=Key(3), version=7)
    assert found.drafts is None
    numbers = metrics.report(report)
    assert numbers["rollout/drafts/tokens"] == pytest.approx(10 / 3)
    assert numbers["rollout/drafts/accepted"] == pytest.approx(0.4)
    assert numbers["rollout/drafts/tokens_per_pass"] == pytest.approx(int(passes + 4) / int(passes))


def ages_of(scored: Scored) -> dict[str, float]:
    """The ages that a step reports of these rows, by a policy after 7 updates."""
    batch = {"sample": lambda run, **_: (scored, run.cursor, {}), "annotate": lambda scored, run: (BATCH, {})}
    report = metrics.report(ppo_step(run_of(), program=Stages().program(**batch), draw=None)[2])
    return {name: x for name, x in report.items() if name.startswith("rollout/")}


@given(st.integers(0, 99))
def test_ages_are_the_updates_since_rows_or_their_tokens_were_sampled(seed):
    g = torch.Generator().manual_seed(seed)
    rows = batches.narrow(Rollout, tiny.experience(seed, 4))
    scored = extend(Scored, rows, scores=torch.zeros(4), named_scores={})
    scored = attrs.evolve(scored, versions=torch.randint(0, 6, (4,), generator=g))
    mask = scored.response_mask
    lags = [7 - x for x in scored.versions.tolist()]
    assert ages_of(scored) == {"rollout/lag": sum(lags) / 4, "rollout/lag/max": max(lags)}
    of_tokens = torch.randint(0, 6, mask.shape, generator=g)
    seen = attrs.evolve(scored, token_versions=of_tokens.where(mask, -100))
    ages = [7 - x for x in of_tokens[mask].tolist()]
    if not ages:
        return
    expected = {f"rollout/lag/tokens/{age}": float(ages.count(age)) for age in range(max(ages) + 1)}
    expected |= {"rollout/lag": pytest.approx(sum(ages) / len(ages)), "rollout/lag/max": max(ages)}
    expected["rollout/oldest_version"] = min(of_tokens[mask].tolist())
    found = ages_of(seen)
    assert found == expected
    assert math.isclose(sum(number for name, number in found.items() if "tokens/" in name), len(ages))
