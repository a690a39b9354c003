"""Episodes of rows: what was drawn and observed so far, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from fppo.batch import Prompts, RowInputs
from fppo.environments.protocol import Message
from fppo.rollout.engine import Ask
from fppo.rollout.requests import FinishedRequest

_SEEDS = 1 << 62


@attrs.define(eq=False)
class RowTurn:
    """An answer of the policy, and the tokens that its row observed just before it."""

    before: Sequence[int]
    answer: FinishedRequest
    number: int  # of the turn in its episode, from 0
    reward: float = 0.0


@attrs.define(eq=False)
class PlayedRow:
    """A prompt and the answers to it, with observations between. An episode has several if its prompt changes."""

    prompt: Sequence[int]
    turns: list[RowTurn] = attrs.field(factory=list)
    observed: Sequence[int] = ()  # tokens between the episode's previous row and this one, in neither of them

    @property
    def size(self) -> int:
        """The number of tokens after the prompt."""
        return sum(len(turn.before) + len(turn.answer.tokens) for turn in self.turns)


@attrs.define(eq=False)
class Episode:
    """A row's episode, and its response as it grows."""

    row: int  # of the rollout
    row_id: int
    group: int  # the number of its prompt
    data: Mapping[str, Any]  # the row that an environment gets
    seed: int
    rows: list[PlayedRow]  # a single one, unless each turn is a row
    inputs: RowInputs | None
    max_length: int  # the most tokens of the response
    state: Any = None
    messages: Sequence[Message] | None = None  # of the prompt, where the player gave it
    begun: bool = False
    failures: int = 0
    first_failure: str = ""  # the reason of the first failure
    lost: bool = False  # it could not begin
    ids: list[int] = attrs.field(factory=list)  # of the whole response
    observation: Sequence[int] = ()  # tokens that the next answer follows
    turn_start: int = 0  # where the policy's present turn began
    turn: int = 0
    requests: int = 0  # made so far
    finish: str = ""
    turns: list[list[int]] = attrs.field(factory=list)  # the tokens of earlier turns
    info: dict[str, float] = attrs.field(factory=dict)
    conversation: list[Message] = attrs.field(factory=list)  # the conversation so far, where turns are rows

    def failed(self, why: str) -> None:
        """Count a failed call; the reason of the first one is kept."""
        self.failures += 1
        self.first_failure = self.first_failure or why

    def reward(self, value: float) -> None:
        """Set the reward of the last answer."""
        self.rows[-1].turns[-1].reward = value

    @property
    def name(self) -> str:
        """The name of the row's last request to the engine."""
        return f"{self.row}.{self.requests}"

    @property
    def reply_ids(self) -> list[int]:
        """The tokens of the present turn."""
        return self.ids[self.turn_start :]


def data_row(prompts: Prompts, row: int) -> dict[str, Any]:
    """The data row of a prompt, for an environment or an agent."""
    own = {"ground_truth": prompts.ground_truth[row], "source": prompts.source[row], "id": prompts.ids[row]}
    return {**own, **prompts.extras[row]}


def seeds_of(ask: Ask, name: str) -> list[int]:
    """A seed of 62 bits for the episodes of each prompt, by the key folded with `name` and the prompt alone."""
    uniform = ask.key.fold(name).uniform(ask.prompts.row_ids.cpu(), 1)[:, 0]
    return (uniform * _SEEDS).long().tolist()
