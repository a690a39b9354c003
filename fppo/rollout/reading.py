"""Prefill: one pass over new tokens, after each row's cached ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, count, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fppo import models
from fppo.batch import RowInputs
from fppo.models.routing import Routes, experts_of
from fppo.models.rows import RowWise
from fppo.models.run import Bound
from fppo.models.seams import Attend, AttentionLayer
from fppo.models.several import Adapter, OwnRows, beside
from fppo.models.vision_pass import place_images, see, shift_of
from fppo.rollout import banks as bank_rows
from fppo.rollout import cache as caches
from fppo.rollout.banks import BankLayout, Banks
from fppo.rollout.cache import Layers
from fppo.rollout.scores import PromptScores, ScoredPrompt, prompt_scores, whole_logits
from fppo.rollout.states import PromptStates, States
from fppo.rollout.stepping import DecodingPolicy, Next
from fppo_kernels.collectives import all_gather
from fppo_kernels.padding import Lengths, make_lengths, sent


class RowContext(NamedTuple):
    """The n cached tokens of a row: their keys and values, and the states after them."""

    length: int
    banks: Banks  # [K, H, n, D]
    states: States  # of one row
    shift: int = 0  # a position minus the number of its token, after images
    after: Next | None = None  # the logits of the row's first draw

    def apart(self) -> RowContext:
        """A copy of the context, with memory of its own."""
        after = self.after and self.after.each(Tensor.clone)
        return self._replace(banks=tuple(x.clone() for x in self.banks), after=after)


class Reading(NamedTuple):
    """Tokens to prefill: new tokens after a context, or a whole prompt with its images. They run with `adapter` (None:
    the policy itself), and `asked` are the scores to compute."""

    ids: Sequence[int]
    context: RowContext | None = None
    inputs: RowInputs | None = None
    adapter: Adapter | None = None
    asked: Sequence[ScoredPrompt] = ()

    @property
    def before(self) -> int:
        """The number of cached tokens."""
        return 0 if self.context is None else self.context.length

    @property
    def length(self) -> int:
        """The number of tokens after the prefill."""
        return self.before + len(self.ids)


class RowRead(NamedTuple):
    """A row's result of a prefill: its context, in memory that the rows of one pass share, the experts of its new
    tokens, and the scores that were asked for."""

    context: RowContext
    experts: Tensor | None  # [m, L, k]
    scores: Sequence[PromptScores] = ()


def read(bound: Bound, policy: DecodingPolicy, layout: BankLayout, readings: Sequence[Reading]) -> list[RowRead]:
    """Prefill rows, in passes of at most `policy.prefill_tokens` tokens together; rows of one adapter are adjacent.

    A model with carried states prefills only whole prompts: transformers continues from states by one token at a time.
    """
    first: dict[int, int] = {}
    kinds = [first.setdefault(id(reading.adapter), len(first)) for reading in readings]
    order = sorted(range(len(readings)), key=kinds.__getitem__)
    found: dict[int, RowRead] = {}
    for part in groups_within([len(readings[place].ids) for place in order], policy.prefill_tokens):
        own = [readings[place] for place in order[part]]
        rows = beside(bound, owned([(reading.adapter, len(reading.ids)) for reading in own]))
        found |= zip(order[part], rows(lambda _, own=own: _read(policy, layout, own)), strict=True)
    return [found[place] for place in range(len(readings))]


def owned(sizes: Sequence[tuple[Adapter | None, int]]) -> list[OwnRows]:
    """List the adapters of a pass, each with its slice of the rows. `sizes` has an adapter (None: the policy itself)
    and a number of rows for each part of the pass."""
    found, end = list[OwnRows](), 0
    for adapter, rows in groupby(sizes, key=lambda each: each[0]):
        start, end = end, end + sum(size for _, size in rows)
        found += [] if adapter is None else [OwnRows(adapter, slice(start, end))]
    return found


def groups_within(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Split items of these sizes into consecutive groups of at most `most` in sum, or of one larger item."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield slice(start, i)
            start, total = i, 0
        total += size
    yield slice(start, len(sizes))


def _read(policy: DecodingPolicy, layout: BankLayout, readings: Sequence[Reading]) -> list[RowRead]:
    axis, device = policy.columns.axis, layout.device
    sizes, rows = [len(reading.ids) for reading in readings], len(readings)
    fill = -sum(sizes) % axis.size
    lengths = make_lengths([*sizes, fill], device)
    ids = [token for reading in readings for token in reading.ids]
    tokens = sent(torch.tensor([*ids, *[0] * fill]), device)
    positions = sent(torch.cat([*(_positions(reading) for reading in readings), torch.arange(fill)]), device)
    whole, attend = _attention(policy, layout, readings, lengths, fill)
    carried, routes = PromptStates(lengths, policy.model), policy.routes()
    inputs = [reading.inputs for reading in readings]
    hidden = _hidden(policy, tokens, positions, inputs, sizes, RowWise(attend, carried), routes)
    hidden = all_gather(hidden, axis)
    last = hidden[lengths.cu_seqlens[1 : rows + 1].long() - 1]
    logits = policy.logits(last, owned([(reading.adapter, 1) for reading in readings]))
    experts = None if routes is None else experts_of(routes.routed, policy.routers, tokens)
    states = carried.states_(rows, 1)
    ends, starts = list(accumulate(reading.length for reading in readings)), [0, *accumulate(sizes)]
    found: list[RowRead] = []
    for row, (reading, end) in enumerate(zip(readings, ends, strict=True)):
        own = tuple(x[:, :, end - reading.length : end] for x in whole)
        shift = shift_of(policy.model, reading.inputs) if reading.context is None else reading.context.shift
        after = Next(logits[row : row + 1], last[row : row + 1])
        context = RowContext(reading.length, own, states.picked([row]), shift, after)
        part = None if experts is None else experts[starts[row] : starts[row + 1]]
        scores = _scores(policy, reading, hidden[starts[row] : starts[row + 1]]) if reading.asked else ()
        found.append(RowRead(context, part, scores))
    return found


def _scores(policy: DecodingPolicy, reading: Reading, hidden: Tensor) -> list[PromptScores]:
    own = [] if reading.adapter is None else [OwnRows(reading.adapter, slice(None))]

    def logits_of(some: Tensor) -> Tensor:
        return whole_logits(policy.logits(some, own), policy.columns)

    return prompt_scores(reading.asked, reading.ids, hidden, logits_of, policy.scores)


def _positions(reading: Reading) -> Tensor:
    shift = 0 if reading.context is None else reading.context.shift
    return torch.arange(reading.before + shift, reading.length + shift)


def _attention(
    policy: DecodingPolicy, layout: BankLayout, readings: Sequence[Reading], lengths: Lengths, fill: int
) -> tuple[Banks, Attend]:
    """Make banks with the cached keys and values of all rows laid end to end, and `fill` columns more, and an `attend`
    that writes the keys and values of new tokens there."""
    attention, device = policy.kernels.attention, layout.device
    whole = layout.row(sum(reading.length for reading in readings) + fill)
    calls, cache, new = count(), layout.layers(whole), None
    seen = lengths
    if any(reading.before for reading in readings):
        begins = [0, *accumulate(reading.length for reading in readings)]
        spans = [(begin, reading.before, reading.length) for begin, reading in zip(begins, readings)]
        old = torch.cat([torch.arange(begin, begin + before) for begin, before, _ in spans])
        ahead = [torch.arange(begin + before, begin + length) for begin, before, length in spans]
        new = sent(torch.cat([*ahead, torch.arange(begins[-1], begins[-1] + fill)]), device)
        earlier = bank_rows.joined([reading.context.banks for reading in readings if reading.context is not None])
        for x, had in zip(whole, earlier, strict=True):
            x.index_copy_(2, sent(old, device), had)
        seen = make_lengths([*(reading.length for reading in readings), fill], device)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        pair = cache[next(calls)]
        for x, own in zip(pair, (key, value), strict=True):
            if new is None:
                x.copy_(own[0].transpose(0, 1))
            else:
                x.index_copy_(1, new, own[0].transpose(0, 1))
        keys, values = (key[0], value[0]) if new is None else (x.transpose(0, 1) for x in pair)
        more: dict[str, Any] = {} if new is None else {"key_lengths": seen}
        _, scale, window, softcap, sinks = layer
        how = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        return attention(query[0], keys, values, lengths=lengths, **how, **more)[None]

    return whole, attend


def _hidden(
    policy: DecodingPolicy,
    tokens: Tensor,
    positions: Tensor,
    inputs: Sequence[RowInputs | None],
    sizes: Sequence[int],
    attend: Attend,
    routes: Routes | None,
) -> Tensor:
    """Hidden states [N, H] of packed tokens [N], with the images of their rows."""
    tokens, (images, positions) = tokens[None], place_images(policy.model, inputs, tokens, positions, sizes)
    embedded, deep = (None, None) if images is None else see(policy.model, policy.skeleton, tokens, images)
    positions = positions.unsqueeze(-2)
    return models.forward(policy.text, tokens, positions, attend=attend, routes=routes, embedded=embedded, deep=deep)[0]


def tried(policy: DecodingPolicy) -> tuple[Layers, list[AttentionLayer], int]:
    """Try one token for each rank, inside `bind`. Returns the tokens' keys and values, [N, H, D] each, the arguments of
    each attention call, and the bytes of a row's states."""
    ranks, device = policy.columns.axis.size, policy.head.weight.device
    kept, calls = caches.Layers(), list[AttentionLayer]()
    tokens, lengths = torch.zeros(1, ranks, dtype=torch.int64, device=device), make_lengths([1] * ranks, device)
    states = PromptStates(lengths, policy.model)
    attend = RowWise(caches.prefill_attention(policy.kernels.attention, lengths, kept, calls), states)
    models.forward(policy.text, tokens, tokens, attend=attend)
    return kept, calls, states.states_(1, 1).row_bytes
