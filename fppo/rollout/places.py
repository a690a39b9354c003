"""Rows that decode together and come and go: a row leaves with its keys, values and states, and comes back at any
column, since keys are rotated by position and not by column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo.models.run import Bound
from fppo.models.several import Adapter, OwnRows, beside
from fppo.rollout import banks as bank_rows
from fppo.rollout.banks import BankLayout, Banks, Moves
from fppo.rollout.cache import Integers, PassPlaces
from fppo.rollout.decoder import DecoderFactors, OwnSteps
from fppo.rollout.prefill import RowContext
from fppo.rollout.records import tensor_of
from fppo.rollout.states import States
from fppo.rollout.stepping import (
    Advance,
    AdvanceBy,
    DecodingPolicy,
    LiveRows,
    Next,
    OwnedRows,
    fixed_steps,
    pass_steps,
    plain_steps,
)
from fppo.runtime.graphs import Record
from fppo_kernels.padding import sent


class ServedAdapter(NamedTuple):
    """An adapter in use, and its version. `factors` are its factors in a decoder's layout; None without a decoder that
    is `held`."""

    adapter: Adapter
    version: int
    factors: DecoderFactors | None


CHUNK = 128  # columns by which the banks grow at least
ALIGNED = 64  # columns of recorded steps, as kernels read them best
_FEWEST = 8  # rows of recorded steps
_LAG = 64  # columns by which a row may lag behind the others before it is moved up to them


class DecodeSlots:
    """The rows that decode together, numbered from 0 without a gap, and the columns of their keys and values.

    All rows write the same column in a step. A row's tokens end just before it, and padding is before them. With a
    recorder of steps there are more places than rows, so that rows come and go without another recording; steps with
    rows that use `adapters` are not recorded.

    After a pass over several tokens of each row, of which some are kept, rows may lag behind the others. Then each
    writes a column of its own, over what was not kept, until rows come or one lags too far: then they are aligned.
    """

    def __init__(
        self,
        bound: Bound,
        policy: DecodingPolicy,
        limit: int | None,
        spare: int,
        recorder: Callable[[], Record] | None,
        adapters: Mapping[str, ServedAdapter],
    ) -> None:
        self._bound, self._policy = bound, policy
        self._limit = limit  # of a row's tokens
        self._spare = spare  # one spare place for every so many rows
        self._recorder = recorder  # makes recorders of steps
        self._adapters = adapters  # by name, as they are now
        self._owners: list[str | None] = []  # the adapter of each row
        # columns before each row's tokens, `RowContext.shift`, and tokens that each row may come to have
        self._pads, self._shifts, self._most = (np.zeros(0, dtype=np.int64) for _ in range(3))
        self._lags = np.zeros(0, dtype=np.int64)  # columns between each row's end and the next column
        self._states: States | None = None
        self._column = 0  # the next column to write
        self._layout = BankLayout((), (), policy.device, ())  # until rows come
        self._banks: Banks = ()
        self._room = (0, 0)  # rows and columns of the banks
        # the most tokens of a row, a function that makes steps for such rows, and whether they are recorded
        self._steps: tuple[int, Callable[[LiveRows], Advance], bool] | None = None
        self._advance: Advance | None = None
        self._fixed: LiveRows | None = None  # the rows of a recorded step
        # the most tokens of a row, and a function that makes passes for such rows; the rows of passes
        self._passes: tuple[int, Callable[[LiveRows], AdvanceBy]] | None = None
        self._passing: LiveRows | None = None
        self._beside: Bound | None = None  # the model with the rows' adapters, where its modules run them

    def __len__(self) -> int:
        return len(self._pads)

    @property
    def longest(self) -> int:
        """The most tokens that a row may come to have."""
        return int(self._most.max(initial=0))

    def join(self, contexts: Sequence[RowContext], max_lengths: Sequence[int], adapters: Sequence[str | None]) -> None:
        """Give rows the next of the reserved places. `max_lengths` are the tokens that each may reach, and `adapters`
        name those that they use, if any."""
        if not contexts:
            return
        first = len(self)
        for _, each in groupby(
            contexts, key=lambda context: id(context.banks if context.passed is None else context.passed)
        ):
            alike = [*each]
            rows, passed = slice(first, first + len(alike)), alike[0].passed
            if passed is None:
                bank_rows.put_(self._banks, rows, self._column, alike[0].banks)
            else:
                spans = [(context.start, context.length) for context in alike]
                bank_rows.put_passed_(self._layout.layers(self._banks), rows, self._column, passed, spans)
            first = rows.stop
        self._pads = np.append(self._pads, [self._column - context.length for context in contexts])
        self._shifts = np.append(self._shifts, [context.shift for context in contexts])
        self._lags = np.append(self._lags, np.zeros(len(contexts), dtype=np.int64))
        self._most = np.append(self._most, max_lengths)
        self._owners += adapters
        if self._steps is not None and self._steps[0] < self.longest:
            self._steps = self._fixed = None
        if self._passes is not None and self._passes[0] < self.longest:
            self._passes = None
        parts = [context.states.picked([0]) for context in contexts]
        self._states = States.joined_([*([] if self._states is None else [self._states]), *parts])
        self._changed()

    def context(self, row: int) -> RowContext:
        """A copy of a row's context."""
        pad, shift, states = int(self._pads[row]), int(self._shifts[row]), self._states
        assert states is not None
        end = self._column - int(self._lags[row])
        banks = bank_rows.taken(self._banks, row, pad, end)
        return RowContext(self._layout, end - pad, banks, states.picked([row]), shift)

    def leave(self, rows: Sequence[int]) -> Moves:
        """Take rows out, and move other rows to their places. Returns these moves."""
        moves = Moves.of(len(self), rows)
        columns = self._pads, self._shifts, self._most
        self._pads, self._shifts, self._most = (x[moves.order] for x in columns)
        bank_rows.move_(self._banks, moves, int(self._pads.min(initial=self._column)), self._column)
        self._lags = self._lags[moves.order]
        least = int(self._lags.min()) if len(self) else 0
        self._column, self._lags = self._column - least, self._lags - least
        self._owners = [self._owners[row] for row in moves.order]
        if self._states is not None:
            self._states = self._states.picked(moves.order.tolist()) if len(self) else None
        self._changed()
        return moves

    def step(self, tokens: Tensor) -> Next:
        """Run one more token of each row [R], and return the logits after it."""
        if self._lags.any():
            one = np.ones_like(self._lags)
            after = self.run(tokens, one)
            self.keep(one)
            return after
        if self._column == self._room[1]:
            self._more_columns()
        if self._recorder is not None and self._room[0] > max(_FEWEST, 2 * len(self)):
            self._rebase((max(_FEWEST, len(self) + len(self) // 4), self._room[1]), 0)
        if self._advance is None:
            self._advance = self._made()
        rows = len(self) if self._fixed is None else self._room[0]
        new = tokens if rows == len(tokens) else F.pad(tokens, (0, rows - len(tokens)))
        advance, column = self._advance, self._column
        self._column += 1
        after = self._ran(self._beside, lambda: advance(new, column))
        return after if rows == len(tokens) else after.each(lambda x: x[: len(tokens)])

    def run(self, tokens: Tensor, counts: Integers) -> Next:
        """Run `counts` (>= 1) more tokens of each row, laid end to end [N], and return the logits after each. `keep`
        then says how many of them stay."""
        needed = int((counts - self._lags).max())
        if self._column + needed > self._room[1]:
            self._more_columns(needed)
        places = PassPlaces(self._pads, self._column - self._lags, counts, self._policy.device)
        calls = self._layout.attention_layers
        if self._passes is None:
            most = self._length()
            self._passes = most, self._bound(lambda _: pass_steps(self._policy, calls, most))
        live = self._passing = self._passing or self._live(len(self), [])
        beside = None
        if any(owner is not None for owner in self._owners):
            owned = self._owned([self._owners[row] for row in places.row_numbers])
            live, beside = live.of(owned), self._beside_of(owned)
        advance = self._passes[1](live)
        return self._ran(beside, lambda: advance(tokens, places))

    def keep(self, kept: Integers) -> None:
        """Keep the first tokens of each row [R] of the last `run`; what is behind them is written over."""
        ends = self._column - self._lags + kept
        self._column = int(ends.max())
        self._lags = self._column - ends
        if self._lags.max() > _LAG:
            self._align()

    def _align(self) -> None:
        """Move rows that lag up to the others."""
        for row in np.flatnonzero(self._lags).tolist():
            lag = int(self._lags[row])
            bank_rows.move_up_(self._banks, row, int(self._pads[row]), self._column - lag, lag)
        self._pads, self._lags = self._pads + self._lags, np.zeros_like(self._lags)
        self._changed()

    def _ran(self, beside: Bound | None, run: Callable[[], Next]) -> Next:
        """Run a step or a pass: with adapters in the modules of `beside`, or by the decoder, or by the model."""
        decoder = self._policy.decoder
        if beside is not None:
            return beside(lambda _: run())
        if decoder is not None and decoder.held:
            with self._bound.precision():
                return run()
        return self._bound(lambda _: run())

    def _changed(self) -> None:
        """Adapt the step to rows that came or went. A recorded step is kept if no row uses an adapter."""
        self._passing = None
        if self._fixed is None or any(owner is not None for owner in self._owners):
            self._advance = self._fixed = None
            return
        for x, own in ((self._fixed.pads, self._pads), (self._fixed.starts, self._pads - self._shifts)):
            x[: len(self)] = self._column_of(own)

    def _column_of(self, values: Any) -> Tensor:
        return sent(torch.from_numpy(values), self._policy.device)[:, None]

    def renew(self) -> None:
        """Adapt the step to adapters that changed."""
        self._changed()

    def _made(self) -> Advance:
        """Make the step for the present rows."""
        policy, rows, owned = self._policy, self._room[0], self._owned(self._owners)
        record = None if self._recorder is None or owned else self._recorder()
        self._beside = self._beside_of(owned)
        if self._steps is None or record is not None or self._steps[2]:  # a new recorder has no earlier recordings
            calls, most = self._layout.attention_layers, self._length()
            if record is None:
                steps = self._bound(lambda _: plain_steps(policy, calls, most))
            else:
                steps = self._bound(lambda _: fixed_steps(policy, calls, most, record))
            self._steps = most, steps, record is not None
        live = self._live(len(self) if record is None else rows, owned, apart=record is not None)
        self._fixed = None if record is None else live
        return self._steps[1](live)

    def _length(self) -> int:
        """The most tokens of rows that steps are made for."""
        return 2 * self.longest if self._limit is None else min(2 * self.longest, self._limit)

    def _live(self, count: int, owned: Sequence[OwnedRows], *, apart: bool = False) -> LiveRows:
        """The first `count` places as rows of a step; with `apart` their starts are a tensor apart from their padding,
        which a recorded step reads."""
        assert self._states is not None
        banks = tuple(x[:, :count] for x in self._banks)
        pads, shifts = (np.pad(x, (0, count - len(self))) for x in (self._pads, self._shifts))
        starts = self._column_of(pads - shifts) if apart or shifts.any() else None
        pads = self._column_of(pads)
        starts = pads if starts is None else starts
        bounds = int(self._pads.min()), int(self._pads.max())
        live = LiveRows(self._layout.layers(banks), self._room[1], pads, starts, self._states, bounds)
        return live.of(owned)

    def _beside_of(self, owned: Sequence[OwnedRows]) -> Bound | None:
        """The model with the rows' adapters in its modules; None if a decoder runs them, or nothing."""
        by_decoder = self._policy.decoder is not None and self._policy.decoder.held
        return beside(self._bound, [own for own, _ in owned]) if owned and not by_decoder else None

    def _owned(self, owners: Sequence[str | None]) -> list[OwnedRows]:
        """The places of each adapter among the `owners` of all."""
        places: dict[str, list[int]] = {}
        for place, name in enumerate(owners):
            if name is not None:
                places.setdefault(name, []).append(place)
        found: list[OwnedRows] = []
        for name, own in places.items():
            rows, (adapter, _, factors) = sent(tensor_of(own, torch.int64), self._policy.device), self._adapters[name]
            found.append((OwnRows(adapter, rows), None if factors is None else OwnSteps(rows, factors)))
        return found

    def reserve(self, layout: BankLayout, more: int, longest: int, max_length: int) -> None:
        """Make room for `more` rows with keys and values of this layout. The longest of them has `longest` tokens, and
        each may reach `max_length`."""
        if self._lags.any():
            self._align()
        self._layout, rows = layout, len(self) + more
        column = max(longest, self._column) if len(self) else longest
        room, fewest = self._room, 1 if self._recorder is None else _FEWEST
        columns = self.columns(column, max(max_length, self.longest))
        if not len(self):
            self._column = longest  # there is nothing yet that would be written over
            room = room if rows <= room[0] and columns <= room[1] else (max(rows, fewest), columns)
        if rows > room[0]:
            room = max(rows + rows // self._spare, fewest), room[1]
        if column > room[1]:
            room = room[0], columns
        if room != self._room or column != self._column:
            self._rebase(room, column - self._column)

    def _more_columns(self, more: int = 1) -> None:
        """Make room for `more` columns of keys and values: move rows back over the padding that all share, or widen the
        banks that hold them."""
        rows, columns = self._room
        shared = int(self._pads.min())
        column = self._column - shared
        if shared < columns // 4 and columns < self.columns(columns, self.longest):
            shared, column = 0, self._column
        wanted = max(self.columns(column, self.longest), self._rounded(column + more))
        self._rebase((rows, max(columns if shared else 0, wanted)), -shared)

    def columns(self, column: int, max_length: int) -> int:
        """The number of columns to allocate if `column` columns are used: half as many again, but at most half more
        than `max_length`, the tokens that the longest row may come to have; at most that if there are no rows yet."""
        wanted, beyond = column + max(CHUNK, column // 2), max(CHUNK, max_length // 2) if len(self) else 0
        return self._rounded(max(min(wanted, max_length + beyond), column + (len(self) > 0)))

    def _rounded(self, columns: int) -> int:
        return columns if self._recorder is None else -(-columns // ALIGNED) * ALIGNED

    def _rebase(self, room: tuple[int, int], by: int) -> None:
        """Move all rows by `by` columns, into banks of `room` rows and columns; if the banks stay the same, a recorded
        step stays valid."""
        banks = self._banks if room == self._room else self._layout.rows(*room)
        if len(self):
            bank_rows.shift_(self._banks, banks, len(self), int(self._pads.min()), self._column, by)
        self._column += by
        self._pads = self._pads + by
        if banks is not self._banks:
            self._banks, self._room, self._fixed = banks, room, None
        self._changed()
