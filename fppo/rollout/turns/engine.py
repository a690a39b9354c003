"""Responses of several turns: a tool answers each, and its messages are context that is not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo.batch import Column, Prompts, Rollout
from fppo.data.examples import MESSAGES
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.rollout.records import continued_experts, response_limits
from fppo.rollout.turns.games import DRAWS, EPISODE
from fppo.rollout.turns.observations import Encode
from fppo.rollout.turns.runner import Responder, ToolResult
from fppo.rollout.turns.tools import Message
from fppo.runtime.mesh import AXES, LOCAL, Mesh, gather_objects, place_on, ranks_on
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
class _Conversation:
    """A row's messages up to the policy's present turn, which began at column `since`."""

    messages: list[Message]
    opening: int  # how many of them are the prompt's
    since: int = 0
    failures: int = 0


@attrs.frozen(kw_only=True)
class TurnsEngine:
    """An engine whose responses are conversations with a tool.

    `engine` samples a turn. Each row that ended with a stop token goes to `tools`: their messages are encoded and put
    behind the row's tokens as an observation, and the engine goes on from there, at most `max_turns` times; token ids
    that were sampled stay as they are. Observations are in the attention mask and not in the response mask, with
    log-probs of 0. Where the engine tells experts, each token has those of the turn that first ran it.

    `sampling.max_tokens` (and `limits`) bound a whole response, observations included; `turn_tokens` bounds each turn.
    A row at one of these bounds is done, its finish is "length"; so is that of a row whose observation would leave no
    room for a token after it, and the observation is left out: a response always ends with a token of the policy's. A
    row at the limit of turns ends as its turn did; nobody is asked about its last turn.

    Rows wait for each other at the end of a turn, so many short turns take more steps of decoding than one long one.

    Draws depend on key, row, turn and position in the turn; those of the first turn are the engine's own. On a mesh all
    ranks hold all rows, as the engine gives them; each asks tools about some, and all get all results. Where the tool
    failed, `extras` count it as "tool_failures".

    With `draws` a response is an episode: the prompt's last message has as many uniform numbers of the response's own
    for tools, as "draws", and `extras` hold the text of that message, these numbers and the texts of the policy's turns
    as the "opening", "draws" and "turns" of an "episode". Rewards need all of them, so that no row is reported early.
    """

    engine: Engine
    tools: Responder
    encode: Encode
    tokenizer: Any
    max_turns: int
    pad_token_id: int
    turn_tokens: int | None = None
    draws: int | None = None
    mesh: Mesh = LOCAL

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout; with one turn, or tools that end every response, the engine's own. See `Engine`."""
        sampling = ask.sampling
        ask = ask if self.draws is None else attrs.evolve(ask, on_finished=None)
        most = [limit for limit in response_limits(ask) for _ in range(sampling.n)]
        per_turn = min(self.turn_tokens or sampling.max_tokens, sampling.max_tokens)
        first = attrs.evolve(ask, sampling=attrs.evolve(sampling, max_tokens=per_turn), on_finished=None)
        start = self.engine.generate(params, first)
        section, finish, live = _section_of(start), list(start.finish), list(range(len(start.tokens)))
        openings, routed = self._openings(start, ask), start.routed
        conversations = [_Conversation(messages, len(messages)) for messages in openings]
        for turn in range(2, self.max_turns + 1):
            stopped = [row for row in live if finish[row] == "stop"]
            observations = self._observe(stopped, section, conversations, sampling)
            used = section.seen.sum(1).tolist()
            left = {row: most[row] - used[row] - len(ids) for row, ids in observations.items()}
            finish = ["length" if left.get(row, 1) < 1 else reason for row, reason in enumerate(finish)]
            before, live = live, [row for row in observations if left[row] > 0]
            self._report(ask, sorted(set(before) - set(live)), section, finish)
            if not live:
                break
            ran = _seen(start, section)[live].sum(1) - 1  # by the engine: all but the last of each row
            section = _appended(section, live, _observed([observations[row] for row in live], section))
            room = torch.tensor([min(left[row], per_turn) for row in live])
            next_turn = attrs.evolve(
                first,
                prompts=_contexts(start, section, live),
                sampling=attrs.evolve(sampling, n=1, max_tokens=int(room.max())),
                key=ask.key.fold("turn", turn),
                limits=room,
            )
            rollout = self.engine.generate(params, next_turn)
            section = _appended(section, live, _section_of(rollout))
            if routed is not None and rollout.routed is not None:
                index, seen = torch.tensor(live, device=routed.device), _seen(start, section)
                routed = continued_experts(routed, seen, index, ran, rollout.routed, rollout.attention_mask)
            for row, reason in zip(live, rollout.finish, strict=True):
                finish[row] = reason
        self._report(ask, live, section, finish)
        return self._record(replace(start, routed=routed), section, finish, conversations, sampling)

    def _report(self, ask: Ask, rows: Sequence[int], section: _Section, finish: Sequence[str]) -> None:
        """Calls `ask.on_finished` for rows that are done, each on one rank, that of its prompt."""
        if ask.on_finished is None:
            return
        ranks, place = ranks_on(self.mesh, AXES), place_on(self.mesh, AXES)
        for row in rows:
            if row // ask.sampling.n % ranks == place:
                ask.on_finished(row, section.tokens[row][section.seen[row]].tolist(), finish[row])

    def _openings(self, start: Rollout, ask: Ask) -> list[list[Message]]:
        """The prompts as messages, with what tools may draw."""
        openings = [self._opening(start, row) for row in range(len(start.tokens))]
        if self.draws is None:
            return openings
        drawn = ask.key.fold("draws").uniform(start.row_ids.cpu(), self.draws).tolist()
        pairs = zip(openings, drawn, strict=True)
        return [[*messages[:-1], {**messages[-1], DRAWS: draws}] for messages, draws in pairs]

    def _opening(self, start: Rollout, row: int) -> list[Message]:
        """The prompt as messages: a chat's own, or its text."""
        messages = start.extras[row].get(MESSAGES)
        if messages is not None:
            return [dict(message) for message in messages]
        width = start.tokens.shape[1] - start.response_mask.shape[1]
        prompt = start.tokens[row, :width][start.attention_mask[row, :width]].tolist()
        text = self.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [{"role": "user", "content": text}]

    def _observe(
        self, rows: Sequence[int], section: _Section, conversations: Sequence[_Conversation], sampling: Sampling
    ) -> dict[int, list[int]]:
        """The observations of these rows, as tokens, for those that are to go on; their conversations grow by them."""
        tokens, used = section.tokens.cpu(), section.seen.sum(1).tolist()
        turns = [self._turn(tokens[row, conversations[row].since : used[row]].tolist(), sampling) for row in rows]
        messages = [[*conversations[row].messages, turn] for row, turn in zip(rows, turns, strict=True)]
        results = self._tool_results(messages, section.tokens.device)
        observations: dict[int, list[int]] = {}
        for row, turn, result in zip(rows, turns, results, strict=True):
            conversation = conversations[row]
            conversation.failures += result.failed
            if result.messages is None:
                continue
            observations[row] = self.encode(result.messages, int(tokens[row, used[row] - 1]))
            if result.messages:  # else the turn goes on
                conversation.messages += [turn, *result.messages]
                conversation.since = used[row] + len(observations[row])
        return observations

    def _turn(self, ids: list[int], sampling: Sampling) -> Message:
        """The policy's turn as a message: special tokens stand in its text, but for one that ended it."""
        stop_text = None if sampling.stop_texts is None else sampling.stop_texts.last(ids)
        content = ids[:-1] if ids[-1] in self.tokenizer.all_special_ids else ids
        text, end = (
            self.tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for part in (content, ids[-1:])
        )
        return {"role": "assistant", "content": text, "end": end if stop_text is None else stop_text}

    def _tool_results(self, conversations: Sequence[list[Message]], device: torch.device) -> list[ToolResult]:
        """The tools' results for conversations that all ranks hold, each asked for by one of them."""
        ranks = ranks_on(self.mesh, AXES)
        own = self.tools.respond(conversations[place_on(self.mesh, AXES) :: ranks])
        if ranks == 1:
            return own
        every = gather_objects([list(result) for result in own], self.mesh, AXES, device)
        return [ToolResult(*every[number % ranks][number // ranks]) for number in range(len(conversations))]

    def _episode(self, conversation: _Conversation, ids: list[int], sampling: Sampling) -> dict[str, Any]:
        """The extras of a conversation whose last turn has these tokens: opening, draws and the policy's turns."""
        opening, later = conversation.messages[conversation.opening - 1], conversation.messages[conversation.opening :]
        last = [self._turn(ids, sampling)] if ids else []  # none where there was no room for what came after a turn
        turns = [message["content"] for message in [*later, *last] if message["role"] == "assistant"]
        return {EPISODE: {"opening": opening["content"], "draws": opening[DRAWS], "turns": turns}}

    def _record(
        self,
        start: Rollout,
        section: _Section,
        finish: list[str],
        conversations: Sequence[_Conversation],
        sampling: Sampling,
    ) -> Rollout:
        width = start.tokens.shape[1] - start.response_mask.shape[1]
        extras: list[Any] = [
            {**extra, FAILURES: conversation.failures} if conversation.failures else extra
            for extra, conversation in zip(start.extras, conversations, strict=True)
        ]
        if self.draws is not None:
            said, used = section.tokens.cpu(), section.seen.sum(1).tolist()
            for row, each in enumerate(conversations):
                ids = said[row, each.since : used[row]].tolist()
                extras[row] = {**extras[row], **self._episode(each, ids, sampling)}
        tokens = section.tokens.where(section.seen, self.pad_token_id)
        return replace(
            start,
            tokens=torch.cat([start.tokens[:, :width], tokens], 1),
            attention_mask=_seen(start, section),
            response_mask=section.chosen,
            rollout_log_probs=section.log_probs,
            sampling_log_probs=section.sampling_log_probs,
            finish=Column(finish),
            extras=Column(extras),
        )


def _section_of(rollout: Rollout) -> _Section:
    width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
    return _Section(
        rollout.tokens[:, width:],
        rollout.attention_mask[:, width:],
        rollout.response_mask,
        rollout.rollout_log_probs,
        rollout.sampling_log_probs,
    )


def _seen(start: Rollout, section: _Section) -> Tensor:
    """bool [B, P + T]: the tokens of prompts and of responses so far."""
    width = start.tokens.shape[1] - start.response_mask.shape[1]
    return torch.cat([start.attention_mask[:, :width], section.seen], 1)


def _observed(observations: Sequence[Sequence[int]], like: _Section) -> _Section:
    """Observations as a section: seen, and not chosen."""
    lengths = torch.tensor([len(ids) for ids in observations])
    width = int(lengths.max())
    tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in observations], dtype=torch.int64)
    tokens = tokens.view(len(observations), width).to(like.tokens.device)
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
    chosen = batches.rows(start, rows)
    index = chosen.row_ids.new_tensor(rows)
    tokens = torch.cat([chosen.tokens[:, :width], section.tokens[index]], 1)
    seen = torch.cat([chosen.attention_mask[:, :width], section.seen[index]], 1)
    order = torch.argsort(seen.long(), dim=1, stable=True)[:, -int(seen.sum(1).max()) :]
    prompts = batches.narrow(Prompts, chosen)
    return replace(prompts, tokens=tokens.gather(1, order), attention_mask=seen.gather(1, order))
