"""What accelerators are capable of, and what a process on one takes beside its tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

import attrs

from fppo._errors import did_you_mean
from fppo.models.flops import PEAKS
from fppo.plan.values import GIB


@attrs.frozen
class Hardware:
    """One accelerator and its links; rates are peaks, in one direction."""

    name: str
    memory: float  # bytes that torch sees
    flops: float  # dense bfloat16, per second
    flops_float32: float
    bandwidth: float  # of the memory, bytes per second
    node_bandwidth: float  # bytes per second to the others of its node
    network_bandwidth: float  # bytes per second to other nodes
    host_bandwidth: float = 5.0e10  # bytes per second to or from the host's memory: PCIe 5 x16
    per_node: int = 8
    on_gpu: bool = True


KNOWN: Mapping[str, Hardware] = MappingProxyType(
    {
        # NVIDIA A100 80GB SXM data sheet; NVLink 3: 600 GB/s both ways; DGX A100: 8 x 200 Gb/s
        "a100-80": Hardware("a100-80", 79.2 * GIB, PEAKS["A100"], 1.95e13, 2.039e12, 3.0e11, 2.5e10, 2.5e10),
        # NVIDIA H100 SXM data sheet; NVLink 4: 900 GB/s both ways; DGX H100: 8 x 400 Gb/s
        "h100": Hardware("h100", 79.1 * GIB, PEAKS["H100"], 6.7e13, 3.35e12, 4.5e11, 5.0e10),
        # NVIDIA H200 SXM data sheet; links as in H100
        "h200": Hardware("h200", 139.8 * GIB, PEAKS["H200"], 6.7e13, 4.8e12, 4.5e11, 5.0e10),
        # NVIDIA DGX B200 data sheet, an eighth of it; NVLink 5: 1.8 TB/s both ways; 8 x 400 Gb/s
        "b200": Hardware("b200", 178.3 * GIB, PEAKS["B200"], 7.5e13, 7.7e12, 9.0e11, 5.0e10),
    }
)

# a few cores of a server as this project has seen them: an order of magnitude, no more
_CPU = Hardware("cpu", 0.0, 1.0e11, 1.0e11, 1.5e10, 1.0e9, 1.2e8, per_node=1 << 20, on_gpu=False)

# What a GPU process takes beside tensors. The first three are usual sizes, not guarantees; the driver decides.
CONTEXT = int(0.6 * GIB)  # CUDA context with the kernels of torch
WORKSPACE = 96 << 20  # cuBLAS, which keeps one per stream: 32 MiB on Hopper and later
COMMUNICATOR = 256 << 20  # NCCL's buffers of one axis: 4 MiB for each of 16 to 32 channels, and its protocols
FRAGMENTS = 0.03  # of what comes and goes: blocks that torch's allocator holds and cannot use
# What a process takes of the host's memory beside tensors. The first was measured (docs/measurements.md), the second is
# a usual size.
PROCESS = 450 << 20  # Python with torch (a build for CPUs), transformers and fppo
BUILT_FOR_GPUS = 295 << 20  # what a build of torch for GPUs has beside that in a process without one
CUDA_PROCESS = int(2.5 * GIB)  # the same with CUDA's libraries


def hardware_of(
    name: str,
    *,
    memory: float | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    node_bandwidth: float | None = None,
    network_bandwidth: float | None = None,
    per_node: int | None = None,
) -> Hardware:
    """A known accelerator, with these numbers in the place of its own; or "custom", of which all must be given.

    "cpu" has this machine's memory. Raises ValueError for a name that is not known, or a custom one that lacks numbers.
    """
    numbers = {
        "memory": memory,
        "flops": flops,
        "bandwidth": bandwidth,
        "node_bandwidth": node_bandwidth,
        "network_bandwidth": network_bandwidth,
        "per_node": per_node,
    }
    changes = {key: value for key, value in numbers.items() if value is not None}
    if name == "custom":
        missing = [key.replace("_", "-") for key, value in numbers.items() if value is None and key != "per_node"]
        if missing:
            raise ValueError(f"--gpu custom needs all of its numbers; missing: {', '.join(f'--{n}' for n in missing)}")
        return attrs.evolve(KNOWN["h100"], name=name, flops_float32=(flops or 0.0) / 15, **changes)
    if name == "cpu":
        return attrs.evolve(
            _CPU, **{"memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), **changes}
        )
    if name not in KNOWN:
        raise ValueError(f"--gpu {name!r} is not known; {did_you_mean(name, [*KNOWN, 'cpu', 'custom'], cutoff=0.5)}")
    return attrs.evolve(KNOWN[name], **changes)


def overhead(hardware: Hardware, axes: int, transient: float) -> float:
    """Bytes that a process takes beside its tensors, with so many axes of several ranks and bytes that come and go."""
    if not hardware.on_gpu:
        return 0.0
    return CONTEXT + WORKSPACE + COMMUNICATOR * axes + FRAGMENTS * transient


def pinned(size: int) -> int:
    """What torch takes for so many bytes of memory that a GPU copies from: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0
