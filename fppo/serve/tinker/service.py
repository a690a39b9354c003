"""The service behind the tinker protocol's routes: sessions, runs, samplers, and the results of requests.

Everything that a client may come back for is on disk before it is answered: see `training` for runs, `sessions` for the
rest. Samples alone are not: a client whose sample was lost with the server is told so, and sends it again.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
from tinker import types

from fppo._errors import json_of, printable, words_of
from fppo.rollout.embedded import EmbeddedEngine
from fppo.serve.loop import EngineLoop
from fppo.serve.protocol import parsed
from fppo.serve.refusal import Refusal
from fppo.serve.tinker import decode, losses, samples
from fppo.serve.tinker.checkpoints import CheckpointStore
from fppo.serve.tinker.decode import CreateVerb, LoadVerb, PassVerb, RefusedVerb, RunVerb, TinkerBounds
from fppo.serve.tinker.encode import json_payload
from fppo.serve.tinker.futures import Completions, FailedRequest, Futures, Outcome
from fppo.serve.tinker.graphs import custom_loss
from fppo.serve.tinker.journal import JournalRecord
from fppo.serve.tinker.records import SampleRecords
from fppo.serve.tinker.runs import Adapters, BaseModel
from fppo.serve.tinker.samples import SampleRules
from fppo.serve.tinker.sampling import SamplerEngines
from fppo.serve.tinker.sessions import ClientSession, Registry, Sampler, StoredLoss
from fppo.serve.tinker.snapshots import SampledWeights
from fppo.serve.tinker.stores import WeightStores
from fppo.serve.tinker.training import RunInfo, TrainingRuns
from fppo.serve.tinker.work import Worker, request_name

_SWEEP = 30.0  # seconds between two looks for what is old
_SAMPLE = 4096  # bytes that a sample counts as while it waits
_SILENT = 7 * 24 * 3600.0  # seconds without a word, after which a session is over


@attrs.frozen(kw_only=True, eq=False)
class ServedBase:
    """A base model as it is served: for runs, and for sampling."""

    base: BaseModel
    engine: EmbeddedEngine
    rules: SampleRules
    write_tokenizer: Callable[[Path], object]  # beside exported weights


class TinkerService:
    """The state of a server, in a folder, and the operations on it. One event loop calls, unless said otherwise.

    `joint` takes gradients of several runs of a base in one pass, where they wait at the same time.

    Raises OSError for a folder that another server has, or that cannot be written to.
    """

    def __init__(
        self,
        root: Path,
        bases: Mapping[str, ServedBase],
        *,
        bounds: TinkerBounds | None = None,
        joint: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.bases, self.bounds, self.clock = bases, bounds or TinkerBounds(), clock
        root.mkdir(0o700, parents=True, exist_ok=True)
        root.chmod(0o700)  # the requests of users, and what they train, are for the owner alone
        self._taken_root = (root / "lock").open("w")
        try:
            fcntl.flock(self._taken_root, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends, however it does
        except OSError as error:
            self._taken_root.close()
            raise OSError(f"another server has {root}") from error
        self.futures = Futures(clock)
        self.records = SampleRecords()
        self.completions = Completions(int(clock() * 1e6))
        self.registry = Registry(root / "server.log", clock)
        self.checkpoints = CheckpointStore(root / "checkpoints", clock)
        self.stores = WeightStores(self.checkpoints, root / "snapshots", bases, self.registry, clock)
        self.runs = TrainingRuns(
            root / "runs",
            {name: each.base for name, each in bases.items()},
            self.stores,
            self.futures,
            loss_of=self._loss_of,
            verb_of=self._verb_of_record,
            clock=clock,
            joint=joint,
        )
        self.worker = Worker(self.runs, self.futures, time.monotonic)
        self._locks: dict[str, asyncio.Lock] = {}
        self._reading = asyncio.Semaphore(2)  # requests that are read at once
        self._engines: SamplerEngines | None = None
        self._loops: Mapping[str, EngineLoop] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._swept, self._sweeping = clock(), None
        self._again: dict[str, int] = {}  # by run, the last request that an earlier server took in and did not save

    def start(self, loops: Mapping[str, EngineLoop]) -> None:
        """Begin, with the requests that an earlier server of the folder left open; `loops` are the engines of the
        bases."""
        self.stores.restore()
        for name, number, todo in self.runs.restore():
            self.worker.add_run(name, number)
            for each, verb in sorted(todo.items()):
                self.worker.put(name, each, verb)
                self._again[name] = each
        self._loops = loops
        self._engines = SamplerEngines(loops, {name: each.engine for name, each in self.bases.items()})
        self.worker.start()

    def stop(self) -> None:
        """End, after the request that is being done."""
        self.worker.stop()
        if self._engines is not None:
            self._engines.close()
        self.runs.close()
        self.registry.close()
        self._taken_root.close()

    def problem(self) -> str | None:
        """The reason why some requests will not be answered any more; None if all can be."""
        failures = {f"the engine of {name} failed": loop.failure for name, loop in self._loops.items()}
        failures["training failed"] = self.worker.failure
        return next((f"{text}: {type(error).__name__}" for text, error in failures.items() if error is not None), None)

    def base(self, name: str) -> ServedBase:
        """A base by its name. Raises Refusal."""
        if name not in self.bases:
            raise Refusal(
                f"base_model: there is no model {printable(name, 100)!r}; there are {', '.join(self.bases)}", status=404
            )
        return self.bases[name]

    # sessions

    def create_session(self, owner: str, request: types.CreateSessionRequest) -> str:
        """Begin a session; returns its name."""
        session = ClientSession(
            name=str(uuid.uuid4()),
            owner=owner,
            created=self.clock(),
            tags=tuple(printable(tag, 200) for tag in request.tags[:64]),
            metadata=decode.metadata_of(request.user_metadata, self.bounds),
            display_name=None if request.display_name is None else request.display_name[:500],
        )
        self.registry.add_session(session)
        return session.name

    async def finish_session(self, name: str, owner: str, reason: str) -> None:
        """End a session: nothing more is taken for it, and its snapshots are dropped."""
        weights = await asyncio.to_thread(self._finish, name, owner, reason)
        await self._let_go({name: weights})

    def _finish(self, name: str, owner: str, reason: str) -> list[str]:
        """End a session; returns the names of its snapshots, which are dropped. Any thread may call."""
        weights = self.stores.snapshots.of_session(name)
        if self.registry.finish(name, owner, reason):
            self.stores.snapshots.drop(weights)
            for info in self.runs.infos(owner):
                if info.session == name and self.worker.idle(info.name):
                    self.runs.release(info.name)
        return weights

    async def _let_go(self, ended: Mapping[str, Sequence[str]]) -> None:
        """Forget the samplers and the weights of sessions that have ended: the names of their weights, by session."""
        for session, weights in ended.items():
            for sampler in self.registry.samplers_of(session):
                self.completions.drop(sampler.name)
            if self._engines is not None:
                await self._engines.forget(weights)

    # runs

    async def create_run(self, owner: str, request: types.CreateModelRequest) -> tuple[str, str]:
        """Begin a run of new weights; returns the names of its first request, and its own."""
        self.registry.session(request.session_id, owner)
        adapters = decode.adapters_of(request.lora_config, secrets.randbits(63))
        optimizer = decode.optimizer_of(request.optimizer_config)
        return await self._begin(owner, request, request.base_model, adapters, optimizer)

    async def create_run_from(self, owner: str, request: types.LoadWeightsRequest) -> tuple[str, str]:
        """Begin a run of a checkpoint's weights; returns as `create_run`."""
        self.registry.session(request.session_id or "", owner)
        verb = decode.load_verb(request)
        meta = self.checkpoints.find(verb.path, owner)
        if meta.kind == "external_weights" or (verb.optimizer and meta.kind != "weights"):
            raise Refusal(f"path: {meta.path} has no {'optimizer state' if verb.optimizer else 'weights to train'}")
        if verb.optimizer and request.optimizer_config is not None:
            raise Refusal("optimizer_config: the restored state has its own optimizer; leave one of them out")
        optimizer = meta.optimizer if verb.optimizer else decode.optimizer_of(request.optimizer_config)
        return await self._begin(owner, request, request.base_model or meta.base, meta.adapters, optimizer, verb)

    async def _begin(
        self,
        owner: str,
        request: types.CreateModelRequest | types.LoadWeightsRequest,
        base: str,
        adapters: Adapters,
        optimizer: str,
        loaded: LoadVerb | None = None,
    ) -> tuple[str, str]:
        """Begin a run of an open session; returns as `create_run`."""
        self.base(base)
        info = RunInfo(
            name=f"{request.session_id}:train:{decode.number_of(request.model_seq_id, 'model_seq_id')}",
            session=request.session_id or "",
            owner=owner,
            base=base,
            adapters=adapters,
            optimizer=optimizer,
            created=self.clock(),
            metadata=decode.metadata_of(request.user_metadata, self.bounds),
            loaded=None if loaded is None else loaded.path,
            with_optimizer=loaded is not None and loaded.optimizer,
        )
        first = request_name(info.name, 0)
        async with self._lock(info.name):
            if self.futures.open(first, info.owner):
                if self.runs.has(info.name):
                    self.futures.forget([first])
                    raise Refusal(f"the result of {first} is no longer held", status=410)
                await asyncio.to_thread(self.runs.create, info)
                self.worker.add_run(info.name, 0)
                self.worker.put(info.name, 0, CreateVerb())
            else:
                held = self.runs.info(info.name, info.owner)
                if attrs.evolve(held, created=info.created, adapters=info.adapters) != info:
                    raise Refusal(f"{info.name} is another run already: give another model_seq_id")
        return first, info.name

    async def accept(self, owner: str, run: str, number: int, kind: str, body: bytes) -> str:
        """Accept a request of a run; returns its name once it is on disk.

        A refused request takes its turn all the same, with the error as its result, so that later ones do not wait for
        it. A number that came before is the same request again.
        """
        info = self.runs.info(run, owner)
        self.registry.session(info.session, owner)
        name = request_name(run, number)
        async with self._lock(run):
            if not self.futures.open(name, owner, len(body)):
                return name
            if self.worker.knows(run, number):
                self.futures.forget([name])
                raise Refusal(f"the result of {name} is no longer held", status=410)
            try:
                self._check_room(owner)
                try:
                    async with self._reading:
                        verb, noted = await asyncio.to_thread(self._taken, info, kind, body)
                    self.futures.weigh(name, len(noted) + decode.memory_of(verb))
                    self._check_room(owner)
                    record = JournalRecord(number, kind, noted)
                except Refusal as error:
                    if error.status == 429:
                        raise
                    breaks = decode.adds_gradients(kind, body)
                    verb = RefusedVerb(error=error.message, breaks=breaks)
                    text = json.dumps({"error": error.message, "breaks": breaks})
                    record = JournalRecord(number, "refused", text.encode())
                await asyncio.to_thread(self.runs.accept, run, record)
            except BaseException:
                self.futures.forget([name])
                raise
            self.worker.put(run, number, verb)
        return name

    def _check_room(self, owner: str) -> None:
        """Raise Refusal, with status 429, if too many of an owner's requests wait; the client then sends the request
        again."""
        count, size = self.futures.pending(owner)
        if count > self.bounds.open_requests or size > self.bounds.open_bytes:
            text = f"{count} requests of {size:,} bytes wait; at most {self.bounds.open_requests} may"
            raise Refusal(f"{text}, of {self.bounds.open_bytes:,} bytes: send it later", status=429)
        if self.clock() - self._swept > _SWEEP:
            self._swept = self.clock()
            self._sweeping = asyncio.create_task(self.sweep())

    async def sweep(self) -> None:
        """Forget old results, and end sessions whose client has been silent."""
        await self._let_go(await asyncio.to_thread(self._swept_sessions))

    def _swept_sessions(self) -> dict[str, list[str]]:
        """Forget old results, end silent sessions, and release their idle runs. Returns the sessions that ended, with
        the names of their weights. Any thread may call."""
        self.futures.sweep()
        silent = self.registry.silent(_SILENT)
        ended = {each.name: self._finish(each.name, each.owner, "interrupted") for each in silent}
        for name in self.runs.open_runs():
            if self.registry.has_finished(self.runs.any_info(name).session) and self.worker.idle(name):
                self.runs.release(name)
        return ended

    def _lock(self, run: str) -> asyncio.Lock:
        return self._locks.setdefault(run, asyncio.Lock())

    def _taken(self, info: RunInfo, kind: str, body: bytes) -> tuple[RunVerb, bytes]:
        """The verb of a request's body, and the body to keep: recorded samples, which expire, are written into it.

        Raises Refusal. Any thread may call.
        """
        if kind == "pass":
            message = decode.pass_message(body)
            if message.loss_fn == "stable_reinforce":
                self.records.resolve(message, info.session, self.bounds)
                body = message.SerializeToString()
        return self.verb_of(info, kind, body), body

    def verb_of(self, info: RunInfo, kind: str, body: bytes) -> RunVerb:
        """The verb of a request's body. Raises Refusal. Any thread may call."""
        served = self.base(info.base)
        if kind == "pass":
            rules = served.rules
            message = decode.pass_message(body)
            verb = decode.pass_verb(
                message,
                bounds=self.bounds,
                vocabulary=rules.texts.vocabulary,
                limit=rules.limit,
                images=rules.images,
            )
            self._loss_of(info, verb)
            return verb
        fields = parsed(body)
        if kind == "optim_step":
            return decode.step_verb(fields)
        if kind == "save_weights":
            return decode.save_verb(fields, self.bounds)
        if kind == "save_weights_for_sampler":
            return decode.sampler_verb(fields, self.bounds)
        if kind == "save_weights_external":
            return decode.external_verb(fields)
        return decode.load_verb(decode.of_type(types.LoadWeightsRequest, fields))

    def _verb_of_record(self, info: RunInfo, record: JournalRecord) -> RunVerb:
        if record.kind == "refused":
            return cattrs.structure(json_of(record.body), RefusedVerb)
        try:
            return self.verb_of(info, record.kind, record.body)
        except Refusal as error:  # of a server with other models, or other bounds
            return RefusedVerb(error=error.message, breaks=decode.adds_gradients(record.kind, record.body))

    def _loss_of(self, info: RunInfo, verb: PassVerb) -> losses.Loss:
        """The loss of a pass. Raises Refusal."""
        texts = {name: value for name, value in verb.config.items() if isinstance(value, str)}
        numbers = {name: value for name, value in verb.config.items() if not isinstance(value, str)}
        graph = None
        if verb.loss == "custom":
            stored = self.registry.loss(str(texts.pop("loss_id", "")))
            if stored is None or stored.session != info.session:
                raise Refusal("loss_fn_config.loss_id: the session has no such custom loss")
            graph = graph_of(stored.body)
        if texts:
            raise Refusal(f"loss_fn_config: {printable(next(iter(texts)), 60)!r} is a text; give numbers")
        try:
            return losses.Loss(verb.loss, numbers, graph)
        except ValueError as error:
            raise Refusal(f"loss_fn: {error}") from error

    # losses

    def create_loss(self, owner: str, body: bytes) -> str:
        """Store a custom loss; returns its name, which is also the name of the request."""
        request = decode.of_type(types.CreateCustomLossRequest, body)
        session = self.registry.session(request.session_id, owner)
        name = f"{session.name}:loss:{decode.number_of(request.custom_loss_seq_id, 'custom_loss_seq_id')}"
        graph_of(body.decode())
        if self.registry.loss(name) is None:
            self.registry.add_loss(StoredLoss(name=name, session=session.name, owner=owner, body=body.decode()))
        if self.futures.open(name, owner):
            self.futures.settle(name, json_payload({"loss_id": name, "type": "create_custom_loss"}))
        return name

    # sampling

    def create_sampler(self, owner: str, request: types.CreateSamplingSessionRequest) -> str:
        """Begin a sampling session of a base or a checkpoint; returns its name."""
        session = self.registry.session(request.session_id, owner)
        number = decode.number_of(request.sampling_session_seq_id, "sampling_session_seq_id")
        name = f"{session.name}:sample:{number}"
        if request.model_path is not None:
            meta = self.checkpoints.find(request.model_path, owner)
            if meta.kind == "external_weights":
                raise Refusal("model_path: these are files for other programs; give weights or sampler_weights")
            base, weights = meta.base, "path"
            if request.base_model not in (None, base):
                raise Refusal(f"base_model: the weights are of {base!r}")
        elif request.base_model is not None:
            base, weights = request.base_model, "base"
        else:
            raise Refusal("give base_model or model_path")
        self.base(base)
        if not self.registry.has_sampler(name):
            sampler = Sampler(name=name, owner=owner, base=base, weights=weights, path=request.model_path)
            self.registry.add_sampler(sampler)
        return name

    def sampler(self, name: str, owner: str) -> Sampler:
        """A sampling session of the owner's. Raises Refusal; with status 503, so that clients ask again, while a
        request of an earlier server that may make the session or its weights is still to be repeated."""
        try:
            sampler = self.registry.sampler(name, owner)
        except Refusal:
            session = name.partition(":")[0]
            runs = [info.name for info in self.runs.infos(owner) if info.session == session]
            if not any(map(self._is_done_again, runs)):
                raise
        else:
            weights = _snapshot_of(sampler)
            if weights is None or self.stores.snapshots.has(weights) or not self._is_done_again(sampler.run or ""):
                return sampler
        raise Refusal(f"sampling session {printable(name, 80)} is being made again: send the request again", status=503)

    def _is_done_again(self, run: str) -> bool:
        """Whether a run still has to repeat requests that an earlier server accepted and did not save."""
        return run in self._again and not self.worker.has_done(run, self._again[run])

    def sample(self, owner: str, request: types.SampleRequest) -> tuple[str, list[str]]:
        """Begin to draw samples; returns the names of the request, and of the samples."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise Refusal("sampling_session_id, seq_id: give both")
        sampler = self.sampler(request.sampling_session_id, owner)
        self.registry.session(sampler.name.split(":")[0], owner)
        name = f"{sampler.name}:{decode.number_of(request.seq_id)}"
        served = self.base(sampler.base)
        count = max(0, min(request.num_samples, self.bounds.samples))
        if self.futures.open(name, owner):
            try:
                self.futures.weigh(name, count * (_SAMPLE + 8 * max(0, request.topk_sample_logprobs)))
                self._check_room(owner)
            except Refusal:
                self.futures.forget([name])
                raise
            try:
                work = samples.sample_work(request, name, rules=served.rules, bounds=self.bounds)
            except Refusal as error:
                self._settle_sample(name, sampler, request.seq_id, FailedRequest(error.message))
            else:
                self._tasks[name] = asyncio.create_task(self._sample(name, sampler, request.seq_id, work))
        return name, [f"{name}:{number}" for number in range(count)]

    async def _sample(self, name: str, sampler: Sampler, number: int, work: samples.SampleWork) -> None:
        assert self._engines is not None
        try:
            session = sampler.name.split(":")[0]
            weights = await self._weights_of(sampler)
            outcome = await self._engines.sample(name, work, weights, owner=session, record=self.records.add)
        except Refusal as error:
            outcome = FailedRequest(error.message)
        except Exception as error:  # weights that cannot be read
            outcome = FailedRequest(f"the server failed: {words_of(error, 500)}", "server")
        self._settle_sample(name, sampler, number, outcome)
        self._tasks.pop(name, None)

    def _settle_sample(self, name: str, sampler: Sampler, number: int, outcome: Outcome) -> None:
        self.futures.settle(name, outcome)
        self.completions.add((sampler.name, number // 1_000_000_000), name, outcome)

    async def _weights_of(self, sampler: Sampler) -> SampledWeights | str:
        if sampler.weights == "base":
            return sampler.base
        if sampler.weights == "path":
            assert sampler.path is not None
            meta = self.checkpoints.find(sampler.path, sampler.owner)
            return await asyncio.to_thread(self.stores.sampled, meta)
        name = _snapshot_of(sampler)
        assert name is not None
        return await asyncio.to_thread(self.stores.snapshots.weights, name)

    def knows(self, name: str, owner: str) -> bool:
        """Whether a request of this name may have been the owner's: one of its runs or sampling sessions."""
        home = name.rpartition(":")[0]
        try:
            if ":train:" in home:
                self.runs.info(home, owner)
            else:
                self.sampler(home, owner)
        except Refusal as error:
            return error.status == 503
        return True

    def cancel(self, name: str, owner: str) -> None:
        """End the drawing of samples that nobody wants any more."""
        if self.futures.state(name, owner) is not None and self._engines is not None:
            self._engines.cancel(name)


def _snapshot_of(sampler: Sampler) -> str | None:
    """The name of the snapshot that holds a sampler's weights; None for those of a base or a checkpoint."""
    return {"snapshot": sampler.name, "inflight": f"{sampler.run}:inflight"}.get(sampler.weights)


def graph_of(body: str) -> Any:
    """The custom loss in the body of a request. Raises Refusal."""
    request = decode.of_type(types.CreateCustomLossRequest, body.encode())
    try:
        inputs = [(each.name, each.rank) for each in request.inputs]
        return custom_loss(request.name, inputs, [node.model_dump() for node in request.graph.nodes])
    except ValueError as error:
        raise Refusal(f"graph: {error}") from error
