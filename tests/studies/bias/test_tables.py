"""Rows of the tables of bias, of which some are measured again by the steps and worlds that are written out here."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch

from fppo import advantages, losses
from fppo.laws.expectation import KL, StepMath, step_bias
from fppo.studies.bias import study
from fppo.studies.bias.study import Typical, WorldSizes, reinforce, typical

SIZES = WorldSizes(vocabulary=2, horizon=2, worlds=1, groups=(2, 3))


def cells(step, *, scores=True, **how):
    """Direction error, size and noise of a step in the worlds of a table."""
    worlds = [SIZES.world(seed, **how) for seed in range(SIZES.worlds)]
    worlds = worlds if scores else [attrs.evolve(x, scores=torch.zeros_like(x.scores)) for x in worlds]
    found = typical(step, worlds)
    return found.turned, found.scale, found.noise


def checked(table, heads, expected):
    """The rows by label, after those of `expected` were compared with it."""
    assert table.heads == tuple(heads)
    rows = dict(table.rows)
    for label, numbers in expected.items():
        assert rows[label] == pytest.approx(tuple(numbers), abs=1e-12), label
    return rows


def mine(scores, mask, groups):
    return 2.0 * advantages.rloo(scores, mask, groups).advantages


def other(log_probs, old_log_probs, advantages, mask):
    return losses.gpg(log_probs, old_log_probs, advantages, mask)


@pytest.mark.slow
def test_estimators_are_measured_in_groups_of_every_size():
    heads = [f"{head}, n {n}" for n in (2, 3) for head in ("turned", "size", "noise")]
    chosen = {"rloo": advantages.rloo, "grpo, scale none": partial(advantages.grpo, scale="none"), "own": mine}
    expected = {name: [x for n in (2, 3) for x in cells(StepMath(estimator=fn, n=n))] for name, fn in chosen.items()}
    rows = checked(study.estimators(SIZES, {"own": mine}), heads, expected)
    assert [*rows] == [*study.ESTIMATORS, "own"]
    assert rows["own"][1] == pytest.approx(2 * rows["rloo"][1])


@pytest.mark.slow
def test_weight_modes_are_measured_over_two_prompts():
    chosen = {"no baseline": reinforce, "own": mine}
    expected = {
        f"{name}, {mode}": cells(StepMath(estimator=fn, mode=mode), prompts=2)
        for name, fn in chosen.items()
        for mode in ("token-mean", "seq-mean-token-sum-norm")
    }
    rows = checked(study.modes(SIZES, {"own": mine}), ("turned", "size", "noise"), expected)
    names = ("no baseline", "rloo", "grpo", "gae, exact values", "own")
    assert [*rows] == [f"{name}, {mode}" for name in names for mode in losses.MODES]


@pytest.mark.slow
def test_kl_kinds_are_measured_without_scores_and_those_that_runs_refuse_say_so():
    table = study.kinds(SIZES, {})
    assert table.heads == ("gradient of", "turned", "size", "noise", "in runs")
    rows = dict(table.rows)
    assert [*rows] == [
        *(f"{kind} in the reward" for kind in losses.KL_KINDS),
        *("k1 in the reward, rloo", *(f"{kind} in the loss" for kind in losses.KL_KINDS)),
        *(f"reverse_kl, gamma {gamma:g}" for gamma in (0.0, 0.5, 1.0)),
    ]
    refused = {f"{kind} in the reward" for kind in losses.KL_KINDS if kind not in losses.REWARD_KINDS}
    assert {label for label, row in rows.items() if row[-1] == "refused"} == refused | {"k1 in the loss"}
    assert rows["k1 in the loss"] == ("none", "no gradient", 0.0, "", "refused")
    assert [rows[f"{kind} in the loss"][0] for kind in ("k2", "k3")] == ["token", "reverse"]
    assert [rows[f"reverse_kl, gamma {gamma}"][0] for gamma in (0, 1)] == ["token", "sequence"]
    for label, fn in (("k1 in the reward", reinforce), ("k1 in the reward, rloo", advantages.rloo)):
        of, turned, size, noise, _ = rows[label]
        _, scale, deviation = cells(StepMath(estimator=fn, kl=KL("k1", 1.0)), scores=False)
        assert (of, turned < study.EXACT, size) == ("sequence", True, pytest.approx(1.0))
        assert noise > 0 < deviation * scale


@pytest.mark.slow
def test_losses_are_measured_by_the_lag_of_the_engine():
    heads = [f"{head}, lag {lag}" for lag in ("0", "0.1", "0.5") for head in ("turned", "size")]
    chosen = {"ppo_clip": losses.ppo_clip, "gspo": losses.gspo, "other": other}
    steps = {n: StepMath(estimator=advantages.rloo, loss_fn=fn, old_log_probs="engine") for n, fn in chosen.items()}
    expected = {name: [x for lag in (0.0, 0.1, 0.5) for x in cells(step, lag=lag)[:2]] for name, step in steps.items()}
    rows = checked(study.policy_losses(SIZES, {"other": other}), heads, expected)
    assert [*rows] == [*losses.POLICY_LOSSES, "other"]


@pytest.mark.slow
def test_own_functions_are_in_the_tables_that_they_belong_to():
    small = WorldSizes(vocabulary=2, horizon=1, worlds=1, groups=(2,))
    tables = study.study(["losses", "estimators", "modes"], small, {"": other, "b": mine})
    losses_, estimators, modes = ([label for label, _ in table.rows] for table in tables)
    assert losses_[-2:] == ["topr", "other"]
    assert estimators[-2:] == ["gae, lam_alpha 0.6", "b"]
    assert modes[-1].startswith("b, ")
    assert (study.is_loss(other), study.is_loss(mine)) == (True, False)


@pytest.mark.slow
def test_corrections_are_measured_by_the_lag_of_the_engine():
    heads = [f"{head}, lag {lag}" for lag in (0.1, 0.5) for head in ("turned", "size", "noise")]
    correct = losses.rollout_correction
    chosen = {
        "none, rloo": (advantages.rloo, None),
        "token, no baseline": (reinforce, partial(correct, level="token", threshold=(1e-6, 1e6))),
        "token, 0.5 to 2, rloo": (advantages.rloo, partial(correct, level="token", threshold=(0.5, 2.0))),
        "sequence, at most 2, rloo": (advantages.rloo, partial(correct, level="sequence", threshold=2.0)),
    }
    expected = {
        label: [x for lag in (0.1, 0.5) for x in cells(StepMath(estimator=fn, correct=by), lag=lag)]
        for label, (fn, by) in chosen.items()
    }
    kinds = ("none", "token", "token, at most 2", "token, 0.5 to 2", "sequence", "sequence, at most 2")
    rows = checked(study.corrections(SIZES, {}), heads, expected)
    assert [*rows] == [f"{kind}, {name}" for kind in kinds for name in ("no baseline", "rloo")]


@pytest.mark.slow
def test_critics_are_measured_by_their_errors_and_the_decay():
    errors = (0.0, 0.1, 0.3, 1.0)
    heads = [f"{head}, error {error:g}" for error in errors for head in ("turned", "noise")]
    steps = {f"lam {lam:g}": StepMath(estimator=partial(advantages.gae, lam=lam)) for lam in (0.0, 0.95)}
    expected = {
        label: [x for error in errors for x in cells(step, critic_error=error)[::2]] for label, step in steps.items()
    }
    rows = checked(study.critics(SIZES, {}), heads, expected)
    assert [*rows] == [f"lam {lam:g}" for lam in (0.0, 0.5, 0.9, 0.95, 1.0)]


def test_values_are_compared_with_the_mean_return(monkeypatch):
    """Where each settles is taken as known, since to find it takes long."""
    monkeypatch.setattr(study, "fixed_point", lambda head, returns, chances: max(returns) + len(chances))
    means = {"1 with 0.05": 0.05, "1 with 0.3": 0.3, "1 with 0.9": 0.9, "0, 0.1, 1": 0.14}
    (table,) = study.study(["values"], SIZES, {})
    assert (table.name, table.heads) == ("values", (*means,))
    wanted = [1.0 + (3 if name == "0, 0.1, 1" else 2) - mean for name, mean in means.items()]
    assert [*table.rows] == [(name, pytest.approx(tuple(wanted))) for name in study.HEADS]


def test_a_gradient_is_still_where_all_of_it_is_noise():
    worlds = [SIZES.world(seed) for seed in range(2)]
    found = typical(StepMath(estimator=advantages.rloo, kl=KL("k1", 1.0, where="loss")), worlds)
    assert not found.still
    assert not Typical(turned=0.0, scale=0.0, noise=3.0).still
    still = step_bias(StepMath(estimator=lambda scores, mask, groups: torch.zeros(mask.shape)), worlds[0])
    assert study.medians([still]).still
