"""Digests of steps, and the recomputation of a step that names the leaves that differ, and by how much."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from fppo import batch as batches
from fppo import tree
from fppo.batch import Experience
from fppo.pipeline.program import RunState
from fppo.pipeline.train import StepRecord, StepsOf
from fppo.runtime import digests
from fppo.runtime.digests import Kind, Shapes
from fppo.runtime.mesh import AXES, LOCAL, Mesh, device_of, ranks_on
from fppo.runtime.sketches import Size, size_of, sketches

DIGESTS = "digests.jsonl"
OfState = Callable[[RunState, Kind], dict[str, str]]
SIZES = "sizes"  # the key of the sketches of a line's leaves, which give the size of a difference
_PLAIN: Kind = "blake2b"  # of lines that name no kind
_PARTS = ("batch", "result")
# by compute dtype, the most that rounding changes numbers of about 1, or larger ones relative to their size
_ROUNDING = {"bfloat16": 2e-2, "float16": 2e-2}
_OF_FLOAT32 = 1e-5


@attrs.frozen
class DifferingLeaf:
    """A leaf of a step's batch or of the state after it, and the size of its difference; None if that is unknown."""

    part: str
    leaf: str
    size: Size | None = None


@attrs.frozen
class Difference:
    """The leaves, one or more, in which a recomputed step differs from the recorded one, those of its batch first."""

    step: int
    leaves: tuple[DifferingLeaf, ...]

    @property
    def part(self) -> str:
        """The part ("batch" or "result") of the first leaf that differs."""
        return self.leaves[0].part

    @property
    def leaf(self) -> str:
        """The path of the first leaf that differs."""
        return self.leaves[0].leaf

    def is_of_metrics(self, compute_dtype: str) -> bool:
        """Whether only metrics can differ: the state after the step is equal bit for bit, and columns of the batch
        differ by no more than rounding in the model's compute dtype."""
        most = _ROUNDING.get(compute_dtype, _OF_FLOAT32)
        sizes = [x.size for x in self.leaves if x.part == "batch"]
        return len(sizes) == len(self.leaves) and all(x is not None and x.apart <= most * max(1.0, x.of) for x in sizes)

    def __str__(self) -> str:
        """The difference in words, with its size."""
        first, counts = self.leaves[0], [sum(x.part == part for x in self.leaves) for part in _PARTS]
        by = "" if first.size is None else f", by {first.size}"
        said = f"{first.part} differs first in {first.leaf}{by}"
        if len(self.leaves) == 1:
            return said
        names = [f"{n} leaves of its {part}" for n, part in zip(counts, _PARTS, strict=True) if n]
        known = [x.size.relative for x in self.leaves if x.size is not None]
        most = f", by at most about {max(known):.0e} of their size" if known else ""
        return f"{said}; in all {' and '.join(names)}{most}"


def digests_of(
    run: RunState,
    experience: Experience,
    mesh: Mesh = LOCAL,
    *,
    shapes: Shapes | None = None,
    device: torch.device | None = None,
    kind: Kind | None = None,
    of_state: OfState | None = None,
) -> dict[str, dict[str, str]]:
    """The digests of a step's batch and of the state it led to, leaf by leaf; all ranks get equal digests of the state.

    `shapes` are the whole shapes of the state's leaves that the mesh may cut, `device` is the one that computes (None:
    that of the actor's parameters). The digests are of `kind`, by default that of `digests.kind_of` for the device.
    `of_state` digests a state that is not in this process.
    """
    device = device or device_of(run.actor.params)
    kind = kind or digests.kind_of(device, mesh)
    return {
        "batch": digests.digest(experience, kind, device=device),
        "result": digests.digest(run, kind, device=device, mesh=mesh, shapes=shapes)
        if of_state is None
        else of_state(run, kind),
    }


def record_line(
    record: StepRecord,
    mesh: Mesh = LOCAL,
    *,
    shapes: Shapes | None = None,
    device: torch.device | None = None,
    kind: Kind | None = None,
    of_state: OfState | None = None,
) -> dict[str, Any]:
    """Make a step's line of the digests file: a digest of the whole state, digests of all leaves of state and batch,
    their kind unless it is blake2b, and sketches of the leaves. Keywords are those of `digests_of`."""
    assert record.experience is not None
    device = device or device_of(record.run.actor.params)
    kind = kind or digests.kind_of(device, mesh)
    both = digests_of(record.run, record.experience, mesh, shapes=shapes, device=device, kind=kind, of_state=of_state)
    known = {} if kind == _PLAIN else {"kind": kind}
    sizes = sizes_of(record.run, record.experience, mesh, of_state)
    return {"step": record.run.step, "state": tree.combine(both["result"]), **known, **both, SIZES: sizes}


def sizes_of(
    run: RunState, experience: Experience, mesh: Mesh = LOCAL, of_state: OfState | None = None
) -> dict[str, dict[str, list[float]]]:
    """Numeric sketches of the leaves of a step's batch and, if this process holds the whole state after the step, of
    that state's."""
    whole = of_state is None and ranks_on(mesh, AXES) == 1
    return {"batch": sketches(experience), "result": sketches(run) if whole else {}}


def kind_recorded(line: Mapping[str, Any]) -> Kind:
    """The kind of the digests in a line of the digests file."""
    return line.get("kind", _PLAIN)


def replay(
    run: RunState,
    *,
    begin: Callable[[RunState], StepsOf],
    recorded: dict[int, dict],
    until: int,
    mesh: Mesh = LOCAL,
    shapes: Shapes | None = None,
    device: torch.device | None = None,
    of_state: OfState | None = None,
) -> Iterator[tuple[RunState, Difference | None]]:
    """Recompute the steps after `run.step` up to `until`; yield the run after each, and its difference or None.

    `begin(run)` iterates over the steps, as `train.iterate` does; the memory of `run` is given up. Steps whose digests
    were not recorded are computed, but not compared. `shapes`, `device` and `of_state` are those of `digests_of`.

    Batch leaves come before result leaves, so a difference in the rollout is named before what follows from it. Raises
    ValueError if nothing was recorded of step `until`.
    """
    if until not in recorded:
        last = max(recorded, default=0)
        missing = until if last > until else max(last, run.step) + 1
        raise ValueError(f"no record of step {missing}; the recorded steps are {_spans(sorted(recorded))}")
    for after, experience, _ in begin(run):
        difference = None
        if (old := recorded.get(after.step)) is not None:
            kind = kind_recorded(old)
            new = digests_of(after, experience, mesh, shapes=shapes, device=device, kind=kind, of_state=of_state)
            difference = first_difference(after.step, old, new)
            if difference is not None:
                new |= {SIZES: sizes_of(after, experience, mesh, of_state)}
                difference = first_difference(after.step, old, new)
        yield after, difference
        if after.step >= until:
            return


def first_difference(step: int, old: Mapping[str, Any], new: Mapping[str, Any]) -> Difference | None:
    """The leaves whose digests differ between two records of one step, in the tree's order, with the sizes of the
    differences where both have sketches; None without any."""
    leaves = tuple(
        DifferingLeaf(part, leaf, size_of(sketch_of(old, part, leaf), sketch_of(new, part, leaf)))
        for part in _PARTS
        for leaf in {**new[part], **old[part]}
        if old[part].get(leaf) != new[part].get(leaf)
    )
    return Difference(step, leaves) if leaves else None


def sketch_of(line: Mapping[str, Any], part: str, leaf: str) -> Sequence[float] | None:
    """The sketch of a leaf in a line of the digests file; None without one."""
    return line.get(SIZES, {}).get(part, {}).get(leaf)


def dump(record: StepRecord, line: dict[str, Any], directory: Path) -> Path:
    """Write the batch of a step whose update was not finite, with its digests beside it."""
    assert record.experience is not None
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step_{record.run.step:08d}.safetensors"
    batches.save(record.experience, path)
    path.with_suffix(".json").write_text(json.dumps(line))
    return path


def _spans(numbers: Sequence[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    spans = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(spans) or "none"
