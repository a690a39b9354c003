"""Trees taken apart and put together, with no Python for leaves that stand beside leaves alone."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils import _pytree as pytree

# Of a leaf None. Of a node its type, what its type says of it beside its children (of a dict the keys), and the
# outlines of these, or their number where all are leaves.
Outline = tuple[type, Any, "int | tuple[Outline, ...]"] | None

_is_namedtuple = functools.lru_cache(1024)(pytree.is_namedtuple_class)


def taken_apart(tree: Any) -> tuple[Outline, list[Any]]:
    """The outline of a tree and its leaves, which are those of torch's pytrees, in their order."""
    leaves: list[Any] = []
    return _outline(tree, leaves), leaves


def put_together(outline: Outline, leaves: Iterable[Any]) -> Any:
    """The tree with this outline and these leaves."""
    return _tree(outline, iter(leaves))


def _is_node(kind: type) -> bool:
    return kind in pytree.SUPPORTED_NODES or _is_namedtuple(kind)


def _outline(x: Any, leaves: list[Any]) -> Outline:
    kind = type(x)
    if kind is dict:
        return kind, tuple(x), _inside(x.values(), leaves)
    if kind is list or kind is tuple or _is_namedtuple(kind):
        return kind, None, _inside(x, leaves)
    if kind not in pytree.SUPPORTED_NODES:
        leaves.append(x)
        return None
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(x)
    return kind, context, _inside(list(children), leaves)


def _inside(children: Collection[Any], leaves: list[Any]) -> int | tuple[Outline, ...]:
    if any(map(_is_node, set(map(type, children)))):
        return tuple([_outline(x, leaves) for x in children])
    leaves.extend(children)
    return len(children)


def _tree(outline: Outline, leaves: Iterator[Any]) -> Any:
    if outline is None:
        return next(leaves)
    kind, context, inside = outline
    children = list(islice(leaves, inside)) if isinstance(inside, int) else [_tree(x, leaves) for x in inside]
    if kind is dict:
        return dict(zip(context, children, strict=True))
    if kind is list:
        return children
    if kind is tuple:
        return tuple(children)
    if _is_namedtuple(kind):
        return kind(*children)
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, context)
