"""Alarms ring on what is wrong, stay silent on its healthy twin, and never take back what they said of a step."""

from __future__ import annotations

import json
import math
import statistics
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fppo.commands import cli
from fppo.key import Key
from fppo.pipeline import RunState
from fppo.pipeline.train import StepRecord
from fppo.report import viewed, write
from fppo.runs import jsonl, loggers
from fppo.runs.alarms import ALARMS, FIRST, NEWEST, Alarms, Heard, change, hear, ring
from fppo.runs.guards import Queued, TrackerRun
from fppo.runs.jsonl import JsonLines
from fppo.settings import files
from fppo.steps.train_state import TrainState
from tests import tiny_run

HELD = "val-core/sums/reward/mean@1"
STEPS = 40


def noisy(t):
    return 0.01 * math.sin(37.0 * t)


def rising(t, start=0.3, end=0.9):
    return start + (end - start) * t / STEPS + noisy(t)


def series(every=4, **columns):
    """Records of steps from 0 on: each keyword is a metric's function of the step; held_out only at evaluations."""
    names = {key: key.replace("__", "/") for key in columns} | {"held_out": HELD, "score": "critic/score/mean"}
    return [
        {"step": t} | {names[key]: fn(t) for key, fn in columns.items() if key != "held_out" or t % every == 0}
        for t in range(STEPS)
    ]


def flat(t):
    return 0.5 + noisy(t)


LENGTH, REPEATED, ALIKE = "response_length__mean", "rollout__repeated", "rollout__groups__alike"
RETURNS = {"critic__returns__min": lambda t: 0.0, "critic__returns__max": lambda t: 1.0}
EXPLAINED, K3 = "critic__vf_explained_var", "rollout_corr__k3_kl"
UP, DOWN = rising, lambda t: rising(t, 0.6, 0.2)
TWINS = {  # by alarm: series on which it rings, each with its healthy twin
    "parts": [
        (series(reward__length=UP, reward__exact=DOWN), series(reward__length=UP, reward__exact=UP)),
        (series(reward__length=UP, reward__exact=DOWN), series(reward__errors=UP, reward__exact=DOWN)),
        (series(reward__length=UP, reward__exact=DOWN), series(reward__length=UP, reward__exact=flat)),
    ],
    "length": [
        (
            series(**{LENGTH: lambda t: rising(t, 10, 40)}, held_out=flat),
            series(**{LENGTH: lambda t: rising(t, 10, 40)}, held_out=UP),
        ),
        (
            series(**{LENGTH: lambda t: rising(t, 10, 40)}, held_out=flat),
            series(**{LENGTH: lambda t: rising(t, 10, 12)}, held_out=flat),
        ),
    ],
    "repetition": [
        (series(**{REPEATED: UP}, held_out=flat), series(**{REPEATED: UP}, held_out=UP)),
        (series(**{REPEATED: UP}, held_out=flat), series(**{REPEATED: flat}, held_out=flat)),
    ],
    "held_out": [
        (series(score=UP, held_out=lambda t: 0.2), series(score=UP, held_out=lambda t: rising(t, 0.4, 0.9))),
        (series(score=UP, held_out=lambda t: 0.2), series(score=lambda t: 0.9, held_out=lambda t: 0.4)),
    ],
    "entropy": [
        (
            series(actor__entropy=lambda t: 0.8**t, score=flat),
            series(actor__entropy=lambda t: 0.8**t, score=UP),
        ),
        (series(actor__entropy=lambda t: 0.8**t), series(actor__entropy=lambda t: 0.97**t)),
    ],
    "clip": [
        (
            series(actor__pg_clipfrac=lambda t: 0.4 if t > 20 else 0.1),
            series(actor__pg_clipfrac=lambda t: 0.4 if t % 3 else 0.1),
        )
    ],
    "ratio": [
        (
            series(actor__ppo_kl=lambda t: -0.2 if t > 20 else 0.01),
            series(actor__ppo_kl=lambda t: 0.2 if t % 3 else 0.0),
        ),
        (
            series(actor__ppo_kl=lambda t: 9.5 if t == 1 else 0.0),
            series(actor__ppo_kl=lambda t: 0.9 if t == 1 else 0.0),
        ),
    ],
    "groups": [
        (series(**{ALIKE: lambda t: 0.9}, score=flat), series(**{ALIKE: lambda t: 0.9}, score=UP)),
        (series(rollout__groups__kept=lambda t: 0.1), series(rollout__groups__kept=lambda t: 0.3)),
        (
            series(critic__score__min=lambda t: 0.0, critic__score__max=lambda t: 0.0),
            series(critic__score__min=lambda t: 0.0, critic__score__max=lambda t: 0.1),
        ),
    ],
    "critic": [
        (
            series(**RETURNS, **{EXPLAINED: lambda t: -0.1}),
            series(**RETURNS, **{EXPLAINED: lambda t: 0.1 if t % 15 == 0 else -0.1}),
        ),
        (
            series(**RETURNS, **{EXPLAINED: lambda t: -0.1}),
            series(
                critic__returns__min=lambda t: 1.0, critic__returns__max=lambda t: 1.0, **{EXPLAINED: lambda t: -9.0}
            ),
        ),
    ],
    "engine": [
        (
            series(**{K3: lambda t: 1e-6 * 1.5**t}, rollout__lag=lambda t: 0.0),
            series(**{K3: lambda t: 1e-6 * 1.5**t}, rollout__lag=lambda t: 1.0),
        ),
        (series(**{K3: lambda t: 0.06}), series(**{K3: lambda t: 0.01})),  # of 16 bits
    ],
}
CASES = [(name, *pair) for name, pairs in TWINS.items() for pair in pairs]


def test_every_alarm_has_a_series():
    assert TWINS.keys() == ALARMS.keys()


@pytest.mark.parametrize(("name", "faulty", "healthy"), CASES)
def test_an_alarm_rings_on_a_fault_and_not_on_its_healthy_twin(name, faulty, healthy):
    assert [each.alarm for each in ring(faulty)] == [name]
    assert ring(healthy) == []


@pytest.mark.parametrize(("name", "faulty", "healthy"), CASES)
def test_a_sentence_names_a_metric_its_newest_value_and_where_to_look(name, faulty, healthy):
    (found,) = ring(faulty)
    newest = {metric: x for metric, x in faulty[found.step].items() if metric in found.text}
    assert "; " in found.text
    assert newest or "held-out" in found.text or "rollout/groups" in found.text
    assert str(found) == f"step {found.step}: {found.text} (alarm {name})"


@pytest.mark.parametrize(
    ("name", "step"), [("clip", 23), ("ratio", 23), ("groups", 11), ("critic", 19), ("entropy", 18)]
)
def test_an_alarm_rings_at_the_first_step_that_shows_it(name, step):
    """By hand: three steps from 21 on; twelve; twenty; and six below a tenth of the mean of the first six,
    which is 0.615: from 13 on."""
    assert [each.step for each in ring(TWINS[name][0][0])] == [step]


NAMES = [*{name for each in ALARMS.values() for name in each.reads if "*" not in name}]
NAMES += [HELD, "val-core/other/reward/mean@8", "reward/a", "reward/b", "reward/errors", "actor/grad_norm"]
ODD = st.sampled_from([None, math.nan, math.inf, -math.inf, "text", 0, -1, 1e300, 1e308])
VALUES = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 20.0]), ODD)


@st.composite
def histories(draw, least=0):
    """Steps in stretches, each with metrics that stay as they are: then alarms ring now and then."""
    records = []
    for _ in range(draw(st.integers(1, 3))):
        stretch = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES)))
        records += [dict(stretch) for _ in range(draw(st.integers(1, 24)))]
    return [{"step": t, **record} for t, record in enumerate(records)]


@given(histories(), histories(), st.integers(0, 70))
def test_what_rang_rings_for_every_continuation(one, other, cut):
    before = one[:cut]
    after = [record | {"step": len(before) + t} for t, record in enumerate(other)]
    rung = ring(before)
    assert [each for each in ring([*before, *after]) if each.step < len(before)] == rung


def heard_of(records):
    heard = Heard()
    for record in records:
        heard, _ = hear(heard, record)
    return heard


def logged(x):
    return isinstance(x, int | float) and math.isfinite(x)


@given(histories(), st.sampled_from(NAMES[:-1]))
def test_what_is_kept_of_a_metric_is_its_first_and_its_newest_numbers(records, name):
    """And what was known earlier stays as it was."""
    cut = records[: len(records) // 2]
    earlier, heard = heard_of(cut), heard_of(records)
    numbers = [x for record in records if logged(x := record.get(name))]
    assert list(heard.line(name).first) == numbers[:FIRST]
    assert list(heard.line(name).newest) == numbers[-NEWEST:]
    assert heard.now(name) == (records[-1][name] if logged(records[-1].get(name)) else None)
    again = earlier
    for record in records[len(cut) :]:
        again, _ = hear(again, record)
    assert again == heard
    assert earlier == heard_of(cut)


@given(histories(), st.sampled_from([*ALARMS]))
def test_an_alarm_does_not_depend_on_metrics_that_it_does_not_read(records, name):
    alarm = ALARMS[name]
    read = ("step", *alarm.reads)
    own = [{x: v for x, v in record.items() if any(fnmatchcase(x, p) for p in read)} for record in records]
    heard = seen = Heard()
    for record, part in zip(records, own, strict=True):
        (heard, _), (seen, _) = hear(heard, record), hear(seen, part)
        assert alarm.check(heard) == alarm.check(seen)


HEALTHY = {
    "actor/entropy": st.floats(0, 5),
    "actor/pg_clipfrac": st.floats(0, 0.2),
    "actor/ppo_kl": st.floats(-0.02, 0.02),
    "critic/vf_explained_var": st.floats(0, 1),
    "rollout_corr/k3_kl": st.floats(0, 0.05),
    "rollout/groups/alike": st.floats(0, 0.7),
    "response_length/mean": st.floats(1, 1e4),
    "rollout/repeated": st.floats(0, 1),
    "reward/a": st.floats(-1, 1),
    "reward/b": st.floats(-1, 1),
    "critic/score/mean": st.floats(-1, 1),
    HELD: st.floats(-1, 1),
}


@given(st.fixed_dictionaries(HEALTHY), st.integers(1, 60))
def test_constant_healthy_metrics_ring_nothing(constant, steps):
    assert ring({"step": t, **constant} for t in range(steps)) == []


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30), st.integers(2, 5))
def test_a_change_is_that_of_a_loop(values, window):
    """Means of the first and the last numbers; the error by the jumps within the two windows."""
    found = change(heard_of({"step": 0, "reward/x": x} for x in values), "reward/x", window)
    if len(values) < 2 * window:
        assert found is None
        return
    assert found is not None
    first, last = values[:window], values[-window:]
    total = 0.0
    for line in (first, last):
        for i in range(window - 1):
            total += (line[i + 1] - line[i]) ** 2 / 2
    variance = total / (2 * (window - 1))
    assert found.before == pytest.approx(statistics.fmean(first))
    assert found.after == pytest.approx(statistics.fmean(last))
    assert found.error == pytest.approx(math.sqrt(variance / window + variance / window))


def record_of(line):
    state = TrainState(params={}, opt=None, step=0)
    return StepRecord(run=RunState(actor=state, key=Key(0), step=line["step"]), experience=None, metrics=line)


@pytest.mark.parametrize("cut", [0, 10, 22, 30])
def test_the_observer_prints_each_alarm_once_over_restarts(cut, capsys):
    lines = TWINS["clip"][0][0]
    for before, steps in (([], lines[:cut]), (lines[:cut], lines[cut:])):
        observe = Alarms(before)
        for line in steps:
            observe(record_of(line))
    assert capsys.readouterr().err.splitlines() == [str(each) for each in ring(lines)]


def test_trackers_get_a_number_at_the_step_at_which_an_alarm_rings(tmp_path):
    lines, seen = TWINS["clip"][0][0], list[tuple[int, dict[str, float]]]()
    tracker = Queued("mine", lambda: TrackerRun(log=lambda step, x: seen.append((step, dict(x))), close=lambda: None))
    kept = JsonLines(tmp_path / "metrics.jsonl")
    observe = loggers.observer([tracker, kept], None, Alarms())
    for line in lines:
        observe(record_of(line))
    loggers.close([tracker, kept])
    named = [(step, name) for step, numbers in seen for name in numbers if name.startswith("alarm/")]
    assert named == [(each.step, f"alarm/{each.alarm}") for each in ring(lines)]
    assert "alarm/" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_report_prints_alarms_and_the_viewer_notes_them(tmp_path, capsys):
    lines, path = TWINS["engine"][0][0], tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = ring(lines)
    assert cli.main(["report", str(tmp_path), "--alarms"]) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert cli.main(["report", str(tmp_path), "--alarms", "--json"]) == 0
    expected = {"step": found.step, "alarm": "engine", "text": found.text}
    assert json.loads(capsys.readouterr().out) == {"alarms": [expected]}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["metrics.jsonl"]
    state = viewed.state_of(tmp_path, "run")
    assert state is not None
    assert state["notes"][-1] == str(found)
    path.write_text("".join(json.dumps(line) + "\n" for line in TWINS["engine"][0][1]))
    assert cli.main(["report", str(tmp_path), "--alarms"]) == 0
    assert capsys.readouterr().out == "no alarm\n"


def test_a_report_of_alarms_needs_metrics(tmp_path):
    with pytest.raises(ValueError, match="no metrics to look at"):
        write.alarms_of(tmp_path)


def half_clipped(record):
    """An observer that says of every step that half of its tokens were clipped."""
    return {"actor/pg_clipfrac": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False])
def test_a_run_prints_its_alarms_once_unless_they_are_off(tmp_path, capsys, on):
    tiny_run.write_task(tmp_path)
    own = {"log__observers": ["tests.runs.test_alarms:half_clipped"], "eval__before": False}
    files.save(tiny_run.settings(tmp_path, log__alarms=on, **own), tmp_path / "run.toml")
    for steps in (4, 5):  # the second goes on
        assert cli.main(["train", str(tmp_path / "run.toml"), "--steps", str(steps)]) == 0
    (found,) = (each for each in ring(jsonl.read(tmp_path / "run" / "metrics.jsonl")) if each.alarm == "clip")
    assert found.step == 3
    assert capsys.readouterr().err.count(str(found)) == on
