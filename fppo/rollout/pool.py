"""Several engines as one: requests go to whichever is free, and rows come back in order. Engines may die and restart.

Draws depend on the key and the row alone, and the split into requests on the prompts alone. So no bit changes with the
number of engines, with the engine that answers a request, or with engines that die.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo import tree
from fppo.batch import Prompts, Rollout
from fppo.fleet import HERE, AnyGroup, Group, GroupDied, Here, LocalGroup, at_once
from fppo.key import Key
from fppo.models.model import Model
from fppo.rollout import sync
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.records import check_prompts, response_limits, widened
from fppo.rollout.sync import Bucket, CopyOrigin, DigestMethod
from fppo.rollout.vllm.host import EngineDied
from fppo.runtime.in_order import InOrder
from fppo.runtime.restarts import Lost, Restarts

_ENDING = 100  # tenths of seconds in which the thread of an engine may end

Params = Mapping[str, Any]  # tensors, or handles of them
Generate = Callable[[Mapping[str, Tensor], Ask], Rollout]


@attrs.frozen
class PlacedEngine:
    """An engine in the processes of a group, called from here. `engine` is the group's handle of its `generate`, a name
    for an object that lives there; parameters are such handles too. Rows cannot be reported as they finish, since
    `Ask`'s listener is a function of this process."""

    group: Group
    engine: Any  # a handle of `Engine.generate`

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout of the engine on the ranks."""
        asked = (ask.prompts, ask.sampling, ask.key, ask.version, ask.limits, ask.offset)
        return self.group.call(_generate, self.engine, params, *asked, label="generate")


def _generate(
    generate: Generate,
    params: Mapping[str, Tensor],
    prompts: Prompts,
    sampling: Sampling,
    key: Key,
    version: int,
    limits: Tensor | None,
    offset: int,
) -> Rollout:
    return generate(params, Ask(prompts, sampling, key, version=version, limits=limits, offset=offset))


@attrs.frozen(kw_only=True)
class Policy:
    """The group that has the policy's parameters, with its `model` or a handle of it. Parameters are sent whole, in
    buckets of about `bucket_bytes`."""

    group: AnyGroup
    model: Any
    bucket_bytes: int = 1 << 28

    def buckets(self, params: Params) -> Iterator[Bucket]:
        """All parameters in buckets, with the digests of the tensors in each."""
        whole = self.group.call(_whole, HERE, self.model, params, self.bucket_bytes, stays=True, label="read weights")
        while (bucket := self.group.call(next, whole, None, label="read weights")) is not None:
            yield bucket


def _whole(here: Here, model: Model, params: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[Bucket]:
    params = {name: x.to(here.device) for name, x in params.items()}
    return sync.reshard(params, model.shapes, here.mesh, bucket_bytes=bucket_bytes, layout=model.layout)


def _taken(tensors: dict[str, Tensor], method: DigestMethod) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Digest tensors that arrived, by this method. Returns the tensors and their digests."""
    return tensors, {name: sync.digest(x, method) for name, x in tensors.items()}


@attrs.define(eq=False)
class _Replica:
    """One engine of the pool: a handle of its `generate`, and handles of the weights that it confirmed."""

    group: Group
    generate: Any
    params: Params | None = None
    origin: CopyOrigin | None = None  # the source of these weights
    lost: Lost | None = None  # why it died, until it is up again
    gone: bool = False  # it is not started again

    def holds(self, params: Params, version: int) -> bool:
        return self.origin is not None and self.origin.matches(params, version)


@attrs.define(eq=False)
class _RolloutWork:
    """A rollout in progress. Each of the `requests` lists some prompts; `todo` are the requests left, the costliest
    first."""

    params: Params
    ask: Ask
    requests: Sequence[Sequence[int]]
    todo: deque[int]
    done: dict[int, Rollout] = attrs.field(factory=dict)
    error: BaseException | None = None
    reporting: threading.Lock = attrs.field(factory=threading.Lock)

    @property
    def ended(self) -> bool:
        return self.error is not None or len(self.done) == len(self.requests)


class EnginePool:
    """Several engines as one: each of the `groups` has an engine, of which `make(group)` returns the handle.

    Weights of the requested version are sent to engines that hold other weights, and each engine confirms a digest of
    every tensor before it answers requests of at most `rows` rows, or of one prompt. An engine that dies is started
    again in its group while the others answer for it, at most `restarts` times over all engines. `names` are the names
    of the parameters. An engine gets parameters on its device or, with `on_host`, in host memory, if it makes its own
    copies.

    Use it in a `with`. `generate` raises GroupDied once all engines are gone, SyncError if an engine does not hold what
    it was sent, and any error of an engine.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        make: Callable[[Group], Any],
        policy: Policy,
        *,
        names: Iterable[str],
        pad_token_id: int,
        rows: int = 64,
        restarts: int = 3,
        on_host: bool = False,
    ) -> None:
        self._groups, self._make, self._policy, self._names = list(groups), make, policy, set(names)
        self._pad, self._rows, self._restarts, self._on_host = pad_token_id, rows, Restarts(restarts), on_host
        self._replicas: list[_Replica] = []
        self._threads: list[threading.Thread] = []
        self._one = InOrder()  # one rollout at a time
        self._changed = threading.Condition()  # guards all fields below
        self._work: _RolloutWork | None = None
        self._sending = 0  # threads that read weights of the rollout under way
        self._deaths: list[str] = []
        self._told = 0  # deaths reported so far
        self._closed = False

    def __enter__(self) -> EnginePool:
        made = at_once({group.name: partial(self._make, group) for group in self._groups})
        self._replicas = [_Replica(group, made[group.name]) for group in self._groups]
        for replica in self._replicas:
            self._threads.append(threading.Thread(target=self._live, args=(replica,), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for replica, thread in zip(self._replicas, self._threads, strict=True):
            thread.join(0.1)
            tries = _ENDING
            while thread.is_alive() and tries:
                replica.group.close()  # again: it may be about to start
                thread.join(0.1)
                tries -= 1

    def generate(self, params: Params, ask: Ask) -> Rollout:
        """The rollout; `ask.on_finished` is called for the rows of a request when it is answered."""
        requests = _requests(ask, self._rows)
        work = _RolloutWork(params, ask, requests, deque(range(len(requests))))
        with self._one:
            self._send([replica for replica in self._replicas if replica.lost is None], params, ask.version)
            try:
                with self._changed:
                    self._work = work
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: work.ended or all(replica.gone for replica in self._replicas))
            finally:
                with self._changed:
                    self._work = None
                    # the caller may free the parameters now, so no thread may still read them
                    self._changed.wait_for(lambda: not self._sending)
            self._tell(work)
        device = next(iter(params.values())).device
        return tree.map(lambda x: x.to(device), _joined(work, self._pad))

    def bring(self, params: Params) -> None:
        """Send `params` to the engines now, for batches made ahead, if the policy has ranks of its own: to read the
        parameters later would interrupt the training on these ranks."""
        if isinstance(self._policy.group, LocalGroup):
            return
        with self._one:
            self._send([replica for replica in self._replicas if replica.lost is None], params, 0)

    def _tell(self, work: _RolloutWork) -> None:
        """Warn of engines that died since the last call. Raises the error of `work` if it failed, and GroupDied if
        engines did not finish it."""
        with self._changed:
            deaths, self._told = self._deaths[self._told :], len(self._deaths)
        limit = self._restarts.limit
        again = f"it may be started again {limit - self._restarts.used} of {limit} times more"
        for death in deaths:
            warnings.warn(f"{death}; others answer for it, and {again}", RuntimeWarning, stacklevel=4)
        if work.error is not None:
            raise work.error
        if not work.ended:
            text = f"all {len(self._replicas)} engines are gone, after {limit} starts again; the last: "
            raise GroupDied(self._groups[0].name, f"{text}{self._deaths[-1]}")

    def _live(self, replica: _Replica) -> None:
        """Run an engine's thread until the pool is closed, or the engine is gone for good."""

        def attempt() -> None:
            while self._next(replica):
                pass

        try:
            self._restarts.run(attempt, Lost, lambda _: self._start_again(replica))
        except Lost:
            with self._changed:
                replica.gone = True
                self._changed.notify_all()

    def _next(self, replica: _Replica) -> bool:
        """Have an engine answer its next request. Returns False once the pool is closed, and raises Lost once the
        engine is lost."""
        with self._changed:  # a function of its own, so that a waiting thread keeps no work with its large parameters
            self._changed.wait_for(lambda: self._closed or replica.lost is not None or self._wanted())
            if self._closed:
                return False
            if replica.lost is not None:
                raise replica.lost
            work = self._work
        if work is not None:
            self._serve(replica, work)
        return True

    def _wanted(self) -> bool:
        """Whether a request waits for an engine."""
        return self._work is not None and self._work.error is None and bool(self._work.todo)

    def _start_again(self, replica: _Replica) -> None:
        try:
            replica.group.start()
            replica.generate = self._make(replica.group)
        except (Exception, SystemExit) as error:
            self._lose(replica, error)
            return
        with self._changed:
            replica.lost = None

    def _serve(self, replica: _Replica, work: _RolloutWork) -> None:
        """Have the engine answer the next request of `work`; weights that it lacks are sent first."""
        number = None
        try:
            if not replica.holds(work.params, work.ask.version):
                self._bring(replica, work)
            with self._changed:
                if replica.lost is not None or work is not self._work or not self._wanted():
                    return
                number = work.todo.popleft()
            answer = self._answer(replica, work, work.requests[number])
            if work is self._work:
                with work.reporting:
                    _report(answer, work.requests[number], work.ask)
            with self._changed:
                work.done[number] = answer
                self._changed.notify_all()
        except (Exception, SystemExit) as error:
            died = isinstance(error, EngineDied) or (isinstance(error, GroupDied) and error.group == replica.group.name)
            with self._changed:
                if not died:
                    work.error = error
                elif number is not None:
                    work.todo.appendleft(number)
                self._changed.notify_all()
            if died:
                self._lose(replica, error)

    def _bring(self, replica: _Replica, work: _RolloutWork) -> None:
        """Send the weights of the current rollout to a restarted engine; the rollout does not end meanwhile."""
        with self._changed:
            if work is not self._work:
                return
            self._sending += 1
        try:
            self._send([replica], work.params, work.ask.version)
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def _send(self, replicas: Sequence[_Replica], params: Params, version: int) -> None:
        """Send the weights to the engines that lack them. Engines that die meanwhile are taken out."""
        stale = {replica.group.name: replica for replica in replicas if not replica.holds(params, version)}
        for replica in stale.values():
            replica.params = replica.origin = None  # frees their memory
        there: dict[str, dict[str, Any]] = {name: {} for name in stale}
        for bucket in self._policy.buckets(params) if stale else ():
            taken = at_once({name: partial(self._take, stale[name], bucket) for name in there})
            there = {name: there[name] | handles for name, handles in taken.items() if handles is not None}
        for name, handles in there.items():
            sync.compare_names(self._names, handles)
            stale[name].params, stale[name].origin = handles, CopyOrigin.of(params, version)

    def _take(self, replica: _Replica, bucket: Bucket) -> dict[str, Any] | None:
        """Handles of the tensors on the engine, which has confirmed them; None if it has died."""
        sent = (_taken, bucket.tensors, bucket.method)
        try:
            weights, digests = replica.group.call(*sent, stays=(0,), label="take weights", on_host=self._on_host)
        except GroupDied as error:
            self._lose(replica, error)
            return None
        sync.compare(bucket.digests, digests)
        return weights

    def _answer(self, replica: _Replica, work: _RolloutWork, prompts: Sequence[int]) -> Rollout:
        assert replica.params is not None
        ask = work.ask
        part = attrs.evolve(
            ask,
            prompts=batches.rows(ask.prompts, prompts),
            limits=None if ask.limits is None else ask.limits[list(prompts)],
            on_finished=None,
        )
        return PlacedEngine(replica.group, replica.generate).generate(replica.params, part)

    def _lose(self, replica: _Replica, error: BaseException) -> None:
        with self._changed:
            replica.lost, replica.params, replica.origin = Lost(str(error)), None, None
            self._deaths.append(str(error))
            self._changed.notify_all()


def _requests(ask: Ask, rows: int) -> list[list[int]]:
    """The prompts of each request, at most `rows` rows together, the longest first.

    Raises ValueError for prompts and limits that no engine answers.
    """
    lengths, limits = check_prompts(ask.prompts.attention_mask.bool()), response_limits(ask)
    most = [length + limit for length, limit in zip(lengths, limits, strict=True)]
    order = sorted(range(len(most)), key=lambda prompt: -most[prompt])
    step = max(1, rows // ask.sampling.n)
    return [order[start : start + step] for start in range(0, len(order), step)]


def _report(answer: Rollout, prompts: Sequence[int], ask: Ask) -> None:
    """Call `ask.on_finished` for the rows of an answer to these prompts."""
    if ask.on_finished is None:
        return
    width, n = answer.response_mask.shape[1], ask.sampling.n
    rows = zip(answer.tokens[:, -width:], answer.response_mask, answer.finish, strict=True)
    for place, (tokens, mask, finish) in enumerate(rows):
        ask.on_finished(prompts[place // n] * n + place % n, tokens[mask].tolist(), finish)


def _joined(work: _RolloutWork, pad_token_id: int) -> Rollout:
    """Join the answers to the parts of a rollout, in the order of its rows."""
    answers, n = [work.done[number] for number in range(len(work.requests))], work.ask.sampling.n
    width = max(answer.response_mask.shape[1] for answer in answers)
    prompt = work.ask.prompts.tokens.shape[1]
    rows = batches.concat([widened(answer, prompt, width, pad_token_id) for answer in answers])
    places = [prompt * n + draw for prompts in work.requests for prompt in prompts for draw in range(n)]
    return batches.rows(rows, batches.inverse(torch.tensor(places)))
