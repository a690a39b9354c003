"""Snapshots of runs to sample from, which have no name that a user gave: in memory, and on disk if need be.

ROOT/SESSION.KIND.NUMBER/weights.safetensors      the trained weights
ROOT/SESSION.KIND.NUMBER/snapshot.json            their description, written last
"""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import attrs
import cattrs
import safetensors.torch

from fppo._errors import json_of, printable
from fppo.models.model import Model, Params
from fppo.runtime.exports import sync, write_whole
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.runs import Adapters

WEIGHTS, SNAPSHOT = "weights.safetensors", "snapshot.json"


@attrs.frozen(kw_only=True, eq=False)
class SampledWeights:
    """Weights that an engine decodes with: a model, adapted or not, and its trained parameters."""

    name: str
    base: str
    model: Model
    params: Params
    version: int = 0

    @property
    def nbytes(self) -> int:
        """The memory of the trained parameters, in bytes."""
        return sum(x.nbytes for x in self.params.values())


@attrs.frozen(kw_only=True)
class SnapshotInfo:
    """The description of a snapshot of a run's weights; `inflight`: it follows the run's newest."""

    name: str
    run: str
    owner: str
    base: str
    adapters: Adapters
    inflight: bool
    version: int
    created: float


@attrs.define(eq=False)
class _Snapshot:
    info: SnapshotInfo
    weights: SampledWeights | None  # None: on disk alone
    stored: bool = False


class Snapshots:
    """The snapshots of a server; any thread may call.

    Those that were used last are in memory, in at most `max_bytes` or the newest alone; others are on disk. Of a run
    there are at most `max_of_run`; the oldest are dropped. `model_of` makes the model of some adapters of a base.
    """

    def __init__(
        self,
        root: Path,
        model_of: Callable[[str, Adapters], Model],
        *,
        max_bytes: int = 1 << 30,
        max_of_run: int = 64,
    ) -> None:
        self._root, self._model_of = root, model_of
        self._max_bytes, self._most_of_run = max_bytes, max_of_run
        self._lock = threading.RLock()
        self._held: OrderedDict[str, _Snapshot] = OrderedDict()  # by their last use
        root.mkdir(parents=True, exist_ok=True)

    def restore(self) -> list[SnapshotInfo]:
        """The snapshots that an earlier server stored."""
        found: list[SnapshotInfo] = []
        for place in self._root.iterdir():
            if (place / SNAPSHOT).exists():
                found.append(cattrs.structure(json_of((place / SNAPSHOT).read_text("utf-8")), SnapshotInfo))
            else:
                shutil.rmtree(place, ignore_errors=True)
        found.sort(key=lambda info: info.created)
        with self._lock:
            for info in found:
                self._held[info.name] = _Snapshot(info, None, stored=True)
        return found

    def add(self, info: SnapshotInfo, model: Model, params: Params) -> None:
        """Hold a snapshot, in place of one of its name; the oldest of the run may be dropped for it."""
        weights = SampledWeights(name=info.name, base=info.base, model=model, params=params, version=info.version)
        with self._lock:
            self._held[info.name] = _Snapshot(info, weights)
            self._held.move_to_end(info.name)
            of_run = [name for name, each in self._held.items() if each.info.run == info.run and not each.info.inflight]
            of_run.sort(key=lambda name: self._held[name].info.created)
            self.drop(of_run[: -self._most_of_run])
            self._spill()

    def has(self, name: str) -> bool:
        """Whether there is a snapshot of this name."""
        return name in self._held

    def weights(self, name: str) -> SampledWeights:
        """The weights of a snapshot. Raises Refusal for one that is gone."""
        with self._lock:
            held = self._held.get(name)
            if held is None:
                text = f"at most {self._most_of_run} of a run are held: save_weights_for_sampler(name) keeps them"
                raise Refusal(f"the weights of {printable(name, 80)} are gone; {text}", status=404)
            self._held.move_to_end(name)
            if held.weights is None:
                held.weights = self._loaded(held.info)
                self._spill()
            return held.weights

    def keep(self, run: str) -> None:
        """Store on disk the snapshots of a run that are in memory alone."""
        with self._lock:
            for held in self._held.values():
                if held.info.run == run:
                    self._store(held)

    def drop(self, names: list[str]) -> None:
        """Drop snapshots."""
        with self._lock:
            for name in names:
                held = self._held.pop(name, None)
                if held is not None and held.stored:
                    place = self._place(name)
                    (place / SNAPSHOT).unlink(missing_ok=True)
                    shutil.rmtree(place, ignore_errors=True)

    def of_session(self, session: str) -> list[str]:
        """The names of the snapshots of a session."""
        with self._lock:
            return [name for name in self._held if name.startswith(f"{session}:")]

    def _spill(self) -> None:
        """Move all but the most recently used to disk."""
        in_memory = [(held, held.weights) for held in reversed(self._held.values()) if held.weights is not None]
        sums = itertools.accumulate(weights.nbytes for _, weights in in_memory)
        for number, ((held, _), total) in enumerate(zip(in_memory, sums, strict=True)):
            if number and total > self._max_bytes:
                self._store(held)
                held.weights = None

    def _place(self, name: str) -> Path:
        return self._root / name.replace(":", ".")

    def _store(self, held: _Snapshot) -> None:
        if held.stored or held.weights is None:
            return
        place = self._place(held.info.name)
        (place / SNAPSHOT).unlink(missing_ok=True)
        place.mkdir(parents=True, exist_ok=True)
        write_params(held.weights.params, place / WEIGHTS)
        write_whole(place / SNAPSHOT, json.dumps(cattrs.unstructure(held.info)).encode())
        held.stored = True

    def _loaded(self, info: SnapshotInfo) -> SampledWeights:
        model = self._model_of(info.base, info.adapters)
        params = read_params(self._place(info.name) / WEIGHTS)
        return SampledWeights(name=info.name, base=info.base, model=model, params=params, version=info.version)


def write_params(params: Params, path: Path) -> None:
    """Write parameters to a file; they are on disk when this returns."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in params.items()}
    safetensors.torch.save_file(tensors, path)
    sync(path)


def read_params(path: Path) -> Params:
    """Read parameters into memory of their own: in the file's memory they are aligned differently, and kernels then
    round differently."""
    return {name: x.clone() for name, x in safetensors.torch.load_file(path).items()}
