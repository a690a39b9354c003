"""Critics with heads of several outputs in whole runs: on disk, resumed, exported, read again."""

import pytest
import torch

from fppo import models, tree
from fppo.assembly.functions import value_head_of
from fppo.assembly.parts import bare_model
from fppo.assembly.run import assemble
from fppo.commands import actions
from fppo.runs import jsonl, saved, session
from fppo.runtime import checkpoint
from fppo.settings import files
from tests import tiny_run

BINS = {"critic__loss": "hl_gauss", "critic__loss__bins": 7, "critic__loss__low": -0.5, "critic__loss__high": 1.5}


def _digests(directory):
    return {line["step"]: line["state"] for line in jsonl.read(directory / "digests.jsonl")}


def _run(task, directory, **changes):
    given = tiny_run.settings(
        task, output_dir=str(directory), actor__optimizer__schedule="constant", data__eval_path=[], **changes
    )
    assert actions.train(given) == 0
    return given


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["tokens", "confidence", "hidden"])
def test_a_run_stops_goes_on_and_is_exported(task, tmp_path, reads):
    given = {"critic__reads": reads, **BINS}
    given |= {"critic__ensemble": 2, "critic__leave_agreed": 0.2} if reads == "hidden" else {}
    settings = _run(task, tmp_path / "whole", steps=3, **given)
    _run(task, tmp_path / "parts", steps=1, **given)
    _run(task, tmp_path / "parts", steps=3, **given)
    assert _digests(tmp_path / "whole") == _digests(tmp_path / "parts")
    lines = jsonl.read(tmp_path / "whole" / "metrics.jsonl")
    assert all(-0.5 < line["critic/values/mean"] < 1.5 for line in lines)
    assert lines[-1]["critic/grad_norm"] > 0
    if reads != "tokens":
        with pytest.raises(
            ValueError, match=f"with critic.reads = '{reads}' it reads the results of the policy's pass"
        ):
            saved.export(settings, tmp_path / "critic", 3, "critic")
        return
    path = checkpoint.path_of(tmp_path / "whole" / session.CHECKPOINTS, 3)
    own = saved.params(bare_model(settings.model, settings.critic), "critic", path)
    saved.export(settings, tmp_path / "critic", 3, "critic")
    model, params = models.load(tmp_path / "critic", "value", outputs=7)
    assert model.shapes["score.weight"] == (7, 16)
    assert tree.digest(params) == tree.digest(own)
    with pytest.raises(ValueError, match=r"score.weight has shape \(7, 16\), expected \(1, 16\)"):
        models.load(tmp_path / "critic", "value")
    with assemble(tiny_run.settings(task, model__critic_path=str(tmp_path / "critic"), **BINS)) as assembly:
        assert assembly.run.critic is not None
        assert tree.digest(assembly.run.critic.params) == tree.digest(own)


@pytest.mark.parametrize("loss", ["huber", "two_hot", "quantile"])
def test_the_settings_choose_head_and_loss(task, tmp_path, loss):
    changes = {"huber": {}, "two_hot": {"bins": 9, "low": 0.0, "high": 1.0}, "quantile": {"bins": 5}}[loss]
    settings = tiny_run.settings(task, critic__loss=loss, **{f"critic__loss__{name}": x for name, x in changes.items()})
    head = value_head_of(settings.critic.loss)
    assert bare_model(settings.model, settings.critic).outputs == head.outputs == changes.get("bins", 1)
    spread = head.read(torch.linspace(-1, 1, head.outputs))
    assert spread.shape == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss__bins": 9}, "critic.loss.bins = 9: mse has no such keyword; there are clip"),
        ({"bins": 9}, "critic.bins = 9: it is called critic.loss.bins now"),
        (
            {"loss": "quantile", "loss__clip": 0.2},
            "critic.loss.clip = 0.2: quantile has no such keyword; there are",
        ),
        ({"loss": "quantile", "popart": 0.2}, "critic.popart = 0.2: nothing reads it here: it is for heads of one"),
    ],
)
def test_settings_that_do_not_go_together_are_named(task, changes, text):
    with pytest.raises(files.SettingsError) as caught:
        tiny_run.settings(task, **{f"critic__{name}": value for name, value in changes.items()})
    assert text in str(caught.value)
