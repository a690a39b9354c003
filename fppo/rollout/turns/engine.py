"""Responses of several turns: a tool or an environment answers each, and its messages are context that is not trained
on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fppo._errors import printable
from fppo.batch import Prompts, Rollout
from fppo.data.examples import MESSAGES
from fppo.environments.protocol import Message, Reply
from fppo.environments.runner import Player
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.rollout.generated import opened
from fppo.rollout.records import check_prompts, number_rows, response_limits
from fppo.rollout.spread import merged_shares
from fppo.rollout.turns.episode import Episode, PlayedRow, data_row, seeds_of
from fppo.rollout.turns.games import DRAWS, EPISODE
from fppo.rollout.turns.observations import Encode
from fppo.rollout.turns.play import Failure, Play, ReplyOf
from fppo.rollout.turns.record import Records
from fppo.runtime.mesh import AXES, LOCAL, Mesh, place_on
from fppo.steps.ranks import deal

FAILURES = "tool_failures"  # the key under which extras hold how many of a row's calls failed
WHY = "environment_error"  # the key under which extras hold the first failed call's error, shortened
INFO = "environment"  # the key under which extras hold an episode's numbers by name
Thinking = Literal["keep", "drop"]


@attrs.frozen(kw_only=True)
class TurnsEngine:
    """An engine whose responses are conversations with a tool, or episodes of an environment.

    `engine` samples a turn. Each row that ended with a stop token goes to `tools`, a `Player`. Its messages are
    encoded and appended to the row as an observation, and the engine continues from there, up to
    `max_turns` turns; sampled token ids stay as they are. Observations are in the attention mask and not in the
    response mask, with log-probs of 0. If the engine reports experts, each token has those of the turn that first ran
    it. `turn_ids` number the turns.

    `sampling.max_tokens` (and `limits`) bound a whole response, observations included; `turn_tokens` bounds each turn.
    A row at one of these bounds is done, with finish "length". So is a row whose observation would leave no room for
    another token; the observation is left out, since a response always ends with a token of the policy. A row at the
    limit of turns ends as its last turn did; a tool is not asked about that turn.

    An environment rewards each turn (`turn_rewards`), also the last one and a cut one. It may give a prompt in place of
    the row's own; `prompt` encodes it, in at most `prompt_tokens`. Rewards need whole episodes, so no row is reported
    early. An episode's seed depends on the key and the prompt alone. An episode fails if a call of its environment
    fails, or if its prompt is too long or not that of its group: with `failure = "drop"` its reward is nan, with
    "score" it ends with its rewards so far, "raise" ends the run.

    No row waits for another's environment. An engine that can be opened for requests (`RequestEngine`) decodes rows as
    they are answered, and runs no token twice; any other engine gets the answered rows together. The rows of a prompt
    begin together.

    Draws depend on key, row, turn and position in the turn; those of the first turn are the engine's own. So token ids
    do not depend on when answers come. On a mesh each rank plays some of the rows, and all get all results. `extras`
    count failed calls as "tool_failures".

    With `thinking = "drop"` each turn is a row. Its prompt is the conversation so far, encoded by `prompt`, so that a
    chat template leaves out earlier thoughts as it does in use. Only the tokens after the prompt were sampled; earlier
    turns are text in it. The rows of an episode are in order (`Rollout.episodes`), and joined they are the response
    that "keep" would report. A turn has the same draws in either. A turn that continues without an observation stays in
    its row. Bounds on a response hold for the joined one, and no row is longer than a prompt with a whole response.

    With `draws` a response is an episode of a game. For tools the prompt's last message has this many uniform numbers
    of the response's own, as "draws". The `extras` have an "episode": the text of that message as "opening", these
    "draws", and the texts of the policy's "turns". No row is reported early then, either.
    """

    engine: Engine
    tools: Player
    encode: Encode
    tokenizer: Any
    max_turns: int
    pad_token_id: int
    turn_tokens: int | None = None
    draws: int | None = None
    mesh: Mesh = LOCAL
    prompt: Callable[[Sequence[Message]], Sequence[int]] | None = None
    prompt_tokens: int | None = None
    failure: Failure = "drop"
    thinking: Thinking = "keep"

    def __attrs_post_init__(self) -> None:
        if self.thinking == "drop" and self.prompt is None:
            raise ValueError('thinking="drop": give prompt, which encodes the conversation up to the next turn')

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout; with one turn, or tools that end every response, the engine's own. See `Engine`.

        Raises ValueError for prompts with images where each turn is a row: later prompts would lack them.
        """
        if self._row_per_turn and any(x is not None for x in ask.prompts.inputs or ()):
            raise ValueError('thinking="drop" encodes prompts anew, which cannot have images: give thinking="keep"')
        if self.tools.judges or self.draws is not None:
            ask = attrs.evolve(ask, on_finished=None)
        mesh = self.mesh
        dealt = deal(len(ask.prompts.tokens), mesh)
        reported = set(dealt[place_on(mesh, AXES)])

        def on_done(episode: Episode) -> None:
            if ask.on_finished is not None and episode.group in reported:
                ask.on_finished(episode.row, episode.ids, episode.finish)

        check_prompts(ask.prompts.attention_mask.bool())
        openings, reply = self._openings(ask), self._replies(ask.sampling)
        with opened(self.engine, params, version=ask.version, together=AXES) as requests, self.tools.open() as calls:
            episodes = self._episodes(ask, openings, merged_shares(dealt, mesh, requests.together))
            Play(self, ask, episodes, requests, calls, reply, on_done).run()
        records = Records(
            ask=ask,
            mesh=mesh,
            pad_token_id=self.pad_token_id,
            device=next((x.device for x in params.values() if isinstance(x, Tensor)), ask.prompts.tokens.device),
            judges=self.tools.judges,
            row_per_turn=self._row_per_turn,
        )
        own = [episode for episode in episodes if episode.group in reported]
        return records.rollout(own, lambda episode: self._extras(episode, openings[episode.row], reply))

    @property
    def _row_per_turn(self) -> bool:
        return self.thinking == "drop"

    def _openings(self, ask: Ask) -> list[list[Message]]:
        """The messages that each row's episode begins with."""
        prompts, n = ask.prompts, ask.sampling.n
        own = [self._opening(prompts, row) for row in range(len(prompts.tokens))]
        openings = [[dict(message) for message in messages] for messages in own for _ in range(n)]
        if self.draws is None:
            return openings
        drawn = ask.key.fold("draws").uniform(number_rows(ask, torch.device("cpu")), self.draws).tolist()
        pairs = zip(openings, drawn, strict=True)
        return [[*messages[:-1], {**messages[-1], DRAWS: draws}] for messages, draws in pairs]

    def _episodes(self, ask: Ask, openings: Sequence[list[Message]], groups: Sequence[int]) -> list[Episode]:
        """Make the episodes of the prompts numbered `groups`, before they begin; `openings` are the messages of each
        row."""
        prompts, n, limits = ask.prompts, ask.sampling.n, response_limits(ask)
        seeds, masks = seeds_of(ask, INFO), prompts.attention_mask.bool()
        row_ids = number_rows(ask, torch.device("cpu")).tolist()
        return [
            Episode(
                row=row,
                row_id=row_ids[row],
                group=group,
                data={**data_row(prompts, group), MESSAGES: openings[row]},
                seed=seeds[group],
                rows=[PlayedRow(prompts.tokens[group][masks[group]].tolist())],
                inputs=None if prompts.inputs is None else prompts.inputs[group],
                max_length=limits[group],
                conversation=list(openings[row]) if self._row_per_turn else [],
            )
            for group in groups
            for row in range(group * n, (group + 1) * n)
        ]

    def _opening(self, prompts: Prompts, row: int) -> list[Message]:
        """The prompt as messages: a chat's own, or its text."""
        messages = prompts.extras[row].get(MESSAGES)
        if messages is not None:
            return [dict(message) for message in messages]
        prompt = prompts.tokens[row][prompts.attention_mask[row].bool()].tolist()
        text = self.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [{"role": "user", "content": text}]

    def _replies(self, sampling: Sampling) -> ReplyOf:
        """Make a function from a turn's tokens to a `Reply`. Special tokens stay in its text, except one that ended the
        turn."""
        tokenizer, special, ends = self.tokenizer, frozenset(self.tokenizer.all_special_ids), dict[int, str]()

        def text_of(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

        def reply(ids: list[int], *, cut: bool) -> Reply:
            stop_text = None if sampling.stop_texts is None else sampling.stop_texts.last(ids)
            content = ids[:-1] if ids[-1] in special and not cut else ids
            if ids[-1] not in ends:
                ends[ids[-1]] = text_of(ids[-1:])
            return Reply(text_of(content), tuple(ids), "" if cut else ends[ids[-1]] if stop_text is None else stop_text)

        return reply

    def _extras(self, episode: Episode, opening: Sequence[Message], reply: ReplyOf) -> dict[str, Any]:
        """The extras that this engine adds to a row: failures, an episode's numbers, and a game's opening, draws and
        turns."""
        more: dict[str, Any] = {FAILURES: episode.failures} if episode.failures else {}
        if self.tools.judges:
            more[INFO] = episode.info
            more |= {WHY: printable(episode.first_failure, 400)} if episode.failures else {}
        if self.draws is not None:
            ids = episode.reply_ids  # none where there was no room after a turn
            said = [reply(own, cut=False).text for own in episode.turns]
            last = [reply(ids, cut=episode.finish != "stop").text] if ids else []
            shown = opening[-1]
            more[EPISODE] = {"opening": shown["content"], "draws": shown[DRAWS], "turns": [*said, *last]}
        return more
