"""Handles: leaves of the controller's trees in place of values that live on ranks."""

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
    """A rank, as functions that run on it see it."""

    mesh: Mesh = LOCAL
    device: torch.device = CPU
    rank: int = 0


class _Placeholder:
    def __reduce__(self) -> str:
        return "HERE"

    def __repr__(self) -> str:
        return "HERE"


HERE: Any = _Placeholder()  # as an argument of a call: the `Here` of the rank that runs it


@attrs.frozen(eq=False)
class Lease:
    """A result of a call; its values stay on the ranks as long as it has a handle."""

    group: str
    life: int  # which start of the group's ranks made it
    call: int
    part: int  # which of the results of the call
    device: torch.device  # where the controller has what comes of calls, and makes what goes with the values


@attrs.frozen
class Held(Away):
    """A leaf in place of a value that each rank of a group holds, its own part of one call's result.

    Handles are immutable, and are passed on as the values would be. The values go when the last handle does.
    """

    lease: Lease
    leaf: int  # which of the result's

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.lease.device

    def __str__(self) -> str:
        return f"a value on the ranks of group {self.lease.group!r}"

    def __reduce__(self) -> str:
        raise TypeError(f"{self} stands where it is not seen: give handles as arguments, or as leaves of trees in them")


def handles(lease: Lease, count: int) -> list[Held]:
    """The handles of the first `count` leaves of a result: what `Held(lease, leaf)` makes, in half the time."""
    made = list(map(object.__new__, repeat(Held, count)))
    slots: Any = Held
    for _ in map(slots.lease.__set__, made, repeat(lease)):
        pass
    for _ in map(slots.leaf.__set__, made, range(count)):
        pass
    return made


class Apart(dict[str, Any]):
    """Stand-in for a mapping of which each rank has entries of its own, as stages of a pipeline have: one handle, under
    no name, for all that a rank has."""


class _Unnamed:
    """A step in the path to a leaf that the path does not show."""

    def __str__(self) -> str:
        return ""

    def __hash__(self) -> int:
        return hash(_Unnamed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unnamed)

    def get(self, parent: Any) -> Any:
        """The leaf."""
        return parent[""]


def _apart(children: Any, context: Any) -> Any:
    """On a rank its own mapping, elsewhere the stand-in."""
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
