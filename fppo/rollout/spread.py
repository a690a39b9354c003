"""Rollouts on many ranks: each does its part of the work, and all get all of the results.

All ranks hold the same prompts, keys and records, so the math between the heavy stages is that of one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs
from torch import Tensor

from fppo import batch as batches
from fppo.batch import Column, Rollout, extend, repeat
from fppo.rollout.engine import Ask, Engine
from fppo.rollout.generated import generated, opened
from fppo.rollout.records import widened
from fppo.rollout.requests import Request, RequestCounts, Requests, StepResult
from fppo.runtime.mesh import AXES, Mesh, gather_objects, place_on, ranks_on
from fppo.runtime.offload import Lane, to_device
from fppo.steps.ranks import collect, deal
from fppo_kernels.collectives import Axis

ALL = AXES


@attrs.frozen(kw_only=True)
class SpreadEngine:
    """An engine on every rank: each answers some of the prompts, and all get the whole rollout, in its usual order.

    The engine knows how parameters are sharded on the mesh; ranks of the axes `together` answer all of their prompts
    together. If its draws depend on the key and the rows alone, the rollout is that of one process.
    """

    engine: Engine
    mesh: Mesh
    pad_token_id: int
    together: tuple[str, ...] = ()

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout of all prompts, the same on every rank."""
        if ranks_on(self.mesh, ALL) == 1:
            return self.engine.generate(params, ask)
        shares = deal(len(ask.prompts.tokens), self.mesh)
        own, n = set(shares[place_on(self.mesh, ALL)]), ask.sampling.n
        # ranks without a prompt make an answer that nobody reads: engines gather parameters together
        places = merged_shares(shares, self.mesh, self.together) or [0]
        kept = [row for row in range(n * len(places)) if places[row // n] in own]

        def on_finished(row: int, response: list[int], finish: str) -> None:
            prompt = places[row // n]
            if ask.on_finished is not None and prompt in own:
                ask.on_finished(prompt * n + row % n, response, finish)

        share = attrs.evolve(
            ask,
            prompts=batches.rows(ask.prompts, places),
            limits=None if ask.limits is None else ask.limits[places],
            on_finished=on_finished if own and ask.on_finished is not None else None,
        )
        rollout = self.engine.generate(params, share)
        return self._gathered(batches.rows(rollout, kept), ask, shares)

    @contextmanager
    def open(
        self, params: Mapping[str, Tensor], *, version: int = 0, most_waiting: int | None = None
    ) -> Iterator[Requests]:
        """This rank's engine, open for requests, which it answers alone or with the ranks of its axes `together`. An
        engine without `open` answers on all ranks together."""
        how = {"version": version, "most_waiting": most_waiting}
        if hasattr(self.engine, "open"):
            opening = opened(self.engine, params, **how)
        else:
            opening = generated(self, params, **how, together=ALL if ranks_on(self.mesh, ALL) > 1 else ())
        with opening as requests:
            yield requests

    def _gathered(self, own: Rollout, ask: Ask, shares: list[list[int]]) -> Rollout:
        """Join the rows of all ranks, of which this rank has `own`, in the order of the rollout; `shares` are the
        prompts of each rank."""
        n, mine = ask.sampling.n, [own.response_mask.shape[1], [*own.finish]]
        ranks = gather_objects(mine, self.mesh, ALL, own.tokens.device)
        width = max(wide for wide, finish in ranks if finish)
        own = widened(own, ask.prompts.tokens.shape[1], width, self.pad_token_id)
        rows = [[prompt * n + j for prompt in share for j in range(n)] for share in shares]
        columns = {name: x for name, x in batches.columns(own).items() if isinstance(x, Tensor)}
        columns = {name: collect(x, rows, self.mesh, ALL) for name, x in columns.items()}
        places = [row for share in rows for row in share]
        ends = sorted(zip(places, [reason for _, reasons in ranks for reason in reasons], strict=True))
        return extend(Rollout, repeat(ask.prompts, n), finish=Column(reason for _, reason in ends), **columns)


def merged_shares(shares: Sequence[Sequence[int]], mesh: Mesh, axes: Sequence[str]) -> list[int]:
    """Merge this rank's share of the prompts with the shares of the ranks that differ from it on `axes` alone."""
    places = (range(mesh[name].size) if name in axes else [mesh[name].rank] for name in ALL)
    ranks = [
        Mesh({name: Axis(mesh[name].size, at) for name, at in zip(ALL, place, strict=True)})
        for place in itertools.product(*places)
    ]
    return sorted(number for rank in ranks for number in shares[place_on(rank, ALL)])


@attrs.frozen(kw_only=True)
class FetchingEngine:
    """An engine for parameters in host memory, which are copied to the device for each call."""

    engine: Engine
    lane: Lane

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """Copy the parameters to the device, and return the engine's rollout."""
        return self.engine.generate(to_device(dict(params), self.lane), ask)

    @contextmanager
    def open(
        self, params: Mapping[str, Tensor], *, version: int = 0, most_waiting: int | None = None
    ) -> Iterator[Requests]:
        """Open the engine for requests, with the parameters copied to the device."""
        opening = opened(self.engine, to_device(dict(params), self.lane), version=version, most_waiting=most_waiting)
        with opening as requests:
            yield FetchingRequests(requests, self.lane)


@attrs.frozen
class FetchingRequests:
    """Requests of an engine whose newer parameters come in host memory, and are copied to the device."""

    inner: Requests
    lane: Lane

    @property
    def together(self) -> tuple[str, ...]:
        """The mesh axes whose ranks must make the same calls in the same order: those of `inner`."""
        return self.inner.together

    @property
    def limit(self) -> int | None:
        """The most tokens of a row, or None: the limit of `inner`."""
        return self.inner.limit

    @property
    def counts(self) -> RequestCounts:
        """The numbers of requests of `inner` that wait, that draw, and that are kept."""
        return self.inner.counts

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests to `inner`, all of them or none; see `Requests.add` for its errors."""
        self.inner.add(requests)

    def step(self, most: int | None = None) -> StepResult:
        """Let `inner` draw one or a few tokens of each request, or up to `most`; see `Requests.step`."""
        return self.inner.step(most)

    def cancel(self, names: Sequence[str]) -> None:
        """End these requests of `inner`; its next step reports them as "cancelled"."""
        self.inner.cancel(names)

    def release(self, names: Sequence[str]) -> None:
        """Forget the contexts that `inner` keeps of these ended requests."""
        self.inner.release(names)

    def update(self, params: Mapping[str, Tensor], version: int) -> None:
        """Copy newer parameters of this version to the device, and let `inner` continue with them."""
        self.inner.update(to_device(dict(params), self.lane), version)
