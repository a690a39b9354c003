"""Where ranks can be had."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import torch

from fppo.fleet.gpus import Gpus
from fppo.fleet.group import Ranks
from fppo.fleet.on_ray import RayCluster
from fppo.fleet.processes import Processes
from fppo.fleet.rank import RankSpec
from fppo.fleet.sent import Sent
from fppo.fleet.shared import put


class Cluster(Protocol):
    """What has room for ranks."""

    def ranks(self, spec: RankSpec | None = None) -> Ranks:
        """The ranks that the spec describes; one on the CPU without it. Raises ValueError for ranks of one mesh that
        would share a GPU."""
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

    def ranks(self, spec: RankSpec | None = None) -> Processes:
        """Implement `Cluster.ranks`. Raises ValueError too if there are not as many GPUs left."""
        spec, own = spec or RankSpec(), list[tuple[int, ...]]()
        if spec.gpus:
            self._gpus = self._gpus or Gpus(torch.cuda.device_count())
            own = self._gpus.deal(spec.count, spec.gpus)
        return Processes(spec, gpus=own, sent=self._sent)


def cluster(name: str) -> AbstractContextManager[Cluster]:
    """The one that is called "processes", of this machine; "local", a Ray cluster that is made on it; or
    the Ray cluster at an address.

    Raises ValueError without Ray, and if there is no cluster at the address.
    """
    return ThisMachine() if name == "processes" else RayCluster(name)
