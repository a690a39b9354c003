"""Files of a run have the sizes, names and spacings of its settings."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from fppo.runs import loggers, session
from fppo.settings import files
from tests import tiny_run

LOG = {
    "steps": 7,
    "log__loggers": ["wandb", "tensorboard"],
    "log__project": "p",
    "log__entity": "e",
    "log__group": "g",
    "log__table_rows": 3,
    "log__table_every": 4,
    "log__samples_gb": 0.25,
}


def assembled(tokenizer, own):
    """The part of an assembly that loggers and samples read."""
    return SimpleNamespace(inputs=SimpleNamespace(tokenizer=tokenizer, loggers=own))


def test_loggers_and_their_tables_are_those_of_the_settings(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(loggers, "open_loggers", lambda *args, **named: asked.update(named, args=args) or [])
    settings, own, tokenizer = tiny_run.settings(tmp_path, **LOG), {"a:b": print}, object()
    with contextlib.ExitStack() as opened:
        observe = session._logging(settings, assembled(tokenizer, own), 6, opened)
    assert asked == {
        "args": (("wandb", "tensorboard"), Path(settings.output_dir)),
        "steps": 7,
        "first_step": 6,
        "project": "p",
        "entity": "e",
        "group": "g",
        "settings": files.to_dict(settings),
        "own": own,
    }
    tables = inspect.getclosurevars(observe).nonlocals["tables"]
    assert tables == loggers.Tables(rows=3, every=4, tokenizer=tokenizer)


@pytest.mark.parametrize(("samples", "count"), [("all", None), (5, 5)])
def test_samples_are_as_many_and_as_large_as_settings_say(tmp_path, samples, count):
    settings, tokenizer = tiny_run.settings(tmp_path, **LOG, log__samples=samples), object()
    kept = session._sample_files(settings, assembled(tokenizer, {}), 6)
    kept.close()
    found = {name.lstrip("_"): value for name, value in vars(kept).items()}
    assert {name: found[name] for name in ("directory", "tokenizer", "count", "most")} == {
        "directory": Path(settings.output_dir) / "samples",
        "tokenizer": tokenizer,
        "count": count,
        "most": 0.25e9,
    }


@pytest.fixture
def written(monkeypatch):
    """Arguments of each writer of a run."""
    kept = {}

    def noted(name, made=None):
        def make(*args, **named):
            kept[name] = (*args, named) if args else named
            return made

        return make

    profiles = SimpleNamespace(begin=lambda step: kept.update(profiled=step), stop=lambda: None)
    closing = SimpleNamespace(close=lambda: None, wait=lambda: kept.setdefault("waits", []).append(1))
    saving = lambda record: kept.setdefault("saved", []).append(record) or {"saved": 1.0}  # noqa: E731
    monkeypatch.setattr(session, "digest_spacing", lambda *args: 3)
    monkeypatch.setattr(session, "_record_start", noted("start"))
    monkeypatch.setattr(session, "_sample_files", noted("samples", closing))
    monkeypatch.setattr(session, "_logging", noted("logging", lambda record: kept.setdefault("logged", record)))
    monkeypatch.setattr(session, "_closing", lambda path, first: contextlib.nullcontext((path.name, first)))
    monkeypatch.setattr(session, "of_state", lambda assembly: "of state")
    monkeypatch.setattr(session, "Digests", noted("digests", "digests"))
    monkeypatch.setattr(session, "Checkpoints", noted("checkpoints", saving))
    monkeypatch.setattr(session, "Profiles", noted("profiles", profiles))
    traced = lambda record: kept.setdefault("traced", record)  # noqa: E731
    traced.close = lambda: None
    monkeypatch.setattr(session, "Tracer", noted("tracer", traced))
    monkeypatch.setattr(session, "traffic_since", lambda watch, step: (watch, step))
    monkeypatch.setattr(session, "gauged_by", noted("gauges", "gauges"))
    monkeypatch.setattr(session.checkpoint, "steps", lambda directory: [4])
    monkeypatch.setattr(session.checkpoint, "begin_save", noted("saving"))
    return kept


@pytest.mark.parametrize(("step", "first"), [(0, 0), (4, 5)])
@pytest.mark.parametrize(("every", "checkpoints"), [(0, [7]), (3, [3, 6, 7])])
def test_what_a_run_writes_begins_at_its_step_and_is_kept_as_often_as_settings_say(
    tmp_path, written, step, first, every, checkpoints
):
    changes = {"checkpoint__every": every, "checkpoint__keep": 6, "log__profile_steps": [1, 5]}
    settings, run = tiny_run.settings(tmp_path, **LOG, **changes), SimpleNamespace(step=step)
    drawn = SimpleNamespace(notes=lambda: {"note": "x"})
    made = SimpleNamespace(
        mesh=session.LOCAL,
        shapes="shapes",
        device="device",
        placed=None,
        drawn=drawn,
        calls="calls",
        inputs=SimpleNamespace(observers={"a:b": print}),
    )
    directory = Path(settings.output_dir)
    with contextlib.ExitStack() as opened:
        observers, digested, saved = session._writing(settings, made, run, opened, "watch")
    assert written["start"] == (settings, made, step, 3, {})
    assert [written[name][2] for name in ("samples", "logging")] == [first, first]
    assert written["digests"]["lines"] == ("digests.jsonl", first)
    assert (written["digests"]["every"], written["digests"]["directory"]) == (3, directory)
    line = written["digests"]["line"].keywords
    assert line == {
        "mesh": session.LOCAL,
        "shapes": "shapes",
        "device": "device",
        "kind": None,
        "of_state": "of state",
    }
    kept = written["checkpoints"]["kept"]
    assert kept is written["digests"]["kept"]
    assert [number for number in range(1, 8) if kept(number)] == checkpoints
    assert written["checkpoints"]["ranks"] == 1
    written["checkpoints"]["begin"](run)
    assert written["saving"] == (
        run,
        directory / "checkpoints",
        step,
        {"mesh": session.LOCAL, "shapes": "shapes", "free": "ahead", "keep": 6, "notes": {"note": "x"}},
    )
    assert (written["profiles"]["steps"], written["profiled"]) == ((1, 5), step + 1)
    assert written["tracer"] == (directory / "trace" / "rank_00000.jsonl", "calls", {"first_step": first})
    assert written["gauges"] == (session.LOCAL, "device", ("watch", step), {})
    assert (digested, observers[0], observers[1]) == ("digests", "digests", "gauges")
    record = SimpleNamespace(run=SimpleNamespace(step=7))
    assert observers[-1](record) == {"saved": 1.0}
    assert written["logged"] is written["traced"] is written["saved"][0] is record
    assert written["waits"] == [1]  # samples of a step that has a checkpoint are on disk before it
    assert saved is not None


def test_a_checkpoint_that_another_run_gave_is_kept_as_this_runs_first(tmp_path, written, monkeypatch):
    settings, waited = tiny_run.settings(tmp_path), []
    monkeypatch.setattr(session.checkpoint, "steps", lambda directory: [])
    pending = SimpleNamespace(wait=lambda: waited.append(1))
    monkeypatch.setattr(session, "_begin_save", lambda assembly, directory, keep, run: pending)
    made = SimpleNamespace(
        mesh=session.LOCAL, shapes={}, device="d", placed=None, calls=list, inputs=SimpleNamespace(observers={})
    )
    for step in (0, 4):
        with contextlib.ExitStack() as opened:
            session._writing(settings, made, SimpleNamespace(step=step), opened, None)
        assert waited == [1] * (step > 0)
