"""A run's state on disk: whole, committed by one rename, checked when it is read. Nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import tree
from fppo.key import Key

T = TypeVar("T")
FORMAT = 1
_NAME = re.compile(r"step_(\d{8})")


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message says what to do."""


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return directory / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's path. Raises CheckpointError if it does not have a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint; theirs are directories named like step_00000100")
    return int(match[1])


def steps(directory: Path) -> list[int]:
    """The steps of the complete checkpoints, ascending. What a crash left behind does not bear their name."""
    if not directory.is_dir():
        return []
    return sorted(int(m[1]) for entry in directory.iterdir() if (m := _NAME.fullmatch(entry.name)))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Key):
        return {"key": leaf.seed}
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise CheckpointError(f"a leaf of type {type(leaf).__name__} does not fit a checkpoint: {leaf!r}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(value: Any, directory: Path, step: int, *, keep: int | None = None) -> Path:
    """Writes the tree `value` as the checkpoint of `step`, then drops all but the newest `keep`.

    The files are written and synced under another name and renamed at the end, so a crash at any instant leaves the
    last complete checkpoint as it was. Raises CheckpointError if it cannot be written (a full disk, say); what was
    there before stays usable. The same state saved again is left as it is; another one for the same step is an error.
    """
    leaves = dict(tree.leaves_with_paths(value))
    tensors = {path: x.detach().cpu().contiguous() for path, x in leaves.items() if isinstance(x, Tensor)}
    manifest = {
        "format": FORMAT,
        "step": step,
        "plain": {path: _plain(x) for path, x in leaves.items() if not isinstance(x, Tensor)},
        "digests": _digests(tensors),
    }
    final = path_of(directory, step)
    if final.is_dir() and json.loads((final / "state.json").read_text()) == json.loads(json.dumps(manifest)):
        return final
    draft = directory / f".{final.name}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob(".step_*"):  # drafts of processes that died; one run writes here at a time
            shutil.rmtree(old, ignore_errors=True)
        draft.mkdir()
        safetensors.torch.save_file(tensors, draft / "state.safetensors")
        (draft / "state.json").write_text(json.dumps(manifest))
        for part in (draft / "state.safetensors", draft / "state.json", draft):
            _sync(part)
        draft.rename(final)  # onto an existing checkpoint it fails, and so replaces none
        _sync(directory)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(draft)
        last = steps(directory)
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {directory}: {error}. "
            f"{f'The last complete one is of step {last[-1]}.' if last else 'There is none yet.'} "
            "Free some space or choose another output directory, then resume."
        ) from error
    for old_step in steps(directory)[: -keep if keep else 0]:
        _drop(path_of(directory, old_step))
    return final


def _drop(path: Path) -> None:
    """Renames, then removes, so that a half-removed checkpoint does not bear a checkpoint's name."""
    doomed = path.with_name(f".{path.name}.dropped")
    with contextlib.suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed)


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: tree.digest(x)[""] for name, x in tensors.items()}


def load(template: T, directory: Path, step: int) -> T:
    """The tree that `save` wrote, in the structure and on the devices of `template`, whose values do not matter.

    Raises CheckpointError for a damaged checkpoint, and for one of another model, naming the leaves that differ.
    """
    path = path_of(directory, step)
    try:
        manifest = json.loads((path / "state.json").read_text())
        with safe_open(path / "state.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        others = [s for s in steps(directory) if s != step]
        raise CheckpointError(
            f"{path} is damaged: {error}. Remove it to resume from {f'step {others[-1]}' if others else 'the start'}."
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}; this version reads format {FORMAT}")
    stored = tensors | manifest["plain"]
    expected = dict(tree.leaves_with_paths(template))
    problems = _mismatches(expected, stored)
    if problems:
        shown = "; ".join(problems[:5])
        raise CheckpointError(f"{path} is of another model or other settings: {len(problems)} leaves differ: {shown}")
    wrong = [name for name, digest in _digests(tensors).items() if manifest["digests"].get(name) != digest]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {wrong[0]} does not have the digest it was saved with")
    filled = [_restore(stored[name], leaf) for name, leaf in expected.items()]
    return pytree.tree_unflatten(filled, pytree.tree_structure(template))


def _mismatches(expected: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    problems = [f"{name} is missing" for name in expected if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in expected]
    for name in expected.keys() & stored.keys():
        want, have = expected[name], stored[name]
        if isinstance(want, Tensor) != isinstance(have, Tensor):
            problems.append(f"{name} is a {type(have).__name__}, expected a {type(want).__name__}")
        elif isinstance(want, Tensor) and (want.shape, want.dtype) != (have.shape, have.dtype):
            problems.append(f"{name} is {have.dtype} {tuple(have.shape)}, expected {want.dtype} {tuple(want.shape)}")
    return sorted(problems)


def _restore(value: Any, like: Any) -> Any:
    if isinstance(like, Tensor):
        # memory of its own: a file's layout aligns tensors otherwise, and kernels then round otherwise
        return value.to(like.device).clone()
    return Key(value["key"]) if isinstance(like, Key) else value


def newest(template: T, directory: Path) -> tuple[T, int] | None:
    """The newest complete checkpoint and its step; None if there is none."""
    found = steps(directory)
    return (load(template, directory, found[-1]), found[-1]) if found else None
