"""Settings that change nothing: said where it is so, and there alone."""

from __future__ import annotations

import textwrap

import pytest
import torch

from fppo import losses
from fppo.assembly.idle import idle_lines
from fppo.settings import files
from fppo.settings.train import TrainSettings

ONCE = {"actor.mini_batch_size": 64, "model.compute_dtype": "float32"}
CRITIC_ONCE = {"critic.mini_batch_size": 64}
OF_RATIO = "one update a step: the ratio is 1; "


def said(*changes):
    every = {name: value for each in changes for name, value in each.items()}
    return idle_lines(files.replace(TrainSettings(), every))


@pytest.mark.parametrize(
    ("loss", "idle"),
    [
        ("ppo_clip", ["clip_low", "clip_high", "dual_clip"]),
        ("gspo", ["clip_low", "clip_high"]),
        ("sapo", []),  # its gate at a ratio of 1 has the slope of the temperature
        ("gpg", []),
        ("cispo", ["clip_low", "clip_high"]),
        ("gmpo", ["clip_low", "clip_high"]),
        ("clip_cov", ["clip_low", "clip_high"]),  # its choice by covariances has an effect
        ("kl_cov", []),  # its KL has a gradient of the rounding's sign
        ("dppo_tv", ["clip_low", "clip_high", "max_ratio"]),
        ("dppo_kl", ["clip_low", "clip_high", "max_ratio"]),
        ("dro", ["beta"]),
        ("opsm", ["clip_low", "clip_high", "max_kl"]),
        ("topr", ["low"]),
    ],
)
def test_what_shapes_the_ratio_changes_nothing_where_a_step_has_one_update(loss, idle):
    given = {"actor.loss": loss}
    words = "changes" if len(idle) == 1 else "change"
    text = f"{OF_RATIO}{', '.join(f'actor.loss.{name}' for name in idle)} {words} nothing"
    assert said(ONCE, given) == ([text] if idle else [])
    for several in ({}, {"actor.epochs": 2, "actor.mini_batch_size": 64}, {"actor.mini_batch_size": 32}):
        assert said(given, several, {"algorithm.old_log_probs": "pass"}) == []


@pytest.mark.parametrize("low", [0.05, 0.3])
@pytest.mark.parametrize("dual", [2.0, "none"])
def test_what_is_said_holds_of_the_loss(low, dual):
    """By the gradients of the loss itself at equal log-probs, for the values that the settings have."""
    values = {"actor.loss.clip_low": low, "actor.loss.clip_high": 2 * low, "actor.loss.dual_clip": dual}
    assert said(ONCE, values) == [f"{OF_RATIO}{', '.join(values)} change nothing"]
    log_probs, advantages = -torch.rand(4, 9), torch.randn(4, 9)
    grads = []
    for own in ({}, {"clip_low": low, "clip_high": 2 * low, "dual_clip": None if dual == "none" else dual}):
        new = log_probs.clone().requires_grad_()
        loss, _ = losses.ppo_clip(new, log_probs, advantages, torch.ones(4, 9, dtype=torch.bool), **own)
        grads.append(torch.autograd.grad(loss.sum(), new)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({"algorithm.old_log_probs": "pass"}, True),
        ({"algorithm.old_log_probs": "update"}, True),
        ({"algorithm.old_log_probs": "engine"}, True),  # the same but for rounding
        ({"algorithm.old_log_probs": "engine", "rollout.engine": "vllm"}, False),
        ({"algorithm.old_log_probs": "engine", "rollout.ahead": 1}, False),
        ({"algorithm.old_log_probs": "engine", "model.compute_dtype": "bfloat16"}, False),
        ({"algorithm.old_log_probs": "pass", "rollout.ahead": 1}, True),  # of the policy that is updated
        ({"rollout.exact": True}, True),
        ({"rollout.exact": True, "model.compute_dtype": "bfloat16"}, True),
    ],
)
def test_a_ratio_is_1_where_the_old_log_probs_are_those_of_the_updated_policy(changes, there):
    assert bool(said(ONCE, changes)) is there


@pytest.mark.slow
def test_the_clip_of_values_changes_nothing_where_the_critic_has_one_update_a_step():
    text = "one update of the critic a step: values are the old ones; critic.loss.clip changes nothing"
    for loss, there in (("mse", True), ("huber", True), ("hl_gauss", False), ("two_hot", False), ("quantile", False)):
        assert said(CRITIC_ONCE, {"critic.loss": loss}) == [text] * there
    assert said(CRITIC_ONCE, {"critic.epochs": 2}) == []
    assert said(CRITIC_ONCE, {"algorithm.advantage": "rloo", "rollout.n": 8}) == []


def test_a_correction_changes_nothing_where_the_policy_samples_its_own_batch():
    text = "the engine samples from the policy itself: algorithm.correction changes nothing"
    own = {"algorithm.correction": "rollout", "model.compute_dtype": "float32"}
    assert said(own) == [text]
    assert said(own, {"algorithm.correction.threshold": "0.5_2.0"}) == [text]
    for apart in ({"rollout.engine": "vllm"}, {"rollout.ahead": 1}, {"model.compute_dtype": "bfloat16"}):
        assert said(own, apart) == []


def test_how_mini_batches_are_drawn_changes_nothing_where_a_batch_is_one():
    of_prompts = {"rollout.n": 8, "actor.draw_by": "prompt", "actor.loss": "gpg"}
    assert said(ONCE, of_prompts) == ["a batch is one mini-batch: actor.draw_by changes nothing"]
    assert said(of_prompts) == []


OWN = """
import torch


def spo(log_probs, old_log_probs, advantages, mask, radius=0.2, scale: float = 1.0, tail=50.0):
    ratio = (log_probs - old_log_probs.detach()).exp().where(mask, 1.0)
    per_token = -advantages * ratio.clamp(max=tail) + advantages.abs() * (ratio - 1) ** 2 / (2 * radius)
    return (scale * per_token + 0 * torch.rand(())).where(mask, 0.0), {}


def fails(log_probs, old_log_probs, advantages, mask, radius=0.2):
    raise TypeError("mine")
"""


@pytest.mark.parametrize("given", [{}, {"radius": 0.1}, {"radius": 1, "scale": 0.0}])
def test_a_loss_of_ones_own_is_tried_as_the_others_are(tmp_path, monkeypatch, given):
    """Its scale has an effect, which a scale of 0 hides."""
    (tmp_path / "my_idle_losses.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    own = {"actor.loss": "my_idle_losses:spo"} | {f"actor.loss.{name}": value for name, value in given.items()}
    before = torch.random.get_rng_state()
    idle = [] if "scale" in given else ["radius", "tail"]
    expected = [f"{OF_RATIO}actor.loss.radius, actor.loss.tail change nothing"] if idle else []
    assert said(ONCE, own) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    assert said(own) == []
    assert said(ONCE, {"actor.loss": "my_idle_losses:fails"}) == []
