"""Directories that are written beside their place and take it as a whole: models with their configs. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

CONTENTS = "fppo_files.json"  # names all files of an export, so that the next one knows what it may replace


def draft_of(directory: str | os.PathLike[str]) -> Path:
    """Where this process writes what is to take the directory's place."""
    target = Path(os.path.realpath(directory))
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def replacing(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """A directory to be made and filled (`draft_of`), which takes the place of `directory` at the end; after an error
    it is removed. Raises ValueError as `check_replaceable`, before and after it is filled, which takes a while."""
    target, draft = Path(os.path.realpath(directory)), draft_of(directory)
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        yield draft
        _complete(draft)
        check_replaceable(target)
        _take_place(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_replaceable(directory: str | os.PathLike[str]) -> None:
    """Raises ValueError unless an export may be written to the directory: it is not there, or empty, or holds an
    earlier one and nothing else."""
    target = Path(directory)
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file, which a model does not replace; give a new directory")
    saved = _saved(target)
    others = sorted(_files(target) - saved if saved else (path.name for path in target.iterdir()))
    if others:
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ValueError(
            f"{target} holds {shown}, which saving a model would delete; move that away, or give a new or empty "
            "directory, or one that holds an earlier export and nothing else"
        )


def _files(directory: Path) -> set[str]:
    """The paths below a directory, but for those of directories."""
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path.relative_to(directory).as_posix() for path in paths}


def _saved(directory: Path) -> set[str]:
    """What an export has written to the directory, by its own list."""
    try:
        return {CONTENTS, *json.loads((directory / CONTENTS).read_text(encoding="utf-8"))["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _complete(directory: Path) -> None:
    """Lists what was written, and gives every file the mode that the umask asks for: safetensors gives 0600."""
    text = json.dumps({"files": sorted(_files(directory))}, indent=1) + "\n"
    (directory / CONTENTS).write_text(text, encoding="utf-8")
    mode = (directory / CONTENTS).stat().st_mode & 0o666
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def _take_place(draft: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    draft.rename(target)
    shutil.rmtree(old, ignore_errors=True)
