"""Lines, rows and requests of a run, whole: each number under its own name, and each setting where it is read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import fppo
from fppo import metrics
from fppo.assembly.run import DrawnPrompts
from fppo.batch import Column, RowInputs
from fppo.fleet import Call
from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.pipeline.timing import StageSpan
from fppo.pipeline.train import StepRecord
from fppo.pipeline.truth import Beside
from fppo.runs import (
    evaluations,
    loggers,
    observers,
    resuming,
    sample_files,
    samples,
    sampling,
    serving,
    session,
    starts,
)
from fppo.runs.jsonl import JsonLines
from fppo.runtime import checkpoint
from fppo.runtime.mesh import Axis, Mesh
from fppo.steps.clock import Clock
from fppo.steps.train_state import TrainState
from tests import tiny, tiny_run

simple = types.SimpleNamespace


# the console

LABELS = {
    "reward": (["critic/score/mean", "critic/rewards/mean"], "1234.500"),
    "loss": (["supervised/nll_loss"], "1234.5000"),
    "kl": (["actor/reward_kl_penalty", "actor/ppo_kl"], "1234.5000"),
    "entropy": (["actor/entropy"], "1234.500"),
    "clip": (["actor/pg_clipfrac"], "123450.0%"),
    "vf loss": (["critic/vf_loss"], "1234.5000"),
    "length": (["response_length/mean"], "1234.5"),
    "turns": (["rollout/turns/mean"], "1234.5"),
    "tok/s": (["perf/throughput"], "1,234"),
    "no score": (["reward/errors", "reward/timeouts", "reward/judge_unparsed"], "1234"),
    "tool failed": (["rollout/tool_failures"], "1234"),
    "actor skipped": (["actor/skipped"], "123450%"),
    "critic skipped": (["critic/skipped"], "123450%"),
    "skipped": (["supervised/skipped"], "123450%"),
    "logs failed": (["log/failures"], "1234"),
    "logs dropped": (["log/dropped"], "1234"),
}


@pytest.mark.parametrize("label", LABELS)
def test_a_number_of_the_console_is_that_of_its_metric(label):
    names, text = LABELS[label]
    for name in names:
        assert loggers.summary({name: 1234.5, "another": 3.0}) == [(label, text)]
    failed = label in [name for name, _, _ in loggers.FAILURES]
    both = loggers.summary({name: 10.0**i for i, name in enumerate(names)})
    assert both == loggers.summary({names[0]: float("1" * len(names)) if failed else 1.0})  # a sum, or the first
    none = loggers.summary(dict.fromkeys(names, 0.0))
    assert (none == []) == failed
    assert [shown for shown, _ in loggers.summary({name: 1.0 for names, _ in LABELS.values() for name in names})] == [
        *LABELS
    ]


def test_what_matters_least_leaves_a_full_line_first():
    shown = [(label, "1") for label in LABELS]
    order = ["vf loss", "entropy", "tok/s", "clip", "length", "turns", "kl", "logs dropped", "logs failed", "skipped"]
    order += ["critic skipped", "actor skipped", "tool failed", "no score", "loss"]
    width = sum(len(label) + 4 for label, _ in shown)
    assert loggers.fitting(shown, width) == shown
    for count, label in enumerate(order):
        kept = loggers.fitting(shown, width - 1)
        assert kept == [pair for pair in shown if pair[0] not in order[: count + 1]]
        width = sum(len(name) + 4 for name, _ in kept)
        assert label not in dict(kept)
    assert loggers.fitting(shown[:1], 0) == shown[:1]
    assert loggers.fitting(shown[:2], 30, least=20) == shown[:1]


@pytest.mark.parametrize("first_step", [0, 5])
def test_a_bar_goes_on_where_the_run_does(monkeypatch, first_step):
    assert isinstance(loggers.console(9), loggers.PlainConsole)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    live = loggers.console(9, first_step=first_step)
    assert isinstance(live, loggers.LiveConsole)
    (task,) = live._progress.tasks
    assert (task.total, task.completed) == (9, max(first_step - 1, 0))
    live.log(6, {"critic/score/mean": 0.5})
    assert task.completed == 6
    assert task.fields["left"].endswith(" left")
    live.close()


def test_tables_are_of_the_first_step_and_of_every_nth(monkeypatch):
    asked = []
    monkeypatch.setattr(
        samples, "shown", lambda rows, tokenizer, step: asked.append((len(rows.tokens), tokenizer, step)) or ["row"]
    )
    tables = loggers.Tables(rows=2, every=3, tokenizer="tokenizer")
    made = {}
    for step in range(1, 8):
        record = StepRecord(run=simple(step=step), experience=tiny.experience(0, 5), metrics={})
        made[step] = tables.of(record)
    assert [step for step, rows in made.items() if rows is not None] == [1, 3, 6]
    for _ in range(2):
        assert made[3]() == ["row"]
    assert asked == [(2, "tokenizer", 3)]  # once, for all trackers
    record = StepRecord(run=simple(step=1), experience=tiny.experience(0, 5), metrics={})
    assert attrs.evolve(tables, rows=0).of(record) is None
    assert tables.of(attrs.evolve(record, experience=None)) is None


# traces, rows, evaluations


def test_times_of_a_step_are_seconds_since_1970():
    """By the clock that was 0 when the process began."""
    call = Call("a", "update", 3.0, 0.5, ((3.1, 0.25), (3.2, 0.125)), 70, 8)
    spans = (StageSpan("gen", 1.0, 0.5), StageSpan("step", 0.5, 4.0))
    record = StepRecord(run=simple(step=6), experience=None, metrics={}, spans=spans)
    assert observers.line(record, [call], 1000.0) == {
        "step": 6,
        "spans": [["gen", 1001.0, 0.5], ["step", 1000.5, 4.0]],
        "calls": [
            {
                "group": "a",
                "label": "update",
                "start": 1003.0,
                "seconds": 0.5,
                "there": 70,
                "back": 8,
                "ranks": [[1003.1, 0.25], [1003.2, 0.125]],
            }
        ],
    }


def test_a_tracer_writes_the_calls_since_the_step_before(tmp_path, monkeypatch):
    monkeypatch.setattr(observers.time, "time", lambda: 500.0)
    monkeypatch.setattr(observers.time, "perf_counter", lambda: 20.0)
    calls = [[Call("a", "x", 1.0, 0.5, (), 1, 2)], []]
    tracer = observers.Tracer(tmp_path / "t.jsonl", lambda: calls.pop(0))
    for step in (1, 2):
        tracer(StepRecord(run=simple(step=step), experience=None, metrics={}, spans=(StageSpan("gen", 4.0, 1.0),)))
    tracer.close()
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [(line["step"], line["spans"], [x["start"] for x in line["calls"]]) for line in lines] == [
        (1, [["gen", 484.0, 1.0]], [481.0]),
        (2, [["gen", 484.0, 1.0]], []),
    ]


def test_profiles_of_several_ranks_have_names_of_their_own(tmp_path):
    alone = observers.Profiles(directory=tmp_path, steps=(2,))
    assert alone._path(12) == tmp_path / "profiles" / "step_00000012.json.gz"
    mesh = Mesh({"shard": Axis(2, 1)})
    assert attrs.evolve(alone, mesh=mesh)._path(2).name == "step_00000002_rank_1.json.gz"
    alone.begin(1)
    assert alone.running == []
    record = StepRecord(run=simple(step=1), experience=None, metrics={})
    assert alone(record) == {}  # the next is the step
    assert len(alone.running) == 1
    (profiler, _), *_ = alone.stop()
    assert alone.running == []
    assert profiler is not None


class Letters:
    """A tokenizer of letters, in which 0 is special."""

    def decode(self, ids, skip_special_tokens=False, **_):
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        return "".join(chr(96 + i) if i else "" if skip_special_tokens else "<0>" for i in ids)

    def batch_decode(self, rows, **how):
        return [self.decode(ids, **how) for ids in rows]


def scored():
    """Two rows, padded on both sides, with a hole in the mask."""
    rows = tiny.experience(0, 2, prompt=3, response=3)
    mask = torch.tensor([[False, True, True, True, True, True], [True, True, True, True, False, False]])
    return attrs.evolve(
        rows,
        tokens=torch.tensor([[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 0, 0]]),
        attention_mask=mask,
        response_mask=torch.tensor([[True, False, True], [True, False, False]]),
        scores=torch.tensor([0.5, float("nan")]),
        named_scores={"a": torch.tensor([1.0, 0.25])},
        ids=Column(["x", 7]),
        source=Column(["s", "t"]),
        ground_truth=Column(["9", {"k": 1}]),
        finish=Column(["stop", "length"]),
    )


ROWS = [
    {"prompt": "ab", "response": "cd", "score": 0.5, "ground_truth": "9", "finish": "stop"},
    {"prompt": "efg", "response": "h", "score": None, "ground_truth": {"k": 1}, "finish": "length"},
]


def test_rows_of_an_evaluation_and_of_trackers_have_their_own_texts_and_scores():
    named = [{"a": 1.0}, {"a": 0.25}]
    more = [{"id": "x", "source": "s"}, {"id": 7, "source": "t"}]
    assert samples.scored_lines(scored(), Letters(), 4) == [
        {"step": 4, **row, **own, "named_scores": each} for row, own, each in zip(ROWS, more, named, strict=True)
    ]
    shown = samples.shown(scored(), Letters(), 4)
    assert shown == [
        {**row, "score.a": each["a"], "ground_truth": truth}
        for row, each, truth in zip(ROWS, named, ["9", '{"k": 1}'], strict=True)
    ]
    assert list(shown[0]) == ["prompt", "response", "score", "score.a", "ground_truth", "finish"]


def test_a_table_has_each_responses_own_numbers_texts_and_tokens():
    rows = attrs.evolve(
        scored(),
        row_ids=torch.tensor([7, 3]),
        groups=torch.tensor([5, 5]),
        episodes=torch.tensor([2, 1]),
        versions=torch.tensor([8, 9]),
        advantages=torch.tensor([[1.0, 2.0, 1e9], [3.0, 4.0, 5.0]]),
    )
    found = samples.table_of(rows, Letters(), 4).to_pylist()
    texts = [{name: x for name, x in row.items() if name not in ("score", "ground_truth")} for row in ROWS]
    numbers = [
        {"row_id": 7, "episode": 2, "version": 8, "id": "x", "source": "s", "length": 2, "score": 0.5, "score.a": 1.0},
        {"row_id": 3, "episode": 1, "version": 9, "id": "7", "source": "t", "length": 1, "score": None},
    ]
    numbers[0]["response"], numbers[1]["score.a"] = "cd<0>", 0.25
    lists = [
        {"tokens": [3, 4, 0], "pieces": ["c", "d", "<0>"], "mask": [True, False, True], "advantages": [1.0, 2.0, 1e9]},
        {"tokens": [8], "pieces": ["h"], "mask": [True], "advantages": [3.0]},
    ]
    for row, *parts, truth in zip(found, texts, numbers, lists, ["9", '{"k": 1}'], strict=True):
        expected = {"step": 4, "group": 5, "ground_truth": truth} | parts[0] | parts[1] | parts[2]
        assert {name: row[name] for name in expected} == expected
    more = {name for name in samples.LISTS if getattr(rows, name) is not None}
    assert set(found[0]) == {*expected, *more}
    assert "episode" not in samples.table_of(attrs.evolve(rows, episodes=None), Letters(), 4).column_names


def test_no_rows_are_written_where_none_are_counted(tmp_path):
    written = sample_files.SampleFiles(tmp_path / "samples", Letters(), count=0, most_bytes=1e9)
    written(StepRecord(run=simple(step=1), experience=scored(), metrics={}))
    written.close()
    assert list((tmp_path / "samples").iterdir()) == []


@pytest.mark.parametrize(("stop", "done"), [(None, 4), (3, 3), (1, 1)])
@pytest.mark.parametrize("rank", [0, 1])
def test_batches_are_sampled_in_turn_until_a_request_to_stop(tmp_path, monkeypatch, capsys, stop, done, rank):
    """Each is numbered from 1 where it is written, goes on from the prompts before, and has a line of the console."""
    calls, written, requests = [], [], []

    def sample(run, *, program, draw):
        calls.append((run.step, run.cursor, program, draw))
        if len(calls) == stop:
            requests.append(0.0)
        return scored(), run.cursor + 5, {}

    monkeypatch.setattr(sampling, "sample", sample)
    monkeypatch.setattr(sampling, "replace", lambda run, **changes: simple(**vars(run) | changes))
    monkeypatch.setattr(sampling.saved, "write", lambda rows, directory, step: written.append((directory, step)))
    monkeypatch.setattr(sampling.metrics, "report", lambda report: {"critic/score/mean": 0.25})
    monkeypatch.setattr(sampling, "any_rank", lambda wanted, mesh, device: wanted)
    monkeypatch.setattr(sampling, "device_of", lambda params: None)
    monkeypatch.setattr(session, "at", lambda settings, made: simple(step=9, cursor=7, actor=simple(params={})))
    monkeypatch.setattr(session, "stop_requests", lambda announce: contextlib.nullcontext(requests))
    clock = iter(float(2 * i) for i in range(100))
    monkeypatch.setattr(sampling, "now", lambda: next(clock))
    made = simple(
        mesh=Mesh({"shard": Axis(2, rank)}), program="program", draw="draw", inputs=simple(tokenizer=Letters())
    )
    settings = tiny_run.settings(tmp_path)
    assert settings.steps == 4
    assert sampling.run_sampling(settings, made) == done
    assert calls == [(i, 7 + 5 * i, "program", "draw") for i in range(done)]
    directory = tmp_path / "run" / "rollouts"
    numbers = [] if rank else [*range(1, done + 1)]
    assert written == [(directory, number) for number in numbers]
    assert directory.exists() is not bool(rank)
    if not rank:
        lines = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
        assert [(line["step"], line["id"]) for line in lines] == [(i, name) for i in numbers for name in ("x", 7)]
        assert (directory / session.SETTINGS).exists()
    said = capsys.readouterr().out
    assert said == "".join(f"batch {i}/4  score 0.250  length 1.5  tok/s 2\n" for i in numbers)


def test_sampling_does_not_write_over_rollouts(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling.saved, "steps", lambda directory: [3])
    monkeypatch.setattr(session, "at", None)
    with pytest.raises(ValueError, match="rollouts holds rollouts already"):
        sampling.run_sampling(tiny_run.settings(tmp_path), simple(mesh=session.LOCAL))


def test_responses_beside_the_truth_have_the_numbers_of_their_tokens():
    numbers = [torch.arange(6.0).view(2, 3) + 10 * i + 1 / 3 for i in range(4)]
    found = samples.truth_lines(Beside(scored(), *numbers), Letters(), 5)
    names = ("values", "exact_values", "advantages", "exact_advantages")
    third = round(1 / 3, 6)
    assert [{k: x for k, x in line.items() if k not in names} for line in found] == [
        {"step": 5, "id": "x", "prompt": "ab", "tokens": ["c", "<0>"]},
        {"step": 5, "id": 7, "prompt": "efg", "tokens": ["h"]},
    ]
    for i, name in enumerate(names):
        expected = [[10 * i + 0 + third, 10 * i + 2 + third], [10 * i + 3 + third]]
        assert [line[name] for line in found] == [[pytest.approx(x, abs=2e-6) for x in row] for row in expected]


def test_a_run_of_placeholders_is_one_and_what_looks_alike_stays():
    places, videos = torch.tensor([1, 2]), torch.tensor([4, 5, 6])
    inputs = RowInputs({}, places, torch.zeros(0, 1, 1, 3, dtype=torch.uint8), video_places=videos)
    assert samples._marked_once([9, 5, 5, 1, 6, 6, 6, 5, 5], inputs) == [9, 5, 1, 6, 5, 5]
    assert samples._marked_once([5, 5], None) == [5, 5]


def test_an_evaluation_is_written_by_the_first_rank_in_place_of_the_one_before(tmp_path):
    beside = Beside(scored(), *[torch.zeros(2, 3) for _ in range(4)])

    def evaluate(run, keep, keep_beside):
        keep([scored(), scored()])
        keep_beside(beside)
        return {"x": metrics.mean(torch.tensor(1.0))}

    run = simple(step=6)
    for mesh, written in ((Mesh({"shard": Axis(2, 1)}), False), (Mesh({"shard": Axis(2, 0)}), True)):
        kept = evaluations.kept(
            evaluate, lambda step: tmp_path / f"e{step}.jsonl", Letters(), mesh, truth=tmp_path / "t"
        )
        assert list(kept(run)) == ["x"]
        assert (tmp_path / "e6.jsonl").exists() == (tmp_path / "t" / "step_00000006.jsonl").exists() == written
    lines = [json.loads(line) for line in (tmp_path / "e6.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(6, "ab"), (6, "efg")] * 2
    (tmp_path / "e6.jsonl").write_text("old\n" * 99)
    kept(run)
    assert len((tmp_path / "e6.jsonl").read_text().splitlines()) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e6.jsonl", "t"]
    truth = json.loads((tmp_path / "t" / "step_00000006.jsonl").read_text().splitlines()[0])
    assert (truth["step"], truth["tokens"]) == (6, ["c", "<0>"])
    evaluations.kept(evaluate, lambda step: tmp_path / f"e{step}.jsonl", Letters(), mesh)(simple(step=7))
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["step_00000006.jsonl"]


def test_numbers_of_an_evaluation_are_sorted_and_its_files_counted(tmp_path):
    evaluations.write_numbers({"b": metrics.mean(3.0, 4), "a": metrics.total(2)}, tmp_path / "n.json")
    assert (tmp_path / "n.json").read_text() == '{\n "a": 2.0,\n "b": 0.75\n}\n'
    places = []
    for _ in range(2):
        places.append(evaluations.new_place(tmp_path, 5))
        places[-1].parent.mkdir(exist_ok=True)
        places[-1].touch()
    assert [place.name for place in places] == ["step_00000005_eval_1.jsonl", "step_00000005_eval_2.jsonl"]
    assert places[0].parent == tmp_path / "evaluations"


def test_a_run_is_evaluated_when_its_settings_say(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(evaluations, "kept", lambda *args, **named: taken.append((args, named)) or "evaluate")
    made = simple(evaluate="own", inputs=simple(tokenizer="tokenizer"), mesh="mesh")
    settings = tiny_run.settings(tmp_path, eval__every=3, eval__before=False)
    found = evaluations.in_training(settings, made)
    assert (found.evaluate, found.every, found.before) == ("evaluate", 3, False)
    ((evaluate, place, tokenizer, mesh), named) = taken[0]
    assert (evaluate, tokenizer, mesh) == ("own", "tokenizer", "mesh")
    assert place(4) == tmp_path / "run" / "evaluations" / "step_00000004.jsonl"
    assert named == {"truth": tmp_path / "run" / "truth"}
    assert evaluations.in_training(settings, simple(evaluate=None)) is None


def test_a_record_that_is_opened_knows_its_last_settings(tmp_path):
    (tmp_path / "run").mkdir()
    for start, seed in ((0, 3), (2, 8)):
        starts.record(tiny_run.settings(tmp_path, seed=seed), start)
    log = JsonLines(tmp_path / "run" / "metrics.jsonl")
    log.write({"step": 1, "a": 1.0}, {"step": 1, "b": 2.0}, {"step": 2, "a": 3.0})
    log.close()
    run = fppo.open(tmp_path / "run")
    assert run.settings["seed"] == 8
    assert run.settings["actor.optimizer.lr"] == 1e-3
    frame = run.metrics()
    assert (frame.loc[1, "a"], frame.loc[1, "b"], frame.loc[2, "a"]) == (1.0, 2.0, 3.0)
    assert (run.sampled, run.arrow().num_rows, run.samples().shape) == ((), 0, (0, 0))
    with pytest.raises(ValueError, match="rows of step 1 are not kept; none is"):
        run.samples(1)


def test_a_run_that_went_on_from_another_one_says_so_after_each_start(tmp_path):
    """Also where its first step is begun again with other settings, by its own command."""
    (tmp_path / "run").mkdir()
    other = str(tmp_path / "other")
    for resume, seed, step in ((other, 3, 4), ("auto", 8, 4), ("auto", 9, 6), ("auto", 9, 5)):
        starts.record(tiny_run.settings(tmp_path, resume=resume, seed=seed), step)
        assert (starts.source(tmp_path / "run"), starts.first(tmp_path / "run")) == (other, 4)
        made = {"auto": [8, 9][step > 4], other: 3}[resume]
        assert starts.load(tmp_path / "run", step + 1).seed == made


# resuming


def prompts(may_change, made_by=None, **sets):
    return DrawnPrompts(sets=sets, may_change=may_change, digests_of=lambda x: {"as tokens": x}, made_by=made_by)


@pytest.mark.parametrize("may_change", [False, True])
@pytest.mark.parametrize("speaks", [False, True])
def test_prompts_that_a_checkpoint_noted_may_change_if_a_setting_says(monkeypatch, capsys, may_change, speaks):
    noted = {"prompts, as tokens": "a", "held-out prompts, as tokens": "b"}
    monkeypatch.setattr(resuming.checkpoint, "notes_of", lambda path: noted)
    path = Path("x/step_00000003")

    def check(**sets):
        resuming.check_prompts(prompts(may_change, **sets), path, speaks=speaks)
        return capsys.readouterr().err

    held_out = {"held-out prompts": "c"}
    own = DrawnPrompts(sets={"prompts": "a", **held_out}, may_change=may_change, digests_of=lambda x: {"as tokens": x})
    resuming.check_prompts(own, path, speaks=speaks)
    said = "going on with other data than step_00000003 was made with: the held-out prompts as tokens\n"
    assert capsys.readouterr().err == (said if speaks else "")
    assert check(prompts="a") == ""
    if may_change:
        assert check(prompts="z") == (said.replace("held-out prompts", "prompts") if speaks else "")
    else:
        with pytest.raises(
            ValueError, match="the prompts as tokens differ from those that x/step_00000003 was made with"
        ):
            check(prompts="z")
    noted.clear()
    assert check(prompts="z") == ""  # a checkpoint of an earlier version


@pytest.mark.parametrize(("before", "now"), [(None, "fppo sft"), ("fppo sft", None)])
def test_a_command_goes_on_from_its_own_checkpoints_alone(monkeypatch, before, now):
    monkeypatch.setattr(
        resuming.checkpoint, "notes_of", lambda path: {} if before is None else {resuming.MADE_BY: before}
    )
    words = f"was made by {before or 'fppo train'}, and {now or 'fppo train'} does not go on from it"
    with pytest.raises(ValueError, match=words):
        resuming.check_prompts(prompts(True, now, prompts="a"), Path("x"), speaks=False)
    resuming.check_prompts(prompts(True, before, prompts="a"), Path("x"), speaks=False)


@pytest.mark.parametrize("saved", [(), ("actor",), ("critic",), ("actor", "critic")])
def test_clocks_are_those_that_the_checkpoint_has(tmp_path, saved):
    def state(clock):
        return TrainState(params={"w": torch.ones(1)}, opt=None, step=0, clock=clock)

    def run(*roles):
        actor, critic = (state(Clock(first=2) if role in roles else None) for role in ("actor", "critic"))
        return RunState(actor=actor, critic=critic, key=Key(0), step=3)

    checkpoint.begin_save(run(*saved), tmp_path, 3).wait()
    found = resuming.with_saved_clocks(run("actor", "critic"), tmp_path, 3)
    assert [found.actor.clock is not None, found.critic.clock is not None] == ["actor" in saved, "critic" in saved]
    alone = resuming.with_saved_clocks(attrs.evolve(run("actor"), critic=None), tmp_path, 3)
    assert alone.critic is None
    assert (resuming.with_saved_clocks(run("actor"), tmp_path, 3).critic.clock) is None


# sessions


@pytest.fixture
def stood(tmp_path, monkeypatch):
    """A run that stands at a step, whose training is noted."""
    noted = []
    here = {"step": 2}
    monkeypatch.setattr(session, "resolved", lambda settings, device: (settings, []))
    monkeypatch.setattr(session, "restore", lambda settings, made: simple(step=here["step"]))

    def trained(settings, made, run, opened, watch):
        noted.append(("trained", run.step, watch))
        return simple(step=here.get("ends", settings.steps))

    monkeypatch.setattr(session, "_trained", trained)
    return noted, here


@pytest.mark.parametrize(
    ("step", "ends", "done"),
    [(2, 4, ["trained", "end"]), (2, 3, ["trained"]), (4, 4, ["end"]), (5, 5, [])],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_is_trained_to_its_last_step_and_ended_once(tmp_path, stood, capsys, step, ends, done, rank):
    noted, here = stood
    here |= {"step": step, "ends": ends}
    made = simple(mesh=Mesh({"shard": Axis(2, rank)}), inputs=simple(device=None))
    run = session.run_training(
        tiny_run.settings(tmp_path), made, "watch", at_end=lambda run: noted.append(("end", run.step))
    )
    assert run.step == ends
    assert [name for name, *_ in noted] == done
    assert noted[:1] == [("trained", 2, "watch")] or step != 2
    said = capsys.readouterr().err
    command = f"stopped after step 3; to go on: fppo train {tmp_path / 'run' / 'settings.toml'}\n"
    assert said == (
        ""
        if rank
        else command
        if ends < 4
        else "steps = 4: step 5 is done, and nothing is changed\n"
        if ends > 4
        else ""
    )


def test_saved_rollouts_do_not_mix_with_sampled_ones(tmp_path, stood):
    made = simple(mesh=session.LOCAL, inputs=simple(device=None))
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "rollouts" / "settings.toml").touch()
    with pytest.raises(ValueError, match="holds files of fppo rollout; give another output_dir"):
        session.run_training(tiny_run.settings(tmp_path, rollout__save=True), made)
    session.run_training(tiny_run.settings(tmp_path), made)


def test_a_second_request_to_stop_interrupts_and_a_burst_is_one(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGTERM)
    with session.stop_requests(announce="stopping") as asked:
        assert not asked
        for at in (10.0, 10.5, 11.0):
            now[0] = at
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked == [10.0, 10.5, 11.0]
        now[0] = 11.1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err == "\nstopping\n"


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_digests_are_as_far_apart_as_the_work_of_a_step_says(tmp_path, monkeypatch, supervised, placed):
    asked = []
    monkeypatch.setattr(session.digests, "spacing", lambda state, **how: asked.append((state, how)) or 5)
    made = simple(
        placed=simple(like=lambda run: f"like {run}") if placed else None,
        model=simple(whole_shapes={"a": torch.Size((2, 3)), "b": torch.Size((4,))}),
        device="device",
        mesh="mesh",
        shapes="shapes",
    )
    monkeypatch.setattr(session, "SupervisedAssembly", types.SimpleNamespace if supervised else type("Other", (), {}))
    settings = tiny_run.settings(
        tmp_path,
        rollout__batch_size=8,
        rollout__max_tokens=3,
        data__max_prompt_tokens=8,
        sft__batch_size=6,
        sft__max_tokens=9,
    )
    assert (
        session.digest_spacing(attrs.evolve(settings, digest=attrs.evolve(settings.digest, every=7)), made, "run") == 7
    )
    assert (
        session.digest_spacing(attrs.evolve(settings, digest=attrs.evolve(settings.digest, every="auto")), made, "run")
        == 5
    )
    tokens = 6 * (9 // 2) if supervised else 8 * ((8 + 3) // 2)
    expected = {"tokens": tokens, "numbers": 10, "device": "device", "mesh": "mesh", "shapes": "shapes"}
    assert asked == [(["run", "like run"] if placed else "run", expected)]


def test_another_process_in_the_directory_is_named_before_anything_is_loaded(tmp_path):
    settings = tiny_run.settings(tmp_path)
    session.check_alone(settings)  # there is no directory yet
    (tmp_path / "run").mkdir()
    session.check_alone(settings)
    words = f"another process is writing to {tmp_path / 'run'}"
    with session.alone_in(tmp_path / "run"), pytest.raises(ValueError, match=words):
        session.check_alone(settings)
    session.check_alone(settings)


@pytest.mark.parametrize(
    ("every", "kept_every", "first", "asked", "said"),
    [
        (1, 2, 1, {"metrics.jsonl": 1, "digests.jsonl": 1}, ""),
        (3, 2, 1, {"metrics.jsonl": 1, "digests.jsonl": 3}, "digests of the state: every 3 steps and at checkpoints"),
        (0, 2, 4, {"metrics.jsonl": 1, "digests.jsonl": 2}, "digests of the state: only at checkpoints"),
    ],
)
def test_a_start_is_recorded_with_what_is_other_and_what_is_missing(
    tmp_path, monkeypatch, capsys, every, kept_every, first, asked, said
):
    done = []
    monkeypatch.setattr(session.starts, "record", lambda settings, step: {"seed": (1, 2), "steps": (3, 4)})
    monkeypatch.setattr(session.origins, "record", lambda settings, step: ["torch 1 -> 2", "x"])
    monkeypatch.setattr(session.starts, "first", lambda directory: first - 1)
    monkeypatch.setattr(
        session.models, "save_config", lambda model, place, **how: done.append((model, place.name, how))
    )
    monkeypatch.setattr(
        session.jsonl, "gone", lambda path, a, b, *, every: done.append((path.name, a, b, every)) or ["lost"]
    )
    inputs = simple(texts="texts", generation="generation")
    made = simple(inputs=inputs, model="actor", critic_model="critic")
    settings = tiny_run.settings(tmp_path, checkpoint__every=kept_every)
    session._record_start(settings, made, 6, every)
    assert done == [
        ("actor", "actor", {"tokenizer": "texts", "generation_config": "generation"}),
        ("critic", "critic", {"tokenizer": "texts", "generation_config": None}),
        *((name, first, 6, spacing) for name, spacing in asked.items()),
    ]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "going on from step 6 with other settings: seed 1 -> 2, steps 3 -> 4",
        "going on from step 6 with other code: torch 1 -> 2; x",
    ]
    assert lines[2:] == [*([f"{said} (digest.every = {settings.digest.every!r})"] if said else []), "lost", "lost"]
    monkeypatch.setattr(session.starts, "record", lambda settings, step: {})
    monkeypatch.setattr(session.origins, "record", lambda settings, step: [])
    monkeypatch.setattr(session.jsonl, "gone", lambda *args, **_: [])
    session._record_start(settings, simple(inputs=inputs, model="actor", critic_model=None), 6, 1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("sft", "step", "expected"),
    [(False, 0, 0), (False, 3, 4), (True, 3, 4)],
)
def test_what_a_run_writes_is_opened_from_its_next_step_and_closed(tmp_path, monkeypatch, sft, step, expected):
    """In the order in which a step is written: the checkpoint after the lines of its step in every file."""
    done: list[Any] = []
    settings = tiny_run.settings(tmp_path, steps=7, checkpoint__every=3, checkpoint__keep=4, log__samples=5)
    made = simple(
        mesh=session.LOCAL,
        shapes="shapes",
        device="device",
        placed=None,
        calls=list,
        inputs=simple(observers={"own": lambda record: done.append("own")}, tokenizer="t"),
    )
    monkeypatch.setattr(session, "SupervisedAssembly", types.SimpleNamespace if sft else type("Other", (), {}))
    monkeypatch.setattr(session, "digest_spacing", lambda *_: 2)
    monkeypatch.setattr(
        session, "_record_start", lambda settings, made, step, every: done.append(("start", step, every))
    )
    monkeypatch.setattr(session.checkpoint, "steps", lambda directory: [3])
    sampled = simple(close=lambda: done.append("samples closed"), wait=lambda: done.append("rows"))
    monkeypatch.setattr(session, "_sample_files", lambda s, a, first: done.append(("samples", first)) or sampled)
    monkeypatch.setattr(
        session,
        "_logging",
        lambda s, a, first, opened: done.append(("logs", first)) or (lambda record: done.append("logged")),
    )
    begun = []
    monkeypatch.setattr(
        session,
        "_begin_save",
        lambda made, directory, keep, run: (
            begun.append((directory, keep, run)) or simple(wait=lambda: None, done=lambda: True)
        ),
    )
    with contextlib.ExitStack() as opened:
        run = simple(step=step)
        observing, digested, saved = session._writing(settings, made, run, opened, None)
        assert done == [("start", step, 2), *([] if sft else [("samples", expected)]), ("logs", expected)]
        assert (digested.every, digested.directory, saved.ranks) == (2, tmp_path / "run", 1)
        assert [kept for kept in range(1, 9) if digested.kept(kept)] == [3, 6, 7]
        assert [kept for kept in range(1, 9) if saved.kept(kept)] == [3, 6, 7]
        assert len(observing) == (5 if sft else 6)
        assert observing[0] is digested
        done.clear()
        record = StepRecord(run=simple(step=6), experience="rows", metrics={})
        observing[-1](record)
        assert done == ["logged", *([] if sft else ["rows"])]
        assert begun == [(tmp_path / "run" / "checkpoints", 4, record.run)]
        observing[-1](StepRecord(run=simple(step=8), experience="rows", metrics={}))
        assert done == ["logged", *([] if sft else ["rows"]), "logged"]
        assert len(begun) == 1
    assert ("samples closed" in done) != sft
    lines = [
        json.loads(line)["step"] for line in (tmp_path / "run" / "trace" / "rank_00000.jsonl").read_text().splitlines()
    ]
    assert lines == [6, 8]


def test_loggers_and_samples_are_opened_as_the_settings_say(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        session.loggers, "open_loggers", lambda *args, **named: asked.update(named, args=args) or ["sink"]
    )
    monkeypatch.setattr(session.loggers, "observer", lambda sinks, tables: (sinks, tables))
    changes = {
        "project": "p",
        "entity": "e",
        "group": "g",
        "table_rows": 7,
        "table_every": 9,
        "samples": 5,
        "samples_gb": 2.5,
    }
    settings = tiny_run.settings(tmp_path, **{f"log__{name}": value for name, value in changes.items()})
    made = simple(inputs=simple(loggers={"own": len}, tokenizer="tokenizer"))
    closed = []
    monkeypatch.setattr(session.loggers, "close", closed.append)
    with contextlib.ExitStack() as opened:
        sinks, tables = session._logging(settings, made, 3, opened)
    assert (sinks, closed) == (["sink"], [["sink"]])
    assert tables == loggers.Tables(rows=7, every=9, tokenizer="tokenizer")
    assert asked.pop("args") == (settings.log.loggers, tmp_path / "run")
    assert asked.pop("settings")["actor"]["optimizer"]["lr"] == 1e-3
    assert asked == {
        "steps": 4,
        "first_step": 3,
        "project": "p",
        "entity": "e",
        "group": "g",
        "own": {"own": len},
    }
    monkeypatch.setattr(session, "SampleFiles", lambda *args, **named: (args, named))
    for samples_, count in ((5, 5), ("all", None)):
        own = attrs.evolve(settings, log=attrs.evolve(settings.log, samples=samples_))
        assert session._sample_files(own, made, 3) == (
            (tmp_path / "run" / "samples", "tokenizer"),
            {"count": count, "most_bytes": 2.5e9, "first_step": 3},
        )


# serving


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("cache", "exact"), [(None, False), (0.5, True)])
def test_a_served_policy_is_made_as_the_settings_say(tmp_path, monkeypatch, begins, cache, exact):
    settings = tiny_run.settings(tmp_path, seed=3, rollout__cache_gb=cache, rollout__exact=exact, device="cpu")
    tokenizer, asked = simple(pad_token_id=7, chat_template="x" if begins else None), []
    stubs = {
        "search": lambda places: asked.append(("search", places)),
        "resolved": lambda settings, device: (settings, []),
        "load_tokenizer": lambda section, data: tokenizer,
        "policy_generation": lambda section, data, given: "generation",
        "sampling_of": lambda section, given, generation: (section, given, generation),
        "load_policy": lambda *args: (simple(), asked.append(("load", *args)) or "params"),
        "policy_model": lambda *args: asked.append(("model", *args)) or simple(),
        "check_engine": lambda model: asked.append("checked"),
        "kernels_of": lambda names: "kernels",
        "EmbeddedEngine": lambda **named: named,
        "probe_exact": lambda model, kernels: asked.append(("probed", kernels)),
        "texts_of": lambda given, **named: named,
        "vocabulary_size_of": lambda section: 30,
        "chat_options": lambda data: "options",
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(serving, name, stub)
    found = serving.served_policy(settings, begins=begins)
    assert found.params == ("params" if begins else None)
    assert found.engine == {
        "model": found.model,
        "kernels": "kernels",
        "pad_token_id": 7,
        "exact": exact,
        "cache_bytes": None if cache is None else 2**29,
    }
    assert found.texts == {"vocabulary": 30, "chat": begins, "options": "options"}
    assert found.sampling == (settings.rollout, tokenizer, "generation")
    assert (found.tokenizer, found.device) == (tokenizer, torch.device("cpu"))
    common = (settings.model, settings.critic, Key(3), serving.LOCAL, torch.device("cpu"))
    assert asked == [
        ("search", settings.module_dirs),
        ("load" if begins else "model", *common),
        "checked",
        *([("probed", "kernels")] if exact else []),
    ]


def test_a_line_of_a_pipe_needs_no_clock_to_begin():
    out = io.StringIO()
    log = loggers.PlainConsole(3, file=out, clock=iter([0.0, 1.0, 2.0, 3.0]).__next__)
    log.log(0, {"critic/score/mean": 1.0})
    log.log(3, {"critic/score/mean": 1.0})
    assert out.getvalue() == "step 0/3  reward 1.000\nstep 3/3  reward 1.000  left 0:00\n"
