"""Kinds of devices as values: what torch's interfaces for any accelerator (torch.accelerator) do not tell of them.

Memory, streams, events, dtypes and the backend of collectives are asked of torch, by the same calls for all kinds. No
torch is imported here: settings read the names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from fppo._errors import nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of device: its name in settings and in torch, and the words for it in messages. ROCm's GPUs are torch's
    cuda, too.

    `numbered`: a machine may have several, as cuda:0 and cuda:1. `streams`: copies, sampling and training can run
    beside each other. `graphs`: passes can be recorded, and replayed by one launch. `advice` is what to do if torch
    does not find it, `also` what people call it.
    """

    name: str
    words: str
    also: tuple[str, ...] = ()
    numbered: bool = True
    streams: bool = True
    graphs: bool = False
    advice: str = "give cpu"


_ALL = (
    Kind(name="cuda", words="GPU", also=("gpu", "rocm", "hip", "nvidia", "amd"), graphs=True),
    Kind(name="xpu", words="Intel GPU", also=("intel",), advice="give cpu, or install a torch that was built for it"),
    Kind(name="npu", words="NPU", also=("ascend",), advice="give cpu, or install torch_npu"),
    Kind(name="mps", words="Apple GPU", also=("metal", "apple"), numbered=False, streams=False),
    Kind(name="cpu", words="CPU", numbered=False, streams=False),
)
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ALL})
NAMES = ", ".join(["auto", "cpu", *(f"{x.name} or {x.name}:N" if x.numbered else x.name for x in _ALL[:-1])])


def wrong_name(name: str) -> str | None:
    """The reason why `name` can name no device in settings, with the nearest name that can; None if it can."""
    kind, colon, number = name.partition(":")
    if kind in KINDS and (not colon or (KINDS[kind].numbered and re.fullmatch(r"\d+", number))):
        return None
    known = {word: kind.name for kind in _ALL for word in (kind.name, *kind.also)} | {"auto": "auto"}
    near = nearest(kind.lower(), known)
    hint = f"did you mean {known[near]}? " if near and known[near] != kind else ""
    return None if name == "auto" else f"{hint}must be {NAMES}"


def kind_of(device: torch.device) -> Kind:
    """The kind of a torch device; the CPU's for one that settings cannot name, such as "meta"."""
    return KINDS.get(device.type, KINDS["cpu"])


def named(name: str, setting: str) -> torch.device:
    """The torch device `name`; "auto": the accelerator that torch finds, else the CPU. Raises ValueError for a
    device that torch does not find, with a message that begins with `setting`."""
    import torch

    if name == "auto":
        own = torch.accelerator.current_accelerator()  # of a plug-in, or of torch's build
        order = [*([] if own is None else [own.type]), *KINDS]
        name = next(kind for kind in order if kind == "cpu" or (kind in KINDS and _module(kind) is not None))
    if wrong := wrong_name(name):
        raise ValueError(f"{setting}: {wrong}")
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return torch.device(name)
    module, words = _module(kind), KINDS[kind].words
    if module is None:
        raise ValueError(f"{setting}: torch sees no {words} here; {KINDS[kind].advice}")
    if number and int(number) >= module.device_count():
        raise ValueError(f"{setting}: there are {module.device_count()} {words}s here, {kind}:0 the first")
    return torch.device(name)


def _module(kind: str) -> Any:
    """torch's module for a kind of accelerator, such as torch.cuda; None if there is none here."""
    import torch

    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # a plug-in that is not installed
        return None
    return module if module.is_available() else None


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is an accelerator, whose memory is not the host's."""
    return device.type in KINDS and device.type != "cpu"


def in_use() -> torch.device | None:
    """The accelerator that this process has used; None if it works on the CPU alone."""
    import torch

    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    initialized = getattr(torch.get_device_module(device), "is_initialized", None)  # MPS has none
    used = torch.accelerator.memory_allocated() > 0 if initialized is None else initialized()
    return device if used else None


def synchronize(device: torch.device) -> None:
    """Wait for the work in this thread's stream of an accelerator; no-op on a CPU."""
    import torch

    if kind_of(device).streams:
        torch.accelerator.current_stream(device).synchronize()
    elif is_accelerator(device):  # it has one stream
        torch.accelerator.synchronize(device)


def title(device: torch.device) -> str:
    """The name of an accelerator's model, as its maker calls it; where torch has none, the words for its kind."""
    import torch

    name = getattr(torch.get_device_module(device), "get_device_name", None)  # MPS has none
    return kind_of(device).words if name is None else name(device)


def _has_double(device: torch.device) -> bool:
    """Whether a device computes in float64: CPUs and CUDA do, Apple's GPUs and some of Intel's do not."""
    import torch

    if device.type == "cuda" or not is_accelerator(device):
        return True
    return torch.float64 in torch.accelerator.get_device_capability(device)["supported_dtypes"]


def home_of(device: torch.device) -> torch.device:
    """Where the rows are kept whose passes run on a device: there or, if it has no float64, on the host, which computes
    losses, advantages and metrics."""
    import torch

    return device if _has_double(device) else torch.device("cpu")


def widest(device: torch.device) -> torch.dtype:
    """The widest dtype of a device: float64, or float32."""
    import torch

    return torch.float64 if _has_double(device) else torch.float32


def wide(x: Tensor) -> Tensor:
    """Convert a tensor to float64, on the host if its device has none."""
    return x.to(home_of(x.device)).double()
