"""Logs that survive a kill: a record is on disk before its request is answered, and a torn end is cut off.

A file is a sequence of records. Each has a head with its number, its kind, the length of its body and a checksum. A
kill, or a loss of power, can only tear the last record, whose request has not been answered yet.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

from fppo.runtime.exports import sync

_HEAD = struct.Struct("<4sQ24sQI")
_MAGIC = b"fppj"


class JournalError(ValueError):
    """A log with a record that is damaged in front of others: what follows cannot be trusted."""


class JournalRecord(NamedTuple):
    """A record: its number, its kind (up to 24 letters of ASCII), and its body."""

    number: int
    kind: str
    body: bytes


def packed(record: JournalRecord) -> bytes:
    """The bytes of a record. Raises ValueError for a kind of over 24 bytes."""
    kind = record.kind.encode("ascii")
    if len(kind) > 24:
        raise ValueError(f"kind = {record.kind!r}: at most 24 letters")
    head = _HEAD.pack(_MAGIC, record.number, kind, len(record.body), _sum(record.number, kind, record.body))
    return head + record.body


def _sum(number: int, kind: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(kind.ljust(24, b"\0"), zlib.crc32(number.to_bytes(8, "little"))))


def records_of(data: bytes) -> tuple[list[JournalRecord], int]:
    """The whole records at the beginning of a log's bytes, and the number of bytes that they take.

    Raises JournalError for a damaged record with more bytes after it.
    """
    view, found, place = memoryview(data), list[JournalRecord](), 0
    while place < len(data):
        record, end = _one(view, place)
        if record is None:
            if end < len(data):
                raise JournalError(f"the record at byte {place:,} is damaged, and {len(data) - end:,} bytes follow it")
            break
        found.append(record)
        place = end
    return found, place


def _one(view: memoryview, place: int) -> tuple[JournalRecord | None, int]:
    """The record at a place, None if it is torn or damaged, and where it ends."""
    start = place + _HEAD.size
    if start > len(view):
        return None, len(view)
    magic, number, kind, length, checksum = _HEAD.unpack_from(view, place)
    if magic != _MAGIC:
        return None, start if any(view[place:]) else len(view)  # zeros: blocks that were never written
    end = start + length
    if end > len(view):
        return None, len(view)
    body = bytes(view[start:end])
    name = kind.rstrip(b"\0")
    return (JournalRecord(number, name.decode("ascii"), body) if _sum(number, name, body) == checksum else None), end


def read(path: Path) -> list[JournalRecord]:
    """The whole records of a log, without a torn end; none where there is no file. Raises JournalError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        return records_of(data)[0]
    except JournalError as error:
        raise JournalError(f"{path}: {error}") from error


def written_whole(path: Path, records: Iterator[JournalRecord]) -> None:
    """Write a log of these records, in place of one that may exist: after a crash it is the old one or the new one."""
    draft = path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        for record in records:
            file.write(packed(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync(path.parent)


def _write(file: RawIOBase, data: bytes) -> None:
    """Write all of the data: an unbuffered file may take a part at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


class Journal:
    """A log that is open for more records; any thread may call. A torn end is cut off when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        new = not path.exists()
        data = b"" if new else path.read_bytes()
        try:
            _, whole = records_of(data)
        except JournalError as error:
            raise JournalError(f"{path}: {error}") from error
        self._file = path.open("ab", buffering=0)
        if whole < len(data):
            self._file.truncate(whole)
            os.fsync(self._file.fileno())
        self._size = whole
        if new:
            sync(path.parent)

    @property
    def size(self) -> int:
        """The bytes of the log."""
        return self._size

    def append(self, record: JournalRecord) -> None:
        """Add a record; it is on disk when this returns."""
        data = packed(record)
        with self._lock:
            try:
                _write(self._file, data)
                os.fsync(self._file.fileno())
            except OSError:  # the disk is full: a part of a record must not come before others
                os.ftruncate(self._file.fileno(), self._size)
                raise
            self._size += len(data)

    def compact(self, keep: Callable[[JournalRecord], bool]) -> None:
        """Drop the records that are not to be kept, atomically: a crash leaves the old log or the new one."""
        with self._lock:
            kept = [record for record in read(self._path) if keep(record)]
            written_whole(self._path, iter(kept))
            self._file.close()
            self._file = self._path.open("ab", buffering=0)
            self._size = self._file.tell()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()
