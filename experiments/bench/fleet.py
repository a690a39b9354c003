"""What calls to a group of ranks cost the controller and a rank, and what bytes cost on the way: medians in ms.

    python experiments/bench/fleet.py
    python experiments/bench/fleet.py --place local          # a Ray cluster that is made here

Time of the processors, which other programs on the machine change less, beside that of the clock. With Ray the
controller's is that of this process alone: Ray's own processes move the bytes.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import tyro

from fppo import metrics
from fppo.fleet import Group, RankSpec, cluster
from fppo.metrics import Metrics
from fppo.tree import state

METRICS, COLUMNS, ROWS = 80, 20, 512


@state
class State:
    """What an update takes and gives."""

    params: dict[str, torch.Tensor]
    mean: dict[str, torch.Tensor]
    square: dict[str, torch.Tensor]
    step: int


class Cost(NamedTuple):
    """Milliseconds of a call."""

    controller: float
    rank: float
    clock: float


def nothing(x: object) -> None:
    del x


def back(x: object) -> object:
    return x


def fresh(mib: int) -> torch.Tensor:
    return torch.ones(mib << 18)


def cpu() -> float:
    return time.process_time()


def state_of(leaves: int) -> State:
    def tensors() -> dict[str, torch.Tensor]:
        return {f"model.layers.{i // 12}.self_attn.{i % 12}.weight": torch.zeros(4) for i in range(leaves)}

    return State(params=tensors(), mean=tensors(), square=tensors(), step=0)


@functools.cache
def report() -> Metrics:
    return {f"actor/metric/{i}": metrics.mean(float(i), 2.0) for i in range(METRICS)}


def update(state: State, batch: dict[str, torch.Tensor]) -> tuple[State, Metrics]:
    """An update, but for its work."""
    del batch
    return state, report()


def cost(one: Group, fn: Callable[[], object], count: int) -> Cost:
    """The means of so many calls."""
    fn()
    there, here, clock = one.call(cpu), time.process_time(), time.perf_counter()
    for _ in range(count):
        fn()
    here, clock = time.process_time() - here, time.perf_counter() - clock
    there = one.call(cpu) - there
    return Cost(*(1e3 * seconds / count for seconds in (here, there, clock)))


def main(place: str = "processes", mib: int = 64, leaves: tuple[int, ...] = (24, 400), rounds: int = 7) -> None:
    """The place is `processes`, `local` or the address of a Ray cluster; `leaves` are the numbers of parameters of a
    state that is updated, which holds three times as many tensors."""
    columns = {str(i): torch.randn(ROWS, 8) for i in range(COLUMNS)}
    large = torch.randn(mib << 18)
    with cluster(place) as there, Group("one", there.ranks(RankSpec(threads=1))) as one:

        def updated(state: State) -> Callable[[], object]:
            held = one.call(back, state, stays=True)

            def step() -> None:
                nonlocal held
                held, _ = one.call(update, held, columns, stays=(0,))

            return step

        work: dict[str, tuple[Callable[[], object], int]] = {
            "a call": (lambda: one.call(nothing, 1), 50),
            f"{METRICS} metrics there and back": (lambda: one.call(back, report()), 20),
            f"{COLUMNS} columns of 16 KiB there": (lambda: one.call(nothing, columns), 20),
            **{f"an update of {n} parameters": (updated(state_of(n)), 20) for n in leaves},
            f"{mib} MiB there": (lambda: one.call(nothing, large.detach()), 2),
            f"{mib} MiB there again": (lambda: one.call(nothing, large), 2),
            f"{mib} MiB back": (lambda: one.call(fresh, mib), 2),
        }
        costs: dict[str, list[Cost]] = {name: [] for name in work}
        for _ in range(rounds):  # in turn, for the machine may be busier at one time than at another
            for name, (fn, count) in work.items():
                costs[name].append(cost(one, fn, count))
        copying = [cost(one, large.clone, 2).controller for _ in range(rounds)]
    print(f"torch {torch.__version__}, {place}: medians of {rounds}, in ms\n")
    print(f"{'':<32}{'controller':>12}{'rank':>9}{'clock':>9}")
    for name, found in costs.items():
        medians = [statistics.median(each) for each in zip(*found, strict=True)]
        print(f"{name:<32}{medians[0]:>12.2f}{medians[1]:>9.2f}{medians[2]:>9.2f}")
    print(f"{f'{mib} MiB copied here':<32}{statistics.median(copying):>12.2f}")


if __name__ == "__main__":
    tyro.cli(main)
