"""Weights of modes and of corrections: the library's keep their laws, and mistakes are seen."""

from functools import partial

import pytest

from fppo import laws, losses
from fppo.laws import LawViolation, references


def test_the_library_s_weights_keep_the_law():
    laws.check_weights(losses.loss_weights)


@pytest.mark.parametrize("mode", losses.MODES)
def test_a_wrong_normaliser_is_seen(mode):
    def by_micro_batch(mask, mode, *, totals, horizon=None):
        more = {} if horizon is None else {"horizon": horizon}
        return losses.loss_weights(mask, mode, totals=losses.count_totals(mask), **more)

    def doubled(mask, mode, *, totals, horizon=None):
        more = {} if horizon is None else {"horizon": horizon}
        return 2 * losses.loss_weights(mask, mode, totals=totals, **more)

    for wrong in (doubled,) if mode == "token-sum" else (doubled, by_micro_batch):
        with pytest.raises(LawViolation, match="as by the mode's definition") as caught:
            laws.check_weights(wrong, modes=(mode,))
        assert caught.value.law == f"weights, {mode}"


SETTINGS = [
    {"level": "token", "threshold": 1.5},
    {"level": "sequence", "threshold": (0.5, 2.0)},
    {"level": "token", "threshold": 3.0, "batch_normalize": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("how", SETTINGS)
def test_the_library_s_correction_keeps_the_laws(how):
    reference = partial(references.losses.rollout_correction, **how)
    laws.check_correction(partial(losses.rollout_correction, **how), reference=reference)


@pytest.mark.slow
def test_mistakes_of_a_correction_are_seen():
    own = losses.rollout_correction

    def inverted(old, rollout, mask):
        return own(rollout, old, mask)

    def uncut(old, rollout, mask):
        return own(old, rollout, mask)._replace(mask=mask.any(1, keepdim=True).expand_as(mask))

    def late(old, rollout, mask):
        return own(old - 1.0, rollout, mask)

    for wrong, law in ((inverted, "reference"), (uncut, "inside"), (late, "equal policies")):
        with pytest.raises(LawViolation) as caught:
            laws.check_correction(wrong, reference=references.losses.rollout_correction)
        assert caught.value.law == law
