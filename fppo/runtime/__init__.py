"""Runtime: meshes, parameters in shards, offload, checkpoints, and what ends ranks together.

A name is imported when it is first used: worker processes and `--help` come through here, and load no torch.
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
    from fppo.runtime.simulate import simulate as simulate

__all__ = [
    "LOCAL",
    "CheckpointError",
    "Lane",
    "Mesh",
    "OnHost",
    "PeerError",
    "Sharding",
    "joined",
    "simulate",
    "to_device",
    "to_host",
]
_HOMES = {
    "CheckpointError": "fppo.runtime.checkpoint",
    "LOCAL": "fppo.runtime.mesh",
    "Lane": "fppo.runtime.offload",
    "Mesh": "fppo.runtime.mesh",
    "OnHost": "fppo.runtime.offload",
    "PeerError": "fppo.runtime.failure",
    "Sharding": "fppo.runtime.mesh",
    "joined": "fppo.runtime.launch",
    "simulate": "fppo.runtime.simulate",
    "to_device": "fppo.runtime.offload",
    "to_host": "fppo.runtime.offload",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
