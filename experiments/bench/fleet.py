"""What calls to a group of ranks cost, and what bytes cost on the way: medians in ms."""

import statistics
import time
from collections.abc import Callable

import torch
import tyro

from fppo import metrics
from fppo.fleet import Group, cluster


def nothing(x: object) -> None:
    del x


def back(x: object) -> object:
    return x


def timed(fn: Callable[[], object], count: int) -> float:
    took: list[float] = []
    for _ in range(count):
        start = time.perf_counter()
        fn()
        took.append(time.perf_counter() - start)
    return 1e3 * statistics.median(took[count // 5 :])


def main(place: str = "processes", mib: int = 64, count: int = 100) -> None:
    """The place is `processes`, `local` or the address of a Ray cluster."""
    report = {f"metric/{i}": metrics.mean(float(i)) for i in range(80)}
    columns = {str(i): torch.randn(512, 10) for i in range(10)}
    large = [torch.randn(mib << 18) for _ in range(5)]
    with cluster(place) as there, Group("one", there.ranks(threads=1)) as one:
        one.call(nothing, large[0], label="another")  # sees once that it leaves its argument as it is
        rows = {
            "a call": timed(lambda: one.call(nothing, 1), count),
            "80 metrics back": timed(lambda: one.call(back, report), count),
            "10 columns of 20 KiB there": timed(lambda: one.call(nothing, columns), count),
            f"{mib} MiB there": timed(lambda: one.call(nothing, large.pop() if len(large) > 1 else large[0]), 4),
            f"{mib} MiB there again": timed(lambda: one.call(nothing, large[0]), 10),
            f"{mib} MiB copied here": timed(lambda: large[0].clone(), 10),
        }
    for name, ms in rows.items():
        print(f"{name:<28}{ms:9.2f}")


if __name__ == "__main__":
    tyro.cli(main)
