"""Checkpoints of meshes: written by all ranks or by none, and read on any other mesh."""

import json
import math
import shutil
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fppo import tree
from fppo.key import Key
from fppo.runtime import _checkpoint_attempt as attempts
from fppo.runtime import _checkpoint_files as files
from fppo.runtime import checkpoint, clock, fsdp
from fppo.runtime.checkpoint import CheckpointError
from fppo.runtime.layout import Cut, Extent
from fppo.runtime.mesh import Mesh, Sharding
from fppo.runtime.simulate import simulate

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
MESHES = [
    {"replicate": r, "shard": s, "sequence": q} for r in (1, 2) for s in (1, 2, 3, 4) for q in (1, 2) if r * s * q <= 4
] + [{"shard": 2, "expert": 2}, {"shard": 1, "expert": 3}]  # of which all ranks have rows of their own
TEMPLATE_SEED = 99


def state(seed=0, rows=(5, 1, 7), dtypes=(torch.float32, torch.bfloat16, torch.int64)):
    """A state with leaves to cut, with others, and with plain values."""
    g = torch.Generator().manual_seed(seed)
    params = {
        f"w{i}": torch.randint(-100, 100, (n, 3)[: 1 + i % 2], generator=g).to(dtype)
        for i, (n, dtype) in enumerate(zip(rows, dtypes, strict=True))
    }
    count, table = torch.tensor(float(seed)), torch.randn(2, 2, generator=g)
    return {"params": params, "count": count, "table": table, "key": Key(seed), "coef": 0.1 + seed}


def whole_shapes(value):
    return {f"['params']['{name}']": x.shape for name, x in value["params"].items()}


def cut(value, mesh):
    """What a rank holds of a whole state, and the mesh it knows it by."""
    mesh = attrs.evolve(mesh, sharding=Sharding())
    return {**value, "params": fsdp.shard(value["params"], mesh)}, mesh


def save(mesh, value, directory, step=1, **settings):
    held, mesh = cut(value, mesh)
    return checkpoint.begin_save(held, directory, step, mesh=mesh, shapes=whole_shapes(value), **settings).wait()


def load(mesh, template, directory, step=1):
    held, mesh = cut(template, mesh)
    return checkpoint.load(held, directory, step, mesh=mesh, shapes=whole_shapes(template))


def assert_holds(directory, expected, step, axes=None):
    """Every rank of a mesh, by default of one, gets its part of `expected`, bit for bit."""
    template = tree.map(torch.zeros_like, expected) | {"key": Key(TEMPLATE_SEED), "coef": 0.0}
    axes = axes or {"shard": 1}
    for found, part in simulate(axes, lambda mesh: (load(mesh, template, directory, step), cut(expected, mesh)[0])):
        assert tree.digest(found) == tree.digest(part)


def left(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.sampled_from(MESHES),
    st.sampled_from(MESHES),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), min_size=1, max_size=4),
)
def test_what_any_mesh_saves_any_other_loads_bit_for_bit(writers, readers, leaves):
    value = state(0, *zip(*leaves, strict=True))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        paths = simulate(writers, lambda mesh: save(mesh, value, directory))
        assert set(paths) == {checkpoint.path_of(directory, 1)}
        assert_holds(directory, value, 1, readers)
        assert_holds(directory, value, 1)
        assert left(directory) == ["step_00000001"]
        assert len(list(paths[0].glob("*.safetensors"))) == writers["shard"] * writers.get("expert", 1)


CUTS = {  # the whole shape, the cut, and on which of two stages it is
    "rows": ((8, 3), Cut(0, 2, (4, 4)), (0,)),  # two projections that are merged; two ranks of four hold the same
    "columns": ((3, 8), Cut(1, 4, (8,)), (1,)),
    "words": ((7, 2), Cut(0, 4, (7,)), (0, 1)),
    "experts": ((4, 3), Cut(0, 4, (4,), "expert"), (0,)),
    "whole": ((5, 2), None, (1,)),
}


def on_any_rank(mesh):
    """What a rank of any mesh holds of a state that all axes cut; the mesh; the extents."""
    mesh, pipeline = attrs.evolve(mesh, sharding=Sharding()), mesh["pipeline"]
    params, extents = {}, {}
    for i, (name, (shape, cut, stages)) in enumerate(CUTS.items()):
        x, held = torch.arange(math.prod(shape)).view(shape) + 100 * i, ()
        axis = mesh["tensor" if cut is None else cut.axis]
        if axis.size == 1 or cut is None:
            cut = None
        else:
            cut = attrs.evolve(cut, parts=min(cut.parts, axis.size))
            x = cut.take(x, cut.part(axis.rank, axis.size))
        if pipeline.size > 1:
            held = tuple(stage * (pipeline.size - 1) for stage in stages)
        if not held or pipeline.rank in held:
            params[name] = x
        extents[name] = Extent(torch.Size(shape), cut, held) if cut is not None or held else torch.Size(shape)
    cuts = {name: x.cut for name, x in extents.items() if isinstance(x, Extent) and x.cut is not None}
    params = fsdp.shard(params, mesh, cuts)
    named = {f"['params']['{name}']": extent for name, extent in extents.items()}
    named |= {f"['mu']['{name}']": extents[name] for name in params}  # an optimizer's, of which ranks know their own
    return {"params": params, "mu": tree.map(torch.neg, params), "step": 3}, mesh, named


WRITERS = [
    {"tensor": 2},
    {"tensor": 4},
    {"replicate": 2, "shard": 3, "tensor": 2},
    {"pipeline": 2},
    {"pipeline": 3, "shard": 2},
    {"pipeline": 2, "replicate": 2, "tensor": 2},
    {"expert": 2},
    {"replicate": 2, "shard": 2, "expert": 4},
    {"pipeline": 2, "shard": 2, "expert": 2, "tensor": 2},
]
READERS = [
    {},
    {"shard": 4},
    {"tensor": 4},
    {"shard": 2, "tensor": 2},
    {"sequence": 2, "tensor": 2},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 3},
    {"expert": 4},
    {"shard": 3, "expert": 2, "tensor": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("writers", WRITERS, ids=str)
def test_what_is_cut_over_any_axes_is_loaded_onto_any_mesh(tmp_path, writers):
    def save(mesh):
        held, mesh, extents = on_any_rank(mesh)
        for _ in range(2):  # the same state again is left as it is
            checkpoint.begin_save(held, tmp_path, 1, mesh=mesh, shapes=extents).wait()

    def load(mesh):
        held, mesh, extents = on_any_rank(mesh)
        empty = tree.map(torch.zeros_like, held)
        assert tree.digest(checkpoint.load(empty, tmp_path, 1, mesh=mesh, shapes=extents)) == tree.digest(held)

    simulate(writers, save)
    for readers in READERS:
        simulate(readers, load)
    stored = [
        x.numel() for file in tmp_path.glob("*/*.safetensors") for x in safetensors.torch.load_file(file).values()
    ]
    assert sum(stored) == 2 * sum(math.prod(shape) for shape, *_ in CUTS.values())  # each number once


def as_format_6(manifest):
    """As it was written where dense leaves were on the first rank of the expert axis."""
    old = {key: value for key, value in manifest.items() if key != "digest"} | {"format": 6}
    for leaf in old["leaves"].values():
        assert leaf.pop("experts") == 1
    return old | {"digest": files._digest(files._canonical(old))}


@pytest.mark.parametrize("readers", [{"shard": 3}, {"shard": 2, "expert": 2}, {"expert": 4, "tensor": 2}], ids=str)
def test_a_checkpoint_of_format_6_is_loaded_onto_any_mesh(tmp_path, readers, monkeypatch):
    def held(mesh):
        held, mesh, extents = on_any_rank(mesh)
        return held, {"mesh": mesh, "shapes": extents}

    def save(mesh):
        value, where = held(mesh)
        checkpoint.begin_save(value, tmp_path, 1, **where).wait()

    def load(mesh):
        value, where = held(mesh)
        return tree.digest(checkpoint.load(tree.map(torch.zeros_like, value), tmp_path, 1, **where)), tree.digest(value)

    with monkeypatch.context() as patch:
        patch.setattr(Mesh, "shard_axis", lambda mesh, cut=None: mesh["shard"])
        simulate({"shard": 2, "expert": 2, "tensor": 2}, save)
    file = checkpoint.path_of(tmp_path, 1) / files.MANIFEST
    file.write_text(json.dumps(as_format_6(json.loads(file.read_text()))))
    assert all(found == expected for found, expected in simulate(readers, load))


def test_what_a_stage_holds_otherwise_is_named(tmp_path):
    def save(mesh, spoil=False):
        held, mesh, extents = on_any_rank(mesh)
        if spoil and mesh["pipeline"].rank:
            held["mu"]["columns"] = held["mu"]["columns"] + 1
        checkpoint.begin_save(held, tmp_path, 1, mesh=mesh, shapes=extents).wait()

    def load(mesh):
        held, mesh, extents = on_any_rank(mesh)
        if held["mu"].pop("columns", None) is not None:
            del extents["['mu']['columns']"]
        checkpoint.load(held, tmp_path, 1, mesh=mesh, shapes=extents)

    simulate({"pipeline": 2}, save)
    with pytest.raises(CheckpointError, match="there is one of another state"):
        simulate({"pipeline": 2}, lambda mesh: save(mesh, spoil=True))
    with pytest.raises(CheckpointError, match=r"1 leaves differ: \['mu'\]\['columns'\] is unknown"):
        simulate({"pipeline": 2}, load)


def test_parameters_that_are_not_sharded_are_written_once(tmp_path):
    value = state()
    simulate({"replicate": 2, "shard": 2}, lambda mesh: checkpoint.begin_save(value, tmp_path, 1, mesh=mesh).wait())
    assert [p.name for p in (tmp_path / "step_00000001").glob("*.safetensors")] == ["shard_00000.safetensors"]
    assert_holds(tmp_path, value, 1, {"shard": 3})


def test_what_is_saved_is_what_was_there_when_it_began(tmp_path):
    value = state()

    def run(mesh):
        held, mesh = cut(tree.copy(value), mesh)
        pending = checkpoint.begin_save(held, tmp_path, 1, mesh=mesh, shapes=whole_shapes(value))
        for leaf in [*held["params"].values(), held["count"], held["table"]]:
            leaf.zero_()
        path = pending.wait()
        assert pending.done()
        return path

    simulate({"shard": 2}, run)
    assert_holds(tmp_path, value, 1)


def test_a_rank_reads_the_chunks_it_needs_and_no_others(tmp_path):
    value = state(0, (8,), (torch.float32,))
    simulate({"shard": 4}, lambda mesh: save(mesh, value, tmp_path))
    held, mesh = cut(value, simulate({"shard": 2}, lambda mesh: mesh)[1])
    unread, needed = (checkpoint.path_of(tmp_path, 1) / f"shard_0000{number}.safetensors" for number in (1, 2))
    unread.write_bytes(unread.read_bytes()[:-1])
    checkpoint.load(held, tmp_path, 1, mesh=mesh, shapes=whole_shapes(value))
    needed.unlink()
    with pytest.raises(CheckpointError, match="shard_00002"):
        checkpoint.load(held, tmp_path, 1, mesh=mesh, shapes=whole_shapes(value))


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "json missing", "of another attempt"])
def test_a_damaged_part_is_found_by_those_who_need_it(tmp_path, damage):
    value = state(0, (8,), (torch.float32,))
    for step in (1, 2):
        simulate({"shard": 4}, lambda mesh, step=step: save(mesh, state(step, (8,), (torch.float32,)), tmp_path, step))
    path = tmp_path / "step_00000002"
    data, about = path / "shard_00003.safetensors", path / "shard_00003.json"
    content = bytearray(data.read_bytes())
    match damage:
        case "flip":
            content[-1] ^= 1
            data.write_bytes(content)
        case "cut":
            data.write_bytes(content[:-1])
        case "missing":
            data.unlink()
        case "json missing":
            about.unlink()
        case "of another attempt":
            for file in (data, about):
                shutil.copy(tmp_path / "step_00000001" / file.name, file)
    message = r"damaged: .*shard_00003.*Remove it to resume from step 1"

    def run(mesh):
        try:
            load(mesh, value, tmp_path, 2)
        except CheckpointError as error:
            return str(error)

    first, second = simulate({"shard": 2}, run)
    assert first is None
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(second)
    with pytest.raises(CheckpointError, match=message):
        load(Mesh.local(), value, tmp_path, 2)


def test_another_models_leaves_are_named_by_their_whole_shapes(tmp_path):
    simulate({"shard": 2}, lambda mesh: save(mesh, state(), tmp_path))
    with pytest.raises(
        CheckpointError, match=r"1 leaves differ: \['params'\]\['w0'\] is torch.float32 \(5,\), .*\(6,\)"
    ):
        simulate({"shard": 4}, lambda mesh: load(mesh, state(0, (6, 1, 7)), tmp_path))


def test_shapes_that_do_not_fit_are_refused(tmp_path):
    def run(mesh, shapes):
        checkpoint.begin_save(state(), tmp_path, 1, mesh=attrs.evolve(mesh, sharding=Sharding()), shapes=shapes).wait()

    with pytest.raises(ValueError, match=r"\['params'\]\['w0'\] has the shape \(5,\), but rank . of 2 holds"):
        simulate({"shard": 2}, lambda mesh: run(mesh, whole_shapes(state())))
    with pytest.raises(ValueError, match="that the state does not have"):
        simulate({"shard": 2}, lambda mesh: run(mesh, {"['w']": torch.Size([5])}))


def outcomes(axes, *args, **settings):
    """What save says on each rank: the path, or the error's text."""

    def run(mesh):
        try:
            return save(mesh, *args, **settings)
        except CheckpointError as error:
            return str(error)

    return simulate(axes, run)


STAGES = [(stage, rank) for stage in ("data", "json") for rank in (0, 1, 2)] + [("manifest", 0), ("name", 0)]


def fill_disk(monkeypatch, stage, rank):
    """Lets a rank of the shard axis find the disk full as it writes this."""

    def full_where(module, name, here):
        real = getattr(module, name)

        def write(*args, **kwargs):
            if here(args):
                if name == "write_shard":
                    files.data_file(*args[:2]).write_bytes(b"begun")
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, write)

    match stage:
        case "data":
            full_where(files, "write_shard", lambda args: args[1] == rank)
        case "json":
            full_where(files, "publish", lambda args: args[0].name == f"shard_{rank:05d}.json")
        case "manifest":
            full_where(files, "publish", lambda args: args[0].name == "state.json")
        case "name":
            full_where(attempts, "commit", lambda args: True)


@pytest.mark.parametrize(("stage", "rank"), STAGES)
def test_a_failure_at_any_stage_on_any_rank_is_one_of_all_and_leaves_the_last_one(tmp_path, monkeypatch, stage, rank):
    axes = {"shard": 3, "sequence": 2}
    simulate(axes, lambda mesh: save(mesh, state(1), tmp_path, 1))
    with monkeypatch.context() as patch:
        fill_disk(patch, stage, rank)
        said = outcomes(axes, state(2), tmp_path, 2, keep=1)
    for text in said:
        assert f"on rank {2 * rank}: [Errno 28] No space left on device. The last complete one is of step 1" in text
    assert checkpoint.steps(tmp_path) == [1]
    assert not [*tmp_path.glob(".*/*.safetensors")]  # the space is free again
    assert_holds(tmp_path, state(1), 1)
    simulate(axes, lambda mesh: save(mesh, state(2), tmp_path, 2, keep=1))
    assert left(tmp_path) == ["step_00000002"]
    assert_holds(tmp_path, state(2), 2)


def test_a_directory_that_cannot_be_made_is_an_error_of_all(tmp_path):
    (tmp_path / "file").write_text("")
    said = outcomes({"shard": 2, "replicate": 2}, state(), tmp_path / "file", 1)
    assert len(set(said)) == 1
    assert "Not a directory" in said[0]


def test_a_draft_of_a_crashed_attempt_is_not_taken_for_this_one_and_goes(tmp_path):
    simulate({"shard": 2}, lambda mesh: save(mesh, state(1), tmp_path, 1))
    stale = tmp_path / ".step_00000002.0123456789abcdef"
    shutil.copytree(tmp_path / "step_00000001", stale)
    (stale / "failed.txt").write_text("an old failure")
    (tmp_path / ".step_00000000.dropped").mkdir()
    simulate({"shard": 2}, lambda mesh: save(mesh, state(2), tmp_path, 2))
    assert left(tmp_path) == ["step_00000001", "step_00000002"]
    assert_holds(tmp_path, state(2), 2, {"shard": 4})


@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 3, "replicate": 1}, {"shard": 1}], ids=str)
def test_the_same_step_twice(tmp_path, axes):
    paths = simulate({"shard": 2}, lambda mesh: save(mesh, state(1), tmp_path, 1))
    before = {path.name: path.stat().st_mtime_ns for path in paths[0].iterdir()}
    assert set(simulate(axes, lambda mesh: save(mesh, state(1), tmp_path, 1))) == set(paths)
    assert {path.name: path.stat().st_mtime_ns for path in paths[0].iterdir()} == before
    changed = state(1)
    changed["params"]["w2"][-1] += 1  # in the last rank's rows alone
    other = state(1) | {"coef": 7.0}
    for value in (changed, other):
        for text in outcomes(axes, value, tmp_path, 1):
            assert "there is one of another state" in text
    assert left(tmp_path) == ["step_00000001"]
    assert_holds(tmp_path, state(1), 1)


def test_only_the_newest_are_kept(tmp_path):
    for step in range(4):
        simulate({"shard": 2}, lambda mesh, step=step: save(mesh, state(step), tmp_path, step, keep=2))
    assert left(tmp_path) == ["step_00000002", "step_00000003"]


def test_ranks_that_see_another_directory_are_named(tmp_path):
    def run(mesh):
        directory = tmp_path / str(mesh["shard"].rank)
        directory.mkdir()
        try:
            save(mesh, state(), directory, timeout=2.0)
        except CheckpointError as error:
            return str(error)

    said = simulate({"shard": 3}, run)
    assert "rank 0 can see nothing written by the ranks at shard 1; shard 2" in said[0]
    assert "rank 2 cannot see" in said[2]
    for rank, text in enumerate(said):
        assert f"is {tmp_path / str(rank)} one directory for all nodes?" in text


@pytest.mark.slow
def test_a_machine_that_stood_still_is_no_rank_that_does(tmp_path, monkeypatch):
    real, stopped, first = files.publish, [0.0], threading.Event()

    def publish(path, content):
        if path.name == "shard_00001.json":
            assert first.wait(100)
            for seconds in (0.0, 1000.0):
                stopped[0] = seconds
                time.sleep(2.0)  # rank 0 looks a few times
        real(path, content)
        if path.name == "shard_00000.json":
            first.set()

    monkeypatch.setattr(files, "publish", publish)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped[0]))
    simulate({"shard": 2}, lambda mesh: save(mesh, state(), tmp_path, timeout=60.0))
    assert checkpoint.steps(tmp_path) == [1]


def test_a_rank_that_never_finishes_is_named(tmp_path, monkeypatch):
    """It has written its tensors, however long that took; rank 0 waits for it after that."""
    real, written = files.publish, threading.Event()

    def publish(path, content):
        if path.name == "shard_00001.json":
            written.set()
            return
        if path.name == "shard_00000.json":
            assert written.wait(100)
        real(path, content)

    def run(mesh):
        with pytest.raises(CheckpointError) as caught:
            save(mesh, state(), tmp_path, timeout=100.0 if mesh["shard"].rank else 1.0)
        return str(caught.value)

    monkeypatch.setattr(files, "publish", publish)
    said = simulate({"shard": 2}, run)
    assert "the ranks at shard 1 have not finished writing" in said[0]
    assert checkpoint.steps(tmp_path) == []
