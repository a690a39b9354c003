"""Runtime: meshes, sharded parameters, offload, checkpoints, and failures of ranks.

In: trees of tensors and a `Mesh` of axes. Out: the same functions over many ranks: sums, gathers and scatters that
gradients pass through, checkpoints that any mesh reads, errors that name the rank. Names are imported at their first
use, so that worker processes and `--help` load no torch. Begin with `mesh.Mesh`; `fsdp` shards, `checkpoint` saves,
`simulate` runs ranks as threads.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fppo.runtime.checkpoint import CheckpointError as CheckpointError
    from fppo.runtime.failure import PeerError as PeerError
    from fppo.runtime.launch import joined as joined
    from fppo.runtime.mesh import LOCAL as LOCAL
    from fppo.runtime.mesh import Mesh as Mesh
    from fppo.runtime.mesh import Sharding as Sharding
    from fppo.runtime.offload import Lane as Lane
    from fppo.runtime.offload import OnHost as OnHost
    from fppo.runtime.offload import to_device as to_device
    from fppo.runtime.offload import to_host as to_host
    from fppo.runtime.schedule import Action as Action
    from fppo.runtime.schedule import Schedule as Schedule
    from fppo.runtime.schedule import all_forward as all_forward
    from fppo.runtime.schedule import one_f_one_b as one_f_one_b
    from fppo.runtime.simulate import simulate as simulate

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
_HOMES = {
    "checkpoint": ("CheckpointError",),
    "failure": ("PeerError",),
    "launch": ("joined",),
    "mesh": ("LOCAL", "Mesh", "Sharding"),
    "offload": ("Lane", "OnHost", "to_device", "to_host"),
    "schedule": ("Action", "Schedule", "all_forward", "one_f_one_b"),
    "simulate": ("simulate",),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
