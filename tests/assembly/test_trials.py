"""What the functions of parts say of values that settings give them, before any work."""

import pytest

from fppo.assembly.trials import value_problems
from fppo.settings import checks, component, files
from fppo.settings.train import TrainSettings


def _settings(changes):
    return files.replace(TrainSettings(), changes)


WRONG = [
    ({"actor.loss.dual_clip": 0.5}, "actor.loss = ppo_clip(dual_clip=0.5): dual_clip must be > 1"),
    ({"actor.loss.clip_low": 0.0}, "clip_low must be > 0, got 0.0"),
    ({"actor.loss": "sapo", "actor.loss.tau_neg": -1}, "actor.loss = sapo(tau_neg=-1): tau_neg must be > 0"),
    ({"actor.loss": "clip_cov", "actor.loss.low": 5.0, "actor.loss.high": 1.0}, "low must be less than high"),
    ({"actor.loss": "clip_cov", "actor.loss.ratio": 1.5}, "ratio must be at most 1, got 1.5"),
    ({"actor.loss": "kl_cov", "actor.loss.ratio": 0.0}, "ratio must be > 0"),
    ({"actor.loss": "dro", "actor.loss.beta": 0}, "actor.loss = dro(beta=0): beta must be > 0"),
    ({"algorithm.advantage.lam": 1.5}, "algorithm.advantage = gae(lam=1.5): lam must be between 0 and 1"),
    ({"algorithm.advantage.lam": 0.9, "algorithm.advantage.lam_alpha": 0.1}, "lam_alpha replaces lam; give one"),
    ({"algorithm.advantage": "td", "algorithm.advantage.steps": 0}, "steps must be 1 or more, got 0"),
    ({"algorithm.advantage": "grpo", "algorithm.advantage.scale": "sdt"}, "unknown scale 'sdt'; did you mean 'std'?"),
    ({"algorithm.advantage": "vtrace", "algorithm.advantage.cut": 0.0}, "cut must be > 0"),
    ({"critic.loss.clip": -1}, "critic.loss = mse(clip=-1): clip must be > 0"),
    ({"critic.loss": "hl_gauss", "critic.loss.low": 2.0}, "low=2.0, high=1.1: low must be less than high"),
    ({"critic.loss": "quantile", "critic.loss.bins": 1}, "bins must be 2 or more, got 1"),
    ({"critic.loss": "huber", "critic.loss.delta": 0.0}, "delta must be > 0"),
    ({"actor.optimizer.betas": [0.9, 1.0]}, "betas must be 0 or more, and less than 1, got (0.9, 1.0)"),
    ({"critic.optimizer.eps": 0.0}, "critic.optimizer = adamw(eps=0.0): eps must be > 0"),
    ({"sft.optimizer.eps": 0.0}, "sft.optimizer = adamw(eps=0.0): eps must be > 0"),
    ({"actor.optimizer.max_grad_norm": 0}, "max_grad_norm must be > 0, or None for no clipping"),
    ({"actor.optimizer": "muon", "actor.optimizer.momentum": 1.0}, "momentum must be 0 or more, and less than 1"),
    ({"actor.optimizer": "sgd", "actor.optimizer.weight_decay": -0.1}, "weight_decay must be 0 or more"),
    ({"actor.optimizer": "lion", "actor.optimizer.betas": [1.0, 0.9]}, "betas must be 0 or more, and less than 1"),
    *(
        ({"algorithm.correction": "rollout", f"algorithm.correction.{name}": value}, text)
        for name, value, text in [
            ("level", "tokens", "unknown level 'tokens'; did you mean 'token'"),
            ("threshold", [3.0, 2.0], "two of them, low first"),
            ("reject", "seq_max_k3", "reject='seq_max_k3' with reject_threshold=None: give both or neither"),
        ]
    ),
    (
        {
            "algorithm.correction": "rollout",
            "algorithm.correction.reject": "token_k1",
            "algorithm.correction.reject_threshold": 0.5,
        },
        "a single bound must be >= 1 and finite",
    ),
    (
        {"actor.loss.name": "fppo.losses:ppo_clip", "actor.loss.radus": 1},
        "actor.loss.radus = 1: fppo.losses:ppo_clip has",
    ),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_function_says_itself_what_is_wrong_with_its_keywords(changes, text):
    settings = _settings(changes)
    line = str(*value_problems(component.parts(settings), checks.problems(settings)))
    assert text in line
    last = list(changes)[-1]
    assert line.startswith((last, f"{last.rpartition('.')[0]} = "))


def test_all_are_said_at_once_and_none_twice():
    changes = {
        "actor.loss.dual_clip": 0.5,
        "actor.optimizer.eps": 0.0,
        "critic.loss.clp": 1,
        "critic.optimizer.eps": "a",
    }
    settings = _settings(changes)
    known = checks.problems(settings)
    assert [problem.path.split(" = ")[0] for problem in value_problems(component.parts(settings), known)] == [
        "actor.loss",
        "actor.optimizer",
    ]
    assert {"critic.loss.clp", "critic.optimizer.eps"} <= {problem.path for problem in known}


def test_values_that_are_right_pass():
    changes = {
        "actor.loss": "clip_cov",
        "actor.loss.low": 0.5,
        "actor.optimizer.max_grad_norm": "none",
        "algorithm.advantage.critic_lam": 1,
        "algorithm.correction": "rollout",
        "algorithm.correction.level": "none",
        "algorithm.correction.reject": "token_k1,seq_max_k3",
        "algorithm.correction.reject_threshold": "0.5_2.0,1.0",
        "critic.loss": "two_hot",
        "critic.loss.bins": 2,
    }
    settings = _settings(changes)
    assert value_problems(component.parts(settings), checks.problems(settings)) == []
