"""Digests of steps, and the recomputation of a step that names the first leaf to differ."""

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
from fppo.runtime.mesh import LOCAL, Mesh, device_of

DIGESTS = "digests.jsonl"
OfState = Callable[[RunState, Kind], dict[str, str]]
_PLAIN: Kind = "blake2b"  # of lines that name no kind


@attrs.frozen
class Difference:
    """Where a recomputed step parts from the recorded one: in its batch or its result, and in which leaf first."""

    step: int
    part: str
    leaf: str


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
    """The digests of a step's batch and of the state it led to, leaf by leaf; every rank gets the same of the state.

    `shapes` are the whole shapes of the state's leaves that the mesh may cut, `device` is the one that computes (None:
    that of the actor's parameters). They are of `kind`, or of that which `digests.kind_of` has for the device.
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
    """A step's line of the digests file: one digest of the state, that of each leaf, and their kind unless blake2b."""
    assert record.experience is not None
    device = device or device_of(record.run.actor.params)
    kind = kind or digests.kind_of(device, mesh)
    both = digests_of(record.run, record.experience, mesh, shapes=shapes, device=device, kind=kind, of_state=of_state)
    known = {} if kind == _PLAIN else {"kind": kind}
    return {"step": record.run.step, "state": tree.combine(both["result"]), **known, **both}


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
    """Recomputes the steps after `run.step` up to `until`: the run after each, and where it first differs or None.

    `begin(run)` iterates over the steps, as `train.iterate` does; the memory of `run` is given up. Steps whose digests
    were not recorded are computed, and compared with nothing;
    `shapes`, `device` and `of_state` are `digests_of`'s.

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
        yield after, difference
        if after.step >= until:
            return


def first_difference(step: int, old: dict, new: dict) -> Difference | None:
    """The first leaf, in the tree's order, whose digest differs between two records of one step."""
    for part in ("batch", "result"):
        for leaf in [*new[part], *(set(old[part]) - set(new[part]))]:
            if old[part].get(leaf) != new[part].get(leaf):
                return Difference(step, part, leaf)
    return None


def dump(record: StepRecord, line: dict[str, Any], directory: Path) -> Path:
    """Writes the batch of a step whose update was not finite, with its digests beside it."""
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
