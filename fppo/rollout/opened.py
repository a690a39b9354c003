"""The embedded engine, open for requests as they come: rows leave with their contexts, and come back with new
tokens."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor

from fppo.models.model import Model
from fppo.models.run import Bound
from fppo.models.several import Adapter, fitted
from fppo.rollout.banks import BankLayout
from fppo.rollout.decoder import DecoderFactors
from fppo.rollout.drafts import Drafter, RowDrafts
from fppo.rollout.drawn import DrawingRows, DrawnRows, ScoreKind
from fppo.rollout.engine import Sampling
from fppo.rollout.fitted import FittedSizes, alone
from fppo.rollout.places import DecodeSlots, ServedAdapter
from fppo.rollout.prefill import PrefillInput, PrefillResult, RowContext, first_logits, prefill, prefill_parts
from fppo.rollout.records import tensor_of
from fppo.rollout.requests import (
    DrawnTokens,
    End,
    FinishedRequest,
    QueueFull,
    Request,
    RequestCounts,
    StepResult,
)
from fppo.rollout.rows import KeptRow, OpenRow, SharedPrompt, check_adapters, check_names, check_tokens
from fppo.rollout.sampling import Draws, draw
from fppo.rollout.scores import ScoredPrompt, top_tokens, whole_logits
from fppo.rollout.stepping import DecodingPolicy, HeadLogProbs, Next
from fppo.rollout.waiting import Fits, WaitingRows
from fppo.runtime.graphs import Record
from fppo.steps.memory import lack_noted, released
from fppo_kernels.attention.sdpa import for_any_shape
from fppo_kernels.padding import sent
from fppo_kernels.table import takes_key_lengths

_COMPACT = 0.9  # rows that have ended leave when the share of others is lower
_FEW = 8  # a row with up to so many new tokens runs them one by one while other rows draw, not in a pass


class MemoryBudget(NamedTuple):
    """Bytes for keys, values and states."""

    most: int | None  # None: no bound
    token: int  # of one token's keys and values
    row: int  # of one row's states


class LoadedPolicy(NamedTuple):
    """A policy's parameters, prepared for an open engine."""

    model: Model  # the engine's own
    bound: Bound
    policy: DecodingPolicy
    budget: MemoryBudget | None  # None: no bound, and no count
    scores: Callable[[float], HeadLogProbs] | None  # for a temperature, if log-probs are to be a training pass's own
    recorder: Callable[[], Record] | None  # makes recorders of steps, if steps are recorded


class EmbeddedRequests:
    """`AdapterRequests` of an `EmbeddedEngine`; `load(params)` prepares the parameters.

    A kept row keeps its keys, values and states. When it comes back, only its new tokens run, the last one that it drew
    and an observation, in one pass with those of other rows. If the model carries states, the new tokens run one by
    one, in the steps in which other rows draw.

    With `fitted`, a step that runs out of memory is repeated: all keys and values are given back, open rows go on from
    what they have drawn, and `fitted` gets the smaller sizes.
    """

    def __init__(
        self,
        load: Callable[[Mapping[str, Tensor]], LoadedPolicy],
        params: Mapping[str, Tensor],
        version: int,
        *,
        max_rows: int,
        most_waiting: int | None,
        together: tuple[str, ...],
        limit: int | None,
        draft_tokens: int,
        drafter: Drafter,
        fitted: FittedSizes | None = None,
    ) -> None:
        self._load, self._most_rows, self._most_waiting = load, max_rows, most_waiting
        self._together, self._limit, self._fitted = together, limit, fitted
        self._waiting = WaitingRows()
        self._adapters: dict[str, ServedAdapter] = {}
        self._version = version
        self._open: dict[str, OpenRow] = {}
        self._kept: dict[str, KeptRow] = {}
        self._cancelled: list[FinishedRequest] = []
        self._kinds: dict[Sampling, int] = {}  # by all options, and by those of a draw alone
        self._samplings: list[Sampling] = []  # of each kind
        self._prefilling: Sequence[PrefillInput] = ()  # in the pass that runs now
        self._take_in(params, version)
        size = self._loaded.policy.columns.size
        self._drafts = RowDrafts(drafter, draft_tokens, size) if draft_tokens else None

    @property
    def together(self) -> tuple[str, ...]:
        """The mesh axes whose ranks must make the same calls in the same order."""
        return self._together

    @property
    def limit(self) -> int | None:
        """The most tokens of a row."""
        return self._limit

    @property
    def counts(self) -> RequestCounts:
        """The numbers of requests that wait, that draw, and that are kept after their end."""
        return RequestCounts(len(self._waiting), len(self._drawn), len(self._kept))

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, all of them or none; equal prompts are prefilled once. See `Requests.add` for its errors."""
        waiting = self.counts.waiting + len(requests)
        if self._most_waiting is not None and waiting > self._most_waiting:
            raise QueueFull(f"{waiting} requests would wait, and at most {self._most_waiting} may: add them later")
        check_names(requests, self._kept, self._open)
        size = self._loaded.policy.columns.size
        check_adapters(requests, self._adapters, self._kept, size)
        for request in requests:
            before = 0 if request.after is None else len(self._kept[request.after].ids)
            check_tokens(request, before, size=size, limit=self._limit)
            self._check_budget(request, before)
        prompts: dict[tuple[tuple[int, ...], int, str | None], SharedPrompt] = {}
        for request in requests:
            kind = self._kind_of(request.sampling)
            if request.after is not None:
                kept = self._kept[request.after]
                row = OpenRow(request, [*kept.ids, *request.ids], kept.inputs, kind, kept.context)
            else:
                prompt = prompts.setdefault((request.ids, id(request.inputs), request.adapter), SharedPrompt(0))
                prompt.missing += 1
                if request.scores is not None and request.scores.of_prompt:
                    scored = ScoredPrompt(request.scores, request.sampling, request.key, request.row)
                    prompt.requested_scores[request.name] = scored
                row = OpenRow(request, [*request.ids], request.inputs, kind, prompt=prompt)
            self._waiting.add(row, fresh=request.after is None)
            self._open[request.name] = row

    def step(self, most: int | None = None) -> StepResult:
        """Draw one token of each request that has a place, or up to `most`, and return the tokens and the requests that
        ended; see `Requests.step`. With `most` the tokens are not listed. Raises RunFailed for a row that does not fit
        into memory by itself, where sizes are `fitted`."""
        finished, self._cancelled = self._cancelled, []
        tokens, ended, left = DrawnTokens(version=self._version), dict[int, End](), most or 1
        with torch.inference_mode(), for_any_shape(self._loaded.policy.device):
            while left and self._open:
                with lack_noted(repeat=self._fitted is not None) as errors:
                    rows, draws, new = self._stepped(scores=most is None)
                    left, ended = left - 1, ended | new
                    if most is None:
                        tokens = DrawnTokens(rows.names, *(x.tolist() for x in draws), version=self._version)
                    if not left or self._due(ended):
                        finished += self._end(ended)
                        ended = {}
                if errors:
                    finished += self._make_room(errors[0])
                    ended = {}
        return StepResult(tokens, finished)

    def _make_room(self, error: str) -> list[FinishedRequest]:
        """Give back what a step that ran out of memory had on the device, and halve the size that may help. Open rows
        wait again, with what they have drawn; returns those that had ended."""
        waiting = set(map(id, self._waiting))
        rows = [row for row in self._open.values() if id(row) not in waiting]
        contexts = [*self._kept.values(), *self._waiting]
        held = sum(x.context is not None for x in contexts)
        prefilled, self._prefilling = [len(item.ids) for item in self._prefilling], ()
        self._places = self._slots()
        released()
        self._take_parts(range(len(self._drawn)))
        self._drawn = self._drawn_rows()
        ends: list[tuple[OpenRow, End | None]] = [(row, row.end()) for row in rows]
        self._put_back([row for row, end in ends if end is None])
        whole = self._bytes(max(row.max_length for row in rows))
        cuts = not any(self._whole(row) for row in rows)
        assert self._fitted is not None
        if not self._fitted.halve(prefilled, rows=len(rows) + held, row_bytes=whole, cuts=cuts):
            raise alone(rows[0], error)
        ended: list[tuple[OpenRow, End]] = [(row, end) for row, end in ends if end is not None]
        for row, _ in ended:
            self._keep(row, None)
        return [self._closed(row, end) for row, end in ended]

    def _due(self, ended: Mapping[int, End]) -> bool:
        """Whether rows that have ended leave now; else they stay among those that draw, since it takes time to move
        others to their places."""
        if not ended:
            return False
        kept = any(self._drawn.rows[place].request.keep for place in ended)
        return (
            kept
            or self._drawn.full
            or len(self._waiting) > 0
            or len(self._drawn) - len(ended) < _COMPACT * len(self._drawn)
        )

    def cancel(self, names: Sequence[str]) -> None:
        """End these requests; the next step reports them as "cancelled". Names that are not open are ignored."""
        rows = [self._open[name] for name in dict.fromkeys(names) if name in self._open]
        for row in rows:
            if row.prompt is not None:
                row.prompt.missing -= 1
                row.prompt.release(row.name)
            if self._waiting.remove(row):
                self._keep(row, row.context)
        cancelled = set(map(id, rows))
        live = [place for place, row in enumerate(self._drawn.rows) if id(row) in cancelled]
        ended = {each.name: each for each in self._end(dict.fromkeys(live, "cancelled"))}
        self._cancelled += [ended.get(row.name) or self._closed(row, "cancelled") for row in rows]

    def release(self, names: Sequence[str]) -> None:
        """Forget the kept contexts of the requests `names`, by `Requests.release`."""
        for name in names:
            self._kept.pop(name, None)

    def update(self, params: Mapping[str, Tensor], version: int) -> None:
        """Continue with newer parameters of this version. Open rows go back to the queue, and all contexts are computed
        anew."""
        live = self._drawn.rows
        self._take_parts(range(len(live)))
        self._put_back(live)
        del self._places, self._drawn, self._loaded  # what they hold is given back before more is loaded
        self._take_in(params, version)

    def _put_back(self, rows: Sequence[OpenRow]) -> None:
        """Let rows wait again, before others; the contexts of all rows are to be computed anew."""
        self._waiting.put_back(rows)
        for row in self._waiting:
            row.context = None
            row.queued_tokens.clear()
            row.experts.clear()
            del row.drawn[row.count :]
            if row.prompt is not None:
                row.prompt.read = None
        self._kept = {name: attrs.evolve(kept, context=None) for name, kept in self._kept.items()}

    def put(self, name: str, adapter: Adapter, version: int = 0) -> None:
        """Store a copy of an adapter under a name, in place of an earlier one; open rows with it go on with the newer
        factors. Raises ValueError for an adapter that does not fit, and for an exact engine."""
        loaded, decoder = self._loaded, self._loaded.policy.decoder
        if loaded.scores is not None:
            raise ValueError(f"adapter {name!r}: an exact engine runs no adapters beside its base; leave exact out")
        own = fitted(loaded.model, adapter, name, loaded.policy.device, loaded.policy.head.weight.dtype)
        held = decoder is not None and decoder.held
        factors = DecoderFactors.of(loaded.model, own.factors) if held else None
        rows = self._drawn.rows
        self._take_parts([place for place, row in enumerate(rows) if row.request.adapter == name])
        self._adapters[name] = ServedAdapter(own, version, factors)
        self._places.renew()

    def drop(self, name: str) -> None:
        """Forget an adapter, and the contexts computed with it. Raises ValueError while requests with it are open."""
        users = [row.name for row in self._open.values() if row.request.adapter == name]
        if users:
            raise ValueError(
                f"adapter {name!r}: {len(users)} requests with it are open, {users[:3]}: cancel them first"
            )
        self.release([kept for kept, row in self._kept.items() if row.adapter == name])
        self._adapters.pop(name, None)

    def _take_in(self, params: Mapping[str, Tensor], version: int) -> None:
        self._version = version
        self._loaded = loaded = self._load(params)
        self._in_passes = not loaded.policy.model.stateful and takes_key_lengths(loaded.policy.kernels.attention)
        self._places, self._drawn = self._slots(), self._drawn_rows()

    def _slots(self) -> DecodeSlots:
        loaded, spare = self._loaded, 2 if self._loaded.budget is None else 8
        return DecodeSlots(loaded.bound, loaded.policy, self._limit, spare, loaded.recorder, self._adapters)

    def _drawn_rows(self) -> DrawnRows:
        return DrawnRows(self._loaded.policy.device, _scored_by(self._samplings, self._loaded.scores))

    def _kind_of(self, sampling: Sampling) -> int:
        """Index in `_samplings` of the options by which a row draws."""
        if sampling not in self._kinds:
            drawn = sampling.per_token
            if drawn not in self._kinds:
                self._kinds[drawn] = len(self._samplings)
                self._samplings.append(drawn)
            self._kinds[sampling] = self._kinds[drawn]
        return self._kinds[sampling]

    def _check_budget(self, request: Request, before: int) -> None:
        tokens = before + len(request.ids) + request.sampling.max_tokens
        size, budget = self._bytes(tokens), self._loaded.budget
        most = None if budget is None or self._fitted is not None else budget.most
        if most is not None and size > most:
            raise ValueError(
                f"cache_bytes = {most:,}: request {request.name!r} may have {tokens} tokens, {size:,} bytes of "
                "keys and values: give it more, or fewer tokens"
            )

    def _bytes(self, tokens: int) -> int:
        budget = self._loaded.budget
        return 0 if budget is None else tokens * budget.token + budget.row

    def _chosen(self) -> tuple[list[OpenRow], list[OpenRow]]:
        """Choose the waiting rows that begin now. Returns the rows whose new tokens run in steps, and the others."""
        rows = self._waiting.deal(self._fitting())
        by_steps = [self._prefills_by_steps(row) for row in rows]
        return [*compress(rows, by_steps)], [*compress(rows, map(operator.not_, by_steps))]

    def _fitting(self) -> Fits:
        """A function that says whether a row can begin beside the rows that draw and those `dealt` before it. `fresh`
        prompts leave room for kept rows to come back; a row alone always fits."""
        bounds = (self._loaded.budget and self._loaded.budget.most, self._fitted and self._fitted.cache_bytes)
        budget, longest = min((x for x in bounds if x is not None), default=None), self._places.longest
        held = [x.context.length for x in (*self._kept.values(), *self._waiting.coming) if x.context is not None]
        coming, held_bytes = len([*self._waiting.coming]), sum(map(self._bytes, held))

        def fits(row: OpenRow, dealt: Sequence[OpenRow], fresh: bool) -> bool:
            nonlocal longest, coming, held_bytes
            count = len(self._drawn) + len(dealt)
            if count >= self._most_rows:
                return False
            most = max(longest, row.max_length)
            one = self._bytes(self._places.columns(most, most))
            if fresh:
                fit = budget is None or not count or (count + 1 + len(self._kept) + coming) * one <= budget
            else:
                fit = budget is None or not count or (count + 1) * one + held_bytes <= budget
            if fit:
                longest = most
                coming -= not fresh
                held_bytes -= 0 if fresh or row.context is None else self._bytes(row.context.length)
            return fit

        return fits

    def _prefills_by_steps(self, row: OpenRow) -> bool:
        return row.context is not None and (not self._in_passes or len(row.uncached_ids) <= _FEW)

    def _stepped(self, *, scores: bool) -> tuple[DrawingRows, Draws, dict[int, End]]:
        """Draw one more token of each row that has a place or gets one now. Returns the rows that drew, the draws, and
        the places of rows that end. With `scores` log-probs are final; else some may be computed later."""
        by_steps, others = self._chosen() if len(self._waiting) else ([], [])
        if self._drafts is not None and not by_steps and not others and not self._drawn.queued:
            drafts = self._drafts.propose(self._drawn.rows, self._drawn.room().tolist())
            if any(drafts):
                return self._passed(drafts)
        contexts = [row.context for row in by_steps if row.context is not None]
        if by_steps:
            self._reserve(by_steps, contexts[0].layout, max(len(row.ids) for row in by_steps))
        pending = [row.uncached_ids for row in by_steps]
        for row, (_, *rest) in zip(by_steps, pending, strict=True):
            row.queued_tokens = deque(rest)
        self._place(by_steps, contexts, [x[0] for x in pending])
        parts: list[Next] = []
        if len(self._drawn):
            parts.append(self._places.step(self._drawn.pending))
            self._drawn.ran(parts[0].experts)
        parts += self._read(others)
        logits = parts[0].logits if len(parts) == 1 else torch.cat([part.logits for part in parts])
        hidden = None
        if self._loaded.scores is not None:
            hidden = torch.cat([part.hidden for part in parts if part.hidden is not None])
        return self._draw(logits, hidden, scores=scores)

    def _reserve(self, rows: Sequence[OpenRow], layout: BankLayout, longest: int) -> None:
        """Make room for rows, of which the longest has contexts of `longest` tokens."""
        most = max(len(row.ids) for row in rows) + max(row.tokens_left for row in rows)
        self._places.reserve(layout, len(rows), longest, most)

    def _passed(self, drafts: Sequence[Sequence[int]]) -> tuple[DrawingRows, Draws, dict[int, End]]:
        """`_stepped` by one pass over each row's pending token and its draft: `drafts` has one for each row."""
        device, sizes = self._loaded.policy.device, np.array([len(draft) for draft in drafts])
        counts = sizes + 1
        ends = counts.cumsum()
        ids = tensor_of([token for draft in drafts for token in (0, *draft)], torch.int64)
        begins = sent(torch.from_numpy(ends - counts), device)
        logits, hidden, _ = self._places.run(sent(ids, device).index_copy(0, begins, self._drawn.pending), counts)
        self._drawn.ran(None)
        rows = self._drawn.passing(counts)
        draws = self._drawn_by(logits, rows, rows.numbers[:, 0])
        kept, ended = self._drawn.check(draws.tokens.tolist(), drafts)
        self._places.keep(kept)
        if self._drafts is not None:
            self._drafts.learn(self._drawn.rows, sizes.tolist(), (kept - 1).tolist())
        if (kept < counts).any():
            places = np.concatenate([np.arange(own) + end for own, end in zip(kept, ends - counts, strict=True)])
            rows, index = self._drawn.passing(kept), sent(torch.from_numpy(places), device)
            logits, draws = logits[index], Draws(*(x[index] for x in draws))
            hidden = None if hidden is None else hidden[index]
        if self._loaded.scores is not None and hidden is not None:
            draws = draws._replace(log_probs=self._drawn.scored(rows, draws.tokens, hidden))
        self._score(rows.rows, logits, draws.tokens)
        self._follow(rows.rows, draws.tokens)
        self._drawn.take_pass(draws, counts, kept, ended)
        return rows, draws, ended

    def _follow(self, rows: Sequence[OpenRow], tokens: Tensor) -> None:
        """Note tokens that rows drew, for their drafts."""
        if self._drafts is None:
            return
        over = {id(row) for place, row in enumerate(self._drawn.rows) if self._drawn.ended(place)}
        drawn = zip(rows, tokens.tolist(), strict=True)
        self._drafts.extend([(row, token) for row, token in drawn if id(row) not in over])

    def _place(self, rows: Sequence[OpenRow], contexts: Sequence[RowContext], pending: Sequence[int]) -> None:
        """Give rows places among the rows that decode; each continues its own of the `contexts`, and its own of the
        tokens `pending` runs next."""
        if not rows:
            return
        for row in rows:
            row.context = None
        self._places.join(contexts, [row.max_length for row in rows], [row.request.adapter for row in rows])
        self._drawn.join(rows, pending)

    def _read(self, rows: Sequence[OpenRow]) -> Iterator[Next]:
        """Prefill rows, and give them places; a prompt of several rows is prefilled once. Yields the logits of their
        first draws, in the order of their places."""
        prefills: dict[OpenRow | SharedPrompt, PrefillInput] = {}
        users: dict[OpenRow | SharedPrompt, list[OpenRow]] = {}
        for row in rows:
            source = row.prompt or row
            users.setdefault(source, []).append(row)
            if source not in prefills and (row.prompt is None or row.prompt.read is None):
                prefills[source] = self._prefill_input(row)
        if not rows:
            return
        ready = {
            prompt: prompt.read for prompt in users if isinstance(prompt, SharedPrompt) and prompt.read is not None
        }
        longest = max([*(item.length for item in prefills.values()), *(x.context.length for x in ready.values())])
        reserved = False
        for found in chain([ready] if ready else [], self._prefilled(prefills)):
            if not reserved:  # after the first pass, whose activations are gone by then
                self._reserve(rows, next(iter(found.values())).context.layout, longest)
            reserved = True
            contexts, begun = list[RowContext](), list[OpenRow]()
            for source, result in found.items():
                begun += users[source]
                contexts += [result.context] * len(users[source])
                if isinstance(source, SharedPrompt):
                    source.begin(users[source], result)
                users[source][0].fed += len(prefills[source].ids) if source in prefills else 0
                for row in users[source]:
                    row.experts += [] if result.experts is None else [result.experts]
                    row.queued_tokens = deque(row.ids[result.context.length :])
                    row.prompt = None
            self._place(begun, contexts, [0] * len(begun))
            yield from first_logits(contexts, self._loaded.policy.device)

    def _prefilled(
        self, prefills: Mapping[OpenRow | SharedPrompt, PrefillInput]
    ) -> Iterator[dict[OpenRow | SharedPrompt, PrefillResult]]:
        """Prefill rows in passes of as many tokens as are allowed and fit; yields the results of each pass."""
        loaded, fitted = self._loaded, self._fitted and self._fitted.prefill_tokens
        most = loaded.policy.prefill_tokens
        for part in prefill_parts(prefills, most if fitted is None else min(fitted, most)):
            self._prefilling = [*part.values()]
            found = prefill(loaded.bound, loaded.policy, part)
            self._prefilling = ()
            yield found

    @staticmethod
    def _whole(row: OpenRow) -> bool:
        """Whether all of a row without a context must run in one pass: it has images, or scores of its prompt."""
        return row.inputs is not None or (row.prompt is not None and len(row.prompt.requested_scores) > 0)

    def _prefill_input(self, row: OpenRow) -> PrefillInput:
        ids, most = row.uncached_ids, self._fitted and self._fitted.row_tokens
        if most is not None and not self._whole(row):
            ids = ids[:most]
        name = row.request.adapter
        requested_scores = () if row.prompt is None else tuple(row.prompt.requested_scores.values())
        adapter = None if name is None else self._adapters[name].adapter
        inputs = row.inputs if row.context is None else None  # else their keys and values are in the context
        return PrefillInput(ids, row.context, inputs, adapter, requested_scores)

    def _draw(
        self, logits: Tensor, hidden: Tensor | None, *, scores: bool
    ) -> tuple[DrawingRows, Draws, dict[int, End]]:
        """Draw for the rows whose tokens have all run, from the logits [R, V] and the hidden states of all rows."""
        rows, numbers = self._drawn.drawing()
        if rows.places is not None:
            logits, hidden = logits[rows.places], None if hidden is None else hidden[rows.places]
        draws = self._drawn_by(logits, rows, numbers)
        if hidden is not None and scores:
            draws, hidden = draws._replace(log_probs=self._drawn.scored(rows, draws.tokens, hidden)), None
        self._score(rows.rows, logits, draws.tokens)
        self._follow(rows.rows, draws.tokens)
        return rows, draws, self._drawn.take(draws, hidden)

    def _drawn_by(self, logits: Tensor, rows: DrawingRows, numbers: Tensor) -> Draws:
        """Draw for each of the rows, from its logits [R, V] and by its number [R]."""
        columns, draws = self._loaded.policy.columns, None
        for kind, index in rows.kinds:
            if index is None:
                return draw(logits, numbers, self._samplings[kind], columns)
            own = draw(logits[index], numbers[index], self._samplings[kind], columns)
            draws = draws or Draws(*(x.new_zeros(len(logits)) for x in own))
            for x, new in zip(draws, own, strict=True):
                x[index] = new
        return draws or Draws(numbers.long(), logits[:, 0], logits[:, 0])  # all rows have tokens to run first

    def _score(self, rows: Sequence[OpenRow], logits: Tensor, tokens: Tensor) -> None:
        """Store the scores of draws from logits [R, V] for the rows that report them."""
        places = [place for place, row in enumerate(rows) if row.top]
        if not places:
            return
        index = sent(tensor_of(places, torch.int64), logits.device)
        own = whole_logits(logits if len(places) == len(rows) else logits[index], self._loaded.policy.columns)
        log_probs = own.gather(1, tokens[index, None])[:, 0] - own.logsumexp(-1)
        top = top_tokens(own, max(rows[place].top for place in places))
        for place, *found in zip(places, log_probs.tolist(), *(x.tolist() for x in top), strict=True):
            row, (log_prob, ids, likeliest) = rows[place], found
            row.drawn.append((log_prob, ids[: row.top], likeliest[: row.top]))

    def _end(self, ended: Mapping[int, End]) -> list[FinishedRequest]:
        """Take the rows at the places in `ended`, which says how each ended, out of them, with the contexts of those
        that are to be kept; returns their results."""
        if not ended:
            return []
        rows = [self._drawn.rows[place] for place in ended]
        self._take_parts([*ended])
        with torch.inference_mode():
            for place, row in zip(ended, rows, strict=True):
                self._keep(row, self._places.context(place) if row.request.keep else None)
            self._drawn.leave(self._places.leave([*ended]))
        return [self._closed(row, end) for row, end in zip(rows, ended.values(), strict=True)]

    def _take_parts(self, places: Sequence[int]) -> None:
        """Give the rows in these places what they have drawn."""
        for place, part in zip(places, self._drawn.taken(places) if len(places) else (), strict=True):
            row = self._drawn.rows[place]
            name = row.request.adapter
            row.take(part, self._version if name is None else self._adapters[name].version)

    def _keep(self, row: OpenRow, context: RowContext | None) -> None:
        if row.request.keep:
            self._kept[row.name] = KeptRow(row.ids, row.inputs, context, row.request.adapter)

    def _closed(self, row: OpenRow, end: End) -> FinishedRequest:
        del self._open[row.name]
        drafts = None if self._drafts is None else self._drafts.end(row)
        with torch.inference_mode(False):
            return row.ended(end, torch.promote_types(self._loaded.policy.head.weight.dtype, torch.float32), drafts)


def _scored_by(samplings: Sequence[Sampling], scores: Callable[[float], HeadLogProbs] | None) -> ScoreKind:
    """A training pass's log-probs of tokens, from the hidden states before them, by the kind of sampling that drew them
    (an index in `samplings`). It holds no engine: that would live on with its keys and values until Python looks for
    circles."""
    made: dict[float, HeadLogProbs] = {}

    def scored(kind: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        temperature = samplings[kind].temperature
        assert scores is not None
        if temperature not in made:
            made[temperature] = scores(temperature)
        return made[temperature](hidden, tokens)

    return scored
