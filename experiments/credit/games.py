"""Games in text whose values are known: Kuhn's poker against an opponent, and a walk on ice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fppo.rollout.turns.games import Chance, End, Game, Node, Turn


class Opponent(NamedTuple):
    """How often Kuhn's second player bets after a check, and calls a bet, by its card."""

    bets: Mapping[str, float]
    calls: Mapping[str, float]


CARDS = "JQK"
EQUILIBRIUM = Opponent({"J": 1 / 3, "Q": 0.0, "K": 1.0}, {"J": 0.0, "Q": 1 / 3, "K": 1.0})  # Kuhn, 1950
LOOSE = Opponent({"J": 0.0, "Q": 0.0, "K": 1.0}, {"J": 0.5, "Q": 1.0, "K": 1.0})  # calls too often, and never bluffs
GAINS = {"bc": 1, "cbc": -1}  # of hands in which one folds
SIZE, SLIDE = 3, 0.25  # fields in each direction, and how often a step goes one further


class Hand(NamedTuple):
    """A hand: how many are left with it, the chips won before, the cards, what both said, and what the policy sees."""

    left: int
    won: int
    own: str
    other: str = ""
    said: str = ""
    shown: str = ""


def kuhn(state: str | Hand, *, hands: int = 1, opponent: Opponent = EQUILIBRIUM) -> Node:
    """Kuhn's poker in some hands, the policy first.

    The prompt is the policy's card, and ?. It says b to bet or call and c to check or fold, and sees the opponent's
    last move, its card if both have shown theirs, its own next one, and ?. The score is from 0, all lost, to 1.
    """
    hand = Hand(hands, 0, state[0]) if isinstance(state, str) else state
    if not hand.other:
        return Chance([(1 / 2, hand._replace(other=card)) for card in CARDS if card != hand.own])
    if hand.said in ("c", "b"):
        p = (opponent.bets if hand.said == "c" else opponent.calls)[hand.other]
        return Chance([(p, hand._replace(said=hand.said + "b")), (1 - p, hand._replace(said=hand.said + "c"))])
    if hand.said in ("", "cb"):
        moves = {move: hand._replace(said=hand.said + move) for move in "bc"}
        return Turn("b?" if hand.said else hand.shown, moves)
    stake = 2 if hand.said.endswith("bb") else 1
    higher = CARDS.index(hand.own) > CARDS.index(hand.other)
    won = hand.won + GAINS.get(hand.said, stake if higher else -stake)
    if hand.left == 1:
        return End(won / (4 * hands) + 1 / 2)
    seen = (hand.said[1] if len(hand.said) == 2 else "") + (hand.other if hand.said not in GAINS else "")
    return Chance([(1 / 3, Hand(hand.left - 1, won, card, shown=f"{seen}{card}?")) for card in CARDS])


def poker(hands: int, opponent: Opponent = EQUILIBRIUM) -> Game:
    """A session of Kuhn's poker."""
    return Game(partial(kuhn, hands=hands, opponent=opponent), draws=3 * hands - 1)


def at_random(opening: str, draws: Sequence[float], *, node: Callable[[Any], Node]) -> str:
    """A response to the opening, with what is shown in it, in which every action is drawn."""
    left, said, now = iter(draws), "", node(opening)
    while not isinstance(now, End):
        if isinstance(now, Chance):
            now = node(now.at(next(left)))
        else:
            action = [*now.actions][int(len(now.actions) * next(left))]
            said, now = said + now.shown + action, node(now.actions[action])
    return said


class Walker(NamedTuple):
    """Where a walk is, where it should end, the steps that are left, and whether one has just been taken."""

    x: int
    y: int
    goal: tuple[int, int]
    left: int
    step: str = ""


def ice(state: str | Walker, *, steps: int = 3) -> Node:
    """A walk on three by three fields of ice, the prompt "xyXY": from (x, y) to (X, Y) in some steps L, R, U, D, each
    of which may go one field further. The policy sees where it came to; the score is 1 on the goal, and 0 elsewhere."""
    if isinstance(state, str):
        x, y, *goal = map(int, state)
        return Turn("", {move: Walker(x, y, (goal[0], goal[1]), steps, move) for move in "LRUD"})
    if state.step:
        return Chance([(1 - SLIDE, _moved(state, 1)), (SLIDE, _moved(state, 2))])
    if not state.left:
        return End(float((state.x, state.y) == state.goal))
    return Turn(f"{state.x}{state.y}", {move: state._replace(step=move) for move in "LRUD"})


def _moved(walker: Walker, fields: int) -> Walker:
    x = walker.x + fields * ((walker.step == "R") - (walker.step == "L"))
    y = walker.y + fields * ((walker.step == "U") - (walker.step == "D"))
    x, y = (min(max(at, 0), SIZE - 1) for at in (x, y))
    return walker._replace(x=x, y=y, left=walker.left - 1, step="")


KUHN = poker(1)
ICE = Game(partial(ice, steps=2), draws=2)
