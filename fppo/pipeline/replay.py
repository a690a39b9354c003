"""Digests of every step, and the recomputation of a step that names the first leaf to differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from fppo import batch as batches
from fppo import tree
from fppo.batch import Experience
from fppo.pipeline.program import Draw, Program, RunState
from fppo.pipeline.train import StepRecord, iterate
from fppo.runtime.mesh import GRADIENT_AXES, LOCAL, Mesh, device_of, gather_objects

DIGESTS = "digests.jsonl"


@attrs.frozen
class Difference:
    """Where a recomputed step parts from the recorded one: in its batch or its result, and in which leaf first."""

    step: int
    part: str
    leaf: str


def digests_of(run: RunState, experience: Experience, mesh: Mesh = LOCAL) -> dict[str, dict[str, str]]:
    """The digests of a step's batch and of the state it led to, leaf by leaf; every rank gets those of all ranks."""
    own = tree.digest(run)
    every = gather_objects(own, mesh, GRADIENT_AXES, device_of(run.actor.params))
    result = {leaf: tree.combine({str(rank): each[leaf] for rank, each in enumerate(every)}) for leaf in own}
    return {"batch": tree.digest(experience), "result": own if len(every) == 1 else result}


def record_line(record: StepRecord, mesh: Mesh = LOCAL) -> dict[str, Any]:
    """What the digests file holds of a step."""
    assert record.experience is not None
    digests = digests_of(record.run, record.experience, mesh)
    return {"step": record.run.step, "state": tree.combine(digests["result"]), **digests}


def replay(
    run: RunState,
    *,
    program: Program,
    draw: Draw,
    recorded: dict[int, dict],
    until: int,
    ahead: int = 0,
    mesh: Mesh = LOCAL,
) -> Iterator[tuple[RunState, Difference | None]]:
    """Recomputes the steps after `run.step` up to `until`: the run after each, and where it first differs or None.

    The memory of `run` is given up.

    Batch leaves come before result leaves, so a difference in the rollout is named before what follows from it. A step
    that was not recorded raises ValueError.
    """
    missing = [s for s in range(run.step + 1, until + 1) if s not in recorded]
    if missing:
        raise ValueError(f"no record of step {missing[0]}; the recorded steps are {_spans(sorted(recorded))}")
    for after, experience, _ in iterate(run, program=program, draw=draw, ahead=ahead, donate=True):
        new, old = digests_of(after, experience, mesh), recorded[after.step]
        yield after, first_difference(after.step, old, new)
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


def _spans(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
