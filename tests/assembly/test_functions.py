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
from fppo.settings.learning import (
    AdvantageSettings,
    AlgorithmSettings,
    CorrectionSettings,
    LossSettings,
)
from fppo.settings.reward import RewardSettings
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


LEFT = MASK & torch.tensor([[True, False, False], [True, True, True]])


def weighed(old: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> Correction:
    """A correction of ones own, which leaves some tokens out."""
    assert (old.sum(), new.sum(), mask is MASK) == (0.0, 6.0, True)
    return Correction(torch.tensor([[0.5, 8.0, 3.0], [4.0, 1.0, 1.0]]).where(LEFT, 0.0), LEFT, {})


def unweighed(old: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> Correction:
    """One that has no weights."""
    return Correction(None, LEFT, {})


@pytest.mark.parametrize("loss", ["gmpo", "ppo_clip"])
@pytest.mark.parametrize("fn", [weighed, unweighed])
def test_a_loss_of_rows_has_one_weight_for_each_over_the_tokens_that_remain(loss, fn):
    section = CorrectionSettings(name=f"{__name__}:{fn.__name__}")
    correct: Any = functions.loss_correction(section, LossSettings(name=loss))
    found = correct(torch.zeros(2, 3), torch.ones(2, 3), MASK)
    assert found.mask is LEFT
    if fn is unweighed:
        assert found.weights is None
    elif loss == "ppo_clip":
        assert torch.equal(found.weights, weighed(torch.zeros(2, 3), torch.ones(2, 3), MASK).weights)
    else:
        assert torch.allclose(found.weights, torch.tensor([[0.5, 0.0, 0.0], [4.0, 0.0, 0.0]]), atol=1e-6)


def test_nothing_is_corrected_without_a_correction():
    assert functions.correction_of(CorrectionSettings()) is None
    assert functions.loss_correction(CorrectionSettings(), LossSettings(name="gmpo")) is None


@pytest.mark.parametrize(("penalty", "factor"), [(None, 1.0), (0.0, 0.0), (0.5, 0.5)])
def test_a_penalty_for_long_responses_counts_as_its_section_says(penalty, factor):
    section = RewardSettings(functions=("exact_match",), overlong_buffer=4, overlong_penalty=penalty)
    found = functions.reward_of(section, {"judge": (lambda rows: [], 2.0)}, max_tokens=6)
    assert {term.name: term.weight for term in found.terms} == {
        "exact_match": 1.0,
        "judge": 2.0,
        "length_penalty": factor,
    }
