"""Folders at an address of fsspec, such as s3://bucket/run, each complete once its marker is written. No torch.

    ADDRESS/checkpoints/step_00000100/state.json ...    the files of a folder
    ADDRESS/checkpoints/step_00000100/complete.json     its marker, written last

A marker has the size and the digest of each file, and a digest of itself. A folder without a whole marker does not
exist for readers; the next upload removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import attrs

from fppo._errors import json_of, nearest, words_of
from fppo.runtime.exports import sync

T = TypeVar("T")
Files = Mapping[str, tuple[int, str]]  # the size in bytes and the digest of each file, by its name
MARKER = "complete.json"
PAUSES = (0.5, 2.0)  # seconds before a failed operation is tried again
_MOST = 300  # characters of another library's error
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://.+")


class RemoteError(OSError):
    """Error for an address that cannot be read or written; the message names it."""


def check_address(value: str | None) -> str | None:
    """Check that a text has the form of an address, scheme://place; returns the problem, or None."""
    if value is None:
        return None
    if not _ADDRESS.fullmatch(value):
        return "is no address; give one as s3://bucket/run"
    return "variables are not replaced here; write them out" if "$" in value else None


@attrs.frozen
class Remote:
    """A place at an address of fsspec. Each operation that fails is tried again after each of the `pauses`, in
    seconds."""

    address: str
    fs: Any  # a file system of fsspec
    root: str  # the path of the place in the file system
    pauses: Sequence[float] = PAUSES

    @staticmethod
    def at(address: str, *, pauses: Sequence[float] = PAUSES) -> Remote:
        """Open the place at an address. Raises RemoteError for an unknown scheme, and names a missing package."""
        from fsspec.core import url_to_fs  # here: most runs use none of it
        from fsspec.registry import known_implementations, registry

        scheme = address.partition("://")[0]
        if scheme not in (known := {*known_implementations, *registry}):
            near = nearest(scheme, sorted(known))
            raise RemoteError(f"{address}: fsspec knows no {scheme}://{f'; did you mean {near}://?' if near else ''}")
        try:
            fs, root = url_to_fs(address)
        except ImportError as error:  # its text names the package
            raise RemoteError(f"{address}: {error}") from error
        except Exception as error:
            raise RemoteError(f"{address}: {words_of(error, _MOST)}") from error
        return Remote(address.rstrip("/"), fs, str(root).rstrip("/"), pauses)

    def folders(self, under: str) -> dict[str, Files | None]:
        """The folders directly below `under` by name, each with its files; None for one that is not complete."""
        names = [name for name, size in self._listed(under).items() if size is None]
        return {name: self._marked(f"{under}/{name}") for name in sorted(names)}

    def sizes(self, under: str) -> dict[str, int]:
        """The sizes in bytes of the files directly below `under`, by name; files that are being written have any."""
        return {name: size for name, size in self._listed(under).items() if size is not None}

    def put_folder(self, folder: str, files: Mapping[str, Path | bytes]) -> int:
        """Replace a folder by these files, given by name, as paths or contents. It is complete once this returns.

        Returns the number of bytes. Raises RemoteError; the folder may then be incomplete.
        """
        self.remove_folder(folder)
        listed: dict[str, tuple[int, str]] = {}
        for name, content in files.items():
            listed[name] = (len(content) if isinstance(content, bytes) else content.stat().st_size, digest_of(content))
            self.put(f"{folder}/{name}", content)
        marker = {"files": listed, "digest": digest_of(_canonical(listed))}
        self.put(f"{folder}/{MARKER}", json.dumps(marker).encode())
        return sum(size for size, _ in listed.values())

    def get_folder(self, folder: str, files: Files, target: Callable[[str], Path]) -> int:
        """Download these files of a folder, each to `target(name)`, where it appears once its digest is checked.

        Returns the number of bytes. Raises RemoteError, also for a file that is not as it was uploaded.
        """
        for name, (size, digest) in files.items():
            place = target(_inside(name))
            draft = place.with_name(f".{place.name}.fetched")
            self.get(f"{folder}/{name}", draft, size)
            if digest_of(draft) != digest:
                raise RemoteError(
                    f"{self.address}/{folder} is damaged: {name} is not as it was uploaded; "
                    "remove that folder to use the one before"
                )
            os.replace(draft, place)
        return sum(size for size, _ in files.values())

    def put(self, name: str, content: Path | bytes) -> None:
        """Write one file, from a path or from its contents."""
        path = f"{self.root}/{name}"

        def write() -> None:
            if isinstance(content, bytes):
                self.fs.pipe_file(path, content)
            else:
                self.fs.put_file(str(content), path)

        def act() -> None:
            try:
                write()
            except FileNotFoundError:
                top = "/".join(path.split("/", 2)[:2]) if path.startswith("/") else path.split("/", 1)[0]
                if not self.fs.exists(top):  # such as a bucket, which is not made here
                    raise
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                write()

        self._again(f"{name} cannot be written", act)

    def get(self, name: str, target: Path, size: int) -> None:
        """Download one file of so many bytes, and flush it to disk. Raises RemoteError, also for another size."""

        def act() -> None:
            self.fs.get_file(f"{self.root}/{name}", str(target))
            if (found := target.stat().st_size) != size:
                raise OSError(f"it has {found:,} bytes, and {size:,} were written")

        target.parent.mkdir(parents=True, exist_ok=True)
        self._again(f"{name} cannot be read", act)
        sync(target)

    def remove(self, name: str) -> None:
        """Remove one file, if it is still present."""

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}")

        self._again(f"{name} cannot be removed", act)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and all in it, its marker first."""
        self.remove(f"{folder}/{MARKER}")

        def act() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(f"{self.root}/{folder}", recursive=True)

        self._again(f"{folder} cannot be removed", act)

    def try_out(self) -> None:
        """Write, read and remove a small file. Raises RemoteError if that fails."""
        name, content = f".fppo_{secrets.token_hex(4)}", b"written to see whether it can be\n"
        self.put(name, content)
        found = self._again(f"{name} cannot be read", lambda: self.fs.cat_file(f"{self.root}/{name}"))
        self.remove(name)
        if found != content:
            raise RemoteError(f"{self.address}: a small file that was written there is read back as another")

    def _listed(self, under: str) -> dict[str, int | None]:
        """The names directly below `under`, with the sizes of files; None for folders."""

        def act() -> dict[str, int | None]:
            self.fs.invalidate_cache()  # of listings: other processes write too
            try:
                entries = self.fs.ls(f"{self.root}/{under}", detail=True)
            except FileNotFoundError:
                return {}
            names = [PurePosixPath(entry["name"]).name for entry in entries]
            sizes = [None if entry["type"] == "directory" else int(entry["size"]) for entry in entries]
            return dict(zip(names, sizes, strict=True))

        return self._again(f"{under} cannot be listed", act)

    def _marked(self, folder: str) -> Files | None:
        """The files that a folder's marker lists; None without a whole marker."""

        def act() -> bytes:
            try:
                return self.fs.cat_file(f"{self.root}/{folder}/{MARKER}")
            except FileNotFoundError:
                return b""

        try:
            content = json_of(self._again(f"{folder}/{MARKER} cannot be read", act))
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
            return files if content["digest"] == digest_of(_canonical(files)) else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def _again(self, problem: str, act: Callable[[], T]) -> T:
        """The result of `act`, which is called once more after each pause. Raises RemoteError with the `problem` and
        the last error."""
        for pause in self.pauses:
            try:
                return act()
            except Exception:  # any: each file system has its own
                time.sleep(pause)
        try:
            return act()
        except Exception as error:
            raise RemoteError(f"{self.address}: {problem}: {words_of(error, _MOST)}") from error


def problem_of_place(address: str) -> str | None:
    """The reason why nothing can be written to an address, found by writing a small file; None if it can."""
    try:
        Remote.at(address, pauses=()).try_out()
    except RemoteError as error:
        return str(error).removeprefix(f"{address.rstrip('/')}: ").removeprefix(f"{address}: ")
    return None


def digest_of(content: Path | bytes) -> str:
    """The digest of a file or of bytes: 128 bits of BLAKE2b, in hexadecimal digits."""
    if isinstance(content, bytes):
        return hashlib.blake2b(content, digest_size=16).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _canonical(files: Files) -> bytes:
    return json.dumps({name: list(entry) for name, entry in files.items()}, sort_keys=True).encode()


def _inside(name: str) -> str:
    """A file's name from a marker. Raises RemoteError for one that would lead out of its folder."""
    if not name or name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
        raise RemoteError(f"a marker lists {name!r}, which is no file of its folder")
    return name
