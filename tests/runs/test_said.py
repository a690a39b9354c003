"""Lines, rows and requests of a run, whole: each number under its own name, and each setting where it is read."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import types

import attrs
import pytest
import torch

import fppo
from fppo import metrics
from fppo.batch import Column
from fppo.fleet import Call
from fppo.pipeline.timing import StageSpan
from fppo.pipeline.train import StepRecord
from fppo.pipeline.truth import Compared
from fppo.runs import (
    evaluations,
    loggers,
    observers,
    sample_files,
    samples,
    session,
    starts,
)
from fppo.runs.jsonl import JsonLines
from fppo.runtime.mesh import Axis, Mesh
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
    "reward cut": (["reward/model_truncated"], "1234"),
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
    order += ["critic skipped", "actor skipped", "tool failed", "reward cut", "no score", "loss"]
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
def test_a_bar_goes_on_where_the_run_does(monkeypatch, capsys, first_step):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert isinstance(loggers.console(9), loggers.PlainConsole)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with contextlib.closing(loggers.console(9, first_step=first_step)) as live:
        assert isinstance(live, loggers.LiveConsole)
        live.log(6, {"critic/score/mean": 0.5})
    assert "6/9" in capsys.readouterr().out


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
    monkeypatch.setattr(time, "time", lambda: 500.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 20.0)
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
    profiles = observers.Profiles(directory=tmp_path, steps=(2,), mesh=Mesh({"shard": Axis(2, 1)}))
    profiles.begin(1)
    for step in (1, 2, 3):
        profiles(StepRecord(run=simple(step=step), experience="rows", metrics={}))
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["step_00000002_rank_1.json.gz"]


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


def test_tables_are_of_the_first_step_and_of_every_nth():
    tables = loggers.Tables(rows=1, every=3, tokenizer=Letters())
    made = {}
    for step in range(1, 8):
        made[step] = tables.of(StepRecord(run=simple(step=step), experience=scored(), metrics={}))
    assert [step for step, rows in made.items() if rows is not None] == [1, 3, 6]
    assert [row["prompt"] for row in made[3]()] == ["ab"]
    assert made[3]() is made[3]()  # made once, for all trackers
    record = StepRecord(run=simple(step=1), experience=scored(), metrics={})
    assert attrs.evolve(tables, rows=0).of(record) is None
    assert tables.of(attrs.evolve(record, experience=None)) is None


def test_no_rows_are_written_where_none_are_counted(tmp_path):
    written = sample_files.SampleFiles(tmp_path / "samples", Letters(), count=0, most_bytes=1e9)
    written(StepRecord(run=simple(step=1), experience=scored(), metrics={}))
    written.close()
    assert list((tmp_path / "samples").iterdir()) == []


def test_responses_beside_the_truth_have_the_numbers_of_their_tokens():
    numbers = [torch.arange(6.0).view(2, 3) + 10 * i + 1 / 3 for i in range(4)]
    found = samples.truth_lines(Compared(scored(), *numbers), Letters(), 5)
    names = ("values", "exact_values", "advantages", "exact_advantages")
    third = round(1 / 3, 6)
    assert [{k: x for k, x in line.items() if k not in names} for line in found] == [
        {"step": 5, "id": "x", "prompt": "ab", "tokens": ["c", "<0>"]},
        {"step": 5, "id": 7, "prompt": "efg", "tokens": ["h"]},
    ]
    for i, name in enumerate(names):
        expected = [[10 * i + 0 + third, 10 * i + 2 + third], [10 * i + 3 + third]]
        assert [line[name] for line in found] == [[pytest.approx(x, abs=2e-6) for x in row] for row in expected]


def test_an_evaluation_is_written_by_the_first_rank_in_place_of_the_one_before(tmp_path):
    beside = Compared(scored(), *[torch.zeros(2, 3) for _ in range(4)])

    def evaluate(run, keep, keep_compared):
        keep([scored(), scored()])
        keep_compared(beside)
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


def test_a_run_is_evaluated_when_its_settings_say(tmp_path):
    def evaluate(run, keep, keep_compared):
        keep([scored()])
        keep_compared(Compared(scored(), *[torch.zeros(2, 3) for _ in range(4)]))
        return {}

    made = simple(evaluate=evaluate, inputs=simple(tokenizer=Letters()), mesh=session.LOCAL)
    settings = tiny_run.settings(tmp_path, eval__every=3, eval__before=False)
    found = evaluations.in_training(settings, made)
    assert (found.every, found.before) == (3, False)
    assert found.evaluate(simple(step=4)) == {}
    for name in ("evaluations", "truth"):
        assert [path.name for path in (tmp_path / "run" / name).iterdir()] == ["step_00000004.jsonl"]
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


@pytest.mark.slow
def test_a_run_that_went_on_from_another_one_says_so_after_each_start(tmp_path):
    """Also where its first step is begun again with other settings, by its own command."""
    (tmp_path / "run").mkdir()
    other = str(tmp_path / "other")
    for resume, seed, step in ((other, 3, 4), ("auto", 8, 4), ("auto", 9, 6), ("auto", 9, 5)):
        starts.record(tiny_run.settings(tmp_path, resume=resume, seed=seed), step)
        assert (starts.source(tmp_path / "run"), starts.first(tmp_path / "run")) == (other, 4)
        made = {"auto": [8, 9][step > 4], other: 3}[resume]
        assert starts.load(tmp_path / "run", step + 1).seed == made
