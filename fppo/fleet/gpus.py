"""The GPUs of one machine, and who has how much of each."""

from __future__ import annotations

import math

_LEAST = 1e-6  # of a GPU: three thirds are one


class Gpus:
    """So many GPUs, which are dealt out from the first on."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = [1.0] * count

    def deal(self, ranks: int, each: float) -> list[tuple[int, ...]]:
        """The GPUs of each rank: so many of its own, or a share of one. Raises ValueError if there are too few."""
        check(ranks, each)
        free, dealt = list(self._free), list[tuple[int, ...]]()
        need, share = math.ceil(each), each if each < 1 else 1.0
        for _ in range(ranks):
            own = [gpu for gpu, left in enumerate(free) if left >= share - _LEAST][:need]
            if len(own) < need:
                left = ", ".join(f"{x:g} of GPU {gpu}" for gpu, x in enumerate(self._free) if x > _LEAST)
                text = f"{ranks} ranks want {each:g} GPUs each, and of the {self.count} here there is free: "
                raise ValueError(f"{text}{left or 'nothing'}; give fewer ranks, or less of a GPU")
            for gpu in own:
                free[gpu] -= share
            dealt.append(tuple(own))
        self._free = free
        return dealt


def check(ranks: int, each: float) -> None:
    """Raises ValueError for ranks of one mesh that would share a GPU, which NCCL refuses, and for part of a second."""
    if 0 < each < 1 and ranks > 1:
        raise ValueError(f"gpus = {each:g}: {ranks} ranks of one mesh cannot share a GPU; give 1, or one rank")
    if each > 1 and each != int(each):
        raise ValueError(f"gpus = {each:g}: must be whole, or less than 1")
