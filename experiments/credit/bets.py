"""Even bets on cards, sixteen hands in a row: the score is the stack at the end, and most of it is luck.

What luck there was stands in the text, as the stack before each hand. Nothing else says which bets were good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fppo import batch as batches
from fppo.batch import Column, Prompts, Rollout
from fppo.rollout.engine import Ask, Engine, Sampling
from fppo.tree import replace

HANDS, CARDS, STACK = 16, 10, 16  # the stack to begin with; it stays between 0 and twice that
STACKS = "abcdefghijklmnopqrstuvwxyzABCDEFG"
CHARACTERS = STACKS + "0123456789" + "+-"  # stacks, cards, and to take the bet or to leave it
PER_HAND = 3  # draws
ONE = Sampling(max_tokens=1)


def deck(draws: Sequence[float]) -> str:
    """Three digits a hand: the policy's card, the house's, and what the house gives or takes besides, from 0 to 4."""
    dealt = ""
    for hand in range(HANDS):
        u, v, luck = draws[PER_HAND * hand : PER_HAND * hand + PER_HAND]
        own, house = int(CARDS * u), int((CARDS - 1) * v)
        dealt += f"{own}{house + (house >= own)}{int(5 * luck)}"
    return dealt


def gain(hand: str, action: str) -> int:
    """What the policy wins: a chip or the loss of one if it takes the bet that its card is the higher one, and luck."""
    own, house, luck = map(int, hand)
    return (action == "+") * (1 if own > house else -1) + luck - 2


def stack(dealt: str, actions: str) -> int:
    """The policy's chips after these actions."""
    chips = STACK
    for number, action in enumerate(actions):
        chips = min(max(chips + gain(dealt[PER_HAND * number : PER_HAND * (number + 1)], action), 0), 2 * STACK)
    return chips


def shown(dealt: str, actions: str) -> str:
    """What the policy sees of its next hand: its chips, and its card."""
    return f"{STACKS[stack(dealt, actions)]}{dealt[PER_HAND * len(actions)]}"


def at_random(dealt: str, draws: Sequence[float]) -> str:
    """A session, from the first action on, in which each action is drawn."""
    actions, said = "", ""
    for u in draws[:HANDS]:
        actions += "+-"[u < 0.5]
        said += actions[-1] + (shown(dealt, actions) if len(actions) < HANDS else "")
    return said


def score(dealt: str, actions: str) -> float:
    """The share of twice the first stack that the policy has after the last hand."""
    return stack(dealt, actions) / (2 * STACK)


@attrs.frozen
class Table:
    """An engine whose responses are sessions: the policy acts, and what it sees then is not its own.

    The ground truth of a prompt are the cards of the first hand, and of all others if the responses to it are to be
    dealt the `same`; the rollout's are what was dealt.
    """

    engine: Engine
    encode: Callable[[Sequence[str]], list[int]]  # of characters, each a token
    decode: Callable[[Sequence[int]], list[str]]
    same: bool

    def generate(self, params: Mapping[str, Tensor], ask: Ask) -> Rollout:
        """The rollout; see `Engine`."""
        start = self.engine.generate(params, attrs.evolve(ask, sampling=attrs.evolve(ask.sampling, max_tokens=1)))
        tokens, columns, dealt = start.tokens, [_columns(start)], list(start.ground_truth)
        if not self.same:
            draws = ask.key.fold("deal").uniform(torch.arange(len(dealt)), HANDS * PER_HAND).tolist()
            dealt = [own[:PER_HAND] + deck(row)[PER_HAND:] for own, row in zip(dealt, draws, strict=True)]
        actions = ["" for _ in dealt]
        for hand in range(1, HANDS):
            last = self.decode(tokens[:, -1].tolist())
            actions = [done + ("+" if one == "+" else "-") for done, one in zip(actions, last, strict=True)]
            seen = [self.encode([*shown(*row)]) for row in zip(dealt, actions, strict=True)]
            tokens = torch.cat([tokens, torch.tensor(seen)], 1)
            there = torch.ones_like(tokens, dtype=torch.bool)
            prompts = replace(batches.narrow(Prompts, start), tokens=tokens, attention_mask=there)
            after = attrs.evolve(ask, prompts=prompts, sampling=ONE, key=ask.key.fold("hand", hand))
            rollout = self.engine.generate(params, after)
            tokens = rollout.tokens
            columns += [[x.new_zeros(x.shape[0], len(seen[0])) for x in columns[0]], _columns(rollout)]
        chosen, log_probs, sampling_log_probs = (torch.cat(each, 1) for each in zip(*columns, strict=True))
        return replace(
            start,
            tokens=tokens,
            attention_mask=torch.ones_like(tokens, dtype=torch.bool),
            ground_truth=Column(dealt),
            response_mask=chosen,
            rollout_log_probs=log_probs,
            sampling_log_probs=sampling_log_probs,
        )


def _columns(rollout: Rollout) -> list[Tensor]:
    return [rollout.response_mask, rollout.rollout_log_probs, rollout.sampling_log_probs]


def table(engine: Engine, tokenizer: Any, *, same: bool = False) -> Engine:
    """The engine at the table."""
    return Table(engine, tokenizer.convert_tokens_to_ids, tokenizer.convert_ids_to_tokens, same)
