"""Layouts of parameters on a mesh, as data: which part of each parameter a rank holds, and which rank counts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fppo_kernels.collectives import Axis, all_gather


@attrs.frozen
class Box:
    """A box of a whole tensor within a piece of it: its start in the whole, its start in the piece (`at`), its size."""

    start: tuple[int, ...]
    at: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, row: int, stop: int) -> Box | None:
        """The box's part in rows [row, stop) of the piece, relative to `row`; None if it is empty."""
        low, high = max(self.at[0], row), min(self.at[0] + self.size[0], stop)
        if low >= high:
            return None
        return Box(
            (self.start[0] + low - self.at[0], *self.start[1:]),
            (low - row, *self.at[1:]),
            (high - low, *self.size[1:]),
        )

    def shared(self, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The slices of the intersection in this box's piece and in the other's; None if it is empty."""
        lows = tuple(map(max, self.start, other.start))
        highs = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            return None

        def places(box: Box) -> tuple[slice, ...]:
            offsets = [at - start for at, start in zip(box.at, box.start, strict=True)]
            return tuple(slice(low + by, high + by) for low, high, by in zip(lows, highs, offsets, strict=True))

        return places(self), places(other)


@attrs.frozen
class Cut:
    """A cut of dimension `dim` of a parameter into `parts` parts. The dimension is a sequence of segments of the sizes
    `segments`; each part has a run of every segment.

    Rank r of the n of `axis` holds part r * parts // n: with fewer parts than ranks, some ranks hold equal parts.
    """

    dim: int
    parts: int
    segments: tuple[int, ...]
    axis: str = "tensor"

    def part(self, rank: int, ranks: int) -> int:
        """The part of a rank."""
        return rank * self.parts // ranks

    def first(self, part: int, ranks: int) -> int:
        """The first rank with a part."""
        return -(-part * ranks // self.parts)

    def runs(self, part: int) -> list[tuple[int, int]]:
        """The start along `dim` and the length of each run of a part."""
        runs, start = [], 0
        for size in self.segments:
            low, high = (size * number // self.parts for number in (part, part + 1))
            runs.append((start + low, high - low))
            start += size
        return runs

    def size(self, part: int) -> int:
        """The length of a part along `dim`."""
        return sum(length for _, length in self.runs(part))

    def take(self, whole: Tensor, part: int) -> Tensor:
        """Select a part of the whole tensor; a single run is a view."""
        pieces = [whole.narrow(self.dim, *run) for run in self.runs(part)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from all its parts."""
        split = [x.split([length for _, length in self.runs(part)], self.dim) for part, x in enumerate(parts)]
        return torch.cat([runs[i] for i in range(len(self.segments)) for runs in split], self.dim)


@attrs.frozen
class Extent:
    """The whole shape of a tensor, its cut over an axis, and the pipeline ranks that hold it, in order; () means
    all."""

    shape: torch.Size
    cut: Cut | None = None
    stages: tuple[int, ...] = ()


def block_of(shape: Sequence[int], leaf: Sequence[int]) -> tuple[int, int] | None:
    """The axis along which a leaf has one number for each block of a tensor of this shape, and the size of a block;
    None if the shapes differ otherwise."""
    axes = [i for i, (n, m) in enumerate(zip(shape, leaf, strict=False)) if n != m]
    if len(shape) != len(leaf) or len(axes) != 1 or not leaf[axes[0]] or shape[axes[0]] % leaf[axes[0]]:
        return None
    return axes[0], shape[axes[0]] // leaf[axes[0]]


def divided(name: str, extent: torch.Size | Extent, axis: int, size: int) -> torch.Size | Extent:
    """The extent of a leaf with one number for each block of `size` numbers along an axis of a parameter, cut as the
    parameter is. Raises ValueError, naming the parameter, for a cut or an end of the axis inside of a block."""
    whole = extent if isinstance(extent, Extent) else Extent(extent)
    cut, shape, edges, over = whole.cut, list(whole.shape), [whole.shape[axis]], ""
    if cut is not None and cut.dim == axis:
        edges += [edge for part in range(cut.parts) for run in cut.runs(part) for edge in run]
        over = f", which the {cut.axis} axis cuts into {cut.parts} parts"
        cut = attrs.evolve(cut, segments=tuple(each // size for each in cut.segments))
    if any(edge % size for edge in edges):
        raise ValueError(
            f"{name} of shape {tuple(whole.shape)}: blocks of {size} do not fit axis {axis}{over}: give a block size "
            "that divides each part, or another mesh"
        )
    shape[axis] //= size
    return Extent(torch.Size(shape), cut, whole.stages) if isinstance(extent, Extent) else torch.Size(shape)


@attrs.frozen
class Layout:
    """The layout of parameters of `whole` shapes on one rank. The rank is `rank` of `ranks` on the tensor axis,
    `expert` = (rank, ranks) on the expert axis and `stage_rank` of `stage_ranks` on the pipeline axis. Parameters in
    `cuts` are held in parts, others whole; `stages` names the pipeline ranks that hold each, in order, and is empty
    without a pipeline.

    Parameters in `once` are whole, and added to a sum over the ranks: only the first rank adds them.
    """

    whole: Mapping[str, torch.Size]
    cuts: Mapping[str, Cut]
    once: frozenset[str]
    rank: int
    ranks: int
    stages: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    stage_rank: int = 0
    stage_ranks: int = 1
    expert: tuple[int, int] = (0, 1)

    def __attrs_post_init__(self) -> None:
        if self.stage_ranks > 1 and (lost := [name for name in self.whole if not self.stages.get(name)]):
            raise ValueError(f"no rank of the pipeline axis holds {lost[:5]}")

    def place(self, cut: Cut) -> tuple[int, int]:
        """This rank's index on the axis of a cut, and the axis's size."""
        return self.expert if cut.axis == "expert" else (self.rank, self.ranks)

    @property
    def held(self) -> tuple[str, ...]:
        """The parameters that this rank holds, whole or in part, in the model's order."""
        return tuple(name for name in self.whole if self.holds(name))

    def holds(self, name: str) -> bool:
        """Whether this rank holds a parameter, whole or in part."""
        return self.stage_rank in self.stages.get(name, (self.stage_rank,))

    def source(self, name: str) -> int:
        """The first pipeline rank that holds a parameter, which sends it to the others."""
        return self.stages.get(name, (0,))[0]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the parameters that this rank holds."""
        return {name: self.shape(name) for name in self.held}

    def shape(self, name: str) -> torch.Size:
        """The shape of this rank's part of a parameter, held by this stage or another."""
        shape, cut = list(self.whole[name]), self.cuts.get(name)
        if cut is not None:
            shape[cut.dim] = cut.size(cut.part(*self.place(cut)))
        return torch.Size(shape)

    def only(self, keep: Callable[[str], bool]) -> Layout:
        """The layout restricted to the parameters for which `keep(name)` is true."""
        named = {name: shape for name, shape in self.whole.items() if keep(name)}
        stages = {name: of for name, of in self.stages.items() if name in named}
        return attrs.evolve(self, whole=named, stages=stages)

    def extent(self, name: str) -> torch.Size | Extent:
        """The whole shape of a parameter, with its cut and its stages if it has some."""
        cut, stages = self.cuts.get(name), self.stages.get(name, ())
        return Extent(self.whole[name], cut, stages) if cut is not None or stages else self.whole[name]

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter."""
        cut = self.cuts.get(name)
        return whole if cut is None else cut.take(whole, cut.part(*self.place(cut)))

    def join(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all ranks of its cut's axis, in their order."""
        cut = self.cuts.get(name)
        return pieces[0] if cut is None else cut.join([pieces[cut.first(i, len(pieces))] for i in range(cut.parts)])

    def gather(self, name: str, piece: Tensor, axis_of: Callable[[str], Axis]) -> Tensor:
        """Gather the whole parameter from this rank's piece, by a collective over the axis of its cut if it has one."""
        cut = self.cuts.get(name)
        if cut is None:
            return piece
        rank, ranks = self.place(cut)
        sizes = [cut.size(cut.part(other, ranks)) for other in range(ranks)]
        padded = piece.detach().movedim(cut.dim, 0)
        if short := max(sizes) - sizes[rank]:
            padded = torch.cat([padded, padded.new_empty(short, *padded.shape[1:])])
        pieces = all_gather(padded[None], axis_of(cut.axis))
        return self.join(name, [x[:size].movedim(0, cut.dim) for x, size in zip(pieces, sizes, strict=True)])

    def owns(self, name: str, *, sharded: bool = False) -> bool:
        """Whether this rank counts its part of a parameter: the first of the ranks with equal parts does.

        With `sharded` (`Mesh.sharded`) no two ranks of the expert axis hold equal parts.
        """
        cut, firsts = self.cuts.get(name), {"tensor": 0, "expert": self.expert[0] if sharded else 0}
        if cut is not None:
            rank, ranks = self.place(cut)
            firsts[cut.axis] = cut.first(cut.part(rank, ranks), ranks)
        own = {"tensor": self.rank, "expert": self.expert[0]}
        return own == firsts and self.stage_rank == self.stages.get(name, (self.stage_rank,))[0]


def boxes(shape: tuple[int, ...], cut: Cut | None = None, part: int = 0) -> list[Box]:
    """The boxes of a part of a tensor of `shape`, in order; without a cut the whole tensor."""
    zeros = (0,) * len(shape)
    if cut is None:
        return [Box(zeros, zeros, shape)]
    found, at = [], 0
    for start, length in cut.runs(part):
        on = {
            what: (*base[: cut.dim], x, *base[cut.dim + 1 :])
            for what, base, x in (("start", zeros, start), ("at", zeros, at), ("size", shape, length))
        }
        found.append(Box(**on))
        at += length
    return found
