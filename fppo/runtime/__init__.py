"""Meshes of processes, and what runs on them: sharded parameters, offload, checkpoints, and failures of ranks.

In: trees of tensors and a `Mesh` of axes. Out: the same functions over many ranks: sums, gathers and scatters that
gradients pass through, checkpoints that any mesh can read, errors that name the rank. Names are imported at their first
use, so that worker processes and `--help` load no torch.
Begin with `mesh.Mesh`; `fsdp` shards parameters, `checkpoint` saves, `simulate` runs ranks as threads.
"""

from typing import TYPE_CHECKING

from fppo._lazy import lazily

if TYPE_CHECKING:
    from fppo.runtime.checkpoint import CheckpointError
    from fppo.runtime.failure import PeerError
    from fppo.runtime.launch import joined
    from fppo.runtime.mesh import LOCAL, Mesh, Sharding
    from fppo.runtime.offload import Lane, OnHost, to_device, to_host
    from fppo.runtime.schedule import Action, Schedule, all_forward, one_f_one_b
    from fppo.runtime.simulate import simulate

__all__ = [
    "LOCAL",
    "Action",
    "CheckpointError",
    "Lane",
    "Mesh",
    "OnHost",
    "PeerError",
    "Schedule",
    "Sharding",
    "all_forward",
    "joined",
    "one_f_one_b",
    "simulate",
    "to_device",
    "to_host",
]

__getattr__ = lazily(__name__, __file__)
