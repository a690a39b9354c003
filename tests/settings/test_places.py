"""Paths of models are looked at where a run reads them, and only there; what a run has no use for is not."""

from __future__ import annotations

import pytest

from fppo.settings import files, places
from fppo.settings.train import TrainSettings

GONE = {
    "model.path": "/gone/policy",
    "model.critic_path": "/gone/critic",
    "model.ref_path": "/gone/reference",
    "model.teacher_path": "/gone/teacher",
    "reward.model.path": "/gone/scores",
    "reward.judge.path": "/gone/judge",
}
ALWAYS = {"model.path", "reward.model.path", "reward.judge.path"}


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"algorithm.advantage": "grpo"}, set()),
        ({}, {"model.critic_path"}),
        ({"algorithm.advantage": "grpo", "actor.kl_coef": 0.1}, {"model.ref_path"}),
        ({"algorithm.kl.coef": 0.1}, {"model.critic_path", "model.ref_path"}),
        ({"algorithm.advantage": "distill"}, {"model.teacher_path"}),
    ],
)
def test_a_path_of_a_model_is_looked_at_where_the_run_reads_it(tmp_path, changes, read):
    settings = files.replace(TrainSettings(), GONE | {"output_dir": str(tmp_path / "run")} | changes)
    found = {problem.path: problem.text for problem in places.place_problems(settings)}
    assert {path for path in found if path in GONE} == ALWAYS | read
    assert all(found[path] == "there is no /gone" for path in ALWAYS | read)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ["model.path", "reward.judge.path"]),
        ({"data.chat": False}, ["reward.judge.path"]),
        ({"data.chat_template": "own.jinja"}, ["reward.judge.path"]),
        ({"reward.judge.chat": False}, ["model.path"]),
        ({"model.trust_remote_code": True}, []),
        ({"model.tokenizer": "own"}, ["reward.judge.path"]),
    ],
)
def test_a_chat_template_is_asked_for_where_one_is_used_and_no_code_of_a_model_may_bring_it(tmp_path, changes, told):
    for name in ("bare", "own"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            (tmp_path / name / file).write_text("{}")
    (tmp_path / "own" / "chat_template.jinja").write_text("x")
    (tmp_path / "own.jinja").write_text("x")
    here = {name: str(tmp_path / value) for name, value in changes.items() if isinstance(value, str)}
    bare = str(tmp_path / "bare")
    given = {"data.chat": True, "model.path": bare, "reward.judge.path": bare, "output_dir": str(tmp_path / "run")}
    settings = files.replace(TrainSettings(), given | changes | here)
    text = "its tokenizer has no chat template, which chat = true needs"
    assert [problem.path for problem in places.place_problems(settings) if problem.text == text] == told


def test_an_export_does_not_replace_what_the_run_reads_by_whatever_name(tmp_path):
    (tmp_path / "base" / "critic").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "base")
    settings = files.replace(TrainSettings(), {"model.critic_path": str(tmp_path / "base" / "critic")})
    for target in (
        tmp_path / "base" / "critic",
        tmp_path / "link" / "critic",
        tmp_path / "base" / ".." / "base/critic",
    ):
        text = places.target_problem(settings, target)
        assert (
            text == f"{target} is what model.critic_path names, and an export would replace it; give another directory"
        )
    assert places.target_problem(settings, tmp_path / "link" / "actor") is None


NAMED = (
    *("model.path", "model.critic_path", "model.ref_path", "model.teacher_path", "model.lora.path", "rollout.from"),
    *("reward.model.path", "reward.model.tokenizer", "reward.judge.path", "data.path", "data.eval_path", "module_dirs"),
)


def test_all_that_settings_name_inside_of_a_run_moves_with_it(tmp_path):
    """Places outside, names of the hub, and what is not there stay as they are written."""
    old, new = tmp_path / "old", tmp_path / "new"
    (new / "here").mkdir(parents=True)

    def paths(directory, name):
        several = name in ("data.path", "data.eval_path", "module_dirs")
        return [f"{directory}/here", f"{old}/gone", "/usr", "team/model"] if several else f"{directory}/here"

    begun = files.replace(TrainSettings(), {"output_dir": str(old)} | {name: paths(old, name) for name in NAMED})
    found = files.flat(files.to_dict(files.relocated(begun, new)))
    assert {name: found[name] for name in NAMED} == {name: paths(new, name) for name in NAMED}
    assert found["output_dir"] == str(new)
