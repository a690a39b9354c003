"""Plain values of an assembled run, by their paths."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedTokenizerBase

from fppo.data import DemonstrationSet, PromptSet
from fppo.fields import only
from fppo.key import Key
from fppo.models.model import Model
from fppo.runtime.mesh import Mesh
from fppo_kernels.table import Kernels

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Path)
OPAQUE = (Mesh, torch.Tensor, PreTrainedTokenizerBase)  # which have tests of their own
WITHIN = ("RewardRunner", "EarlyRewardRunner", "LanguageJudge", "FunctionRunner")
WITHIN += ("AgentEngine", "AgentRunner")
AROUND = ("stage", "()", "score", "engine", "runner", "write_")  # what only wraps, or is wrapped: no part of a path
PASSED = ("pieces", "make_on_finished", "numbers")  # of tokens, of the runner that rewards have, of all prompts


def walked(value: Any, path: str = "") -> dict[str, Any]:
    """Every plain value in frozen classes, mappings, sequences, what functions are bound to, and what they enclose.

    Paths leave out what wraps, so that a stage has one path with and without others around it. A model is its head, its
    size and how it runs, kernels are the names of their functions.
    """
    found: dict[str, Any] = {}
    _walk(value, path, frozenset(), found)
    return found


def placed(value: Any, names: Mapping[int, str]) -> dict[str, set[str]]:
    """Which of some objects, by their `id`, are at which paths; `names` are what they are called."""
    found: dict[str, Any] = {}
    _walk(value, "", frozenset(), found, names)
    return {
        path.rstrip("'"): {x for place, x in found.items() if place.rstrip("'") == path.rstrip("'")} for path in found
    }


def _walk(
    value: Any, path: str, above: frozenset[int], found: dict[str, Any], names: Mapping[int, str] | None = None
) -> None:
    value = inspect.unwrap(value) if inspect.isfunction(value) else value  # of checks of annotations
    if names is not None and id(value) in names:
        _note(found, path, names[id(value)])
    elif names is not None and isinstance(value, (*PLAIN, Key, PromptSet, DemonstrationSet)):
        return
    elif isinstance(value, PLAIN):
        _note(found, path, value)
    elif isinstance(value, Key):
        _note(found, path, value.seed)
    elif isinstance(value, torch.Tensor) and not value.dim():
        _note(found, path, round(value.item(), 6))
    elif isinstance(value, PromptSet | DemonstrationSet):
        _note(found, path, len(value))
    elif not isinstance(value, OPAQUE) and id(value) not in above:
        for name, part in _parts(value):
            inside = path if name in AROUND else f"{path}.{name}".removeprefix(".")
            if name not in PASSED:
                _walk(part, inside, above | {id(value)}, found, names)
        if names is None and (inspect.isfunction(value) or inspect.isbuiltin(value)):
            _note(found, f"{path}()", value.__qualname__)


def _note(found: dict[str, Any], path: str, value: Any) -> None:
    """A value; another one at the same path stands beside the first."""
    while path in found and found[path] != value:
        path += "'"
    found[path] = value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Model):
        adapter = value.frozen and str(value.frozen.lora)
        yield from {"head": value.head, "width": value.config.hidden_size, "layers": len(value.layers)}.items()
        names = ("compute_dtype", "checkpoint_layers", "compile_layers", "mlp_slice_tokens", "trust_remote_code")
        yield from only(value, *names).items()
        yield "adapter", adapter
    elif isinstance(value, Kernels):
        yield from ((x.name, _name(getattr(value, x.name))) for x in attrs.fields(Kernels))
    elif attrs.has(type(value)):
        yield from ((x.name, getattr(value, x.name)) for x in attrs.fields(type(value)))
    elif isinstance(value, Mapping):
        yield from ((str(name), part) for name, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(number), part) for number, part in enumerate(value))
    elif isinstance(value, partial):
        yield "()", value.func
        yield from ((str(number), part) for number, part in enumerate(value.args))
        yield from value.keywords.items()
    elif inspect.ismethod(value):
        yield "self", value.__self__
    elif inspect.isfunction(value):
        yield from inspect.getclosurevars(value).nonlocals.items()
    elif type(value).__name__ in WITHIN:
        yield from ((name.lstrip("_"), part) for name, part in vars(value).items())


def _name(kernel: Any) -> str:
    """The module and the name of a kernel's function."""
    while isinstance(kernel, partial):
        kernel = kernel.func
    kernel = inspect.unwrap(kernel) if inspect.isfunction(kernel) else kernel
    return f"{kernel.__module__.rpartition('.')[2]}.{getattr(kernel, '__qualname__', type(kernel).__name__)}"


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `other` that differ from those of `one`, or are missing there."""
    return {path: value for path, value in other.items() if path not in one or one[path] != value}
