"""Episodes of rows: what was drawn and observed so far, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
from torch import Tensor

from fppo.batch import RowInputs
from fppo.environments.protocol import Message
from fppo.episodes import EpisodeCut


class Section(NamedTuple):
    """Consecutive tokens of a response: one turn, or one observation."""

    tokens: Tensor  # [t] int64
    log_probs: Tensor  # [t]; 0 in an observation
    sampling_log_probs: Tensor  # [t]
    versions: Tensor  # [t] int32, of the policies that drew them
    turn: int  # from 1; 0: an observation


@attrs.define(eq=False)
class Chain:
    """A row's episode, and its response as it grows."""

    row: int  # of the rollout
    row_id: int
    group: int  # the number of its prompt
    data: Mapping[str, Any]  # the row that an environment gets
    seed: int
    prompt: Sequence[int]
    inputs: RowInputs | None
    most: int  # the most tokens of the response
    state: Any = None
    messages: Sequence[Message] | None = None  # of the prompt, where the player gave it
    begun: bool = False
    failures: int = 0
    why: str = ""  # the reason of the first failure
    lost: bool = False  # it could not begin
    sections: list[Section] = attrs.field(factory=list)
    ids: list[int] = attrs.field(factory=list)
    since: int = 0  # where the policy's present turn began
    turn: int = 1
    requests: int = 0  # made so far
    finish: str = ""
    done: bool = False
    turns: list[list[int]] = attrs.field(factory=list)  # the tokens of earlier turns
    rewards: dict[int, float] = attrs.field(factory=dict)  # by column
    info: dict[str, float] = attrs.field(factory=dict)
    experts: list[tuple[int, int, Tensor]] = attrs.field(factory=list)  # row of the episode, end of the tokens, experts
    said: list[Message] = attrs.field(factory=list)  # the conversation so far, where turns are rows
    later: list[EpisodeCut] = attrs.field(factory=list)  # the rows after the first

    def failed(self, why: str) -> None:
        """Count a failed call; the reason of the first one is kept."""
        self.failures += 1
        self.why = self.why or why

    @property
    def cuts(self) -> list[EpisodeCut]:
        """The rows of the episode in order: a single one, unless turns are rows."""
        return [EpisodeCut(self.prompt), *self.later]

    @property
    def name(self) -> str:
        """The name of the row's last request to the engine."""
        return f"{self.row}.{self.requests}"

    @property
    def reply_ids(self) -> list[int]:
        """The tokens of the present turn."""
        return self.ids[self.since :]
