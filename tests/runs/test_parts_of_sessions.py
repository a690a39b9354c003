"""Resumed runs and sessions of a run: what may change between them, and what a run leaves on disk."""

from __future__ import annotations

import io
import shutil
import signal
import time
import types

import attrs
import pytest
import torch

from fppo.assembly.run import PromptRecord
from fppo.commands import actions
from fppo.key import Key
from fppo.pipeline.program import RunState
from fppo.runs import jsonl, loggers, resuming, sample_files, session
from fppo.runtime import checkpoint
from fppo.steps.clock import Clock
from fppo.steps.train_state import TrainState
from tests import tiny_run

simple = types.SimpleNamespace


# resuming


def prompts(may_change, made_by=None, **sets):
    return PromptRecord(sets=sets, may_change=may_change, digests_of=lambda x: {"as tokens": x}, made_by=made_by)


def noted(directory, **notes):
    """A checkpoint with these notes."""
    state = TrainState(params={"w": torch.ones(1)}, opt=None, step=0)
    return checkpoint.begin_save(RunState(actor=state, key=Key(0), step=3), directory, 3, notes=notes).wait()


@pytest.mark.parametrize("may_change", [False, True])
@pytest.mark.parametrize("speaks", [False, True])
def test_prompts_that_a_checkpoint_noted_may_change_if_a_setting_says(tmp_path, capsys, may_change, speaks):
    path = noted(tmp_path / "x", **{"prompts, as tokens": "a", "held-out prompts, as tokens": "b"})

    def check(path=path, **sets):
        resuming.check_prompts(prompts(may_change, **sets), path, speaks=speaks)
        return capsys.readouterr().err

    said = "going on with other data than step_00000003 was made with: the held-out prompts as tokens\n"
    assert check(prompts="a", **{"held-out prompts": "c"}) == (said if speaks else "")
    assert check(prompts="a") == ""
    if may_change:
        assert check(prompts="z") == (said.replace("held-out prompts", "prompts") if speaks else "")
    else:
        words = "the prompts as tokens differ from those that .*x/step_00000003 was made with"
        with pytest.raises(ValueError, match=words):
            check(prompts="z")
    assert check(noted(tmp_path / "earlier"), prompts="z") == ""  # a checkpoint of an earlier version


@pytest.mark.parametrize(("before", "now"), [(None, "fppo sft"), ("fppo sft", None)])
def test_a_command_goes_on_from_its_own_checkpoints_alone(tmp_path, before, now):
    path = noted(tmp_path, **({} if before is None else {resuming.MADE_BY: before}))
    words = f"was made by {before or 'fppo train'}, and {now or 'fppo train'} does not go on from it"
    with pytest.raises(ValueError, match=words):
        resuming.check_prompts(prompts(True, now, prompts="a"), path, speaks=False)
    resuming.check_prompts(prompts(True, before, prompts="a"), path, speaks=False)


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


def test_a_run_whose_last_state_has_no_room_on_the_disk_is_not_trained(tmp_path, monkeypatch):
    tiny_run.write_task(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: simple(total=10**9, free=15))
    words = "output_dir: the run ends with a checkpoint and a model of 0.. MB, and the disk of .*/run has 0.0 MB left"
    with pytest.raises(ValueError, match=words):
        actions.train(tiny_run.settings(tmp_path, data__eval_path=[]))
    assert not (tmp_path / "run" / "digests.jsonl").exists()


class Kept:
    """A logger that writes its calls to a file named by the first step."""

    def __init__(self, file):
        self.file = file

    def log(self, step, metrics):
        with self.file.open("a") as file:
            file.write(f"{step}\n")

    def close(self):
        with self.file.open("a") as file:
            file.write("closed\n")


def kept(run_dir, *, first_step, settings):
    return Kept(run_dir / f"kept_{settings['log']['group']}_{first_step}")


@pytest.mark.slow
def test_a_run_leaves_on_disk_what_its_settings_ask_for_from_its_next_step_on(tmp_path, capsys):
    tiny_run.write_task(tmp_path)
    given = {"log__loggers": [f"{__name__}:kept"], "log__group": "g", "log__samples": 5, "data__eval_path": []}
    given |= {"checkpoint__every": 2, "checkpoint__keep": 2, "digest__every": 5, "log__profile_steps": [2]}
    run = tmp_path / "run"

    def lines(name):
        return [line["step"] for line in jsonl.read(run / name)]

    assert actions.train(tiny_run.settings(tmp_path, steps=3, **given)) == 0
    assert "digests of the state: every 5 steps and at checkpoints (digest.every = 5)\n" in capsys.readouterr().err
    assert checkpoint.steps(run / "checkpoints") == lines("digests.jsonl") == [2, 3]
    assert lines("metrics.jsonl") == lines("trace/rank_00000.jsonl") == [1, 2, 3]
    assert actions.train(tiny_run.settings(tmp_path, steps=5, **given)) == 0
    said = capsys.readouterr().err
    assert "going on from step 3 with other settings: steps 3 -> 5\n" in said
    assert "going on from step 3 on 1 process\n" in said
    assert checkpoint.steps(run / "checkpoints") == [4, 5]
    assert lines("digests.jsonl") == [2, 3, 4, 5]
    assert lines("metrics.jsonl") == lines("trace/rank_00000.jsonl") == [1, 2, 3, 4, 5]
    assert [(run / f"kept_g_{first}").read_text().split() for first in (0, 4)] == [
        *(["1", "2", "3", "closed"], ["4", "5", "closed"])
    ]
    rows = {step: sample_files.read(path).num_rows for step, path in sample_files.files(run / "samples").items()}
    assert rows == dict.fromkeys(range(1, 6), 5)
    assert [path.name for path in (run / "profiles").iterdir()] == ["step_00000002.json.gz"]
    assert actions.train(tiny_run.settings(tmp_path, steps=4, **given)) == 0
    assert "steps = 4: step 5 is done, and nothing is changed\n" in capsys.readouterr().err


def test_a_second_request_to_stop_interrupts_and_a_burst_is_one(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
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


def test_another_process_in_the_directory_is_named_before_anything_is_loaded(tmp_path):
    settings = tiny_run.settings(tmp_path)
    session.check_alone(settings)  # there is no directory yet
    (tmp_path / "run").mkdir()
    session.check_alone(settings)
    words = f"another process is writing to {tmp_path / 'run'}"
    with session.alone_in(tmp_path / "run"), pytest.raises(ValueError, match=words):
        session.check_alone(settings)
    session.check_alone(settings)


@pytest.mark.slow
def test_a_line_of_a_pipe_needs_no_clock_to_begin():
    out = io.StringIO()
    log = loggers.PlainConsole(3, file=out, clock=iter([0.0, 1.0, 2.0, 3.0]).__next__)
    log.log(0, {"critic/score/mean": 1.0})
    log.log(3, {"critic/score/mean": 1.0})
    assert out.getvalue() == "step 0/3  reward 1.000\nstep 3/3  reward 1.000  left 0:00\n"
