"""Responses of several turns: something answers each, and its messages are context that is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fppo import batch as batches
from fppo.batch import Column, Prompts, Rollout
from fppo.data.examples import MESSAGES
from fppo.environments.calls import PlayedStep
from fppo.environments.protocol import Message, Reply
from fppo.environments.runner import Player
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.rollout.records import continued_experts, number_rows, response_limits
from fppo.rollout.turns.games import DRAWS, EPISODE
from fppo.rollout.turns.observations import Encode
from fppo.rollout.turns.runner import player_of
from fppo.runtime.mesh import AXES, LOCAL, Mesh, gather_objects, place_on, ranks_on
from fppo.tree import replace

FAILURES = "tool_failures"  # the key under which extras hold how many of a row's calls failed
INFO = "environment"  # the key under which extras hold an episode's numbers by name
_SEEDS = 1 << 62


class _Section(NamedTuple):
    """The responses so far, each from the first column on [B, T]."""

    tokens: Tensor
    seen: Tensor  # bool: there is a token
    chosen: Tensor  # bool: the policy chose it
    log_probs: Tensor
    sampling_log_probs: Tensor
    turns: Tensor  # int32: the number of the token's turn, from 1; 0: it is of none


@attrs.define
class _Episode:
    """A row's episode up to the policy's present turn, which began at column `since`."""

    state: Any
    since: int = 0
    turn: int = 1
    failures: int = 0
    lost: bool = False  # it could not begin
    said: list[str] = attrs.field(factory=list)  # the turns before
    rewards: dict[int, float] = attrs.field(factory=dict)  # by column
    info: dict[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class TurnsEngine:
    """An engine whose responses are conversations with a tool, or episodes of an environment.

    `engine` samples a turn. Each row that ended with a stop token goes to `tools`, which are a `Responder` or a
    `Player`: their messages are encoded and put behind the row's tokens as an observation, and the engine goes on from
    there, at most `max_turns` times; token ids that were sampled stay as they are. Observations are in the attention
    mask and not in the response mask, with log-probs of 0. Where the engine tells experts, each token has those of the
    turn that first ran it. `turn_ids` number the turns.

    `sampling.max_tokens` (and `limits`) bound a whole response, observations included; `turn_tokens` bounds each turn.
    A row at one of these bounds is done, its finish is "length"; so is that of a row whose observation would leave no
    room for a token after it, and the observation is left out: a response always ends with a token of the policy's. A
    row at the limit of turns ends as its turn did; a tool is not asked about its last turn.

    An environment rewards each turn, also the last one and one that was cut; `turn_rewards` are these. It may give
    prompts, which `prompt` encodes in at most `prompt_tokens`: they replace the row's own. Rewards need whole episodes,
    so that no row is reported early. What it is begun with depends on the key and the prompt alone. An episode that
    fails ends with a reward of nan; so does one whose prompt is too long, or another than that of its group.

    Rows wait for each other at the end of a turn, so many short turns take more steps of decoding than one long one.

    Draws depend on key, row, turn and position in the turn; those of the first turn are the engine's own. On a mesh all
    ranks hold all rows, as the engine gives them; each asks about some, and all get all results. Where a call failed,
    `extras` count it as "tool_failures".

    With `draws` a response is an episode of a game: the prompt's last message has as many uniform numbers of the
    response's own for tools, as "draws", and `extras` hold the text of that message, these numbers and the texts of the
    policy's turns as the "opening", "draws" and "turns" of an "episode". No row is reported early then, either.
    """

    engine: Engine
    tools: Player = attrs.field(converter=player_of)
    encode: Encode
    tokenizer: Any
    max_turns: int
    pad_token_id: int
    turn_tokens: int | None = None
    draws: int | None = None
    mesh: Mesh = LOCAL
    prompt: Callable[[Sequence[Message]], Sequence[int]] | None = None
    prompt_tokens: int | None = None

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout; with one turn, or tools that end every response, the engine's own. See `Engine`."""
        sampling = ask.sampling
        ask, openings, episodes = self._begun(ask)
        most = [limit for limit in response_limits(ask) for _ in range(sampling.n)]
        per_turn = min(self.turn_tokens or sampling.max_tokens, sampling.max_tokens)
        first = attrs.evolve(ask, sampling=attrs.evolve(sampling, max_tokens=per_turn), on_finished=None)
        start = self.engine.generate(params, first)
        section, finish, live = _section_of(start, [1] * len(episodes)), list(start.finish), list(range(len(episodes)))
        routed = start.routed
        for turn in range(2, self.max_turns + 1):
            observations = self._observe(live, section, finish, episodes, sampling)
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
            section = _appended(section, live, _section_of(rollout, [episodes[row].turn for row in live]))
            if routed is not None and rollout.routed is not None:
                index, seen = torch.tensor(live, device=routed.device), _seen(start, section)
                routed = continued_experts(routed, seen, index, ran, rollout.routed, rollout.attention_mask)
            for row, reason in zip(live, rollout.finish, strict=True):
                finish[row] = reason
        if live and self.tools.judges:
            self._observe(live, section, finish, episodes, sampling)
        self._report(ask, live, section, finish)
        return self._record(replace(start, routed=routed), section, finish, openings, episodes, sampling)

    def _begun(self, ask: Ask) -> tuple[Ask, list[list[Message]], list[_Episode]]:
        """The request with the prompts that episodes begin with, and the rows' openings and episodes."""
        prompts, n = ask.prompts, ask.sampling.n
        if self.tools.judges or self.draws is not None:
            ask = attrs.evolve(ask, on_finished=None)
        own = [self._opening(prompts, row) for row in range(len(prompts.tokens))]
        openings = [[dict(message) for message in messages] for messages in own for _ in range(n)]
        if self.draws is not None:
            drawn = ask.key.fold("draws").uniform(number_rows(ask, torch.device("cpu")), self.draws).tolist()
            pairs = zip(openings, drawn, strict=True)
            openings = [[*messages[:-1], {**messages[-1], DRAWS: draws}] for messages, draws in pairs]
        uniform = ask.key.fold(INFO).uniform(prompts.row_ids.cpu(), 1)[:, 0]
        seeds = (uniform * _SEEDS).long().repeat_interleave(n).tolist()
        rows = [{**self._row(prompts, row // n), MESSAGES: messages} for row, messages in enumerate(openings)]
        begun = self._shared(
            lambda own: self.tools.reset([rows[i] for i in own], [seeds[i] for i in own]), rows, prompts
        )
        episodes = [_Episode(played.state, failures=int(played.failed), lost=played.failed) for played in begun]
        if not self.tools.judges:
            return ask, openings, episodes
        return attrs.evolve(ask, prompts=self._prompted(prompts, begun, episodes)), openings, episodes

    def _row(self, prompts: Prompts, row: int) -> dict[str, Any]:
        """A data row for an environment."""
        own = {"ground_truth": prompts.ground_truth[row], "source": prompts.source[row], "id": prompts.ids[row]}
        return {**own, **prompts.extras[row]}

    def _prompted(self, prompts: Prompts, begun: Sequence[PlayedStep], episodes: Sequence[_Episode]) -> Prompts:
        """The prompts that episodes begin with; those that cannot are lost."""
        n = len(begun) // len(prompts.tokens)
        asked: list[list[int]] = []
        extras: list[Any] = []
        for row, mask in enumerate(prompts.attention_mask):
            group = range(row * n, (row + 1) * n)
            messages = next((begun[i].messages for i in group if not episodes[i].lost), [])
            ids = list(self.prompt(messages)) if messages and self.prompt is not None else []
            fits = bool(ids) and (self.prompt_tokens is None or len(ids) <= self.prompt_tokens)
            asked.append(ids if fits else prompts.tokens[row][mask.bool()].tolist())
            extras.append({**prompts.extras[row], MESSAGES: messages} if fits else prompts.extras[row])
            for i in group:
                if not episodes[i].lost and (list(begun[i].messages) != list(messages) or bool(messages) > fits):
                    episodes[i].lost, episodes[i].failures = True, 1
        width = max(map(len, asked))
        tokens = [[*[self.pad_token_id] * (width - len(ids)), *ids] for ids in asked]
        seen = [[*[False] * (width - len(ids)), *[True] * len(ids)] for ids in asked]
        device = prompts.tokens.device
        columns = {"tokens": torch.tensor(tokens, device=device), "attention_mask": torch.tensor(seen, device=device)}
        return replace(prompts, **columns, extras=Column(extras))

    def _report(self, ask: Ask, rows: Sequence[int], section: _Section, finish: Sequence[str]) -> None:
        """Calls `ask.on_finished` for rows that are done, each on one rank, that of its prompt."""
        if ask.on_finished is None:
            return
        ranks, place = ranks_on(self.mesh, AXES), place_on(self.mesh, AXES)
        for row in rows:
            if row // ask.sampling.n % ranks == place:
                ask.on_finished(row, section.tokens[row][section.seen[row]].tolist(), finish[row])

    def _opening(self, prompts: Prompts, row: int) -> list[Message]:
        """The prompt as messages: a chat's own, or its text."""
        messages = prompts.extras[row].get(MESSAGES)
        if messages is not None:
            return [dict(message) for message in messages]
        prompt = prompts.tokens[row][prompts.attention_mask[row].bool()].tolist()
        text = self.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [{"role": "user", "content": text}]

    def _observe(
        self,
        live: Sequence[int],
        section: _Section,
        finish: Sequence[str],
        episodes: Sequence[_Episode],
        sampling: Sampling,
    ) -> dict[int, list[int]]:
        """The observations of these rows, as tokens, for those that are to go on; their episodes grow by the turn."""
        judges = self.tools.judges
        rows = [row for row in live if (judges or finish[row] == "stop") and not episodes[row].lost]
        tokens, used = section.tokens.cpu(), section.seen.sum(1).tolist()
        said = {row: tokens[row, episodes[row].since : used[row]].tolist() for row in rows}
        replies = {row: self._reply(ids, sampling, cut=finish[row] != "stop") for row, ids in said.items()}
        results = self._shared(
            lambda own: self.tools.step([episodes[rows[i]].state for i in own], [replies[rows[i]] for i in own]),
            rows,
            section.tokens,
        )
        observations: dict[int, list[int]] = {}
        for row, result in zip(rows, results, strict=True):
            episode = episodes[row]
            episode.state, episode.failures = result.state, episode.failures + result.failed
            episode.info.update(result.info)
            if judges:
                episode.rewards[used[row] - 1] = torch.nan if result.failed else result.reward
            if result.done or finish[row] != "stop":
                continue
            observations[row] = self.encode(result.messages, int(tokens[row, used[row] - 1]))
            if result.messages:  # else the turn goes on
                episode.said.append(replies[row].text)
                episode.since = used[row] + len(observations[row])
            episode.turn += bool(result.messages) or judges
        return observations

    def _reply(self, ids: list[int], sampling: Sampling, *, cut: bool) -> Reply:
        """The policy's turn: special tokens stand in its text, but for one that ended it."""
        stop_text = None if sampling.stop_texts is None else sampling.stop_texts.last(ids)
        content = ids[:-1] if ids[-1] in self.tokenizer.all_special_ids and not cut else ids
        text, end = (
            self.tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for part in (content, ids[-1:])
        )
        return Reply(text, tuple(ids), "" if cut else end if stop_text is None else stop_text)

    def _shared(
        self, act: Callable[[Sequence[int]], list[PlayedStep]], rows: Sequence[Any], like: Prompts | Tensor
    ) -> list[PlayedStep]:
        """The results of `act` for all rows, of which each rank is asked about some."""
        ranks, count = ranks_on(self.mesh, AXES), len(rows)
        own = act(range(place_on(self.mesh, AXES), count, ranks))
        if ranks == 1:
            return own
        device = like.device if isinstance(like, Tensor) else like.tokens.device
        every = gather_objects([[*result._replace(info=dict(result.info))] for result in own], self.mesh, AXES, device)
        return [PlayedStep(*every[number % ranks][number // ranks]) for number in range(count)]

    def _record(
        self,
        start: Rollout,
        section: _Section,
        finish: list[str],
        openings: Sequence[list[Message]],
        episodes: Sequence[_Episode],
        sampling: Sampling,
    ) -> Rollout:
        width = start.tokens.shape[1] - start.response_mask.shape[1]
        said, used = section.tokens.cpu(), section.seen.sum(1).tolist()
        extras: list[Any] = []
        rewards = torch.zeros_like(section.log_probs, dtype=torch.float32)
        for row, episode in enumerate(episodes):
            more: dict[str, Any] = {FAILURES: episode.failures} if episode.failures else {}
            if self.tools.judges:
                more[INFO] = episode.info
            if self.draws is not None:
                ids = said[row, episode.since : used[row]].tolist()  # none where there was no room after a turn
                last = [self._reply(ids, sampling, cut=finish[row] != "stop").text] if ids else []
                opening = openings[row][-1]
                turns = [*episode.said, *last]
                more[EPISODE] = {"opening": opening["content"], "draws": opening[DRAWS], "turns": turns}
            extras.append({**start.extras[row], **more})
            of_row = {used[row] - 1: torch.nan} if episode.lost else episode.rewards
            for column, reward in of_row.items():
                rewards[row, column] += reward
        tokens = section.tokens.where(section.seen, self.pad_token_id)
        return replace(
            start,
            tokens=torch.cat([start.tokens[:, :width], tokens], 1),
            attention_mask=_seen(start, section),
            response_mask=section.chosen,
            rollout_log_probs=section.log_probs,
            sampling_log_probs=section.sampling_log_probs,
            turn_ids=section.turns - 1,
            turn_rewards=rewards if self.tools.judges else None,
            finish=Column(finish),
            extras=Column(extras),
        )


def _section_of(rollout: Rollout, turns: Sequence[int]) -> _Section:
    """The responses of a rollout, which are these turns of its rows."""
    width = rollout.tokens.shape[1] - rollout.response_mask.shape[1]
    numbers = torch.tensor(turns, dtype=torch.int32, device=rollout.tokens.device)[:, None]
    return _Section(
        rollout.tokens[:, width:],
        rollout.attention_mask[:, width:],
        rollout.response_mask,
        rollout.rollout_log_probs,
        rollout.sampling_log_probs,
        numbers.where(rollout.response_mask, 0),
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
    return _Section(tokens, seen, torch.zeros_like(seen), nothing, nothing, torch.zeros_like(tokens).int())


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
