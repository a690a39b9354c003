"""The recurrent states of mixers for rows under generation, in transformers' own cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fppo.models.model import Model
from fppo.models.rows import Mixer, by_groups, grouped
from fppo.models.states import KEPT
from fppo_kernels.padding import Lengths, sent


class States:
    """The states of R rows, changed by each pass of one more token; rows can leave, be repeated and re-ordered."""

    def __init__(self, model: Model) -> None:
        self._cache = DynamicCache(config=model.config if model.stateful else None)

    def __call__(self, mixer: Mixer, hidden: Tensor) -> Any:
        """Run a mixer on rows of tokens [R, S, H] that continue from these states."""
        return mixer(hidden, self._cache)

    def take_(self, index: Tensor) -> States:
        """Keep only the rows `index` [r], in this order."""
        self._change_(lambda x: x.index_select(0, index))
        return self

    def picked(self, index: Sequence[int]) -> States:
        """A copy of the states of some rows; for a model without states, the object itself."""
        if not self._cache.layers:
            return self
        other, cache = States.__new__(States), copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        other._cache = cache
        chosen, on = torch.tensor(index), dict[torch.device, Tensor]()  # copied to a device once

        def rows(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            if x.device not in on:
                on[x.device] = sent(chosen, x.device)
            return x.index_select(0, on[x.device])

        for layer in cache.layers:
            for name in KEPT:
                if (kept := getattr(layer, name, None)) is not None:
                    setattr(layer, name, {number: rows(x) for number, x in kept.items()})
        return other

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's states."""
        return sum(x[0].numel() * x.element_size() for kept in self._kept() for x in kept.values() if x is not None)

    def _kept(self) -> Iterator[dict[int, Tensor | None]]:
        for layer in self._cache.layers:
            for name in KEPT:
                yield getattr(layer, name, {})

    def _change_(self, fn: Callable[[Tensor], Tensor]) -> None:
        for kept in self._kept():
            kept |= {number: None if x is None else fn(x) for number, x in kept.items()}

    @staticmethod
    def joined_(parts: Sequence[States]) -> States:
        """Concatenate the rows of all parts, and use the parts up."""
        first, *others = parts
        for kept, *beside in zip(*(part._kept() for part in parts), strict=True):
            for number, x in kept.items():
                if others and x is not None:
                    kept[number] = torch.cat([x, *(own.pop(number) for own in beside)])  # type: ignore[list-item]
        return first


class PromptStates:
    """Recurrent states along packed prompts: zero at the start of each prompt, and kept after its last token.

    Only prompts of one length run together: padding before a prompt changes its states, even if it is masked (where a
    mixer's projection has a bias, transformers' own left-padded prompts begin with another convolution).
    """

    def __init__(self, lengths: Lengths, model: Model) -> None:
        self._groups = grouped(lengths, like=1.0) if model.stateful else []
        self._states = [States(model) for _ in self._groups] or [States(model)]
        self._device = lengths.cu_seqlens.device

    def __call__(self, mixer: Mixer, hidden: Tensor) -> Any:
        return by_groups(self._groups, hidden, lambda number, rows: self._states[number](mixer, rows))

    def states_(self, prompts: int, n: int) -> States:
        """The states after the first `prompts` prompts, `n` times each. This object is used up."""
        order = [row for group in self._groups for row in group.rows]
        places = sorted(range(len(order)), key=lambda place: order[place])[:prompts]
        index = torch.tensor([place for place in places for _ in range(n)])
        return States.joined_(self._states).take_(sent(index, self._device))
