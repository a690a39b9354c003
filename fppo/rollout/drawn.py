"""Rows that draw, in tensors by place: their sampling settings and their tokens, without a loop over rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fppo import devices
from fppo.key import uniforms
from fppo.rollout.banks import Moves
from fppo.rollout.cache import Integers
from fppo.rollout.records import tensor_of
from fppo.rollout.requests import End
from fppo.rollout.rows import OpenRow, PlacedTokens
from fppo.rollout.sampling import Draws
from fppo_kernels.padding import sent

CHUNK = 128  # uniform numbers that a row gets at once
_SCORED = 4096  # tokens whose log-probs are computed together, and for which hidden states are kept

# the log-probs [N] of tokens [N] of one kind of sampling, by the hidden states [N, H] before them
ScoreKind = Callable[[int, Tensor, Tensor], Tensor]
_Places = tuple[int, Tensor | None]  # a kind of sampling, and its rows; None: all rows


class DrawingRows(NamedTuple):
    """The rows that draw next, of those in places."""

    places: Tensor | None  # int64 [r] on the device; None: all
    rows: Sequence[OpenRow]
    kinds: Sequence[_Places]  # each kind of sampling, with its places among these rows
    numbers: Tensor  # float64 (float32 where a device has no more) [r, S] of the next S draws
    names: Sequence[str]


class DrawnRows:
    """Rows in places, numbered from 0 without a gap, as draws see them.

    Draws are logged, and laid out by row when rows come or go. Rows that have ended may stay for a while; what they
    draw then is dropped. `score` computes log-probs of tokens whose hidden states were logged. A method that raises
    for lack of memory leaves what was drawn before, which `taken` returns.
    """

    def __init__(self, device: torch.device, score: ScoreKind) -> None:
        self.rows: list[OpenRow] = []
        self.pending = torch.zeros(0, dtype=torch.int64, device=device)  # each row's next token to run
        self._device, self._score = device, score
        self._counts, self._most, self._ran_before, self._kinds = (np.zeros(0, dtype=np.int64) for _ in range(4))
        # the draws and steps of rows that have ended; 0: these rows go on
        self._ends, self._ran_at = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self._columns: dict[str, Tensor] = {}  # [N, W, *] by place: what rows have drawn
        self._uniforms = torch.zeros(0, CHUNK, dtype=devices.widest(device), device=device)
        self._stops = torch.full((0, 1), -1, dtype=torch.int64, device=device)  # [N, s], filled up with -1
        self._log: list[tuple[Draws, Tensor | None]] = []  # of the rows that draw now
        self._experts: list[Tensor] = []  # of all rows
        self._ran = 0  # steps so far
        self._drawing: DrawingRows | None = None
        self._queued = self._stopping = False  # whether rows have tokens to run first, and whether tokens end rows
        self._readers: list[int] = []  # places of rows that end with a text
        self._left = 1  # draws until the first row has its most tokens
        self._due = False  # whether what was logged is laid out before the next draw

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, rows: Sequence[OpenRow], pending: Sequence[int]) -> None:
        """Give rows the next places, with their next tokens to run."""
        if not rows:
            return
        self.fold()
        first, more = len(self), len(rows)
        whole = torch.cat([self.pending, sent(tensor_of(pending, torch.int64), self._device)])
        stops = [row.request.sampling.stop_token_ids for row in rows]
        self._stops = _roomy(self._stops, first + more, max(map(len, stops)), -1)
        width = self._stops.shape[1]
        own = [[*ids, *[-1] * (width - len(ids))] for ids in stops]
        self._stops[first : first + more] = sent(torch.tensor(own, dtype=torch.int64), self._device)
        self._uniforms = _roomy(self._uniforms, first + more, CHUNK)
        self.rows, self.pending, self._drawing = [*self.rows, *rows], whole, None
        self._counts = np.append(self._counts, np.zeros(more, dtype=np.int64))
        self._ends = np.append(self._ends, np.zeros(more, dtype=np.int64))
        self._ran_at = np.append(self._ran_at, np.zeros(more, dtype=np.int64))
        self._most = np.append(self._most, [row.tokens_left for row in rows])
        self._kinds = np.append(self._kinds, [row.kind for row in rows])
        self._ran_before = np.append(self._ran_before, np.full(more, self._ran))

    def leave(self, moves: Moves) -> None:
        """Take rows out, after `taken`, and move others to their places."""
        order, holes, movers = (self._sent(x) for x in moves)
        pending = self.pending[order]
        for x in (self._uniforms, self._stops, *self._columns.values()) if len(holes) else ():
            x[holes] = x[movers]
        self.rows = [self.rows[place] for place in moves.order.tolist()]
        self.pending, self._drawing = pending, None
        for name in ("_counts", "_most", "_kinds", "_ran_before", "_ends", "_ran_at"):
            setattr(self, name, getattr(self, name)[moves.order])

    def ran(self, experts: Tensor | None) -> None:
        """Note that the pending token of each row ran, with its experts [R, L, k]."""
        self._ran += 1
        if experts is not None:
            self._experts.append(experts)

    def drawing(self) -> tuple[DrawingRows, Tensor]:
        """The rows that draw next, and the uniform number of each one's draw [r]."""
        made = self._drawing
        if made is None or self._due or len(self._log) == made.numbers.shape[1]:
            self.fold()
            made = self._drawing = self._made()
        return made, made.numbers[:, len(self._log)]

    def _made(self) -> DrawingRows:
        rows, places = self.rows, np.arange(len(self))
        self._queued = any(row.queued_tokens for row in rows)
        self._readers = [place for place, row in enumerate(rows) if row.reader is not None]
        self._stopping = any(row.request.sampling.stop_token_ids for row in rows)
        if self._queued:
            places = np.array([place for place in places if not rows[place].queued_tokens], dtype=np.int64)
            rows = [rows[place] for place in places]
        index = self._sent(places)
        counts = self._counts[places]
        self._left = int((self._most[places] - counts).min(initial=CHUNK))
        phases = counts % CHUNK
        self._refill(places[phases == 0])
        columns = self._sent(phases)[:, None] + torch.arange(CHUNK - phases.max(initial=0), device=self._device)
        numbers = self._uniforms[index[:, None], columns]
        own = self._kinds[places]
        return DrawingRows(index if self._queued else None, rows, self._alike(own), numbers, [row.name for row in rows])

    def _alike(self, own: Integers) -> list[_Places]:
        """The kinds of sampling among those of some rows, each with its places among them."""
        kinds = [*np.unique(own).tolist()]
        return [(kind, None if len(kinds) == 1 else self._sent(np.flatnonzero(own == kind))) for kind in kinds]

    def _sent(self, values: Any) -> Tensor:
        return sent(torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)), self._device)

    def _refill(self, places: Any) -> None:
        """Give rows the uniform numbers of their next draws."""
        if not len(places):
            return
        width = int((self._most - self._counts)[places].max().clip(0, CHUNK))
        rows = [self.rows[place] for place in places]
        begins = np.array([row.request.position + row.count for row in rows]) + self._counts[places]
        columns = torch.from_numpy(begins)[:, None] + torch.arange(width)
        numbers = uniforms([row.request.key for row in rows], [row.request.row for row in rows], columns)
        self._uniforms[self._sent(places), :width] = sent(numbers.to(self._uniforms.dtype), self._device)

    def take(self, draws: Draws, hidden: Tensor | None) -> dict[int, End]:
        """Take the next draws, with the hidden states before them if they are to be scored. Returns the places of the
        rows that end with them, and how."""
        made = self._drawing
        assert made is not None
        pending, places = draws.tokens, made.places
        if places is not None:
            queued = [0 if not row.queued_tokens else row.queued_tokens.popleft() for row in self.rows]
            pending = sent(tensor_of(queued, torch.int64), self._device).index_copy(0, places, draws.tokens)
        ended = self._ended(draws.tokens, places)
        self._log.append((draws, hidden))  # from here on they are taken: nothing below needs memory
        self.pending = pending
        for place in ended:
            self._ends[place], self._ran_at[place] = self._counts[place] + len(self._log), self._ran
        self._due = places is not None or (hidden is not None and len(self._log) * len(made.rows) >= _SCORED)
        return ended

    def _ended(self, tokens: Tensor, places: Tensor | None) -> dict[int, End]:
        ended = dict[int, End]()
        self._left -= 1
        if self._left == 0:
            drawn = np.arange(len(self)) if places is None else places.cpu().numpy()
            at_most = self._counts[drawn] + len(self._log) + 1 == self._most[drawn]
            ended |= {place: "length" for place in drawn[at_most].tolist()}
        if self._stopping:
            stops = self._stops[: len(self)] if places is None else self._stops[places]
            found = (tokens[:, None] == stops).any(1).nonzero()[:, 0]
            ended |= {place: "stop" for place in (found if places is None else places[found]).tolist()}
        if self._readers:
            own = tokens.tolist()
            at = range(len(own)) if places is None else places.tolist()
            drawn = dict(zip(at, own, strict=True))
            for place in self._readers:
                reader = self.rows[place].reader
                if place in drawn and not self._ends[place] and reader is not None and reader.ends(0, drawn[place]):
                    ended[place] = "stop"
        return {place: ended[place] for place in sorted(ended) if not self._ends[place]}

    def room(self) -> Integers:
        """The most draws of each row [R] in one pass: those that it has left and has numbers for; 1 if it has ended."""
        counts = self._counts + len(self._log)
        most = np.minimum(self._most - counts, CHUNK - counts % CHUNK)
        return np.where(self._ends > 0, 1, most.clip(1))

    @property
    def queued(self) -> bool:
        """Whether rows have tokens to run before they draw."""
        return self._queued

    def ended(self, place: int) -> bool:
        """Whether a row has ended and stays for a while."""
        return bool(self._ends[place])

    def passing(self, counts: Integers) -> DrawingRows:
        """The next `counts` draws of each row, laid end to end, as those of N rows that draw once."""
        self.fold()
        phases = self._counts % CHUNK
        self._refill(np.flatnonzero(phases == 0))
        places = np.repeat(np.arange(len(self)), counts)
        columns = np.arange(len(places)) + (phases - counts.cumsum() + counts)[places]
        numbers = self._uniforms[self._sent(places), self._sent(columns)]
        rows = [self.rows[place] for place in places]
        return DrawingRows(None, rows, self._alike(self._kinds[places]), numbers[:, None], [row.name for row in rows])

    def check(self, tokens: Sequence[int], drafts: Sequence[Sequence[int]]) -> tuple[Integers, dict[int, End]]:
        """Hold draws, one more of each row than its draft has, laid end to end, against the drafts. Returns how many
        each row [R] keeps, up to the first that differs or ends the row, and the places of rows that end, and how."""
        kept, ended, start = np.zeros(len(self), dtype=np.int64), dict[int, End](), 0
        for place, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            stops, reader = row.request.sampling.stop_token_ids, row.reader
            done, left = self.ended(place), int(self._most[place] - self._counts[place])
            for number, token in enumerate(tokens[start : start + len(draft) + 1]):
                kept[place] += 1
                if not done and (token in stops or (reader is not None and reader.ends(0, token))):
                    ended[place] = "stop"
                elif not done and number + 1 == left:
                    ended[place] = "length"
                if place in ended or number == len(draft) or token != draft[number]:
                    break
            start += len(draft) + 1
        return kept, ended

    def take_pass(self, draws: Draws, counts: Integers, kept: Integers, ended: Mapping[int, End]) -> None:
        """Take the `draws` [M] that rows `kept`, laid end to end, of a pass over `counts` tokens of each; `ended` are
        the places of rows that end with them."""
        places = np.repeat(np.arange(len(self)), kept)
        columns = np.arange(len(places)) + (self._counts - kept.cumsum() + kept)[places]
        index = self._sent(places), self._sent(columns)
        for name in Draws._fields:
            self._put(name, getattr(draws, name), index, int(columns.max()) + 1)
        self.pending = draws.tokens[self._sent(kept.cumsum() - 1)]
        self._counts = self._counts + kept
        self._ran_before = self._ran_before - (counts - 1)
        for place in ended:
            self._ends[place], self._ran_at[place] = self._counts[place], self._ran
        self._left, self._drawing = int((self._most - self._counts).min()), None

    @property
    def full(self) -> bool:
        """Whether a row has its most tokens, so that it has to leave."""
        return self._left <= 0

    def fold(self) -> None:
        """Lay out what was logged, by row."""
        count = len(self)
        if self._experts:
            every = torch.arange(count, device=self._device)
            begins = self._ran - len(self._experts) - self._ran_before
            self._write("experts", torch.stack(self._experts, 1), every, self._sent(begins))
            self._experts = []
        if not self._log:
            return
        made = self._drawing
        assert made is not None
        parts, hidden = zip(*self._log, strict=True)
        columns = {name: torch.stack([getattr(part, name) for part in parts], 1) for name in Draws._fields}
        if hidden[0] is not None:
            columns["log_probs"] = self.scored(made, columns["tokens"], torch.stack(hidden, 1))
        places = torch.arange(count, device=self._device) if made.places is None else made.places
        own = slice(None) if made.places is None else places.cpu().numpy()
        begins = self._sent(self._counts[own])
        for name, x in columns.items():
            self._write(name, x, places, begins)
        self._counts[own] += len(self._log)
        self._log, self._drawing, self._due = [], None, False

    def scored(self, made: DrawingRows, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Log-probs [r, *] of tokens [r, *] of rows that draw, by the hidden states [r, *, H] before them."""
        found: Tensor | None = None
        for kind, index in made.kinds:
            own, before = (tokens, hidden) if index is None else (tokens[index], hidden[index])
            log_probs = self._score(kind, before.reshape(-1, before.shape[-1]), own.flatten()).view(own.shape)
            if index is None:
                return log_probs
            found = log_probs.new_zeros(tokens.shape) if found is None else found
            found[index] = log_probs
        return tokens.new_zeros(tokens.shape, dtype=hidden.dtype) if found is None else found

    def _write(self, name: str, x: Tensor, places: Tensor, begins: Tensor) -> None:
        """Write columns [r, S, *] of some rows, from their own columns `begins` on."""
        steps = x.shape[1]
        end = int(begins.max()) + steps if len(begins) else 0
        columns = begins[:, None] + torch.arange(steps, device=self._device)
        self._put(name, x, (places[:, None], columns), end)

    def _put(self, name: str, x: Tensor, index: tuple[Tensor, Tensor], end: int) -> None:
        """Write to these rows and columns, which are before `end`."""
        kept = self._columns.get(name, x.new_zeros(0, 0, *x.shape[max(y.dim() for y in index) :]))
        kept = self._columns[name] = _roomy(kept, len(self), end)
        kept[index] = x

    def taken(self, places: Sequence[int]) -> list[PlacedTokens]:
        """Take what some rows have drawn since they came or since this was called."""
        with torch.inference_mode():
            self.fold()
            index, ends = self._sent(places), self._ends[places]
            counts = np.where(ends, ends, self._counts[places])
            fed = np.where(ends, self._ran_at[places], self._ran) - self._ran_before[places]
            longest = {name: int((fed if name == "experts" else counts).max()) for name in self._columns}
            own = {name: x[index, : longest[name]] for name, x in self._columns.items()}
        with torch.inference_mode(False):  # for users, who may differentiate
            whole = {name: x.to("cpu", copy=True) for name, x in own.items()}
        self._counts[places], self._ends[places], self._ran_before[places] = 0, 0, self._ran
        self._most[places] -= counts
        self._drawing = None
        parts, nothing = list[PlacedTokens](), (torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
        for number, (count, ran) in enumerate(zip(counts.tolist(), fed.tolist(), strict=True)):
            own = [whole[name][number, :count] for name in Draws._fields if count]
            experts = whole["experts"][number, :ran] if "experts" in whole else None
            parts.append(PlacedTokens(*own or nothing, fed=ran, experts=experts))
        return parts


def _roomy(x: Tensor, rows: int, columns: int, fill: float = 0) -> Tensor:
    """`x` [N, W, *], or a copy with at least so many rows and columns, the new ones filled."""
    wanted = zip(x.shape[:2], (rows, columns), strict=True)
    shape = [had if had >= needed else needed + needed // 2 for had, needed in wanted]
    if shape == [*x.shape[:2]]:
        return x
    wide = x.new_full((*shape, *x.shape[2:]), fill)
    wide[: x.shape[0], : x.shape[1]] = x
    return wide
