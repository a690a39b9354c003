"""Paths of models are looked at where a run reads them, and only there; what a run has no use for is not."""

from __future__ import annotations

import inspect

import attrs
import pytest

from fppo.commands import help as helps
from fppo.commands import options
from fppo.fields import fields_of, flag_problems, name_of, place, place_settings
from fppo.settings import ablate, bias, check, checks, compare, files, places, plan
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
    text = "its tokenizer has no chat template, which chat = true needs; use a chat model, or set it to false"
    assert [problem.path for problem in places.place_problems(settings) if problem.text == text] == told


def test_a_directory_for_moments_is_there_before_a_run(tmp_path):
    (tmp_path / "file").touch()
    for name, told in (("gone", True), ("file", True), ("", False)):
        settings = files.replace(TrainSettings(), {"model.moments_directory": str(tmp_path / name)})
        found = [*map(str, places.place_problems(settings))]
        assert told == any(
            "model.moments_directory = " in line and "there is no such directory" in line for line in found
        )


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
    *("model.tokenizer", "data.chat_template", "data.tools"),
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


COMMANDS = [cls for _, cls in inspect.getmembers(options, attrs.has) if cls.__module__ == options.__name__]
COMMANDS += [ablate.AblateSettings, bias.BiasSettings, check.CheckSettings, compare.CompareSettings, plan.PlanSettings]
NONE_OF_THEM = {  # texts whose help speaks of files, and that are none
    *("data.images", "data.videos", "data.split", "data.source", "rollout.turns.respond", "log.loggers"),
    *("gpu", "push", "preset", "map"),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["~/x", "$HOME/x", "a/${NAME}/x", "$(date)/x", "~nobody-at-all/x"])
@pytest.mark.parametrize("name", place_settings(TrainSettings))
def test_a_variable_in_a_place_is_refused_by_the_settings_name(name, text):
    """Only a shell replaces it: a directory of that name would be made."""
    listed = isinstance(files.flat(files.to_dict(TrainSettings()))[name], list)
    settings = files.replace(TrainSettings(), {name: [text] if listed else text})
    (said,) = [problem for problem in checks.problems(settings) if "is not replaced here" in problem.text]
    assert said.path == name


def test_a_name_that_is_there_is_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$x.jsonl").write_text("")
    assert place(("$x.jsonl", "a~b", "./~x", "owner/name")) is None
    assert place("$y.jsonl") == "$y is not replaced here; write out what it stands for"
    assert place("~").startswith("~ is not replaced here; give /")
    assert place("~nobody-at-all") == "~ is not replaced here; give ./~nobody-at-all"


def speaks_of_files(cls):
    """The settings, by their paths, that hold texts, and whose help speaks of files and directories."""
    texts = helps.texts_of(cls)
    for field in fields_of(attrs.resolve_types(cls, include_extras=False)):
        if attrs.has(field.type):
            yield from (f"{name_of(field)}.{inner}" for inner in speaks_of_files(field.type))
        elif "str" in str(field.type) and any(x in texts.get(field.name, "") for x in ("directory", " file", "_dir")):
            yield name_of(field)


@pytest.mark.parametrize("cls", [TrainSettings, *COMMANDS])
def test_every_setting_that_names_a_file_is_known_as_one(cls):
    assert set(speaks_of_files(cls)) - set(place_settings(cls)) <= NONE_OF_THEM


@pytest.mark.parametrize("cls", COMMANDS)
def test_a_variable_in_a_place_is_refused_by_the_flags_name(cls):
    fields = {name: field for name, field in attrs.fields_dict(cls).items() if name in place_settings(cls)}
    given = {name: ("~/x", "y") if "tuple" in str(field.type) else "~/x" for name, field in fields.items()}
    others = {
        field.name: 1 for field in attrs.fields(cls) if field.default is attrs.NOTHING and field.name not in given
    }
    said = [line for line in flag_problems(cls(**given, **others)) if "~ is not replaced here" in line]
    assert len(said) == len(given)


def test_directories_of_modules_that_are_not_there_are_named_but_for_those_that_a_run_remembers(tmp_path):
    here, gone = str(tmp_path), str(tmp_path / "gone")
    text = f"module_dirs = ['{gone}']: there is no such directory; give one that is there, or leave it out"
    (tmp_path / "run.toml").write_text(f'module_dirs = ["{here}", "{gone}"]\n')
    _, problems = files.examined(tmp_path / "run.toml")
    assert text in [*map(str, problems)]
    (tmp_path / "starts").mkdir()
    _, problems = files.examined(tmp_path / "run.toml")
    assert "module_dirs" not in {problem.path for problem in problems}
    _, problems = files.examined(tmp_path / "run.toml", ["--module-dirs", f"{gone}/x"])
    assert text.replace("gone", "gone/x") in [*map(str, problems)]
