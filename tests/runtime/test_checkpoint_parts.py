"""Checkpoints of a run whose parts are on meshes of their own: written by these, and read whole, or part by part."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from functools import partial
from typing import Any

import pytest
import torch

from fppo import tree
from fppo.batch import Column
from fppo.key import Key
from fppo.runtime import checkpoint
from fppo.runtime.checkpoint import CheckpointError, RemoteParts
from fppo.runtime.mesh import Mesh
from fppo.runtime.simulate import simulate
from tests.runtime.test_checkpoint_mesh import READERS, on_any_rank


@tree.state
class Run:
    """A run with two parts that meshes hold, a rest, and a field whose structure differs from step to step."""

    actor: Any = None
    ref: Any = None
    rest: Any = None
    ahead: Any = ()


class Elsewhere(tree.Away):
    """A value in another process."""

    __slots__ = ()


def part(field, mesh):
    """What a rank holds of a part; both have equal paths and shapes, and other numbers."""
    held, mesh, extents = on_any_rank(mesh)
    if field == "ref":
        held = tree.map(lambda x: 7 - 3 * x, held) | {"step": 5}
    return held, {"mesh": mesh, "shapes": extents}


def rest(plain=False):
    numbers = {} if plain else {"count": torch.tensor(2.5), "table": torch.arange(6).view(2, 3)}
    return numbers | {"key": Key(9), "names": Column(["a", None, {"b": [1]}]), "n": 3, "none": "x"}


AHEAD = ({"x": torch.arange(3), "of": Column(["p"])}, {"x": torch.ones(2, 2), "of": Column([1, 2])})
PARTS = [
    ({"tensor": 2}, {"shard": 3}),
    ({"pipeline": 2, "shard": 2}, {}),
    ({"expert": 2}, {"replicate": 2, "tensor": 2}),
]


def save(directory, axes, *, step=4, plain=False, ahead=AHEAD, **more):
    """Both parts by their own ranks, each with files of its own, and the rest by this process."""
    counts = [math.prod(each.values()) for each in axes]

    def write(draft):
        found, first = [], 0
        for field, each, count in zip(("actor", "ref"), axes, counts, strict=True):

            def on_rank(mesh, field=field, first=first):
                held, where = part(field, mesh)
                return checkpoint.write_part(held, f".{field}", draft, first, **where)

            contents = simulate(each, on_rank)
            assert all(other == contents[0] for other in contents)
            found.append(contents[0])
            first += count
        return found

    own = Run(rest=rest(plain), ahead=ahead)
    parts = RemoteParts(sum(counts), write)
    return checkpoint.begin_save(own, directory, step, free="ahead", parts=parts, **more).wait()


def emptied(value):
    return tree.map(torch.zeros_like, value)


@pytest.mark.slow
@pytest.mark.parametrize("axes", PARTS, ids=str)
@pytest.mark.parametrize("plain", [False, True])
def test_each_part_is_read_by_any_mesh_and_the_rest_by_itself(axes, plain, tmp_path):
    notes = {"data": "of today", "by": "me"}
    path = save(tmp_path, axes, plain=plain, notes=notes)
    assert (checkpoint.steps(tmp_path), checkpoint.step_of(path), checkpoint.notes_of(path)) == ([4], 4, notes)

    def read(mesh, field, donate):
        held, where = part(field, mesh)
        found = checkpoint.load(emptied(held), tmp_path, 4, part=f".{field}", donate=donate, **where)
        return tree.digest(found), tree.digest(held)

    for donate, readers in zip(itertools.cycle([False, True]), READERS, strict=False):
        for field in ("actor", "ref"):
            assert all(a == b for a, b in simulate(readers, partial(read, field=field, donate=donate)))
    own = {"key": Key(0), "names": Column(), "n": 0, "none": ""}
    own = emptied(rest(plain)) | {"key": Key(0), "names": Column(), "n": 0, "none": ""}
    away = Elsewhere()
    handles = {"params": away, "mu": {name: away for name in part("ref", Mesh.local())[0]["mu"]}, "step": 0}
    for actor in (away, handles):  # one handle for all entries of a rank, or one for each
        template = Run(actor=actor, ref=handles, rest=own)
        found = checkpoint.load(template, tmp_path, 4, free="ahead")
        assert tree.digest(found.rest) == tree.digest(rest(plain))
        assert tree.digest(found.ahead) == tree.digest(AHEAD)
        assert found.ref["mu"]["rows"] is found.ref["params"] is away
        assert (found.ref["step"], found.actor if actor is away else found.actor["step"]) == (
            5,
            away if actor is away else 3,
        )
    whole = Run(**{field: part(field, Mesh.local())[0] for field in ("actor", "ref")}, rest=rest(plain), ahead=AHEAD)
    template = Run(actor=emptied(whole.actor), ref=emptied(whole.ref), rest=own)
    assert tree.digest(checkpoint.load(template, tmp_path, 4, free="ahead")) == tree.digest(whole)
    assert checkpoint.load(0, tmp_path, 4, part=".ref['step']") == 5
    assert checkpoint.load(Key(0), tmp_path, 4, part=".rest['key']") == Key(9)


def test_a_part_has_all_its_leaves_and_no_others(tmp_path):
    save(tmp_path, PARTS[0])
    held, _ = part("actor", Mesh.local())
    less = {"params": {n: x for n, x in held["params"].items() if n != "rows"}, "mu": held["mu"], "step": 0}
    with pytest.raises(CheckpointError, match=r"1 leaves differ: \.actor\['params'\]\['rows'\] is unknown"):
        checkpoint.load(less, tmp_path, 4, part=".actor")
    more = held | {"new": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"1 leaves differ: \.actor\['new'\] is missing"):
        checkpoint.load(more, tmp_path, 4, part=".actor")
    with pytest.raises(CheckpointError, match=r"\.actor\['params'\]\['rows'\] is a Tensor, expected a int"):
        checkpoint.load(held | {"params": held["params"] | {"rows": 3}}, tmp_path, 4, part=".actor")
    with pytest.raises(CheckpointError, match=r"1 leaves differ: \.ac is missing"):  # a part of a name is none
        checkpoint.load(3, tmp_path, 4, part=".ac")


def test_a_step_with_parts_is_written_once_and_a_part_that_fails_leaves_nothing(tmp_path):
    save(tmp_path, PARTS[0], step=3, notes={"a": "b"}, keep=1)
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*/*")}
    with pytest.raises(CheckpointError, match=r"of step 3 could not be written .*: there is one already"):
        save(tmp_path, PARTS[0], step=3)

    def fails(draft):
        assert draft.is_absolute()
        assert draft.parent == tmp_path
        (draft / "begun").write_text("")
        raise KeyError("of a rank")

    with pytest.raises(KeyError, match="of a rank"):
        checkpoint.begin_save(Run(rest=rest()), tmp_path, 5, parts=RemoteParts(2, fails))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*/*")} == before
    save(tmp_path, PARTS[1], step=6, ahead=(), keep=1)
    assert checkpoint.steps(tmp_path) == [6]
    assert checkpoint.notes_of(checkpoint.path_of(tmp_path, 6)) == {}
    template = Run(actor=Elsewhere(), ref=Elsewhere(), rest=rest(), ahead=AHEAD)
    assert checkpoint.load(template, tmp_path, 6, free="ahead").ahead == ()


def test_a_file_that_a_part_lacks_is_named_where_it_is_read(tmp_path):
    path = save(tmp_path, PARTS[0])
    manifest = json.loads((path / "state.json").read_text())
    assert [digest is not None for digest in manifest["shards"]] == [True] * 6  # two, three, and the rest's
    (path / "shard_00003.json").write_text("{}")
    held, where = part("actor", Mesh.local())
    assert tree.digest(checkpoint.load(emptied(held), tmp_path, 4, part=".actor", **where)) == tree.digest(held)
    with pytest.raises(CheckpointError, match=r"damaged: shard_00003\.json does not have the digest"):
        checkpoint.load(emptied(held), tmp_path, 4, part=".ref", **where)


def test_a_state_with_values_elsewhere_is_saved_by_parts_alone(tmp_path):
    with pytest.raises(TypeError, match=r"compute a checkpoint there, by a call of a function"):
        checkpoint.begin_save(Run(actor=Elsewhere(), rest=rest()), tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_known_by_its_manifest_and_two_of_one_step_are_named(tmp_path):
    """A name that is wrong does no harm; what is in the way of another step makes way."""
    for step in (1, 2, 3):
        checkpoint.begin_save({"x": torch.tensor(float(step))}, tmp_path, step).wait()
    first, second, third = (checkpoint.path_of(tmp_path, step) for step in (1, 2, 3))
    first.rename(tmp_path / "away")
    second.rename(first)
    third.rename(second)
    (tmp_path / "away").rename(third)  # 1 is in 3, 2 in 1, 3 in 2
    assert checkpoint.steps(tmp_path) == [1, 2, 3]
    assert [checkpoint.place_of(tmp_path, step) for step in (1, 2, 3, 4)] == [
        *(third, first, second),
        checkpoint.path_of(tmp_path, 4),
    ]
    assert [checkpoint.step_of(path) for path in (first, second, third)] == [2, 3, 1]
    assert checkpoint.misnamed(tmp_path) == [
        f"{path} holds the checkpoint of step {step}, as its manifest says; its name is wrong"
        for path, step in ((third, 1), (first, 2), (second, 3))
    ]
    assert [checkpoint.load({"x": torch.zeros(())}, tmp_path, n)["x"].item() for n in (1, 2, 3)] == [1.0, 2.0, 3.0]
    with pytest.raises(CheckpointError, match="there is one of another state"):
        checkpoint.begin_save({"x": torch.tensor(9.0)}, tmp_path, 3).wait()
    assert checkpoint.misnamed(tmp_path) == []  # each made way for the one before it
    assert [checkpoint.load({"x": torch.zeros(())}, tmp_path, n)["x"].item() for n in (1, 2, 3)] == [1.0, 2.0, 3.0]
    second.rename(checkpoint.path_of(tmp_path, 7))
    checkpoint.begin_save({"x": torch.tensor(2.0)}, tmp_path, 2).wait()
    seventh = checkpoint.path_of(tmp_path, 7)
    assert checkpoint.place_of(tmp_path, 2) == second  # of two the one with the right name
    with pytest.raises(
        CheckpointError, match=r"step_00000007 holds the checkpoint of step 2, .* and so does .*_00000002"
    ):
        checkpoint.step_of(seventh)
    checkpoint.begin_save({"x": torch.tensor(7.0)}, tmp_path, 7, keep=2).wait()
    assert [checkpoint.steps(tmp_path), checkpoint.misnamed(tmp_path)] == [[3, 7], []]
    assert (tmp_path / "step_00000007.of_step_2").is_dir()
    checkpoint.path_of(tmp_path, 3).rename(checkpoint.path_of(tmp_path, 9))
    checkpoint.begin_save({"x": torch.tensor(8.0)}, tmp_path, 8, keep=2).wait()  # an old one goes by any name
    assert [checkpoint.steps(tmp_path), checkpoint.misnamed(tmp_path)] == [[7, 8], []]
    shutil.copytree(checkpoint.path_of(tmp_path, 8), checkpoint.path_of(tmp_path, 5))
    assert checkpoint.place_of(tmp_path, 8) == checkpoint.path_of(tmp_path, 8)
    assert checkpoint.step_of(checkpoint.path_of(tmp_path, 8)) == 8
    for name in ("other", "step_7"):
        with pytest.raises(CheckpointError, match=f"{name} is no checkpoint; theirs are directories named like"):
            checkpoint.step_of(tmp_path / name)
