"""The tables of bias are what the command prints, and losses of critics settle where it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fppo import laws, losses
from fppo.settings import bias as settings
from fppo.studies.bias import study, text

KEPT = Path(__file__).parents[3] / "docs" / "results" / "bias.md"
NUMBER = r"-?\d+\.\d+"


def test_the_settings_name_every_table():
    assert tuple(study.TABLES) == settings.TABLES


@pytest.mark.slow
def test_the_kept_tables_are_those_that_the_command_prints():
    """Words exactly; numbers to a unit of their last digit, which machines may round differently."""
    shown = KEPT.read_text().strip()
    wanted = text.markdown(study.study(settings.TABLES, study.WorldSizes(), {})).strip()
    assert re.sub(NUMBER, "x", shown) == re.sub(NUMBER, "x", wanted)
    a, b = (torch.tensor([float(x) for x in re.findall(NUMBER, page)]) for page in (shown, wanted))
    assert len(a) > 300
    assert ((a - b).abs() < 0.11).all()
    assert ((a - b).abs() < 0.0011).float().mean() > 0.98


@pytest.mark.slow
def test_exact_values_turn_no_gradient_and_leave_its_noise():
    table = study.critics(study.WorldSizes(worlds=1, horizon=2), {})
    for _, cells in table.rows:
        found = dict(zip(table.heads, cells, strict=True))
        assert found["turned, error 0"] < study.EXACT
        assert found["noise, error 0"] > 0.1


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (losses.mse_head(), 0.3),
        (losses.mse_head(clip=None), 0.3),
        (losses.huber_head(), 0.3),  # errors up to 1 are in its square part
        (losses.huber_head(delta=0.1), 0.1 * 0.3 / 0.7),  # 0.7 v = 0.3 * 0.1
        (losses.two_hot_head(bins=7), 0.3),
    ],
)
def test_a_loss_settles_where_its_slopes_cancel(head, expected):
    assert laws.fixed_point(head, (0.0, 1.0), (0.7, 0.3)) == pytest.approx(expected, abs=1e-6)


def test_a_clipped_loss_that_begins_far_away_still_arrives():
    assert laws.fixed_point(losses.mse_head(clip=0.5), (3.0, 5.0), (0.5, 0.5)) == pytest.approx(4.0, abs=1e-6)


@pytest.mark.parametrize("head", [losses.mse_head(), losses.two_hot_head(bins=5)])
def test_a_head_settles_on_the_mean(head):
    laws.check_fixed_point(head)


@pytest.mark.parametrize("head", [losses.huber_head(delta=0.1), losses.quantile_head(bins=3)])
def test_a_head_that_does_not_is_seen(head):
    with pytest.raises(laws.LawViolation, match="with the chances") as caught:
        laws.check_fixed_point(head)
    assert caught.value.law == "fixed point"


def test_chances_that_are_no_distribution_are_named():
    with pytest.raises(ValueError, match="1 in all"):
        laws.fixed_point(losses.mse_head(), (0.0, 1.0), (0.7, 0.7))
