"""Adapters that give functions of other trainers, as released, the signatures of fppo's laws.

Each module has `adapters()`, which imports the trainer and returns a tuple of `Audited`. The packages of trainers bound
each other's versions, so each trainer gets an environment of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import MappingProxyType, ModuleType
from typing import Any

import attrs

from fppo._errors import UsageError, words_of
from fppo.studies.audit.report import Audited


@attrs.frozen
class Peer:
    """A trainer with adapters: their module, its package, and the commands that install it."""

    module: str
    package: str
    install: tuple[str, ...]


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "trl": Peer("fppo.studies.audit.peers.trl", "trl", ("pip install trl",)),
        "verl": Peer(
            "fppo.studies.audit.peers.verl",
            "verl",
            (
                "pip install --no-deps verl==0.9.1",
                'pip install ray hydra-core codetiming orjson "tensordict>=0.8,<=0.10,!=0.9.0"',
            ),
        ),
        "openrlhf": Peer(
            "fppo.studies.audit.peers.openrlhf",
            "openrlhf",
            ("pip install --no-deps openrlhf==0.11.2", "pip install deepspeed ray"),
        ),
        "areno": Peer("fppo.studies.audit.peers.areno", "areno", ("pip install --no-deps areno==0.10.0",)),
        "areal": Peer("fppo.studies.audit.peers.areal", "areal", ("pip install --no-deps areal==1.0.4",)),
        "skyrl": Peer(
            "fppo.studies.audit.peers.skyrl",
            "skyrl",
            ("pip install --no-deps skyrl==0.3.0", "pip install ray loguru omegaconf jaxtyping cloudpickle"),
        ),
        "agilerl": Peer(
            "fppo.studies.audit.peers.agilerl",
            "agilerl",
            ("pip install --no-deps agilerl==2.58.0", "pip install lazy_loader"),
        ),
    }
)


def without_init(
    package: str, inner: Sequence[str], stand_ins: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> None:
    """Let modules of an installed package be imported without running the __init__ of its `inner` packages, which may
    need libraries of a GPU.

    No module is changed: empty packages with the same paths stand in for theirs, in this process alone. `stand_ins` are
    modules with these names in them, which the audited ones import and do not use. Raises ImportError.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} has no modules")
    for name in inner:
        made = ModuleType(f"{package}.{name}")
        made.__path__ = [f"{spec.submodule_search_locations[0]}/{name.replace('.', '/')}"]
        sys.modules.setdefault(made.__name__, made)
    for name, names in stand_ins.items():
        made = ModuleType(f"{package}.{name}")
        made.__dict__.update(names)
        sys.modules.setdefault(made.__name__, made)


def adapters_of(name: str) -> tuple[tuple[Audited, ...], tuple[str, ...]]:
    """The adapters of a trainer, and the versions of its package and of torch.

    Raises UsageError with the commands that install the trainer if it is not there, or does not import.
    """
    peer = PEERS[name]
    how = "\n".join(f"  {command}" for command in peer.install)
    try:
        versions = tuple(f"{package} {metadata.version(package)}" for package in (peer.package, "torch"))
    except metadata.PackageNotFoundError:
        raise UsageError(f"{name} is not installed; in an environment of its own, beside fppo:\n{how}") from None
    make: Callable[[], Any] = importlib.import_module(peer.module).adapters
    try:
        return tuple(make()), versions
    except ImportError as error:
        raise UsageError(f"{versions[0]} does not import: {words_of(error)}; it needs\n{how}") from error
    except (AttributeError, KeyError) as error:
        known = f"the adapters are written for the release that docs/audit.md names, not for {versions[0]}"
        raise UsageError(f"{name}: {words_of(error)}; {known}") from error
