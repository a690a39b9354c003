"""What stands for vLLM and two GPUs in a dry run of gpu_vllm.py: a host that runs fppo's own code on what it is sent.

Real are the options, the GPUs and the memory that they ask for, the engine's sync with its digests and probes, the
trainer's side of a weight transfer, and that weights are gone after sleep. vLLM is not, nor its processes, nor CUDA.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import attrs
import torch
from torch import Tensor

from fppo.batch import Column, Prompts
from fppo.models.model import Model
from fppo.rollout import sync
from fppo.rollout.embedded import EmbeddedEngine
from fppo.rollout.engine import Ask
from fppo.rollout.sync import DigestMethod
from fppo.rollout.vllm import transfer
from fppo.rollout.vllm.devices import GIB, GpuMemory, gpus_of, memory_keywords
from fppo.rollout.vllm.host import Answer, HostBatch
from fppo.rollout.vllm.options import VllmOptions
from fppo.rollout.vllm.probe import ProbeRow, own_log_probs
from fppo.runtime.mesh import LOCAL
from fppo_kernels.table import Kernels

ENGINE, TRANSFER = "fppo.rollout.vllm.engine", "vllm.distributed.weight_transfer"
GPUS = 2


class StandIn:
    """A `Host` in this process."""

    def __init__(self, model: Model, options: VllmOptions, dtype: str) -> None:
        gpus = gpus_of(options, own=0, count=GPUS)
        memory_keywords(options, [GpuMemory(8 * GIB, 16 * GIB) for _ in gpus.numbers], alone=gpus.alone)
        assert options.max_model_len is not None
        self.limit, self._model, self._dtype = options.max_model_len, model, dtype
        self._weights: dict[str, Tensor] = {}
        self._how: DigestMethod = "sums"
        self._asleep = set[str]()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What one worker of vLLM's returns."""
        if method == "fppo_names":
            return [({name: [name] for name in arguments[0]}, {})]
        if method == "update_weights":
            return [self.take_in(*arguments)]
        if method != "init_weight_transfer_engine":
            raise ValueError(f"a worker of vLLM has no {method}")
        return [None]

    def begin_load(self, how: DigestMethod, transfer: bool = False) -> None:
        del transfer
        assert "weights" not in self._asleep
        self._how, self._weights = how, {}

    def take_in(self, tensors: Mapping[str, Tensor]) -> None:
        assert all(str(x.dtype) == f"torch.{self._dtype}" for x in tensors.values())
        self._weights |= {name: x.clone() for name, x in tensors.items()}

    def end_load(self) -> tuple[dict[str, str], list[str]]:
        return {name: sync.digest(x, self._how) for name, x in self._weights.items()}, []

    def generate(self, request: HostBatch, on_answer: Callable[[int, Answer], None]) -> None:
        assert not self._asleep
        for row, answer in enumerate(self._answers(request) if request.forced is None else self._told(request)):
            on_answer(row, answer)

    def _answers(self, request: HostBatch) -> list[Answer]:
        longest = max(map(len, request.prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in request.prompts]
        real = [[place >= longest - len(prompt) for place in range(longest)] for prompt in request.prompts]
        prompts = Prompts(
            tokens=torch.tensor(padded),
            attention_mask=torch.tensor(real),
            row_ids=request.row_ids,
            **dict.fromkeys(("ids", "ground_truth", "source", "extras"), Column([None] * len(padded))),
        )
        engine = EmbeddedEngine(model=self._model, kernels=Kernels.named(), pad_token_id=0)
        rollout = engine.generate(self._weights, Ask(prompts, attrs.evolve(request.sampling, n=1), request.key))
        columns = (rollout.tokens[:, longest:], rollout.rollout_log_probs, rollout.sampling_log_probs)
        masks = rollout.response_mask
        return [Answer(*(x[row][mask].numpy() for x in columns)) for row, mask in enumerate(masks)]

    def _told(self, request: HostBatch) -> list[Answer]:
        assert request.forced is not None
        answers: list[Answer] = []
        for prompt, tokens in zip(request.prompts, request.forced, strict=True):
            probe = ProbeRow([*prompt, *tokens.tolist()], len(prompt))
            log_probs = own_log_probs(self._model, self._weights, LOCAL, probe).numpy()
            answers.append(Answer(tokens.numpy(), log_probs, log_probs))
        return answers

    def sleep(self) -> None:
        self._weights, self._asleep = {}, {"weights", "kv_cache"}

    def wake(self, part: str) -> None:
        self._asleep.remove(part)

    def close(self) -> None:
        self._weights = {}


@attrs.define(kw_only=True)
class IPCTrainerInitInfo:
    """vLLM's class of this name, as are the next two."""

    backend: ClassVar[str] = "ipc"
    rank: int
    packed: bool
    packed_buffer_size_bytes: int


@attrs.define(kw_only=True)
class NCCLTrainerInitInfo(IPCTrainerInitInfo):
    backend: ClassVar[str] = "nccl"
    master_address: str
    master_port: int
    world_size: int


class WeightTransferTrainerFactory:
    @staticmethod
    def trainer_init(info: IPCTrainerInitInfo, *, client: Any, source: Any) -> Sender:
        client.init_weight_transfer_engine({"packed": info.packed})
        return Sender(client, source)


class Sender:
    """The trainer's engine: hands tensor by tensor over."""

    def __init__(self, client: Any, source: Any) -> None:
        self._client, self._source = client, source

    def send_weights(self) -> None:
        self._client.start_weight_update()
        for meta, (name, x) in zip(self._source.metadata(), self._source, strict=True):
            assert (meta.name, meta.dtype, meta.shape) == (name, x.dtype, tuple(x.shape))
            self._client.update_weights({name: x})
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        del self._client


def _info(options: VllmOptions, bucket_bytes: int) -> Any:
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        return transfer.transfer_info(options, bucket_bytes)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Engines that start meanwhile run on it."""
    classes = {
        "ipc_engine": IPCTrainerInitInfo,
        "nccl_engine": NCCLTrainerInitInfo,
        "factory": WeightTransferTrainerFactory,
    }
    modules = {f"{TRANSFER}.{name}": ModuleType(name) for name in classes}
    for module, each in zip(modules.values(), classes.values(), strict=True):
        setattr(module, each.__name__, each)
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch(f"{ENGINE}.start_host", StandIn),
        mock.patch(f"{ENGINE}.transfer_info", _info),
    ):
        yield
