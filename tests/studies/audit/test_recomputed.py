"""What a right trainer wrote is equal under its own recipe, whatever that is, and one wrong number is found."""

from __future__ import annotations

import json
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fppo import advantages, losses
from fppo.commands.output import document
from fppo.laws import Verdict
from fppo.studies.audit import Audited, AuditReport, audit, dump, report
from fppo.studies.audit.dump import Recipe, StageComparison, compare, load
from fppo.studies.audit.report import AuditedFunction

KEYWORDS = {"grpo": {"scale": "none"}, "grpo_passk": {}, "gae": {"gamma": 0.9, "lam": 0.7}}
LOSS_KEYWORDS = {"ppo_clip": {"clip_low": 0.05, "clip_high": 0.3}, "gspo": {"clip_low": 0.1, "clip_high": 0.2}}


def written(recipe, seed):
    """A batch as a trainer with this recipe writes it, by fppo's functions, with numbers outside of the mask."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 5, generator=draw) < 0.7
    mask[:, 0] = True

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    groups, scores, values = torch.tensor([4, 4, 4, 9, 9, 9]), normal(6), normal(6, 5)
    rewards = normal(6, 5)
    fn = getattr(advantages, recipe.estimator)
    how = recipe.estimator_settings
    if recipe.estimator == "gae":
        found = fn(rewards, values, mask, **how)
    else:
        found = fn(scores, mask, groups, **how)
    made = advantages.whiten(found.advantages, mask) if recipe.whiten else found.advantages
    old = -normal(6, 5).abs()
    new = (old + 0.3 * normal(6, 5)).requires_grad_()
    totals = losses.count_totals(mask)
    weights = losses.loss_weights(mask, recipe.mode, totals=totals, horizon=recipe.horizon)
    loss = (weights * getattr(losses, recipe.loss)(new, old, made, mask, **recipe.loss_settings)[0]).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    garbage = normal(6, 5).where(~mask, 0.0)
    columns = {"mask": mask, "groups": groups.double(), "scores": scores, "token_rewards": rewards, "values": values}
    columns |= {"advantages": made + garbage, "log_probs": new.detach(), "old_log_probs": old}
    columns |= {"loss": loss.detach()[None], "gradient": gradient + garbage}
    return columns | ({"returns": found.returns + garbage} if recipe.estimator == "gae" else {})


RECIPES = st.builds(
    Recipe,
    estimator=st.sampled_from([*dump.ESTIMATORS]),
    whiten=st.booleans(),
    loss=st.sampled_from([*losses.POLICY_LOSSES]),
    mode=st.sampled_from(losses.MODES),
    tolerance=st.sampled_from([1e-9, 1e-6]),
)


def with_keywords(recipe):
    return attrs.evolve(
        recipe,
        estimator_settings=KEYWORDS.get(recipe.estimator, {}),
        loss_settings=LOSS_KEYWORDS.get(recipe.loss, {}),
        horizon=9.0 if recipe.mode == "seq-mean-token-sum-norm" else None,
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(recipe=RECIPES.map(with_keywords), seed=st.integers(0, 1000), data=st.data())
def test_any_recipe_finds_its_own_batch_equal_and_the_one_wrong_number(tmp_path_factory, recipe, seed, data):
    batch, path = written(recipe, seed), tmp_path_factory.getbasetemp() / "batch.safetensors"
    save_file(batch, path)
    stages = {stage.stage: stage for stage in compare(load(path, {}), recipe)}
    expected = dict.fromkeys(("advantages", "returns", "loss", "gradient"), "equal")
    expected["returns"] = "equal" if recipe.estimator == "gae" else "left out"
    assert {name: stage.outcome for name, stage in stages.items()} == expected
    name = data.draw(st.sampled_from([name for name, outcome in expected.items() if outcome == "equal"]))
    places = batch["mask"].nonzero().tolist()
    row, token = data.draw(st.sampled_from(places))
    factor = data.draw(st.sampled_from([0.5, 4.0]))  # of what is within the tolerance
    wrong = {key: x.clone() for key, x in batch.items()}
    if name == "loss":
        size = abs(float(wrong["loss"]))
        wrong["loss"] += factor * recipe.tolerance * (1 + size)
    else:
        size = abs(float(wrong[name][row, token]))
        wrong[name][row, token] += factor * recipe.tolerance * (1 + size)
    save_file(wrong, path)
    found = {stage.stage: stage for stage in compare(load(path, {}), recipe)}[name]
    if factor < 1:
        assert found.outcome == "equal"
    elif name == "loss":
        assert (found.outcome, found.row, found.theirs) == ("differs", None, pytest.approx(float(wrong["loss"])))
        assert found.ours == pytest.approx(float(batch["loss"]))
    else:
        assert (found.outcome, found.row, found.token, found.rows) == ("differs", row, token, (row,))
        assert found.theirs == pytest.approx(float(wrong[name][row, token]))
        assert found.ours == pytest.approx(float(batch[name][row, token]), abs=1e-9)


def test_a_grouped_estimator_of_token_rewards_counts_those_in_the_mask(tmp_path):
    """Scores are what the rewards of a row's own tokens add up to."""
    batch = written(Recipe(), 3)
    own = batch["token_rewards"].where(batch["mask"], 0.0).sum(1)
    made = advantages.rloo(own, batch["mask"], batch["groups"].long()).advantages
    del batch["scores"]
    save_file(batch | {"advantages": made}, tmp_path / "x.safetensors")
    columns = load(tmp_path / "x.safetensors", {})
    assert torch.equal(columns["scores"], own)
    first, *_ = compare(columns, Recipe(estimator="rloo"))
    assert first.outcome == "equal"


def test_a_stage_is_left_out_for_what_the_file_lacks(tmp_path):
    batch = written(Recipe(), 1)

    def reasons(*names, **recipe):
        save_file({name: x for name, x in batch.items() if name not in names}, tmp_path / "x.safetensors")
        found = compare(load(tmp_path / "x.safetensors", {}), Recipe(**recipe))
        return {stage.stage: stage.words for stage in found if stage.outcome == "left out"}

    no_groups = "the file has no groups, which grpo reads"
    assert reasons("groups") == {"advantages": no_groups, "returns": no_groups}
    nothing = "the file has no token_rewards and no values, which gae reads"
    assert reasons("token_rewards", "values", estimator="gae") == {"advantages": nothing, "returns": nothing}
    assert reasons("log_probs")["gradient"] == "the file has no log_probs"
    assert reasons("advantages", "log_probs")["loss"] == "the file has no log_probs and no advantages"
    assert reasons("loss")["loss"].startswith("the file has no loss; ours is ")
    assert reasons("gradient")["gradient"].startswith("the file has no gradient; the norm of ours is ")
    assert reasons()["returns"] == "the file has no returns; the norm of ours is " + reasons()["returns"].split()[-1]


def test_names_of_a_preset_and_of_flags_stand_for_ours(tmp_path):
    batch = written(Recipe(), 2)
    trl = {"completion_mask": "mask", "rewards": "scores", "per_token_logps": "log_probs"}
    trl |= {"old_per_token_logps": "old_log_probs", "mine": "advantages", "loss": "loss", "gradient": "gradient"}
    save_file({theirs: batch[ours] for theirs, ours in trl.items()}, tmp_path / "t.safetensors")
    columns = load(tmp_path / "t.safetensors", dump.PRESETS["trl"], {"advantages": "mine"}, 3)
    assert {name: x.shape for name, x in columns.items()} == {
        **{ours: batch[ours].shape for ours in trl.values()},
        "groups": (6,),
        "loss": (),
    }
    assert columns["groups"].tolist() == [0, 0, 0, 1, 1, 1]
    for ours in ("scores", "log_probs", "old_log_probs", "advantages", "gradient"):
        assert torch.equal(columns[ours], batch[ours])
    verl = {"response_mask": batch["mask"].int(), "token_level_rewards": batch["token_rewards"].float()}
    save_file(verl | {"uid": torch.tensor([3, 3, 3, 1, 1, 1])}, tmp_path / "v.safetensors")
    columns = load(tmp_path / "v.safetensors", dump.PRESETS["verl"], group_size=2)  # it has groups of its own
    assert columns["groups"].tolist() == [3, 3, 3, 1, 1, 1]
    assert {name: x.dtype for name, x in columns.items()} == {
        "mask": torch.bool,
        "groups": torch.int64,
        "token_rewards": torch.float64,
        "scores": torch.float64,
    }


def stage(name, outcome, words, **more):
    return StageComparison(name, outcome, words, **more)


def test_the_words_of_a_comparison():
    equal, left = stage("advantages", "equal", "to 0.001"), stage("returns", "left out", "grpo has none")
    loss = stage("loss", "differs", "theirs is 1, ours is 2", theirs=1.0, ours=2.0)
    gradient = stage("gradient", "differs", "row 2", row=2, token=1, rows=(2, 4))
    assert dump.text([equal, left, loss, gradient]).splitlines() == [
        "advantages  equal: to 0.001",
        "returns     left out: grpo has none",
        "loss        differs: theirs is 1, ours is 2",
        "gradient    differs: row 2",
        "",
        "the first difference: loss, theirs is 1, ours is 2",
    ]
    assert dump.text([equal, left]).endswith("\n\nno difference in advantages")
    assert dump.text([left]).endswith("\n\nnothing could be compared")
    assert json.loads(document(dump.record([gradient])))["stages"] == [
        {
            "stage": "gradient",
            "outcome": "differs",
            "words": "row 2",
            "row": 2,
            "token": 1,
            "theirs": None,
            "ours": None,
            "rows": [2, 4],
        }
    ]


NOTE = Verdict(
    "rows", "rows count", "note", "they do\n not", "1 x 2", {"x": torch.tensor([1.0, torch.inf])}, ("x = 1",)
)
FAULT = Verdict("sum", "it adds up", "fault", "it is nan", "2 x 1", {"y": torch.tensor([[True], [False]])}, ("y = 2",))
HOLDS = Verdict("pure", "it is pure", "holds")
MADE = AuditReport(
    "mine",
    ("mine 1.0", "torch 2"),
    (
        AuditedFunction("whole", "advantages", (HOLDS, HOLDS)),
        AuditedFunction("broken", "whole_loss", (NOTE, HOLDS, FAULT)),
    ),
)


def test_the_text_of_an_audit():
    lines = [
        "mine (mine 1.0, torch 2)",
        "",
        "function  kind        laws  hold  notes  faults",
        "whole     advantages     2     2      0       0",
        "broken    whole_loss     3     1      1       1",
        "",
        "broken",
        '  fault "sum": it is nan',
        '  note "rows": they do not',
        "",
        "3 of 5 laws hold; 1 faults, 1 notes",
    ]
    assert report.table(MADE).splitlines() == lines
    shown = [*lines[:8], "      y = 2", lines[8], "      x = 1", *lines[9:]]
    assert report.table(MADE, batches=True).splitlines() == shown
    plain = AuditReport("mine", (), MADE.functions[:1])
    assert report.table(plain).splitlines() == ["mine", "", *lines[2:4], "", "2 of 2 laws hold; 0 faults, 0 notes"]
    long = AuditedFunction("f", "gae", (Verdict("a", "b", "fault", "word " * 200, "1 x 1"),))
    *_, text, _, _ = report.table(AuditReport("x", (), (long,)), width=10**4).splitlines()
    assert text.endswith("word ...")
    assert report.SHORT - 5 <= len(text) - len('  fault "a": ') <= report.SHORT


def test_the_numbers_of_an_audit():
    note = {"law": "rows", "statement": "rows count", "outcome": "note", "reason": "they do\n not", "size": "1 x 2"}
    fault = {"law": "sum", "statement": "it adds up", "outcome": "fault", "reason": "it is nan", "size": "2 x 1"}
    holds = {"law": "pure", "statement": "it is pure", "outcome": "holds"}
    assert json.loads(document(report.record(MADE))) == {
        "name": "mine",
        "versions": ["mine 1.0", "torch 2"],
        "functions": [
            {"name": "whole", "kind": "advantages", "laws": [holds, holds]},
            {
                "name": "broken",
                "kind": "whole_loss",
                "laws": [
                    note | {"batch": {"x": [1.0, "inf"]}},
                    holds,
                    fault | {"batch": {"y": [[True], [False]]}},
                ],
            },
        ],
    }


def test_an_audit_draws_alike_for_each_function_and_leaves_the_generator(monkeypatch):
    """Each is named before its turn, and gets the arguments of its adapter."""
    asked, named = [], []

    def verdicts(fn, **how):
        asked.append((fn, how, torch.rand(()).item()))
        return (HOLDS, FAULT, NOTE)

    monkeypatch.setattr(report, "laws", SimpleNamespace(verdicts=verdicts))
    adapters = (
        Audited("a", "gae", len),
        Audited("b", "advantages", max, min, 2, tokens=3, leave_out=("sum", "rows"), dtype=torch.float32),
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    found = audit("mine", adapters, ["x 1"], named.append)
    assert torch.equal(before, torch.get_rng_state())
    assert named == ["a", "b"]
    torch.manual_seed(6)
    audit("mine", adapters[:1])
    assert asked[0][2] == asked[1][2] == asked.pop()[2]
    plain = {"kind": "gae", "reference": None, "group_rows": 1, "tokens": 0, "dtype": torch.float64, "name": "audited"}
    other = {"kind": "advantages", "reference": min, "group_rows": 2, "tokens": 3, "dtype": torch.float32}
    assert [(fn, how) for fn, how, _ in asked] == [(len, plain), (max, plain | other)]
    assert found == AuditReport(
        "mine",
        ("x 1",),
        (AuditedFunction("a", "gae", (HOLDS, FAULT, NOTE)), AuditedFunction("b", "advantages", (HOLDS,))),
    )
    assert found.faults == 1


def test_a_column_that_is_mapped_is_the_mapped_one(tmp_path):
    """Before the name of a preset, and before ours."""
    batch = written(Recipe(), 4)
    other = {"mine": batch["scores"] + 1.0, "rewards": batch["scores"] + 2.0}
    save_file(batch | other, tmp_path / "x.safetensors")
    columns = load(tmp_path / "x.safetensors", dump.PRESETS["trl"] | {"mask": "mask"}, {"scores": "mine"})
    assert torch.equal(columns["scores"], other["mine"])
    assert torch.equal(load(tmp_path / "x.safetensors", {"scores": "rewards"})["scores"], other["rewards"])
    assert torch.equal(load(tmp_path / "x.safetensors", {})["scores"], batch["scores"])


def test_numbers_that_are_none_in_both_are_equal(tmp_path):
    batch = written(Recipe(estimator="gae"), 5)
    batch["token_rewards"][2, 0] = torch.nan
    recipe = Recipe(estimator="gae")
    found = advantages.gae(batch["token_rewards"], batch["values"], batch["mask"])
    save_file(batch | {"advantages": found.advantages, "returns": found.returns}, tmp_path / "x.safetensors")
    outcomes = {stage.stage: stage.outcome for stage in compare(load(tmp_path / "x.safetensors", {}), recipe)}
    assert (outcomes["advantages"], outcomes["returns"]) == ("equal", "equal")
    off = found.advantages.nan_to_num(0.0)
    save_file(batch | {"advantages": off, "returns": found.returns}, tmp_path / "x.safetensors")
    first, *_ = compare(load(tmp_path / "x.safetensors", {}), recipe)
    assert (first.outcome, first.row) == ("differs", 2)
