"""Ranks that are threads of the test's own process, on a simulated mesh: what they are sent is pickled all the same."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from concurrent.futures import Future

import attrs

from fppo.fleet.codec import array_of
from fppo.fleet.group import RankLost
from fppo.fleet.held import Here
from fppo.fleet.rank import Rank
from fppo.runtime.mesh import Sharding
from fppo.runtime.simulate import _meshes

LOST = object()


def meshes_of(sizes):
    """The mesh of each rank, simulated among threads that nobody else starts."""
    return [attrs.evolve(mesh, sharding=Sharding()) for _, mesh in _meshes(sizes)]


class Threads:
    """`Group("actor", Threads(shard=2))`. A test may look at `ranks`, lose one of them, and see each request before it
    is sent: `on_send(threads, request)`."""

    def __init__(self, **sizes):
        self._sizes, self.on_send = sizes, None
        self.ranks, self._asked, self._worlds = [], [], []

    @property
    def count(self):
        count = 1
        for size in self._sizes.values():
            count *= size
        return count

    def start(self):
        made = _meshes(self._sizes or {"shard": 1})
        self._worlds = [world for world, _ in made]
        self.ranks = [Rank() for _ in made]
        self._asked = [queue.SimpleQueue() for _ in made]
        for number, (rank, (_, mesh)) in enumerate(zip(self.ranks, made, strict=True)):
            if self._sizes:
                rank._here = Here(attrs.evolve(mesh, sharding=Sharding()), rank=number)
            threading.Thread(target=_serve, args=(rank, self._asked[number]), daemon=True).start()
        return [f"thread {number}" for number in range(len(made))]

    def send(self, request, large):
        if self.on_send is not None:
            self.on_send(self, request)
        data = pickle.dumps((request, [array_of(x) for x in large]))
        futures = [Future() for _ in self._asked]
        for line, future in zip(self._asked, futures, strict=True):
            line.put((data, future))
            time.sleep(0.002)  # so that another thread may send meanwhile
        return futures

    def stop(self):
        for line in self._asked:
            line.put((LOST, 0.0))
        if self._worlds:
            self._worlds[0].fail(None, RuntimeError("stopped"))

    def move(self, device):
        """From now on all ranks are on this device."""
        for rank in self.ranks:
            rank._here = attrs.evolve(rank._here, device=device)

    def lose(self, rank, seen_after=0.0):
        """From now on there is nobody in this place, which shows so many seconds after each call."""
        self._asked[rank].put((LOST, seen_after))


def _serve(rank, line):
    seen_after = None
    while True:
        data, future = line.get()
        if data is LOST:
            seen_after = future
            continue
        if seen_after is not None:
            time.sleep(seen_after)
            future.set_exception(RankLost("the thread is gone"))
            continue
        request, large = pickle.loads(data)
        for reply in rank.stream(request, large) if request.streams else [rank.run(request, large)]:
            answer = pickle.loads(pickle.dumps(reply)).linked(reply.large)
            future.set_result(answer)
            future = answer.next_reply
