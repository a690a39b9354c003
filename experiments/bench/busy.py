"""The quickstart's warm-up alone, beside one busy program and beside two, by how its threads wait for one another.

    python experiments/bench/busy.py                      # --ways spinning asleep cpp "one thread"; --rounds 5

Medians over rounds, all ways in turn in each: seconds, the processor's seconds, and the ratio to the seconds alone.
`others` are the processors that programs not of this bench kept busy meanwhile: where that is not about 0, "alone" is
not alone. A way that takes over `--limit` seconds is started again, and counts as that long. Run it without
OMP_NUM_THREADS set.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bench_tools

BESIDE = ("alone", "beside one", "beside two")
WAYS = {
    "spinning": {},  # as torch's threads wait by themselves
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},  # as in fppo's commands
    "cpp": {"OMP_WAIT_POLICY": "PASSIVE"},  # the same, with kernels in C++
    "one thread": {"OMP_NUM_THREADS": "1"},
}
TICK = os.sysconf("SC_CLK_TCK")


def serve(line: Connection, way: str) -> None:
    """Answers numbers of updates with the processor's seconds that they took, in a process of its own."""
    os.environ |= WAYS[way]  # torch is loaded below
    from fppo import models, quickstart
    from fppo.key import Key
    from fppo.steps import Forward
    from fppo_kernels.table import Kernels

    kernels = Kernels.named()
    if way == "cpp":
        inside = ("attention", "log_probs", "rms_norm", "add_rms_norm", "rotary", "glu")
        kernels = Kernels.named(**dict.fromkeys(inside, "cpp"))
    tokenizer, (train, _) = quickstart.character_tokenizer(), quickstart.sums()
    model = quickstart.small_model(len(tokenizer))
    forward, params = Forward(model, kernels), models.init_params(model, Key(0))
    with contextlib.suppress(EOFError):
        while True:
            steps, start = line.recv(), time.process_time()
            quickstart.warm_up(forward, params, train, Key(0), tokenizer=tokenizer, steps=steps)
            line.send(time.process_time() - start)


def spin() -> None:
    """Keeps a processor busy."""
    while True:
        pass


@contextlib.contextmanager
def running(context: Any, target: Any, *arguments: Any) -> Iterator[Any]:
    """A process that ends with the block."""
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


class Way:
    """A process that runs updates in one way, started when it is needed."""

    def __init__(self, context: Any, name: str) -> None:
        self.name, self._context = name, context
        self._held, self._line = contextlib.ExitStack(), None

    def run(self, steps: int, limit: float) -> float:
        """The processor's seconds of some updates; `limit` of those that do not end, whose process is gone then."""
        if self._line is None:
            self._line, other = self._context.Pipe()
            self._held.enter_context(running(self._context, serve, other, self.name))
            self.run(3, 600.0)  # what comes first takes longer
        self._line.send(steps)
        if self._line.poll(limit):
            return self._line.recv()
        self.close()
        return limit

    def close(self) -> None:
        """Ends the process."""
        self._held.close()
        self._line = None


def busy_seconds() -> float:
    """Seconds that all processors of this machine were at work since it started."""
    if not (stat := Path("/proc/stat")).exists():
        return float("nan")
    numbers = list(map(int, stat.read_text().split("\n")[0].split()[1:9]))
    return (sum(numbers) - numbers[3] - numbers[4]) / TICK


def seconds_of(process: Any) -> float:
    """The processor's seconds of a process so far."""
    if not (stat := Path(f"/proc/{process.pid}/stat")).exists():
        return float("nan")
    fields = stat.read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def measured(context: Any, way: Way, beside: int, steps: int, limit: float) -> tuple[float, float, float]:
    """Seconds of some updates beside busy programs, the processor's, and how many processors others kept busy."""
    way.run(1, limit)  # so that a process that is started again starts outside of what is measured
    with contextlib.ExitStack() as held:
        programs = [held.enter_context(running(context, spin)) for _ in range(beside)]
        time.sleep(0.3)
        before, own, start = busy_seconds(), sum(map(seconds_of, programs)), time.perf_counter()
        processor = way.run(steps, limit)
        seconds = time.perf_counter() - start
        others = busy_seconds() - before - (sum(map(seconds_of, programs)) - own) - processor
    return seconds, processor, max(0.0, others / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["spinning", "asleep"], choices=[*WAYS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ways = [Way(context, name) for name in options.ways]
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    try:
        for _ in range(options.rounds):
            for beside in range(len(BESIDE)):
                for way in ways:
                    one = measured(context, way, beside, options.updates, options.limit)
                    times.setdefault((way.name, beside), []).append(one)
    finally:
        for way in ways:
            way.close()
    print(bench_tools.header("", "seconds", "processor", "over alone", "others"))
    for name in options.ways:
        alone = statistics.median(seconds for seconds, _, _ in times[name, 0])
        for beside, label in enumerate(BESIDE):
            seconds, processor, others = map(statistics.median, zip(*times[name, beside], strict=True))
            cells = (f"{seconds:.2f}", f"{processor:.2f}", f"{seconds / alone:.2f}", f"{others:.1f}")
            print(bench_tools.row(f"{name}, {label}", *cells))


if __name__ == "__main__":
    sys.exit(main())
