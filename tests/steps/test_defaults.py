"""Defaults of what scripts call, as docstrings and papers have them: another one would train otherwise in silence.

Settings of the command line give every value themselves; scripts leave most of them out.
"""

import inspect

import attrs
import pytest

from fppo import losses
from fppo.losses import ValueHead
from fppo.pipeline.draw import SampleGroups
from fppo.pipeline.gap import COMPARED, ROUNDING, WHOLE_STEPS
from fppo.pipeline.pretrain import Pretrain
from fppo.pipeline.program import Program
from fppo.pipeline.stages import Annotate, Estimate
from fppo.rewards import RewardRunner, length_penalty
from fppo.steps.actor import PolicyTerms, UpdateActor
from fppo.steps.adamw_8bit import adamw_8bit
from fppo.steps.confidence import UpdateConfidence
from fppo.steps.critic import UpdateCritic
from fppo.steps.loop import Loop, Objective
from fppo.steps.muon import muon
from fppo.steps.optimizers import adamw, lion, sgd
from fppo.steps.outputs import Forward
from fppo.steps.perceptron import UNCLIPPED
from fppo.steps.schedules import schedule

WANTED = {
    schedule: {"total_steps": None, "warmup_steps": 0, "min_ratio": 0.0, "decay_ratio": 0.2, "num_cycles": 1},
    sgd: {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "max_grad_norm": 1.0},
    lion: {"betas": (0.9, 0.99), "weight_decay": 0.01, "max_grad_norm": 1.0},
    muon: {"momentum": 0.95, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0},
    adamw: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0},
    adamw_8bit: {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0, "block_size": 64},
    losses.mse_head: {"clip": 0.5},
    losses.huber_head: {"delta": 1.0, "clip": 0.5},
    losses.hl_gauss_head: {"bins": 51, "low": -0.1, "high": 1.1, "sigma": 0.75},
    losses.two_hot_head: {"bins": 51, "low": -0.1, "high": 1.1},
    losses.quantile_head: {"bins": 51, "delta": 1.0},
    losses.update_kl: {"kind": "fixed", "target": 0.1, "horizon": 10_000},
    losses.loss_weights: {"horizon": None},
    losses.select_clip_cov: {"ratio": 0.0002, "low": 1.0, "high": 5.0, "clip_low": 0.2, "clip_high": 0.2},
    losses.select_kl_cov: {"ratio": 0.0002},
    losses.rollout_correction: {
        "level": "token",
        "threshold": 2.0,
        "batch_normalize": False,
        "reject": None,
        "reject_threshold": None,
    },
    length_penalty: {"factor": 1.0},
    RewardRunner.__init__: {
        "time_limit": 10.0,
        "batch_limit": None,
        "workers": 1,
        "concurrency": 64,
        "start_limit": 120.0,
    },
}
FIELDS = {
    PolicyTerms: {
        "temperature": 1.0,
        "entropy_coef": 0.0,
        "top_entropy_share": 1.0,
        "kl_coef": 0.0,
        "kl_kind": "k3",
        "nll_coef": 0.0,
        "balance_coef": 0.0,
        "router_z_coef": 0.0,
    },
    Loop: {"epochs": 1, "weight_mode": "token-mean", "horizon": None, "balance_rate": 0.0, "by_prompt": False},
    Objective: {"outputs": ("log_probs",), "temperature": 1.0, "balance_coef": 0.0, "router_z_coef": 0.0},
    Forward: {"remove_padding": True, "share_prompts": "auto", "replay": False},
    Pretrain: {"patience": 3, "rise": 0.01},
    ValueHead: {"outputs": 1, "loss_fn": losses.value_loss},
    UpdateCritic: {"loss_fn": losses.value_loss},
    UpdateConfidence: {"loss_fn": UNCLIPPED},
    UpdateActor: {"old_log_probs": "pass", "terms": PolicyTerms(), "record": None},
    Estimate: {"kl_in_reward": False, "kl_kind": "k1", "update_kl": None, "correct": None, "drop": (), "whiten": False},
    Annotate: {"old_log_probs": "pass", "sum_squared": False, "replay": "none"},
    SampleGroups: {"max_draws": 10, "by": "score"},
    Program: {"critic_warmup": 0, "freeze_critic": False, "check": True, "pretrain": None},
}


@pytest.mark.parametrize("fn", WANTED, ids=lambda fn: fn.__qualname__)
def test_a_function_has_these_defaults(fn):
    own = {name: p.default for name, p in inspect.signature(fn).parameters.items()}
    assert {name: own[name] for name in WANTED[fn]} == WANTED[fn]


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_a_value_has_these_defaults(cls):
    own = attrs.fields_dict(cls)
    assert {name: own[name].default for name in FIELDS[cls]} == FIELDS[cls]


def test_numbers_that_no_argument_changes():
    assert (WHOLE_STEPS, COMPARED, ROUNDING) == (2, 16, 1e-4)
    assert UNCLIPPED.keywords == {"clip": None}
