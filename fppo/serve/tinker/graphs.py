"""Losses that clients send: a traced function as plain data, run by an interpreter over a list of operations.

The data is what the protocol's `CustomLossGraph` holds: nodes in order, each an operation by name with encoded
arguments (`{"ref": name}` for a node, `{"tuple": [...]}`, `{"slice": [...]}`, `{"float": "inf"}` and so on). Nothing in
it is looked up in a module: a name is listed in `operations`, or the graph is refused before it runs. There are no
attributes but shapes and dtypes, no writing, no numbers out of tensors, and bounds on nodes, arguments and elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo._errors import nearest, printable
from fppo.serve.tinker.operations import ATTRIBUTES, DTYPES, FIXED, FUNCTIONS, KEYWORDS, METHODS, check_call

MOST_NODES, MOST_ARGUMENTS, DEEPEST, MOST_INPUTS = 512, 4096, 8, 16
MOST_ELEMENTS = 1 << 25  # of all results of a graph for one datum, views included
_LARGEST = 1 << 62  # of Python's integers
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_FLOATS = MappingProxyType({"inf": math.inf, "-inf": -math.inf, "nan": math.nan})


@attrs.frozen
class NodeResult:
    """An argument that is the result of another node."""

    name: str


@attrs.frozen
class LossNode:
    """An operation of a graph: a parameter ("placeholder"), a function, a method, or the result ("output")."""

    kind: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@attrs.frozen(eq=False)
class CustomLoss:
    """A loss of one datum as a checked graph: of `logprobs`, [T] or [T, K], and of inputs by name with their ranks."""

    name: str
    ranks: Mapping[str, int]  # of all inputs in order, "logprobs" first
    nodes: tuple[LossNode, ...]

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs that a datum must have."""
        return tuple(name for name in self.ranks if name != "logprobs")

    def __call__(self, log_probs: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a datum, 0-d, and its metrics, 0-d each.

        Raises ValueError, naming the node, for what fails or grows too large, and for results that are not 0-d.
        """
        given = {"logprobs": log_probs, **inputs}
        if wrong := [name for name, rank in self.ranks.items() if given[name].dim() != rank]:
            name = wrong[0]
            raise ValueError(
                f"loss {self.name!r}: {name} is {list(given[name].shape)}, declared rank {self.ranks[name]}"
            )
        values, left = dict[str, Any](), MOST_ELEMENTS
        for node in self.nodes:
            if node.kind == "placeholder":
                values[node.name] = given[node.target]
                continue
            args, kwargs = (_filled(x, values) for x in (node.args, node.kwargs))
            if node.kind == "output":
                return self._results(*args[0])
            left -= self._checked(node, args, kwargs, left)
            values[node.name] = self._run(node, args, kwargs)
        raise AssertionError("a checked graph ends with its output")

    def _checked(self, node: LossNode, args: Sequence[Any], kwargs: Mapping[str, Any], max_elements: int) -> int:
        """The elements that a call's result may have. Raises ValueError for more than `max_elements`."""
        try:
            count = check_call(node.target, args, kwargs)
        except (ValueError, RuntimeError) as error:
            raise self._failure(node, error) from error
        if count > max_elements:
            raise ValueError(
                f"loss {self.name!r}: node {node.name} ({node.target}) brings the results of one datum above "
                f"{MOST_ELEMENTS:,} elements"
            )
        return count

    def _run(self, node: LossNode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        table = METHODS if node.kind == "call_method" else FUNCTIONS
        try:
            result = table[node.target](*args, **kwargs)
        except Exception as error:  # torch raises several types for what does not fit together
            raise self._failure(node, error) from error
        if isinstance(result, int) and abs(result) > _LARGEST:
            raise ValueError(f"loss {self.name!r}: node {node.name} makes an integer above 2^62")
        return result

    def _failure(self, node: LossNode, error: Exception) -> ValueError:
        text = printable(str(error).splitlines()[0] if str(error) else type(error).__name__, 300)
        return ValueError(f"loss {self.name!r}: node {node.name} ({node.target}): {text}")

    def _results(self, loss: Any, metrics: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        for what, x in (("loss", loss), *metrics.items()):
            if not isinstance(x, Tensor) or x.dim() or (what == "loss" and not x.is_floating_point()):
                kind = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"loss {self.name!r}: its {what} is {kind}: give a floating tensor without dimensions")
        return loss, dict(metrics)


def custom_loss(name: str, inputs: Sequence[tuple[str, int]], nodes: Sequence[Mapping[str, Any]]) -> CustomLoss:
    """Check a graph's plain data: `inputs` are names and ranks, "logprobs" first; `nodes` are dicts of the fields op,
    name, target, args and kwargs.

    Raises ValueError, by name, for whatever is not on the lists: operations, attributes, keywords, dtypes, metrics; and
    for too many or wrong nodes, names and arguments.
    """
    name = printable(name, 64)
    ranks = dict(inputs)
    if not inputs or inputs[0][0] != "logprobs" or len(ranks) != len(inputs) or len(inputs) > MOST_INPUTS:
        raise ValueError(f"loss {name!r}: give 1 to {MOST_INPUTS} inputs with different names, logprobs first")
    if wrong := [x for x in ranks if not _INPUT.fullmatch(x)]:
        raise ValueError(f"loss {name!r}: input {printable(wrong[0], 64)!r} is no lowercase name")
    if ranks["logprobs"] not in (1, 2) or any(rank not in (0, 1, 2) for rank in ranks.values()):
        raise ValueError(f"loss {name!r}: ranks are 0, 1 or 2, and 1 or 2 of logprobs; got {ranks}")
    if not 2 <= len(nodes) <= MOST_NODES:
        raise ValueError(f"loss {name!r} has {len(nodes)} nodes: give 2 to {MOST_NODES}")
    known: dict[str, str] = {}  # kinds of the nodes so far
    read = tuple(_node(name, node, known) for node in nodes)
    if sum(_count(node.args) + _count(node.kwargs) for node in read) > MOST_ARGUMENTS:
        raise ValueError(f"loss {name!r} has more than {MOST_ARGUMENTS} arguments")
    places = tuple(node.target for node in read if node.kind == "placeholder")
    if places != tuple(ranks):
        raise ValueError(f"loss {name!r} takes {list(places)}, and its inputs are {list(ranks)}")
    if [node.kind for node in read].count("output") != 1 or read[-1].kind != "output":
        raise ValueError(f"loss {name!r} must end with its one output")
    _check_output(name, read[-1])
    return CustomLoss(name, MappingProxyType(ranks), read)


def _node(loss: str, node: Mapping[str, Any], nodes: dict[str, str]) -> LossNode:
    """Read a node of the loss of this name, and add the node's name to `nodes`."""
    kind, name, target = (node.get(key) for key in ("op", "name", "target"))
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in nodes:
        raise ValueError(f"loss {loss!r}: a node is called {printable(str(name), 64)!r}: give names, each once")
    where = f"loss {loss!r}: node {name}"
    if kind in ("call_module", "get_attr"):
        raise ValueError(f"{where} is a {kind}: a loss has no modules and captures no tensors")
    if kind not in ("placeholder", "call_function", "call_method", "output") or not isinstance(target, str):
        raise ValueError(f"{where} is of the unknown kind {printable(str(kind), 64)!r}")
    args, kwargs = node.get("args", []), node.get("kwargs", {})
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        raise ValueError(f"{where}: args are a list, and kwargs a dict")
    decode = lambda x: _decoded(where, x, nodes, 0)  # noqa: E731
    made = LossNode(kind, name, target, tuple(map(decode, args)), {str(key): decode(x) for key, x in kwargs.items()})
    if kind in ("call_function", "call_method"):
        _check_target(where, made)
    elif kind == "placeholder" and (args or kwargs):
        raise ValueError(f"{where}: an input has no default")
    nodes[name] = kind
    return made


def _check_target(label: str, node: LossNode) -> None:
    table = METHODS if node.kind == "call_method" else FUNCTIONS
    what = "method" if node.kind == "call_method" else "function"
    if node.target not in table:
        near = nearest(node.target, table)
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"{label}: {what} {printable(node.target, 64)!r} is not on the list of operations{hint}")
    fixed = [key for key, x in node.kwargs.items() if key in FIXED and x in FIXED[key]]
    if unknown := [key for key in node.kwargs if key not in KEYWORDS and key not in fixed]:
        raise ValueError(f"{label}: {node.target} with keyword {printable(unknown[0], 64)!r}, which is not on the list")
    if node.target in ("getattr", "builtins.getattr"):
        names = list(node.args[1:])
        if len(names) != 1 or names[0] not in ATTRIBUTES or node.kwargs:
            raise ValueError(f"{label}: attribute {printable(str(names), 64)}: there are {', '.join(ATTRIBUTES)}")
    elif any(
        isinstance(x, str) for x in _leaves((node.args, [x for key, x in node.kwargs.items() if key not in fixed]))
    ):
        raise ValueError(f"{label}: {node.target} takes no text")


def _decoded(label: str, x: Any, nodes: Mapping[str, str], depth: int) -> Any:
    """An argument from its plain data."""
    if depth > DEEPEST:
        raise ValueError(f"{label}: arguments are nested more than {DEEPEST} deep")
    inner = lambda part: _decoded(label, part, nodes, depth + 1)  # noqa: E731
    if x is None or isinstance(x, (bool, float)):
        return x
    if isinstance(x, int):
        if abs(x) > _LARGEST:
            raise ValueError(f"{label}: an integer above 2^62")
        return x
    if isinstance(x, str):
        if len(x) > 64:
            raise ValueError(f"{label}: text of {len(x)} characters")
        return x
    if isinstance(x, (list, tuple)):
        return [inner(part) for part in x]
    if not isinstance(x, Mapping) or len(x) != 1:
        raise ValueError(f"{label}: an argument of a form that the protocol does not have: {printable(repr(x), 100)}")
    ((kind, value),) = x.items()
    match kind, value:
        case "ref", str():
            if value not in nodes:
                raise ValueError(f"{label} reads node {printable(value, 64)!r}, which does not come before it")
            return NodeResult(value)
        case "tuple", [*parts]:
            return tuple(map(inner, parts))
        case "dict", Mapping():
            return {str(key): inner(part) for key, part in value.items()}
        case "slice", [start, stop, step]:
            return slice(*map(inner, (start, stop, step)))
        case "ellipsis", True:
            return Ellipsis
        case "float", str() if value in _FLOATS:
            return _FLOATS[value]
        case "dtype", str() if value in DTYPES:
            return DTYPES[value]
        case _:
            raise ValueError(f"{label}: argument {printable(repr(x), 100)} is not on the list")


def _check_output(loss: str, node: LossNode) -> None:
    value = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    if not (isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], dict)):
        raise ValueError(f"loss {loss!r} must return (loss, metrics), metrics a dict")
    for key, x in (("loss", value[0]), *value[1].items()):
        if not isinstance(x, NodeResult):
            raise ValueError(f"loss {loss!r}: its {printable(key, 64)} is no node")
        if key != "loss" and not _METRIC.fullmatch(key):
            text = "give custom/<name>:sum or custom/<name>:mean in lowercase"
            raise ValueError(f"loss {loss!r}: metric {printable(key, 80)!r}: {text}")


def _leaves(x: Any) -> Iterator[Any]:
    """The parts of an argument that hold no others."""
    if isinstance(x, Mapping):
        x = list(x.values())
    elif isinstance(x, slice):
        x = [x.start, x.stop, x.step]
    if isinstance(x, (list, tuple)):
        for part in x:
            yield from _leaves(part)
    else:
        yield x


def _count(x: Any) -> int:
    return sum(1 for _ in _leaves(x))


def _filled(x: Any, values: Mapping[str, Any]) -> Any:
    """An argument with the results of other nodes in it."""
    fill: Callable[[Any], Any] = lambda part: _filled(part, values)  # noqa: E731
    if isinstance(x, NodeResult):
        return values[x.name]
    if isinstance(x, Mapping):
        return {key: fill(part) for key, part in x.items()}
    if isinstance(x, slice):
        return slice(fill(x.start), fill(x.stop), fill(x.step))
    if isinstance(x, (list, tuple)):
        return type(x)(map(fill, x))
    return x


def run_custom(
    loss: CustomLoss, log_probs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of a loss over data, 0-d, and its metrics as sums over data, 0-d each, detached."""
    results = [loss(each, own) for each, own in zip(log_probs, inputs, strict=True)]
    total = torch.stack([value.to(log_probs[0].dtype) for value, _ in results]).sum()
    sums: dict[str, Tensor] = {}
    for _, metrics in results:
        for key, value in metrics.items():
            sums[key] = sums.get(key, torch.zeros_like(total)).detach() + value.detach()
    return total, sums
