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


def batch(seed=0):
    """Six rows in two groups, with what a right trainer computes of them."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(5) < torch.tensor([[5], [3], [4], [1], [2], [5]])
    groups = torch.tensor([4, 4, 4, 9, 9, 9])
    old = -torch.rand(6, 5, generator=draw, dtype=torch.float64)
    new = (old + 0.3 * torch.randn(6, 5, generator=draw, dtype=torch.float64)).requires_grad_()
    scores = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    found = advantages.grpo(scores, mask, groups)
    weights = losses.loss_weights(mask, "token-mean", totals=losses.count_totals(mask))
    loss = (weights * losses.ppo_clip(new, old, found.advantages, mask)[0]).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    return {
        "mask": mask,
        "groups": groups,
        "scores": scores,
        "advantages": found.advantages,
        "log_probs": new.detach(),
        "old_log_probs": old,
        "loss": loss.detach(),
        "gradient": gradient,
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "batch.safetensors"
    save_file(batch(), path)
    return path


def outcomes(stages):
    return {stage.stage: stage.outcome for stage in stages}


def test_a_right_batch_is_equal(file):
    found = outcomes(compare(load(file, {}), Recipe()))
    assert found == {"advantages": "equal", "returns": "left out", "loss": "equal", "gradient": "equal"}


def test_the_first_row_that_differs_is_named(tmp_path):
    x = batch()
    x["advantages"] = x["advantages"].clone()
    x["advantages"][2, 1] += 0.5
    x["advantages"][4, 0] += 0.5
    save_file(x, tmp_path / "x.safetensors")
    first, *_ = compare(load(tmp_path / "x.safetensors", {}), Recipe())
    assert (first.outcome, first.row, first.token, first.rows) == ("differs", 2, 1, (2, 4))
    assert first.theirs == pytest.approx(x["advantages"][2, 1].item())
    assert first.theirs - first.ours == pytest.approx(0.5)


def test_a_loss_of_another_mode_differs_where_the_gradient_does(file):
    found = compare(load(file, {}), Recipe(mode="seq-mean-token-mean"))
    assert outcomes(found)["loss"] == outcomes(found)["gradient"] == "differs"
    assert "the first difference: loss" in dump.text(found)


def test_gae_and_whitening(tmp_path):
    x = batch()
    rewards, values = advantages.token_rewards(x["scores"], x["mask"]), -x["old_log_probs"]
    found = advantages.gae(rewards, values, x["mask"], gamma=1.0, lam=0.9)
    whitened = advantages.whiten(found.advantages, x["mask"])
    tensors = {"response_mask": x["mask"].long(), "token_level_rewards": rewards.float(), "values": values.float()}
    save_file(tensors | {"advantages": whitened.float(), "returns": found.returns.float()}, tmp_path / "v.safetensors")
    columns = load(tmp_path / "v.safetensors", dump.PRESETS["verl"])
    recipe = Recipe(estimator="gae", estimator_settings={"gamma": 1.0, "lam": 0.9}, whiten=True)
    assert outcomes(compare(columns, recipe))["advantages"] == outcomes(compare(columns, recipe))["returns"] == "equal"
    other = Recipe(estimator="gae", estimator_settings={"gamma": 1.0, "lam": 1.0}, whiten=True)
    assert outcomes(compare(columns, other))["advantages"] == "differs"


def test_advantages_of_rows_and_groups_by_size(tmp_path):
    x = batch()
    tensors = {"completion_mask": x["mask"].int(), "rewards": x["scores"].float()}
    tensors["advantages"] = x["advantages"].abs().amax(1) * x["advantages"].sum(1).sign()
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
    stages = [StageComparison(**stage) for stage in json.loads((tmp_path / "found.json").read_text())]
    assert [stage.stage for stage in stages] == ["advantages", "returns", "loss", "gradient"]
    assert cli.main(["audit", "--dump", str(file), "--estimator", "rloo"]) == 1


def test_keywords_of_a_recipe_are_numbers_switches_and_texts(tmp_path, capsys):
    """None where a number would stand; of the estimator's scale it is a text."""
    x = batch()
    x["advantages"] = advantages.grpo(x["scores"], x["mask"], x["groups"], scale="none").advantages
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
