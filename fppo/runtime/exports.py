"""Atomic writes of files and of exported directories, models with their configs. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from fppo._errors import json_of

CONTENTS = "fppo_files.json"  # lists all files of an export, which the next one may replace

_EXPORTED = (  # the file names of saved models, tokenizers, processors and adapters
    *(CONTENTS, "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template.*", "additional_chat_templates/*", "*processor_config.json", "adapter_config.json", "*.py"),
)


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's contents, or a directory's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """A context in which this process makes files and folders that their owner alone can read."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically: after a crash at any moment it has all of the data, or its previous contents."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.new")
    draft.write_bytes(data)
    sync(draft)
    os.replace(draft, target)
    sync(target.parent)


def draft_of(directory: str | os.PathLike[str]) -> Path:
    """The path beside a directory where this process writes what is to replace it."""
    target = Path(os.path.realpath(directory))
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def replacing(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """A context with a draft directory to create and fill (`draft_of`). The draft replaces `directory` at the end, and
    is removed after an error. Raises ValueError as `check_replaceable` does, before and after it is filled."""
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


@contextlib.contextmanager
def adding(directory: str | os.PathLike[str], names: Iterable[str]) -> Iterator[None]:
    """A context in which files with these names are written into an export. They are entered in its list first, so that
    another export may replace them, and flushed at the end. Raises ValueError if other files have these names."""
    target, added = Path(directory), list(names)
    before = _saved(target)
    if others := sorted({name for name in added if (target / name).exists()} - before):
        raise ValueError(f"{target} holds {', '.join(others)} already; move that away")
    text = json.dumps({"files": sorted({*before - {CONTENTS}, *added})}, indent=1) + "\n"
    write_whole(target / CONTENTS, text.encode())
    yield
    for name in added:
        sync(target / name)
    sync(target)


def check_replaceable(directory: str | os.PathLike[str]) -> None:
    """Raise ValueError unless an export may be written to the directory: it is missing, empty, or holds an earlier
    export and nothing else."""
    target = Path(directory)
    if not os.path.exists(target):  # which, unlike Path's, raises nothing for too long a name
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
    """The relative paths of all files below a directory."""
    paths = [path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path.relative_to(directory).as_posix() for path in paths}


def _saved(directory: Path) -> set[str]:
    """The files of an export in the directory, by its list; if that is damaged, by the names of exported files."""
    try:
        text = (directory / CONTENTS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    try:
        names = json_of(text)["files"]
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return {CONTENTS, *names}
    except (ValueError, KeyError, TypeError):
        pass
    return {name for name in _files(directory) if any(fnmatch(name, kind) for kind in _EXPORTED)}


def _complete(directory: Path) -> None:
    """Write the list of files, give every file the umask's mode (safetensors' is 0600), and flush all to disk."""
    text = json.dumps({"files": sorted(_files(directory))}, indent=1) + "\n"
    (directory / CONTENTS).write_text(text, encoding="utf-8")
    mode = (directory / CONTENTS).stat().st_mode & 0o666
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(mode)
            sync(file)


def _take_place(draft: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    draft.rename(target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)
