"""Checkpoints of a run: committed by one rename over all ranks, verified when read, and loadable onto any mesh.

Parts of a state on meshes of their own are written by their ranks, into the same draft.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import devices, tree
from fppo.batch import Column
from fppo.key import Key
from fppo.runtime import _checkpoint_attempt as attempts
from fppo.runtime import _checkpoint_files as files
from fppo.runtime._checkpoint_attempt import Attempt, drop_old, misnamed, path_of, place_of, steps
from fppo.runtime._checkpoint_files import STAGE_BYTES, CheckpointError, Contents, DamagedError, UnlikeError, on_host
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import AXES, LOCAL, Mesh, gather_objects
from fppo.runtime.parts import Part, holds, overlaps

__all__ = [
    "STAGE_BYTES",
    "CheckpointError",
    "Contents",
    "Pending",
    "RemoteParts",
    "begin_aside",
    "begin_save",
    "drop_old",
    "load",
    "misnamed",
    "notes_of",
    "path_of",
    "place_of",
    "step_of",
    "steps",
    "write_part",
]

T = TypeVar("T")
TIMEOUT = 600.0


def step_of(path: Path) -> int:
    """The step of the checkpoint at a path, from its manifest. Raises CheckpointError if the path is not named like a
    checkpoint, and if the directory holds another checkpoint of this step."""
    match = attempts.NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint; theirs are directories named like step_00000100")
    step = attempts.step_in(path)
    if (other := place_of(path.parent, step)) != path:
        raise CheckpointError(
            f"{path} holds the checkpoint of step {step}, as its manifest says, and so does {other}: "
            "move one of them away"
        )
    return step


def notes_of(path: Path) -> dict[str, str]:
    """The notes saved with a checkpoint; {} for a checkpoint that was written before there were notes. Raises
    CheckpointError."""
    with _damage_explained(path):
        return files.read_manifest(path).get("notes") or {}


@attrs.frozen
class Pending:
    """A checkpoint that is being written. Wait for it before the next one begins, and before the process ends."""

    _result: Future[Path]

    @staticmethod
    def written(path: Path) -> Pending:
        """Wrap a checkpoint that is written already."""
        result: Future[Path] = Future()
        result.set_result(path)
        return Pending(result)

    def done(self) -> bool:
        """Whether the checkpoint is written, or writing it has failed."""
        return self._result.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait for all ranks' parts, and return the checkpoint's path. Raises CheckpointError if it could not be
        written (earlier checkpoints stay usable), and TimeoutError after `timeout` seconds."""
        return self._result.result(timeout)


@attrs.frozen
class RemoteParts:
    """Parts of a state on meshes of their own. `write` has their ranks write them into a draft by `write_part`, in
    files with numbers below `files`."""

    files: int
    write: Callable[[Path], Sequence[Contents]]


def begin_save(
    value: Any,
    directory: Path,
    step: int,
    *,
    mesh: Mesh = Mesh.local(),  # noqa: B008
    shapes: Mapping[str, torch.Size | Extent] = {},
    free: str | None = None,
    keep: int | None = None,
    notes: Mapping[str, str] = {},
    timeout: float = TIMEOUT,
    parts: RemoteParts | None = None,
) -> Pending:
    """Begin to write the tree `value` as the checkpoint of `step`, and afterwards drop all but the newest `keep`.

    Every rank of the mesh calls it. `shapes` are the whole shapes of the sharded leaves, by their paths in
    `tree.leaves_with_paths`. A plain shape has no effect unless `mesh.sharded`; an `Extent` is for a leaf that the
    tensor or expert axis cuts, or that only some ranks of the pipeline axis hold. All other leaves are equal on all
    ranks. `free` names a field of `value` whose structure differs from step to step; the structure is saved too, for
    `load`. `notes` are saved with the checkpoint (`notes_of`). The tensors are copied before it returns, so their
    memory may be used again; a thread writes the copies. `parts` are written before it returns, and `value` lacks them.

    The files are written and synced under another name and renamed at the end, so a crash of any rank at any instant
    leaves the last complete checkpoint as it was. If the step has a checkpoint already, saving an equal state changes
    nothing; a different state is an error on every rank, and so is any state with `parts`. Ranks wait for each other as
    long as the draft changes at least every `timeout` seconds.
    """
    if parts is None:
        tree.check_here(value, "a checkpoint")
    share = _Share.of(value, "", mesh, shapes)
    structure = None if free is None else pytree.treespec_dumps(pytree.tree_structure(getattr(value, free)))
    contents = attrs.evolve(share.contents, structure=structure, notes=dict(notes))
    result: Future[Path] = Future()
    attempt = attempts.agree(Path(directory), step, mesh, share.device, timeout)
    if attempt.token is None:
        if parts is not None:
            raise attempts.cannot_write(attempt.directory, step, "there is one already")
        _compare(result, attempt, contents, share, mesh)
        return Pending(result)
    number, places, count = share.number, contents.places(), None
    if parts is not None:
        written, places, count = _written(parts, attempt), [], parts.files + 1
        contents = files.joined([*written, contents.numbered(parts.files)])
        number = parts.files if share.tensors else None
    mine = on_host(share.written(mesh), copy=True)
    job = _Job(attempt, number, mine, share.cuts, contents, places, count, keep)
    begin_aside(partial(job.run, result), name=f"checkpoint of step {step}")
    return Pending(result)


def begin_aside(work: Callable[[], None], *, name: str) -> None:
    """Do work in a thread of this name or, where none can be started, at once. A process that fails elsewhere ends
    without waiting for the thread."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:  # there is no memory, or no process number, for another thread
        work()


def write_part(
    value: Any,
    path: str,
    draft: Path,
    first: int,
    *,
    mesh: Mesh = LOCAL,
    shapes: Mapping[str, torch.Size | Extent] = {},
) -> Contents:
    """Write the subtree of a state at `path` into a draft, in files whose numbers begin with `first`. Every rank of its
    mesh calls; the caller that saves the remaining state commits the draft.

    `shapes` are as in `begin_save`, by paths within `value`; leaves in other processes are left out.
    """
    share = _Share.of(value, path, mesh, shapes)
    if share.number is not None and share.tensors:
        files.write_shard(draft, first + share.number, on_host(share.written(mesh), copy=False), share.cuts)
    return share.contents.numbered(first)


@attrs.frozen
class _Share:
    """One rank's share of a tree: its tensors, and the part of each leaf that they are (`cuts`)."""

    contents: Contents  # contents over all ranks
    number: int | None  # this rank's number among those that write
    tensors: Mapping[str, Tensor]
    cuts: Mapping[str, Part]
    device: torch.device

    @staticmethod
    def of(value: Any, path: str, mesh: Mesh, shapes: Mapping[str, torch.Size | Extent]) -> _Share:
        """This rank's share of the tree at `path`, without leaves in other processes. A collective of the mesh."""
        every = {path + name: leaf for name, leaf in tree.leaves_with_paths(value)}
        leaves = {name: leaf for name, leaf in every.items() if not isinstance(leaf, tree.Away)}
        tensors = {name: x.detach() for name, x in leaves.items() if isinstance(x, Tensor)}
        plain = {name: plain_of(x) for name, x in leaves.items() if not isinstance(x, Tensor)}
        cuts = files.cuts_of(tensors, mesh, {path + name: shape for name, shape in shapes.items()})
        device = next((x.device for x in tensors.values() if devices.is_accelerator(x.device)), torch.device("cpu"))
        contents = files.contents(tensors, cuts, plain, mesh, device)
        return _Share(contents, contents.number(mesh), tensors, cuts, device)

    def written(self, mesh: Mesh) -> dict[str, Tensor]:
        """The tensors that this rank writes."""
        wanted = () if self.number is None else self.tensors.items()
        return {path: x for path, x in wanted if files.writes(self.cuts[path], mesh)}


def plain_of(leaf: Any) -> Any:
    """A leaf that is no tensor as a JSON value. Raises CheckpointError for one without a JSON form."""
    if isinstance(leaf, Key):
        return {"key": leaf.seed}
    if isinstance(leaf, Column):
        return {"column": list(leaf)}
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise CheckpointError(f"a leaf of type {type(leaf).__name__} does not fit a checkpoint: {leaf!r}")


def _compare(result: Future[Path], attempt: Attempt, contents: Contents, share: _Share, mesh: Mesh) -> None:
    """Set as `result` the path of the step's checkpoint if it holds this very state on all ranks, else an error."""
    problem = None
    try:
        if share.number is not None and not files.same(attempt.final, contents, share.tensors, share.cuts):
            problem = "there is one of another state"
    except CheckpointError as error:
        problem = f"there is one, and it is not whole: {error}"
    problems = [x for x in gather_objects(problem, mesh, AXES, share.device) if x is not None]
    if problems:
        result.set_exception(attempts.cannot_write(attempt.directory, attempt.step, problems[0]))
    else:
        result.set_result(attempt.final)


@attrs.frozen
class _Job:
    """The work of a rank's thread: write its shard, if any, then commit the draft or wait for the commit."""

    attempt: Attempt
    shard: int | None  # this rank's number among those that write
    tensors: Mapping[str, Tensor]
    cuts: Mapping[str, Part]
    contents: Contents
    places: Sequence[str]  # descriptions of the ranks that write at the same time
    count: int | None  # the number of files, if parts of the state have some
    keep: int | None

    def run(self, result: Future[Path]) -> None:
        """Write, or wait for the ranks that write; set the path or the error as `result`."""
        attempt = self.attempt
        try:
            if self.shard is not None:
                self._write(self.shard)
            if attempt.rank == 0:
                self._commit()
            else:
                attempt.await_commit()
            result.set_result(attempt.final)
        except BaseException as error:
            reason = str(error)
            if attempt.ranks > 1 and not isinstance(error, CheckpointError):
                reason = f"on rank {attempt.rank}: {reason}"
            attempt.give_up(reason, self.shard)
            failure: BaseException = error
            if isinstance(error, (OSError, SafetensorError, CheckpointError)):
                failure = attempts.cannot_write(attempt.directory, attempt.step, reason)
                failure.__cause__ = error
            result.set_exception(failure)

    def _write(self, shard: int) -> None:
        if self.attempt.rank != 0:
            self.attempt.await_draft()
        files.write_shard(self.attempt.draft, shard, self.tensors, self.cuts)

    def _commit(self) -> None:
        attempt = self.attempt
        attempt.await_shards(self.places)
        files.write_manifest(
            attempt.draft, step=attempt.step, attempt=str(attempt.token), contents=self.contents, count=self.count
        )
        attempts.commit(attempt)
        attempts.drop_old(attempt.directory, self.keep)


def _written(parts: RemoteParts, attempt: Attempt) -> Sequence[Contents]:
    """Have the ranks of the parts write into the attempt's draft; return the contents. A failure removes the draft."""
    try:
        return parts.write(attempt.draft.absolute())
    except BaseException as error:
        attempt.give_up(str(error), None)
        raise


def load(
    template: T,
    directory: Path,
    step: int,
    *,
    mesh: Mesh = Mesh.local(),  # noqa: B008
    shapes: Mapping[str, torch.Size | Extent] = {},
    free: str | None = None,
    part: str = "",
    device: torch.device | None = None,
    donate: bool = False,
    optional: tuple[str, ...] = (),
) -> T:
    """Load the tree that a mesh of any shape saved, in the structure and on the devices of `template`.

    The template's values do not matter; results are in pinned memory where the template is. With `donate` results take
    over the template's own memory, once the checkpoint is known to fit. The field `free`, if `begin_save` got it too,
    has the structure that was saved; its tensors, and tensors of `template` on meta, are loaded onto `device`. With
    `part`, a path like ".actor.params", template, shapes and result are the subtree there, and nothing else is read.
    Leaves of `template` that stand for values in other processes are returned unchanged. Numbers whose path ends in one
    of `optional` keep the template's value if none was saved, and are left out if only the checkpoint has them.

    On a mesh that cuts parameters, leaves with `shapes` are this rank's parts, both in `template` and in the result,
    without leaves of other stages. Only chunks that overlap these parts are read, one after the other. No collective is
    called. Raises CheckpointError for a damaged checkpoint, and for one of another model, naming the leaves that
    differ.
    """
    path = place_of(Path(directory), step)
    with _damage_explained(path):
        manifest = files.read_manifest(path)
        if free is not None and manifest["structure"] is not None:
            template = tree.replace(template, **{free: _standins(free, manifest, device)})
        every = {part + name: leaf for name, leaf in tree.leaves_with_paths(template)}
        away = {name: leaf for name, leaf in every.items() if isinstance(leaf, tree.Away)}
        away |= {name: x for name, x in every.items() if name.endswith(optional) and name not in manifest["plain"]}
        expected = {name: leaf for name, leaf in every.items() if name not in away}
        tensors = {name: leaf for name, leaf in expected.items() if isinstance(leaf, Tensor)}
        wanted = files.cuts_of(tensors, mesh, {part + name: shape for name, shape in shapes.items()})
        others = tuple(name[name.rindex("[") :] for name, extent in shapes.items() if not holds(extent, mesh))
        if problems := _mismatches(expected, wanted, manifest, part, (*others, *optional), away):
            shown = "; ".join(problems[:5])
            raise UnlikeError(f"{path} is of another model or other settings: {len(problems)} leaves differ: {shown}")
        if donate:
            tensors = dict(zip(tensors, tree.tensors(tree.donate(list(tensors.values()))), strict=True))
        loaded: dict[str, Any] = {name: _memory(x, device, donated=donate) for name, x in tensors.items()}
        for name, stored, x in files.read(path, manifest, wanted):
            for there, here in overlaps(stored, wanted[name]):
                loaded[name][here].copy_(x[there])
    plain = {name: _restored(manifest["plain"][name], leaf) for name, leaf in expected.items() if name not in loaded}
    return pytree.tree_unflatten([(loaded | plain | away)[name] for name in every], pytree.tree_structure(template))


def _memory(x: Tensor, device: torch.device | None, *, donated: bool) -> Tensor:
    """Memory to read a result like `x` into: `x` itself if `donated`, else new memory on its device; for `x` on meta,
    new memory on `device`."""
    if x.is_meta:
        return torch.empty(x.shape, dtype=x.dtype, device=device)
    if donated:
        return x
    # not the file's own memory: its tensors are aligned differently, and kernels then round differently
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, pin_memory=x.is_pinned())


def _standins(field: str, manifest: Mapping[str, Any], device: torch.device | None) -> Any:
    """A tree in the saved structure of a field, with a placeholder of the right kind for each leaf."""
    _check_structure(json.loads(manifest["structure"])[1])
    spec = pytree.treespec_loads(manifest["structure"])
    paths = [path for path, _ in tree.leaves_with_paths(pytree.tree_unflatten([0] * spec.num_leaves, spec))]

    def standin(path: str) -> Tensor | Column:
        leaf = manifest["leaves"].get(f".{field}{path}")
        if leaf is None:
            return Column()
        return torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"].removeprefix("torch.")), device=device)

    return pytree.tree_unflatten([standin(path) for path in paths], spec)


def _check_structure(node: Mapping[str, Any]) -> None:
    """Raise DamagedError for all but tuples, dicts and fppo's records: torch would import other classes by name."""
    kind, context = node["type"], str(node["context"])
    plain = kind in (None, "builtins.tuple", "builtins.dict") or kind.startswith("fppo.")
    metric = kind == "collections.namedtuple" and context.startswith("fppo.")
    if not (plain or metric) or "__enum__" in context:
        raise DamagedError(f"{files.MANIFEST}: a run saves no structure of the kind {kind}")
    for child in node["children_spec"]:
        _check_structure(child)


@contextlib.contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    """Turn a DamagedError of the block into a CheckpointError with a remedy."""
    try:
        yield
    except DamagedError as error:
        others = [s for s in steps(path.parent) if place_of(path.parent, s) != path]
        way_out = f"step {others[-1]}" if others else "the start"
        raise CheckpointError(f"{path} is damaged: {error}. Remove it to resume from {way_out}.") from error


def _mismatches(
    expected: Mapping[str, Any],
    requested: Mapping[str, Part],
    manifest: Mapping[str, Any],
    part: str,
    others: tuple[str, ...],
    away: Collection[str],
) -> list[str]:
    """Describe how the leaves stored below the path `part` differ from those `expected` and the parts `requested`.
    Names that end in `others` belong to other stages; `away` are leaves, or trees of leaves, in other processes."""
    saved = {name: leaf for kind in ("plain", "leaves") for name, leaf in manifest[kind].items()}
    elsewhere = {*away, *(name for path in away if path not in saved for name in inside(path, saved))}
    stored = {name: saved[name] for name in inside(part, saved) if name not in elsewhere}
    problems = [f"{name} is missing" for name in expected if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in expected and not name.endswith(others)]
    for name in expected.keys() & stored.keys():
        want, have = expected[name], stored[name]
        kept = name in manifest["leaves"]
        if isinstance(want, Tensor) != kept:
            kind = "Tensor" if kept else type(have).__name__
            problems.append(f"{name} is a {kind}, expected a {type(want).__name__}")
        elif isinstance(want, Tensor):
            shape, dtype = requested[name].shape, str(want.dtype)
            if (shape, dtype) != (tuple(have["shape"]), have["dtype"]):
                problems.append(f"{name} is {have['dtype']} {tuple(have['shape'])}, expected {dtype} {shape}")
    return sorted(problems)


def inside(path: str, names: Iterable[str]) -> list[str]:
    """The names that are paths of leaves in the subtree at `path`."""
    return [name for name in names if name.startswith(path) and name[len(path) : len(path) + 1] in ("", ".", "[")]


def _restored(value: Any, like: Any) -> Any:
    if isinstance(like, Column):
        return Column(value["column"])
    return Key(value["key"]) if isinstance(like, Key) else value
