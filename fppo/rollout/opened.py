"""The embedded engine, open for requests as they come: rows leave with their contexts, and come back with new
tokens."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from fppo.key import uniforms
from fppo.models.model import Model
from fppo.models.run import Bound
from fppo.models.seams import AttentionLayer
from fppo.models.several import Adapter, fitted
from fppo.rollout.banks import BankLayout
from fppo.rollout.decoder import DecoderFactors
from fppo.rollout.engine import Sampling
from fppo.rollout.places import CHUNK, DecodeSlots, ServedAdapter
from fppo.rollout.reading import Reading, RowContext, read
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
from fppo.rollout.waiting import WaitingRows
from fppo.runtime.graphs import Record
from fppo_kernels.attention.sdpa import for_any_shape
from fppo_kernels.padding import sent
from fppo_kernels.table import takes_key_lengths

_FEW = 8  # a row with up to so many new tokens runs them one by one while other rows draw, not in a pass


class LoadedPolicy(NamedTuple):
    """A policy's parameters, prepared for an open engine."""

    model: Model  # the engine's own
    bound: Bound
    policy: DecodingPolicy
    layout: BankLayout
    calls: Sequence[AttentionLayer]  # arguments of each attention call
    state_bytes: int  # of a row
    budget: int | None  # bytes for keys, values and states
    scores: Callable[[float], HeadLogProbs] | None  # for a temperature, if log-probs are to be a training pass's own
    recorder: Callable[[], Record] | None  # makes recorders of steps, if steps are recorded


class EmbeddedRequests:
    """`AdapterRequests` of an `EmbeddedEngine`; `load(params)` prepares the parameters.

    A kept row keeps its keys, values and states. When it comes back, only its new tokens run, the last one that it drew
    and an observation, in one pass with those of other rows. If the model carries states, the new tokens run one by
    one, in the steps in which other rows draw.
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
    ) -> None:
        self._load, self._most_rows, self._most_waiting = load, max_rows, most_waiting
        self._together, self._limit = together, limit
        self._waiting = WaitingRows()
        self._adapters: dict[str, ServedAdapter] = {}
        self._version = version
        self._live: list[OpenRow] = []  # by their places
        self._open: dict[str, OpenRow] = {}
        self._kept: dict[str, KeptRow] = {}
        self._cancelled: list[FinishedRequest] = []
        self._kinds: dict[tuple[float, int, float, bool], int] = {}
        self._samplings: list[Sampling] = []  # one of each kind
        self._take_in(params, version)

    @property
    def together(self) -> tuple[str, ...]:
        """Implement `Requests.together`."""
        return self._together

    @property
    def limit(self) -> int | None:
        """The most tokens of a row."""
        return self._limit

    @property
    def counts(self) -> RequestCounts:
        """Implement `Requests.counts`."""
        return RequestCounts(len(self._waiting), len(self._live), len(self._kept))

    def add(self, requests: Sequence[Request]) -> None:
        """Implement `Requests.add`."""
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
                    prompt.asked[request.name] = scored
                row = OpenRow(request, [*request.ids], request.inputs, kind, prompt=prompt)
            self._waiting.add(row, fresh=request.after is None)
            self._open[request.name] = row

    def step(self) -> StepResult:
        """Implement `Requests.step`."""
        finished, self._cancelled = self._cancelled, []
        with torch.inference_mode(), for_any_shape(self._loaded.layout.device):
            by_steps, others = self._chosen()
            self._place(by_steps, [row.context for row in by_steps if row.context is not None])
            for row in by_steps:
                row.pending, *rest = row.unread
                row.feed, row.context = deque(rest), None
            parts = [self._stepped()] if self._live else []
            contexts = self._read(others)
            self._place(others, contexts)
            parts += [context.after for context in contexts if context.after is not None]
            drawn = self._draw(parts) if parts else None
        if drawn is None:
            return StepResult(DrawnTokens(version=self._version), finished)
        tokens, ended = self._taken(*drawn)
        return StepResult(tokens, [*finished, *ended])

    def cancel(self, names: Sequence[str]) -> None:
        """Implement `Requests.cancel`."""
        rows = [self._open[name] for name in dict.fromkeys(names) if name in self._open]
        for row in rows:
            if row.prompt is not None:
                row.prompt.missing -= 1
                row.prompt.left(row.name)
            if self._waiting.remove(row):
                self._keep(row, row.context)
        live = set(map(id, rows))
        self._end([place for place, row in enumerate(self._live) if id(row) in live])
        self._cancelled += [self._closed(row, "cancelled") for row in rows]

    def release(self, names: Sequence[str]) -> None:
        """Implement `Requests.release`."""
        for name in names:
            self._kept.pop(name, None)

    def update(self, params: Mapping[str, Tensor], version: int) -> None:
        """Implement `Requests.update`."""
        self._waiting.put_back(self._live)
        for row in self._waiting:
            row.context = None
            row.feed.clear()
            row.experts.clear()
            if row.prompt is not None:
                row.prompt.read = None
        self._kept = {name: attrs.evolve(kept, context=None) for name, kept in self._kept.items()}
        self._live = []
        self._take_in(params, version)

    def put(self, name: str, adapter: Adapter, version: int = 0) -> None:
        """Implement `AdapterRequests.put`."""
        loaded, decoder = self._loaded, self._loaded.policy.decoder
        if loaded.scores is not None:
            raise ValueError(f"adapter {name!r}: an exact engine runs no adapters beside its base; leave exact out")
        own = fitted(loaded.model, adapter, name, loaded.layout.device, loaded.policy.head.weight.dtype)
        held = decoder is not None and decoder.held
        factors = DecoderFactors.of(loaded.model, own.factors) if held else None
        self._adapters[name] = ServedAdapter(own, version, factors)
        self._places.renew()

    def drop(self, name: str) -> None:
        """Implement `AdapterRequests.drop`."""
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
        spare = 2 if loaded.budget is None else 8
        self._places = DecodeSlots(
            loaded.bound,
            loaded.policy,
            loaded.layout,
            loaded.calls,
            self._limit,
            spare,
            loaded.recorder,
            self._adapters,
        )
        self._in_passes = not loaded.policy.model.stateful and takes_key_lengths(loaded.policy.kernels.attention)
        self._scores: dict[float, HeadLogProbs] = {}

    def _kind_of(self, sampling: Sampling) -> int:
        """Number the settings by how they draw: those with equal temperature, top_k, top_p and greedy have one
        number."""
        kind = sampling.temperature, sampling.top_k or 0, sampling.top_p, sampling.greedy
        if kind not in self._kinds:
            self._kinds[kind] = len(self._samplings)
            self._samplings.append(sampling)
        return self._kinds[kind]

    def _check_budget(self, request: Request, before: int) -> None:
        tokens = before + len(request.ids) + request.sampling.max_tokens
        size, budget = self._bytes(tokens), self._loaded.budget
        if budget is not None and size > budget:
            raise ValueError(
                f"cache_bytes = {budget:,}: request {request.name!r} may have {tokens} tokens, {size:,} bytes of keys "
                "and values: give it more, or fewer tokens"
            )

    def _bytes(self, tokens: int) -> int:
        return tokens * self._loaded.layout.token_bytes + self._loaded.state_bytes

    def _chosen(self) -> tuple[list[OpenRow], list[OpenRow]]:
        """Choose the waiting rows that begin now. Returns the rows whose new tokens run in steps, and the others."""
        rows = self._waiting.deal(self._fits)
        by_steps = [self._prefills_by_steps(row) for row in rows]
        return [*compress(rows, by_steps)], [*compress(rows, map(operator.not_, by_steps))]

    def _fits(self, row: OpenRow, others: Sequence[OpenRow], fresh: bool) -> bool:
        """Whether a row can begin beside the rows that draw and the rows `others` that begin. `fresh` prompts leave
        room for kept rows to come back; a row alone always fits."""
        count, budget = len(self._live) + len(others), self._loaded.budget
        if count >= self._most_rows or not count or budget is None:
            return count < self._most_rows
        longest = max(self._places.longest, *(other.most for other in (row, *others)))
        one = self._bytes(self._places.columns(longest, longest))
        coming = [*self._waiting.coming]
        if fresh:
            return (count + 1 + len(self._kept) + len(coming)) * one <= budget
        held = [x.context.length for x in (*self._kept.values(), *coming) if x.context is not None]
        return (count + 1) * one + sum(map(self._bytes, held)) <= budget

    def _prefills_by_steps(self, row: OpenRow) -> bool:
        return row.context is not None and (not self._in_passes or len(row.unread) <= _FEW)

    def _place(self, rows: Sequence[OpenRow], contexts: Sequence[RowContext]) -> None:
        """Give rows places among the rows that decode; each continues its own of the `contexts`."""
        self._places.join(contexts, [row.most for row in rows], [row.request.adapter for row in rows])
        self._live += rows

    def _stepped(self) -> Next:
        """Run one more token of each row that has a place, and return the logits after it."""
        after = self._places.step([row.pending for row in self._live])
        for place, row in enumerate(self._live):
            row.fed += 1
            if after.experts is not None:
                row.experts.append(after.experts[place : place + 1])
        return after

    def _read(self, rows: Sequence[OpenRow]) -> list[RowContext]:
        """Prefill rows, and return the contexts from which they draw; a prompt of several rows is prefilled once."""
        readings: dict[int, Reading] = {}
        for row in rows:
            source = row if row.prompt is None else row.prompt
            if row.prompt is None or row.prompt.read is None:
                row.fed += 0 if id(source) in readings else len(row.unread)
                readings.setdefault(id(source), self._reading(row))
        loaded = self._loaded
        every = read(loaded.bound, loaded.policy, loaded.layout, [*readings.values()]) if readings else []
        found = dict(zip(readings, every, strict=True))
        contexts: list[RowContext] = []
        new = {id(row.prompt): row.prompt for row in rows if row.prompt is not None and id(row.prompt) in found}
        for row in rows:
            prompt = row.prompt
            context, experts, _ = found[id(row)] if prompt is None else prompt.taken(found.get(id(prompt)))
            if prompt is not None:
                row.prompt_scores = prompt.left(row.name)
            row.context = row.prompt = None
            row.experts += [] if experts is None else [experts]
            contexts.append(context)
        for prompt in new.values():
            prompt.settle()
        return contexts

    def _reading(self, row: OpenRow) -> Reading:
        name, asked = row.request.adapter, () if row.prompt is None else tuple(row.prompt.asked.values())
        adapter = None if name is None else self._adapters[name].adapter
        inputs = row.inputs if row.context is None else None  # else their keys and values are in the context
        return Reading(row.unread, row.context, inputs, adapter, asked)

    def _draw(self, parts: Sequence[Next]) -> tuple[list[OpenRow], list[int], list[float], list[float]]:
        """Draw for the rows whose tokens have all run: return them, their tokens and log-probs. Other rows get their
        next token to run."""
        drawing = [place for place, row in enumerate(self._live) if not row.feed]
        logits = parts[0].logits if len(parts) == 1 else torch.cat([part.logits for part in parts])
        hidden = None
        if self._loaded.scores is not None:
            hidden = torch.cat([part.hidden for part in parts if part.hidden is not None])
        if len(drawing) < len(self._live):
            for row in self._live:
                if row.feed:
                    row.pending = row.feed.popleft()
            index = sent(tensor_of(drawing, torch.int64), logits.device)
            logits, hidden = logits[index], None if hidden is None else hidden[index]
        rows = [self._live[place] for place in drawing]
        self._refill(rows)
        numbers = sent(tensor_of([row.uniforms.pop() for row in rows], torch.float64), logits.device)
        kinds = {row.kind for row in rows}
        if len(kinds) == 1:
            draws = self._drawn(logits, numbers, hidden, kinds.pop())
            tokens = draws.tokens.tolist()
            self._score(rows, logits, tokens)
            return rows, tokens, draws.log_probs.tolist(), draws.sampling_log_probs.tolist()
        found: list[tuple[int, int, float, float]] = []
        for kind in sorted(kinds):
            places = [place for place, row in enumerate(rows) if row.kind == kind]
            index = sent(tensor_of(places, torch.int64), logits.device)
            draws = self._drawn(logits[index], numbers[index], None if hidden is None else hidden[index], kind)
            found += zip(places, *(x.tolist() for x in draws), strict=True)
        _, tokens, log_probs, others = zip(*sorted(found), strict=True) if found else ((), (), (), ())
        self._score(rows, logits, tokens)
        return rows, [*tokens], [*log_probs], [*others]

    def _score(self, rows: Sequence[OpenRow], logits: Tensor, tokens: Sequence[int]) -> None:
        """Store the scores of draws from logits [R, V] for the rows that report them."""
        places = [place for place, row in enumerate(rows) if row.top]
        if not places:
            return
        index = sent(tensor_of(places, torch.int64), logits.device)
        own = whole_logits(logits if len(places) == len(rows) else logits[index], self._loaded.policy.columns)
        chosen = sent(torch.tensor([tokens[place] for place in places]), logits.device)
        log_probs = own.gather(1, chosen[:, None])[:, 0] - own.logsumexp(-1)
        top = top_tokens(own, max(rows[place].top for place in places))
        for place, *found in zip(places, log_probs.tolist(), *(x.tolist() for x in top), strict=True):
            row, (log_prob, ids, likeliest) = rows[place], found
            row.drawn.append((log_prob, ids[: row.top], likeliest[: row.top]))

    def _drawn(self, logits: Tensor, numbers: Tensor, hidden: Tensor | None, kind: int) -> Draws:
        sampling, policy = self._samplings[kind], self._loaded.policy
        draws = draw(logits, numbers, sampling, policy.columns)
        if self._loaded.scores is None:
            return draws
        assert hidden is not None
        temperature = sampling.temperature
        if temperature not in self._scores:
            self._scores[temperature] = self._loaded.scores(temperature)
        return draws._replace(log_probs=self._scores[temperature](hidden, draws.tokens))

    def _refill(self, rows: Iterable[OpenRow]) -> None:
        """Give rows that have used theirs up the uniform numbers of their next draws, in reverse order."""
        empty = [row for row in rows if not row.uniforms]
        if not empty:
            return
        width = min(CHUNK, max(row.left for row in empty))
        begins = tensor_of([row.request.position + len(row.tokens) for row in empty], torch.int64)
        columns = begins[:, None] + torch.arange(width - 1, -1, -1)
        numbers = uniforms([row.request.key for row in empty], [row.request.row for row in empty], columns)
        for row, own in zip(empty, numbers.tolist(), strict=True):
            row.uniforms = own

    def _taken(
        self, rows: Sequence[OpenRow], tokens: Sequence[int], log_probs: Sequence[float], others: Sequence[float]
    ) -> tuple[DrawnTokens, list[FinishedRequest]]:
        """Give rows their tokens, with log-probs and `others`, the log-probs under the distributions drawn from; take
        out rows that end. Returns the step's tokens, and the requests that ended."""
        ends: dict[int, End] = {}
        for row, token, log_prob, other in zip(rows, tokens, log_probs, others, strict=True):
            name = row.request.adapter
            version = self._version if name is None else self._adapters[name].version
            end = row.take(token, log_prob, other, version)
            if end is not None:
                ends[id(row)] = end
        drawn = DrawnTokens([row.name for row in rows], tokens, log_probs, others, self._version)
        if not ends:
            return drawn, []
        self._end([place for place, row in enumerate(self._live) if id(row) in ends])
        return drawn, [self._closed(row, ends[id(row)]) for row in rows if id(row) in ends]

    def _end(self, places: Sequence[int]) -> None:
        """Take rows out of their places, with the contexts of those that are to be kept."""
        if not places:
            return
        with torch.inference_mode():
            for place in places:
                row = self._live[place]
                self._keep(row, self._places.context(place) if row.request.keep else None)
            self._live = [self._live[place] for place in self._places.leave(places)]

    def _keep(self, row: OpenRow, context: RowContext | None) -> None:
        if row.request.keep:
            self._kept[row.name] = KeptRow(row.ids, row.inputs, context, row.request.adapter)

    def _closed(self, row: OpenRow, end: End) -> FinishedRequest:
        del self._open[row.name]
        return row.ended(end, torch.promote_types(self._loaded.policy.head.weight.dtype, torch.float32))
