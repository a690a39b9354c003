"""Loss, estimator, correction, optimizer and laws as their sections name them: what is bound to what."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from fppo import losses
from fppo.advantages.columns import OfRows, by_token
from fppo.assembly import functions
from fppo.losses import Correction
from fppo.pipeline.checks import SCREENED, Usage
from fppo.runtime.offload import Lane
from fppo.settings import files
from fppo.settings.learning import (
    AdvantageSettings,
    AlgorithmSettings,
    CorrectionSettings,
    LossSettings,
    OptimizerSettings,
)
from fppo.steps.actor import SelectiveLoss
from fppo_kernels.table import Kernels

KERNELS = Kernels.named()
CPU = torch.device("cpu")


def of_kernel(rewards, values, mask, *, kernel):
    """A critic's estimator that runs by the kernel of the settings."""
    return kernel


def of_weights(named_scores, mask, groups, *, weights=None, scale=1.0):
    """An estimator of several rewards, by their weights."""
    return weights, scale


OWN = f"{__name__}:of_weights"


def parts_of(fn: Any) -> tuple[Any, dict[str, Any]]:
    """A function and all that is bound to it."""
    given: dict[str, Any] = {}
    while isinstance(fn, partial):
        given = {**fn.keywords, **given}
        fn = fn.func
    return fn, given


@pytest.mark.parametrize("by", ["prompt", "turn"])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("given", [{}, {"weights": {"a": 9.0}}, {"scale": 2.0}], ids=str)
def test_an_estimator_has_its_correction_its_turns_and_the_weights_of_rewards(by, corrected, given):
    section = AlgorithmSettings(
        advantage=AdvantageSettings(name=OWN, keywords=given),
        correction=CorrectionSettings(name="rollout" if corrected else "none"),
        group_by=by,
    )
    rows: Any = functions.advantage_of(section, KERNELS)({"a": 0.5, "b": 2.0})
    assert isinstance(rows, OfRows)
    fn, own = parts_of(rows.fn)
    assert (fn, rows.by_turn) == (of_weights, by == "turn")
    assert own == {"weights": {"a": 0.5, "b": 2.0}, **given}
    assert rows.correct is (losses.rollout_correction if corrected else by_token)


def test_an_estimator_of_a_kernel_has_that_of_the_table():
    section = AlgorithmSettings(advantage=AdvantageSettings(name=f"{__name__}:of_kernel"))
    kernels: Any = KERNELS
    rows: Any = functions.advantage_of(section, kernels)({"a": 1.0})
    assert parts_of(rows.fn) == (of_kernel, {"kernel": kernels.gae})
    usual: Any = functions.advantage_of(AlgorithmSettings(), kernels)({})
    assert parts_of(usual.fn)[1]["kernel"] is kernels.gae


def _made() -> Any:
    def estimate(rewards, values, mask):
        return rewards

    return estimate


hidden_reader = _made()  # whose source does not say what it reads


def test_an_estimator_that_reads_values_behind_its_source_is_refused():
    section = AlgorithmSettings(advantage=AdvantageSettings(name=f"{__name__}:hidden_reader"))
    with pytest.raises(ValueError, match="it reads values, of a critic, and its source does not say so"):
        functions.advantage_of(section, KERNELS)


def test_a_loss_is_one_function_or_that_and_its_selection():
    fn, own = parts_of(functions.policy_loss(LossSettings(name="ppo_clip", keywords={"clip_low": 0.125})))
    assert (fn, own) == (losses.ppo_clip, {"clip_low": 0.125})
    both: Any = functions.policy_loss(LossSettings(name="kl_cov"))
    assert isinstance(both, SelectiveLoss)
    assert functions.policy_loss(LossSettings(name="gmpo")) is losses.gmpo


MASK = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize("loss", ["gmpo", "ppo_clip"])
@pytest.mark.parametrize("weighs", [True, False])
def test_a_loss_of_rows_has_one_weight_for_each_over_the_tokens_that_remain(monkeypatch, loss, weighs):
    left = MASK & torch.tensor([[True, False, False], [True, True, True]])
    weights = torch.tensor([[0.5, 8.0, 3.0], [4.0, 1.0, 1.0]]).where(left, 0.0) if weighs else None
    given: list[Any] = []
    monkeypatch.setattr(
        functions, "bound", lambda *_: [lambda *args: given.append(args) or Correction(weights, left, {})]
    )
    correct: Any = functions.loss_correction(CorrectionSettings(name="rollout"), LossSettings(name=loss))
    old, new = torch.zeros(2, 3), torch.ones(2, 3)
    found = correct(old, new, MASK)
    assert all(a is b for a, b in zip(given[0], (old, new, MASK), strict=True))
    assert found.mask is left
    if not weighs:
        assert found.weights is None
    elif loss == "ppo_clip":
        assert found.weights is weights
    else:
        assert torch.allclose(found.weights, torch.tensor([[0.5, 0.0, 0.0], [4.0, 0.0, 0.0]]), atol=1e-6)


def test_nothing_is_corrected_without_a_correction():
    assert functions.correction_of(CorrectionSettings()) is None
    assert functions.loss_correction(CorrectionSettings(), LossSettings(name="gmpo")) is None


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("away", [True, False])
def test_an_optimizer_has_its_schedule_its_kernel_and_its_place(monkeypatch, name, away):
    section = OptimizerSettings(name=name, lr=0.5, schedule="linear", warmup_steps=2, min_lr_ratio=0.25)
    asked: list[Any] = []
    monkeypatch.setattr(functions, "schedule", lambda *args, **named: asked.append((args, named)) or "rate")
    monkeypatch.setattr(functions, "offloaded_adamw", lambda kernel, lane: ("offloaded", kernel, lane))
    monkeypatch.setattr(functions, "kept_on_host", lambda optimizer, lane: ("kept", optimizer, lane))
    made: list[Any] = []
    usual = functions.bound

    def noting(*args: Any) -> list[Any]:
        (make,) = usual(*args)
        assert args == (section, functions.OPTIMIZERS, "actor.optimizer")
        return [lambda *own, **named: made.append((own, named)) or make(lambda count: 0.5)]

    monkeypatch.setattr(functions, "bound", noting)
    kernel: Any = "kernel"
    lane = Lane(CPU) if away else None
    found: Any = functions.optimizer_of(section, 7, setting="actor.optimizer", kernel=kernel, on_host=lane)
    assert asked == [(("linear", 0.5), {"total_steps": 7, "warmup_steps": 2, "min_ratio": 0.25})]
    own = {"kernel": ("offloaded", "kernel", lane) if away else "kernel"} if name == "adamw" else {}
    assert made == [(("rate",), own)]
    assert (isinstance(found, tuple) and found[::2] == ("kept", lane)) is (away and name == "sgd")


@pytest.mark.parametrize("own", [True, False])
def test_laws_are_put_to_what_settings_name_and_say_which_setting_broke_one(monkeypatch, own):
    asked: list[Any] = []
    wrong: dict[str, str] = {}
    monkeypatch.setattr(functions, "screened", lambda **named: asked.append(named) or wrong)
    estimator = AdvantageSettings(name=OWN if own else "gae")
    weighed: list[Any] = []
    names = {"model.attention": "my:attention", "algorithm.gae": "my:gae"}
    usage = Usage(group=3, dtype=torch.bfloat16, device=CPU)
    args = LossSettings(), estimator, lambda given: weighed.append(given) or "estimator", names, KERNELS
    functions.check_laws(*args, usage)  # pyright: ignore
    loss = functions.policy_loss(LossSettings())
    kernels = {op: getattr(KERNELS, op) for op in (*SCREENED, "gae")}
    assert asked == [
        {"loss_fn": loss, "advantage_fn": "estimator" if own else None, "kernels": kernels, "usage": usage}
    ]
    assert weighed == ([{}] if own else [])
    wrong |= {
        "gae": "is no kernel",
        "attention": "sees the future",
        "loss_fn": "has no sign",
        "advantage_fn": "is flat",
    }
    with pytest.raises(files.SettingsError) as caught:
        functions.check_laws(*args, usage)  # pyright: ignore
    end = "\n  check = false starts all the same"
    assert caught.value.problems == (
        f"algorithm.gae = 'my:gae': is no kernel{end}",
        f"model.attention = 'my:attention': sees the future{end}",
        f"actor.loss.name = 'ppo_clip': has no sign{end}",
        f"algorithm.advantage.name = {estimator.name!r}: is flat{end}",
    )
