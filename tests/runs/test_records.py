"""Records of a run by step: which settings, code, bases and counters belong to a step of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from fppo.key import Key
from fppo.pipeline.program import Base, RunState
from fppo.runs import origins, sampling, saved, session, starts
from fppo.runs.resuming import check_bases
from fppo.runtime import checkpoint
from fppo.settings import files
from fppo.steps.train_state import TrainState
from tests import tiny_run


@pytest.fixture
def begun(tmp_path):
    """A run that started anew, and went on from steps 3 and 5, each time with another seed."""
    (tmp_path / "run").mkdir()
    for start, seed in ((0, 10), (3, 13), (5, 15)):
        starts.record(tiny_run.settings(tmp_path, seed=seed), start)
    return tmp_path / "run"


def test_the_settings_of_a_step_are_those_of_the_start_before_it(begun):
    found = {step: starts.load(begun, step).seed for step in range(1, 8)}
    assert found == {1: 10, 2: 10, 3: 10, 4: 13, 5: 13, 6: 15, 7: 15}
    assert starts.load(begun).seed == 15


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 7, [(10, 3), (13, 5), (15, 7)]),
        (3, 5, [(10, 3), (13, 5)]),
        (4, 5, [(13, 5)]),
        (5, 6, [(13, 5), (15, 6)]),
        (6, 6, [(15, 6)]),
        (1, 3, [(10, 3)]),
    ],
)
def test_steps_are_computed_again_in_spans_of_equal_settings(begun, first, last, expected):
    assert [(settings.seed, until) for settings, until in starts.spans(begun, first, last)] == expected


def test_a_start_drops_those_of_later_steps_alone(begun, tmp_path):
    starts.record(tiny_run.settings(tmp_path, seed=23), 3)
    assert sorted(path.name for path in (begun / files.STARTS).glob("*.toml")) == [
        "step_00000000.toml",
        "step_00000003.toml",
    ]
    assert [starts.load(begun, step).seed for step in (3, 4)] == [10, 23]


def test_a_start_with_the_same_settings_has_no_file_of_its_own(begun, tmp_path):
    changes = starts.record(tiny_run.settings(tmp_path, seed=15), 6)
    assert changes == {}
    assert not (begun / files.STARTS / "step_00000006.toml").exists()
    assert starts.record(tiny_run.settings(tmp_path, seed=16), 6) == {"seed": (15, 16)}


def test_the_code_of_a_step_is_that_of_the_start_before_it(tmp_path):
    directory = tmp_path / files.STARTS
    directory.mkdir()
    for start in (0, 3):
        of_start = origins.Origin(versions={"start": str(start)}, commits={}, code={})
        (directory / f"step_{start:08d}.json").write_text(json.dumps(attrs.asdict(of_start)))
    found = {step: origins.load(tmp_path, step).versions["start"] for step in (1, 3, 4)}
    assert found == {1: "0", 3: "0", 4: "3"}
    assert origins.load(tmp_path, 0) is None


OWN = Base(source="a", digest="d", dtype="float32", adapter="rank 4")


@pytest.fixture
def adapted(tmp_path):
    """A checkpoint of a run with an adapter."""
    state = TrainState(params={"w": torch.ones(2)}, opt=None, step=12)
    run = RunState(actor=state, key=Key(5), step=3, bases={"actor": OWN, "critic": OWN})
    return checkpoint.begin_save(run, tmp_path, 3).wait()


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"adapter": "rank 8"}, r"model\.lora: the {role}'s adapter in .* is rank 4, but the settings give rank 8"),
        ({"dtype": "bfloat16"}, r"model\.compute_dtype or model\.lora\.base: the {role}'s .* in float32, .* bfloat16"),
        ({"digest": "e"}, r"{path}: the {role}'s adapter in .* on the weights of a, whose digest was d; .* have e"),
    ],
)
def test_an_adapter_goes_on_on_its_own_base_alone(adapted, role, changes, setting):
    check_bases({"actor": OWN, "critic": attrs.evolve(OWN, source="moved")}, adapted)
    check_bases(None, adapted)
    path = r"model\.path" if role == "actor" else r"model\.critic_path"
    with pytest.raises(ValueError, match=setting.format(role=role, path=path)):
        check_bases({role: attrs.evolve(OWN, **changes)}, adapted)


def test_a_policy_that_is_read_alone_has_the_counters_of_its_checkpoint(adapted):
    model = SimpleNamespace(shapes={"w": torch.Size((2,))}, extents={}, cuts={})
    found = saved.policy(model, adapted)
    assert (found.step, found.actor.step, found.key) == (3, 12, Key(5))
    assert torch.equal(found.actor.params["w"], torch.ones(2))
    assert found.actor.opt is None


def test_the_newest_checkpoint_is_the_last_that_is_not_after_a_step(tmp_path):
    assert saved.newest(tmp_path) is None
    state = TrainState(params={}, opt=None, step=0)
    for step in (2, 5):
        run = RunState(actor=state, key=Key(0), step=step)
        checkpoint.begin_save(run, tmp_path / "checkpoints", step).wait()
    assert [saved.newest(tmp_path, step) for step in (None, 7, 5, 4, 2, 1)] == [5, 5, 5, 2, 2, None]


@pytest.mark.parametrize(
    ("last", "every", "exported", "refused"),
    [(0, 2, False, False), (5, 2, False, True), (4, 2, False, False), (3, 0, False, False), (3, 0, True, True)],
)
def test_a_record_that_goes_past_a_lost_checkpoint_is_not_deleted(
    tmp_path, monkeypatch, last, every, exported, refused
):
    """A run that was killed before its first checkpoints begins anew."""
    monkeypatch.setattr(session, "recorded", lambda directory: {key: {} for key in range(1, last + 1)})
    monkeypatch.setattr(starts, "last", lambda directory: {"checkpoint.every": every})
    if exported:
        (tmp_path / session.MODEL).mkdir()
    if not refused:
        session._check_beginning(tmp_path)
        return
    with pytest.raises(ValueError, match=f"holds the record of {last} steps, but no checkpoint"):
        session._check_beginning(tmp_path)


@pytest.mark.parametrize(("resume", "own", "expected"), [("auto", [], None), ("auto", [2, 5], 5), ("must", [5], 5)])
def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path, monkeypatch, resume, own, expected):
    monkeypatch.setattr(checkpoint, "steps", lambda directory: own)
    monkeypatch.setattr(checkpoint, "place_of", lambda directory, step: directory / f"of {step}")
    found = session._named(tiny_run.settings(tmp_path, resume=resume))
    assert found == (None if expected is None else Path(tmp_path / "run" / "checkpoints" / f"of {expected}"))


@pytest.mark.parametrize(("source", "asked", "refused"), [("b", "b", False), ("b", "c", True), (None, "b", True)])
def test_a_run_that_began_from_anothers_checkpoint_goes_on_when_it_is_started_as_before(
    tmp_path, monkeypatch, source, asked, refused
):
    """The run goes on from its own newest checkpoint, and not from the other's."""
    at = {name: str(tmp_path / name / "step_00000004") for name in "bc"}
    settings = tiny_run.settings(tmp_path, resume=at[asked])
    own = Path(settings.output_dir) / session.CHECKPOINTS / "step_00000002"
    for place in (*at.values(), own):
        Path(place).mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "steps", lambda directory: [2])
    monkeypatch.setattr(checkpoint, "misnamed", lambda directory: [])
    monkeypatch.setattr(starts, "source", lambda directory: at.get(source))
    monkeypatch.setattr(session, "_loaded", lambda settings, assembly, path, donate: (path, donate))
    assembly = SimpleNamespace(mesh=session.LOCAL)
    if not refused:
        assert session.restore(settings, assembly) == (own, True)
        return
    with pytest.raises(ValueError, match="holds the checkpoint of step 2 already: give another output_dir to start"):
        session.restore(settings, assembly)
    named = attrs.evolve(settings, resume=str(own))
    assert session.restore(named, assembly) == (own, True)


def test_batches_of_a_policy_are_numbered_from_one_and_keep_its_place(tmp_path, monkeypatch):
    """The run's own cursor is where they begin."""
    drawn, written = [], []
    run = RunState(actor=TrainState(params={"w": torch.ones(1)}, opt=None, step=0), key=Key(0), step=4)

    def sample(run, *, program, draw):
        drawn.append((run.step, run.cursor.position))
        after = attrs.evolve(run.cursor, position=run.cursor.position + 2)
        return "scored", after, {}

    monkeypatch.setattr(sampling, "sample", sample)
    monkeypatch.setattr(sampling.session, "at", lambda settings, assembly: run)
    monkeypatch.setattr(sampling.saved, "write", lambda scored, directory, step: written.append(step))
    monkeypatch.setattr(sampling, "scored_lines", lambda scored, tokenizer, step: [{"step": step}])
    monkeypatch.setattr(sampling, "_summary", lambda *args: "")
    made = SimpleNamespace(mesh=sampling.session.LOCAL, program=None, draw=None, inputs=SimpleNamespace(tokenizer=None))
    assert sampling.run_sampling(tiny_run.settings(tmp_path, steps=3), made) == 3
    assert drawn == [(0, 0), (1, 2), (2, 4)]
    assert written == [1, 2, 3]
    lines = (tmp_path / "run" / "rollouts" / sampling.ROWS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
