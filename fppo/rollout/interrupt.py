"""Responses that continue with newer weights: an update takes effect while they are generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo.batch import Rollout
from fppo.rollout.engine import Ask, Engine, Newer
from fppo.rollout.records import number_rows, response_limits, rollout_of
from fppo.runtime.in_order import InOrder
from fppo.tree import replace


def _at_least_one(_: object, attribute: attrs.Attribute, value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name} = {value}: give 1 or more tokens, after which newer weights are taken")


@attrs.frozen(kw_only=True)
class InterruptibleEngine:
    """An engine whose responses continue with newer weights: it asks `ask.newer` for them after each `every` tokens.

    `engine` generates `every` tokens of all rows, then as many of the rows that have not ended, and so on, each time
    with the newest weights. The tokens so far are its prompts: keys, values and states are computed anew. So a token
    and its log-probs belong to one policy, that of `token_versions`. They are computed anew even if the weights stay
    the same: then a token depends on the versions of the tokens before it, and not on when these versions came.

    Draws are those of `engine`, by the key, the row's number and the position in the response. If no newer weights
    come, the rollout is that of `engine`, up to rounding. `engine` itself sends weights, checks digests and replaces
    processes that die. Rows are reported as finished between the pieces. Without `newer` the engine answers directly.
    Several threads may ask: the next piece goes to the one that has waited longest.
    """

    engine: Engine
    every: int = attrs.field(validator=_at_least_one)
    pad_token_id: int
    _one: InOrder = attrs.field(factory=InOrder, init=False)

    def generate(self, params: Mapping[str, Any], ask: Ask) -> Rollout:
        """The rollout, with `token_versions` if `ask.newer` is given.

        Raises ValueError for `newer` with greedy sampling, which is to follow one policy, and for an engine that
        reports experts.
        """
        if ask.newer is None:
            with self._one:
                return self.engine.generate(params, ask)
        if ask.sampling.greedy:
            raise ValueError("Ask.newer: greedy responses are one policy's, to be compared; give none with greedy")
        params, version = _newest(params, ask.version, ask.newer)
        first = attrs.evolve(ask, version=version, newer=None, on_finished=None)
        limits = torch.tensor([limit for limit in response_limits(ask) for _ in range(ask.sampling.n)])
        rows, live, part = _ResponseRows(), torch.arange(len(limits)), first
        while True:
            with self._one:
                piece = self.engine.generate(params, _within(part, self.every))
            if piece.routed is not None:
                raise ValueError("routed: the engine tells experts of pieces anew; leave routed or Ask.newer out")
            rows = rows.extended(piece, live, len(limits), version)
            done = _done(rows, piece, live, limits, ask)
            _report(ask, rows, live[done])
            live = live[~done]
            if not len(live):
                return _whole(first, rows, self.pad_token_id)
            params, version = _newest(params, version, ask.newer)
            part = _continued(attrs.evolve(first, version=version), rows, live, limits)


class _ResponseRows(NamedTuple):
    """The responses so far, [B, T], and the version of the policy at each of the T positions."""

    tokens: Tensor = torch.empty(0, 0, dtype=torch.int64)
    drawn: Tensor = torch.empty(0, 0, dtype=torch.bool)
    log_probs: Tensor = torch.empty(0, 0)
    sampling_log_probs: Tensor = torch.empty(0, 0)
    versions: tuple[int, ...] = ()

    def extended(self, piece: Rollout, live: Tensor, count: int, version: int) -> _ResponseRows:
        """Append a piece: more tokens, drawn by policy `version`, of the rows numbered `live` out of `count` rows."""
        width = piece.response_mask.shape[1]
        new = (piece.tokens[:, -width:], piece.response_mask, piece.rollout_log_probs, piece.sampling_log_probs)
        where = live.to(piece.tokens.device)
        columns = [x.new_zeros(count, width).index_copy(0, where, x) for x in new]
        if self.versions:
            columns = [torch.cat(both, 1) for both in zip(self[:4], columns, strict=True)]
        return _ResponseRows(*columns, versions=(*self.versions, *[version] * width))

    def response(self, row: int) -> list[int]:
        return self.tokens[row][self.drawn[row]].tolist()


def _newest(params: Mapping[str, Any], version: int, newer: Newer) -> tuple[Mapping[str, Any], int]:
    other = newer()
    return other if other is not None and other[1] > version else (params, version)


def _within(ask: Ask, most: int) -> Ask:
    return attrs.evolve(ask, sampling=attrs.evolve(ask.sampling, max_tokens=min(most, ask.sampling.max_tokens)))


def _continued(ask: Ask, rows: _ResponseRows, live: Tensor, limits: Tensor) -> Ask:
    """The request for more tokens of the rows `live`, which have the same number of tokens each."""
    n, had, where = ask.sampling.n, rows.drawn.shape[1], live.to(rows.tokens.device)
    prompts = batches.rows(ask.prompts, live // n)
    tokens = torch.cat([prompts.tokens.to(rows.tokens), rows.tokens[where]], 1)
    mask = torch.cat([prompts.attention_mask.to(rows.drawn), rows.drawn[where]], 1)
    ids = number_rows(ask, where.device)[where]
    return attrs.evolve(
        ask,
        prompts=replace(prompts, tokens=tokens, attention_mask=mask, row_ids=ids),
        sampling=attrs.evolve(ask.sampling, n=1),
        limits=limits[live] - had,
        offset=ask.offset + had,
    )


def _done(rows: _ResponseRows, piece: Rollout, live: Tensor, limits: Tensor, ask: Ask) -> Tensor:
    """Find which of the rows `live` have ended: bool [L]. Stop texts are searched for here, in whole responses, since
    an engine does not see the part of a text in an earlier piece."""
    ended = torch.tensor([reason == "stop" for reason in piece.finish]) | (limits[live] <= rows.drawn.shape[1])
    if (texts := ask.sampling.stop_texts) is not None:
        ended |= torch.tensor([texts.end(rows.response(row)) is not None for row in live.tolist()])
    return ended


def _report(ask: Ask, rows: _ResponseRows, done: Tensor) -> None:
    if ask.on_finished is None:
        return
    for row in done.tolist():
        response = _cut(rows.response(row), ask)
        ask.on_finished(row, response, "stop" if ask.sampling.stopped(response) else "length")


def _cut(response: Sequence[int], ask: Ask) -> list[int]:
    """A response up to and including the first token that completes a stop text."""
    texts = ask.sampling.stop_texts
    end = None if texts is None else texts.end(response)
    return list(response if end is None else response[: end[0]])


def _whole(ask: Ask, rows: _ResponseRows, pad_token_id: int) -> Rollout:
    """The rollout of all rows, as long as the longest of them."""
    drawn, device = rows.drawn, rows.tokens.device
    if ask.sampling.stop_texts is not None:
        ends = torch.tensor([len(_cut(rows.response(row), ask)) for row in range(len(drawn))], device=device)
        drawn = drawn & (torch.arange(drawn.shape[1], device=device) < ends[:, None])
    width = int(drawn.any(0).sum())
    tokens, drawn, *log_probs = (x[:, :width] for x in (rows.tokens, drawn, *rows[2:4]))
    ids = number_rows(ask, device)
    rollout = rollout_of(ask, tokens, drawn, *log_probs, row_ids=ids, pad_token_id=pad_token_id)
    versions = torch.tensor(rows.versions[:width], dtype=torch.int32, device=device)
    return replace(rollout, token_versions=versions.expand_as(tokens).where(rollout.response_mask, 0))
