"""Checkpoints of runs under names that users give: saved, found, listed, published, deleted when they expire.

    ROOT/SESSION.NUMBER/KIND/NAME/meta.json      what the checkpoint is, and the folder of its data
    ROOT/SESSION.NUMBER/KIND/NAME/...            its data: safetensors and JSON alone

Their addresses are tinker://RUN/KIND/NAME, where RUN is SESSION:train:NUMBER. A checkpoint exists once its meta.json
does, which is written last, and atomically.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import cattrs

from fppo._errors import json_of, printable
from fppo.runtime.exports import write_whole
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.runs import Adapters

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
META = "meta.json"
_RUN = re.compile(r"([0-9a-f-]{8,64}):train:([0-9]{1,9})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@attrs.frozen(kw_only=True)
class CheckpointMeta:
    """The description of a checkpoint: its place, its owner, and the base, adapters and optimizer of its run."""

    run: str
    kind: Kind
    name: str
    owner: str
    base: str
    adapters: Adapters
    optimizer: str
    number: int  # of the request that saved it
    created: float
    data: str  # the folder of its data
    size: int = 0
    expires: float | None = None
    public: bool = False
    metadata: Mapping[str, str] | None = None

    @property
    def path(self) -> str:
        """Its address."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def identifier(self) -> str:
        """The protocol's name of it within its run."""
        return f"{self.kind}/{self.name}"

    def to_json(self) -> dict[str, Any]:
        """The protocol's `Checkpoint`."""
        return {
            "checkpoint_id": self.identifier,
            "checkpoint_type": KINDS[self.kind],
            "time": time_of(self.created),
            "tinker_path": self.path,
            "size_bytes": self.size,
            "public": self.public,
            "user_metadata": None if self.metadata is None else dict(self.metadata),
            "expires_at": None if self.expires is None else time_of(self.expires),
        }


def time_of(seconds: float) -> str:
    """A time in seconds since 1970 as the protocol writes it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def folder_of(run: str) -> str:
    """The name of a run's folder. Raises Refusal for a text that names no run."""
    match = _RUN.fullmatch(run)
    if match is None:
        raise Refusal(f"{printable(run, 80)!r} is no training run", status=404)
    return f"{match[1]}.{match[2]}"


def address_of(path: str) -> tuple[str, Kind, str]:
    """The run, the kind and the name in an address. Raises Refusal."""
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
        raise Refusal(f"{printable(path, 200)!r} is no checkpoint: give tinker://RUN/weights/NAME", status=404)
    run, kind, name = parts
    folder_of(run)
    if _NAME.fullmatch(name) is None:
        raise Refusal(f"{printable(name, 80)!r} is no name of a checkpoint", status=404)
    return run, kind, name  # pyright: ignore[reportReturnType]


class CheckpointStore:
    """The checkpoints below a folder, which expire by `clock`. Any thread may call."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._root, self._clock = root, clock
        root.mkdir(parents=True, exist_ok=True)

    def directory(self, run: str, kind: Kind, name: str) -> Path:
        """The folder of a checkpoint."""
        if _NAME.fullmatch(name) is None:
            raise Refusal(f"{printable(name, 80)!r} is no name of a checkpoint", status=404)
        return self._root / folder_of(run) / kind / name

    def get(self, run: str, kind: Kind, name: str) -> CheckpointMeta | None:
        """The checkpoint at a place; None if there is none, or it has expired."""
        place = self.directory(run, kind, name)
        try:
            meta = cattrs.structure(json_of((place / META).read_text("utf-8")), CheckpointMeta)
        except FileNotFoundError:
            return None
        if meta.expires is not None and meta.expires <= self._clock():
            shutil.rmtree(place, ignore_errors=True)
            return None
        return meta

    def find(self, path: str, owner: str) -> CheckpointMeta:
        """The checkpoint at an address, which is the owner's, or public. Raises Refusal."""
        meta = self.get(*address_of(path))
        if meta is None or not (meta.public or meta.owner == owner):
            raise Refusal(f"there is no checkpoint {printable(path, 200)}", status=404)
        return meta

    def own(self, run: str, kind: Kind, name: str, owner: str) -> CheckpointMeta:
        """The checkpoint of this run, kind and name. Raises Refusal if there is none, or if it is another owner's."""
        meta = self.get(run, kind, name)
        if meta is None or meta.owner != owner:
            path = f"tinker://{run}/{kind}/{name}"
            raise Refusal(f"there is no checkpoint {printable(path, 200)}", status=404)
        return meta

    def commit(self, meta: CheckpointMeta) -> CheckpointMeta:
        """Complete the checkpoint whose data are in its folder, in place of an earlier one of its name; returns it with
        its size."""
        place = self.directory(meta.run, meta.kind, meta.name)
        data = place / meta.data
        size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
        meta = attrs.evolve(meta, size=size)
        self._write(meta)
        for other in place.iterdir():
            if other.is_dir() and other != data:
                shutil.rmtree(other, ignore_errors=True)
        return meta

    def data(self, meta: CheckpointMeta) -> Path:
        """The folder of a checkpoint's data."""
        return self.directory(meta.run, meta.kind, meta.name) / meta.data

    def of_run(self, run: str) -> list[CheckpointMeta]:
        """The checkpoints of a run, the oldest first."""
        return sorted(self._in(self._root / folder_of(run), run), key=lambda meta: (meta.created, meta.path))

    def of_owner(self, owner: str) -> list[CheckpointMeta]:
        """The checkpoints of an owner, the newest first."""
        found: list[CheckpointMeta] = []
        for folder in self._root.iterdir():
            session, _, number = folder.name.rpartition(".")
            found += [meta for meta in self._in(folder, f"{session}:train:{number}") if meta.owner == owner]
        return sorted(found, key=lambda meta: (-meta.created, meta.path))

    def delete(self, meta: CheckpointMeta) -> None:
        """Delete a checkpoint."""
        place = self.directory(meta.run, meta.kind, meta.name)
        (place / META).unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)

    def change(self, meta: CheckpointMeta, *, public: bool, expires: float | None) -> None:
        """Set whether a checkpoint is public, and when it expires."""
        self._write(attrs.evolve(meta, public=public, expires=expires))

    def _write(self, meta: CheckpointMeta) -> None:
        place = self.directory(meta.run, meta.kind, meta.name)
        write_whole(place / META, json.dumps(cattrs.unstructure(meta), indent=1).encode())

    def _in(self, folder: Path, run: str) -> Iterator[CheckpointMeta]:
        for kind in KINDS:
            for place in sorted((folder / kind).glob("[!.]*")):
                if _NAME.fullmatch(place.name) and (meta := self.get(run, kind, place.name)) is not None:
                    yield meta
