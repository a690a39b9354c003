"""Laws: property checks that users run on their own functions in one line; a failure shows the smallest
counter-example.

In: a loss, an estimator, a kernel, an update or a layout. Out: nothing, or a `LawViolation` with the law's name and the
smallest inputs that break it, found by a seeded search in float64.
Begin with `losses.check_policy_loss`; `screening` has the laws that take no time, for the start of a run.
"""

from fppo.laws import references as references
from fppo.laws._search import LawViolation
from fppo.laws.adamw import check_adamw
from fppo.laws.collectives import check_all_to_all, check_collective, check_collectives
from fppo.laws.context import check_context
from fppo.laws.curricula import check_curriculum
from fppo.laws.estimators import check_advantages, check_whiten
from fppo.laws.exact import check_exact
from fppo.laws.expectation import KL, Bias, bias, check_gradient
from fppo.laws.fixed_points import check_fixed_point, fixed_point
from fppo.laws.kernels import check_kernel
from fppo.laws.layout import check_layout, check_layout_fn
from fppo.laws.losses import check_policy_loss, check_value_loss
from fppo.laws.padding import check_padding
from fppo.laws.schedules import check_schedule
from fppo.laws.screening import screen_estimator, screen_kernel, screen_policy_loss
from fppo.laws.shared import check_shared
from fppo.laws.states import check_donation, check_purity, check_resume
from fppo.laws.temporal import check_gae, check_temporal
from fppo.laws.transforms import check_func
from fppo.laws.ulysses import check_ulysses
from fppo.laws.update_gradient import check_update_gradient
from fppo.laws.updates import check_update, check_update_fn
from fppo.laws.verdicts import Verdict, verdicts
from fppo.laws.weights import check_correction, check_weights
from fppo.laws.whole import check_whole_loss, whole_loss
from fppo.laws.worlds import DIVERGENCES, SmallWorld, world, worlds

__all__ = [
    "DIVERGENCES",
    "KL",
    "Bias",
    "LawViolation",
    "SmallWorld",
    "Verdict",
    "bias",
    "check_adamw",
    "check_advantages",
    "check_all_to_all",
    "check_collective",
    "check_collectives",
    "check_context",
    "check_correction",
    "check_curriculum",
    "check_donation",
    "check_exact",
    "check_fixed_point",
    "check_func",
    "check_gae",
    "check_gradient",
    "check_kernel",
    "check_layout",
    "check_layout_fn",
    "check_padding",
    "check_policy_loss",
    "check_purity",
    "check_resume",
    "check_schedule",
    "check_shared",
    "check_temporal",
    "check_ulysses",
    "check_update",
    "check_update_fn",
    "check_update_gradient",
    "check_value_loss",
    "check_weights",
    "check_whiten",
    "check_whole_loss",
    "fixed_point",
    "screen_estimator",
    "screen_kernel",
    "screen_policy_loss",
    "verdicts",
    "whole_loss",
    "world",
    "worlds",
]
