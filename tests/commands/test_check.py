"""fppo check: everything that can be known of a run, and nothing that a run would do."""

from __future__ import annotations

import json
import logging
import re
import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from fppo.assembly.run import assemble
from fppo.commands.check import tokens_line
from fppo.commands.cli import main
from fppo.commands.needs import duration, lines_at_end, planned_needs
from fppo.settings import files
from fppo.settings.plan import PlanSettings
from tests import tiny_run


def _numbers(file):
    """The bytes of a file's tensors, without its header."""
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


def _tree(directory):
    return sorted(str(path) for path in directory.rglob("*"))


@pytest.mark.slow
def test_a_run_is_looked_over_and_nothing_is_started(task, capsys):
    before, file = _tree(task), task.parent / f"{task.name}.json"
    assert main(["check", str(task / "run.toml"), "--gpu", "cpu", "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert _tree(task) == before
    for text in (
        "device    cpu, float32",
        "it fits; 1 x cpu",
        "steps, with prompts of 4 tokens and responses of all 3, at the pace of a miniature that was run here",
        "disk      up to",
        "prompt train.jsonl:1, the first, 4 tokens",
        'text    "0+0="',
        'tokens  3 "0" | 13 "+" | 3 "0" | 14 "="',
        'truth   "0"',
        "reward  of the ground truth: exact_match 1",
        "reward  of an empty response: exact_match 0",
        "nothing was started",
    ):
        assert text in said.out, text
    assert said.out.count("\nprompt ") == 3
    assert "note" not in said.out
    numbers = json.loads(file.read_text())
    assert numbers["faults"] == []
    assert [x["ground_truth"] for x in numbers["prompts"]][:2] == ["0", "4"]
    assert numbers["prompts"][0]["rewards"]["the ground truth"] == {"exact_match": 1.0}
    needs = numbers["needs"]
    assert 0 < needs["memory"] < needs["available"]
    # parameters and two moments of actor and critic, the reference, all float32: as a checkpoint of the run has
    assert 0 < needs["model"] < needs["checkpoint"] < needs["disk"]


@pytest.mark.slow
def test_a_long_run_says_how_far_off_the_plan_of_its_steps_was(task):
    """By the median of its steps and the lengths of its responses; a short one, or one in pools, says nothing."""
    settings = tiny_run.settings(task)
    steps = [{"timing_s/step": x, "response_length/mean": 2.0} for x in (90.0, 100.0, 150.0)]
    with assemble(settings) as assembly:
        (said,) = lines_at_end(settings, assembly.inputs, [{"val/x": 1.0}, *steps], 1)
        found = re.fullmatch(
            r"planned (\S+) s a step, took 1e\+02 s \((\S+)\); responses had 2 tokens of the 3 planned", said
        )
        assert found is not None
        assert float(found[1]) * float(found[2]) == pytest.approx(100, rel=0.06)
        assert lines_at_end(settings, assembly.inputs, steps[:2], 1) == []
        pools = {"placement__pools": {"a": {"ranks": 2}}, "placement__roles__actor": "a"}
        assert lines_at_end(tiny_run.settings(task, **pools), assembly.inputs, steps, 1) == []


@pytest.mark.slow
def test_settings_that_change_nothing_are_named_by_a_check_and_in_the_first_lines_of_a_run(task, capsys):
    flags = ["--actor.epochs", "1", "--actor.mini-batch-size", "8", "--model.compute-dtype", "float32", "--steps", "1"]
    text = "one update a step: the ratio is 1; actor.loss.clip_low, actor.loss.clip_high, actor.loss.dual_clip change"
    assert main(["check", str(task / "run.toml"), "--gpu", "cpu", *flags, "--actor.loss.dual-clip", "4"]) == 0
    assert f"note {text} nothing" in " ".join(capsys.readouterr().out.split())
    assert main(["train", str(task / "run.toml"), *flags]) == 0
    assert f"note {text} nothing" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_disk_is_what_a_run_takes(task, capsys):
    assert main(["check", str(task / "run.toml"), "--gpu", "cpu", "--json", "-"]) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert main(["train", str(task / "run.toml")]) == 0
    newest = max((task / "run" / "checkpoints").glob("step_*"))
    assert sum(map(_numbers, newest.rglob("*.safetensors"))) == pytest.approx(needs["checkpoint"], rel=0.01)
    assert _numbers(task / "run" / "model" / "model.safetensors") == pytest.approx(needs["model"], rel=0.01)


def test_every_problem_is_named_at_once_with_those_of_files_and_rows(task, capsys):
    (task / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    flags = ["--actor.optimizer.lr", "-1", "--rollout.n", "3", "--actor.loss.name", "nowhere:loss"]
    assert main(["check", str(task / "run.toml"), *flags, "--model.tokenizer", str(task / "none")]) == 2
    said = capsys.readouterr().err
    for text in (
        "actor.optimizer.lr = -1",
        "rollout.n",
        "'nowhere' does not import",
        "model.tokenizer",
        "data.ground_truth = 'answer': no row has that field; there are 'prompt' (in train.jsonl)",
    ):
        assert text in said, text
    assert said.count("does not import") == 1
    assert not (task / "run").exists()


@pytest.mark.parametrize("flags", [["--rollout.n", "3"], ["--data.chat"]])
def test_a_problem_that_settings_show_is_named_once(task, capsys, flags):
    assert main(["check", str(task / "run.toml"), *flags]) == 2
    assert capsys.readouterr().err.startswith("fppo check: 1 problem in ")


def test_what_only_opening_finds_is_named_beside_what_settings_show(task, capsys):
    """The tokenizer is whole, but a prompt is too long for it."""
    flags = ["--rollout.n", "3", "--data.max-prompt-tokens", "2"]
    assert main(["check", str(task / "run.toml"), *flags]) == 2
    said = capsys.readouterr().err
    assert "rollout.n" in said
    assert "max_prompt_tokens = 2" in said


def test_values_that_parts_refuse_are_all_named_with_their_settings_beside_other_problems(task, capsys):
    given = [
        "--rollout.n",
        "3",
        "--actor.optimizer.eps",
        "0",
        "--critic.optimizer.momentum",
        "2",
        "--critic.optimizer",
        "sgd",
    ]
    assert main(["check", str(task / "run.toml"), *given, "--actor.loss.dual_clip", "0.5"]) == 2
    said = capsys.readouterr().err
    for text in (
        "rollout.n",
        "actor.loss = ppo_clip(dual_clip=0.5): dual_clip must be > 1",
        "actor.optimizer = adamw(eps=0): eps must be > 0, got 0",
        "critic.optimizer = sgd(momentum=2): momentum must be 0 or more",
    ):
        assert text in said, text


@pytest.mark.slow
def test_texts_of_data_are_no_escape_sequences(task, capsys):
    row = {"prompt": "1+\x1b[2J\u202e=", "answer": "\x1b]0;title\x07", "source": "\x1b[31m"}
    (task / "train.jsonl").write_text(json.dumps(row) + "\n")
    files.save(tiny_run.settings(task, data__source="source", data__eval_path=[]), task / "run.toml")
    assert main(["check", str(task / "run.toml"), "--gpu", "cpu"]) == 0
    said = capsys.readouterr().out
    assert not set(said) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.slow
def test_a_reward_that_fails_on_the_truth_is_found(task, capsys):
    before = logging.getLogger("fppo.rewards").level
    (task / "train.jsonl").write_text(
        '{"prompt": "1+2=", "answer": "3"}\n{"prompt": "1+1=", "answer": "raise"}\n{"prompt": "2+2=", "answer": "4"}\n'
    )
    own = ["--reward.functions", "tests.rewards.functions:by_response", "--gpu", "cpu"]
    assert main(["check", str(task / "run.toml"), *own]) == 1
    said = capsys.readouterr().out
    assert "found: by_response failed on the ground truth of train.jsonl:2: KeyError: 'no such thing'" in said
    (second,) = [part for part in said.split("\nprompt ") if part.startswith("train.jsonl:2")]
    assert "reward  of the ground truth: by_response failed" in second
    assert logging.getLogger("fppo.rewards").level == before


@pytest.mark.slow
def test_a_run_that_is_looked_over_is_of_as_many_ranks_as_are_given(task, capsys, monkeypatch):
    """And the disk must hold what it writes."""
    given = ["check", str(task / "run.toml"), "--gpu", "h100", "--nproc", "2", "--json", "-", "--prompts", "0"]
    assert main(given) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert (needs["gpu"], needs["ranks"]) == ("h100", 2)
    free = [needs["disk"]]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=10**12, free=free[0]))
    assert main(given) == 0
    capsys.readouterr()
    free[0] = 1000
    assert main(given) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert re.fullmatch(r"the run writes up to \S+ [GM]B, and 0\.001 MB are free", fault)


def test_a_reward_without_a_score_is_a_problem(task, capsys):
    own = ["--reward.functions", "tests.rewards.functions:too_few", "--gpu", "cpu"]
    assert main(["check", str(task / "run.toml"), *own]) == 2
    assert "reward.functions: the reward 'too_few' returned" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_found(task, capsys):
    values = files.from_dict(files.read_toml(task / "run.toml"))
    big = {"model.config": {"hidden_size": 32768, "intermediate_size": 32768}}
    files.save(files.replace(values, big), task / "big.toml")
    assert main(["check", str(task / "big.toml"), "--gpu", "a100-80", "--prompts", "0"]) == 1
    assert "found: it does not fit in memory" in capsys.readouterr().out
    files.save(files.replace(values, {"model.config": {"num_hidden_layers": 80}}), task / "none.toml")
    assert main(["check", str(task / "none.toml"), "--gpu", "a100-80", "--prompts", "0"]) == 2
    assert "model type 'qwen2': transformers builds no model of its config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 2, "give a file of settings: fppo check FILE.toml"),
        (["nowhere.toml"], 2, "no such file"),
        (["--help"], 0, "usage: fppo check FILE.toml"),
    ],
)
def test_arguments(words, status, text, capsys):
    assert main(["check", *words]) == status
    said = capsys.readouterr()
    assert text in said.out + said.err


def test_tokens_are_shown_once_for_a_run_of_them_and_at_both_ends():
    assert tokens_line([5, 5, 5, 7], ["<a>", "<a>", "<a>", "b\n"]) == '5 "<a>" x 3 | 7 "b\\n"'
    assert tokens_line([7, 5, 7], ["b", "a", "b"]) == '7 "b" | 5 "a" | 7 "b"'
    line = tokens_line(list(range(100)), [str(i) for i in range(100)])
    assert line.startswith('0 "0" | ')
    assert " | ... (76 more) | 88 " in line


def test_durations():
    assert [duration(x) for x in (0.25, 90, 600, 7200, 864000)] == ["0.25 s", "90 s", "10 min", "2 h", "10 days"]
    edges = {119: "1.2e+02 s", 120: "2 min", 3599: "60 min", 3600: "1 h", 172_799: "48 h", 172_800: "2 days"}
    assert {x: duration(x) for x in edges} == edges


@pytest.mark.slow
def test_a_run_in_pools_is_planned_pool_by_pool_on_its_own_ranks(tmp_path):
    """Each has its own number of GPUs, whatever number of processes is given."""
    tiny_run.write_task(tmp_path)
    pools = {"placement__pools": {"a": {"ranks": 2}}, "placement__roles__actor": "a"}
    settings = tiny_run.settings(tmp_path, **pools)
    inputs: Any = None  # of pools, which are planned by their settings
    needs, lines, fits = planned_needs(settings, PlanSettings(gpu="h100", gpus=3), settings, inputs)
    assert (needs, fits) == (None, True)
    assert [line for line in lines if line.startswith("pool ")] == ["pool a: actor, reference", "pool here: critic"]
    assert any("2 x h100" in line for line in lines)
    assert planned_needs(settings, PlanSettings(gpu="some card"), settings, inputs)[0::2] == (None, True)


@pytest.mark.slow
def test_a_plan_of_a_file_is_of_this_machine_and_of_its_own_prompts_as_a_check_is(task, capsys):
    (task / "test.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    cpu = ["--device", "cpu"]
    assert main(["plan", str(task / "run.toml"), *cpu, "--json", "-"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["check", str(task / "run.toml"), *cpu, "--json", "-"]) == 0
    needs = json.loads(capsys.readouterr().out)["needs"]
    assert needs["gpu"] == "cpu"
    assert main(["plan", str(task / "run.toml"), *cpu]) == 0
    said = capsys.readouterr().out
    assert "actor 2.62 k, critic 2.64 k parameters" in said
    assert "1 x cpu, " in said
    assert "4 x 7 tokens (3 response)" in said  # prompts of 4, where data.max_prompt_tokens is 512
    assert planned["needs"] == pytest.approx(needs["memory"])
    assert main(["plan", str(task / "run.toml"), *cpu, "--data.prompt", "question"]) == 0
    assert "prompts are planned as long as data.max_prompt_tokens = 512" in capsys.readouterr().err
    assert main(["plan", str(task / "run.toml"), *cpu, "--gpu", "h200"]) == 0
    assert "1 x h200, " in capsys.readouterr().out
