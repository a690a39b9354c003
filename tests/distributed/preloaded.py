"""Imports of the server that ranks are copies of: a process has one server, whoever starts it first."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import forkserver

PRELOADED = [
    *("fppo.commands.actions", "fppo.commands.distributed", "tests.distributed.processes", "tests.tiny"),
    # what a run imports when it is needed, and what modules of tests import
    *("fppo_kernels.decode_attention.sdpa", "fppo_kernels.linear.onednn", "fppo_kernels.log_probs.chunked"),
    *("pandas", "pyarrow.compute", "pyarrow.pandas_compat", "numpy.ctypeslib", "importlib.resources.readers"),
    *("transformers.generation.utils", "transformers.models.qwen2.tokenization_qwen2", "tests.models.families"),
    *("tests.tiny_run", "pytest", "tests.distributed.frozen"),
]


def preload_more() -> None:
    """The server has this imported as well where the library starts it."""
    whole = forkserver.set_forkserver_preload

    def preload(names: Sequence[str]) -> None:
        whole([*dict.fromkeys([*names, *PRELOADED])])

    forkserver.set_forkserver_preload = preload
