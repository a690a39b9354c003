"""A transfer engine for vLLM that runs on CPUs: vLLM's NCCL engine with a TCP store in the place of NCCL.

vLLM finds it as a plugin, in the processes of its workers too. Rendezvous, order and messages are those of NCCL's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

NAME = "fppo_test_store"


@dataclass
class StoreInfo(NCCLTrainerInitInfo):
    backend: ClassVar[str] = NAME


def meet(info, rank):
    return StatelessProcessGroup.create(
        host=info.master_address, port=info.master_port, rank=rank, world_size=info.world_size
    )


class StoreEngine(NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info):
        self.model_update_group = meet(init_info, init_info.rank_offset + self.parallel_config.rank)

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            x = self.model_update_group.broadcast(torch.empty(shape, dtype=getattr(torch, dtype)), src=0)
            self.model.load_weights([(name, x)])

    def shutdown(self):
        self.model_update_group = None


class StoreTrainer(NCCLTrainerWeightTransferEngine):
    def _broadcast(self, source, meta):
        for _, x in self._checked_iter(source, meta):
            self.model_update_group.broadcast(x, src=0)

    @staticmethod
    def _post_send_sync():
        pass

    def shutdown(self):
        self.model_update_group = None

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        from concurrent.futures import ThreadPoolExecutor

        engine = cls(client=client, source=source)
        worker = nccl_common.NCCLWeightTransferInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
        )
        with ThreadPoolExecutor(max_workers=1) as pool:
            answer = pool.submit(client.init_weight_transfer_engine, nccl_common.worker_init_payload(worker))
            engine.model_update_group = meet(init_info, 0)
            answer.result()
        return engine


def register():
    """The plugin."""
    WeightTransferEngineFactory.register_engine(NAME, StoreEngine)


def register_trainer():
    """The other side."""
    WeightTransferTrainerFactory.register_engine(NAME, StoreTrainer)
