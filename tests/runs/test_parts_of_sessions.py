"""Resumed runs and sessions of a run: each setting where it is read, and each part called as it is to be."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from fppo.assembly.run import PromptRecord
from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.pipeline.train import StepRecord
from fppo.runs import (
    loggers,
    resuming,
    session,
)
from fppo.runtime import checkpoint
from fppo.runtime.mesh import LOCAL, Axis, Mesh
from fppo.steps.clock import Clock
from fppo.steps.train_state import TrainState
from tests import tiny_run

simple = types.SimpleNamespace


# resuming


def prompts(may_change, made_by=None, **sets):
    return PromptRecord(sets=sets, may_change=may_change, digests_of=lambda x: {"as tokens": x}, made_by=made_by)


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
    own = PromptRecord(sets={"prompts": "a", **held_out}, may_change=may_change, digests_of=lambda x: {"as tokens": x})
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
    actor = TrainState(params={"w": torch.ones(2)}, opt=None, step=0)
    monkeypatch.setattr(session, "restore", lambda settings, made: RunState(actor=actor, key=Key(0), step=here["step"]))

    def trained(settings, made, run, opened, watch):
        noted.append(("trained", run.step, watch))
        return attrs.evolve(run, step=here.get("ends", settings.steps))

    monkeypatch.setattr(session, "_trained", trained)
    return noted, here


def made_on(mesh=LOCAL):
    """An assembly on a mesh, of a policy of two numbers."""
    model = simple(frozen=None, whole_shapes={"w": torch.Size((2,))})
    return simple(mesh=mesh, inputs=simple(device=None), placed=None, model=model)


@pytest.mark.parametrize(
    ("step", "ends", "done"),
    [(2, 4, ["trained", "end"]), (2, 3, ["trained"]), (4, 4, ["end"]), (5, 5, [])],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_is_trained_to_its_last_step_and_ended_once(tmp_path, stood, capsys, step, ends, done, rank):
    noted, here = stood
    here |= {"step": step, "ends": ends}
    made = made_on(Mesh({"shard": Axis(2, rank)}))
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


@pytest.mark.parametrize(("supervised", "command"), [(True, "sft"), (False, "train")])
def test_a_stopped_run_goes_on_by_the_command_that_began_it(tmp_path, monkeypatch, stood, capsys, supervised, command):
    """Whatever its file says of demonstrations."""
    _, here = stood
    here["ends"] = 3
    made = made_on()
    monkeypatch.setattr(session, "SupervisedAssembly", type(made) if supervised else str)
    session.run_training(tiny_run.settings(tmp_path), made)
    assert f"to go on: fppo {command} " in capsys.readouterr().err


def test_a_run_whose_last_state_has_no_room_on_the_disk_is_not_trained(tmp_path, stood, monkeypatch):
    """A checkpoint and a model, of 8 bytes each."""
    noted, _ = stood
    disk = {"free": 15}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: simple(total=10**9, free=disk["free"]))
    words = "output_dir: the run ends with a checkpoint and a model of 0.0 MB, and the disk of .*/run has 0.0 MB left"
    with pytest.raises(ValueError, match=words):
        session.run_training(tiny_run.settings(tmp_path), made_on())
    assert not noted
    disk["free"] = 16
    assert session.run_training(tiny_run.settings(tmp_path), made_on()).step == 4


def test_a_second_request_to_stop_interrupts_and_a_burst_is_one(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(session.time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGTERM)
    with session.stop_requests(announce="stopping") as asked:
        assert not asked
        for at in (10.0, 10.5, 11.0):
            now[0] = at
            signal.raise_signal(signal.SIGTERM)
        assert asked == [10.0, 10.5, 11.0]
        now[0] = 11.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
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
        inputs=simple(
            prompts=simple(tokens=[(1, 2), (1, 2, 3, 4)]),
            rows=simple(rows=[simple(prompt=(1, 2), response=(3,)), simple(prompt=(1,), response=(2, 3, 4))]),
        ),
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
    tokens = 6 * 3.5 if supervised else 8 * (3 + 3 / 2)
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
    monkeypatch.setattr(session.origins, "record", lambda settings, step: ["with other code: x", "with y"])
    monkeypatch.setattr(session.starts, "first", lambda directory: first - 1)
    monkeypatch.setattr(
        session.models, "save_config", lambda model, place, **how: done.append((model, place.name, how))
    )
    monkeypatch.setattr(
        session.jsonl, "gone", lambda path, a, b, *, every: done.append((path.name, a, b, every)) or ["lost"]
    )
    inputs = simple(texts="texts", generation="generation")
    made = simple(inputs=inputs, model="actor", critic_model="critic", mesh=Mesh({"shard": Axis(2), "tensor": Axis(3)}))
    settings = tiny_run.settings(tmp_path, checkpoint__every=kept_every)
    session._record_start(settings, made, 6, every)
    assert done == [
        ("actor", "actor", {"tokenizer": "texts", "generation_config": "generation"}),
        ("critic", "critic", {"tokenizer": "texts", "generation_config": None}),
        *((name, first, 6, spacing) for name, spacing in asked.items()),
    ]
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == [
        "going on from step 6 with other settings: seed 1 -> 2, steps 3 -> 4",
        "going on from step 6 on 6 processes",
        "going on from step 6 with other code: x",
        "going on from step 6 with y",
    ]
    assert lines[4:] == [*([f"{said} (digest.every = {settings.digest.every!r})"] if said else []), "lost", "lost"]
    monkeypatch.setattr(session.starts, "record", lambda settings, step: {})
    monkeypatch.setattr(session.origins, "record", lambda settings, step: [])
    monkeypatch.setattr(session.jsonl, "gone", lambda *args, **_: [])
    alone = simple(inputs=inputs, model="actor", critic_model=None, mesh=LOCAL)
    session._record_start(settings, alone, 0, 1)
    assert capsys.readouterr().err == ""
    session._record_start(settings, alone, 6, 1)
    assert capsys.readouterr().err == "going on from step 6 on 1 process\n"


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


def test_a_line_of_a_pipe_needs_no_clock_to_begin():
    out = io.StringIO()
    log = loggers.PlainConsole(3, file=out, clock=iter([0.0, 1.0, 2.0, 3.0]).__next__)
    log.log(0, {"critic/score/mean": 1.0})
    log.log(3, {"critic/score/mean": 1.0})
    assert out.getvalue() == "step 0/3  reward 1.000\nstep 3/3  reward 1.000  left 0:00\n"
