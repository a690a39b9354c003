"""Clusters, which start ranks: this machine, or a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import torch

from fppo.fleet.codec import Sent
from fppo.fleet.group import Ranks
from fppo.fleet.on_ray import RayCluster
from fppo.fleet.processes import Processes
from fppo.fleet.rank import RankSpec
from fppo.fleet.shared import put


class Cluster(Protocol):
    """Protocol of clusters: they start ranks."""

    def ranks(self, spec: RankSpec | None = None) -> Ranks:
        """Ranks as `spec` describes them, not started yet; without `spec` a single rank on the CPU."""
        ...


class ThisMachine:
    """This machine. Ranks get the GPUs that this process sees, in order."""

    def __init__(self) -> None:
        self._gpus: Gpus | None = None  # None until the first use
        self._sent = Sent(put)

    def __enter__(self) -> ThisMachine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def ranks(self, spec: RankSpec | None = None) -> Processes:
        """Ranks of this machine, not started yet. Raises ValueError if too few GPUs are left."""
        spec, own = spec or RankSpec(), list[tuple[int, ...]]()
        if spec.gpus:
            self._gpus = self._gpus or Gpus(torch.cuda.device_count())
            own = self._gpus.deal(spec.count, spec.gpus)
        return Processes(spec, gpus=own, sent=self._sent)


def cluster(name: str) -> AbstractContextManager[Cluster]:
    """Open a cluster by name: "processes" is this machine, "local" a new Ray cluster on it; any other name is the
    address of a Ray cluster.

    Raises ValueError if Ray is missing, and if there is no cluster at the address.
    """
    return ThisMachine() if name == "processes" else RayCluster(name)


OpenCluster = Callable[[str], AbstractContextManager[Cluster]]

_LEAST = 1e-6  # tolerance in shares of a GPU: three thirds are one


class Gpus:
    """The GPUs of a machine, `count` in number, assigned to ranks in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = [1.0] * count

    def deal(self, ranks: int, per_rank: float) -> list[tuple[int, ...]]:
        """Assign GPUs to ranks, `per_rank` per rank, or a share of one. Raises ValueError if there are too few."""
        free, dealt = list(self._free), list[tuple[int, ...]]()
        need, share = math.ceil(per_rank), per_rank if per_rank < 1 else 1.0
        for _ in range(ranks):
            own = [gpu for gpu, left in enumerate(free) if left >= share - _LEAST][:need]
            if len(own) < need:
                left = ", ".join(f"{x:g} of GPU {gpu}" for gpu, x in enumerate(self._free) if x > _LEAST)
                text = f"{ranks} ranks need {per_rank:g} GPUs each; free of the {self.count} here: "
                raise ValueError(f"{text}{left or 'nothing'}; give fewer ranks, or less of a GPU")
            for gpu in own:
                free[gpu] -= share
            dealt.append(tuple(own))
        self._free = free
        return dealt
