"""Each command's work is launched on its processes, with the settings and arguments that others are started with."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo.commands import ablate as ablating
from fppo.commands import actions, check, cli, completion, distributed, plan, start
from fppo.commands import help as helps
from fppo.commands.actions import CommandRank
from fppo.commands.check import Rewarded, ShownPrompt
from fppo.data import prompt_set
from fppo.pipeline.replay import Difference, DifferingLeaf
from fppo.pipeline.swap import StageDifference
from fppo.quickstart import character_tokenizer
from fppo.runtime.mesh import LOCAL, Axis, Mesh
from fppo.settings import files, machine, modules, places
from fppo.settings.model import ModelSettings
from fppo.settings.placement import MeshSettings
from fppo.settings.train import TrainSettings
from fppo.workers.sample import Sample
from tests import tiny_run


@pytest.fixture
def launched(monkeypatch):
    """What would be launched."""
    made = []

    def run(command, settings, arguments, *processes, **how):
        made.append(SimpleNamespace(command=command, settings=settings, arguments=arguments, where=processes, how=how))
        return 5

    monkeypatch.setattr(distributed, "run", run)
    return made


@pytest.fixture
def task(tmp_path):
    tiny_run.write_task(tmp_path)
    files.save(tiny_run.settings(tmp_path, mesh__shard=2), tmp_path / "run.toml")
    (tmp_path / "begun").mkdir()
    files.save(tiny_run.settings(tmp_path, mesh__shard=2), tmp_path / "begun" / "settings.toml")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "action", "trains"),
    [("train", actions.train, True), ("sft", actions.sft, False), ("rollout", actions.rollout, False)],
)
def test_a_command_runs_on_its_processes_with_the_flags_that_others_need(launched, task, command, action, trains):
    more = {"sft": ["--sft.response", "answer"]}.get(command, [])
    words = ["--steps", "9", *more]
    given = [str(task / "run.toml"), "--nproc", "2", *words, "--max-restarts=3"]
    assert cli.main([command, *given]) == 5
    (found,) = launched
    assert (found.command, found.where) == (action, (2, 3))
    assert found.arguments == [command, str(task / "run.toml"), *words]
    assert found.how == ({} if trains else {"trains": False})
    assert (found.settings.steps, found.settings.mesh.shard) == (9, 2)
    assert cli.main([command, str(task / "run.toml"), *words]) == 5
    assert launched[-1].where == (None, 0)


@pytest.mark.parametrize(
    ("words", "shard"),
    [
        ([], None),
        (["--nproc", "2"], 2),
        (["--mesh.shard", "1"], 1),
        (["--eval.n", "3", "--eval.temperature", "1"], None),
    ],
)
def test_an_evaluation_is_on_one_process_unless_more_are_asked_for(launched, task, words, shard):
    run = str(task / "begun")
    files.save(tiny_run.settings(task, output_dir=run, mesh__shard=2), task / "begun" / "settings.toml")
    assert cli.main(["eval", run, *words]) == 5
    (found,) = launched
    assert (found.command, found.how) == (actions.evaluate, {"trains": False})
    expected = MeshSettings() if shard is None else attrs.evolve(MeshSettings(), shard=shard)
    assert found.settings.mesh == expected
    assert found.arguments == ["eval", run, *(words if "--nproc" not in words else [])]
    assert found.where == (2 if "--nproc" in words else None, 0)
    assert found.settings.output_dir == run
    assert found.settings.eval.n == (3 if "--eval.n" in words else 1)


def test_an_evaluation_of_another_place_is_refused(task, capsys):
    assert cli.main(["eval", str(task / "begun"), "--output-dir", str(task / "other")]) == 2
    assert "fppo eval reads the run" in capsys.readouterr().err


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_replay_is_on_the_device_of_its_flag(launched, monkeypatch, device):
    asked = []
    settings = files.replace(TrainSettings(), {"device": "auto"})
    monkeypatch.setattr(actions, "settings_of", lambda run, step: asked.append((run, step)) or settings)
    monkeypatch.setattr(actions, "replay", lambda run, step, here: asked.append((run, step, here.device)) or 7)
    flags = [] if device is None else ["--device", device]
    assert cli.main(["replay", "runs/a", "--step", "3", *flags, "--nproc", "2"]) == 5
    (found,) = launched
    assert (found.settings.device, found.where) == (device or "auto", (2,))
    assert found.arguments == ["replay", "runs/a", "--step", "3", *flags]
    for here in (CommandRank(), CommandRank(device=torch.device("meta"))):
        assert found.command(found.settings, here) == 7
    expected = None if device is None else torch.device("cpu")
    assert asked == [
        (Path("runs/a"), 3),
        (Path("runs/a"), 3, expected),
        (Path("runs/a"), 3, torch.device("meta")),
    ]


def test_runs_that_are_compared_are_launched_from_their_files(launched, task, monkeypatch):
    from fppo.commands import compare

    taken = []
    monkeypatch.setattr(
        compare, "compare", lambda settings, options, train: taken.append((settings, options, train)) or 0
    )
    given = [str(task / "run.toml"), "--vary", "steps=1,2", "--seeds", "2", "--steps", "8", "--nproc", "2"]
    assert cli.main(["compare", *given]) == 0
    ((settings, options, train),) = taken
    assert (settings.steps, options.vary, options.seeds) == (8, ("steps=1,2",), 2)
    assert train(settings, Path("own.toml")) == 5
    (found,) = launched
    assert (found.command, found.arguments, found.where) == (actions.train, ["train", "own.toml"], (2, 0))
    assert (found.settings, found.how) == (settings, {})


def test_a_quickstart_is_launched_from_the_file_that_it_writes(launched, tmp_path, monkeypatch):
    own = tiny_run.settings(tmp_path, output_dir=str(tmp_path))
    taken = []
    monkeypatch.setattr(actions, "quickstart", lambda directory, seed, run: taken.append((directory, seed)) or run(own))
    assert (
        cli.main(["quickstart", "--nproc", "2", "--seed", "4", "--output-dir", str(tmp_path), "--max-restarts", "1"])
        == 5
    )
    assert taken == [(tmp_path, 4)]
    (found,) = launched
    assert (found.command, found.arguments) == (actions.train, ["train", str(tmp_path / "quickstart.toml")])
    assert found.where == (2, 1)
    assert files.from_dict(files.read_toml(tmp_path / "quickstart.toml")).steps == own.steps == found.settings.steps


@pytest.mark.parametrize(
    ("world", "local", "nproc", "expected"),
    [(None, None, None, (2, 2)), (None, None, 4, (4, 4)), ("8", "4", None, (8, 4)), ("8", None, 2, (8, 8))],
)
@pytest.mark.parametrize("kind", ["train", "sft"])
def test_the_ranks_of_a_look_are_those_of_the_launcher(tmp_path, monkeypatch, world, local, nproc, expected, kind):
    """Or as many as are asked for, or as the mesh needs."""
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local), ("CUDA_VISIBLE_DEVICES", "0,1")):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(
        machine, "machine_problems", lambda settings, local, *, visible: asked.append((local, visible)) or []
    )
    monkeypatch.setattr(cli.checks, "mesh_problems", lambda settings, world: asked.append(world) or [])
    monkeypatch.setattr(cli.places, "target_problem", lambda settings, target: asked.append(target.name) and None)
    settings = tiny_run.settings(tmp_path, mesh__shard=2)
    look = cli._look if kind == "train" else cli._look_sft
    how = {"exports": True} if kind == "train" else {}
    look(cli.LaunchOptions(nproc=nproc), settings, [], **how)
    assert asked == ["model", (expected[1], "0,1"), expected[0]]
    asked.clear()
    if kind == "train":
        look(cli.LaunchOptions(nproc=nproc), settings, [])
        assert asked == [(expected[1], "0,1"), expected[0]]


def test_every_kind_of_problem_is_found_in_one_look(tmp_path, monkeypatch):
    """Rows are read if nothing is wrong with the data's settings. Parts are called if nothing is wrong at all, since
    that takes torch."""
    settings = tiny_run.settings(tmp_path)
    stubs = {
        "place_problems": places,
        "token_problems": places,
        "row_problems": places,
        "target_problem": places,
        "module_problems": modules,
        "machine_problems": machine,
        "mesh_problems": cli.checks,
    }
    found, of_training = {}, partial(cli._look, exports=True)

    def found_by(name):
        def problems(*args, **named):
            if name == "target_problem":
                return name if name in found else None
            return [cli.Problem(found[name], None, name)] if name in found else []

        return problems

    for name, room in stubs.items():
        monkeypatch.setattr(room, name, found_by(name))

    def look(look_at=of_training, known=(), **paths):
        found.clear()
        found.update(paths)
        return [problem.text for problem in look_at(cli.LaunchOptions(), settings, known)]

    assert look() == []
    assert look(row_problems="data.x") == ["row_problems"]
    assert look(cli._look_sft, row_problems="data.x") == ["row_problems"]
    names = ["place_problems", "module_problems", "machine_problems", "token_problems", "mesh_problems"]
    for name in names:
        assert look(**{name: "model.path", "row_problems": "data.x"}) == [name, "row_problems"]
        assert look(**{name: "data.path", "row_problems": "data.x"}) == [name]
        assert look(**{name: "[data]", "row_problems": "data.x"}) == [name]
    assert look(target_problem="output_dir", row_problems="data.x") == ["target_problem", "row_problems"]
    known = [cli.Problem("seed", 1, "known")]
    assert look(known=known, row_problems="data.x") == ["row_problems"]
    for name in ("place_problems", "module_problems", "target_problem", "machine_problems", "mesh_problems"):
        assert look(cli._look_sft, **{name: "model.path", "row_problems": "data.x"}) == [name, "row_problems"]
    assert look(cli._look_sft, token_problems="data.x") == []
    settings = files.replace(settings, {"actor.optimizer.eps": 0.0, "sft.optimizer.eps": -1.0})
    told, of_sft = (f"eps must be > 0, got {value}" for value in (0.0, -1.0))
    assert look() == [told, of_sft]
    assert look(cli._look_sft) == [of_sft]
    assert look(place_problems="data.path") == look(cli._look_sft, place_problems="data.path") == ["place_problems"]
    assert look(row_problems="data.x") == ["row_problems"]


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


def test_a_tried_response_is_the_ground_truth_or_nothing_and_ends():
    shown = check.shown_prompts(INPUTS, 4)
    first, shortest = shown[0], shown[1]
    common = {"source": "s", "finish": "stop"}
    assert check._sample(first, check.TRUTH, INPUTS) == Sample(
        **common,
        prompt="10 11 12",
        response="a",
        ground_truth="a",
        extras={"row": 0},
        prompt_tokens=(10, 11, 12),
        response_tokens=(1, 1),
    )
    empty = check._sample(shortest, check.EMPTY, INPUTS)
    assert (empty.response, empty.response_tokens) == ("", (1,))
    assert (empty.ground_truth, empty.extras) == ({"x": 1}, {"row": 2})
    assert check._sample(shortest, check.TRUTH, INPUTS).response == '{"x": 1}'


def test_a_tried_response_stands_behind_the_prompt_that_rewards_see():
    """That has no special tokens; without stop tokens it has those of its words alone."""
    tokenizer = character_tokenizer()
    prompts = prompt_set([[tokenizer.eos_token_id, *tokenizer.encode("1+2=")]], pad_token_id=0, ground_truths=["3"])
    inputs = SimpleNamespace(prompts=prompts, tokenizer=tokenizer, sampling=SimpleNamespace(stop_token_ids=()))
    sample = check._sample(check.shown_prompts(inputs, 1)[0], check.TRUTH, inputs)
    assert (sample.prompt, sample.prompt_tokens) == ("1+2=", prompts.tokens[0])
    assert sample.response_tokens == tuple(tokenizer.encode("3"))


class Runner:
    """Scores each response by its length, and fails on that of one prompt."""

    def __init__(self, terms, *, workers, time_limit, batch_limit):
        self.made = (terms, workers, time_limit, batch_limit)
        self.terms = [SimpleNamespace(name="own", kind="sample"), SimpleNamespace(name="all", kind="tensor")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self, samples):
        self.samples = samples
        scores = {"own": [float(len(x.response)) for x in samples]}
        failed = SimpleNamespace(term="own", number=1, text="it broke")
        return SimpleNamespace(scores=scores, failures=[failed])


def test_rewards_of_shown_prompts_are_of_both_responses(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(check, "RewardRunner", lambda *args, **named: made.append(Runner(*args, **named)) or made[-1])
    monkeypatch.setattr(check, "reward_of", lambda section, terms, *, max_tokens: ("terms", max_tokens))
    section = tiny_run.settings(tmp_path, reward__time_limit=3.0, reward__batch_time_limit=7.0).reward
    shown = check.shown_prompts(INPUTS, 4)  # of which the last has no truth
    found = check.rewarded_prompts(section, shown, INPUTS, 11)
    assert made[0].made == (("terms", 11), 1, 3.0, 7.0)
    assert [(x.prompt, x.response) for x in made[0].samples] == [
        *(("10 11 12", "a"), ("10 11 12", "")),
        *(("10 11", '{"x": 1}'), ("10 11", "")),
        *((words(range(10, 19)), "d"), (words(range(10, 19)), ""), (words(range(10, 15)), "")),
    ]
    truth, empty = check.TRUTH, check.EMPTY
    assert found.scores == [
        {truth: {"own": 1.0}, empty: {"own": None}},
        {truth: {"own": 8.0}, empty: {"own": 0.0}},
        {truth: {"own": 1.0}, empty: {"own": 0.0}},
        {empty: {"own": 0.0}},
    ]
    assert found.failures == [f"own failed on {empty} of {shown[0].id}: it broke"]
    assert found.uncalled == ["all"]
    judged = attrs.evolve(section, model=attrs.evolve(section.model, path="m"), functions=())
    assert check.rewarded_prompts(judged, shown, INPUTS, 11) == Rewarded(scores=[{}] * 4, uncalled=["reward.model"])
    assert check.rewarded_prompts(section, [], INPUTS, 11) == Rewarded(scores=[], uncalled=[])


def test_lines_of_rewards_say_what_failed_and_what_makes_no_difference():
    truth, empty = check.TRUTH, check.EMPTY
    scores = [
        {truth: {"a": 1.0, "b": 0.5}, empty: {"a": 0.0, "b": 0.5}},
        {truth: {"a": 1.0, "b": 0.0}, empty: {"a": 1.0, "b": 0.0}},
        {empty: {"a": 0.0, "b": 0.0}},
    ]
    found = check._reward_lines(Rewarded(scores=scores, failures=["a failed"], uncalled=["m", "n"], seconds=1.5))
    assert found == [
        "rewards   10 calls in 1.5 s, with the start of a worker",
        "  a failed",
        "  not called here: m, n",
        "  b: the ground truth scores as nothing does, if that is meant",
    ]
    assert check._reward_lines(Rewarded(scores=[])) == []
    faults = check._faults(
        None, 0.0, Rewarded(scores=[], failures=[f"x failed on {truth} of p", f"x failed on {empty} of p"])
    )
    assert faults == [f"x failed on {truth} of p"]


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
    assert plan.gpu_of(torch.device("cuda", 1)) == kind
    assert plan.gpu_of(torch.device("cpu")) == "cpu"


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
    flags = {command: completion.flags_of(command) for command in cli.COMMANDS}
    for command, own in flags.items():
        assert list(own)[-2:] == ["--help", "--traceback"]
        assert {name: own[name] for name in ("--help", "--traceback")} == {"--help": (), "--traceback": ()}
        launched = command in ("quickstart", "train", "sft", "rollout", "eval", "compare")
        assert ("--max-restarts" in own) == launched
        assert ("--nproc" in own) == (launched or command in ("check", "replay"))
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
    lines = completion.script("fish", ["train", "diff"]).splitlines()
    assert lines[1] == "complete -c fppo -n __fish_use_subcommand -f -a 'train diff'"
    assert lines[2:5] == [
        "complete -c fppo -n __fish_use_subcommand -l help",
        "complete -c fppo -n __fish_use_subcommand -l version",
        "complete -c fppo -n '__fppo_runs completion' -f -a 'bash zsh fish'",
    ]
    assert lines[-2:] == [f"complete -c fppo -n '__fppo_runs diff' -l {x}" for x in ("help", "traceback")]
    engine = next(line for line in lines if line.endswith("'embedded vllm'"))
    assert engine == "complete -c fppo -n '__fppo_runs train' -l rollout.engine -x -a 'embedded vllm'"
    assert len(lines) == 5 + len(completion.flags_of("train")) + len(completion.flags_of("diff"))
    zsh = completion.script("zsh", ["train"]).splitlines()
    assert zsh[0] == "autoload -Uz compinit bashcompinit && compinit && bashcompinit"
    assert "\n".join(zsh[1:]) == completion.script("bash", ["train"])


def test_help_is_asked_for_by_either_flag_and_of_the_sections_behind_it():
    assert helps.help_sections(["run.toml", "--steps", "3"]) is None
    assert helps.help_sections(["a.toml", "--help"]) == []
    assert helps.help_sections(["a.toml", "-h", "rollout.vllm", "--steps", "actor-x"]) == ["rollout.vllm", "actor_x"]
    assert [helps.wanted(words) for words in (["--help"], ["a", "-h"], ["a", "help"])] == [True, True, False]


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


def test_an_interrupt_is_one_line_with_the_commands_name(monkeypatch, capfd):
    monkeypatch.setattr(start.sys, "argv", ["fppo", "train", "x.toml"])
    start._say()
    monkeypatch.setattr(start.sys, "argv", ["fppo", "--help"])
    start._say()
    assert capfd.readouterr().err == "fppo train: interrupted\nfppo: interrupted\n"


def test_a_command_alone_is_on_no_mesh():
    assert (actions.ALONE.mesh, actions.ALONE.device, actions.ALONE.watch, actions.ALONE.sampling) == (
        LOCAL,
        None,
        None,
        None,
    )
    assert re.fullmatch(r"usage: fppo COMMAND .*", cli.usage().splitlines()[0])


# fppo replay


@pytest.mark.parametrize(("differs", "status"), [(None, 0), (4, 1)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replay_goes_on_from_span_to_span_to_the_first_difference(
    monkeypatch, tmp_path, capsys, differs, status, rank
):
    """The spans' steps are computed by their own settings, from the state after the span before."""
    calls = []
    one, two = (SimpleNamespace(name=name, model=ModelSettings()) for name in ("one", "two"))

    def replayed(run, **how):
        calls.append((run.step, how))
        for step in range(run.step + 1, how["until"] + 1):
            difference = Difference(step, (DifferingLeaf("result", "w"),)) if step == differs else None
            yield SimpleNamespace(step=step), difference

    @contextlib.contextmanager
    def again(settings, made_by, here):
        assert made_by == "maker"
        yield SimpleNamespace(shapes=f"shapes {settings.name}", device="device"), f"begin {settings.name}"

    monkeypatch.setattr(actions.session, "recorded", lambda directory: {3: "c", 5: "e"})
    monkeypatch.setattr(actions.session, "say_misnamed", lambda directory, mesh: calls.append((directory, mesh)))
    monkeypatch.setattr(actions.session, "of_state", lambda assembly: f"state {assembly.shapes}")
    monkeypatch.setattr(actions, "beginning", lambda directory, step: step - 3)
    monkeypatch.setattr(actions, "restored", lambda assembly, directory, begin: SimpleNamespace(step=begin))
    monkeypatch.setattr(actions.starts, "spans", lambda directory, a, b: {(3, 5): [(one, 3), (two, 5)]}[a, b])
    monkeypatch.setattr(actions, "match_ground", lambda directory, until: [f"as up to {until}"])
    monkeypatch.setattr(actions.starts, "made_by", lambda directory: "maker")
    monkeypatch.setattr(actions, "_steps_again", again)
    monkeypatch.setattr(actions.replays, "replay", replayed)
    here = SimpleNamespace(mesh=Mesh({"shard": Axis(2, rank)}))
    assert actions.replay(tmp_path, 5, here) == status
    how = {"recorded": {3: "c", 5: "e"}, "mesh": here.mesh, "device": "device"}
    assert calls == [
        (tmp_path / "checkpoints", here.mesh),
        *(
            (
                begin,
                {"begin": f"begin {x}", "until": end, "shapes": f"shapes {x}", "of_state": f"state shapes {x}"} | how,
            )
            for x, begin, end in (("one", 2, 3), ("two", 3, 5))
        ),
    ]
    equal = "step {}: equal, bit for bit\n".format
    plain = "step 4: no digests were recorded\n" + equal(5)
    said = "from the checkpoint of step 2\nas up to 3\n" + equal(3) + "as up to 5\n"
    said += plain if differs is None else "step 4: result differs first in w\n"
    assert capsys.readouterr().out == ("" if rank else said)


@pytest.mark.parametrize("best", [None, "mesh"])
def test_a_search_is_for_the_sequences_of_an_update(tmp_path, monkeypatch, best):
    calls = []
    monkeypatch.setattr(plan, "budgeted", lambda settings, options: "case")
    monkeypatch.setattr(plan, "search", lambda *given: calls.append(given) or SimpleNamespace(best=best))
    monkeypatch.setattr(plan.text, "of_search", lambda found: [])
    monkeypatch.setattr(plan.text, "numbers_of_search", lambda found: {})
    settings = tiny_run.settings(tmp_path, rollout__batch_size=8, actor__mini_batch_size=4)
    options = SimpleNamespace(search=16, json=None, gpu="h200")
    assert plan.run(settings, options) == (0 if best else 1)
    assert calls == [("case", 16, 4)]
