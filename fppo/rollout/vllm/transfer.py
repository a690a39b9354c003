"""Transfer of weights by vLLM's own engine: NCCL between GPUs, or CUDA IPC on one.

As with other transports, each vLLM worker digests the tensors that it received. The messages around them (names, begin,
end) go through the host. The NCCL and IPC calls themselves need GPUs, and no test has run them.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fppo.rollout.sync import Bucket, DigestMethod, Rename, SyncError, sent_dtype
from fppo.rollout.vllm.host import EngineDied, EngineFailure, Host
from fppo.rollout.vllm.options import VllmOptions

T = TypeVar("T")
MakeInfo = Callable[[VllmOptions, int], Any]  # the trainer's side of a backend, for buckets of some bytes


class Meta(NamedTuple):
    """The name, dtype and shape of a tensor that will be sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def metadata(
    dtypes: Mapping[str, torch.dtype],
    shapes: Mapping[str, torch.Size],
    names: Iterable[str],
    rename: Rename,
    dtype: torch.dtype,
    exact: Collection[str] = (),
) -> list[Meta]:
    """The metadata of each tensor that `sync.reshard` and `sync.renamed` will yield, for parameters of whole `shapes`
    and `dtypes`, `exact` ones uncast."""
    wanted = set(names)
    metas = []
    for name, shape in shapes.items():
        if name in wanted:
            kind = sent_dtype(name, dtypes[name], dtype, exact)
            whole = torch.empty(shape, dtype=kind, device="meta")
            metas += [Meta(new, part.dtype, tuple(part.shape)) for new, part in rename(name, whole)]
    return metas


def transfer_info(options: VllmOptions, bucket_bytes: int) -> Any:
    """Describe the trainer's side of `options.transport` to vLLM, with buffers of `bucket_bytes`; NCCL gets a free
    port. Raises ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError(f"transport = {options.transport!r} is between GPUs, and torch sees none here: give auto")
    sizes = {"packed": True, "packed_buffer_size_bytes": bucket_bytes}
    if options.transport == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
            IPCTrainerInitInfo,
        )

        return IPCTrainerInitInfo(rank=0, **sizes)
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLTrainerInitInfo,
    )

    address, port = free_address(options)
    world = 1 + options.tensor_parallel
    return NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=world, **sizes)


def free_address(options: VllmOptions) -> tuple[str, int]:
    """An address in this process that vLLM's workers can reach, and a free port."""
    address = "127.0.0.1"
    if options.host == "ray":
        from vllm.utils.network_utils import get_ip  # pyright: ignore[reportMissingImports]

        address = get_ip()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return address, probe.getsockname()[1]


class WeightTransfer:
    """The trainer's side of one host's transfer engine. Raises EngineFailure if the two sides cannot connect."""

    def __init__(self, host: Host, info: Any) -> None:
        from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
            WeightTransferTrainerFactory,
        )

        # CUDA IPC sends chunk by chunk, and all ranks wait for each other after each
        self._source, self._client = _Source(), _Client(host, in_step=info.backend == "ipc")
        try:
            self._engine = WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=self._source)
        except EngineFailure:
            raise
        except Exception as error:
            raise EngineFailure(f"vLLM's weight transfer by {info.backend!r} did not start: {error}") from error

    def send(
        self, metas: list[Meta], buckets: Iterator[Bucket], method: DigestMethod
    ) -> tuple[dict[str, str], list[str]]:
        """Send the tensors of all buckets, which `metas` describe; return the result of `Host.end_load`."""
        self._source.metas, self._source.buckets = metas, buckets
        self._client.method, self._client.died = method, None
        try:
            self._engine.send_weights()
            if (died := self._client.died) is not None:
                raise died
        except (SyncError, EngineFailure):
            raise
        except Exception as error:
            raise SyncError(f"vLLM's weight transfer failed: {type(error).__name__}: {error}") from error
        return self._client.result

    def close(self) -> None:
        """Leave the group of both sides."""
        self._engine.shutdown()


class _Source:
    """The weights for vLLM (its `WeightSource`), iterated once per sync."""

    def __init__(self) -> None:
        self.metas: list[Meta] = []
        self.buckets: Iterator[Bucket] = iter(())

    def metadata(self) -> list[Meta]:
        return self.metas

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            yield from bucket.tensors.items()


class _Client:
    """The client through which vLLM's trainer engine calls its workers (its `VLLMWeightSyncClient`). With `in_step` the
    error of a dead engine is raised after all is sent: the other ranks continue, and wait for this one between
    chunks."""

    def __init__(self, host: Host, *, in_step: bool) -> None:
        self._host, self._in_step = host, in_step
        self.died: EngineDied | None = None
        self.method: DigestMethod = "sums"
        self.result: tuple[dict[str, str], list[str]] = ({}, [])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._host.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._attempt(lambda: self._host.begin_load(self.method, transfer=True))

    def update_weights(self, update_info: Any) -> None:
        self._attempt(lambda: self._host.call("update_weights", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version
        self.result = self._attempt(self._host.end_load) or self.result

    def _attempt(self, call: Callable[[], T]) -> T | None:
        try:
            return call() if self.died is None else None
        except EngineDied as error:
            if not self._in_step:
                raise
            self.died = error
            return None
