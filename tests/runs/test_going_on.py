"""From where a run goes on, what it loads, writes and exports: each decision by a table, each call by its arguments."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from fppo.key import Key
from fppo.pipeline.train import Evaluation, StepRecord
from fppo.runs import saved, session, starts, writer
from fppo.runtime.checkpoint import CheckpointError
from fppo.runtime.mesh import Axis, Mesh
from tests import tiny_run

simple = SimpleNamespace
RANKS = {rank: Mesh({"shard": Axis(2, rank)}) for rank in (0, 1)}


def stand_in(monkeypatch, module, kept, **results):
    """Functions of a module that note their calls in order, and return what is given."""
    for name, result in results.items():

        def call(*args, _name=name, _result=result, **named):
            kept.append((_name, args, named))
            return _result(*args, **named) if callable(_result) else _result

        monkeypatch.setattr(module, name, call)


# where a run goes on

ASKED = ["auto", "never", "must", "checkpoints/step_00000002", "elsewhere/step_00000007"]


@pytest.mark.parametrize("own", [[], [1, 2]])
@pytest.mark.parametrize("resume", ASKED)
@pytest.mark.parametrize("began", [None, "elsewhere/step_00000007"])
def test_a_run_goes_on_from_the_checkpoint_that_is_named_or_from_its_own(tmp_path, monkeypatch, own, resume, began):
    """A fork goes on from its own newest one, also by the command that began it; another one would mix two runs."""
    kept: list[Any] = []
    run = tmp_path / "run"
    named = {x: str(run / x if x.startswith("checkpoints") else tmp_path / x) for x in ASKED[3:]}
    monkeypatch.setattr(session.checkpoint, "steps", lambda directory: own if directory == run / "checkpoints" else [])
    monkeypatch.setattr(session.checkpoint, "place_of", lambda directory, step: directory / f"step_{step:08d}")
    monkeypatch.setattr(session.checkpoint, "step_of", lambda path: int(path.name[5:]))
    monkeypatch.setattr(session.checkpoint, "misnamed", lambda directory: [f"misnamed in {directory.name}"])
    monkeypatch.setattr(session.starts, "source", lambda directory: None if began is None else named[began])
    stand_in(monkeypatch, session, kept, _check_beginning=None, _loaded="loaded")
    settings = tiny_run.settings(tmp_path, resume=named.get(resume, resume))
    made = simple(mesh=RANKS[1])

    def loaded(path):
        return ("_loaded", (settings, made, path), {"donate": True})

    newest = run / "checkpoints" / "step_00000002"
    refused = {
        "never": own and "resume = 'never', but .* holds the checkpoint of step 2: give another",
        "must": not own and "resume = 'must', but there is no checkpoint",
        ASKED[4]: own and began is None and "holds the checkpoint of step 2 already: give another output_dir to start",
    }.get(resume)
    if refused:
        with pytest.raises(ValueError, match=refused):
            session.restore(settings, made)
        assert kept == []
        return
    assert session.restore(settings, made) == "loaded"
    if own:
        assert kept == [loaded(newest)]
    elif resume == "auto":
        assert kept == [("_check_beginning", (run,), {}), loaded(None)]
    else:
        assert kept == [loaded(Path(named[resume]) if resume in named else None)]
    kept.clear()
    assert session.at(settings, made) == "loaded"
    path = newest if own and resume in ("auto", "must") else Path(named[resume]) if resume in named else None
    assert kept == [("_loaded", (settings, made, path), {})]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_names_what_is_misnamed(tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setattr(session.checkpoint, "misnamed", lambda directory: [f"one in {directory}", "another"])
    session.say_misnamed(tmp_path, RANKS[rank])
    assert capsys.readouterr().err == ("" if rank else f"one in {tmp_path}\nanother\n")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_is_loaded_once_bases_and_prompts_are_its_own(tmp_path, monkeypatch, rank, placed, donate):
    kept: list[Any] = []
    names = {"check_bases": None, "check_prompts": None, "with_saved_clocks": "clocked"}
    stand_in(monkeypatch, session, kept, **names)
    stand_in(monkeypatch, session.checkpoint, kept, load="loaded")
    monkeypatch.setattr(session.checkpoint, "place_of", lambda directory, step: directory / str(step))
    apart = simple(load=lambda *args, **named: kept.append(("placed", args, named)) or "placed")
    run = simple(bases="bases", key="key")
    made = simple(run=run, mesh=RANKS[rank], shapes="s", device="d", drawn="drawn", placed=apart if placed else None)
    assert session.load(made, tmp_path, 3, donate=donate) == ("placed" if placed else "loaded")
    assert kept[:3] == [
        ("check_bases", ("bases", tmp_path / "3"), {}),
        ("check_prompts", ("drawn", tmp_path / "3"), {"speaks": rank == 0}),
        ("with_saved_clocks", (run, tmp_path, 3), {}),
    ]
    own = {"mesh": RANKS[rank], "shapes": "s", "free": "ahead", "device": "d", "donate": donate}
    assert kept[3:] == [
        ("placed", ("clocked", tmp_path, 3), {"device": "d"}) if placed else ("load", ("clocked", tmp_path, 3), own)
    ]


def test_another_seed_does_not_go_on(tmp_path, monkeypatch):
    kept: list[Any] = []
    stand_in(monkeypatch, session, kept, load=lambda *args, **named: simple(key=Key(4)))
    monkeypatch.setattr(session.checkpoint, "step_of", lambda path: 3)
    settings = tiny_run.settings(tmp_path, seed=5)
    for own, path in ((4, None), (4, tmp_path / "x"), (5, tmp_path / "x")):
        made = simple(run=simple(key=Key(own)))
        if path is None:
            assert session._loaded(settings, made, path) is made.run
        elif own == 4:
            assert session._loaded(settings, made, path, donate=True).key == Key(4)
        else:
            with pytest.raises(ValueError, match=r"seed = 5, but the checkpoint in .* is of a run with another seed"):
                session._loaded(settings, made, path)
    assert kept[0][1:] == ((simple(run=simple(key=Key(4))), tmp_path, 3), {"donate": True})


# what is trained and written


@pytest.mark.parametrize("ends", [None, ValueError("mine"), SystemExit(0), KeyboardInterrupt()])
@pytest.mark.parametrize("failed", [None, "", "a rank died"])
def test_what_was_begun_is_written_whatever_ends_the_steps(tmp_path, monkeypatch, ends, failed):
    """Digests of the last step come before its checkpoint; whoever interrupts does not wait."""
    done: list[Any] = []
    digested = simple(end=lambda: done.append("digests"))
    saving = simple(end=lambda run: done.append(("saved", run)), leave=lambda alone: done.append(("left", alone)))
    monkeypatch.setattr(session, "_writing", lambda *args: (["observers"], digested, saving))

    def loop(run, *, stop, **how):
        done.append((run, how, stop()))
        if ends is not None:
            raise ends
        return "after"

    monkeypatch.setattr(session, "_loop_of", lambda settings, made: loop)
    asked = [1.0]
    monkeypatch.setattr(session, "stop_requests", lambda announce: contextlib.nullcontext(asked))
    settings, made = tiny_run.settings(tmp_path, steps=9), simple(mesh=RANKS[1])
    watch = None if failed is None else simple(error=failed or None)
    with contextlib.ExitStack() as opened:
        if ends is None:
            assert session._trained(settings, made, "run", opened, watch) == "after"
        else:
            with pytest.raises(type(ends)):
                session._trained(settings, made, "run", opened, watch)
    how = {"steps": 9, "observers": ["observers"], "mesh": RANKS[1], "donate": True}
    assert done[0] == ("run", how, True)
    left = [] if isinstance(ends, KeyboardInterrupt) else [("left", bool(failed))]
    assert done[1:] == (["digests", ("saved", "after")] if ends is None else left)


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("supervised", [False, True])
def test_the_loop_of_a_run_is_that_of_its_settings(tmp_path, monkeypatch, supervised, evaluated):
    settings = tiny_run.settings(tmp_path, eval__every=3, eval__before=False, rollout__ahead=2)
    own = "evaluate" if evaluated else None
    made = simple(program="program", draw="draw", evaluate=own, imitation="imitation", mesh="mesh")
    monkeypatch.setattr(session, "SupervisedAssembly", SimpleNamespace if supervised else type("Other", (), {}))
    monkeypatch.setattr(session.evaluations, "in_training", lambda *args: args)
    loop = session._loop_of(settings, made)
    if supervised:
        begin, evaluation = loop.keywords.pop("begin"), loop.keywords.pop("evaluation")
        assert (loop.func, loop.keywords) == (session.watch_steps, {})
        assert (begin.func, begin.keywords) == (
            session.imitate_steps,
            {"imitation": "imitation", "mesh": "mesh", "donate": True},
        )
        assert evaluation == (Evaluation("evaluate", every=3, before=False) if evaluated else None)
    else:
        how = {"program": "program", "draw": "draw", "evaluation": (settings, made), "ahead": 2}
        assert (loop.func, loop.keywords) == (session.train, how)


@pytest.mark.parametrize("placed", [False, True])
def test_a_checkpoint_holds_the_notes_of_its_prompts(tmp_path, monkeypatch, placed):
    kept: list[Any] = []
    stand_in(monkeypatch, session.checkpoint, kept, begin_save="pending")
    apart = simple(save=lambda *args, **named: kept.append(("save", args, named)) or "pending")
    drawn = simple(notes=lambda: {"note": "x"})
    made = simple(placed=apart if placed else None, mesh="mesh", shapes="shapes", drawn=drawn)
    run = simple(step=6)
    assert session._begin_save(made, tmp_path, 4, run) == "pending"
    both = {"keep": 4, "notes": {"note": "x"}}
    whole = {"mesh": "mesh", "shapes": "shapes", "free": "ahead", **both}
    assert kept == [("save", (run, tmp_path), both) if placed else ("begin_save", (run, tmp_path, 6), whole)]


def test_a_run_begins_with_the_checkpoint_of_another_and_with_none_of_its_own(tmp_path, monkeypatch):
    """So that it can go on without the other."""
    begun: list[int] = []
    monkeypatch.setattr(session, "digest_spacing", lambda *_: 1)
    monkeypatch.setattr(
        session, "_begin_save", lambda made, place, keep, run: begun.append(run.step) or simple(wait=lambda: None)
    )
    made = simple(mesh=RANKS[1], shapes={}, device="d", placed=None, calls=list)
    for step, own in itertools.product((0, 4), ([], [4])):
        monkeypatch.setattr(session.checkpoint, "steps", lambda directory, own=own: own)
        with contextlib.ExitStack() as opened:
            observing, *_ = session._writing(tiny_run.settings(tmp_path), made, simple(step=step), opened, None)
        assert len(observing) == 4  # none of samples, and none of users, on this rank
    assert begun == [4]


def test_what_a_run_opened_is_closed_with_it(tmp_path, monkeypatch, capsys):
    """A profile under way is stopped, and a user's observer says how often it has failed."""

    def fails(record):
        raise ValueError("mine")

    monkeypatch.setattr(session, "digest_spacing", lambda *_: 1)
    for name in ("_record_start", "_sample_files"):
        monkeypatch.setattr(session, name, lambda *args: simple(close=lambda: None, wait=lambda: None))
    monkeypatch.setattr(session, "_logging", lambda *args: lambda record: None)
    stopped: list[int] = []
    monkeypatch.setattr(session.Profiles, "begin", lambda self, step: None)
    monkeypatch.setattr(session.Profiles, "stop", lambda self: stopped.append(1) or [])
    made = simple(mesh=session.LOCAL, shapes={}, device="d", placed=None, calls=list)
    made.inputs = simple(observers={"mine:fails": fails})
    with contextlib.ExitStack() as opened:
        observing, *_ = session._writing(tiny_run.settings(tmp_path), made, simple(step=0), opened, None)
        own = next(x for x in observing if isinstance(x, session.OwnObserver))
        for step in (1, 2, 3):
            own(StepRecord(run=simple(step=step), experience=None, metrics={}))
        assert stopped == []
    assert stopped == [1]
    assert "log.observers: mine:fails has failed 3 times; the run is whole" in capsys.readouterr().err


def test_lines_of_digests_without_a_step_are_no_record(tmp_path):
    text = '{"step": 2, "a": 1}\n{"x": 1}\n{"st\n{"step": 3}\n'
    (tmp_path / "digests.jsonl").write_text(text)
    assert session.recorded(tmp_path) == {2: {"step": 2, "a": 1}, 3: {"step": 3}}


@pytest.mark.parametrize("text", [None, "wrong"])
def test_a_target_that_may_not_be_replaced_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr(session.places, "target_problem", lambda settings, target: text)
    with contextlib.nullcontext() if text is None else pytest.raises(ValueError, match="wrong"):
        session.check_target(tiny_run.settings(tmp_path), tmp_path)


# parts of a saved run

SEEN = {"algorithm__advantage": "grpo", "rollout__n": 4}
KINDS = {"critic": {}, "none": SEEN, "reads": {"critic__reads": "confidence"}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("there", [False, True])
def test_commands_that_do_not_train_read_the_configs_of_the_run(tmp_path, kind, lora, there):
    """With none of the settings that its first model needed; the base of an adapter is read again."""
    texts = {"model__tokenizer": "words", "data__chat": True, "data__chat_template": "t.jinja", "check": False}
    more = {"model__config": {"rope_theta": 2.0}, "model__lora__rank": lora, **KINDS[kind], **texts}
    (tmp_path / "run" / "configs").mkdir(parents=True) if there else None
    settings = tiny_run.settings(tmp_path, **more)
    found = saved.bare(settings)
    if lora or not there:
        assert found is settings
        return
    configs = tmp_path / "run" / "configs"
    critic = str(configs / "critic") if kind == "critic" else None
    own = {"path": str(configs / "actor"), "critic_path": critic, "tokenizer": None, "config": {}}
    model, data = attrs.evolve(settings.model, **own), attrs.evolve(settings.data, chat_template=None)
    assert found == attrs.evolve(settings, model=model, data=data)


@pytest.mark.parametrize(("role", "merge"), itertools.product(("actor", "critic"), (False, True)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [None, "actor", "both"])
def test_an_export_is_of_what_the_run_has(tmp_path, monkeypatch, role, merge, kind, lora):
    kept: list[Any] = []
    names = {"_export_adapted": None, "bare": lambda settings: "bare", "params": "params", "device_of": "device"}
    names |= {
        "bare_model": "model",
        "load_tokenizer": "words",
        "policy_generation": "generation",
        "load_images": None,
    }
    stand_in(monkeypatch, saved, kept, **names)
    stand_in(monkeypatch, saved.models, kept, save=None)
    monkeypatch.setattr(saved.checkpoint, "place_of", lambda directory, step: directory / str(step))
    rank = {} if lora is None else {"model__lora__rank": 2}
    settings = tiny_run.settings(tmp_path, **KINDS[kind], **rank)
    own = simple(used=lora is not None, of_critic=lora == "both")
    whole = simple(model=simple(lora=own), data="data", critic="critic", device="cpu", placement="placement")
    whole.output_dir, whole.algorithm, whole.critic = settings.output_dir, settings.algorithm, settings.critic
    whole.uses_critic_model = settings.uses_critic_model
    bare = simple(model="bare model", critic="bare critic", data="bare data", device="cpu", placement="placement")
    monkeypatch.setattr(saved, "bare", lambda given: bare if given is whole else None)
    path = tmp_path / "run" / "checkpoints" / "3"
    refused = None
    if role == "critic" and kind == "none":
        refused = "the run has no critic: algorithm.advantage = 'grpo' trains none"
    elif role == "critic" and kind == "reads":
        refused = "the run's critic is not a model: with critic.reads = 'confidence' it reads the results"
    adapted = lora is not None if role == "actor" else lora == "both"
    if not refused and merge and not adapted:
        refused = f"the run's {role} has no adapter: leave --merge out"
    if refused:
        with pytest.raises(ValueError, match=refused):
            saved.export(whole, tmp_path / "out", 3, role, merge=merge)
        assert kept == []
        return
    saved.export(whole, tmp_path / "out", 3, role, merge=merge)
    if adapted:
        assert kept == [("_export_adapted", (whole, tmp_path / "out", path, role), {"merge": merge})]
        return
    assert ("bare_model", ("bare model", None if role == "actor" else "bare critic"), {}) in kept
    assert ("params", ("model", role, path), {"device": "device"}) in kept
    generation = "generation" if role == "actor" else None
    how = {"tokenizer": "words", "generation_config": generation}
    assert kept[-1] == ("save", ("model", "params", tmp_path / "out"), how)
    assert ("load_tokenizer", ("bare model", "bare data"), {}) in kept


@pytest.mark.parametrize("steps", [[], [2, 5]])
def test_a_command_that_made_a_run_is_that_of_its_newest_checkpoint(tmp_path, monkeypatch, steps):
    monkeypatch.setattr(starts.checkpoint, "steps", lambda directory: steps)
    monkeypatch.setattr(starts.checkpoint, "place_of", lambda directory, step: step)
    monkeypatch.setattr(starts.checkpoint, "notes_of", lambda step: {starts.MADE_BY: "fppo sft"} if step == 5 else {})
    assert starts.made_by(tmp_path) == ("fppo sft" if steps else None)


# digests and checkpoints


class Waited:
    """A checkpoint under way."""

    def __init__(self, kept, done=True, error=None):
        self.kept, self.ready, self.error = kept, done, error

    def done(self):
        return self.ready

    def wait(self, *timeout):
        self.kept.append(timeout)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(("ranks", "alone"), itertools.product((1, 2), (False, True)))
@pytest.mark.parametrize("error", [None, CheckpointError("full"), TimeoutError()])
def test_a_failing_rank_waits_so_long_for_others_and_for_itself_as_long_as_it_takes(ranks, alone, error):
    kept: list[Any] = []
    saving = writer.Checkpoints(kept=bool, begin=None, ranks=ranks, pending=[Waited(kept, error=error)])
    saving.leave(alone=alone)
    assert kept == ([] if ranks > 1 and alone else [(None,) if ranks == 1 else (writer.PATIENCE,)])


def test_a_checkpoint_is_waited_for_before_the_next_and_once_it_is_written():
    kept: list[Any] = []
    begun: list[int] = []
    ready = {2: False, 4: True, 6: False}

    def begin(run):
        begun.append(run.step)
        return Waited(kept, ready[run.step])

    saving = writer.Checkpoints(kept=lambda step: step % 2 == 0, begin=begin, ranks=1)
    waited = []
    for step in range(1, 7):
        numbers = saving(StepRecord(run=simple(step=step), experience="rows", metrics={}))
        assert (step % 2 == 0) == ("timing_s/save_checkpoint" in numbers)
        waited.append(len(kept))
    assert waited == [0, 0, 0, 1, 2, 2]
    assert saving(StepRecord(run=simple(step=0), experience=None, metrics={})) == {}
    saving.end(simple(step=6))
    assert (begun, len(kept)) == ([2, 4, 6], 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_digests_are_computed_by_all_ranks_and_written_by_the_first(tmp_path, monkeypatch, capsys, rank):
    """Of the last step that was left out alone, and only if it was the last."""
    computed, written, dumped = [], [], []
    monkeypatch.setattr(writer.replay, "dump", lambda record, line, to: dumped.append(record.run.step) or to)
    lines = None if rank else simple(write=written.append)
    made = writer.Digests(
        directory=tmp_path,
        lines=lines,
        every=3,
        kept=lambda step: step == 4,
        line=lambda record: computed.append(record.run.step) or {"step": record.run.step},
    )
    for step in range(1, 9):
        numbers = {"critic/skipped": 1.0} if step == 7 else {}
        found = made(StepRecord(run=simple(step=step), experience="rows", metrics=numbers))
        assert ("timing_s/digests" in found) == (step in (3, 4, 6, 7))
    assert made(StepRecord(run=simple(step=0), experience=None, metrics={})) == {}
    made.end()
    made.end()
    assert computed == [3, 4, 6, 7, 8]
    assert written == ([] if rank else [{"step": step} for step in computed])
    assert dumped == ([] if rank else [7])
    assert ("an update was not finite" in capsys.readouterr().err) == (rank == 0)
    made(StepRecord(run=simple(step=1), experience="rows", metrics={}))
    made(StepRecord(run=simple(step=3), experience="rows", metrics={}))
    made.end()
    assert computed == [3, 4, 6, 7, 8, 3]


def test_a_second_writer_is_seen_while_the_first_is_there(tmp_path):
    with session.alone_in(tmp_path):
        before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        for _ in range(2):
            with pytest.raises(ValueError, match="another process is writing"), session.alone_in(tmp_path):
                pass
        assert (len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0) == before
    with session.alone_in(tmp_path):
        pass
