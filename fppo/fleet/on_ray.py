"""Ranks as actors of a Ray cluster."""

# pyright: reportMissingImports=false
from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from fppo.fleet.codec import Sent
from fppo.fleet.group import RankLost
from fppo.fleet.rank import Membership, Rank, RankReply, RankRequest, RankSpec
from fppo.runtime.parent import module_path
from fppo.runtime.stores import new_token

_REACHED = 10.0  # seconds to wait for an answer at an address
_PAUSE = 0.5  # seconds between two attempts to start, while the cluster has not noticed the loss of a node


def joined(address: str, *, show_output: bool = True) -> tuple[Any, bool]:
    """Join the Ray cluster at an address; return the module ray, and whether this call has joined.

    "local" is a new cluster on this machine; a process that has joined a cluster already stays in it. `show_output`:
    the output of Ray's workers is printed here, too. Raises ValueError without Ray, if there is no cluster at the
    address, and if this process is in another one.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError("Ray is not installed: pip install 'fppo[ray]'")
    import ray

    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in ("local", there):
            raise ValueError(f"this process is in the Ray cluster at {there} already, not in that at {address!r}")
        return ray, False
    own: Any = {"include_dashboard": False} if address == "local" else {}
    if address != "local":
        _check_reached(address)
    ray.init(address=address, configure_logging=False, log_to_driver=show_output, **own)
    return ray, True


class RayCluster:
    """A context in a Ray cluster: a new one on this machine ("local"), or the one at an address. A process that has
    joined a cluster already stays in it. The address is never guessed.

    `make_rank` makes the `Rank` of each actor. Raises ValueError without Ray, and if there is no cluster at the
    address.
    """

    def __init__(self, address: str, *, make_rank: Callable[[], Rank] = Rank) -> None:
        self._make_rank = make_rank
        self._ray, self._joins = joined(address)
        self._sent: Sent[Any] = Sent(lambda arrays: [self._ray.put(x) for x in arrays])
        self._fixed = address == "local"  # such a cluster gets no further nodes

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self._joins:
            self._ray.shutdown()

    def ranks(self, spec: RankSpec | None = None) -> RayRanks:
        """Ranks with a CPU each, placed near each other, not started yet."""
        return RayRanks(self._ray, self._sent, spec or RankSpec(), fixed=self._fixed, make_rank=self._make_rank)


class RayRanks:
    """The ranks of a mesh as Ray actors, which end with the process that started them."""

    def __init__(
        self, ray: Any, sent: Sent[Any], spec: RankSpec, *, fixed: bool, make_rank: Callable[[], Rank]
    ) -> None:
        self.count, self._fixed, self._make_rank = spec.count, fixed, make_rank
        self._ray, self._sent, self._spec = ray, sent, spec
        self._resources = {"CPU": 1.0, **({"GPU": spec.gpus} if spec.gpus else {})}
        self._room: Any = None
        self._actors: list[Any] = []

    def start(self) -> Sequence[str]:
        """Start the actors. Raises RankLost if the cluster has no room for them within the group's patience.

        Each attempt makes a new reservation: one on a dead node stays "ready" until the cluster notices the loss, and
        actors that are placed there end at once.
        """
        deadline = time.monotonic() + self._spec.patience
        while True:
            self._await_room(deadline)
            try:
                return self._started()
            except self._ray.exceptions.RayError as error:
                self.stop()
                again = isinstance(error, self._ray.exceptions.RayActorError) and time.monotonic() < deadline
                if not again:
                    raise RankLost(f"its ranks end as they begin: {_line(error)}", again=False) from error
                time.sleep(_PAUSE)

    def _await_room(self, deadline: float) -> None:
        from ray.util.placement_group import placement_group

        self._room = placement_group([self._resources] * self.count, strategy="PACK")
        every = self._ray.cluster_resources()
        never = self._fixed and any(every.get(name, 0.0) < x * self.count for name, x in self._resources.items())
        if never or not self._room.wait(max(deadline - time.monotonic(), 1.0)):
            free = self._ray.available_resources()
            each = [f"{free.get(name, 0.0):g} of {every.get(name, 0.0):g} {name}" for name in self._resources]
            wanted = ", ".join(f"{x:g} {name}" for name, x in self._resources.items())
            self.stop()
            text = f"{self.count} ranks need {wanted} each, and the cluster has {', '.join(each)} free"
            raise RankLost(text, again=False)

    def _started(self) -> list[str]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        variables = {"PYTHONPATH": os.pathsep.join(module_path()), "OMP_NUM_THREADS": str(self._spec.threads)}
        actors = [
            self._ray.remote(_Actor)
            .options(
                num_cpus=1,
                num_gpus=self._resources.get("GPU", 0),
                runtime_env={"env_vars": variables},
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=i),
            )
            .remote(self._make_rank)
            for i in range(self.count)
        ]
        self._actors = actors
        limit = self._spec.patience
        places = self._ray.get([actor.where.remote() for actor in actors], timeout=limit)
        # Ray orders bundles arbitrarily; neighbours in the mesh should be on neighbouring machines
        order = sorted(range(self.count), key=lambda i: (*places[i][:3], i))
        self._actors = [actors[i] for i in order]
        address = self._ray.get(self._actors[0].host.remote(), timeout=limit)
        token = new_token()
        members = [Membership(rank=i, spec=self._spec, token=token) for i in range(self.count)]
        joining = [actor.join.remote(own, address) for actor, own in zip(self._actors, members, strict=True)]
        self._ray.get(joining, timeout=limit)
        return [f"process {places[i][3]} on node {places[i][0]} {places[i][1][:8]}" for i in order]

    def send(self, request: RankRequest, large: Sequence[Tensor]) -> list[Future[RankReply]]:
        """Send a call to every actor, after earlier calls; Ray names the task by the request's label."""
        shared = self._ray.put(request) if self.count > 1 else request
        columns = self._sent.refs(large) or []
        if request.streams:
            how = {"name": request.label, "num_returns": "streaming"}
            return [self._stream(x.stream.options(**how).remote(shared, *columns)) for x in self._actors]
        return [self._answer(x.run.options(name=request.label).remote(shared, *columns)) for x in self._actors]

    def _stream(self, refs: Any) -> Future[RankReply]:
        """Return the future of a stream's first reply; each reply holds the future of the next."""
        first: Future[RankReply] = Future()

        def listen(future: Future[RankReply]) -> None:
            try:
                for ref in refs:
                    reply = self._ray.get(ref)
                    future.set_result(answer := reply.linked(reply.large))
                    if answer.next_reply is None:
                        return
                    future = answer.next_reply
                raise RankLost("its replies ended before the call did")
            except Exception as error:
                future.set_exception(self._lost(error))

        threading.Thread(target=listen, args=(first,), daemon=True).start()
        return first

    def _answer(self, ref: Any) -> Future[RankReply]:
        answer: Future[RankReply] = Future()

        def arrived(future: Future[RankReply]) -> None:
            error = future.exception()
            if error is None:
                answer.set_result(future.result())
            else:
                answer.set_exception(self._lost(error))

        ref.future().add_done_callback(arrived)
        return answer

    def _lost(self, error: BaseException) -> BaseException:
        return RankLost(_line(error)) if isinstance(error, self._ray.exceptions.RayError) else error

    def stop(self) -> None:
        """Kill all actors, whatever they are doing."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._room is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._room)
        self._actors, self._room = [], None


class _Actor:
    """A `Rank` in a Ray actor."""

    def __init__(self, make_rank: Callable[[], Rank]) -> None:
        self._rank = make_rank()

    def where(self) -> tuple[str, str, str, int]:
        """The node's address and id, its accelerators, and this process's id."""
        import ray

        context = ray.get_runtime_context()
        gpus = ",".join(map(str, context.get_accelerator_ids().get("GPU", [])))
        return ray.util.get_node_ip_address(), context.get_node_id(), gpus, os.getpid()

    def host(self) -> tuple[str, int]:
        """Open the store for the ranks' rendezvous; return its address."""
        import ray

        address = ray.util.get_node_ip_address()
        return address, self._rank.host(address)

    def join(self, member: Membership, address: tuple[str, int]) -> None:
        """Join the group's mesh as a rank."""
        self._rank.join(member, address)

    def run(self, request: RankRequest, *large: Any) -> RankReply:
        """Run a call; Ray has fetched the large tensors by their references."""
        return self._rank.run(request, list(large))

    def stream(self, request: RankRequest, *large: Any) -> Iterator[RankReply]:
        """Run a call whose items are replies of their own."""
        yield from self._rank.stream(request, list(large))


def _check_reached(address: str) -> None:
    """Raise ValueError if nothing listens at the address. Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACHED).close()
    except (OSError, ValueError) as error:
        advice = "give the HOST:PORT of one that runs, or local"
        raise ValueError(f"there is no Ray cluster at {address!r} ({error}); {advice}") from error


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
