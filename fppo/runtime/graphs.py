"""CUDA graphs: record work of a GPU and replay it by one launch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

Run = Callable[[], Any]  # returns a tree of the same tensors every time
Record = Callable[[Run], Run]


def as_graphs(device: torch.device, *, tidy: bool = False) -> Record:
    """Make a function that records others as CUDA graphs in one memory pool. The results of a replay are valid until
    the next replay of any of them.

    A function's first call runs it plainly, which compiles its kernels; the second records it, with `tidy` after
    freeing unused memory.
    """
    pool, beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    graphs: list[torch.cuda.CUDAGraph] = []  # kept alive: the pool is freed with the last of them

    def record(run: Run) -> Run:
        calls, graph, results = count(), torch.cuda.CUDAGraph(), list[Any]()

        def captured() -> None:
            if tidy:
                torch.cuda.empty_cache()
            caller = torch.cuda.current_stream(device)
            beside.wait_stream(caller)
            with torch.cuda.stream(beside):
                # other threads, such as one that trains meanwhile, may allocate memory
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    results.append(run())
                finally:
                    graph.capture_end()
            caller.wait_stream(beside)
            graphs.append(graph)

        def replayed() -> Any:
            if (call := next(calls)) == 0:
                return run()
            if call == 1:
                captured()
            graph.replay()
            return results[0]

        return replayed

    return record
