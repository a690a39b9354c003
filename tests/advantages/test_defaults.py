"""Defaults of estimators: those of their slow definitions, and the papers' numbers where there is one."""

import inspect

import pytest
import torch

from fppo import advantages
from fppo.laws.references import advantages as references

DEFINED = [name for name in advantages.__all__ if inspect.isfunction(getattr(references, name, None))]


def defaults_of(fn):
    return {k: p.default for k, p in inspect.signature(fn).parameters.items() if p.default is not p.empty}


@pytest.mark.parametrize("name", DEFINED)
def test_a_default_is_the_one_that_the_slow_definition_has(name):
    own, expected = (defaults_of(getattr(of, name)) for of in (advantages, references))
    assert {option: own[option] for option in expected} == expected


def test_defaults_are_those_that_are_documented():
    names = [*DEFINED, "length_lam", "exact_values", "game_values"]
    found = {name: defaults_of(getattr(advantages, name)) for name in names}
    found["gae"].pop("kernel")
    assert {name: own for name, own in found.items() if own} == {
        "discounted_returns": {"gamma": 1.0},
        "exact_values": {"gamma": 1.0},
        "gae": {"gamma": 1.0, "lam": 1.0, "critic_lam": None, "lam_alpha": None},
        "game_values": {"gamma": 1.0},
        "gdpo": {"weights": None, "scale": "std"},
        "gpg": {"outcomes": None},
        "grpo": {"scale": "std"},
        "grpo_passk": {"scale": "std"},
        "grpo_process": {"scale": "std"},
        "length_lam": {"alpha": 0.05},
        "opo": {"leave_one_out": False},
        "pkpo": {"k": 2},
        "qae": {"quantile": 0.4},
        "optimal_token_baseline": {"correction": None, "leave_one_out": False},
        "reinforce_plus_plus": {"gamma": 1.0},
        "reverse_kl": {
            "scores": None,
            "groups": None,
            "gamma": 0.0,
            "coef": 1.0,
            "limit": None,
            "score_coef": 0.0,
        },
        "td": {"gamma": 1.0},
        "token_rewards": {"turns": None, "kl": None, "kl_coef": 0.0},
        "turn_gae": {"turn_ids": None, "gamma": 1.0, "lam": 1.0},
        "vtrace": {"gamma": 1.0, "lam": 1.0, "cut": 1.0},
        "whiten": {"shift_mean": True},
    }


TOKENS = ("rewards", "values", "log_probs", "teacher_log_probs", "sum_squared_probs", "correction")
TOKENS = (*TOKENS, "correction_weights", "turns", "kl", "x", "step_rewards")
COLUMNS = {
    **{name: torch.zeros(2, 3) for name in TOKENS},
    **{name: torch.zeros(2) for name in ("scores", "baselines", "outcomes")},
    "groups": torch.zeros(2, dtype=torch.int64),
    "turn_ids": torch.zeros(2, 3, dtype=torch.int64),
}
MORE = {"td": {"steps": 2}, "token_rewards": {"kl_coef": 0.5}, "reverse_kl": {"score_coef": 0.5}}


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    "name",
    [
        *("grpo", "maxrl", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        *("lite_ppo", "pkpo", "qae"),
        *("remax", "gae", "turn_gae", "turn_returns", "td", "vtrace", "optimal_token_baseline", "reverse_kl"),
        *("grpo_process", "mean_reverse_kl", "discounted_returns", "token_rewards", "whiten"),
    ],
)
def test_a_column_that_would_be_spread_or_is_of_another_kind_is_named(name):
    fn = getattr(advantages, name)
    given = {column: COLUMNS[column] for column in inspect.signature(fn).parameters if column in COLUMNS}
    given |= {"mask": torch.ones(2, 3, dtype=torch.bool), **MORE.get(name, {})}
    fn(**given)
    for column in given.keys() & COLUMNS.keys():
        x = COLUMNS[column]
        other = x.long() if x.is_floating_point() else x.double()
        shapes = (x[:, :1], x[0], x[:1]) if x.dim() == 2 else (x[:1], x[:, None])
        for wrong in (*shapes, *(() if (name, column) == ("reverse_kl", "scores") else (other,))):
            with pytest.raises(ValueError, match=rf"^{column} (must be|are) "):
                fn(**{**given, column: wrong})
    with pytest.raises(ValueError, match=r"^mask must be bool"):
        fn(**{**given, "mask": torch.ones(2, 3)})
