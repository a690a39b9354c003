"""Digests of a state on its device: weighted sums of its words, equal for every layout.

A digest of bytes (`tree.digest`) reads the whole state on the host: some 20 s for 1.5 B parameters. Sums read it once
in the device's memory, and only the sums are copied to the host. Sums are additive: ranks with parts of a leaf add
theirs, which gives the digest of the whole leaf without gathering it.

A leaf is a sequence of 32-bit words (or of its elements, if a row is not a whole number of words). Each block of 2^15
words is summed with fixed odd weights of 64 random bits modulo 2^64; the sums, in order, are hashed with dtype and
shape. Detected changes:

- a change of one word, always: an odd weight times a difference below 2^32 is not 0;
- any other accidental change, with probability 1 - 2^-32 or more in each block that it touches. The worst case are
  changes of the highest bit alone, such as signs: weights times 2^31 keep 33 bits. Permuted elements are detected since
  weights differ from word to word, permuted blocks since they are hashed in order, and exchanged leaves by their paths.

Sums do not protect against a deliberate search for equal sums; `tree.digest` does.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fppo import tree
from fppo.key import Key
from fppo.runtime.layout import Box, Extent
from fppo.runtime.mesh import AXES, CUTTING_AXES, LOCAL, Mesh, all_reduce, gather_objects, ranks_on
from fppo.runtime.parts import Part, part_of
from fppo_kernels.collectives import Axis

Kind = Literal["blake2b", "sums"]
Shapes = Mapping[str, torch.Size | Extent]
BLOCK = 1 << 15  # words in one block: few enough for a single thread
SLAB = 1 << 8  # blocks at a time on other devices
SHARE = 0.01  # fraction of a step's time that digests may take
# bytes per second of digests, and useful FLOP per second of a step: orders of magnitude instead of measurements, so
# that equal runs digest the same steps
_RATES: Mapping[tuple[str, str], float] = {("cpu", "cpu"): 1e9, ("cuda", "cuda"): 5e11, ("cpu", "cuda"): 2e10}
_FLOPS = {"cpu": 1e11, "cuda": 3e14}
_PAUSE = 1.0  # seconds of a step that do not depend on the model's size
_FLOP_PER_NUMBER = 8  # FLOP per parameter and token: a rollout's pass, then forward and backward of an update


@functools.cache
def weights(device: torch.device) -> Tensor:
    """The odd 64-bit weights of a block, int64 [BLOCK]."""
    bits = (Key(0x5EED).fold("digest").uniform(torch.arange(2), BLOCK) * 2.0**32).long()
    return ((bits[0] << 32) | bits[1] | 1).to(device)


def words_of(x: Tensor) -> Tensor:
    """The elements of `x`, the last dimension fastest, as one dimension of integers: of 32 bits, or of the elements'
    width if a row `x[i]` is not a whole number of 32-bit words, so that every row begins at a word."""
    flat = x.detach().reshape(-1)
    if flat.stride(0) != 1:  # `contiguous` keeps the stride of a single element, which `view` does not take
        flat = flat.clone(memory_format=torch.contiguous_format)
    size = _word_size(x.shape, x.dtype)
    if flat.storage_offset() * x.dtype.itemsize % size:
        flat = flat.clone()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])


def _word_size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return 4 if math.prod(shape[1:]) * dtype.itemsize % 4 == 0 else dtype.itemsize


@torch.no_grad()
def block_sums(words: Tensor, first: int = 0, device: torch.device | None = None) -> Tensor:
    """The weighted sum of each block, int64 [blocks], of words that begin at index `first` of a longer sequence. The
    first and the last block may be partial. Computed on `device`, by default that of `words`."""
    device = device or words.device
    factors, start = weights(device), first % BLOCK
    head, rest = words[: -start % BLOCK], words[-start % BLOCK :]
    first_sum = [_weighted(head.to(device), factors[start : start + len(head)])[None]] if len(head) else []
    return torch.cat([factors[:0], *first_sum, *(_dots if device.type == "cpu" else _slabs)(rest, factors)])


def _dots(words: Tensor, factors: Tensor) -> list[Tensor]:
    """The sums of the blocks of `words`, weighted by `factors`, one block after the other, for a CPU."""
    wide = factors.new_empty(min(len(words), BLOCK))
    return [wide[: len(x)].copy_(x).dot(factors[: len(x)])[None] for x in words.split(BLOCK) if len(x)]


def _slabs(words: Tensor, factors: Tensor) -> list[Tensor]:
    """The sums of the blocks of `words`, weighted by `factors`, many at once, on the weights' device."""
    full = len(words) // BLOCK * BLOCK
    sums = [_weighted(x.to(factors.device), factors) for x in words[:full].view(-1, BLOCK).split(SLAB)]
    tail = words[full:].to(factors.device)
    return [*sums, _weighted(tail, factors[: len(tail)])[None][: len(tail)]]


def _weighted(words: Tensor, factors: Tensor) -> Tensor:
    return (words * factors).sum(-1)


def kind_of(device: torch.device, mesh: Mesh = LOCAL) -> Kind:
    """The kind of digests for a run on `device`: "blake2b" of all bytes for one process on a CPU, else sums."""
    return "blake2b" if device.type == "cpu" and ranks_on(mesh, AXES) == 1 else "sums"


def digest(
    value: Any,
    kind: Kind,
    *,
    device: torch.device,
    mesh: Mesh = LOCAL,
    shapes: Shapes | None = None,
) -> dict[str, str]:
    """The digest of every whole leaf by its path, equal on every layout.

    `shapes` are the whole shapes of the leaves that a mesh may cut, as for checkpoints. A replicated leaf that differs
    between ranks gets a combined digest, equal on all ranks and to no single rank's. Every rank of the mesh must call.
    Raises ValueError for "blake2b" on several ranks: no rank has the bytes of whole leaves.
    """
    if kind == "blake2b":
        if ranks_on(mesh, AXES) > 1:
            raise ValueError("digests of kind 'blake2b' come from runs of one process: compute them with --nproc 1")
        return tree.digest(value)
    own = _by_sums(value, device, mesh, shapes or {})
    if mesh["pipeline"].size > 1:  # first over the stages: afterwards all ranks have equal sets, and compare one digest
        own = _united(gather_objects(own, mesh, ["pipeline"], device))
    if len(set(gather_objects(tree.combine(own), mesh, AXES, device))) == 1:
        return own
    return _united(gather_objects(own, mesh, AXES, device))


def _united(digests: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Merge the digests of ranks that may hold different leaves; a leaf that differs between its holders gets a
    combined digest."""
    together: dict[str, dict[str, str]] = {}
    for rank, each in enumerate(digests):
        for path, x in each.items():
            together.setdefault(path, {})[str(rank)] = x
    return {
        path: next(iter(x.values())) if len(set(x.values())) == 1 else tree.combine(x) for path, x in together.items()
    }


def _by_sums(value: Any, device: torch.device, mesh: Mesh, shapes: Shapes) -> dict[str, str]:
    """Digests by sums. All sums are copied to the host at once; those of cut leaves are first all-reduced over each
    axis that cuts."""
    leaves = dict(tree.leaves_with_paths(value))
    tensors = {path: x for path, x in leaves.items() if isinstance(x, Tensor)}
    parts = {path: part_of(shapes[path], mesh) for path in tensors if _is_cut(shapes.get(path), mesh)}
    sums = {
        path: _sums_of_part(x, parts[path], device) if path in parts else block_sums(words_of(x), device=device)
        for path, x in tensors.items()
    }
    shared = {path: mesh.shard_axis(part.cut) for path, part in parts.items()}
    for axis in dict.fromkeys(shared.values()):
        sums |= _added(sums, [path for path, own in shared.items() if own == axis], axis)
    for axis in CUTTING_AXES:
        over = [path for path, part in parts.items() if part.cut is not None and part.cut.axis == axis]
        sums |= _added(sums, over, mesh[axis])
    flat = torch.cat([weights(device)[:0], *sums.values()]).cpu()
    on_host = dict(zip(sums, flat.split([len(x) for x in sums.values()]), strict=True))
    whole = {path: tuple(x.shape) for path, x in tensors.items()} | {path: part.shape for path, part in parts.items()}
    return {
        path: _hash(x, whole[path], on_host[path]) if isinstance(x, Tensor) else tree.digest(x)[""]
        for path, x in leaves.items()
    }


def _is_cut(extent: torch.Size | Extent | None, mesh: Mesh) -> bool:
    return extent is not None and (mesh.sharded or (isinstance(extent, Extent) and extent.cut is not None))


def _added(sums: Mapping[str, Tensor], paths: Sequence[str], axis: Axis) -> dict[str, Tensor]:
    """The sums of the leaves at `paths`, summed over the axis; {} for an axis of one rank."""
    if not paths or axis.size == 1:
        return {}
    together = all_reduce(torch.cat([sums[path] for path in paths]), axis)
    return dict(zip(paths, together.split([len(sums[path]) for path in paths]), strict=True))


def _sums_of_part(x: Tensor, part: Part, device: torch.device) -> Tensor:
    """This rank's contribution to the sums of all blocks of the whole leaf; of ranks with equal parts only the first
    contributes."""
    words = part.shape[0] * _words_of_row(x, part.shape)
    whole = weights(device).new_zeros(-(-words // BLOCK))
    for box in part.boxes if part.is_first else ():
        piece = x.detach()[tuple(slice(at, at + size) for at, size in zip(box.at, box.size, strict=True))]
        for row, rows in _whole_rows(piece, box, part.shape):
            first = row * _words_of_row(x, part.shape)
            own = block_sums(words_of(rows), first, device)
            whole[first // BLOCK : first // BLOCK + len(own)] += own
    return whole


def _words_of_row(x: Tensor, shape: tuple[int, ...]) -> int:
    return math.prod(shape[1:]) * x.dtype.itemsize // _word_size(shape, x.dtype)


def _whole_rows(piece: Tensor, box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yield a box of a leaf of `shape`, held in `piece`, as whole rows, each time with the index of the first: other
    ranks' elements are 0, which adds nothing to a sum. Rows that the box holds in part come some at a time."""
    if box.size[1:] == tuple(shape[1:]):
        yield box.start[0], piece
        return
    inside = tuple(slice(start, start + size) for start, size in zip(box.start[1:], box.size[1:], strict=True))
    many = max(1, SLAB * BLOCK // math.prod(shape[1:]))
    for low, rows in zip(range(0, len(piece), many), piece.split(many), strict=True):
        wide = rows.new_zeros(len(rows), *shape[1:])
        wide[(slice(None), *inside)] = rows
        yield box.start[0] + low, wide


def _hash(x: Tensor, shape: tuple[int, ...], sums: Tensor) -> str:
    hasher = hashlib.blake2b(f"{x.dtype} {shape} ".encode(), digest_size=16)
    hasher.update(sums.numpy().tobytes())
    return hasher.hexdigest()


def spacing(
    state: Any,
    *,
    tokens: int,
    numbers: int,
    device: torch.device,
    mesh: Mesh = LOCAL,
    shapes: Shapes | None = None,
) -> int:
    """The number of steps from one digested step to the next, so that digests take about `SHARE` of the time: estimated
    by counts, not measured.

    A step has about `tokens` tokens, on a model of `numbers` parameters. The counts are equal on every rank and in a
    resumed run, so that the same steps are digested. The number depends on the tokens more than on the model's size,
    which raises the costs of steps and of digests alike. Small states are digested at every step. Every rank of a
    pipeline axis must call.
    """
    seconds = 0.0
    for path, x in tree.leaves_with_paths(state):
        if isinstance(x, Tensor):
            extent = (shapes or {}).get(path, x.shape)
            cut = extent.cut if isinstance(extent, Extent) else None
            ranks = 1 if cut is None else mesh[cut.axis].size
            ranks *= mesh.shard_axis(cut).size if path in (shapes or {}) else 1
            whole = extent.shape if isinstance(extent, Extent) else extent
            shape = whole if ranks > 1 else x.shape
            rate = _RATES.get((x.device.type, device.type), _RATES["cpu", "cpu"])
            seconds += shape.numel() * x.dtype.itemsize / ranks / rate
    seconds = max(gather_objects(seconds, mesh, ["pipeline"], device))
    work = _FLOP_PER_NUMBER * numbers * tokens / ranks_on(mesh, AXES) / _FLOPS.get(device.type, _FLOPS["cpu"])
    return max(1, math.ceil(seconds / (SHARE * (_PAUSE + work))))
