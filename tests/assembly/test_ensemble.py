"""An ensemble of critics by its settings: what a run says of it, and what the policy does not learn from."""

import pytest
import torch

from fppo import metrics
from fppo.assembly.run import assemble
from fppo.pipeline import iterate
from fppo.settings import files
from fppo.steps.hidden import hidden_values
from tests import tiny_run


@pytest.mark.slow
def test_an_ensemble_leaves_out_what_its_members_agree_in(tmp_path):
    tiny_run.write_task(tmp_path)
    changes = {"critic__reads": "hidden", "critic__ensemble": 3, "critic__leave_agreed": 0.4}
    changes |= {"critic__leave_disputed": 0.3, "actor__entropy_coef": 0.01}
    changes |= {"reward__functions": ["tests.rewards.functions:length"]}
    with assemble(tiny_run.settings(tmp_path, **changes)) as assembly:
        following = iterate(assembly.run, program=assembly.program, draw=assembly.draw)
        first, second = next(following), next(following)
    assert not first[1].disagreement.any()  # before their first update they are one
    assert metrics.report(first[2])["critic/ensemble/left"] == 0
    experience, report = second[1], metrics.report(second[2])
    mask, apart = experience.response_mask, experience.disagreement
    gone = mask & (experience.advantages == 0)
    assert 0 < report["critic/ensemble/left"] <= 0.4
    assert (gone.sum() / mask.sum()).item() == pytest.approx(report["critic/ensemble/left"])
    assert apart[gone].max() <= apart[mask & ~gone].min()
    disputed = mask & ~experience.entropy_mask
    assert (disputed.sum() / mask.sum()).item() == pytest.approx(report["critic/ensemble/disputed"])
    assert 0 < report["critic/ensemble/disputed"] <= 0.3
    assert apart[disputed].min() >= apart[mask & ~disputed].max()
    each = hidden_values(first[0].critic.params, experience.hidden, mask)
    torch.testing.assert_close(experience.values, each.mean(0))
    torch.testing.assert_close(apart, each.std(0, correction=0))
    assert report["critic/ensemble/std"] == pytest.approx(apart[mask].mean().item())
    assert (second[0].critic.params["in_weight"] != first[0].critic.params["in_weight"]).flatten(1).any(1).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"critic__ensemble": 2}, "critic.ensemble = 2: its members read what the policy's pass finds"),
        (
            {"critic__reads": "hidden", "critic__ensemble": 2, "critic__leave_disputed": 0.2},
            "critic.leave_disputed = 0.2: nothing reads it here: it is for actor.entropy_coef",
        ),
        ({"critic__leave_agreed": 0.2}, "critic.leave_agreed = 0.2: nothing reads it here: it is for critic.ensemble"),
    ],
)
def test_settings_that_have_no_ensemble_are_named(tmp_path, changes, text):
    tiny_run.write_task(tmp_path)
    with pytest.raises(files.SettingsError) as error:
        tiny_run.settings(tmp_path, **changes)
    assert text in str(error.value)
