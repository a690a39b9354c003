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
from fppo.key import Key
from fppo.models.model import Model
from fppo.runtime.mesh import Mesh
from fppo_kernels.table import Kernels

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Path)
OPAQUE = (Model, Kernels, Mesh, torch.Tensor, PreTrainedTokenizerBase)  # which have tests of their own
WITHIN = ("RewardRunner", "EarlyRewardRunner", "LanguageJudge", "ToolRunner", "EnvironmentRunner")
AROUND = ("stage", "()", "score", "engine", "runner", "write_")  # what only wraps, or is wrapped: no part of a path
PASSED = ("pieces", "make_on_finished", "numbers")  # of tokens, of the runner that rewards have, of all prompts


def walked(value: Any, path: str = "") -> dict[str, Any]:
    """Every plain value in frozen classes, mappings, sequences, what functions are bound to, and what they enclose.

    Paths leave out what wraps, so that a stage has one path with and without others around it.
    """
    found: dict[str, Any] = {}
    _walk(value, path, frozenset(), found)
    return found


def _walk(value: Any, path: str, above: frozenset[int], found: dict[str, Any]) -> None:
    value = inspect.unwrap(value) if inspect.isfunction(value) else value  # of checks of annotations
    if isinstance(value, PLAIN):
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
                _walk(part, inside, above | {id(value)}, found)
        if inspect.isfunction(value) or inspect.isbuiltin(value):
            _note(found, f"{path}()", value.__qualname__)


def _note(found: dict[str, Any], path: str, value: Any) -> None:
    """A value; another one at the same path stands beside the first."""
    while path in found and found[path] != value:
        path += "'"
    found[path] = value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if attrs.has(type(value)):
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


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `other` that differ from those of `one`, or are missing there."""
    return {path: value for path, value in other.items() if path not in one or one[path] != value}
