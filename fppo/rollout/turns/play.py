"""Play episodes independently: each row continues as soon as its own environment has answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import attrs
import torch

from fppo._errors import RunFailed
from fppo.data.chat import EndlessTemplate
from fppo.environments.calls import PlayedStep
from fppo.environments.protocol import Message, Reply
from fppo.environments.runner import PlayerCalls
from fppo.key import Key
from fppo.rollout.engine import Ask, Sampling
from fppo.rollout.requests import FinishedRequest, Request, Requests
from fppo.rollout.turns.episode import Episode, PlayedRow, RowTurn
from fppo.rollout.turns.observations import said_message
from fppo.runtime.mesh import gather_objects, place_on, ranks_on

if TYPE_CHECKING:
    from fppo.rollout.turns.engine import TurnsEngine

Failure = Literal["drop", "score", "raise"]


class ReplyOf(Protocol):
    """Make the `Reply` that an environment reads from the tokens `ids` of a turn; `cut`: the turn has no end."""

    def __call__(self, ids: list[int], *, cut: bool) -> Reply: ...


PlayerAnswers = list[tuple[int, PlayedStep]]  # answers by row


class Play:
    """Episodes in progress: each row waits for a request to the engine, or for a call of the player. The ranks that the
    requests go `together` on make the same ones, and divide the player's calls among them."""

    def __init__(
        self,
        rules: TurnsEngine,
        ask: Ask,
        episodes: Sequence[Episode],
        requests: Requests,
        calls: PlayerCalls,
        reply: ReplyOf,
        on_done: Callable[[Episode], None],
    ) -> None:
        self._rules, self._ask, self._requests, self._calls = rules, ask, requests, calls
        self._reply, self._over = reply, on_done
        self._judges, self._row_per_turn = rules.tools.judges, rules.thinking == "drop"
        self._lost = torch.nan if rules.failure == "drop" else 0.0  # the reward of a failed call
        self._episodes = {episode.row: episode for episode in episodes}
        self._ranks = ranks_on(rules.mesh, requests.together)
        self._rank = place_on(rules.mesh, requests.together)
        self._called = 0  # calls of the player under way, on all ranks together
        self._called_here = 0
        self._samplings: dict[int, Sampling] = {}
        self._keys: dict[int, Key] = {}
        self._groups: dict[int, list[Episode]] = {}
        for episode in episodes:
            self._groups.setdefault(episode.group, []).append(episode)

    def run(self) -> None:
        """Play all episodes to their ends."""
        requests = self._requests
        for episode in self._episodes.values():
            self._call(episode, lambda episode=episode: self._calls.reset(episode.row, episode.data, episode.seed))
        while (drawing := requests.counts.open) or self._called:
            self._request_next(self._gathered_answers(wait=not drawing))
            if requests.counts.open:
                for finished in requests.step().finished:
                    self._ended(self._episodes[int(finished.name.partition(".")[0])], finished)

    def _call(self, episode: Episode, begin: Callable[[], None]) -> None:
        self._called += 1
        if episode.row % self._ranks == self._rank:
            self._called_here += 1
            begin()

    def _gathered_answers(self, *, wait: bool) -> PlayerAnswers:
        """The player's answers on all ranks since this was last called, in the order of rows. With `wait`, block until
        this rank has an answer, if any of its calls are under way."""
        if not self._called:
            return []
        answers = self._calls.taken(wait=wait and self._called_here > 0)
        self._called_here -= len(answers)
        every = answers if self._ranks == 1 else self._of_all_ranks(answers)
        self._called -= len(every)
        return sorted(every, key=lambda pair: pair[0])

    def _of_all_ranks(self, answers: PlayerAnswers) -> PlayerAnswers:
        plain = [[row, [*played._replace(info=dict(played.info))]] for row, played in answers]
        device = self._ask.prompts.tokens.device
        every = gather_objects(plain, self._rules.mesh, self._requests.together, device)
        return [(row, PlayedStep(*played)) for rank in every for row, played in rank]

    def _request_next(self, answers: PlayerAnswers) -> None:
        """Make the next requests of the episodes that the player has answered."""
        new: list[Request] = []
        after: list[str] = []
        for row, played in answers:
            episode = self._episodes[row]
            self._check(played)
            if not episode.begun:
                new += self._begun(episode, played)
                continue
            after.append(episode.name)
            request = self._next(episode, played)
            new += [] if request is None else [request]
        if new:
            self._requests.add(new)
        self._requests.release(after)

    def _check(self, played: PlayedStep) -> None:
        """Raise RunFailed if an environment's step failed, and failures end the run."""
        if played.failed and self._judges and self._rules.failure == "raise":
            raise RunFailed(f'an environment failed, and failure = "raise": {played.why or "see the log"}')

    def _begun(self, episode: Episode, played: PlayedStep) -> list[Request]:
        """Record that an episode has begun. If it is the last one of its group to begin, return the first requests of
        the whole group; else none."""
        episode.begun, episode.state = True, played.state
        episode.lost = played.failed
        if played.failed:
            episode.failed(played.why)
        episode.messages = [] if played.failed else played.messages
        group = self._groups[episode.group]
        if not all(each.begun for each in group):
            return []
        if self._judges:
            self._give_prompt(group)
        else:
            for each in group:
                each.messages = None
        return [self._request(each, (), each.max_length) for each in group]

    def _give_prompt(self, group: Sequence[Episode]) -> None:
        """Give a group the prompt of its first episode that began. Episodes with another prompt are lost; all are if it
        is too long."""
        rules = self._rules
        messages = next((list(each.messages or ()) for each in group if not each.lost), [])
        ids = list(rules.prompt(messages)) if messages and rules.prompt is not None else []
        fits = bool(ids) and (rules.prompt_tokens is None or len(ids) <= rules.prompt_tokens)
        for each in group:
            if not each.lost and (list(each.messages or ()) != messages or bool(messages) > fits):
                each.lost = True
                each.failed("its prompt is too long, or another than that of its group")
                self._check(PlayedStep(failed=True, why=each.first_failure))
            each.messages = messages if fits else None
            each.rows[0].prompt = ids if fits else each.rows[0].prompt
            each.conversation = list(messages) if fits else each.conversation

    def _next(self, episode: Episode, played: PlayedStep) -> Request | None:
        """Record the player's answer `played` in an episode, and return the episode's next request to the engine; None
        if the episode is over."""
        rules, used = self._rules, len(episode.ids)
        episode.state = played.state
        if played.failed:
            episode.failed(played.why)
        episode.info.update(played.info)
        if self._judges:
            episode.reward(self._lost if played.failed else played.reward)
        if played.done or episode.finish != "stop":
            return self._over(episode)
        observation = rules.encode(played.messages, episode.ids[-1])
        row = None
        if played.messages:  # else the turn goes on
            if self._row_per_turn and episode.requests < rules.max_turns:
                try:
                    row = self._next_row(episode, played.messages, observation)
                except EndlessTemplate:
                    raise
                except ValueError as error:  # of a turn that the template refuses in a conversation
                    return self._refused(episode, str(error))
            episode.turns.append(episode.reply_ids)
            episode.turn_start = used + len(observation)
        episode.turn += bool(played.messages) or self._judges
        if episode.requests == rules.max_turns:
            return self._over(episode)
        left = episode.max_length - used - len(observation)
        if row is not None:  # no row is longer than a prompt with a whole response
            left = min(left, len(episode.rows[0].prompt) + episode.max_length - len(row.prompt))
        if left < 1:
            episode.finish = "length"
            return self._over(episode)
        episode.ids += observation
        if row is None:
            return self._request(episode, observation, left)
        episode.rows.append(row)
        return self._request(episode, (), left)

    def _next_row(self, episode: Episode, messages: Sequence[Message], observed: Sequence[int]) -> PlayedRow:
        """Make the row that follows the present turn and `messages`, whose tokens in the present row would be
        `observed`; its prompt is the conversation so far. Raises ValueError for a conversation that cannot be
        encoded."""
        rules = self._rules
        assert rules.prompt is not None
        reply = self._reply(episode.reply_ids, cut=False)
        said = said_message(rules.tokenizer, reply, episode.rows[-1].prompt)
        episode.conversation = [*episode.conversation, said, *messages]
        return PlayedRow(list(rules.prompt(episode.conversation)), observed=observed)

    def _refused(self, episode: Episode, why: str) -> None:
        """End an episode as failed, since its conversation cannot be encoded."""
        self._check(PlayedStep(failed=True, why=why))
        episode.failed(why)
        if self._judges:
            episode.reward(self._lost)
        self._over(episode)

    def _request(self, episode: Episode, observation: Sequence[int], tokens_left: int) -> Request:
        """The next request of an episode: a prompt if its row has no answers yet, else the observation after the last
        one. At most `tokens_left` tokens are left to the response."""
        rules, before, row = self._rules, episode.name, episode.rows[-1]
        episode.observation = observation
        episode.requests += 1
        first = episode.requests == 1
        return Request(
            name=episode.name,
            ids=observation if row.turns else row.prompt,  # type: ignore[arg-type]
            sampling=self._sampling(min(tokens_left, rules.turn_tokens or tokens_left)),
            key=self._key(episode.requests),
            row=episode.row_id,
            position=self._ask.offset if first else 0,
            after=before if row.turns else None,
            keep=episode.requests < rules.max_turns and not episode.lost,
            inputs=episode.inputs if first else None,
        )

    def _key(self, number: int) -> Key:
        """The key for the draws of request number `number` of a row."""
        if number not in self._keys:
            self._keys[number] = self._ask.key if number == 1 else self._ask.key.fold("turn", number)
        return self._keys[number]

    def _sampling(self, max_tokens: int) -> Sampling:
        if max_tokens not in self._samplings:
            self._samplings[max_tokens] = attrs.evolve(self._ask.sampling, n=1, max_tokens=max_tokens)
        return self._samplings[max_tokens]

    def _ended(self, episode: Episode, finished: FinishedRequest) -> None:
        """Append a finished turn to its episode. Pass it to the player, or end the episode if the player answers no
        such turn."""
        rules = self._rules
        episode.rows[-1].turns.append(RowTurn(episode.observation, finished, episode.turn))
        episode.ids += finished.tokens.tolist()
        episode.finish = finished.end
        more = finished.end == "stop" and episode.requests < rules.max_turns
        if episode.lost:
            episode.reward(self._lost)
        if episode.lost or not (self._judges or more):
            self._requests.release([finished.name])
            self._over(episode)
            return
        cut = finished.end != "stop"
        self._call(
            episode,
            lambda: self._calls.step(episode.row, episode.state, self._reply(episode.reply_ids, cut=cut)),
        )
