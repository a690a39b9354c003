"""The files of a checkpoint: what each rank wrote, and how any rows are found in them again.

    shard_00000.safetensors  the first rank's part of each leaf; the whole leaf if it is not cut
    shard_00000.json         the rows and the digest of each of these chunks
    state.json               the manifest: plain values; dtype, whole shape, cuts and stage of each leaf; digests of the
                             other JSONs

The file of rank s of a shard axis of n ranks, t of a tensor axis of m, e of an expert axis of k, and p of the pipeline
axis, has the number ((p * k + e) * m + t) * n + s; of a leaf whose rows are sharded over `experts` ranks of the
expert axis as well, it has the rows of rank s * experts + e. Parts of a state on meshes of their own have separate
file numbers; a leaf records the first of them, and its grid.

torch.distributed.checkpoint's own files are not used: their metadata is a pickle, and nothing here is ever unpickled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import safetensors.torch
import torch
from torch import Tensor

from fppo import tree
from fppo._errors import json_of
from fppo.runtime.exports import sync
from fppo.runtime.layout import Cut, Extent
from fppo.runtime.mapped import empty_beside
from fppo.runtime.mesh import AXES, CUTTING_AXES, Mesh, gather_objects
from fppo.runtime.parts import Part, holds, overlaps, part_of
from fppo.runtime.streamed import opened

FORMAT = 7
READ = (6, FORMAT)  # a leaf of format 6 has no `experts`: the first rank of the expert axis had its rows
MANIFEST = "state.json"
STAGE_BYTES = 64 << 20  # bytes copied from a device at a time
# axes whose ranks write their own parts; neighbours on the last axis have consecutive file numbers
WRITERS = ("pipeline", "expert", "tensor", "shard")


class CheckpointError(Exception):
    """Error for a checkpoint that cannot be written or read; the message says what to do."""


class DamagedError(CheckpointError):
    """Error for a checkpoint whose files are not as they were written."""


class UnlikeError(CheckpointError):
    """Error for a checkpoint of another model or other settings."""


@attrs.frozen
class Contents:
    """The table of contents of a checkpoint, equal on all ranks, as its manifest has it.

    plain: the values that are not tensors, by path.
    structure: the structure of the state's field of free form; None without one.
    leaves: the tensors, by path.
    writers: how many ranks along each of the axes "pipeline", "expert", "tensor" and "shard" write parts of their own.
    notes: facts about the run, by name, that are not part of the state.
    """

    plain: Mapping[str, Any]
    structure: str | None
    leaves: Mapping[str, Mapping[str, Any]]  # dtype, whole shape, cut and ranks of each tensor
    writers: tuple[int, ...]  # the number of ranks on each of `WRITERS` that hold parts of their own
    notes: Mapping[str, str] = attrs.field(
        factory=dict
    )  # facts about the run that are not part of the state, such as its data

    def number(self, mesh: Mesh) -> int | None:
        """This rank's number among the ranks that write; None if it does not write."""
        if any(mesh[axis].rank for axis in AXES if axis not in WRITERS):
            return None
        number = 0
        for axis, count in zip(WRITERS, self.writers, strict=True):
            if mesh[axis].rank >= count:
                return None
            number = number * count + mesh[axis].rank
        return number

    def places(self) -> list[str]:
        """Describe the coordinates of the ranks that write, on axes with several ranks."""
        every = itertools.product(*map(range, self.writers))
        wide = [place for place, count in enumerate(self.writers) if count > 1]
        return [", ".join(f"{WRITERS[i]} {place[i]}" for i in wide) or "shard 0" for place in every]

    def numbered(self, first: int) -> Contents:
        """The contents with file numbers that begin with `first`, next to the files of other parts."""
        place = {"first": first, "writers": self.writers}
        return attrs.evolve(self, leaves={path: {**leaf, **place} for path, leaf in self.leaves.items()})


def contents(
    tensors: Mapping[str, Tensor],
    cuts: Mapping[str, Part],
    plain: Mapping[str, Any],
    mesh: Mesh,
    device: torch.device,
) -> Contents:
    """Combine the contents of all ranks, of which this one has `tensors`, its parts `cuts` of the leaves, and the
    `plain` values. Every rank of the pipeline axis must call."""
    leaves = {
        path: {
            "dtype": str(tensors[path].dtype),
            "shape": list(part.shape),
            "cut": None if part.cut is None else [part.cut.dim, part.cut.parts, list(part.cut.segments), part.cut.axis],
            "ranks": part.shard[1],
            "experts": part.experts,
            "stage": part.stage,
        }
        for path, part in cuts.items()
    }
    grids = [_grid(part) for part in cuts.values()]
    every = gather_objects([leaves, plain, grids and _largest(grids)], mesh, ["pipeline"], device)
    all_leaves, all_plain = ({p: x for each in reversed(every) for p, x in each[i].items()} for i in (0, 1))
    grid = _largest([each[2] for each in every if each[2]] or [(1,) * len(WRITERS)])
    return Contents(all_plain, None, all_leaves, grid)


def joined(parts: Sequence[Contents]) -> Contents:
    """Join the contents of parts of a state; the last of `parts` is the remaining state. Leaves say which files hold
    them."""
    return Contents(
        plain={path: x for part in parts for path, x in part.plain.items()},
        structure=parts[-1].structure,
        leaves={path: leaf for part in parts for path, leaf in part.leaves.items()},
        writers=(1,) * len(WRITERS),
        notes=parts[-1].notes,
    )


def _grid(part: Part) -> tuple[int, ...]:
    """The number of different parts of a leaf along each axis of `WRITERS`. Along the pipeline axis it is the number of
    the leaf's stage, counted from 1."""
    own = {"pipeline": part.stage + 1, "shard": part.shard[1] // part.experts, "expert": part.experts}
    own |= {} if part.cut is None else {part.cut.axis: part.cutting[1]}
    return tuple(own.get(axis, 1) for axis in WRITERS)


def _largest(grids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*grids, strict=True)))


def cuts_of(tensors: Mapping[str, Tensor], mesh: Mesh, shapes: Mapping[str, torch.Size | Extent]) -> dict[str, Part]:
    """The part of each leaf that this rank holds. Raises ValueError for tensors that do not fit the shapes."""
    cut = {path: x for path, x in shapes.items() if mesh.sharded or isinstance(x, Extent)}
    parts = {path: part_of(extent, mesh) for path, extent in cut.items() if holds(extent, mesh)}
    unknown = sorted(parts.keys() - tensors.keys())
    if unknown:
        raise ValueError(f"shapes are given for tensors that the state does not have: {unknown[:5]}")
    for path, part in parts.items():
        if tuple(tensors[path].shape) != part.own_shape:
            raise ValueError(
                f"{path} has the shape {tuple(tensors[path].shape)}, but rank {part.shard[0]} of {part.shard[1]} holds "
                f"{part.own_shape} of {part.shape}: give whole shapes for the leaves that are sharded, and only those"
            )
    return {path: parts.get(path) or Part(tuple(x.shape)) for path, x in tensors.items()}


def writes(part: Part, mesh: Mesh) -> bool:
    """Whether this rank writes its part of a leaf: of ranks with equal parts only one does."""
    again = set(WRITERS[1:]) - ({part.cut.axis} if part.cut is not None else set())
    again -= {"shard"} if part.shard[1] > 1 else set()
    again -= {"expert"} if part.experts > 1 else set()
    return part.is_first and not any(mesh[axis].rank for axis in again) and part.stage == mesh["pipeline"].rank


def data_file(directory: Path, rank: int) -> Path:
    """The path of the file with a rank's tensors."""
    return directory / f"shard_{rank:05d}.safetensors"


def about_file(directory: Path, rank: int) -> Path:
    """The path of the file with the rows and digests of a rank's tensors. It exists once the tensors are complete."""
    return directory / f"shard_{rank:05d}.json"


def publish(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    draft.write_text(json.dumps(content))
    sync(draft)
    draft.rename(path)


def write_shard(directory: Path, rank: int, tensors: Mapping[str, Tensor], cuts: Mapping[str, Part]) -> None:
    """Write and sync one rank's files: `tensors`, the parts `cuts` of leaves. They must be contiguous, on the host, and
    share no memory."""
    data = data_file(directory, rank)
    safetensors.torch.save_file(dict(tensors), data)
    sync(data)
    about = {p: {"rows": list(cuts[p].rows), "digest": tree.digest(x)[""]} for p, x in tensors.items()}
    publish(about_file(directory, rank), about)


def write_manifest(directory: Path, *, step: int, attempt: str, contents: Contents, count: int | None = None) -> None:
    """Write the manifest next to all ranks' files. If `count` is given, the files have numbers below `count`, some of
    which may be unused; else no number is unused."""
    numbers = range(math.prod(contents.writers) if count is None else count)
    places = [about_file(directory, number) for number in numbers]
    content = {
        "format": FORMAT,
        "step": step,
        "attempt": attempt,
        **attrs.asdict(contents),
        "shards": [_digest(x.read_bytes()) if count is None or x.exists() else None for x in places],
    }
    publish(directory / MANIFEST, content | {"digest": _digest(_canonical(content))})


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest. Raises DamagedError, and CheckpointError for an unknown format."""
    try:
        manifest = json_of((directory / MANIFEST).read_text())
        known = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{MANIFEST}: {error!r}") from error
    if known not in READ:
        read = " and ".join(map(str, READ))
        raise CheckpointError(f"{directory} has format {known}; this version reads {read}")
    if manifest.pop("digest", None) != _digest(_canonical(manifest)):
        raise DamagedError(f"{MANIFEST} does not have the digest it was saved with")
    return manifest


def read(
    directory: Path, manifest: Mapping[str, Any], requested: Mapping[str, Part]
) -> Iterator[tuple[str, Part, Tensor]]:
    """Yield the stored chunks that overlap the wanted parts, one at a time, each with its digest verified.

    A chunk is read whole, because its digest covers all of it. Raises DamagedError that names the file or the leaf.
    """
    for rank, digest in enumerate(manifest["shards"]):
        needed = {
            path: part for path in requested if (part := _stored(manifest, path, rank, requested[path])) is not None
        }
        if not needed:
            continue
        about, data = about_file(directory, rank), data_file(directory, rank)
        try:
            text = about.read_bytes()
            if _digest(text) != digest:
                raise DamagedError(f"{about.name} does not have the digest it was saved with")
            chunks = json_of(text)
            with opened(data) as tensor:
                for path, part in needed.items():
                    x = tensor(path, getattr(torch, manifest["leaves"][path]["dtype"].removeprefix("torch.")))
                    if tree.digest(x)[""] != chunks[path]["digest"]:
                        raise DamagedError(f"{path} in {data.name} does not have the digest it was saved with")
                    yield path, part, x
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{data.name}: {error}") from error


def _stored(manifest: Mapping[str, Any], path: str, number: int, requested: Part) -> Part | None:
    """The part of the leaf at `path` that file `number` holds, if it overlaps the wanted part; else None."""
    leaf = manifest["leaves"][path]
    counts = leaf.get("writers", manifest["writers"])
    places, rest = {}, number - leaf.get("first", 0)
    for axis, count in zip(reversed(WRITERS), reversed(counts), strict=True):
        rest, places[axis] = divmod(rest, count)
    dim, parts, segments, over = leaf["cut"] or (0, 1, (), None)
    experts = leaf.get("experts", 1)
    row = places["shard"] * experts + (places["expert"] if experts > 1 else 0)
    if rest or places["pipeline"] != leaf["stage"] or row >= leaf["ranks"]:
        return None
    with_own = {over, "expert" if experts > 1 else None}
    if any(places[axis] for axis in CUTTING_AXES if axis not in with_own):
        return None
    cut = None if over is None else Cut(dim, parts, tuple(segments), over)
    cutting = (0, 1) if over is None else (places[over], counts[WRITERS.index(over)])
    stored = Part(tuple(leaf["shape"]), cut, cutting, (row, leaf["ranks"]), leaf["stage"], experts)
    return stored if stored.is_first and next(overlaps(stored, requested), None) else None


def same(directory: Path, contents: Contents, tensors: Mapping[str, Tensor], cuts: Mapping[str, Part]) -> bool:
    """Whether the checkpoint in `directory` holds this state bit for bit: `contents`, and this rank's `tensors`, the
    parts `cuts` of the leaves. Raises CheckpointError."""
    manifest = read_manifest(directory)
    stored, held = (
        {path: (leaf["dtype"], tuple(leaf["shape"])) for path, leaf in leaves.items()}
        for leaves in (manifest["leaves"], contents.leaves)
    )
    if stored != held or _canonical(manifest["plain"]) != _canonical(contents.plain):
        return False
    return all(
        torch.equal(_bytes(x[there]), _bytes(tensors[path][here]))
        for path, stored, x in read(directory, manifest, cuts)
        for there, here in overlaps(stored, cuts[path])
    )


def _bytes(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)


def on_host(tensors: Mapping[str, Tensor], copy: bool) -> dict[str, Tensor]:
    """Copy tensors to the host, contiguous, none sharing memory with another. With `copy` none shares memory with the
    given tensors either, and those of tensors in files are in files, too; without, a tensor on the host may be returned
    as it is."""
    own: dict[str, Tensor] = {}
    stage: Tensor | None = None
    taken: set[int] = set()
    for path, x in tensors.items():
        if x.is_cuda:
            stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True) if stage is None else stage
            own[path] = _staged(x, stage)
        elif copy and (beside := empty_beside(x)) is not None:
            own[path] = beside.copy_(x).contiguous()
        else:
            pointer = x.untyped_storage().data_ptr()
            own[path] = x.to("cpu", copy=copy or pointer in taken, memory_format=torch.contiguous_format).contiguous()
            taken.add(pointer)
    return own


def _staged(x: Tensor, stage: Tensor) -> Tensor:
    """Copy `x` to the host through `stage`, a buffer of pinned memory [N] uint8.

    Pinning the whole copy would take up to twice the bytes of a state, for good: torch rounds such memory up to powers
    of two, and keeps it.
    """
    copy = torch.empty(x.shape, dtype=x.dtype)
    source, target, room = x.reshape(-1), copy.view(-1), stage.view(x.dtype)
    for start in range(0, len(source), len(room)):
        piece = source[start : start + len(room)]
        target[start : start + len(room)].copy_(room[: len(piece)].copy_(piece))
    return copy
