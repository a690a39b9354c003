"""Where the weights of runs are stored: checkpoints, snapshots, and files for other programs."""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import attrs

from fppo import models
from fppo.models import lora_files
from fppo.models.model import Model
from fppo.runtime import checkpoint
from fppo.serve.refusal import Refusal
from fppo.serve.tinker import runs
from fppo.serve.tinker.checkpoints import CheckpointMeta, CheckpointStore
from fppo.serve.tinker.decode import LoadVerb, SaveVerb, SnapshotVerb
from fppo.serve.tinker.runs import Adapters, BaseModel, TrainingRun
from fppo.serve.tinker.sessions import Registry, Sampler
from fppo.serve.tinker.snapshots import WEIGHTS, SampledWeights, SnapshotInfo, Snapshots, read_params, write_params
from fppo.serve.tinker.training import RunInfo

_STATE = "state"


class StoredBase(Protocol):
    """A base, and what writes its tokenizer into a folder."""

    @property
    def base(self) -> BaseModel: ...

    @property
    def write_tokenizer(self) -> Callable[[Path], object]: ...


class WeightStores:
    """The checkpoints and the snapshots of a server's runs; any thread may call.

    Weights of checkpoints that were used last stay in memory, in at most `max_bytes` or the newest alone.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        root: Path,
        bases: Mapping[str, StoredBase],
        registry: Registry,
        clock: Callable[[], float],
        *,
        max_bytes: int = 1 << 30,
    ) -> None:
        self._checkpoints, self._bases, self._registry, self._clock = checkpoints, bases, registry, clock
        self.snapshots = Snapshots(root, self._model_of)
        self._max_bytes, self._lock = max_bytes, threading.Lock()  # of what is loaded
        self._loaded: OrderedDict[tuple[str, int], SampledWeights] = OrderedDict()

    def restore(self) -> None:
        """Take over what an earlier server stored."""
        for info in self.snapshots.restore():
            if not info.inflight:
                self._registry.add_sampler(_sampler_of(info), keep=False)

    def save(self, run: TrainingRun, info: RunInfo, verb: SaveVerb, number: int) -> str:
        """Save weights under a name; returns their address. Raises Refusal for a name that is taken."""
        meta = CheckpointMeta(
            run=info.name,
            kind=verb.kind,
            name=verb.name,
            owner=info.owner,
            base=info.base,
            adapters=info.adapters,
            optimizer=info.optimizer,
            number=number,
            created=self._clock(),
            data=f"data-{number}",
            expires=None if verb.seconds is None else self._clock() + verb.seconds,
            metadata=verb.metadata,
        )
        other = self._checkpoints.get(info.name, verb.kind, verb.name)
        if other is not None and other.number == number:  # by this request, before the server was killed
            return meta.path
        if other is not None and not verb.overwrite:
            raise Refusal(f"path: there is a checkpoint {meta.path} already; give overwrite, or another name")
        data = self._checkpoints.data(meta)
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(parents=True)
        try:
            self._write(run, verb, data, number)
            return self._checkpoints.commit(meta).path
        except Exception:  # a full disk: a save that failed must not be found later, nor take space
            held = self._checkpoints.get(info.name, verb.kind, verb.name)
            if held is not None and held.number == number:  # all but the last flush was done
                return held.path
            shutil.rmtree(data, ignore_errors=True)
            raise

    def _write(self, run: TrainingRun, verb: SaveVerb, data: Path, number: int) -> None:
        if verb.kind == "weights":
            checkpoint.begin_save(run.state, data / _STATE, number).wait()
        elif verb.kind == "sampler_weights":
            _, params = runs.sampling_params(run)
            write_params(params, data / WEIGHTS)
        else:
            self._export(run, data)

    def _export(self, run: TrainingRun, data: Path) -> None:
        """Write files for other programs: a PEFT adapter; or a whole model, after full training and for adapters on
        tied embeddings, which PEFT's files cannot hold."""
        model, params = runs.sampling_params(run)
        base, place = run.base, data / "files"
        if run.adapters.rank and lora_files.obstacle(model) is None:
            lora_files.save(model, params, place, base=base.tokenizer_id)
        else:  # an adapter is merged
            models.save(model, params, place)
        self._bases[base.name].write_tokenizer(place)

    def snapshot(self, run: TrainingRun, info: RunInfo, verb: SnapshotVerb, number: int) -> str:
        """Hold a run's weights for a sampling session; returns its name."""
        model, params = runs.sampling_params(run)
        name = f"{info.session}:sample:{verb.session}"
        held = SnapshotInfo(
            name=f"{info.name}:inflight" if verb.inflight else name,
            run=info.name,
            owner=info.owner,
            base=info.base,
            adapters=info.adapters,
            inflight=verb.inflight,
            version=number,
            created=self._clock(),
        )
        self.snapshots.add(held, model, params)
        if verb.inflight:
            sampler = Sampler(name=name, owner=info.owner, base=info.base, weights="inflight", run=info.name)
            if not self._registry.has_sampler(name):
                self._registry.add_sampler(sampler)
        else:
            self._registry.add_sampler(_sampler_of(held), keep=False)
        return name

    def load(self, run: TrainingRun, info: RunInfo, verb: LoadVerb) -> TrainingRun:
        """A run with a checkpoint's weights, and its optimizer's state or a fresh one. Raises Refusal."""
        meta = self._checkpoints.find(verb.path, info.owner)
        if meta.kind == "weights":
            saved = checkpoint.load(self._template(run, meta).state, self._checkpoints.data(meta) / _STATE, meta.number)
            return runs.with_weights(run, saved, optimizer=verb.optimizer)
        if meta.kind == "external_weights" or verb.optimizer:
            raise Refusal(f"path: {meta.path} has no optimizer state; give a checkpoint of save_state")
        params = read_params(self._checkpoints.data(meta) / WEIGHTS)
        return runs.with_weights(run, attrs.evolve(run.state, params=params), optimizer=False)

    def _template(self, run: TrainingRun, meta: CheckpointMeta) -> TrainingRun:
        """A run with the checkpoint's adapters and optimizer, whose state has the structure of the saved one."""
        if (run.adapters.rank, run.optimizer) == (meta.adapters.rank, meta.optimizer):
            return run
        return runs.create_run(run.base, meta.adapters, meta.optimizer)

    def keep(self, info: RunInfo) -> None:
        """Have the snapshots of a run outlive the server."""
        self.snapshots.keep(info.name)

    def sampled(self, meta: CheckpointMeta) -> SampledWeights:
        """The weights of a checkpoint, to sample from. The last few are held."""
        key = meta.path, meta.number
        with self._lock:
            held = self._loaded.get(key)
            if held is None:
                model = self._model_of(meta.base, meta.adapters)
                if meta.kind == "sampler_weights":
                    params = read_params(self._checkpoints.data(meta) / WEIGHTS)
                else:
                    fresh = runs.create_run(self._base(meta.base), meta.adapters, meta.optimizer)
                    place = self._checkpoints.data(meta) / _STATE
                    params = checkpoint.load(fresh.state.params, place, meta.number, part=".params")
                held = SampledWeights(name=f"{meta.path}#{meta.number}", base=meta.base, model=model, params=params)
            self._loaded[key] = held
            self._loaded.move_to_end(key)
            while len(self._loaded) > 1 and sum(x.nbytes for x in self._loaded.values()) > self._max_bytes:
                self._loaded.popitem(last=False)
        return held

    def _base(self, name: str) -> BaseModel:
        if name not in self._bases:
            raise Refusal(f"the server has no model {name!r} now; it has {', '.join(self._bases)}", status=404)
        return self._bases[name].base

    def _model_of(self, base: str, adapters: Adapters) -> Model:
        return runs.create_run(self._base(base), adapters).model


def _sampler_of(info: SnapshotInfo) -> Sampler:
    return Sampler(name=info.name, owner=info.owner, base=info.base, weights="snapshot", run=info.run)
