"""Text games as states: what is dealt, what the policy may say, and how the game ends. Worker processes import this
module, so it imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import attrs

from fppo.rollout.turns.tools import Message
from fppo.workers.sample import Sample

State = Any
EPISODE = "episode"  # the key under which extras hold a response's opening, draws and turns
DRAWS = "draws"  # the key under which a conversation's opening holds uniform numbers for what is dealt


class Chance(NamedTuple):
    """A state in which something is dealt, or another player acts: the states that may follow, with probabilities."""

    outcomes: Sequence[tuple[float, State]]

    def at(self, u: float) -> State:
        """The state that the number `u` in [0, 1) draws. Raises ValueError unless the probabilities add up to 1."""
        outcomes = checked(self)
        place = bisect_right(list(accumulate(p for p, _ in outcomes)), u)
        return outcomes[min(place, len(outcomes) - 1)][1]


class Turn(NamedTuple):
    """The policy's turn: the text that the policy is shown, and the state after each text that it may answer."""

    shown: str
    actions: Mapping[str, State]


class End(NamedTuple):
    """The end of the game, with the response's score."""

    score: float


Node = Chance | Turn | End


@attrs.frozen
class Game:
    """A game that the policy plays in the turns of a response: called as a tool it deals, and its `score` is the
    reward.

    `node` maps a state to a `Chance`, a `Turn` or an `End`. The first state is the text of the prompt, or of its last
    message, and the first turn shows "", since the policy has read the prompt. Anything that no turn shows of a state
    is hidden: states that look the same to the policy must allow the same texts. A turn with a text that is not
    allowed, or a response that is cut, scores 0. Something is dealt at most `draws` times.
    """

    node: Callable[[State], Node]
    draws: int = 0

    def __call__(self, conversation: Sequence[Mapping[str, Any]]) -> list[Message] | None:
        """The messages that the policy is shown next; None if the game is over or the turn held no allowed text."""
        start = next(i for i, message in enumerate(conversation) if DRAWS in message)
        opening, later = conversation[start], conversation[start + 1 :]
        said = [str(message["content"]) for message in later if message["role"] == "assistant"]
        node = self.after(opening["content"], said, opening[DRAWS])
        return [{"role": "tool", "content": node.shown}] if isinstance(node, Turn) else None

    def score(self, sample: Sample) -> float:
        """The reward of a response: the score of the end that it reached, and 0 if it reached none."""
        return self.end(sample.extras[EPISODE], sample.finish)

    def end(self, episode: Mapping[str, Any], finish: str) -> float:
        """The score of an `episode` (opening, draws and turns); 0 without an end, or if `finish` is not "stop"."""
        node = self.after(**episode) if finish == "stop" else None
        return node.score if isinstance(node, End) else 0.0

    def after(self, opening: str, turns: Iterable[str], draws: Iterable[float]) -> Turn | End | None:
        """The turn or end that these turns lead to from the state `opening`, if `draws` in [0, 1) decide what is dealt;
        None if one of the turns is not allowed.

        Raises ValueError if there are too few draws, or invalid probabilities.
        """
        left = iter(draws)
        node = self._dealt(opening, left)
        for text in turns:
            if not isinstance(node, Turn) or text not in node.actions:
                return None
            node = self._dealt(node.actions[text], left)
        return node

    def _dealt(self, state: State, draws: Iterator[float]) -> Turn | End:
        node = self.node(state)
        while isinstance(node, Chance):
            u = next(draws, None)
            if u is None:
                raise ValueError(f"the game deals more than draws={self.draws} times: give Game(node, draws=...) more")
            node = self.node(node.at(u))
        return node

    def outlook(self, states: Iterable[tuple[float, State]]) -> list[tuple[float, Turn | End]]:
        """List the turns and ends that weighted states lead to, for all that may be dealt. Each comes with the weight
        of its state, times the probability of what was dealt."""
        found: list[tuple[float, Turn | End]] = []
        for weight, state in states:
            node = self.node(state)
            if isinstance(node, Chance):
                found += self.outlook((weight * p, after) for p, after in checked(node))
            else:
                found.append((weight, node))
        return found


def checked(node: Chance) -> list[tuple[float, State]]:
    """The outcomes whose probability is not 0. Raises ValueError unless probabilities are >= 0, with a sum of 1."""
    if min((p for p, _ in node.outcomes), default=-1.0) < 0 or abs(math.fsum(p for p, _ in node.outcomes) - 1) > 1e-9:
        raise ValueError(f"a Chance whose probabilities are not 0 or more, with a sum of 1: {node!r}"[:400])
    return [(p, state) for p, state in node.outcomes if p > 0]
