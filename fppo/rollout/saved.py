"""Rollouts on disk: a file for each step, written by the run that samples and read by a run that trains."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fppo import batch as batches
from fppo import tree
from fppo.batch import Rollout, Scored

_NAME = re.compile(r"step_(\d{8})\.safetensors")


def path_of(directory: Path, step: int) -> Path:
    """The path of the rollout for step `step`; the first step is 1."""
    return directory / f"step_{step:08d}.safetensors"


def write(rows: Scored, directory: Path, step: int) -> Path:
    """Write a rollout without its scores, atomically, in place of an earlier file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = path_of(directory, step)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    batches.save(batches.narrow(Rollout, rows), draft)
    draft.rename(path)
    return path


def read(directory: Path, step: int, device: torch.device, *, vocabulary: int) -> Rollout:
    """Read the rollout of a step, for a model with `vocabulary` tokens.

    Raises ValueError for a missing or damaged file, and for tokens outside the vocabulary.
    """
    path = path_of(directory, step)
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; the directory holds {_spans(steps(directory))}")
    rollout = batches.load(Rollout, path)
    top = int(rollout.tokens.max())
    if top >= vocabulary:
        raise ValueError(
            f"{path} holds token {top}, and the model has a vocabulary of {vocabulary}: it was made with another "
            "tokenizer; give rollouts of this model's (rollout.from)"
        )
    return tree.map(lambda x: x.to(device, copy=True), rollout)


def steps(directory: Path) -> list[int]:
    """The steps for which the directory has rollouts, ascending."""
    matches = (_NAME.fullmatch(path.name) for path in directory.glob("step_*.safetensors"))
    return sorted(int(match[1]) for match in matches if match)


def check(directory: Path, *, until: int, rows: int, routed: bool = False) -> None:
    """Raise ValueError unless the directory has rollouts of `rows` rows, or episodes of several rows, for steps 1 to
    `until`; with `routed` they must include the engine's experts."""
    if not directory.is_dir():
        raise ValueError(f"rollout.from = {str(directory)!r}: there is no such directory")
    there = steps(directory)
    missing = sorted(set(range(1, until + 1)) - set(there))
    if not there:
        inner = directory / "rollouts"
        hint = f"; give {inner}" if steps(inner) else ", no step_00000001.safetensors; give another directory"
        raise ValueError(f"rollout.from = {str(directory)!r}: it holds no rollouts{hint}")
    if missing:
        fewer = f"at most {missing[0] - 1} steps, or " if missing[0] > 1 else ""
        raise ValueError(
            f"rollout.from = {str(directory)!r}: it holds rollouts of {_spans(there)}, but none of step {missing[0]}; "
            f"give {fewer}another directory"
        )
    for step in range(1, until + 1):
        path = path_of(directory, step)
        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                count, told = file.get_slice("row_ids").get_shape()[0], "routed" in names
                if "episodes" in names:
                    count = len(file.get_tensor("episodes").unique())
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole file of a rollout: {error}") from error
        if count != rows:
            raise ValueError(f"{path} holds {count} rows; give rollout.batch_size = {count}")
        if routed and not told:
            raise ValueError(
                f'algorithm.router_replay = "rollout": {path} does not tell which experts the engine chose; give '
                '"old_log_probs", or rollouts that were sampled with "rollout"'
            )


def _spans(numbers: list[int]) -> str:
    return f"steps {numbers[0]} to {numbers[-1]}" if numbers else "no steps"
