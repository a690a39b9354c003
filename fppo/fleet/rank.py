"""A rank: a process of a group. It knows no roles; it holds values and runs the functions that are sent to it."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fppo import devices, tree
from fppo._errors import no_exit
from fppo.fleet.codec import CPU, Outline, PackedTree, Run, array_of, flatten, pack, tensors_of, tree_of
from fppo.fleet.held import HERE, Apart, Here
from fppo.runtime import launch
from fppo.runtime.launch import Place
from fppo.runtime.mesh import LOCAL, Mesh, Sharding
from fppo.runtime.stores import TOKEN, listening

PATIENCE = 600.0  # seconds that a call may take
PLAIN = (bool, int, float, str, type(None))  # leaves of these types, equal on all ranks, are returned even if they stay
Stays = tuple[int, ...] | bool


@attrs.frozen
class Stayed:
    """Stand-in in a reply for part number `part` of a call's result, which stays on the rank. The caller rebuilds the
    tree from `outline`: tensors and other leaves that stay become handles, and plain values come along in `plain`."""

    part: int
    outline: Outline
    here: bytes  # for each leaf, whether it becomes a handle
    plain: list[Any]  # the other leaves, in order


@attrs.frozen
class _Own:
    """Wrapper that makes a single leaf of a mapping whose entries differ between pipeline stages."""

    entries: dict[str, Any]


@attrs.frozen
class RankRequest:
    """A call of a function on a rank: `packed` is (fn, args, kwargs), `stays` the numbers of results to keep there,
    `number` that of the call."""

    number: int
    packed: PackedTree
    stays: Stays
    label: str
    forget: tuple[tuple[int, int], ...]  # (call, part) of results without any handle left
    on_host: bool = False  # whether tensors among the arguments stay on the host
    streams: bool = False  # whether the function returns an iterator, whose items are sent one by one


@attrs.frozen
class RankReply:
    """The outcome of a call: `packed` results and their `large` tensors, or an error. Only the first rank sends
    results. Each item of a stream is a reply of its own, whose `next_reply` is a future."""

    packed: PackedTree | None
    large: list[np.ndarray]
    seconds: float
    error: bytes | None = None  # a pickled exception
    trace: str = ""
    has_next: bool = False  # whether another reply follows
    next_reply: Future[RankReply] | None = None

    def linked(self, large: list[np.ndarray]) -> RankReply:
        """Copy the reply with its `large` tensors and, if another reply follows, a new future for it in
        `next_reply`."""
        return attrs.evolve(self, large=large, next_reply=Future() if self.has_next else None)


@attrs.frozen(kw_only=True)
class RankSpec:
    """The ranks of a group: their number, their mesh, and the resources of each.

    `sizes` are the sizes of the mesh's axes, from the slowest; by default all ranks are on the shard axis. Each rank
    has this number of `gpus`, or a share of one, and sees no others; "cuda" as its `device` is the first of them.
    `virtual_stages` and `ring` are the mesh's. Raises ValueError for ranks of one mesh that would share a GPU, which
    NCCL refuses, and for `gpus` above 1 that are no whole number.
    """

    count: int = 1
    gpus: float = 0
    sizes: Mapping[str, int] = attrs.field(default=attrs.Factory(lambda own: {"shard": own.count}, takes_self=True))
    sharding: Sharding | None = None
    virtual_stages: int = 1
    ring: bool = False
    device: str = attrs.field(default=attrs.Factory(lambda own: "cuda" if own.gpus else "cpu", takes_self=True))
    threads: int = attrs.field(factory=torch.get_num_threads)  # torch's, per rank; bits depend on it
    patience: float = PATIENCE  # seconds that ranks wait for each other, at the start and in collectives

    def __attrs_post_init__(self) -> None:
        each = self.gpus
        if 0 < each < 1 and self.count > 1:
            text = f"{self.count} ranks of one mesh cannot share a GPU; give 1, or one rank"
            raise ValueError(f"gpus = {each:g}: {text}")
        if each > 1 and each != int(each):
            raise ValueError(f"gpus = {each:g}: must be whole, or less than 1")


@attrs.frozen(kw_only=True)
class Membership:
    """The place of a rank in a group: its number, and the group's spec and token."""

    rank: int
    spec: RankSpec
    token: str = ""  # prefix of the group's keys in the store


@contextlib.contextmanager
def join_mesh(member: Membership, address: tuple[str, int], device: torch.device) -> Iterator[Mesh]:
    """Open the mesh of a group of several ranks, by the same code as ranks of torchrun."""
    spec = member.spec
    os.environ |= {
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "RANK": str(member.rank),
        "WORLD_SIZE": str(spec.count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        TOKEN: member.token,
    }
    place = Place(member.rank, 0, spec.count, started=True)
    sharding, stages = spec.sharding or Sharding(), spec.virtual_stages
    joining = launch.joined(spec.sizes, place, device, timeout=spec.patience, sharding=sharding, virtual_stages=stages)
    with joining as (mesh, _, _):
        yield attrs.evolve(mesh, ring=spec.ring)


JoinMesh = Callable[[Membership, tuple[str, int], torch.device], AbstractContextManager[Mesh]]


class Rank:
    """A process of a group, with the results that it holds, its mesh and its store; `join_mesh` opens the mesh of
    several ranks."""

    def __init__(self, join_mesh: JoinMesh = join_mesh) -> None:
        self._join_mesh = join_mesh
        self._held: dict[tuple[int, int], list[Any]] = {}
        self._here = Here()
        self._looked: set[tuple[str, tuple[int, int, int] | None]] = (
            set()
        )  # functions whose first call was seen to leave its arguments unchanged
        self._open = contextlib.ExitStack()
        self._store: Any = None

    def host(self, address: str) -> int:
        """Open the store for the ranks' rendezvous, and return its port. It listens at `address` if this machine has
        it; else, as behind network address translation, at all addresses of the machine."""
        try:
            self._store = listening(address)
        except OSError:
            self._store = listening("0.0.0.0")
        return self._store.port

    def join(self, member: Membership, address: tuple[str, int]) -> None:
        """Join the group's mesh."""
        spec = member.spec
        torch.set_num_threads(spec.threads)
        device = torch.device(spec.device)
        if devices.is_accelerator(device):
            device = torch.device(device.type, 0)
            torch.accelerator.set_device_index(device)
        mesh = LOCAL if spec.count == 1 else self._open.enter_context(self._join_mesh(member, address, device))
        self._here = Here(mesh, device, member.rank)

    def run(self, request: RankRequest, large: list[np.ndarray]) -> RankReply:
        """Run a call, whose `large` tensors are arrays, and return its reply. An error of the function becomes a reply
        too."""
        for key in request.forget:
            self._held.pop(key, None)
        start = time.perf_counter()
        try:
            with no_exit():
                value = self._result(request, large)
            if devices.is_accelerator(self._here.device):
                torch.accelerator.synchronize(self._here.device)  # otherwise only the launch of GPU work would be timed
            seconds = time.perf_counter() - start
            value = self._kept(request, value)
            if self._here.rank:
                return RankReply(None, [], seconds)
            return _reply(value, seconds)
        except Exception as error:
            return _failure(error, start)

    def stream(self, request: RankRequest, large: list[np.ndarray]) -> Iterator[RankReply]:
        """Run a call that returns an iterator, with `large` as in `run`: yield a reply for each item, and a last
        one."""
        start = time.perf_counter()
        try:
            with no_exit():
                for item in self._result(request, large):
                    yield attrs.evolve(_reply(item, time.perf_counter() - start), has_next=True)
            yield _reply(None, time.perf_counter() - start)
        except Exception as error:
            yield _failure(error, start)

    def _result(self, request: RankRequest, large: list[np.ndarray]) -> Any:
        packed, device = request.packed, CPU if request.on_host else self._here.device
        tensors = tensors_of(packed, large, device=device)
        fn, args, kwargs = tree_of(
            packed, tensors, plain=lambda x: self._here if x is HERE else x, values_of=self._values
        )
        call = (request.label, packed.first)
        if call in self._looked:
            return fn(*args, **kwargs)
        # arguments on the rank's device are copies already
        own = {id(x) for x in tensors if x.device == CPU}
        sent = [(path, x) for path, x in tree.leaves_with_paths((args, kwargs)) if id(x) in own]
        before = [tree.digest(x) for _, x in sent]
        value = fn(*args, **kwargs)
        for (path, x), digest in zip(sent, before, strict=True):
            if not isinstance(x, tree.Donated) and tree.digest(x) != digest:
                raise ValueError(
                    f"{request.label} has written into its argument {path}, which other stages read as well: "
                    "let it make a new tensor"
                )
        self._looked.add(call)
        return value

    def _values(self, runs: Iterable[Run]) -> Iterator[Any]:
        """Yield the values kept on this rank for runs of handles (`codec.Run`), in order."""
        for call, part, leaves in runs:
            own = self._held[call, part]
            yield from (own[leaf] for leaf in leaves)

    def _kept(self, request: RankRequest, value: Any) -> Any:
        """Keep those parts of a call's result `value` that the request wants to stay here, and return `value` with a
        `Stayed` in the place of each. Raises ValueError for a part that the result does not have."""
        if not request.stays:
            return value
        whole = self._apart(value)
        parts, spec = pytree.tree_flatten(value, is_leaf=lambda x: whole or x is not value)
        wanted = range(len(parts)) if request.stays is True else request.stays
        if max(wanted, default=-1) >= len(parts):
            raise ValueError(
                f"{request.label} returned {len(parts)} results: there is no result {max(wanted)} to keep on the ranks"
            )
        return pytree.tree_unflatten(
            [self._keep(request.number, i, x) if i in wanted else x for i, x in enumerate(parts)], spec
        )

    def _keep(self, call: int, part: int, value: Any) -> Stayed:
        if self._here.mesh["pipeline"].size > 1:
            value = pytree.tree_map(lambda x: Apart({"": _Own(x)}) if self._apart(x) else x, value, is_leaf=self._apart)
        outline, leaves = flatten(value)
        types = list(map(type, leaves))
        stays = {kind: not issubclass(kind, PLAIN) for kind in set(types)}
        here = bytes(map(stays.__getitem__, types))
        held = list(compress(leaves, here))
        self._held[call, part] = [x.entries if isinstance(x, _Own) else x for x in held]
        return Stayed(part, outline, here, plain=[x for x, stay in zip(leaves, here, strict=True) if not stay])

    def _apart(self, x: Any) -> bool:
        """Whether a value is a mapping whose entries differ between pipeline stages: on a pipeline axis, any dict of
        tensors, like parameters by name."""
        if not isinstance(x, dict) or self._here.mesh["pipeline"].size == 1:
            return False
        return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(x))


def _reply(value: Any, seconds: float) -> RankReply:
    packed, tensors = pack(value)
    return RankReply(packed, [array_of(x) for x in tensors], seconds)


def _failure(error: Exception, start: float) -> RankReply:
    return RankReply(None, [], time.perf_counter() - start, _pickled(error), traceback.format_exc())


def _pickled(error: Exception) -> bytes:
    """Pickle an error; one that does not pickle becomes a RuntimeError with its text."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
