"""Work that a GPU has done once and does again by one launch: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

Run = Callable[[], Any]  # a tree, of the same tensors every time
Record = Callable[[Run], Run]


def as_graphs(device: torch.device, *, tidy: bool = False) -> Record:
    """Records what runs as CUDA graphs, of one pool of memory: what a replay gives stands until the next one of any.

    A function's first call runs it as it is, which compiles its kernels; the second one records it, where `tidy` after
    the memory that nothing uses was given back.
    """
    pool, beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    graphs: list[torch.cuda.CUDAGraph] = []  # with the last of them the pool would go

    def record(run: Run) -> Run:
        calls, graph, results = count(), torch.cuda.CUDAGraph(), list[Any]()

        def captured() -> None:
            if tidy:
                torch.cuda.empty_cache()
            caller = torch.cuda.current_stream(device)
            beside.wait_stream(caller)
            with torch.cuda.stream(beside):
                # other threads, as one that trains meanwhile, may allocate memory
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
