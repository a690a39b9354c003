"""The files of a checkpoint: what each rank wrote, and how any rows are found in them again.

    shard_00000.safetensors  what rank 0 of the shard axis holds of each leaf; of leaves that are not cut, all
    shard_00000.json         the rows and the digest of each of these chunks
    state.json               the manifest: plain values, each leaf's dtype and whole shape, digests of the other JSONs

torch.distributed.checkpoint's own files are not used: their metadata is a pickle, and nothing here is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fppo import tree
from fppo.runtime import fsdp
from fppo.runtime.mesh import Mesh
from fppo_kernels.collectives import Axis

FORMAT = 3
MANIFEST = "state.json"


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says what to do."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was written."""


@attrs.frozen
class Part:
    """Rows [start, stop) of a leaf that has `shape`, cut over `ranks`; a leaf without dimensions has one row."""

    shape: tuple[int, ...]
    start: int
    stop: int
    ranks: int = 1


def cuts_of(tensors: Mapping[str, Tensor], mesh: Mesh, shapes: Mapping[str, torch.Size]) -> dict[str, Part]:
    """Which part of each leaf this rank holds. Raises ValueError for tensors that do not fit the shapes."""
    axis = mesh["shard"]
    cut = {path: tuple(shape) for path, shape in shapes.items()} if mesh.sharded else {}
    unknown = sorted(cut.keys() - tensors.keys())
    if unknown:
        raise ValueError(f"shapes are given for tensors that the state does not have: {unknown[:5]}")
    cuts = {path: whole(tuple(x.shape)) for path, x in tensors.items() if path not in cut}
    cuts |= {path: _part(shape, axis.size, axis.rank) for path, shape in cut.items()}
    for path, part in cuts.items():
        own_shape = (part.stop - part.start, *part.shape[1:])
        if path in cut and tuple(tensors[path].shape) != own_shape:
            raise ValueError(
                f"{path} has the shape {tuple(tensors[path].shape)}, but rank {axis.rank} of {axis.size} holds "
                f"{own_shape} of {part.shape}: give whole shapes for the leaves that are cut over the shard axis, and "
                "only those"
            )
    return {path: cuts[path] for path in tensors}


def whole(shape: tuple[int, ...]) -> Part:
    """All rows of a leaf that is not cut."""
    return Part(shape, 0, shape[0] if shape else 1)


def _part(shape: tuple[int, ...], ranks: int, rank: int) -> Part:
    if ranks == 1:
        return whole(shape)
    return Part(shape, *fsdp.bounds(shape[0], Axis(ranks, rank)), ranks)


def data_file(directory: Path, rank: int) -> Path:
    """Where the tensors of a rank stand."""
    return directory / f"shard_{rank:05d}.safetensors"


def about_file(directory: Path, rank: int) -> Path:
    """Where the rows and digests of a rank's tensors stand. It is there once they are whole."""
    return directory / f"shard_{rank:05d}.json"


def sync(path: Path) -> None:
    """Has the disk hold what was written."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(path: Path, content: Any) -> None:
    """Writes a JSON file that appears whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    draft.write_text(json.dumps(content))
    sync(draft)
    draft.rename(path)


def write_shard(directory: Path, rank: int, tensors: Mapping[str, Tensor], cuts: Mapping[str, Part]) -> None:
    """Writes and syncs one rank's files. The tensors must be contiguous, on the host, with memory of their own."""
    data = data_file(directory, rank)
    safetensors.torch.save_file(dict(tensors), data)
    sync(data)
    about = {p: {"rows": [cuts[p].start, cuts[p].stop], "digest": tree.digest(x)[""]} for p, x in tensors.items()}
    publish(about_file(directory, rank), about)


def write_manifest(
    directory: Path,
    *,
    step: int,
    attempt: str,
    plain: Any,
    structure: str | None,
    dtypes: Mapping[str, torch.dtype],
    cuts: Mapping[str, Part],
) -> None:
    """Writes the manifest beside all ranks' files. `cuts` are rank 0's, of all leaves."""
    ranks = max((part.ranks for part in cuts.values()), default=1)
    content = {
        "format": FORMAT,
        "step": step,
        "attempt": attempt,
        "plain": plain,
        "structure": structure,
        "leaves": {
            path: {"dtype": str(dtypes[path]), "shape": list(part.shape), "ranks": part.ranks}
            for path, part in cuts.items()
        },
        "shards": [_digest(about_file(directory, rank).read_bytes()) for rank in range(ranks)],
    }
    publish(directory / MANIFEST, content | {"digest": _digest(_canonical(content))})


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest. Raises DamagedError, and CheckpointError for one of another format."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        known = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{MANIFEST}: {error!r}") from error
    if known != FORMAT:
        raise CheckpointError(f"{directory} has format {known}; this version reads format {FORMAT}")
    if manifest.pop("digest", None) != _digest(_canonical(manifest)):
        raise DamagedError(f"{MANIFEST} does not have the digest it was saved with")
    return manifest


def read(
    directory: Path, manifest: Mapping[str, Any], wanted: Mapping[str, Part]
) -> Iterator[tuple[str, Part, Tensor]]:
    """The stored chunks that hold rows of the wanted parts, one at a time, each with its digest verified.

    A chunk is read whole, as its digest is of the whole. Raises DamagedError naming the file or the leaf.
    """
    for rank, digest in enumerate(manifest["shards"]):
        needed = {path: part for path in wanted if (part := _stored(manifest, path, rank, wanted[path])) is not None}
        if not needed:
            continue
        about, data = about_file(directory, rank), data_file(directory, rank)
        try:
            text = about.read_bytes()
            if _digest(text) != digest:
                raise DamagedError(f"{about.name} does not have the digest it was saved with")
            chunks = json.loads(text)
            with safe_open(data, "pt") as file:
                for path, part in needed.items():
                    x = file.get_tensor(path)
                    if tree.digest(x)[""] != chunks[path]["digest"]:
                        raise DamagedError(f"{path} in {data.name} does not have the digest it was saved with")
                    yield path, part, x
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DamagedError(f"{data.name}: {error}") from error


def _stored(manifest: Mapping[str, Any], path: str, rank: int, wanted: Part) -> Part | None:
    """The chunk of a leaf that a rank's file holds, if it has wanted rows."""
    leaf = manifest["leaves"][path]
    if rank >= leaf["ranks"]:
        return None
    stored = _part(tuple(leaf["shape"]), leaf["ranks"], rank)
    return stored if max(stored.start, wanted.start) < min(stored.stop, wanted.stop) else None


def overlap(x: Tensor, part: Part, other: Part) -> Tensor:
    """Those rows of `x`, which holds `part` of a leaf, that `other` has too."""
    if x.dim() == 0:
        return x
    return x[max(part.start, other.start) - part.start : min(part.stop, other.stop) - part.start]


def same(directory: Path, plain: Any, tensors: Mapping[str, Tensor], cuts: Mapping[str, Part]) -> bool:
    """Whether these parts of a state are what the checkpoint holds, bit for bit. Raises CheckpointError."""
    manifest = read_manifest(directory)
    leaves = {path: (leaf["dtype"], tuple(leaf["shape"])) for path, leaf in manifest["leaves"].items()}
    if _canonical(manifest["plain"]) != _canonical(plain):
        return False
    if leaves != {path: (str(x.dtype), cuts[path].shape) for path, x in tensors.items()}:
        return False
    return all(
        torch.equal(_bytes(overlap(x, stored, cuts[path])), _bytes(overlap(tensors[path], cuts[path], stored)))
        for path, stored, x in read(directory, manifest, cuts)
    )


def _bytes(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8)
