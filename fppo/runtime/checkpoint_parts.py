"""A checkpoint of a state whose parts are on meshes of their own: each is written by its own ranks, into one draft.

Whoever holds the parts together begins, has them written, and commits them all by one rename. What is written is read
by `checkpoint.load`, as any other checkpoint is, whole or part by part.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import tree
from fppo.runtime import _checkpoint_attempt as attempts
from fppo.runtime import _checkpoint_files as files
from fppo.runtime._checkpoint_attempt import Attempt
from fppo.runtime._checkpoint_files import Contents
from fppo.runtime._checkpoint_host import on_host
from fppo.runtime.checkpoint import TIMEOUT, plain_of
from fppo.runtime.layout import Extent
from fppo.runtime.mesh import LOCAL, Mesh


def begin(directory: Path, step: int) -> Attempt:
    """A draft to write parts into. Raises CheckpointError if it cannot be made, or the step has a checkpoint."""
    attempt = Attempt(directory, step, os.urandom(8).hex(), 0, 1, TIMEOUT)
    try:
        attempts.make_way(attempt.final)
        if attempt.final.is_dir():
            raise OSError("there is one already")
        attempt.draft.mkdir(parents=True)
        attempts.clear_leftovers(attempt)
    except OSError as error:
        raise attempts.cannot_write(directory, step, str(error)) from error
    return attempt


def write(
    value: Any,
    path: str,
    draft: Path,
    first: int,
    *,
    mesh: Mesh = LOCAL,
    shapes: Mapping[str, torch.Size | Extent] = {},
) -> Contents:
    """Writes what the tree has at `path`, in files whose numbers begin with `first`. Every rank of its mesh calls.

    `shapes` are those of `checkpoint.begin_save`, by paths in `value`; leaves that are elsewhere are left out.
    """
    every = {path + name: leaf for name, leaf in tree.leaves_with_paths(value)}
    leaves = {name: leaf for name, leaf in every.items() if not isinstance(leaf, tree.Away)}
    tensors = {name: x.detach() for name, x in leaves.items() if isinstance(x, Tensor)}
    plain = {name: plain_of(x) for name, x in leaves.items() if not isinstance(x, Tensor)}
    cuts = files.cuts_of(tensors, mesh, {path + name: shape for name, shape in shapes.items()})
    device = next((x.device for x in tensors.values() if x.is_cuda), torch.device("cpu"))
    contents = files.contents(tensors, cuts, plain, None, mesh, device)
    number = contents.number(mesh)
    if number is not None and tensors:
        mine = {name: x for name, x in tensors.items() if files.writes(cuts[name], mesh)}
        files.write_shard(draft, first + number, on_host(mine, copy=False), cuts)
    place = {"first": first, "writers": contents.writers}
    return attrs.evolve(contents, leaves={name: {**leaf, **place} for name, leaf in contents.leaves.items()})


def commit(attempt: Attempt, parts: Sequence[Contents], count: int, *, structure: Any = None, keep: int | None) -> Path:
    """Makes the draft, with all that was written, the checkpoint of its step, and drops all but the newest `keep`.

    The numbers of its files are below `count`. `structure` is the tree of the field that `load` takes as free.
    """
    try:
        contents = Contents(
            plain={name: x for part in parts for name, x in part.plain.items()},
            structure=None if structure is None else pytree.treespec_dumps(pytree.tree_structure(structure)),
            leaves={name: leaf for part in parts for name, leaf in part.leaves.items()},
            writers=(1,) * len(files.WRITERS),
            notes={name: x for part in parts for name, x in part.notes.items()},
        )
        files.write_manifest(
            attempt.draft, step=attempt.step, attempt=str(attempt.token), contents=contents, count=count
        )
        attempts.commit(attempt)
    except OSError as error:
        abandon(attempt)
        raise attempts.cannot_write(attempt.directory, attempt.step, str(error)) from error
    attempts.drop_old(attempt.directory, keep)
    return attempt.final


def abandon(attempt: Attempt) -> None:
    """Removes the draft."""
    shutil.rmtree(attempt.draft, ignore_errors=True)
