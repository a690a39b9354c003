"""Texts of settings and files that no path and no model can take, and those that a shell cannot write."""

from __future__ import annotations

import codecs
import json
import os

import pytest

from fppo.commands import cli
from fppo.settings import checks, files, modules
from tests import tiny_run
from tests.commands.refused import fails

UNREAD = {"model.path", "module_dirs", "model.teacher_path", "reward.model.tokenizer"}  # or told as not set
TOO_LONG = "a part of it has 256 bytes, and file systems take 255; give a shorter name"


def with_value(task, path, value):
    settings = files.replace(files.load(task / "run.toml"), {path: value})
    files.save(settings, task / "run.toml")


@pytest.mark.parametrize("name", [*files.PATHS, "output_dir", "data.prompt", "data.chat_template", "resume", "device"])
def test_a_nul_in_a_setting_is_named_as_that(task, capsys, name):
    listed = name in ("data.path", "data.eval_path", "module_dirs")
    text = "a\0b.jsonl"
    with_value(task, name, [text] if listed else text)
    said = fails(task, capsys)
    assert f"{name} = {text!r}: holds a NUL character, which no path and no text has" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted({*files.PATHS} - UNREAD), "model.tokenizer"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "an empty name; give a file, a directory or a name, or leave it out"), ("x" * 256, TOO_LONG)],
    ids=["empty", "long"],
)
def test_a_name_that_is_empty_or_too_long_is_named(task, capsys, name, text, expected):
    """An empty one would be the working directory's."""
    with_value(task, name, [text] if name in ("data.path", "data.eval_path") else text)
    said = fails(task, capsys)
    assert f"{name} = " in said
    assert expected in said


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["--output-dir", ""], "1 problem in {file}, with the flags:\n  output_dir = '': is not set; give a"),
        (["--output-dir", "@/" + "x" * 256], TOO_LONG),
        (["--actor.optimizer.betas", "0.9"], "actor.optimizer.betas = [0.9]: must be a list of 2, each a number"),
    ],
)
def test_names_and_lists_of_another_length(task, capsys, overrides, text):
    said = fails(task, capsys, *(word.replace("@", str(task)) for word in overrides))
    assert text.format(file=task / "run.toml") in said


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("data.chat_arguments", {"a": "TEXT"}),
        ("data.chat_arguments", {"TEXT": 1}),
        ("data.chat_arguments", {"a": [1, {"b": ["c", "TEXT"]}]}),
        ("data.chat_arguments", {"a": {"TEXT": {}}}),
        ("reward.arguments", {"mine:score": {"TEXT": 0.5}}),
        ("placement.pools", {"TEXT": {"ranks": 1}}),
        ("rollout.stop", ["a", "TEXT"]),
    ],
)
def test_texts_that_nothing_holds_are_found_however_deep_and_as_names_too(path, value):
    for text in ("a\0b", "a\ud800"):
        given = json.loads(json.dumps(value).replace("TEXT", json.dumps(text)[1:-1]))
        (problem,) = checks.text_problems(files.replace(files.TrainSettings(), {path: given}))
        assert (problem.path, problem.value) == (path, text)


def test_a_byte_that_is_no_text_is_named(task, capsys):
    name = os.fsdecode(os.fsencode(task / "r") + b"\xff.jsonl")
    said = fails(task, capsys, "--data.path", name)
    assert "data.path = " in said
    assert r"'\udcff' is half of a surrogate pair, or a byte that is not UTF-8" in said


def test_a_settings_file_may_begin_with_a_mark(task, capsys):
    text = (task / "run.toml").read_text()
    (task / "run.toml").write_bytes(codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode())
    assert files.load(task / "run.toml") == tiny_run.settings(task)
    for code in ("utf-16", "utf-16-be"):
        (task / "run.toml").write_bytes((b"" if code == "utf-16" else codecs.BOM_UTF16_BE) + text.encode(code))
        assert "it is UTF-16; save it as UTF-8" in fails(task, capsys)


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, b"# coding: latin-1\n"])
def test_a_module_is_read_as_python_reads_it(task, mark):
    text = '"""é"""\n\ndef reward(sample):\n    return 1.0\n'
    (task / "mine.py").write_bytes(mark + text.encode("latin-1" if mark.startswith(b"#") else "utf-8"))
    settings = files.load(task / "run.toml", ["--reward.functions", "mine:reward"])
    assert modules.module_problems(settings) == []


def test_a_mark_before_a_template_or_tools_is_none_of_them(task):
    from fppo.assembly import texts

    (task / "t.jinja").write_bytes(codecs.BOM_UTF8 + b"{{ messages[0].content }}{{ tools }}")
    (task / "tools.json").write_bytes(codecs.BOM_UTF8 + json.dumps([{"name": "x"}]).encode())
    more = {"data__chat": True, "data__chat_template": str(task / "t.jinja"), "data__tools": str(task / "tools.json")}
    settings = tiny_run.settings(task, **more)
    assert texts.load_tokenizer(settings.model, settings.data).chat_template.startswith("{{")
    assert texts.chat_options(settings.data).tools == [{"name": "x"}]


@pytest.mark.parametrize("flag", ["--data.path", "--data.eval-path", "--data.chat-template", "--data.tools"])
def test_a_pipe_in_the_place_of_a_file(task, capsys, flag):
    os.mkfifo(task / "pipe.jsonl")
    assert "it is a FIFO, not a file that can be read again" in fails(task, capsys, flag, str(task / "pipe.jsonl"))


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        (r"Q: {prompt}\nA:", "Q: {prompt}\nA:"),
        ("Q: {prompt}\nA:", "Q: {prompt}\nA:"),
        (r"\tQ: {prompt}\n\nanswer:", "\tQ: {prompt}\n\nanswer:"),
        (r"Q: {prompt}\\nA:", r"Q: {prompt}\nA:"),
        (r"\alpha \d \\ {prompt}", r"\alpha \d \\ {prompt}"),
        (r"\\nabla {prompt}", r"\nabla {prompt}"),
        ("prompt", "prompt"),
    ],
)
def test_a_new_line_on_the_command_line(task, given, prompt):
    assert files.load(task / "run.toml", ["--data.prompt", given]).data.prompt == prompt
    assert files.load(task / "run.toml", [f"--data.prompt={given}"]).data.prompt == prompt


def test_new_lines_in_other_texts_of_the_command_line(task):
    stops = ["--rollout.stop", r"\n\n", "END", "--eval.stop", r"\n"]
    settings = files.load(task / "run.toml", stops)
    assert (settings.rollout.stop, settings.eval.stop) == (("\n\n", "END"), ("\n",))
    with_value(task, "data.prompt", r"{prompt}\n")  # a file says what it says
    assert files.load(task / "run.toml", ["--seed", "3"]).data.prompt == r"{prompt}\n"
    assert files.load(task / "run.toml", ["--rollout.stop", r"\d"]).rollout.stop == (r"\d",)


@pytest.mark.parametrize("text", [r"\nabla {prompt}", r"{prompt} \text{x}", r"{prompt} \times"])
def test_a_command_of_latex_is_not_taken_for_a_new_line(task, capsys, text):
    said = fails(task, capsys, "--data.prompt", text)
    assert "data.prompt = " in said
    assert "may be meant: write \\\\" in said


@pytest.mark.parametrize("weights", ["0.0", "0", "-0.0"])
def test_a_reward_whose_weight_is_zero(task, capsys, weights):
    said = fails(task, capsys, "--reward.weights", weights)
    assert "reward.weights = [" in said
    assert "every response would score 0, and nothing would be learned" in said
    said = fails(task, capsys, "--reward.functions", "--reward.judge.path", "j", "--reward.judge.weight", weights)
    assert f"reward.judge.weight = {float(weights)}: every response would score 0" in said
    two = ["--reward.functions", "exact_match", "tests.rewards.functions:length", "--reward.weights", "1", "0"]
    assert files.load(task / "run.toml", two).reward.weights == (1.0, 0.0)


def test_images_without_a_chat_are_told_from_faulty_rows(task, capsys):
    said = fails(task, capsys, "--data.images", "prompt", "--rollout.n", "3")
    assert "data.images = 'prompt': images stand in chat messages: give data.chat = true" in said
    assert "Traceback" not in said
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]}]
    (task / "train.jsonl").write_text(json.dumps({"prompt": parts, "answer": "1", "image": "a.png"}) + "\n")
    said = fails(task, capsys, "--data.images", "image", "--data.chat", "--rollout.n", "3")
    assert "train.jsonl" not in said


def test_tools_of_rows_need_the_chat_template(task, capsys):
    said = fails(task, capsys, "--data.row-tools", "tools")
    assert "data.row_tools = 'tools': nothing reads it here: it is for data.chat = true" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "{task}/start", "--max-tokens", "-1"], "--max-tokens -1: must be 1 or more"),
        (["serve", "{task}/start", "--row-tokens", "0"], "--row-tokens 0: must be 1 or more"),
        (["serve", "{task}/start", "--port", "70000"], "--port 70000: must be 65535 or less"),
        (["serve", "{task}/start", "--temperature", "nan"], "--temperature nan: must be finite"),
        (["serve", "{task}/start", "--top-p", "1.5", "--requests", "0"], "--requests 0: must be 1 or more"),
        (["serve", "{task}/start", "--follow", "-2"], "--follow -2.0: must be 0 or more"),
        (["view", "{task}", "--port", "-1"], "--port -1: must be 0 or more"),
        (["view", "{task}", "--export-mb", "-1"], "--export-mb -1.0: must be 0 or more"),
        (["quickstart", "--seed", "-1", "--output-dir", "{task}/q"], "--seed -1: must be 0 or more"),
        (["quickstart", "--output-dir", "{task}/run.toml/q"], "{task}/run.toml/q"),
        (["check", "{task}/run.toml", "--gpu", "h300"], "--gpu 'h300' is not known; did you mean h200?"),
        (["bias", "--vocabulary", "6"], "--vocabulary 6 --horizon 3 --n 8: 1.04e+13 groups to sum over"),
        (["bias", "--vocabulary", "1000000"], "--vocabulary 1000000: must be 100 or less"),
        (["bias", "--tables", "kl", "--vocabulary", "100"], "--vocabulary 100 --horizon 3: 4.8e+11 groups to sum over"),
        (["bias", "--n", "4", "1000"], "--n 4 1000: give sizes of groups, of 2 to 100 rows"),
        (["export", "~/run", "$HOME/model"], "TARGET '$HOME/model': $HOME is not replaced here; write out what it"),
        (["export", "~/run", "x"], "RUN '~/run': ~ is not replaced here; give /"),
        (
            ["serve", "{task}/start", "--store", "${{STORE}}/s"],
            "--store '${{STORE}}/s': ${{STORE}} is not replaced here",
        ),
        (["serve", "{task}/start", "--record", "~/e"], "--record '~/e': ~ is not replaced here"),
        (["view", "{task}", "--export", "$(date).html"], "--export '$(date).html': $(date) is not replaced here"),
        (["trace", "{task}", "--out", "~/t.json"], "--out '~/t.json': ~ is not replaced here"),
        (["quickstart", "--output-dir", "~/q"], "--output-dir '~/q': ~ is not replaced here"),
        (["plan", "{task}/run.toml", "--json", "~/p.json"], "--json '~/p.json': ~ is not replaced here"),
        (["check", "{task}/run.toml", "--json", "~/p.json"], "--json '~/p.json': ~ is not replaced here"),
        (["compare", "{task}/run.toml", "--vary", "seed=1", "--out", "~/c"], "--out '~/c': ~ is not replaced here"),
        (["ablate", "--png", "$X.png"], "--png '$X.png': $X is not replaced here"),
        (["audit", "--json", "~/a.json"], "--json '~/a.json': ~ is not replaced here"),
        (["bias", "--markdown", "~/b.md", "--tables", "kl"], "--markdown '~/b.md': ~ is not replaced here"),
        (["train", "~/run.toml"], "~ is not replaced here; give /"),
        (
            ["train", "{task}/run.toml", "--module-dirs", "{task}/none"],
            "module_dirs = ['{task}/none']: there is no such",
        ),
        (["bias", "--horizon", "30"], "--vocabulary 2 --horizon 30 --n 8: 4.89e+07 groups to sum over"),
    ],
)
def test_options_of_commands_are_refused_before_any_work(task, capsys, arguments, text):
    assert cli.main([word.format(task=task) for word in arguments]) == 2
    said = capsys.readouterr()
    assert text.format(task=task) in said.err
    assert said.out == ""
