"""Responses that continue with newer weights: an update takes effect while they are generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from fppo import tree
from fppo.batch import Rollout
from fppo.rollout.answered import answered
from fppo.rollout.engine import Ask, Engine
from fppo.rollout.generated import GeneratedRequests
from fppo.runtime.in_order import InOrder


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
            return self._alone(params, ask)
        if ask.sampling.greedy:
            raise ValueError("Ask.newer: greedy responses are one policy's, to be compared; give none with greedy")
        newer = ask.newer()
        if newer is not None and newer[1] > ask.version:
            params, ask = newer[0], attrs.evolve(ask, version=newer[1])
        device = torch.device("cpu")

        def piece(params: Mapping[str, Any], part: Ask) -> Rollout:
            nonlocal device
            rollout = self._alone(params, part)
            if rollout.routed is not None:
                raise ValueError("routed: the engine tells experts of pieces anew; leave routed or Ask.newer out")
            device = rollout.tokens.device
            return rollout

        requests = GeneratedRequests(piece, params, ask.version)
        rollout = answered(requests, ask, pad_token_id=self.pad_token_id, device=device, every=self.every)
        return tree.map(lambda x: x.to(device), rollout)

    def _alone(self, params: Mapping[str, Any], ask: Ask) -> Rollout:
        with self._one:
            return self.engine.generate(params, ask)
