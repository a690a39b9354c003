"""Who warns of an engine that samples another policy, and when, with stages that only say a gap."""

import contextlib
import warnings

import attrs
import pytest
import torch

from fppo import metrics
from fppo.key import Key
from fppo.pipeline.gap import HoldExact, WatchAnnotate, WatchUpdate
from fppo.pipeline.program import RunState
from fppo.steps.train_state import TrainState
from tests import tiny

LIMIT = 0.01
GAPS = [(0.02, 4, True), (0.01, 4, False), (0.02, 3, False), (None, 4, False)]  # and the version of a row
STATE = TrainState(params={}, opt=None, step=4)


def rows(version):
    return attrs.evolve(tiny.experience(0, 4), versions=torch.tensor([4, 4, 4, version]))


def watched(kind, report, then, version):
    """The results of a watched stage, whose own result is "after" and whose own metrics these are."""
    if kind is WatchAnnotate:
        stage = WatchAnnotate(stage=lambda scored, run: ("after", report), limit=LIMIT, then=then)
        return stage(rows(version), RunState(actor=STATE, key=Key(0)))
    stage = WatchUpdate(stage=lambda state, batch, *, key, donate: ("after", report), limit=LIMIT, then=then)
    return stage(STATE, rows(version), key=Key(0), donate=False)


@pytest.mark.parametrize("kind", [WatchAnnotate, WatchUpdate])
@pytest.mark.parametrize("then", ["warn", "stop"])
@pytest.mark.parametrize(("gap", "version", "seen"), GAPS)
def test_a_gap_beyond_the_limit_is_said_of_rows_that_the_policy_itself_sampled(kind, then, gap, version, seen):
    """A mean over tokens: 2 of 100 here. Not of rows of an earlier policy, and not where nothing measures it."""
    report = {} if gap is None else {"rollout_corr/k3_kl": metrics.mean(100 * gap, 100.0)}
    expected = contextlib.nullcontext()
    if seen and then == "warn":
        expected = pytest.warns(RuntimeWarning, match=r"after 4 updates: rollout_corr/k3_kl = 0\.02.* at most 0\.01")
    elif seen:
        expected = pytest.raises(ValueError, match="another policy than the one that is trained")
    with warnings.catch_warnings():
        warnings.simplefilter("error" if not seen else "always")
        with expected:
            assert watched(kind, report, then, version) == ("after", report)


@pytest.mark.parametrize(("equal", "ends"), [(8.0, False), (7.0, True)])
def test_an_exact_run_ends_where_one_token_of_eight_has_other_bits(equal, ends):
    report = {"training/rollout_equal": metrics.mean(equal, 8.0)}
    stage = HoldExact(lambda state, batch, *, key, donate: ("after", report))
    with pytest.raises(ValueError, match=r"12\.50% .* after 4 updates") if ends else contextlib.nullcontext():
        assert stage(STATE, rows(4), key=Key(0), donate=False) == ("after", report)
