"""Immutable records as trees of tensors: `@state`, and functions on any tree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

T = TypeVar("T")
Tree = Any


def static(**kwargs: Any) -> Any:
    """A field of a `@state` class that is part of the tree's structure, not a leaf; it needs == and hash."""
    return attrs.field(metadata={"static": True}, **kwargs)


def _build(cls: type[T], values: dict[str, Any]) -> T:
    """An instance of `cls` without its `__init__`: leaves may be placeholders while a tree is mapped."""
    record = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(attrs.field, static))
def state(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, keyword-only attrs class and a pytree of its fields that are not static.

    A field of None is absent from the tree (torch, unlike JAX, would make it a leaf). A `@state` class may extend
    another: it has the other's fields first, and is a separate pytree node.
    """
    cls = attrs.frozen(kw_only=True, eq=False, slots=True)(cls)  # eq=False: == on tensors has no truth value
    names = tuple(f.name for f in attrs.fields(cls))  # type: ignore[arg-type]
    statics = tuple(f.name for f in attrs.fields(cls) if f.metadata.get("static"))  # type: ignore[arg-type]

    def present(record: Any) -> tuple[str, ...]:
        return tuple(n for n in names if n not in statics and getattr(record, n) is not None)

    def flatten(record: Any) -> tuple[list[Any], Any]:
        leaves = present(record)
        return [getattr(record, n) for n in leaves], (leaves, tuple(getattr(record, n) for n in statics))

    def flatten_with_keys(record: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(record)
        return [(pytree.GetAttrKey(n), leaf) for n, leaf in zip(context[0], leaves, strict=True)], context

    def unflatten(children: Any, context: Any) -> Any:
        leaves, values = context
        filled = dict.fromkeys(names) | dict(zip((*leaves, *statics), (*children, *values), strict=True))
        return _build(cls, filled)

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls


def replace(record: T, **changes: Any) -> T:
    """Copy `record` with some fields changed. Unlike `attrs.evolve` it traces under torch.compile. Raises ValueError
    for an unknown field."""
    names = [f.name for f in attrs.fields(type(record))]  # type: ignore[arg-type]
    unknown = sorted(set(changes) - set(names))
    if unknown:
        raise ValueError(f"{type(record).__name__} has no field {unknown}; it has {names}")
    return _build(type(record), {n: changes[n] if n in changes else getattr(record, n) for n in names})


def map(fn: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Apply `fn` to each tensor of `tree`, and to the leaves in the same places of the trees `rest`. Other leaves of
    `tree` stay."""

    def on_tensors(x: Any, *others: Any) -> Any:
        return fn(x, *others) if isinstance(x, Tensor) else x

    return pytree.tree_map(on_tensors, tree, *rest)


class Away:
    """A placeholder of a leaf whose value is in another process. Functions that read or copy values raise TypeError."""

    __slots__ = ()


def check_here(tree: Tree, wanted: str) -> None:
    """Raise TypeError if a leaf's value is in another process; `wanted` names the requested result."""
    if not any(isinstance(x, Away) for x in pytree.tree_leaves(tree)):
        return
    path, leaf = next((path, x) for path, x in leaves_with_paths(tree) if isinstance(x, Away))
    raise TypeError(f"{path or 'this'} is {leaf}; compute {wanted} there, by a call of a function")


def copy(tree: T) -> T:
    """Copy a tree with every tensor cloned. Raises TypeError for values in other processes."""
    check_here(tree, "a copy")
    return map(torch.clone, tree)


_ANSWERED: frozenset[Any] = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device")) | {
    Tensor.numel,
    Tensor.size,
    Tensor.dim,
}


class Donated(Tensor):
    """An emptied tensor whose memory was donated: any use but of its shape, dtype and device raises RuntimeError."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise RuntimeError for all but queries of shape, dtype and device."""
        if func in _ANSWERED:
            tensor: Any = super()
            return tensor.__torch_function__(func, types, args, kwargs or {})
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} of a tensor that was donated: its memory belongs to the state that the "
            "call with donate=True returned. Use that state, or call without donation"
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "Donated()"


def donate(tree: T) -> T:
    """Move the tensors of `tree` to a new tree that the caller may overwrite; `tree` is left empty.

    A later use of the old tree's tensors raises RuntimeError (a tensor of a subclass is only empty).
    """

    def move(x: Tensor) -> Tensor:
        moved = x.detach()
        x.data = x.new_empty(0)
        if type(x) in (Tensor, Parameter):
            x.__class__ = Donated
        return moved

    return map(move, tree)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of the tree, in its order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def leaves_with_paths(tree: Tree) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's order; a path is like `.params['lm_head.weight']`."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def _digest(leaf: Any) -> str:
    """The 128-bit hex digest of a tensor's dtype, shape and bytes, or of a plain value's repr."""
    hasher = hashlib.blake2b(digest_size=16)
    if isinstance(leaf, Tensor):
        hasher.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
        # reshape: a 0-d tensor cannot be viewed as bytes; numpy: hashing then reads the memory in place
        hasher.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    else:
        hasher.update(repr(leaf).encode())
    return hasher.hexdigest()


def digest(tree: Tree) -> dict[str, str]:
    """The digest of every leaf by its path. Digests are equal if and only if the leaves are, bit for bit.

    Raises TypeError for values in other processes.
    """
    check_here(tree, "its digest")
    return {path: _digest(leaf) for path, leaf in leaves_with_paths(tree)}


def combine(digests: dict[str, str]) -> str:
    """Combine the digests of a tree's leaves into one."""
    return hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).hexdigest()
