"""Handles: leaves that the controller holds in place of values on ranks."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from fppo.runtime.mesh import LOCAL, Mesh
from fppo.tree import Away

CPU = torch.device("cpu")


@attrs.frozen
class Here:
    """The rank that a function runs on: its mesh, device and number."""

    mesh: Mesh = LOCAL
    device: torch.device = CPU
    rank: int = 0


class _Placeholder:
    def __reduce__(self) -> str:
        return "HERE"

    def __repr__(self) -> str:
        return "HERE"


HERE: Any = _Placeholder()  # an argument that each rank replaces by its own `Here`


@attrs.frozen(eq=False)
class Lease:
    """One result of a call. Its values stay on the ranks while any handle to it lives."""

    group: str
    life: int  # the number of the start of the group's ranks
    call: int
    part: int  # the index among the call's results
    device: torch.device  # the controller's device for results of calls, and for new tensors beside the values


@attrs.frozen
class Held(Away):
    """A handle: a leaf in place of a value on each rank of a group, its own part of one call's result (`lease`).

    Handles are immutable, and are passed on as the values would be. The values are freed with the last handle.
    """

    lease: Lease
    leaf: int  # the index among the result's leaves

    @property
    def device(self) -> torch.device:
        """The device on which the controller would hold the tensor."""
        return self.lease.device

    def __str__(self) -> str:
        return f"a value on the ranks of group {self.lease.group!r}"

    def __reduce__(self) -> str:
        raise TypeError(f"{self} is inside a pickled object: give handles as arguments, or as leaves of trees in them")


def handles(lease: Lease, count: int) -> list[Held]:
    """Make handles to the first `count` leaves of a result, in half the time of `Held(lease, leaf)`."""
    made = list(map(object.__new__, repeat(Held, count)))
    slots: Any = Held
    for _ in map(slots.lease.__set__, made, repeat(lease)):
        pass
    for _ in map(slots.leaf.__set__, made, range(count)):
        pass
    return made


class Apart(dict[str, Any]):
    """Stand-in for a mapping with different entries on each rank (the stages of a pipeline): one handle, with the name
    "", for all entries of a rank."""


class _Unnamed:
    """A key of a pytree's path that prints as nothing, for the one handle of an `Apart`."""

    def __str__(self) -> str:
        return ""

    def __hash__(self) -> int:
        return hash(_Unnamed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unnamed)

    def get(self, parent: Any) -> Any:
        """The handle in an `Apart`."""
        return parent[""]


def _apart(children: Any, context: Any) -> Any:
    """Rebuild an `Apart` from its one leaf: the rank's own mapping on a rank, the stand-in elsewhere."""
    del context
    (one,) = children
    return one if isinstance(one, dict) else Apart({"": one})


def _with_keys(apart: Apart) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    return [(_Unnamed(), x) for x in apart.values()], None


pytree.register_pytree_node(
    Apart,
    lambda apart: (list(apart.values()), None),
    _apart,
    flatten_with_keys_fn=_with_keys,
    serialized_type_name="fppo.fleet.held.Apart",
)
