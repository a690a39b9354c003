"""Rows of the tables of bias, by the steps and worlds that they are measured on: each written out by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest

from fppo import advantages, losses
from fppo.laws.worlds import world
from fppo.studies.bias import study
from fppo.studies.bias.study import Typical, WorldSizes

SIZES = WorldSizes(vocabulary=2, horizon=2, worlds=3, groups=(2, 3))


def described(fn):
    """The name of a function, with the keywords that it is bound to."""
    if fn is None:
        return None
    return (fn.func.__name__, dict(fn.keywords)) if isinstance(fn, partial) else (fn.__name__, {})


def step_of(step):
    """A step in words, without what is as usual."""
    kl = None if step.kl is None else (step.kl.kind, step.kl.coef, step.kl.where, step.kl.of)
    whole = {"estimator": described(step.estimator), "loss_fn": described(step.loss_fn), "mode": step.mode, "n": step.n}
    whole |= {"kl": kl, "correct": described(step.correct), "old": step.old_log_probs, "whiten": step.whiten}
    usual = {"loss_fn": ("ppo_clip", {}), "mode": "seq-mean-token-sum", "n": 2, "kl": None, "correct": None}
    usual |= {"old": "pass", "whiten": False}
    return {name: x for name, x in whole.items() if x != usual.get(name)}


def made(*, scores=True, **how):
    """Worlds in words."""
    return [(world(vocabulary=2, horizon=2, binary=True, seed=seed, **how).made, scores) for seed in range(3)]


def worlds_of(worlds):
    return [(x.made, bool(x.scores.any())) for x in worlds]


@pytest.fixture
def noted(monkeypatch):
    """What each number was measured of: the turned of number i is i, its size 0.5 more, its noise 0.75 more."""
    kept = []

    def typical(step, worlds):
        kept.append((step_of(step), worlds_of(worlds)))
        number = len(kept) - 1
        return Typical(turned=float(number), scale=number + 0.5, noise=number + 0.75)

    monkeypatch.setattr(study, "typical", typical)
    return kept


def check(table, noted, expected, *, heads, parts):
    """Each row has, in turn, the parts of what was measured of each of its steps and worlds."""
    assert table.heads == tuple(heads)
    assert [label for label, _ in table.rows] == [*expected]
    for label, cells in table.rows:
        wanted = expected[label]
        assert len(cells) == len(wanted) * len(parts)
        for place, (step, worlds) in enumerate(wanted):
            own = cells[place * len(parts) : (place + 1) * len(parts)]
            number = math.floor(own[0])
            assert noted[number] == (step, worlds), label
            assert list(own) == [number + part for part in parts]


ESTIMATORS = {
    "no baseline": ("reinforce", {}),
    "rloo": ("rloo", {}),
    "grpo": ("grpo", {}),
    "grpo, scale none": ("grpo", {"scale": "none"}),
    "maxrl": ("maxrl", {}),
    "opo": ("opo", {}),
    "opo, leave_one_out": ("opo", {"leave_one_out": True}),
    "optimal_token_baseline": ("optimal_token_baseline", {}),
    "optimal_token_baseline, leave_one_out": ("optimal_token_baseline", {"leave_one_out": True}),
    "gpg": ("gpg", {}),
    "grpo_passk": ("grpo_passk", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "remax": ("remax", {}),
    "gae, exact values": ("gae", {}),
    "gae, exact values, lam 0": ("gae", {"lam": 0.0}),
    "gae, lam_alpha 0.6": ("gae", {"lam_alpha": 0.6}),
}
ALL, TURNED, SIZE, NOISE = (0.0, 0.5, 0.75), 0.0, 0.5, 0.75


def mine(scores, mask, groups):
    return advantages.rloo(scores, mask, groups)


def test_estimators_are_measured_in_groups_of_every_size(noted):
    every = {**ESTIMATORS, "own": ("mine", {})}
    expected = {
        name: [({"estimator": fn, **({} if n == 2 else {"n": n})}, made()) for n in (2, 3)]
        for name, fn in every.items()
    }
    heads = [f"{head}, n {n}" for n in (2, 3) for head in ("turned", "size", "noise")]
    check(study.estimators(SIZES, {"own": mine}), noted, expected, heads=heads, parts=ALL)


def test_weight_modes_are_measured_over_two_prompts(noted):
    names = {name: ESTIMATORS[name] for name in ("no baseline", "rloo", "grpo", "gae, exact values")}
    usual = "seq-mean-token-sum"
    expected = {
        f"{name}, {mode}": [({"estimator": fn, **({} if mode == usual else {"mode": mode})}, made(prompts=2))]
        for name, fn in {**names, "own": ("mine", {})}.items()
        for mode in losses.MODES
    }
    table = study.modes(SIZES, {"own": mine})
    check(table, noted, expected, heads=("turned", "size", "noise"), parts=ALL)


def test_kl_kinds_are_measured_without_scores_and_those_that_runs_refuse_say_so(monkeypatch):
    kept = []

    def step_bias(step, own):
        kept.append((step_of(step), worlds_of([own])[0]))
        return len(kept) - 1

    def nearest(each, worlds, coef):
        assert coef == 1.0
        assert worlds_of(worlds) == [kept[number][1] for number in each]
        assert len({str(kept[number][0]) for number in each}) == 1
        number = each[0]
        still = kept[number][0].get("kl") == ("k1", 1.0, "loss", "sequence")
        return f"of {number}", Typical(turned=float(number), scale=2.0, noise=math.inf if still else 3.0)

    monkeypatch.setattr(study, "step_bias", step_bias)
    monkeypatch.setattr(study, "nearest", nearest)
    table = study.kinds(SIZES, {})
    assert table.heads == ("gradient of", "turned", "size", "noise", "in runs")
    expected = {}
    for kind in losses.KL_KINDS:
        step = {"estimator": ("reinforce", {}), "kl": (kind, 1.0, "reward", "sequence")}
        expected[f"{kind} in the reward"] = step, kind not in losses.REWARD_KINDS
    step = {"estimator": ("rloo", {}), "kl": ("k1", 1.0, "reward", "sequence")}
    expected["k1 in the reward, rloo"] = step, False
    for kind in losses.KL_KINDS:
        step = {"estimator": ("reinforce", {}), "kl": (kind, 1.0, "loss", "sequence")}
        expected[f"{kind} in the loss"] = step, kind == "k1"
    for gamma in (0.0, 0.5, 1.0):
        step = {"estimator": ("reverse_kl", {"gamma": gamma, "coef": 1.0})}
        expected[f"reverse_kl, gamma {gamma:g}"] = step, False
    assert [label for label, _ in table.rows] == [*expected]
    for label, (of, *cells, refused) in table.rows:
        number = int(of.removeprefix("of "))
        assert kept[number][0] == expected[label][0]
        assert [kept[number + i][1] for i in range(3)] == made(scores=False)
        still = label == "k1 in the loss"
        assert cells == (["no gradient", 0.0, ""] if still else [float(number), 2.0, 3.0])
        assert refused == ("refused" if expected[label][1] else "")


def test_losses_are_measured_by_the_lag_of_the_engine(noted):
    def other(log_probs, old_log_probs, advantages, mask):
        return losses.gpg(log_probs, old_log_probs, advantages, mask)

    expected = {}
    for name in (*losses.POLICY_LOSSES, "other"):
        step = {"estimator": ("rloo", {}), "old": "engine"} | ({} if name == "ppo_clip" else {"loss_fn": (name, {})})
        expected[name] = [(step, made(lag=lag)) for lag in (0.0, 0.1, 0.5)]
    heads = [f"{head}, lag {lag}" for lag in ("0", "0.1", "0.5") for head in ("turned", "size")]
    check(study.policy_losses(SIZES, {"other": other}), noted, expected, heads=heads, parts=(TURNED, SIZE))
    noted.clear()
    (table,) = study.study(["losses"], SIZES, {"": other, "b": mine})
    assert [label for label, _ in table.rows][-2:] == ["vespo", "other"]
    (table,) = study.study(["estimators"], SIZES, {"": other, "b": mine})
    assert [label for label, _ in table.rows][-2:] == ["gae, lam_alpha 0.6", "b"]
    assert (study.is_loss(other), study.is_loss(mine)) == (True, False)


def test_corrections_are_measured_by_the_lag_of_the_engine(noted):
    how = {
        "none": None,
        "token": {"level": "token", "threshold": (1e-6, 1e6)},
        "token, at most 2": {"level": "token", "threshold": 2.0},
        "token, 0.5 to 2": {"level": "token", "threshold": (0.5, 2.0)},
        "sequence": {"level": "sequence", "threshold": (1e-6, 1e6)},
        "sequence, at most 2": {"level": "sequence", "threshold": 2.0},
    }
    expected = {}
    for label, keywords in how.items():
        own = {} if keywords is None else {"correct": ("rollout_correction", keywords)}
        for name, fn in (("no baseline", "reinforce"), ("rloo", "rloo")):
            step = {"estimator": (fn, {}), **own}
            expected[f"{label}, {name}"] = [(step, made(lag=lag)) for lag in (0.1, 0.5)]
    heads = [f"{head}, lag {lag}" for lag in (0.1, 0.5) for head in ("turned", "size", "noise")]
    check(study.corrections(SIZES, {}), noted, expected, heads=heads, parts=ALL)


def test_critics_are_measured_by_their_errors_and_the_decay(noted):
    errors = (0.0, 0.1, 0.3, 1.0)
    expected = {
        f"lam {lam:g}": [({"estimator": ("gae", {"lam": lam})}, made(critic_error=error)) for error in errors]
        for lam in (0.0, 0.5, 0.9, 0.95, 1.0)
    }
    heads = [f"{head}, error {error:g}" for error in errors for head in ("turned", "noise")]
    check(study.critics(SIZES, {}), noted, expected, heads=heads, parts=(TURNED, NOISE))


def test_values_are_compared_with_the_mean_return(monkeypatch):
    heads = {
        "mse": losses.mse_head(),
        "mse, clip none": losses.mse_head(clip=None),
        "huber": losses.huber_head(),
        "huber, delta 0.1": losses.huber_head(delta=0.1),
        "hl_gauss": losses.hl_gauss_head(),
        "two_hot": losses.two_hot_head(),
        "quantile": losses.quantile_head(),
        "quantile, delta 0.1": losses.quantile_head(delta=0.1),
    }
    assert [*study.HEADS] == [*heads]
    for name, head in study.HEADS.items():
        own = heads[name]
        assert (head.outputs, described(head.read)) == (own.outputs, described(own.read))
        assert described(head.loss_fn) == described(own.loss_fn)
    means = {"1 with 0.05": 0.05, "1 with 0.3": 0.3, "1 with 0.9": 0.9, "0, 0.1, 1": 0.14}
    monkeypatch.setattr(study, "fixed_point", lambda head, returns, chances: max(returns) + len(chances))
    table = study.values(SIZES, {})
    assert table.heads == (*means,)
    wanted = [1.0 + (3 if name == "0, 0.1, 1" else 2) - mean for name, mean in means.items()]
    assert [*table.rows] == [(name, tuple(pytest.approx(x) for x in wanted)) for name in heads]


@pytest.mark.usefixtures("noted")
def test_a_table_is_called_what_it_is_asked_for_by(monkeypatch):
    monkeypatch.setattr(study, "step_bias", lambda step, own: None)
    found = "none", Typical(turned=0.0, scale=1.0, noise=1.0)
    monkeypatch.setattr(study, "nearest", lambda each, worlds, coef: found)
    monkeypatch.setattr(study, "fixed_point", lambda head, returns, chances: 0.0)
    assert [table.name for table in study.study([*study.TABLES], SIZES, {})] == [*study.TABLES]
