"""Decoding steps: the forward pass for one more token per row, as it is or recorded once and replayed.

On a GPU a step of a small model takes as long as the host needs to launch its many operations. Recorded as a CUDA graph
they are one launch. A recording uses the same tensors at every replay, so that it reads all columns of the cache and
masks those that are not yet written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fppo import models
from fppo.models.heads import Head, logits_of
from fppo.models.model import Model
from fppo.models.routing import Router, Routes, experts_of
from fppo.models.rows import RowWise
from fppo.models.seams import Attend, AttentionLayer
from fppo.models.several import OwnRows, with_own_head
from fppo.rollout import cache as caches
from fppo.rollout.decoder import Decoder, OwnSteps
from fppo.rollout.sampling import Columns
from fppo.rollout.states import States
from fppo.runtime.graphs import Record
from fppo_kernels.collectives import all_gather
from fppo_kernels.decode_attention.steps import StepColumns
from fppo_kernels.table import Kernels


class Next(NamedTuple):
    """The logits after one more token per row, the hidden states that the head got, and the routers' experts, if
    recorded."""

    logits: Tensor  # [R, V]
    hidden: Tensor | None = None  # [R, H]
    experts: Tensor | None = None  # [R, L, k]

    def each(self, change: Callable[[Tensor], Tensor]) -> Next:
        """Apply `change` to each tensor."""
        hidden, experts = (None if x is None else change(x) for x in (self.hidden, self.experts))
        return Next(change(self.logits), hidden, experts)


# the log-probs [N] of tokens [N] by the hidden states [N, H] before them
HeadLogProbs = Callable[[Tensor, Tensor], Tensor]
# runs one more token per row [R], and writes its keys and values to a column of the cache
Advance = Callable[[Tensor, int], Next]


class DecodingPolicy(NamedTuple):
    """A policy inside `bind`, as prefill and decoding use it: its layers, head, kernels and bounds."""

    model: Model
    skeleton: PreTrainedModel
    decoder: Decoder | None  # of its language model; None if it is of an unknown class
    head: Head
    product: Callable[..., Tensor]  # of hidden states with the head, in float32 or wider
    columns: Columns  # the head's columns on this rank
    kernels: Kernels
    prefill_tokens: int
    record: Record | None  # of steps, or none
    routers: tuple[Router, ...] = ()  # those whose choices are recorded
    scores: HeadLogProbs | None = None  # the training pass's log-probs, if the rollout is to have them

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return self.head.weight.device

    @property
    def text(self) -> PreTrainedModel:
        """The language model."""
        return self.model.text_of(self.skeleton)

    def logits(self, hidden: Tensor, owned: Sequence[OwnRows] = ()) -> Tensor:
        """The logits [N, V] of hidden states [N, H], of which some are `owned` by adapters."""
        return logits_of(self.head, hidden, with_own_head(self.product, owned))

    def routes(self) -> Routes | None:
        """A record of the routers' choices in one pass; None without routers."""
        return Routes() if self.routers else None


# the rows of an adapter, also laid out for a decoder if there is one
OwnedRows = tuple[OwnRows, OwnSteps | None]


class LiveRows(NamedTuple):
    """The R rows that are being generated, the cache of their keys and values with `columns` columns, and the `states`
    of layers that are recurrent (mixers)."""

    cache: caches.Layers
    columns: int
    pads: Tensor  # int64 [R, 1]: the number of padding columns before each prompt
    starts: Tensor  # int64 [R, 1]: column - starts is a position; equals `pads` but for rows with images
    states: States
    bounds: tuple[int, int] | None = None  # the least and the most padding, where the host has them
    owned: Sequence[OwnRows] = ()  # for each adapter, the rows that use it
    own: Sequence[OwnSteps] = ()  # `owned` as indices and factors laid out for a decoder

    def of(self, owned: Sequence[OwnedRows]) -> LiveRows:
        """These rows, of which some are `owned` by adapters."""
        own = [steps for _, steps in owned if steps is not None]
        return self._replace(owned=[rows for rows, _ in owned], own=own)


def plain_steps(
    policy: DecodingPolicy, attention_layers: Sequence[AttentionLayer], length: int
) -> Callable[[LiveRows], Advance]:
    """A function that makes the step for given rows, not recorded as a CUDA graph; rows have at most `length` tokens.

    `attention_layers` are the arguments of each layer's attention.
    """
    next_hidden, kernel = _hidden_of(policy, attention_layers, length), policy.kernels.decode_attention
    fused = _fused_steps(policy, attention_layers, length)

    def of(rows: LiveRows) -> Advance:
        first, bias = _padding(rows, always=policy.scores is not None)
        if fused is not None and not rows.owned:
            run, where = fused(rows)
            return lambda tokens, column: run(tokens, where._replace(column=column, start=first, bias=bias))

        def advance(tokens: Tensor, column: int) -> Next:
            routes = policy.routes()
            attend = RowWise(caches.decode_attention(kernel, rows.cache, column, first, bias), rows.states)
            hidden = next_hidden(tokens[:, None], column - rows.starts, attend, routes, rows.own)
            experts = None if routes is None else experts_of(routes.routed, policy.routers, tokens)[: len(tokens)]
            return Next(policy.logits(hidden, rows.owned), hidden, experts)

        return advance

    return of


# runs several more tokens [N] of each row, and writes their keys and values to their places
AdvanceBy = Callable[[Tensor, caches.PassPlaces], Next]


def pass_steps(
    policy: DecodingPolicy, attention_layers: Sequence[AttentionLayer], length: int
) -> Callable[[LiveRows], AdvanceBy]:
    """`plain_steps` of several tokens of each row in one pass. `LiveRows.own` and `owned` have places in the pass."""
    next_hidden, kernel = _hidden_of(policy, attention_layers, length), policy.kernels.decode_attention
    fused = _fused_steps(policy, attention_layers, length)

    def of(rows: LiveRows) -> AdvanceBy:
        if fused is not None and not rows.owned:
            run, where = fused(rows)
            return lambda tokens, places: run(
                tokens, where._replace(column=int(places.column_numbers.max()), spans=places.spans(None))
            )

        def advance(tokens: Tensor, places: caches.PassPlaces) -> Next:
            attend = RowWise(caches.pass_attention(kernel, rows.cache, places), rows.states)
            positions = places.columns[:, None] - rows.starts[places.rows]
            hidden = next_hidden(tokens[:, None], positions, attend, None, rows.own)
            return Next(policy.logits(hidden, rows.owned), hidden)

        return advance

    return of


def fixed_steps(
    policy: DecodingPolicy, attention_layers: Sequence[AttentionLayer], length: int, record: Record
) -> Callable[[LiveRows], Advance]:
    """`plain_steps` that `record` may record: a step is a function of tensors that stay in place."""
    next_hidden, kernel = _hidden_of(policy, attention_layers, length), policy.kernels.decode_attention

    def of(rows: LiveRows) -> Advance:
        tokens, column = torch.zeros_like(rows.starts), rows.starts.new_zeros(1)

        def step() -> Tensor:
            attend = caches.fixed_attention(kernel, rows.cache, column, rows.pads)
            positions = (column - rows.starts).clamp(max=length - 1)  # meaningless in places without a row
            hidden = next_hidden(tokens, positions, attend, None, ())
            return logits_of(policy.head, hidden, policy.product)

        run = record(step)

        def advance(new: Tensor, at: int) -> Next:
            tokens.copy_(new[:, None])
            column.fill_(at)
            return Next(run())

        return advance

    return of


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [*, H] @ weight [V, H].T + bias in float32, for 16-bit tensors on a GPU, which are not widened first."""
    product = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias.float()


def _hidden_of(
    policy: DecodingPolicy, attention_layers: Sequence[AttentionLayer], length: int
) -> Callable[[Tensor, Tensor, Attend, Routes | None, Sequence[OwnSteps]], Tensor]:
    """A function that returns hidden states [R, H] after one more token per row [R, 1], at positions [R, 1].

    Rows have at most `length` tokens. A decoder has no experts, and so no routes to record. Modules have the rows of
    adapters in their weights; a decoder gets them as the last argument.
    """
    decoder, axis = policy.decoder, policy.columns.axis

    def by_modules(
        tokens: Tensor, positions: Tensor, attend: Attend, routes: Routes | None, own: Sequence[OwnSteps]
    ) -> Tensor:
        del own
        if axis.size == 1:
            return models.forward(policy.text, tokens, positions, attend=attend, routes=routes)[:, 0]
        fill = 0, -len(tokens) % axis.size  # to a packed row, of which each rank has a slice between the blocks
        row = [F.pad(x[:, 0], fill)[None] for x in (tokens, positions)]
        packed = caches.as_packed(attend, len(tokens))
        hidden = models.forward(policy.text, *row, attend=packed, routes=routes)[0]
        return all_gather(hidden, axis)[: len(tokens)]

    if decoder is None:
        return by_modules
    rotation = decoder.rotation(length)
    return lambda tokens, positions, attend, _, own: decoder.hidden(
        tokens[:, 0], rotation.at(positions[:, 0]), attend=attend, attention_layers=attention_layers, own=own
    )


def _fused_steps(
    policy: DecodingPolicy, attention_layers: Sequence[AttentionLayer], length: int
) -> Callable[[LiveRows], tuple[Callable[[Tensor, StepColumns], Next], StepColumns]] | None:
    """A function that makes for given rows the step of a decoder that is fused, of tokens [N] at columns of the cache,
    and the columns to begin with; None if steps are not fused."""
    decoder = policy.decoder
    if decoder is None or decoder.fused is None:
        return None
    rotation = decoder.rotation(length)
    angles = rotation.cos[:, 0].contiguous(), rotation.sin[:, 0].contiguous()

    def of(rows: LiveRows) -> tuple[Callable[[Tensor, StepColumns], Next], StepColumns]:
        def run(tokens: Tensor, where: StepColumns) -> Next:
            hidden = decoder.fused_hidden(tokens, where, rows.cache, attention_layers)
            return Next(policy.logits(hidden), hidden)

        return run, StepColumns(*angles, rows.starts[:, 0].contiguous(), column=0)

    return of


def _padding(rows: LiveRows, *, always: bool) -> tuple[int, Tensor | None]:
    """The first column that any row uses, and the attention bias that hides padding. If all rows have equal padding the
    bias is None, unless `always`: by it, exact attention knows where a row begins whose window begins later."""
    first, last = rows.bounds or (int(x) for x in rows.pads.aminmax())
    if first == last and not always:
        return first, None
    hidden = torch.arange(rows.columns, device=rows.pads.device) < rows.pads
    return first, caches.bias_of(hidden, rows.cache)
