"""Ranks are started with the arguments that they need; what a command prints of its work, its help and completion."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo.commands import ablate as ablating
from fppo.commands import actions, check, cli, completion, plan
from fppo.commands import help as helps
from fppo.commands.check import ShownPrompt
from fppo.data import prompt_set
from fppo.pipeline.swap import StageDifference
from fppo.runs import starts
from fppo.runtime.mesh import LOCAL
from fppo.settings import files, places
from fppo.settings.plan import PlanSettings
from tests import tiny_run


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    files.save(tiny_run.settings(tmp_path), tmp_path / "run.toml")
    (tmp_path / "begun").mkdir()
    starts.record(tiny_run.settings(tmp_path, output_dir=str(tmp_path / "begun"), mesh__shard=2), 0)
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [
        "train {task}/run.toml --nproc 2 --steps 9",
        "sft {task}/run.toml --nproc=2 --sft.response answer",
        "rollout {task}/run.toml --steps 9 --nproc 2",
        "eval {task}/begun --mesh.shard 2 --eval.n 3 --eval.temperature 1",
        "eval {task}/begun --nproc 2",
        "replay {task}/begun --step 3 --device cpu --nproc 2",
    ],
)
def test_ranks_are_started_with_what_they_need_to_know(started, task, given):
    """The command's own arguments, but for the number of processes."""
    begun, words = started(5), given.format(task=task).split()
    assert cli.main(words) == 5
    own = re.sub(r" --nproc[ =]2", "", " ".join(words))
    assert begun() == [f"2 -m fppo {own}"]


def test_an_evaluation_is_on_one_process_unless_more_are_asked_for(started, task, capsys):
    begun = started(5)
    assert cli.main(["eval", str(task / "begun"), "--eval.n", "1"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    assert begun() == []


def test_ranks_that_fail_are_started_again_as_often_as_asked_for(started, task, capsys):
    begun = started(5)
    assert cli.main(["train", str(task / "run.toml"), "--nproc", "2", "--max-restarts=1"]) == 5
    assert len(begun()) == 2
    assert cli.main(["replay", str(task / "begun"), "--step", "3", "--max-restarts", "2"]) == 2
    assert "a replay is not restarted" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "stops"), [(1, False), (2, True), (130, True)])
def test_a_compared_run_that_is_stopped_stops_the_others(started, task, capsys, status, stops):
    """One that failed does not; all are started from their own files, seed by seed."""
    begun, out = started(status), task / "run-compare"
    given = ["--vary", "critic.loss=mse,huber", "--seeds", "2", "--steps", "8", "--nproc", "2"]
    assert cli.main(["compare", str(task / "run.toml"), *given]) == (status if stops else 2)
    said = capsys.readouterr()
    names = [(f"critic.loss={name}", seed) for seed in (0, 1) for name in ("mse", "huber")]
    assert ("stopped in critic.loss=mse, seed 0; the same command resumes there" in said.out) is stops
    failed = "; ".join(f"{name}, seed {seed}" for name, seed in names)
    assert (f"failed; the same command tries them again: {failed}\n" in said.out) is not stops
    places = [line.rpartition(" ")[2] for line in begun()]
    assert [line.rpartition(" ")[0] for line in begun()] == ["2 -m fppo train"] * (1 if stops else 4)
    for place, (name, seed) in zip(places, names):
        own = files.load(place)
        assert (f"critic.loss={own.critic.loss.name}", own.seed, own.steps) == (name, seed, 8)
        assert Path(own.output_dir).parent.parent == out
    assert stops or "no run has logged" in said.err


@pytest.mark.parametrize("command", ["train", "sft --sft.response answer"])
def test_settings_are_checked_for_the_ranks_of_the_launcher(task, capsys, monkeypatch, command):
    monkeypatch.setenv("WORLD_SIZE", "8")
    name, *flags = command.split()
    assert cli.main([name, str(task / "run.toml"), *flags, "--mesh.tensor", "3"]) == 2
    assert "do not multiply to the ranks: there are 8 processes" in capsys.readouterr().err


def test_an_evaluation_of_another_place_is_refused(task, capsys):
    assert cli.main(["eval", str(task / "begun"), "--output-dir", str(task / "other")]) == 2
    assert "fppo eval reads the run" in capsys.readouterr().err


# fppo check


def words(ids, **_):
    return " ".join(str(x) for x in ids)


LENGTHS = [3, 5, 2, 9, 4]
INPUTS = SimpleNamespace(
    prompts=prompt_set(
        [list(range(10, 10 + n)) for n in LENGTHS],
        pad_token_id=0,
        ground_truths=["a", None, {"x": 1}, "d", "e"],
        sources=["s"] * 5,
        extras=[{"row": number} for number in range(5)],
    ),
    tokenizer=SimpleNamespace(decode=words, encode=lambda text, **_: [len(text)]),
    sampling=SimpleNamespace(stop_token_ids=(1, 2)),
)


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (0, []),
        (1, [(0, "the first")]),
        (2, [(0, "the first"), (2, "the shortest")]),
        (3, [(0, "the first"), (2, "the shortest"), (3, "the longest")]),
        (4, [(0, "the first"), (2, "the shortest"), (3, "the longest"), (1, "the next")]),
        (9, [(0, "the first"), (2, "the shortest"), (3, "the longest"), (1, "the next"), (4, "the next")]),
    ],
)
def test_prompts_that_are_shown_are_the_first_and_the_ends(count, chosen):
    found = check.shown_prompts(INPUTS, count)
    ids = list(INPUTS.prompts.ids)
    assert [(ids.index(x.id), x.why) for x in found] == chosen
    for shown, (number, _) in zip(found, chosen, strict=True):
        tokens = tuple(range(10, 10 + LENGTHS[number]))
        assert (shown.tokens, shown.pieces, shown.text) == (tokens, tuple(map(str, tokens)), words(tokens))
        assert (shown.source, shown.ground_truth) == ("s", ["a", None, {"x": 1}, "d", "e"][number])


def test_a_prompt_that_is_both_ends_is_shown_once():
    one = SimpleNamespace(prompts=prompt_set([[5]], pad_token_id=0), tokenizer=INPUTS.tokenizer)
    assert [x.why for x in check.shown_prompts(one, 3)] == ["the first"]


def test_a_prompt_is_shown_with_its_tokens_truth_and_rewards():
    prompt = ShownPrompt(
        id="a.jsonl:3",
        why="the first",
        source="b",
        text="x\ny",
        tokens=(5, 5, 7),
        pieces=("x", "x", "\n"),
        ground_truth={"é": 1},
        rewards={"the ground truth": {"own": 0.125, "other": None}},
    )
    assert check.prompt_lines(prompt) == [
        "prompt a.jsonl:3, the first, 3 tokens, source b",
        '  text    "x\\ny"',
        '  tokens  5 "x" x 2 | 7 "\\n"',
        '  truth   {"é": 1}',
        "  reward  of the ground truth: own 0.125, other failed",
    ]
    lines = check.prompt_lines(attrs.evolve(prompt, source="a", ground_truth=None, rewards={}))
    assert lines[0] == "prompt a.jsonl:3, the first, 3 tokens"
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("name", "kind"),
    [("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA H100 80GB HBM3", "h100"), ("Some Card", "some card")],
)
def test_a_gpu_has_the_name_that_plans_have(monkeypatch, name, kind):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert plan.planned_on(PlanSettings(), torch.device("cuda", 1)).gpu == kind
    assert plan.planned_on(PlanSettings(), torch.device("cpu")).gpu == "cpu"


def test_free_bytes_are_those_of_the_disk_that_a_directory_would_be_on(tmp_path, monkeypatch):
    asked = []
    sizes = [SimpleNamespace(total=total, free=7 if total else 0) for total in (9, 9, 0)]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or sizes[len(asked) - 1])
    assert places.free_bytes(tmp_path / "a" / "b") == places.free_bytes(tmp_path) == 7.0
    assert places.free_bytes(tmp_path) == math.inf  # a disk that tells no size
    assert asked == [tmp_path] * 3


# fppo ablate, of a replayed step


def parting(stage, **changes):
    given = {"stage": stage, "leaf": None, "leaves": 4, "differing": 0, "max_abs": 0.0, "relative": 0.0}
    return attrs.asdict(StageDifference(**(given | changes)))


def test_where_a_kernel_parts_is_a_table_of_stages():
    choice = {"op": "gae", "implementation": "loop", "own": False, "reason": None}
    stages = [
        parting("rollout"),
        parting("advantages", leaf="a", differing=1, max_abs=0.0015, relative=0.5),
        parting("state", leaf="w", differing=3, max_abs=float("inf"), relative=float("inf")),
    ]
    assert ablating.choice_text(choice | {"stages": stages}).splitlines() == [
        "gae = loop: parts first in advantages, leaf a",
        "  stage        max abs  relative    differ  first leaf to differ",
        "  rollout     bit-equal",
        "  advantages   1.5e-03   5.0e-01    1 of 4  a",
        "  state           not comparable    3 of 4  w",
    ]
    own = choice | {"own": True, "stages": stages[:1]}
    assert ablating.choice_text(own) == "gae = loop (the run has it): bit-equal in every stage"
    assert ablating.choice_text(own | {"reason": "it raised", "own": False}) == "gae = loop: it raised"


# help and completion


def test_completion_has_the_flags_of_each_command():
    """Switches have a form that turns them off; launched commands have the flags of the launch."""
    flags = {name: completion.flags_of(command) for name, command in cli.COMMANDS.items()}
    for command, own in flags.items():
        assert list(own)[-2:] == ["--help", "--traceback"]
        assert {name: own[name] for name in ("--help", "--traceback")} == {"--help": (), "--traceback": ()}
        of_ranks = command in ("quickstart", "train", "sft", "rollout", "eval", "compare")
        assert ("--max-restarts" in own) == of_ranks
        assert ("--nproc" in own) == (of_ranks or command in ("check", "replay"))
        run = command in ("train", "sft", "check", "rollout", "eval", "compare", "plan", "bias")
        assert ("--actor.optimizer.lr" in own) == run
    assert list(flags["export"]) == [
        *("--step", "--critic", "--no-critic", "--merge", "--no-merge", "--device", "--push", "--public"),
        *("--no-public", "--help", "--traceback"),
    ]
    assert "--rollout.no-save" in flags["train"]
    assert flags["train"]["--rollout.no-save"] == ()
    assert flags["train"]["--log.loggers"] == flags["eval"]["--log.loggers"]
    assert "--critic.loss.bins" in flags["train"]


def test_fish_has_a_line_for_each_flag():
    commands = {name: cli.COMMANDS[name] for name in ("train", "diff")}
    lines = completion.script("fish", commands).splitlines()
    assert lines[1] == "complete -c fppo -n __fish_use_subcommand -f -a 'train diff'"
    assert lines[2:5] == [
        "complete -c fppo -n __fish_use_subcommand -l help",
        "complete -c fppo -n __fish_use_subcommand -l version",
        "complete -c fppo -n '__fppo_runs completion' -f -a 'bash zsh fish'",
    ]
    assert lines[-2:] == [f"complete -c fppo -n '__fppo_runs diff' -l {x}" for x in ("help", "traceback")]
    engine = next(line for line in lines if line.endswith("'embedded vllm'"))
    assert engine == "complete -c fppo -n '__fppo_runs train' -l rollout.engine -x -a 'embedded vllm'"
    assert len(lines) == 5 + sum(len(completion.flags_of(command)) for command in commands.values())
    zsh = completion.script("zsh", commands).splitlines()
    assert zsh[0] == "autoload -Uz compinit bashcompinit && compinit && bashcompinit"
    assert "\n".join(zsh[1:]) == completion.script("bash", commands)


def test_help_is_asked_for_by_either_flag_and_of_the_sections_behind_it():
    assert helps.help_sections(["run.toml", "--steps", "3"]) is None
    assert helps.help_sections(["a.toml", "--help"]) == []
    assert helps.help_sections(["a.toml", "-h", "rollout.vllm", "--steps", "actor-x"]) == ["rollout.vllm", "actor_x"]


@attrs.frozen(kw_only=True)
class _Shown:
    """A command."""

    count: int = 3
    """How many."""
    names: tuple[str, ...] = ("a", "b")
    """Which."""
    quiet: bool = False
    """Say nothing."""
    some: float | None = None
    """At most."""


def test_a_setting_is_written_with_its_kind_and_default(capsys):
    helps.show("fppo x", _Shown, "more")
    assert capsys.readouterr().out.splitlines() == [
        *("usage: fppo x", "", "A command.", ""),
        *("  --count INT", "      How many. [3]"),
        *("  --names TEXT ...", "      Which. [a b]"),
        *("  --quiet, --no-quiet", "      Say nothing. [no]"),
        *("  --some FLOAT", "      At most.", "", "more"),
    ]


def test_a_command_alone_is_on_no_mesh():
    assert (actions.ALONE.mesh, actions.ALONE.device, actions.ALONE.watch, actions.ALONE.sampling) == (
        LOCAL,
        None,
        None,
        None,
    )
    assert re.fullmatch(r"usage: fppo COMMAND .*", cli.usage().splitlines()[0])


# fppo replay
