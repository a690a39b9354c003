"""The training runs of a server: their values in memory, their states and journals on disk, and the requests on them.

    ROOT/SESSION.NUMBER/run.json          the run: its base, adapters, optimizer, owner
    ROOT/SESSION.NUMBER/journal.log       the requests after its newest state
    ROOT/SESSION.NUMBER/results-N.log     the results of requests up to N that somebody may still read
    ROOT/SESSION.NUMBER/states/           its state after request N

A run is restored when there is something to do, so that a server with many old runs starts at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import cattrs

from fppo._errors import json_of, printable, words_of
from fppo.runtime import checkpoint
from fppo.runtime.exports import write_whole
from fppo.serve.refusal import Refusal
from fppo.serve.tinker import runs
from fppo.serve.tinker.checkpoints import folder_of
from fppo.serve.tinker.data import Datum
from fppo.serve.tinker.decode import (
    CreateVerb,
    LaterVerb,
    LoadVerb,
    PassVerb,
    RefusedVerb,
    RunVerb,
    SaveVerb,
    SnapshotVerb,
    StepVerb,
)
from fppo.serve.tinker.encode import json_payload, pass_payload
from fppo.serve.tinker.futures import FailedRequest, Futures, Outcome, Payload
from fppo.serve.tinker.journal import Journal, JournalRecord, read, written_whole
from fppo.serve.tinker.losses import Loss
from fppo.serve.tinker.runs import Adapters, BaseModel, PassOutputs, TrainingRun
from fppo.serve.tinker.work import request_name

INFO, JOURNAL, STATES, DOING = "run.json", "journal.log", "states", "doing"
REFUSED = "refused"  # the kind of record of a request that is not to be done
_TRIES = 2  # servers that may end during a request before it is refused: a kill may come at any moment
_SAVED = {  # results' types by kinds of checkpoints
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
_SHARE = 0.05  # of a run's time at most goes into saving its state
_BYTES = 64 << 20  # of a journal, beyond which a state is saved


@attrs.frozen(kw_only=True)
class RunInfo:
    """The description of a run, from which it is created again: its first request, and the checkpoint it `loaded`."""

    name: str
    session: str
    owner: str
    base: str
    adapters: Adapters
    optimizer: str
    created: float
    metadata: Mapping[str, str] | None = None
    loaded: str | None = None  # the checkpoint that it begins with
    with_optimizer: bool = False
    ended: bool = False  # its session has ended: nothing more is done for it


@attrs.define(eq=False)
class HeldRun:
    """A run as the server holds it."""

    info: RunInfo
    directory: Path
    journal: Journal
    done: int = -1  # the number of the last request that was done
    saved: int = -1  # the number of the last request in the newest state on disk
    value: TrainingRun | None = None
    broken: str | None = None  # why the gradients of this step are not to be used
    cost: float = 0.0  # seconds of work since the saved state
    saving: float = 0.0  # seconds that the last saving took
    due: bool = False  # whether its state must be saved: the checkpoint that it came from may be deleted
    last: float = 0.0  # when a request came
    numbers: list[int] = attrs.field(factory=list)  # of results that may be held
    tried: tuple[int, int] = -1, 0  # the first request that no server has done, and how many servers ended during it
    lock: threading.Lock = attrs.field(factory=threading.Lock)  # of the numbers


class RunStores(Protocol):
    """Protocol of the stores of runs' weights."""

    def save(self, run: TrainingRun, info: RunInfo, verb: SaveVerb, number: int) -> str: ...

    def snapshot(self, run: TrainingRun, info: RunInfo, verb: SnapshotVerb, number: int) -> str: ...

    def load(self, run: TrainingRun, info: RunInfo, verb: LoadVerb) -> TrainingRun: ...

    def keep(self, info: RunInfo) -> None:
        """Have the snapshots of a run outlive the server."""
        ...


class TrainingRuns:
    """The runs of a server. `do`, `done` and `give_up` are the worker's; any thread may call the others."""

    def __init__(
        self,
        root: Path,
        bases: Mapping[str, BaseModel],
        stores: RunStores,
        futures: Futures,
        *,
        loss_of: Callable[[RunInfo, PassVerb], Loss],
        verb_of: Callable[[RunInfo, JournalRecord], RunVerb],
        clock: Callable[[], float],
        joint: bool = False,
    ) -> None:
        self._root, self._bases, self._stores, self._futures = root, bases, stores, futures
        self._loss_of, self._verb_of, self._clock, self._joint = loss_of, verb_of, clock, joint
        self._joined: dict[tuple[str, int], tuple[TrainingRun, PassOutputs]] = {}  # computed, and not yet done
        self._lock = threading.Lock()
        self._held: dict[str, HeldRun] = {}
        root.mkdir(parents=True, exist_ok=True)

    def restore(self) -> Iterator[tuple[str, int, dict[int, RunVerb]]]:
        """Yield the runs of an earlier server: name, number of the next request, and the requests that wait."""
        for place in sorted(self._root.iterdir()):
            if (place / INFO).exists():
                yield self._restore_one(place)

    def _restore_one(self, directory: Path) -> tuple[str, int, dict[int, RunVerb]]:
        info = cattrs.structure(json_of((directory / INFO).read_text("utf-8")), RunInfo)
        records = read(directory / JOURNAL)
        held = HeldRun(info, directory, Journal(directory / JOURNAL), last=self._clock())
        states = checkpoint.steps(directory / STATES) if (directory / STATES).exists() else []
        held.done = held.saved = states[-1] if states else -1
        if states:
            for record in read(directory / f"results-{held.saved}.log"):
                name = request_name(info.name, record.number)
                if self._futures.open(name, info.owner):
                    self._futures.settle(name, _outcome_of(record))
                    held.numbers.append(record.number)
        todo = {r.number: _later(r) for r in records if r.number > held.done}  # the last of a number counts
        if held.done < 0:
            todo.setdefault(0, CreateVerb())
        if info.ended:
            todo = {}
        self._refuse_killer(held, todo)
        for number in todo:
            self._futures.open(request_name(info.name, number), info.owner)
            held.numbers.append(number)
        with self._lock:
            self._held[info.name] = held
        return info.name, held.done + 1, todo

    def _refuse_killer(self, held: HeldRun, todo: dict[int, RunVerb]) -> None:
        """Refuse, for good, a request during which servers have ended so often that it must be the cause."""
        number, tries = held.tried = _tried(held.directory)
        if number not in todo or tries < _TRIES or isinstance(todo[number], RefusedVerb):
            return
        error = f"request {number} of {held.info.name} was being done when the server ended, {tries} times"
        verb = RefusedVerb(error=f"{error}: it is not tried again", category="server")
        self._note(held, number, verb)
        todo[number] = verb
        warnings.warn(verb.error, RuntimeWarning, stacklevel=2)

    @staticmethod
    def _note(held: HeldRun, number: int, verb: RefusedVerb) -> None:
        """Record on disk that a request is refused, so that the next server does not do it either."""
        body = json.dumps(cattrs.unstructure(verb)).encode()
        held.journal.append(JournalRecord(number, REFUSED, body))

    def create(self, info: RunInfo) -> None:
        """Record a new run on disk."""
        place = self._root / folder_of(info.name)
        place.mkdir(parents=True, exist_ok=True)
        journal = Journal(place / JOURNAL)
        write_whole(place / INFO, json.dumps(cattrs.unstructure(info), indent=1).encode())
        with self._lock:
            self._held[info.name] = HeldRun(info, place, journal, last=self._clock(), numbers=[0])

    def accept(self, run: str, record: JournalRecord) -> None:
        """Record a request of a run on disk."""
        held = self._held[run]
        held.journal.append(record)
        held.last = self._clock()
        with held.lock:
            held.numbers.append(record.number)

    def has(self, run: str) -> bool:
        """Whether there is a run of this name."""
        return run in self._held

    def info(self, run: str, owner: str) -> RunInfo:
        """The description of an owner's run. Raises Refusal."""
        folder_of(run)
        held = self._held.get(run)
        if held is None or held.info.owner != owner:
            raise Refusal(f"there is no training run {printable(run, 80)}", status=404)
        return held.info

    def infos(self, owner: str) -> list[RunInfo]:
        """The runs of an owner, the newest first."""
        with self._lock:
            own = [held.info for held in self._held.values() if held.info.owner == owner]
        return sorted(own, key=lambda info: (-info.created, info.name))

    def last_request(self, run: str) -> float:
        """The time of a run's last request."""
        return self._held[run].last

    def value(self, run: str) -> TrainingRun | None:
        """A run as it is now; None if it is on disk alone."""
        return self._held[run].value

    def do(self, run: str, number: int, verb: RunVerb) -> Outcome:
        """Do a request. Errors are outcomes, and are recorded on disk, so that the next server gives the same. Raises
        OSError if the recording fails; then the request has no outcome."""
        held = self._held[run]
        first, tries = held.tried
        if number >= first:  # one that is done again is not what ends servers
            _try(held, number, tries + 1 if number == first else 1)
        after, breaks = (number, 0), False
        try:
            if isinstance(verb, LaterVerb):
                verb = self._verb_of(held.info, verb.record)
            breaks = isinstance(verb, RefusedVerb) and verb.breaks
            outcome = self._done(held, number, verb)
            after = number + 1, 0
        except Exception as error:
            outcome = _failed(error)
            breaks = isinstance(verb, PassVerb) and verb.backward
            self._note(held, number, RefusedVerb(error=outcome.error, breaks=breaks, category=outcome.category))
            after = number + 1, 0
        finally:
            if number >= first:
                _try(held, *after)
        if breaks:
            held.broken = f"request {number} failed, and so the gradients of this step are not whole"
        held.done = number
        return outcome

    def joins(self, run: str, verb: RunVerb) -> str | None:
        """The base of a run whose pass is taken jointly with those of other runs; None: it is taken alone. So are
        requests that an earlier server took in, of which one may have ended it."""
        value = self._held[run].value
        if not self._joint or value is None or not isinstance(verb, PassVerb) or not verb.backward:
            return None
        return value.base.name if runs.together_hindrance(value) is None else None

    def join(self, asked: Sequence[tuple[str, int, RunVerb]]) -> None:
        """Compute the passes of several runs of one base in one, for `do`. If that fails, each is computed alone."""
        self._joined = {}
        passes = list[tuple[TrainingRun, Sequence[Datum], Loss]]()
        try:
            for run, _, verb in asked:
                held = self._held[run]
                assert held.value is not None
                assert isinstance(verb, PassVerb)
                passes.append((held.value, verb.data, self._loss_of(held.info, verb)))
            results = runs.forward_backward_together(passes)
        except Exception as error:  # whose fault it is, `do` finds out
            if not isinstance(error, ValueError):
                text = f"a joint pass failed, and each run's is taken alone: {words_of(error, 500)}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        self._joined = {(run, number): result for (run, number, _), result in zip(asked, results, strict=True)}

    def done(self, run: str, number: int, seconds: float) -> None:
        """Save the run's state if that is due after a request that took `seconds`."""
        held = self._held[run]
        held.cost += seconds
        due = held.due or held.cost * _SHARE > max(held.saving, 0.25) or held.journal.size > _BYTES
        if due and held.value is not None and held.value.grads is None and held.broken is None:
            try:
                self.save(run)
            except Exception as error:  # a full disk, as each library reports it; the journal has everything: later
                text = f"{run}: its state was not saved: {words_of(error, 500)}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                held.cost = 0.0

    def give_up(self, run: str, numbers: Sequence[int], error: str) -> None:
        """Record on disk that a run's requests of these numbers are not to be done."""
        for number in numbers:
            self._note(self._held[run], number, RefusedVerb(error=error))

    def save(self, run: str) -> None:
        """Save a run's state, and drop the requests that led to it."""
        held = self._held[run]
        assert held.value is not None
        start, number = self._clock(), held.done
        with held.lock:
            names = {request_name(run, each): each for each in held.numbers}
        outcomes = self._futures.outcomes([*names])
        records = (_record_of(names[name], outcome) for name, outcome in outcomes.items() if names[name] <= number)
        written_whole(held.directory / f"results-{number}.log", records)
        self._stores.keep(held.info)
        checkpoint.begin_save(held.value.state, held.directory / STATES, number, keep=1).wait()
        held.journal.compact(lambda record: record.number > number)
        for old in held.directory.glob("results-*.log"):
            if old.name != f"results-{number}.log":
                old.unlink()
        with held.lock:
            held.numbers = [each for each in held.numbers if each > number or request_name(run, each) in outcomes]
        held.saved, held.cost, held.saving, held.due = number, 0.0, self._clock() - start, False

    def release(self, run: str) -> None:
        """Drop the states and requests of an idle run whose session has ended; its description and checkpoints stay."""
        held = self._held[run]
        held.value, held.info = None, attrs.evolve(held.info, ended=True)
        write_whole(held.directory / INFO, json.dumps(cattrs.unstructure(held.info), indent=1).encode())
        shutil.rmtree(held.directory / STATES, ignore_errors=True)
        held.journal.compact(lambda record: False)

    def open_runs(self) -> list[str]:
        """The runs that are in memory."""
        with self._lock:
            return [name for name, held in self._held.items() if held.value is not None]

    def any_info(self, run: str) -> RunInfo:
        """The description of a run of any owner."""
        return self._held[run].info

    def close(self) -> None:
        """Close the journals."""
        for held in self._held.values():
            held.journal.close()

    def _done(self, held: HeldRun, number: int, verb: RunVerb) -> Outcome:
        if isinstance(verb, CreateVerb):
            return self._create(held)
        if isinstance(verb, RefusedVerb):
            return FailedRequest(verb.error, verb.category)
        run = self._value(held)
        match verb:
            case PassVerb():
                return self._pass(held, run, number, verb)
            case StepVerb():
                return self._step(held, run, verb)
            case SaveVerb():
                return json_payload(
                    {"path": self._stores.save(run, held.info, verb, number), "type": _SAVED[verb.kind]}
                )
            case SnapshotVerb():
                name = self._stores.snapshot(run, held.info, verb, number)
                return json_payload({"sampling_session_id": name, "type": "save_weights_for_sampler"})
            case LoadVerb():
                held.value = attrs.evolve(self._stores.load(run, held.info, verb), grads=None)
                held.broken, held.due = None, True
                return json_payload({"path": verb.path, "model_id": held.info.name, "type": "load_weights"})
            case LaterVerb():
                raise AssertionError("a request is read before it is done")

    def _pass(self, held: HeldRun, run: TrainingRun, number: int, verb: PassVerb) -> Payload:
        joined = self._joined.pop((held.info.name, number), None)
        if joined is not None:
            held.value, outputs = joined
            return pass_payload(outputs)
        loss = self._loss_of(held.info, verb)
        if not verb.backward:
            return pass_payload(runs.forward(run, verb.data, loss))
        held.value, outputs = runs.forward_backward(run, verb.data, loss)
        return pass_payload(outputs)

    def _step(self, held: HeldRun, run: TrainingRun, verb: StepVerb) -> Outcome:
        if verb.kind != held.info.optimizer:
            raise ValueError(f"the run's optimizer is {held.info.optimizer}, and the numbers are of {verb.kind}")
        if held.broken is not None:
            error, held.broken = held.broken, None
            held.value = attrs.evolve(run, grads=None)
            return FailedRequest(f"no step was taken: {error}")
        held.value, metrics = runs.optim_step(run, verb.params)
        return json_payload({"metrics": {name: float(value) for name, value in metrics.items()}})

    def _create(self, held: HeldRun) -> Payload:
        info = held.info
        value = self._fresh(info)
        if info.loaded is None:
            held.value = value
            return json_payload({"model_id": info.name, "type": "create_model"})
        held.value = self._stores.load(value, info, LoadVerb(path=info.loaded, optimizer=info.with_optimizer))
        held.due = True
        return json_payload({"path": info.loaded, "model_id": info.name, "type": "load_weights"})

    def _value(self, held: HeldRun) -> TrainingRun:
        """The run, restored from its saved state if it is on disk alone. Raises ValueError if it was never created."""
        if held.value is None:
            if held.saved < 0:
                raise ValueError("the run was not created: its first request failed")
            fresh = self._fresh(held.info)
            state = checkpoint.load(fresh.state, held.directory / STATES, held.saved)
            held.value = attrs.evolve(fresh, state=state)
        return held.value

    def _fresh(self, info: RunInfo) -> TrainingRun:
        base = self._bases.get(info.base)
        if base is None:
            raise ValueError(f"the server has no model {info.base!r} now; it has {', '.join(self._bases)}")
        return runs.create_run(base, info.adapters, info.optimizer)


def _later(record: JournalRecord) -> RunVerb:
    """The verb of a recorded request: its refusal, or a `LaterVerb`."""
    if record.kind == REFUSED:
        return cattrs.structure(json_of(record.body), RefusedVerb)
    return LaterVerb(record)


def _failed(error: Exception) -> FailedRequest:
    """The outcome of a request that raised: a user's fault, a model's, or the machine's."""
    if isinstance(error, Refusal):
        return FailedRequest(error.message)
    if isinstance(error, ValueError):
        return FailedRequest(str(error)[:2000])
    return FailedRequest(f"the server failed: {words_of(error, 500)}", "server")


def _try(held: HeldRun, number: int, tries: int) -> None:
    """Record how many times request `number` has been tried, and that all before it have been done. A kill leaves the
    earlier record or this one: without any, what has been done would count as tried, and be refused."""
    held.tried = number, tries
    draft = held.directory / f".{DOING}.new"
    with contextlib.suppress(OSError):  # a full disk: the request is to be done all the same
        draft.write_text(f"{number} {tries}", "ascii")
        os.replace(draft, held.directory / DOING)


def _tried(directory: Path) -> tuple[int, int]:
    """The first request that no server has done, and how many servers ended during it; (-1, 0) if that is not known."""
    try:
        number, tries = (directory / DOING).read_text("ascii").split()
        return int(number), int(tries)
    except (OSError, ValueError):
        return -1, 0


def _record_of(number: int, outcome: Outcome) -> JournalRecord:
    if isinstance(outcome, FailedRequest):
        return JournalRecord(number, outcome.category, outcome.error.encode())
    return JournalRecord(number, "proto" if outcome.proto else "json", outcome.body)


def _outcome_of(record: JournalRecord) -> Outcome:
    if record.kind in ("proto", "json"):
        return Payload(record.body, proto=record.kind == "proto")
    return FailedRequest(record.body.decode(), "server" if record.kind == "server" else "user")
