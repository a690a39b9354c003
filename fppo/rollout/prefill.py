"""Prefill: one pass over new tokens, after each row's cached ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, count, groupby
from typing import NamedTuple, TypeVar

import numpy as np
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

K = TypeVar("K")


class RowContext(NamedTuple):
    """The n cached tokens of a row: their keys and values, and the states after them.

    Keys and values are in `banks`, or those of tokens from `start` on in a pass over whole prompts.
    """

    layout: BankLayout  # of `banks`
    length: int
    banks: Banks  # [K, H, n, D]; empty for a row of a pass
    states: States  # of one row
    shift: int = 0  # a position minus the number of its token, after images
    after: Next | None = None  # the logits of the first draws of the rows of a pass
    place: int = 0  # of this row among them
    passed: Layers | None = None  # [N, H, D] of each attention call of the pass
    start: int = 0

    def apart(self) -> RowContext:
        """A copy of the context, with memory of its own."""
        after = None if self.after is None else self.after.each(lambda x: x[self.place : self.place + 1].clone())
        own = tuple(x.clone() for x in self.banks)
        if self.passed is not None:
            own = self.layout.row(self.length)
            for number, pair in self.layout.layers(own).items():
                for x, new in zip(pair, self.passed[number], strict=True):
                    x.copy_(new[self.start : self.start + self.length].transpose(0, 1))
        return self._replace(banks=own, after=after, place=0, passed=None)


class PrefillInput(NamedTuple):
    """Tokens to prefill: new tokens after a context, or a whole prompt with its images. They run with `adapter` (None:
    the policy itself), and `requested_scores` are the scores to compute."""

    ids: Sequence[int]
    context: RowContext | None = None
    inputs: RowInputs | None = None
    adapter: Adapter | None = None
    requested_scores: Sequence[ScoredPrompt] = ()

    @property
    def cached(self) -> int:
        """The number of cached tokens."""
        return 0 if self.context is None else self.context.length

    @property
    def length(self) -> int:
        """The number of tokens after the prefill."""
        return self.cached + len(self.ids)


class PrefillResult(NamedTuple):
    """A row's result of a prefill: its context, in memory that the rows of one pass share, the experts of its new
    tokens, and the scores that were requested."""

    context: RowContext
    experts: Tensor | None  # [m, L, k]
    scores: Sequence[PromptScores] = ()


def first_logits(contexts: Sequence[RowContext], device: torch.device) -> list[Next]:
    """The logits of the first draws of rows that were prefilled, in their order."""
    parts: list[Next] = []
    for _, each in groupby(contexts, key=lambda context: id(context.after)):
        own = [*each]
        after, places = own[0].after, [context.place for context in own]
        assert after is not None
        if places != [*range(len(after.logits))]:
            index = sent(torch.tensor(places), device)
            after = after.each(lambda x, index=index: x[index])
        parts.append(after)
    return parts


def prefill_parts(prefills: Mapping[K, PrefillInput], most: int) -> Iterator[dict[K, PrefillInput]]:
    """Split prefills into passes of at most `most` tokens together, or of one longer row; rows of one adapter are
    adjacent."""
    first: dict[int, int] = {}
    kinds = {name: first.setdefault(id(item.adapter), len(first)) for name, item in prefills.items()}
    order = sorted(prefills, key=kinds.__getitem__)
    for part in groups_within([len(prefills[name].ids) for name in order], most) if order else ():
        yield {name: prefills[name] for name in order[part]}


def prefill(bound: Bound, policy: DecodingPolicy, prefills: Mapping[K, PrefillInput]) -> dict[K, PrefillResult]:
    """Prefill rows in one pass; rows of one adapter are adjacent.

    A model with carried states prefills only whole prompts: transformers continues from states by one token at a time.
    """
    own = [*prefills.values()]
    rows = beside(bound, adapter_slices([(item.adapter, len(item.ids)) for item in own]))
    return dict(zip(prefills, rows(lambda _: _prefill_together(policy, own)), strict=True))


def adapter_slices(sizes: Sequence[tuple[Adapter | None, int]]) -> list[OwnRows]:
    """List the adapters of a pass, each with its slice of the rows. `sizes` has an adapter (None: the policy itself)
    and a number of rows for each part of the pass."""
    found, end = list[OwnRows](), 0
    for adapter, rows in groupby(sizes, key=lambda each: each[0]):
        start, end = end, end + sum(size for _, size in rows)
        found += [] if adapter is None else [OwnRows(adapter, slice(start, end))]
    return found


def groups_within(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Split items of these sizes into consecutive groups of at most `limit` in sum, or of one larger item."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            yield slice(start, i)
            start, total = i, 0
        total += size
    yield slice(start, len(sizes))


def _prefill_together(policy: DecodingPolicy, prefills: Sequence[PrefillInput]) -> list[PrefillResult]:
    axis, device = policy.columns.axis, policy.device
    sizes, rows = [len(item.ids) for item in prefills], len(prefills)
    fill = -sum(sizes) % axis.size
    lengths = make_lengths([*sizes, fill], device)
    ids = [token for item in prefills for token in item.ids]
    tokens = sent(torch.tensor([*ids, *[0] * fill]), device)
    positions = sent(_positions(prefills, sizes, fill), device)
    before = next((item.context for item in prefills if item.context is not None), None)
    whole, passed, calls = Banks(), caches.Layers(), list[AttentionLayer]()
    if before is None:
        attend = caches.prefill_attention(policy.kernels.attention, lengths, passed, calls)
    else:
        whole, attend = _attention(policy, before.layout, prefills, lengths, fill)
    carried, routes = PromptStates(lengths, policy.model), policy.routes()
    inputs = [item.inputs for item in prefills]
    hidden = _hidden(policy, tokens, positions, inputs, sizes, RowWise(attend, carried), routes)
    hidden = all_gather(hidden, axis)
    last = hidden[lengths.cu_seqlens[1 : rows + 1].long() - 1]
    logits = policy.logits(last, adapter_slices([(item.adapter, 1) for item in prefills]))
    experts = None if routes is None else experts_of(routes.routed, policy.routers, tokens)
    states = carried.states_(rows, 1)
    layout = BankLayout.of_layers(passed, device, calls) if before is None else before.layout
    ends, starts = list(accumulate(item.length for item in prefills)), [0, *accumulate(sizes)]
    found, after = list[PrefillResult](), Next(logits, last)
    for row, (item, end) in enumerate(zip(prefills, ends, strict=True)):
        shift = shift_of(policy.model, item.inputs) if item.context is None else item.context.shift
        own, begin = states.picked([row]), end - item.length
        banks = tuple(x[:, :, begin:end] for x in whole)
        context = RowContext(layout, item.length, banks, own, shift, after, row, passed or None, begin)
        part = None if experts is None else experts[starts[row] : starts[row + 1]]
        scores = _scores(policy, item, hidden[starts[row] : starts[row + 1]]) if item.requested_scores else ()
        found.append(PrefillResult(context, part, scores))
    return found


def _scores(policy: DecodingPolicy, item: PrefillInput, hidden: Tensor) -> list[PromptScores]:
    own = [] if item.adapter is None else [OwnRows(item.adapter, slice(None))]

    def logits_of(some: Tensor) -> Tensor:
        return whole_logits(policy.logits(some, own), policy.columns)

    return prompt_scores(item.requested_scores, item.ids, hidden, logits_of, policy.scores)


def _positions(prefills: Sequence[PrefillInput], sizes: Sequence[int], fill: int) -> Tensor:
    """The positions of new tokens [N], and of `fill` tokens more."""
    shifts = [0 if item.context is None else item.context.shift for item in prefills]
    first = [item.cached + shift - start for item, shift, start in zip(prefills, shifts, accumulate([0, *sizes]))]
    each = np.repeat([*first, -sum(sizes)], [*sizes, fill])
    return torch.from_numpy(np.arange(len(each)) + each)


def _attention(
    policy: DecodingPolicy, layout: BankLayout, prefills: Sequence[PrefillInput], lengths: Lengths, fill: int
) -> tuple[Banks, Attend]:
    """Make banks with the cached keys and values of all rows (`prefills`) laid end to end, and `fill` columns more, and
    an `attend` that writes the keys and values of new tokens there; `lengths` are those of the rows' new tokens, and
    `fill`. Some row has cached tokens."""
    attention, device = policy.kernels.attention, policy.device
    whole = layout.row(sum(item.length for item in prefills) + fill)
    calls, cache = count(), layout.layers(whole)
    begins = [0, *accumulate(item.length for item in prefills)]
    spans = [(begin, item.cached, item.length) for begin, item in zip(begins, prefills)]
    old = torch.cat([torch.arange(begin, begin + before) for begin, before, _ in spans])
    ahead = [torch.arange(begin + before, begin + length) for begin, before, length in spans]
    new = sent(torch.cat([*ahead, torch.arange(begins[-1], begins[-1] + fill)]), device)
    earlier = bank_rows.joined([item.context.banks for item in prefills if item.context is not None])
    for x, had in zip(whole, earlier, strict=True):
        x.index_copy_(2, sent(old, device), had)
    seen = make_lengths([*(item.length for item in prefills), fill], device)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        pair = cache[next(calls)]
        for x, own in zip(pair, (key, value), strict=True):
            x.index_copy_(1, new, own[0].transpose(0, 1))
        keys, values = (x.transpose(0, 1) for x in pair)
        _, scale, window, softcap, sinks = layer
        how = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        return attention(query[0], keys, values, lengths=lengths, key_lengths=seen, **how)[None]

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
    """Hidden states [N, H] of packed tokens [N] of rows of these `sizes`, with the rows' images."""
    tokens, (images, positions) = tokens[None], place_images(policy.model, inputs, tokens, positions, sizes)
    embedded, deep = (None, None) if images is None else see(policy.model, policy.skeleton, tokens, images)
    positions = positions.unsqueeze(-2)
    return models.forward(policy.text, tokens, positions, attend=attend, routes=routes, embedded=embedded, deep=deep)[0]


def trial_token(policy: DecodingPolicy) -> tuple[int, int]:
    """Try one token for each rank, inside `bind`. Returns the bytes of a token's keys and values, and of a row's
    states."""
    ranks, device, kept = policy.columns.axis.size, policy.device, caches.Layers()
    tokens, lengths = torch.zeros(1, ranks, dtype=torch.int64, device=device), make_lengths([1] * ranks, device)
    states = PromptStates(lengths, policy.model)
    attend = RowWise(caches.prefill_attention(policy.kernels.attention, lengths, kept, []), states)
    models.forward(policy.text, tokens, tokens, attend=attend)
    return caches.row_bytes(kept, 1), states.states_(1, 1).row_bytes
