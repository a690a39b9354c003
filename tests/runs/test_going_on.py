"""From where a run goes on, and what it reads, writes and exports: each decision by a table."""

from __future__ import annotations

import copy
import itertools
import os
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from fppo.assembly.run import assemble
from fppo.pipeline.train import StepRecord
from fppo.runs import saved, session, starts, writer
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import CheckpointError
from fppo.tree import replace
from tests import tiny_run

simple = SimpleNamespace
# where a run goes on

ASKED = ["auto", "never", "must", "checkpoints/step_00000002", "elsewhere/step_00000007"]
OTHER = "other/step_00000007"


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """A tiny run before its first step."""
    task = tmp_path_factory.mktemp("task")
    tiny_run.write_task(task)
    with assemble(tiny_run.settings(task, data__eval_path=[])) as assembly:
        yield assembly


@pytest.fixture
def made(assembly):
    """The run with a state of its own, which may be donated."""
    return attrs.evolve(assembly, run=copy.deepcopy(assembly.run))


def save(made, directory, *steps, **notes):
    """Save the state of a run as it stood after each of some steps."""
    for step in steps:
        at = replace(made.run, step=step)
        checkpoint.begin_save(at, directory, step, notes={**made.drawn.notes(), **notes}).wait()


@pytest.mark.slow
@pytest.mark.parametrize("own", [[], [1, 2]])
@pytest.mark.parametrize("resume", ASKED)
@pytest.mark.parametrize("began", [None, ASKED[4], OTHER])
def test_a_run_goes_on_from_the_checkpoint_that_is_named_or_from_its_own(made, tmp_path, own, resume, began):
    """A fork goes on from its own newest one, also by the command that began it; another one would mix two runs."""
    run = tmp_path / "run"
    run.mkdir()
    save(made, run / "checkpoints", *own)
    for name in ("elsewhere", "other"):
        save(made, tmp_path / name, 7)
    named = {x: str((run if x.startswith("checkpoints") else tmp_path) / x) for x in (*ASKED[3:], OTHER)}
    if began:
        starts.record(tiny_run.settings(tmp_path, resume=named[began]), 7)
    settings = tiny_run.settings(tmp_path, resume=named.get(resume, resume))
    refused = {
        "never": own and "resume = 'never', but .* holds the checkpoint of step 2: give another",
        "must": not own and "resume = 'must', but there is no checkpoint",
        ASKED[3]: not own and "step_00000002",
        ASKED[4]: own and began != ASKED[4] and "holds the checkpoint of step 2 already: give another output_dir to",
    }.get(resume)
    if refused:
        with pytest.raises((ValueError, CheckpointError), match=refused):
            session.restore(settings, made)
        return
    asked = 7 if resume == ASKED[4] else 2
    assert session.at(settings, made).step == (asked if own or resume in named else 0)
    assert session.restore(settings, made).step == (2 if own else 7 if resume == ASKED[4] else 0)


@pytest.mark.parametrize(
    ("last", "every", "exported", "refused"),
    [(0, 2, False, False), (5, 2, False, True), (4, 2, False, False), (3, 0, False, False), (3, 0, True, True)],
)
def test_a_record_that_goes_past_a_lost_checkpoint_is_not_deleted(made, tmp_path, last, every, exported, refused):
    """A run that was killed before its first checkpoints begins anew."""
    settings = tiny_run.settings(tmp_path, checkpoint__every=every)
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True) if exported else run.mkdir()
    (run / "digests.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, last + 1)))
    starts.record(settings, 0)
    if not refused:
        assert session.restore(settings, made).step == 0
        return
    with pytest.raises(ValueError, match=f"holds the record of {last} steps, but no checkpoint"):
        session.restore(settings, made)


def test_lines_of_digests_without_a_step_are_no_record(tmp_path):
    text = '{"step": 2, "a": 1}\n{"x": 1}\n{"st\n{"step": 3}\n'
    (tmp_path / "digests.jsonl").write_text(text)
    assert session.recorded(tmp_path) == {2: {"step": 2, "a": 1}, 3: {"step": 3}}


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


NO_ADAPTER = "has no adapter: leave --merge out"


@pytest.mark.parametrize(
    ("kind", "role", "merge", "text"),
    [
        ("none", "critic", False, "the run has no critic: algorithm.advantage = 'grpo' trains none"),
        ("reads", "critic", True, "the run's critic is not a model: with critic.reads = 'confidence' it reads the res"),
        ("critic", "critic", True, f"the run's critic {NO_ADAPTER}"),
        ("none", "actor", True, f"the run's actor {NO_ADAPTER}"),
    ],
)
def test_an_export_of_what_a_run_has_not_is_refused(made, tmp_path, kind, role, merge, text):
    save(made, tmp_path / "run" / "checkpoints", 3)
    with pytest.raises(ValueError, match=text):
        saved.export(tiny_run.settings(tmp_path, **KINDS[kind]), tmp_path / "out", 3, role, merge=merge)
    assert not (tmp_path / "out").exists()


def test_a_command_that_made_a_run_is_that_of_its_newest_checkpoint(made, tmp_path):
    assert starts.made_by(tmp_path) is None
    save(made, tmp_path / "checkpoints", 2)
    assert starts.made_by(tmp_path) is None
    save(made, tmp_path / "checkpoints", 5, **{starts.MADE_BY: "fppo sft"})
    assert starts.made_by(tmp_path) == "fppo sft"


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
    saving = writer.Checkpoints(is_saved=bool, begin=None, ranks=ranks, pending=[Waited(kept, error=error)])
    saving.leave(alone=alone)
    assert kept == ([] if ranks > 1 and alone else [(None,) if ranks == 1 else (writer.PATIENCE,)])


def test_a_checkpoint_is_waited_for_before_the_next_and_once_it_is_written():
    kept: list[Any] = []
    begun: list[int] = []
    ready = {2: False, 4: True, 6: False}

    def begin(run):
        begun.append(run.step)
        return Waited(kept, ready[run.step])

    saving = writer.Checkpoints(is_saved=lambda step: step % 2 == 0, begin=begin, ranks=1)
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
def test_digests_are_computed_by_all_ranks_and_written_by_the_first(tmp_path, rank):
    """Of the last step that was left out alone, and only if it was the last."""
    computed, written = [], []
    made = writer.Digests(
        directory=tmp_path,
        lines=None if rank else simple(write=written.append),
        every=3,
        is_saved=lambda step: step == 4,
        line=lambda record: computed.append(record.run.step) or {"step": record.run.step},
    )
    for step in range(1, 9):
        found = made(StepRecord(run=simple(step=step), experience="rows", metrics={}))
        assert ("timing_s/digests" in found) == (step in (3, 4, 6))
    assert made(StepRecord(run=simple(step=0), experience=None, metrics={})) == {}
    made.end()
    made.end()
    assert computed == [3, 4, 6, 8]
    assert written == ([] if rank else [{"step": step} for step in computed])
    for step in (1, 3):
        made(StepRecord(run=simple(step=step), experience="rows", metrics={}))
    made.end()
    assert computed == [3, 4, 6, 8, 3]


def test_a_second_writer_is_seen_while_the_first_is_there(tmp_path):
    with session.alone_in(tmp_path):
        before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        for _ in range(2):
            with pytest.raises(ValueError, match="another process is writing"), session.alone_in(tmp_path):
                pass
        assert (len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0) == before
    with session.alone_in(tmp_path):
        pass
