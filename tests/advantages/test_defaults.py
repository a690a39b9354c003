"""Defaults of estimators: those of their slow definitions, and the papers' numbers where there is one."""

import inspect

import pytest

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
        "length_lam": {"alpha": 0.05},
        "opo": {"leave_one_out": False},
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
