"""Where ranks can be had."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from fppo.fleet.group import PATIENCE, Ranks
from fppo.fleet.on_ray import RayCluster
from fppo.fleet.processes import Processes
from fppo.runtime.mesh import Sharding


class Cluster(Protocol):
    """What has room for ranks."""

    def ranks(
        self,
        count: int = 1,
        *,
        gpus: float = 0,
        sizes: Mapping[str, int] | None = None,
        sharding: Sharding | None = None,
        threads: int | None = None,
        patience: float = PATIENCE,
    ) -> Ranks:
        """So many ranks of a mesh, with so many GPUs each. `sizes` are those of the mesh's axes; without them all ranks
        stand on the shard axis. Each has as many `threads` as this process, unless it is said."""
        ...


class Machine:
    """This machine, whose processes have no GPUs of their own."""

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def ranks(
        self,
        count: int = 1,
        *,
        gpus: float = 0,
        sizes: Mapping[str, int] | None = None,
        sharding: Sharding | None = None,
        threads: int | None = None,
        patience: float = PATIENCE,
    ) -> Processes:
        """As `Cluster` has it. Raises ValueError for GPUs."""
        if gpus:
            raise ValueError(f"gpus = {gpus:g}: plain processes share all GPUs; ranks with their own are had from Ray")
        return Processes(count, sizes=sizes, sharding=sharding, threads=threads, patience=patience)


def cluster(name: str) -> AbstractContextManager[Cluster]:
    """The one that is called "processes", of this machine; "local", a Ray cluster that is made on it; or
    the Ray cluster at an address.

    Raises ValueError without Ray, and if there is no cluster at the address.
    """
    return Machine() if name == "processes" else RayCluster(name)
