"""Devices by name."""

from __future__ import annotations

import torch


def named_device(name: str, setting: str) -> torch.device:
    """The device of a name. Raises ValueError that begins with `setting` for a missing GPU."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"{setting}: torch sees no GPU here; give cpu")
    device = torch.device(name)
    if device.index is not None and device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(f"{setting}: there are {torch.cuda.device_count()} GPUs here, cuda:0 the first")
    return device
