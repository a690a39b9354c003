"""A batch of another trainer is computed again, and the first number that differs is named."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from fppo import advantages, losses
from fppo._errors import UsageError
from fppo.commands import cli
from fppo.studies.audit import dump
from fppo.studies.audit.dump import Recipe, StageComparison, compare, load
from tests.studies.audit.test_recomputed import written


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "batch.safetensors"
    save_file(written(Recipe(), 0), path)
    return path


def outcomes(stages):
    return {stage.stage: stage.outcome for stage in stages}


def test_advantages_of_rows_and_groups_by_size(tmp_path):
    x = written(Recipe(), 0)
    tensors = {"completion_mask": x["mask"].int(), "rewards": x["scores"].float()}
    own = x["advantages"].where(x["mask"], 0.0)
    tensors["advantages"] = own.abs().amax(1) * own.sum(1).sign()
    save_file(tensors, tmp_path / "t.safetensors")
    by_size, without = (load(tmp_path / "t.safetensors", dump.PRESETS["trl"], group_size=x) for x in (3, None))
    assert outcomes(compare(by_size, Recipe()))["advantages"] == "equal"
    assert outcomes(compare(without, Recipe()))["advantages"] == "left out"


class Harmful:
    def __reduce__(self):
        return pytest.fail, ("the file was unpickled",)


def test_a_pickle_is_refused_unread(tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UsageError, match="not a safetensors file"):
        load(tmp_path / "x.pt", {})
    torch.save({"mask": torch.ones(2, 2)}, tmp_path / "y.pt")
    with pytest.raises(UsageError, match=r"pickles and \.pt files are not read"):
        load(tmp_path / "y.pt", {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--estimator", "grop"], "did you mean grpo"),
        (["--loss", "ppo"], "ppo_clip"),
        (["--loss-settings", "clip_lo=0.1"], "clip_low"),
        (["--estimator-settings", "gamma=1"], "scale"),
        (["--mode", "token-men"], "token-mean"),
        (["--preset", "tlr"], "trl"),
        (["--map", "maks=x"], "did you mean mask"),
        (["--map", "values=x"], "the file has advantages [6, 5]"),
        (["--map", "mask=scores"], "expected [B, T]"),
        (["--map", "scores=mask"], "expected [6]"),
        (["--group-size", "0"], "must be 1 or more"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, file, capsys):
    assert cli.main(["audit", "--dump", str(file), *arguments]) not in (0, 1)
    assert words in capsys.readouterr().err


def test_the_command_compares_and_writes(file, tmp_path, capsys):
    assert cli.main(["audit", "--dump", str(file), "--json", str(tmp_path / "found.json")]) == 0
    assert "no difference in advantages, loss, gradient" in capsys.readouterr().out
    stages = [StageComparison(**stage) for stage in json.loads((tmp_path / "found.json").read_text())["stages"]]
    assert [stage.stage for stage in stages] == ["advantages", "returns", "loss", "gradient"]
    assert cli.main(["audit", "--dump", str(file), "--estimator", "rloo"]) == 1


def test_keywords_of_a_recipe_are_numbers_switches_and_texts(tmp_path, capsys):
    """None where a number would stand; of the estimator's scale it is a text."""
    x = written(Recipe(), 0)
    x["advantages"] = advantages.grpo(x["scores"], x["mask"], x["groups"].long(), scale="none").advantages
    new = x["log_probs"].requires_grad_()
    weights = losses.loss_weights(x["mask"], "token-mean", totals=losses.count_totals(x["mask"]))
    tokens = losses.ppo_clip(new, x["old_log_probs"], x["advantages"], x["mask"], clip_low=0.1, dual_clip=None)[0]
    x["loss"] = (weights * tokens).sum()
    (x["gradient"],) = torch.autograd.grad(x["loss"], new)
    save_file({name: column.detach() for name, column in x.items()}, tmp_path / "x.safetensors")
    own = ["audit", "--dump", str(tmp_path / "x.safetensors"), "--loss-settings", "clip_low=0.1,dual_clip=none"]
    for word, status in (("none", 0), ("None", 0), ("std", 1)):
        assert cli.main([*own, "--estimator-settings", f"scale={word}"]) == status
    capsys.readouterr()


def test_a_file_without_a_mask_lists_what_it_has(tmp_path, capsys):
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert cli.main(["audit", "--dump", str(tmp_path / "x.safetensors")]) == 2
    assert "x [2]" in capsys.readouterr().err
    save_file({}, tmp_path / "empty.safetensors")
    assert cli.main(["audit", "--dump", str(tmp_path / "empty.safetensors")]) == 2
    assert "has no mask ('mask'), but no tensors; see --map" in capsys.readouterr().err
    assert cli.main(["audit", "--dump", str(tmp_path / "none.safetensors")]) == 2
