"""Play episodes independently: each row continues as soon as its own environment has answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from fppo._errors import RunFailed
from fppo.data.chat import EndlessTemplate
from fppo.environments.calls import PlayedStep
from fppo.environments.protocol import Message, Reply
from fppo.environments.runner import PlayerCalls
from fppo.episodes import EpisodeCut
from fppo.key import Key
from fppo.rollout.engine import Sampling
from fppo.rollout.records import tensor_of
from fppo.rollout.requests import FinishedRequest, Request, Requests
from fppo.rollout.turns.chains import Chain, Section
from fppo.rollout.turns.observations import Encode

Failure = Literal["drop", "score", "raise"]


class ReplyOf(Protocol):
    """Make the `Reply` that an environment reads from the tokens `ids` of a turn; `cut`: the turn has no end."""

    def __call__(self, ids: list[int], *, cut: bool) -> Reply: ...


@attrs.frozen(kw_only=True)
class Rules:
    """Settings of the episodes of a rollout."""

    sampling: Sampling
    key: Key
    offset: int
    judges: bool  # the player rewards turns: it gets cut and last ones too
    max_turns: int
    turn_tokens: int
    encode: Encode
    reply: ReplyOf
    prompt: Callable[[Sequence[Message]], Sequence[int]] | None
    prompt_tokens: int | None  # the most tokens of a prompt
    anew: bool  # each turn begins with a prompt of the conversation so far
    said: Callable[[Reply, Sequence[int]], Message]  # the message of a turn after these tokens
    failure: Failure
    on_done: Callable[[Chain], None]

    @property
    def lost(self) -> float:
        """The reward of a failed call: nan if the episode is dropped, else 0."""
        return torch.nan if self.failure == "drop" else 0.0


Heard = list[tuple[int, PlayedStep]]  # answers by row


class Agreement(NamedTuple):
    """The ranks that play the same episodes: their number, this rank's index among them, and a function that gathers
    the player's answers of all of them on each."""

    ranks: int
    place: int
    gathered: Callable[[Heard], Heard]


class Play:
    """Episodes in progress: each row waits for a request to the engine, or for a call of the player. The ranks of
    `agreement` make the same requests, and divide the player's calls among them."""

    def __init__(
        self, rules: Rules, chains: Sequence[Chain], requests: Requests, calls: PlayerCalls, agreement: Agreement
    ) -> None:
        self._rules, self._requests, self._calls = rules, requests, calls
        self._chains = {chain.row: chain for chain in chains}
        self._agreement = agreement
        self._called = 0  # calls of the player under way, on all ranks of the agreement
        self._called_here = 0
        self._samplings: dict[int, Sampling] = {}
        self._keys: dict[int, Key] = {}
        self._nothing: dict[int, tuple[Tensor, Tensor]] = {}  # log-probs and versions of observations, by length
        self._groups: dict[int, list[Chain]] = {}
        for chain in chains:
            self._groups.setdefault(chain.group, []).append(chain)

    def run(self) -> None:
        """Play all episodes to their ends."""
        requests = self._requests
        for chain in self._chains.values():
            self._call(chain, lambda chain=chain: self._calls.reset(chain.row, chain.data, chain.seed))
        while (drawing := requests.counts.open) or self._called:
            self._go_on(self._heard(wait=not drawing))
            if requests.counts.open:
                for finished in requests.step().finished:
                    self._ended(self._chains[int(finished.name.partition(".")[0])], finished)

    def _call(self, chain: Chain, begin: Callable[[], None]) -> None:
        self._called += 1
        if chain.row % self._agreement.ranks == self._agreement.place:
            self._called_here += 1
            begin()

    def _heard(self, *, wait: bool) -> Heard:
        """The player's answers on all ranks of the agreement since this was last called, in the order of rows. With
        `wait`, block until this rank has an answer, if any of its calls are under way."""
        if not self._called:
            return []
        heard = self._calls.taken(wait=wait and self._called_here > 0)
        self._called_here -= len(heard)
        every = heard if self._agreement.ranks == 1 else self._agreement.gathered(heard)
        self._called -= len(every)
        return sorted(every, key=lambda pair: pair[0])

    def _go_on(self, heard: Heard) -> None:
        """Make the next requests of the episodes that the player has answered, `heard`."""
        new: list[Request] = []
        after: list[str] = []
        for row, played in heard:
            chain = self._chains[row]
            self._check(played)
            if not chain.begun:
                new += self._begun(chain, played)
                continue
            after.append(chain.name)
            request = self._next(chain, played)
            new += [] if request is None else [request]
        if new:
            self._requests.add(new)
        self._requests.release(after)

    def _check(self, played: PlayedStep) -> None:
        """Raise RunFailed if an environment's step failed, and failures end the run."""
        if played.failed and self._rules.judges and self._rules.failure == "raise":
            raise RunFailed(f'an environment failed, and failure = "raise": {played.why or "see the log"}')

    def _begun(self, chain: Chain, played: PlayedStep) -> list[Request]:
        """Record that an episode has begun. If it is the last one of its group to begin, return the first requests of
        the whole group; else none."""
        chain.begun, chain.state = True, played.state
        chain.lost = played.failed
        if played.failed:
            chain.failed(played.why)
        chain.messages = [] if played.failed else played.messages
        group = self._groups[chain.group]
        if not all(each.begun for each in group):
            return []
        if self._rules.judges:
            self._give_prompt(group)
        else:
            for each in group:
                each.messages = None
        return [self._request(each, (), each.most) for each in group]

    def _give_prompt(self, group: Sequence[Chain]) -> None:
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
                self._check(PlayedStep(failed=True, why=each.why))
            each.messages = messages if fits else None
            each.prompt = ids if fits else each.prompt
            each.said = list(messages) if fits else each.said

    def _next(self, chain: Chain, played: PlayedStep) -> Request | None:
        """Record the player's answer `played` in an episode, and return the episode's next request to the engine; None
        if the episode is over."""
        rules, used = self._rules, len(chain.ids)
        chain.state = played.state
        if played.failed:
            chain.failed(played.why)
        chain.info.update(played.info)
        if rules.judges:
            chain.rewards[used - 1] = rules.lost if played.failed else played.reward
        if played.done or chain.finish != "stop":
            return self._over(chain)
        observation = rules.encode(played.messages, chain.ids[-1])
        row = None
        if played.messages:  # else the turn goes on
            if rules.anew and chain.requests < rules.max_turns:
                try:
                    row = self._next_row(chain, played.messages, used + len(observation), len(observation))
                except EndlessTemplate:
                    raise
                except ValueError as error:  # of a turn that the template refuses in a conversation
                    return self._refused(chain, str(error))
            chain.turns.append(chain.reply_ids)
            chain.since = used + len(observation)
        chain.turn += bool(played.messages) or rules.judges
        if chain.requests == rules.max_turns:
            return self._over(chain)
        left = chain.most - used - len(observation)
        if row is not None:  # no row is longer than a prompt with a whole response
            left = min(left, len(chain.prompt) + chain.most - len(row.prompt))
        if left < 1:
            chain.finish = "length"
            return self._over(chain)
        self._add(chain, observation)
        if row is None:
            return self._request(chain, observation, left)
        chain.later.append(row)
        return self._request(chain, row.prompt, left, anew=True)

    def _next_row(self, chain: Chain, messages: Sequence[Message], start: int, observed: int) -> EpisodeCut:
        """Make the row that follows the present turn and `messages`; its prompt is the conversation so far. Raises
        ValueError for a conversation that cannot be encoded."""
        rules = self._rules
        assert rules.prompt is not None
        said = rules.said(rules.reply(chain.reply_ids, cut=False), chain.cuts[-1].prompt)
        chain.said = [*chain.said, said, *messages]
        return EpisodeCut(list(rules.prompt(chain.said)), start, observed)

    def _refused(self, chain: Chain, why: str) -> None:
        """End an episode as failed, since its conversation cannot be encoded."""
        self._check(PlayedStep(failed=True, why=why))
        chain.failed(why)
        if self._rules.judges:
            chain.rewards[len(chain.ids) - 1] = self._rules.lost
        self._over(chain)

    def _over(self, chain: Chain) -> None:
        chain.done = True
        self._rules.on_done(chain)

    def _add(self, chain: Chain, observation: Sequence[int]) -> None:
        like, count = chain.sections[-1], len(observation)
        if count not in self._nothing:
            self._nothing[count] = like.log_probs.new_zeros(count), like.versions.new_zeros(count)
        zero, versions = self._nothing[count]
        chain.sections.append(Section(tensor_of(observation, torch.int64), zero, zero, versions, 0))
        chain.ids += observation

    def _request(self, chain: Chain, ids: Sequence[int], left: int, *, anew: bool = False) -> Request:
        """The next request of an episode: a prompt if it is the first or begins `anew`, else `ids` that continue the
        last request. At most `left` tokens are left to the response."""
        rules, before = self._rules, chain.name
        chain.requests += 1
        first = chain.requests == 1
        return Request(
            name=chain.name,
            ids=chain.prompt if first else ids,  # type: ignore[arg-type]
            sampling=self._sampling(min(left, rules.turn_tokens)),
            key=self._key(chain.requests),
            row=chain.row_id,
            position=rules.offset if first else 0,
            after=None if first or anew else before,
            keep=chain.requests < rules.max_turns and not chain.lost,
            inputs=chain.inputs if first else None,
        )

    def _key(self, number: int) -> Key:
        """The key for the draws of request number `number` of a row."""
        if number not in self._keys:
            self._keys[number] = self._rules.key if number == 1 else self._rules.key.fold("turn", number)
        return self._keys[number]

    def _sampling(self, most: int) -> Sampling:
        if most not in self._samplings:
            self._samplings[most] = attrs.evolve(self._rules.sampling, n=1, max_tokens=most)
        return self._samplings[most]

    def _ended(self, chain: Chain, finished: FinishedRequest) -> None:
        """Append a finished turn to its episode. Pass it to the player, or end the episode if the player answers no
        such turn."""
        rules = self._rules
        drawn = finished.tokens, finished.log_probs, finished.sampling_log_probs, finished.versions
        chain.sections.append(Section(*drawn, chain.turn))
        chain.ids += finished.tokens.tolist()
        chain.finish = finished.end
        if finished.experts is not None:
            row = chain.cuts[-1]
            chain.experts.append((len(chain.later), len(row.prompt) + len(chain.ids) - row.start - 1, finished.experts))
        more = finished.end == "stop" and chain.requests < rules.max_turns
        if chain.lost:
            chain.rewards = {len(chain.ids) - 1: rules.lost}
        if chain.lost or not (rules.judges or more):
            self._requests.release([finished.name])
            self._over(chain)
            return
        cut = finished.end != "stop"
        self._call(
            chain,
            lambda: self._calls.step(chain.row, chain.state, rules.reply(chain.reply_ids, cut=cut)),
        )
