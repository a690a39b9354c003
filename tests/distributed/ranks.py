"""`fppo train` on several real processes, which come from a server that has imported everything and run nothing."""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from fppo.commands import cli
from fppo.report import charts
from tests.distributed.processes import server


def _rank(arguments: list[str], environment: dict[str, str], output: str) -> None:
    torch.set_num_threads(1)
    draw_little()
    os.environ.update(environment)
    with open(output, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        os._exit(cli.main(arguments))


def draw_little() -> None:
    """In this process reports have the first of their charts, as in the tests' own process: all take as long as a run
    of a tiny model."""
    whole = charts.write_png
    charts.write_png = lambda drawn, path, *, title: whole(drawn[:1], path, title=title)


class Ranks:
    """The processes of one start, and the store that they meet at."""

    def __init__(self, arguments: list[str], size: int, output: Path) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = server()
        shared = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_rank, args=(arguments, own, str(output)))
            process.start()
            self.processes.append(process)

    def end(self, seconds: float) -> list[int | None]:
        """The exit statuses once all have ended; None for those that had to be killed after so many seconds."""
        for process in self.processes:
            process.join(seconds)
        statuses = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return statuses
