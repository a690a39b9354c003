"""Sampling for the tinker protocol: samples are drawn by the engines that hold their weights.

Adapters of one base run side by side in the base's engine, if they can. Other weights have an engine each, which is
opened when they are first sampled from, and closed to make room for others once it is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import attrs

from fppo.models.several import Adapter
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.requests import FinishedRequest, Request
from fppo.serve.loop import EngineLoop, Event, ServerStopped, refusal_of
from fppo.serve.refusal import Refusal
from fppo.serve.tinker.encode import sample_payload
from fppo.serve.tinker.futures import FailedRequest, Outcome
from fppo.serve.tinker.samples import SampleWork
from fppo.serve.tinker.snapshots import SampledWeights

Recorded = Callable[[SampleWork, Sequence[FinishedRequest]], None]  # by the names of the rows


@attrs.define(eq=False)
class _OpenEngine:
    """An open engine, with the versions of its adapters, and the number of open requests of each."""

    loop: EngineLoop
    adapters: OrderedDict[str, int] = attrs.field(factory=OrderedDict)
    open: dict[str | None, int] = attrs.field(factory=dict)

    @property
    def busy(self) -> bool:
        """Whether a request is open."""
        return any(self.open.values())


@attrs.define(eq=False)
class _Open:
    """Samples of a prompt that are being drawn."""

    engine: _OpenEngine
    adapter: str | None
    names: list[str]
    ended: asyncio.Future[list[FinishedRequest]]
    finished: dict[str, FinishedRequest] = attrs.field(factory=dict)


class SamplerEngines:
    """The engines of a server's bases and of weights trained over them. One event loop calls.

    `loops` are the bases' open engines; `engines`, by base, open others with other weights. At most `max_engines`
    engines of other weights are kept open, and at most `max_adapters` over each base, besides those in use.
    """

    def __init__(
        self,
        loops: Mapping[str, EngineLoop],
        engines: Mapping[str, EmbeddedEngine],
        *,
        max_engines: int = 2,
        max_adapters: int = 32,
    ) -> None:
        self._bases = {name: _OpenEngine(loop) for name, loop in loops.items()}
        self._engines, self._most, self._most_adapters = engines, max_engines, max_adapters
        self._own: OrderedDict[str, _OpenEngine] = OrderedDict()
        self._alone: set[str] = set()  # weights that do not run beside others
        self._lock = asyncio.Lock()  # held while an engine is opened, or gets an adapter
        self._open: dict[str, _Open] = {}

    async def sample(
        self, name: str, work: SampleWork, weights: SampledWeights | str, *, owner: str, record: Recorded
    ) -> Outcome:
        """Draw samples from some weights, or from the base of this name. Errors are outcomes.

        Places go to owners in turn. If `work.record` is set, `record` is called with the work and its draws.
        """
        try:
            engine, adapter = await self._engine_of(weights)
            requests = work.requests(name, adapter=adapter, owner=owner)
            finished = await self._draw(name, engine, adapter, requests)
            if work.record:
                record(work, finished)
            return sample_payload(finished, work)
        except asyncio.CancelledError:
            self.cancel(name)
            raise
        except Exception as error:  # the engine's, or of weights that it does not run
            refusal = error if isinstance(error, Refusal) else refusal_of(error)
            return FailedRequest(refusal.message[:2000], "user" if refusal.status < 429 else "server")

    def cancel(self, name: str) -> None:
        """End the drawing of samples; whoever waits for them gets an error."""
        held = self._open.get(name)
        if held is not None and not held.ended.done():
            held.ended.set_exception(Refusal("the request was cancelled"))

    async def _draw(
        self, name: str, engine: _OpenEngine, adapter: str | None, requests: Sequence[Request]
    ) -> list[FinishedRequest]:
        ended: asyncio.Future[list[FinishedRequest]] = asyncio.get_running_loop().create_future()
        held = self._open[name] = _Open(engine, adapter, [request.name for request in requests], ended)
        engine.open[adapter] = engine.open.get(adapter, 0) + 1
        try:
            for request in requests:
                engine.loop.submit(request, self._receiver(held, request.name), along=False)
            return await ended
        finally:
            del self._open[name]
            engine.open[adapter] -= 1
            for each in set(held.names) - held.finished.keys():
                engine.loop.cancel(each)

    @staticmethod
    def _receiver(held: _Open, name: str) -> Callable[[Event], None]:
        def receive(event: Event) -> None:
            if held.ended.done():
                return
            if isinstance(event, Exception):
                held.ended.set_exception(event)
            elif isinstance(event, FinishedRequest):
                held.finished[name] = event
                if len(held.finished) == len(held.names):
                    held.ended.set_result([held.finished[each] for each in held.names])

        return receive

    async def _engine_of(self, weights: SampledWeights | str) -> tuple[_OpenEngine, str | None]:
        """The engine for some weights, and the name of its adapter; None if they are the engine's own weights."""
        if isinstance(weights, str):
            return self._bases[weights], None
        async with self._lock:
            if weights.model.frozen is not None and weights.name not in self._alone:
                engine = self._bases[weights.base]
                if await self._beside(engine, weights):
                    return engine, weights.name
                self._alone.add(weights.name)
            return await self._alone_engine(weights), None

    async def _beside(self, engine: _OpenEngine, weights: SampledWeights) -> bool:
        """Give a base's engine an adapter; False if the adapter cannot run beside others."""
        if engine.adapters.get(weights.name) != weights.version:
            adapter = Adapter.of(weights.model, weights.params)
            try:
                await asyncio.wrap_future(engine.loop.put(weights.name, adapter, weights.version))
            except ValueError:
                return False
            engine.adapters[weights.name] = weights.version
        engine.adapters.move_to_end(weights.name)
        idle = [name for name in engine.adapters if not engine.open.get(name) and name != weights.name]
        for name in idle[: max(0, len(engine.adapters) - self._most_adapters)]:
            await self._drop(engine, name)
        return True

    @staticmethod
    async def _drop(engine: _OpenEngine, name: str) -> None:
        """Have an engine forget an idle adapter."""
        del engine.adapters[name]
        engine.open.pop(name, None)
        await asyncio.wrap_future(engine.loop.drop(name))

    async def _alone_engine(self, weights: SampledWeights) -> _OpenEngine:
        held = self._own.get(weights.name)
        if held is None:
            engine = attrs.evolve(self._engines[weights.base], model=weights.model)
            loop = EngineLoop(engine, weights.params, version=weights.version)
            await asyncio.to_thread(loop.start)
            held = self._own[weights.name] = _OpenEngine(loop)
        elif held.loop.version != weights.version:
            held.loop.update(weights.params, weights.version)
            held.loop.version = weights.version
        self._own.move_to_end(weights.name)
        idle = [name for name, each in self._own.items() if not each.busy and name != weights.name]
        for name in idle[: max(0, len(self._own) - self._most)]:
            await asyncio.to_thread(self._own.pop(name).loop.stop)
        return held

    async def forget(self, names: Sequence[str]) -> None:
        """Drop weights that nobody needs any more. Weights with open requests stay, and make room for others later."""
        async with self._lock:
            for name in names:
                self._alone.discard(name)
                if name in self._own and not self._own[name].busy:
                    await asyncio.to_thread(self._own.pop(name).loop.stop)
                for engine in self._bases.values():
                    if name in engine.adapters and not engine.open.get(name):
                        with contextlib.suppress(ServerStopped):
                            await self._drop(engine, name)

    def close(self) -> None:
        """Close the engines of all weights but the bases'."""
        for held in self._own.values():
            with contextlib.suppress(RuntimeError):
                held.loop.stop()
