"""Where ranks can be had."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import torch

from fppo.fleet.gpus import Gpus
from fppo.fleet.group import PATIENCE, Ranks
from fppo.fleet.on_ray import RayCluster
from fppo.fleet.processes import Processes
from fppo.fleet.sent import Sent
from fppo.fleet.shared import put
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
        virtual_stages: int = 1,
        ring: bool = False,
        threads: int | None = None,
        patience: float = PATIENCE,
    ) -> Ranks:
        """So many ranks of a mesh, with so many GPUs each, or each a share of one. `sizes` are those of the mesh's
        axes; without them all ranks stand on the shard axis. Each has as many `threads` as this process, unless it is
        said. Raises ValueError for ranks of one mesh that would share a GPU."""
        ...


class ThisMachine:
    """This machine. Its GPUs, as far as this process sees them, are dealt out from the first on."""

    def __init__(self) -> None:
        self._gpus: Gpus | None = None  # until they are asked for
        self._sent = Sent(put)

    def __enter__(self) -> ThisMachine:
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
        virtual_stages: int = 1,
        ring: bool = False,
        threads: int | None = None,
        patience: float = PATIENCE,
    ) -> Processes:
        """Start ranks, as `Cluster.ranks`. Raises ValueError too if there are not as many GPUs left."""
        own: list[tuple[int, ...]] = []
        if gpus:
            self._gpus = self._gpus or Gpus(torch.cuda.device_count())
            own = self._gpus.deal(count, gpus)
        return Processes(
            count,
            gpus=own,
            sizes=sizes,
            sharding=sharding,
            virtual_stages=virtual_stages,
            ring=ring,
            threads=threads,
            patience=patience,
            sent=self._sent,
        )


def cluster(name: str) -> AbstractContextManager[Cluster]:
    """The one that is called "processes", of this machine; "local", a Ray cluster that is made on it; or
    the Ray cluster at an address.

    Raises ValueError without Ray, and if there is no cluster at the address.
    """
    return ThisMachine() if name == "processes" else RayCluster(name)
