"""Generation with vLLM: the engine for throughput, on weights that are sent to it and checked.

    with VllmEngine(model, pad_token_id=0, options=VllmOptions(max_model_len=2048)) as engine:
        rollout = engine.generate(params, Ask(prompts, sampling, key, version=step))

vLLM is imported when an engine starts, not before. Tokens are drawn as the embedded engine draws them, from vLLM's
logits: the same key gives the same responses wherever the logits agree closely enough.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo.batch import Rollout
from fppo.key import Key
from fppo.models import lora
from fppo.models.model import Model, float32_names
from fppo.rollout import sync
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.records import Response, check_prompts, number_rows, response_limits, rollout_of
from fppo.rollout.sync import Bucket, CopyOrigin, Rename, SyncError
from fppo.rollout.vllm.adapter import changes_something, deliver, factors_of, weights_of, with_room
from fppo.rollout.vllm.devices import buffer_bytes
from fppo.rollout.vllm.host import (
    Answer,
    DiedElsewhere,
    EngineDied,
    EngineFailure,
    Host,
    HostBatch,
    HostDraws,
    HostRow,
    Inputs,
    Synced,
    check_rows,
)
from fppo.rollout.vllm.names import Names
from fppo.rollout.vllm.options import VllmOptions, check_options
from fppo.rollout.vllm.probe import TOLERANCE, compare_log_probs, own_log_probs, probes
from fppo.rollout.vllm.remote import give_memory_back, start_host
from fppo.rollout.vllm.requests import VllmRequests
from fppo.rollout.vllm.transfer import MakeInfo, Meta, WeightTransfer, metadata, transfer_info
from fppo.rollout.vllm.vision import check_inputs, inputs_of, weight_names
from fppo.runtime.mesh import AXES, Mesh, any_rank, device_of, ranks_on
from fppo.runtime.parts import dtypes_of
from fppo.runtime.restarts import Restarts

__all__ = ["EngineFailure", "SyncError", "Synced", "VllmEngine", "VllmOptions"]


class _Weights(NamedTuple):
    origin: CopyOrigin
    digests: dict[str, str]  # of this rank's shards, where only changes are sent


class VllmEngine:
    """vLLM for `model`, started here and ended by `close()`.

    The engine holds the weights of one version. `generate` sends it others if the version or the tensors differ. Every
    tensor's digest, and the set of names, is confirmed, and at the first sync (`probe`) the log-probs of some tokens
    are compared with the model's own. With `send="changed"` only parameters whose digests differ are sent, those in
    `frozen` once. Adapters are merged for each sync, or sent alone (`options.adapter`). `rename` gives parameters the
    engine's names. On a sharded `mesh` parameters are shards, and every rank's engine must be synced in the same order.
    `transfer` makes the trainer's side of a transfer engine from a vLLM plugin, in place of `options.transport`, and
    `start` makes the `Host` of a model, options and dtype, in place of `remote.start_host`.

    Raises ValueError without a vLLM that fppo can run on, EngineFailure if vLLM does not start or stops working, and
    SyncError if it does not hold the weights that were sent. After a failure or an interruption the next sync sends all
    weights, and starts vLLM anew if it must.
    """

    def __init__(  # a script sets any of them  # noqa: PLR0913
        self,
        model: Model,
        *,
        pad_token_id: int,
        mesh: Mesh | None = None,
        options: VllmOptions | None = None,
        bucket_bytes: int = 1 << 28,
        rename: Rename | None = None,
        send: Literal["all", "changed"] = "all",
        frozen: frozenset[str] = frozenset(),
        probe: Literal["first", "always", "never"] = "first",
        transfer: MakeInfo | None = None,
        start: Callable[[Model, VllmOptions, str], Host] | None = None,
    ) -> None:
        self._source, self._model = model, model.plain
        self._pad, self._mesh = pad_token_id, mesh or Mesh.local()
        self._options = with_room(model, options or VllmOptions())
        check_options(self._options)
        self._alone, self._delivered = model.frozen is not None and self._options.adapter == "alone", 0  # adapters sent
        self._bucket_bytes, self._send, self._probe = bucket_bytes, send, probe
        self._frozen = frozen | lora.kept(model) | model.untrained_params
        self._rename = rename or weight_names(model)
        own = model.compute_dtype or torch.float32
        self._dtype: str = self._options.dtype or str(own).removeprefix("torch.")
        if self._dtype not in TOLERANCE:
            raise ValueError(f"dtype = {self._dtype!r}: vLLM computes in one of {sorted(TOLERANCE)}")
        # sent as they are: vLLM keeps what it computes in float32 itself, and rounds what it does not
        self._exact = float32_names(self._model, getattr(torch, self._dtype))
        self._make_host = start
        self._info = transfer or (None if self._options.transport == "auto" else transfer_info)
        self._transfer: WeightTransfer | None = None  # of the host
        self._targets = sync.targets(self._model.whole_shapes, self._rename)
        self._weights: _Weights | None = None
        self.replaced = 0  # processes that died or hung, and were replaced
        self._probed = self._asleep = self._broken = False
        self._host: Host | None = None
        self._start()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int | None:
        """The version of the weights that the engine holds; None if it holds none that were confirmed."""
        return None if self._weights is None else self._weights.origin.version

    @property
    def limit(self) -> int:
        """The most tokens of a prompt and its response together."""
        return self._running().limit

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout of these parameters, as `EmbeddedEngine.generate` gives it; log-probs are float32.

        Raises ValueError also for a prompt and response that may outgrow vLLM's limit.
        """
        device = next(iter(params.values())).device
        mask = ask.prompts.attention_mask.bool()
        lengths = check_prompts(mask)
        limits = response_limits(ask)
        check_rows(ask, lengths, limits, size=self._model.config.vocab_size, limit=self.limit)
        row_ids, n = number_rows(ask, torch.device("cpu")), ask.sampling.n
        prompts = [row[keep].tolist() for row, keep in zip(ask.prompts.tokens, mask, strict=True)]
        request = HostBatch(
            prompts=[prompt for prompt in prompts for _ in range(n)],
            sampling=ask.sampling,
            key=ask.key,
            row_ids=row_ids,
            limits=[limit for limit in limits for _ in range(n)],
            offset=ask.offset,
            inputs=inputs_of(self._model, prompts, ask),
        )
        answers = self._answers(request, params, ask)
        if self._options.sleep:
            try:
                self.sleep()
            except EngineDied as died:
                self._replace(died, "all rows are done")
        rows: list[Response] = []
        for answer in answers:
            tokens, log_probs, others = (torch.from_numpy(x) for x in answer)
            rows.append(Response.of(tokens, log_probs, others, ask.sampling))
        return rollout_of(ask, rows, pad_token_id=self._pad, device=device)

    @contextlib.contextmanager
    def open(
        self, params: Mapping[str, Tensor], *, version: int = 0, most_waiting: int | None = None
    ) -> Iterator[VllmRequests]:
        """The engine with these parameters, for requests as they come, until the context ends; see `RequestEngine`."""
        turns = _EngineTurns(self)
        yield VllmRequests(
            turns,
            params,
            version,
            size=self._model.config.vocab_size,
            most_waiting=most_waiting,
            check_inputs=lambda request: check_inputs(self._model, request.ids, request.inputs),
        )
        if self._options.sleep:
            self.sleep()

    def log_probs(
        self, rows: list[list[int]], start: int = 1, *, temperature: float = 1.0, inputs: Inputs = None
    ) -> Tensor:
        """The engine's log-probs of tokens from `start` on, in rows of one length, given the tokens and images before
        them: float32 [B, T]."""
        whole = torch.tensor(rows)
        sampling = Sampling(max_tokens=whole.shape[1] - start, temperature=temperature)
        prompts, ids = [row[:start] for row in rows], torch.arange(len(rows))
        answers: dict[int, Answer] = {}
        forced = whole[:, start:]
        request = HostBatch(prompts=prompts, sampling=sampling, key=Key(0), row_ids=ids, forced=forced, inputs=inputs)
        self._generate(request, answers.__setitem__)
        return torch.stack([torch.from_numpy(answers[row].log_probs) for row in range(len(rows))])

    def sync(self, params: Mapping[str, Tensor], *, version: int) -> Synced:
        """Send parameters to vLLM and confirm that it holds them, as `version`. Every rank of a mesh that cuts them
        must call.

        With `send="all"` all are sent, even if the engine holds this version already; with "changed" only those that
        differ. Returns the version, the numbers of tensors and bytes sent, and the seconds. Raises SyncError if vLLM
        holds other weights than were sent, and EngineFailure if it stops. After a failure the engine holds no version.
        """
        started = time.perf_counter()
        before, self._weights = self._weights, None  # unless all goes well, the engine holds nothing that may be used
        origin = CopyOrigin.of(params, version)
        dtype, adapter = getattr(torch, self._dtype), params
        factors = factors_of(self._source, params, self._mesh, dtype) if self._alone else {}
        params = weights_of(self._source, params, self._mesh, alone=self._alone)
        sync.compare_names(self._model.shapes, params)
        only, digests = self._wanted(params, before)
        sent = {name: sync.digest(x, "bytes") for name, x in factors.items()}
        count = sum(x.nbytes for x in factors.values())

        def recorded() -> Iterator[Bucket]:
            nonlocal count
            model, size, exact, layout = self._model, self._bucket_bytes, self._exact, self._model.layout
            shards = sync.reshard(
                params, model.shapes, self._mesh, bucket_bytes=size, dtype=dtype, only=only, exact=exact, layout=layout
            )
            for bucket in sync.renamed(shards, self._rename):
                sent.update(bucket.digests)
                count += sum(x.nbytes for x in bucket.tensors.values())
                yield bucket

        if only or factors:
            got, unfilled = self._load(only, recorded(), params, factors)
            sync.compare(sent, got)
            if unfilled and len(only) == len(self._targets):
                raise SyncError(f"vLLM left parameters as they were: {unfilled[:8]}")
        if self._probe == "always" or (self._probe == "first" and self._any(not self._probed, params)):
            self._compare_log_probs(weights_of(self._source, adapter, self._mesh) if self._alone else params)
            self._probed = not self._alone or changes_something(factors)
        self._weights = _Weights(origin, digests)
        return Synced(version, len(sent), count, time.perf_counter() - started)

    def _load(
        self, names: list[str], buckets: Iterator[Bucket], params: Mapping[str, Tensor], factors: Mapping[str, Tensor]
    ) -> tuple[dict[str, str], list[str]]:
        """Load these buckets and return the result of `Host.end_load`, with an adapter's digests. A rank whose
        vLLM fails still gathers the others' buckets."""
        result: tuple[dict[str, str], list[str]] = ({}, [])
        wrong, died = self._readied(names), None
        if self._info is not None and self._any(wrong is not None, params):
            raise wrong or DiedElsewhere("the vLLM of another rank is not ready for weights")
        try:
            if wrong is not None:
                raise wrong
            host, how = self._running(), sync.digest_method(params.values())
            if names and self._info is None:
                host.begin_load(how)
                for bucket in buckets:
                    host.take_in(bucket.tensors)
                result = host.end_load()
            elif names and self._info is not None:
                dtypes = dtypes_of(params, self._mesh)
                size = buffer_bytes(self._bucket_bytes, [x.nbytes for x in self._announced(dtypes, self._targets)])
                self._transfer = self._transfer or WeightTransfer(host, self._info(self._options, size))
                result = self._transfer.send(self._announced(dtypes, names), buckets, how)
            if factors:  # loading weights removes all adapters
                self._delivered += 1
                result = (result[0] | deliver(host, self._delivered, self._source, factors), result[1])
            self._wake("kv_cache")
            self._broken = False
        except (EngineFailure, SyncError) as error:
            if names and self._mesh.cuts:
                for _ in buckets:
                    pass
            if not isinstance(error, EngineDied):
                raise
            died = error
        if self._any(died is not None, params):
            raise died or DiedElsewhere("the vLLM of another rank died during a sync")
        return result

    def _readied(self, names: list[str]) -> EngineFailure | SyncError | None:
        """Restart or wake vLLM if needed. Returns the error if it cannot take these weights in."""
        try:
            if self._broken:
                self._restart()
            self._names.check(names)
            self._broken = True  # if it fails in between, vLLM has half of its modules taken apart
            self._wake("weights")
        except (EngineFailure, SyncError) as error:
            return error
        return None

    def _announced(self, dtypes: Mapping[str, torch.dtype], names: Iterable[str]) -> list[Meta]:
        shapes, dtype = self._model.whole_shapes, getattr(torch, self._dtype)
        return metadata(dtypes, shapes, names, self._rename, dtype, self._exact)

    def sleep(self) -> None:
        """Release vLLM's memory for weights and cache until the next rollout, which is sent all weights.

        Raises ValueError unless the engine was started with `sleep=True`.
        """
        if not self._options.sleep:
            raise ValueError("the engine cannot sleep: start it with sleep = True, on a GPU")
        self._weights = None
        if not (self._asleep or self._broken):
            self._broken = True  # unless it sleeps
            self._running().sleep()
            self._asleep, self._broken = True, False

    def close(self) -> None:
        """End vLLM. Idempotent."""
        host, self._host, self._weights = self._host, None, None
        if host is not None:
            self._leave()
            host.close()

    def _leave(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()

    def _start(self) -> None:
        self._host = (self._make_host or start_host)(self._model, self._options, self._dtype)
        modules, places = self._host.call("fppo_names", [new for own in self._targets.values() for new in own])[0]
        self._names = Names(modules, places, self._targets)

    def _restart(self) -> None:
        self._broken = True  # until a new one runs
        self._leave()
        self._running().close()
        self._start()
        self._asleep = self._probed = self._broken = False

    def _running(self) -> Host:
        if self._host is None:
            raise ValueError("the engine is closed")
        return self._host

    def _holds(self, params: Mapping[str, Tensor], version: int) -> bool:
        return self._weights is not None and self._weights.origin.matches(params, version)

    def _answers(self, request: HostBatch, params: Mapping[str, Tensor], ask: Ask) -> list[Answer]:
        """The answers of all rows. A process that dies is replaced, and generates the rows that are left.

        On a mesh that cuts parameters all ranks go on together: if one was replaced, all sync again.
        """
        answers: dict[int, Answer] = {}

        def keep(row: int, answer: Answer) -> None:
            answers[row] = answer
            if ask.on_finished is not None:
                tokens = answer.tokens.tolist()
                ask.on_finished(row, tokens, "stop" if ask.sampling.stopped(tokens) else "length")

        def attempt() -> list[Answer]:
            rows = [row for row in range(len(request.prompts)) if row not in answers]
            died = None
            try:
                if self._any(not self._holds(params, ask.version), params):
                    self.sync(params, version=ask.version)
                if rows:
                    self._generate(request.part(rows), lambda i, x: keep(rows[i], x))
            except EngineDied as error:
                died = error
            if self._any(died is not None, params):
                raise died or DiedElsewhere("the vLLM of another rank died")
            return [answers[row] for row in range(len(request.prompts))]

        def restart(died: EngineDied) -> None:
            if not isinstance(died, DiedElsewhere):
                self._replace(died, f"{len(answers)} of {len(request.prompts)} rows are done")

        try:
            return Restarts(self._options.restarts).run(attempt, EngineDied, restart)
        except EngineDied as died:
            died.add_note(
                f"restarts = {self._options.restarts}: it is not replaced again in this rollout; "
                "a run that is started again goes on from its last checkpoint"
            )
            raise

    def _replace(self, died: EngineDied, done: str) -> None:
        self.replaced += 1  # in the text, since a warning of the same text is shown once
        text = f"{died}; {done}, a new one goes on (replaced so far: {self.replaced})"
        warnings.warn(text, RuntimeWarning, stacklevel=6)
        self._weights, self._broken = None, True  # the next sync starts another, and may see that die too

    def _generate(self, request: HostBatch, on_answer: Callable[[int, Answer], None]) -> None:
        request = attrs.evolve(request, adapter=self._delivered if self._alone else None)
        try:
            self._running().generate(request, on_answer)
        except BaseException:  # also an interruption: the next sync does not rely on a vLLM that was amid something
            self._weights, self._broken = None, True
            raise

    def _wanted(self, params: Mapping[str, Tensor], before: _Weights | None) -> tuple[list[str], dict[str, str]]:
        """The parameters to send, and the digests to compare with next time."""
        if self._alone:
            return ([] if before else list(self._targets)), {}
        if self._send == "all":
            return list(self._targets), {}
        last = {} if before is None else before.digests
        names, digests = sync.changed(params, last, self._mesh, frozen=self._frozen, names=self._targets)
        return self._names.with_fused(names), digests

    def _wake(self, part: str) -> None:
        if self._asleep:
            give_memory_back()
            self._running().wake(part)
            self._asleep = part != "kv_cache"

    def _compare_log_probs(self, params: Mapping[str, Tensor]) -> None:
        """Raise SyncError if the engine does not give tokens the log-probs that the model gives them."""
        for probe in probes(self._model, self.limit):
            ours = own_log_probs(self._model, params, self._mesh, probe)
            theirs = self.log_probs([probe.tokens], probe.start, inputs=probe.inputs and [probe.inputs])
            compare_log_probs(ours, theirs[0], self._dtype)

    def _any(self, flag: bool, params: Mapping[str, Tensor]) -> bool:
        """Whether the flag is set here, or on any rank that syncs together with this one: ranks that gather parameters,
        or send them by a transfer engine of vLLM, may wait for each other."""
        together = self._mesh.cuts or (self._info is not None and ranks_on(self._mesh, AXES) > 1)
        return any_rank(flag, self._mesh, device_of(params)) if together else flag


class _EngineTurns:
    """`VllmTurns` of an engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self._params, self._version, self._left = engine, {}, 0, engine._options.restarts

    @property
    def limit(self) -> int:
        return self._engine.limit

    def begin(self, params: Mapping[str, Tensor], version: int) -> None:
        engine = self._engine
        self._params, self._version = params, version
        if engine._any(not engine._holds(params, version), params):
            if not engine._broken:
                engine._running().begin_turns(None)  # no row is open while weights come
            engine.sync(params, version=version)
        engine._running().begin_turns(engine._delivered if engine._alone else None)

    def turn(self, new: Sequence[HostRow], ended: Sequence[int]) -> list[HostDraws]:
        try:
            return self._engine._running().turn(new, ended)
        except BaseException:
            self._engine._weights, self._engine._broken = None, True
            raise

    def replace(self, died: EngineDied) -> None:
        """Begin anew in a vLLM that replaces one that died. Raises its error after too many deaths, and if other ranks
        would have to send weights too."""
        engine = self._engine
        self._left -= 1
        if self._left < 0 or engine._mesh.cuts:
            died.add_note(f"restarts = {engine._options.restarts}: it is not replaced again while it is open")
            raise died
        engine._replace(died, "rows that are open are read anew")
        self.begin(self._params, self._version)
