"""Responses of several turns: a tool answers each, and its words are context that is not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo import metrics
from fppo.batch import Column, Prompts, Rollout
from fppo.data.encode import MESSAGES
from fppo.key import Key
from fppo.metrics import Metrics
from fppo.rollout.engine import Engine, OnFinished, Sampling
from fppo.rollout.records import response_limits
from fppo.rollout.turns.observations import Encode
from fppo.rollout.turns.replies import Reply, Responder
from fppo.rollout.turns.tools import Message
from fppo.runtime.mesh import GRADIENT_AXES, LOCAL, Mesh, gather_objects, place_on, ranks_on
from fppo.tree import replace

FAILURES = "tool_failures"  # the key under which extras hold how many of a row's calls of the tool failed


class _Section(NamedTuple):
    """The responses so far, each from the first column on [B, T]."""

    tokens: Tensor
    seen: Tensor  # bool: there is a token
    chosen: Tensor  # bool: the policy chose it
    log_probs: Tensor
    sampling_log_probs: Tensor


@attrs.define
class _Talk:
    """A row's conversation up to the policy's present turn, which began at column `since`."""

    messages: list[Message]
    since: int = 0
    failures: int = 0


@attrs.frozen(kw_only=True)
class TurnsEngine:
    """An engine whose responses are conversations with a tool.

    `engine` samples a turn. Each row that ended with a stop token goes to `tools`: what they say is encoded, put behind
    the row's tokens, and the engine goes on from there, at most `max_turns` times; token ids that were sampled stay as
    they are. What tools said is in the attention mask and not in the response mask, with log-probs of 0.

    `sampling.max_tokens` (and `limits`) bound a whole response, observations included; `turn_tokens` bounds each turn.
    A row at one of these bounds is done, its finish is "length"; so is that of a row whose observation would leave no
    room for a token after it, and the observation is left out: a response always ends with a token of the policy's. A
    row at the limit of turns ends as its turn did; nobody is asked about its last turn.

    Rows wait for each other at the end of a turn, so many short turns take more steps of decoding than one long one.

    Draws depend on key, row, turn and position in the turn; those of the first turn are the engine's own. On a mesh all
    ranks hold all rows, as the engine gives them; each asks tools about some, and all hear all replies. Where the tool
    failed, `extras` count it as "tool_failures".
    """

    engine: Engine
    tools: Responder
    encode: Encode
    tokenizer: Any
    max_turns: int
    pad_token_id: int
    turn_tokens: int | None = None
    mesh: Mesh = LOCAL

    def generate(
        self,
        params: Mapping[str, Tensor],
        prompts: Prompts,
        sampling: Sampling,
        key: Key,
        *,
        version: int = 0,
        limits: Tensor | None = None,
        on_finished: OnFinished | None = None,
    ) -> Rollout:
        """The rollout; with one turn, or tools that say nothing, the engine's own. See `Engine`."""
        most = [limit for limit in response_limits(limits, len(prompts.tokens), sampling) for _ in range(sampling.n)]
        per_turn = min(self.turn_tokens or sampling.max_tokens, sampling.max_tokens)
        first = attrs.evolve(sampling, max_tokens=per_turn)
        start = self.engine.generate(params, prompts, first, key, version=version, limits=limits)
        section, finish, live = _section_of(start), list(start.finish), list(range(len(start.tokens)))
        talks = [_Talk(self._opening(start, row)) for row in live]
        for turn in range(2, self.max_turns + 1):
            heard = self._heard([row for row in live if finish[row] == "stop"], section, talks)
            used = section.seen.sum(1).tolist()
            left = {row: most[row] - used[row] - len(words) for row, words in heard.items()}
            finish = ["length" if left.get(row, 1) < 1 else reason for row, reason in enumerate(finish)]
            before, live = live, [row for row in heard if left[row] > 0]
            self._tell(on_finished, sorted(set(before) - set(live)), section, finish, sampling.n)
            if not live:
                break
            section = _appended(section, live, _observed([heard[row] for row in live], section))
            room = torch.tensor([min(left[row], per_turn) for row in live])
            made = self.engine.generate(
                params,
                _contexts(start, section, live),
                attrs.evolve(sampling, n=1, max_tokens=int(room.max())),
                key.fold("turn", turn),
                version=version,
                limits=room,
            )
            section = _appended(section, live, _section_of(made))
            for row, reason in zip(live, made.finish, strict=True):
                finish[row] = reason
        self._tell(on_finished, live, section, finish, sampling.n)
        return self._record(start, section, finish, talks)

    def _tell(
        self, on_finished: OnFinished | None, rows: Sequence[int], section: _Section, finish: Sequence[str], n: int
    ) -> None:
        """Tells of rows that are done; each is one rank's to tell of, that of its prompt."""
        if on_finished is None:
            return
        ranks, place = ranks_on(self.mesh, GRADIENT_AXES), place_on(self.mesh, GRADIENT_AXES)
        for row in rows:
            if row // n % ranks == place:
                on_finished(row, section.tokens[row][section.seen[row]].tolist(), finish[row])

    def _opening(self, start: Rollout, row: int) -> list[Message]:
        """The prompt as messages: a chat's own, or its text."""
        given = start.extras[row].get(MESSAGES)
        if given is not None:
            return [dict(message) for message in given]
        width = start.tokens.shape[1] - start.response_mask.shape[1]
        prompt = start.tokens[row, :width][start.attention_mask[row, :width]].tolist()
        text = self.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [{"role": "user", "content": text}]

    def _heard(self, asked: Sequence[int], section: _Section, talks: Sequence[_Talk]) -> dict[int, list[int]]:
        """What tools say to these rows, as tokens, for those that are to go on. It becomes part of their talks."""
        tokens, used = section.tokens.cpu(), section.seen.sum(1).tolist()
        turns = [self._turn(tokens[row, talks[row].since : used[row]].tolist()) for row in asked]
        conversations = [[*talks[row].messages, turn] for row, turn in zip(asked, turns, strict=True)]
        heard: dict[int, list[int]] = {}
        for row, turn, reply in zip(asked, turns, self._replies(conversations, section.tokens.device), strict=True):
            talk = talks[row]
            talk.failures += reply.failed
            if reply.messages is None:
                continue
            heard[row] = self.encode(reply.messages, int(tokens[row, used[row] - 1]))
            if reply.messages:  # else the turn goes on
                talk.messages += [turn, *reply.messages]
                talk.since = used[row] + len(heard[row])
        return heard

    def _turn(self, ids: list[int]) -> Message:
        """The policy's turn as a message: special tokens stand in its text, but for one that ended it."""
        words = ids[:-1] if ids[-1] in self.tokenizer.all_special_ids else ids
        text, end = (
            self.tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for part in (words, ids[-1:])
        )
        return {"role": "assistant", "content": text, "end": end}

    def _replies(self, conversations: Sequence[list[Message]], device: torch.device) -> list[Reply]:
        """The tools' replies to conversations that all ranks hold, each asked for by one of them."""
        ranks = ranks_on(self.mesh, GRADIENT_AXES)
        own = self.tools.replies(conversations[place_on(self.mesh, GRADIENT_AXES) :: ranks])
        if ranks == 1:
            return own
        found = gather_objects([list(reply) for reply in own], self.mesh, GRADIENT_AXES, device)
        return [Reply(*found[number % ranks][number // ranks]) for number in range(len(conversations))]

    def _record(self, start: Rollout, section: _Section, finish: list[str], talks: Sequence[_Talk]) -> Rollout:
        width = start.tokens.shape[1] - start.response_mask.shape[1]
        extras = (
            {**extra, FAILURES: talk.failures} if talk.failures else extra
            for extra, talk in zip(start.extras, talks, strict=True)
        )
        tokens = section.tokens.where(section.seen, self.pad_token_id)
        return replace(
            start,
            tokens=torch.cat([start.tokens[:, :width], tokens], 1),
            attention_mask=torch.cat([start.attention_mask[:, :width], section.seen], 1),
            response_mask=section.chosen,
            rollout_log_probs=section.log_probs,
            sampling_log_probs=section.sampling_log_probs,
            finish=Column(finish),
            extras=Column(extras),
        )


def turn_metrics(rollout: Rollout) -> Metrics:
    """The turns of a response, which observations part, the tokens of its observations, and failed calls of tools."""
    chosen = rollout.response_mask
    seen = rollout.attention_mask[:, -chosen.shape[1] :]
    turns = (chosen & ~F.pad(chosen, (1, -1))).sum(1)
    every = torch.ones_like(turns, dtype=torch.bool)
    return {
        "rollout/turns/mean": metrics.masked_mean(turns, every),
        "rollout/turns/max": metrics.masked_max(turns, every),
        "rollout/observation_tokens/mean": metrics.masked_mean((seen & ~chosen).sum(1), every),
        "rollout/tool_failures": metrics.total(sum(extra.get(FAILURES, 0) for extra in rollout.extras)),
    }


def _section_of(rollout: Rollout) -> _Section:
    width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
    return _Section(
        rollout.tokens[:, width:],
        rollout.attention_mask[:, width:],
        rollout.response_mask,
        rollout.rollout_log_probs,
        rollout.sampling_log_probs,
    )


def _observed(words: Sequence[Sequence[int]], like: _Section) -> _Section:
    """Observations as a section: seen, and not chosen."""
    lengths = torch.tensor([len(ids) for ids in words])
    width = int(lengths.max())
    tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in words], dtype=torch.int64)
    tokens = tokens.view(len(words), width).to(like.tokens.device)
    seen = (torch.arange(width) < lengths[:, None]).to(tokens.device)
    nothing = like.log_probs.new_zeros(tokens.shape)
    return _Section(tokens, seen, torch.zeros_like(seen), nothing, nothing)


def _appended(whole: _Section, rows: Sequence[int], part: _Section) -> _Section:
    """The section with those of `part` [R, t] behind its `rows`."""
    index = torch.tensor(rows, device=whole.seen.device)
    start = whole.seen.sum(1)[index]
    width = max(whole.seen.shape[1], int((start + part.seen.sum(1)).max()))
    row, column = part.seen.nonzero(as_tuple=True)
    place = index[row] * width + start[row] + column

    def put(old: Tensor, new: Tensor) -> Tensor:
        wide = F.pad(old, (0, width - old.shape[1]))
        return wide.flatten().index_copy(0, place, new[row, column]).view(wide.shape)

    return _Section(*(put(old, new) for old, new in zip(whole, part, strict=True)))


def _contexts(start: Rollout, section: _Section, rows: Sequence[int]) -> Prompts:
    """All that these rows hold so far, as prompts, padded on the left; their row ids are the rollout's."""
    width = start.tokens.shape[1] - start.response_mask.shape[1]
    asked = batches.rows(start, rows)
    index = asked.row_ids.new_tensor(rows)
    tokens = torch.cat([asked.tokens[:, :width], section.tokens[index]], 1)
    seen = torch.cat([asked.attention_mask[:, :width], section.seen[index]], 1)
    order = torch.argsort(seen.long(), dim=1, stable=True)[:, -int(seen.sum(1).max()) :]
    return Prompts(
        tokens=tokens.gather(1, order),
        attention_mask=seen.gather(1, order),
        row_ids=asked.row_ids,
        ids=asked.ids,
        ground_truth=asked.ground_truth,
        source=asked.source,
        extras=asked.extras,
    )
