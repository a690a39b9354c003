"""Rollouts by requests: all responses to prompts are requests, which an open engine answers together."""

from __future__ import annotations

import attrs
import torch

from fppo.batch import Rollout
from fppo.rollout.engine import Ask
from fppo.rollout.records import check_prompts, number_rows, response_limits, rollout_of
from fppo.rollout.requests import FinishedRequest, Request, Requests
from fppo.tree import replace

_TOKENS, _HEARD = 128, 16  # the most tokens of a step; the same if somebody listens for finished rows


def requests_of(ask: Ask) -> list[Request]:
    """A request for each row of the rollout, named by its number.

    Raises ValueError for no prompts, for empty ones or ones not padded on the left, and for limits below 1.
    """
    mask = ask.prompts.attention_mask.bool()
    lengths, limits, n = check_prompts(mask), response_limits(ask), ask.sampling.n
    samplings = {limit: attrs.evolve(ask.sampling, n=1, max_tokens=limit) for limit in set(limits)}
    rows, inputs = number_rows(ask, torch.device("cpu")).tolist(), ask.prompts.inputs
    earlier = ask.prompts.earlier
    asked: list[Request] = []
    for prompt, (tokens, length) in enumerate(zip(ask.prompts.tokens.tolist(), lengths, strict=True)):
        ids = tuple(tokens[len(tokens) - length :])
        for number in range(prompt * n, prompt * n + n):
            own = Request(
                name=str(number),
                ids=ids,
                sampling=samplings[limits[prompt]],
                key=ask.key,
                row=rows[number],
                position=ask.offset,
                inputs=None if inputs is None else inputs[prompt],
                earlier=() if earlier is None else earlier[prompt],
            )
            asked.append(own)
    return asked


def answered(
    requests: Requests, ask: Ask, *, pad_token_id: int, device: torch.device, every: int | None = None
) -> Rollout:
    """The rollout of the responses to `ask` by an open engine without other requests.

    With `every`, the newest weights of `ask.newer` are taken after so many tokens of each row, and the rollout has
    `token_versions`.
    """
    asked = requests_of(ask)
    done: dict[int, FinishedRequest] = {}
    most = every or (_TOKENS if ask.on_finished is None else _HEARD)
    version = ask.version
    requests.add(asked)
    while True:
        for one in requests.step(most).finished:
            done[int(one.name)] = one
            if ask.on_finished is not None:
                ask.on_finished(int(one.name), one.tokens.tolist(), one.end)
        if not requests.counts.open:
            break
        newer = None if every is None or ask.newer is None else ask.newer()
        if newer is not None and newer[1] > version:
            version = newer[1]
            requests.update(*newer)
    rows = [done[row] for row in range(len(asked))]
    rollout = rollout_of(ask, rows, pad_token_id=pad_token_id, device=device, versions=every is not None)
    drafts = [row.drafts for row in rows if row.drafts is not None]
    return replace(rollout, drafts=torch.tensor(drafts, device=device)) if drafts else rollout
