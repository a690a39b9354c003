"""Rows that decode together and come and go: a row leaves with its keys, values and states, and comes back at any
column, since keys are rotated by position and not by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fppo.models.run import Bound
from fppo.models.seams import AttentionLayer
from fppo.models.several import Adapter, OwnRows, beside
from fppo.rollout import banks as bank_rows
from fppo.rollout.banks import BankLayout, Banks
from fppo.rollout.decoder import DecoderFactors, OwnSteps
from fppo.rollout.reading import RowContext
from fppo.rollout.records import tensor_of
from fppo.rollout.states import States
from fppo.rollout.stepping import Advance, DecodingPolicy, LiveRows, Next, fixed_steps, plain_steps
from fppo.runtime.graphs import Record
from fppo_kernels.padding import sent

T = TypeVar("T")


class ServedAdapter(NamedTuple):
    """An adapter in use, and its version. `factors` are its factors in a decoder's layout; None without a decoder that
    is `held`."""

    adapter: Adapter
    version: int
    factors: DecoderFactors | None


CHUNK = 128  # columns by which the banks grow at least
ALIGNED = 64  # columns of recorded steps, as kernels read them best
_FEWEST = 8  # rows of recorded steps


class DecodeSlots:
    """The rows that decode together, numbered from 0 without a gap, and the columns of their keys and values.

    All rows write the same column in a step. A row's tokens end just before it, and padding is before them. With a
    recorder of steps there are more places than rows, so that rows come and go without another recording; steps with
    rows that use `adapters` are not recorded.
    """

    def __init__(
        self,
        bound: Bound,
        policy: DecodingPolicy,
        layout: BankLayout,
        calls: Sequence[AttentionLayer],
        limit: int | None,
        spare: int,
        recorder: Callable[[], Record] | None,
        adapters: Mapping[str, ServedAdapter],
    ) -> None:
        self._bound, self._policy, self._layout, self._calls = bound, policy, layout, calls
        self._limit = limit  # of a row's tokens
        self._spare = spare  # one spare place for every so many rows
        self._recorder = recorder  # makes recorders of steps
        self._adapters = adapters  # by name, as they are now
        self._owners: list[str | None] = []  # the adapter of each row
        self._pads: list[int] = []  # columns before each row's tokens
        self._shifts: list[int] = []  # as `RowContext.shift`
        self._most: list[int] = []  # tokens that each row may come to have
        self._states: States | None = None
        self._column = 0  # the next column to write
        self._banks: Banks = layout.rows(0, 0)
        self._room = (0, 0)  # rows and columns of the banks
        # the most tokens of a row, a function that makes steps for such rows, and whether they are recorded
        self._steps: tuple[int, Callable[[LiveRows], Advance], bool] | None = None
        self._advance: Advance | None = None
        self._fixed: LiveRows | None = None  # the rows of a recorded step
        self._beside: Bound | None = None  # the model with the rows' adapters, where its modules run them

    def __len__(self) -> int:
        return len(self._pads)

    @property
    def longest(self) -> int:
        """The most tokens that a row may come to have."""
        return max(self._most, default=0)

    def join(self, contexts: Sequence[RowContext], most: Sequence[int], owners: Sequence[str | None]) -> None:
        """Give rows the next places. `most` are the tokens that each may reach, and `owners` the adapters that they
        use, if any."""
        if not contexts:
            return
        first = len(self)
        self._make_room(first + len(contexts), max(context.length for context in contexts), max(most))
        for row, context in enumerate(contexts, start=first):
            bank_rows.put_(self._banks, row, self._column, context.banks)
            self._pads.append(self._column - context.length)
            self._shifts.append(context.shift)
        self._most += most
        self._owners += owners
        if self._steps is not None and self._steps[0] < self.longest:
            self._steps = self._fixed = None
        parts = [context.states.picked([0]) for context in contexts]
        self._states = States.joined_([*([] if self._states is None else [self._states]), *parts])
        self._changed()

    def context(self, row: int) -> RowContext:
        """A copy of a row's context."""
        pad, states = self._pads[row], self._states
        assert states is not None
        banks = bank_rows.taken(self._banks, row, pad, self._column)
        return RowContext(self._column - pad, banks, states.picked([row]), self._shifts[row])

    def leave(self, rows: Sequence[int]) -> list[int]:
        """Take rows out, and move other rows to their places. Returns, by place, the number that its row had before."""
        order = list(range(len(self)))
        columns: Any = order, self._pads, self._shifts, self._most, self._owners
        for row in sorted(rows, reverse=True):
            last = len(order) - 1
            if row < last:
                start = self._pads[last]
                bank_rows.move_(self._banks, last, row, start, self._column)
                for column in columns:
                    column[row] = column[last]
            for column in columns:
                column.pop()
        if rows and self._states is not None:
            self._states = self._states.picked(order) if order else None
        self._changed()
        return order

    def step(self, tokens: Sequence[int]) -> Next:
        """Run one more token of each row, and return the logits after it."""
        if self._column == self._room[1]:
            self._more_columns()
        if self._recorder is not None and self._room[0] > max(_FEWEST, 2 * len(self)):
            self._rebase((max(_FEWEST, len(self) + len(self) // 4), self._room[1]), 0)
        if self._advance is None:
            self._advance = self._made()
        rows = len(self) if self._fixed is None else self._room[0]
        new = sent(tensor_of([*tokens, *[0] * (rows - len(tokens))], torch.int64), self._layout.device)
        advance, column = self._advance, self._column
        self._column += 1
        decoder = self._policy.decoder
        if self._beside is not None:
            after = self._beside(lambda _: advance(new, column))
        elif decoder is not None and decoder.held:
            with self._bound.precision():
                after = advance(new, column)
        else:
            after = self._bound(lambda _: advance(new, column))
        return after if rows == len(tokens) else after.each(lambda x: x[: len(tokens)])

    def _changed(self) -> None:
        """Adapt the step to rows that came or went. A recorded step is kept if no row uses an adapter."""
        if self._fixed is None or any(owner is not None for owner in self._owners):
            self._advance = self._fixed = None
            return
        for x, own in ((self._fixed.pads, self._pads), (self._fixed.starts, self._starts())):
            x[: len(self), 0] = sent(tensor_of(own, torch.int64), x.device)

    def _starts(self) -> list[int]:
        return [pad - shift for pad, shift in zip(self._pads, self._shifts, strict=True)]

    def _column_of(self, values: Sequence[int]) -> Tensor:
        return sent(tensor_of(values, torch.int64), self._layout.device)[:, None]

    def renew(self) -> None:
        """Adapt the step to adapters that changed."""
        self._changed()

    def _made(self) -> Advance:
        """Make the step for the present rows."""
        policy, (rows, columns), owned = self._policy, self._room, self._owned()
        record = None if self._recorder is None or owned else self._recorder()
        by_decoder = policy.decoder is not None and policy.decoder.held
        self._beside = beside(self._bound, [own for own, _ in owned]) if owned and not by_decoder else None
        if self._steps is None or record is not None or self._steps[2]:  # a new recorder has no earlier recordings
            most = 2 * self.longest if self._limit is None else min(2 * self.longest, self._limit)
            if record is None:
                steps = self._bound(lambda _: plain_steps(policy, self._calls, most, alike=False))
            else:
                steps = self._bound(lambda _: fixed_steps(policy, self._calls, most, record))
            self._steps = most, steps, record is not None
        assert self._states is not None
        count = len(self) if record is None else rows
        banks = tuple(x[:, :count] for x in self._banks)
        spare = [0] * (count - len(self))
        pads = self._column_of([*self._pads, *spare])
        starts = self._column_of([*self._starts(), *spare]) if record is not None or any(self._shifts) else pads
        cache, own = self._layout.layers(banks), [steps for _, steps in owned if steps is not None]
        bounds = min(self._pads), max(self._pads)
        live = LiveRows(cache, columns, pads, starts, self._states, bounds, [rows for rows, _ in owned], own)
        self._fixed = None if record is None else live
        return self._steps[1](live)

    def _owned(self) -> list[tuple[OwnRows, OwnSteps | None]]:
        """The rows of each adapter."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(self._owners):
            if name is not None:
                places.setdefault(name, []).append(place)
        found: list[tuple[OwnRows, OwnSteps | None]] = []
        for name, own in places.items():
            rows, (adapter, _, factors) = sent(tensor_of(own, torch.int64), self._layout.device), self._adapters[name]
            found.append((OwnRows(adapter, rows), None if factors is None else OwnSteps(rows, factors)))
        return found

    def _make_room(self, rows: int, longest: int, most: int) -> None:
        """Make room for `rows` rows. The longest new one has `longest` tokens, and each may reach `most`."""
        column = max(longest, self._column) if len(self) else longest
        room = self._room
        if not len(self):
            self._column = longest  # there is nothing yet that would be written over
        if rows > room[0]:
            room = max(rows + rows // self._spare, _FEWEST), room[1]
        if column > room[1]:
            room = room[0], max(room[1], self.columns(column, max(most, self.longest)))
        if room != self._room or column != self._column:
            self._rebase(room, column - self._column)

    def _more_columns(self) -> None:
        """Make room for another column: move rows back over the padding that they share, or widen the banks."""
        rows, columns = self._room
        shared = min(self._pads)
        column = self._column - shared
        if shared < columns // 4 and columns < self.columns(columns, self.longest):
            shared, column = 0, self._column
        self._rebase((rows, max(columns if shared else 0, self.columns(column, self.longest))), -shared)

    def columns(self, column: int, most: int) -> int:
        """The number of columns to allocate if `column` columns are used: half as many again, but at most half more
        than `most`, the tokens that the longest row may come to have."""
        wanted = column + max(CHUNK, column // 2)
        bounded = max(min(wanted, most + max(CHUNK, most // 2)), column + 1)
        return bounded if self._recorder is None else -(-bounded // ALIGNED) * ALIGNED

    def _rebase(self, room: tuple[int, int], by: int) -> None:
        """Move all rows by `by` columns, into banks of `room` rows and columns; if the banks stay the same, a recorded
        step stays valid."""
        banks = self._banks if room == self._room else self._layout.rows(*room)
        if len(self):
            bank_rows.shift_(self._banks, banks, len(self), min(self._pads), self._column, by)
        self._column += by
        self._pads = [pad + by for pad in self._pads]
        if banks is not self._banks:
            self._banks, self._room, self._fixed = banks, room, None
        self._changed()
