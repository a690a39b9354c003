"""Tasks whose reward comes at the end: ten sums, a walk on a grid, and sessions of bets and of poker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
from credit import bets, games
from credit.seat import seat

from fppo.rollout.engine import Engine

LONG = ("mse", "hl_gauss", "confidence", "grpo", "rloo", "reinforce_plus_plus")
SHORT = ("mse", "confidence", "rloo", "reinforce_plus_plus")


@attrs.frozen(kw_only=True)
class Task:
    characters: str
    tokens: int  # of a response
    draws: int  # uniform ones, of which an example is made
    make: Callable[[Sequence[float]], str]  # an example: what the score knows of it
    ask: Callable[[str], str] = str  # the prompt of an example
    demonstrate: Callable[[str, Sequence[float]], str]  # a flawed response, of as many draws
    score: Callable[[Any, str], float]  # of an example, or what the engine made of it, and a response, from 0 to 1
    engine: Callable[[Engine, Any], Engine] = lambda engine, tokenizer: engine  # around the one that samples tokens
    warm_rate: float = 2e-3
    warm_up: int  # steps of imitation that it takes to be right now and then
    width: int = 64  # of the model
    layers: int = 2
    batch: int = 256  # responses of a step
    steps: int = 40
    methods: tuple[str, ...] = LONG
    rates: dict[str, float]  # the policy's learning rate for each method, the best of `RATES` (see `tune`)
    critic_rate: float = 1e-3
    critic_epochs: int = 4
    critic_cuts: int = 4  # mini-batches of an epoch
    critic_first: int = 0  # steps in which the policy waits for the critic; their samples count
    lam: float = 0.9
    goal: float  # a mean score that is worth counting the samples to,
    window: int = 3  # of so many steps


def chain_prompt(draws: Sequence[float]) -> str:
    """A digit from 0 to 4 to begin with, and ten to add."""
    return "".join(str(int(5 * u)) for u in draws[:11])


def chain_demonstration(prompt: str, draws: Sequence[float]) -> str:
    """Ten running sums modulo five, each right half of the time, and drawn else."""
    total, said = int(prompt[0]), ""
    for digit, u, v in zip(prompt[1:], draws[:10], draws[10:20], strict=True):
        total = (total + int(digit)) % 5 if u < 0.5 else int(5 * v)
        said += str(total)
    return said


def chain_score(prompt: str, response: str) -> float:
    """The share of the ten sums that follow from the one before, right or wrong."""
    steps = zip(prompt[0] + response, prompt[1:], response, strict=False)
    return sum((int(before) + int(digit)) % 5 == int(said) for before, digit, said in steps) / 10


def walk_prompt(draws: Sequence[float]) -> str:
    """Where a walk on five by five fields begins, and where it should end."""
    return "".join(str(int(5 * u)) for u in draws[:4])


def walk_demonstration(prompt: str, draws: Sequence[float]) -> str:
    return "".join("LRUD"[int(4 * u)] for u in draws[:8])


def walk_score(prompt: str, response: str) -> float:
    """1 on the goal, and an eighth less for each step that is missing; the edges stop a step."""
    x, y, goal_x, goal_y = map(int, prompt)
    for step in response:
        x = min(max(x + (step == "R") - (step == "L"), 0), 4)
        y = min(max(y + (step == "U") - (step == "D"), 0), 4)
    return 1 - (abs(x - goal_x) + abs(y - goal_y)) / 8


CHAIN = Task(
    characters="01234",
    tokens=10,
    draws=20,
    make=chain_prompt,
    demonstrate=chain_demonstration,
    score=chain_score,
    warm_up=200,
    batch=128,
    steps=24,
    methods=SHORT,
    rates=dict.fromkeys(SHORT, 3e-4),
    goal=0.7,
)
WALK = Task(
    characters="01234LRUD",
    tokens=8,
    draws=8,
    make=walk_prompt,
    demonstrate=walk_demonstration,
    score=walk_score,
    warm_up=100,
    batch=128,
    steps=36,
    methods=SHORT,
    rates=dict.fromkeys(SHORT, 3e-3),
    goal=0.72,
)
BETS = Task(
    characters=bets.CHARACTERS,
    tokens=bets.HANDS * 3 - 2,
    draws=bets.HANDS * bets.PER_HAND,
    make=bets.deck,
    ask=lambda deck: bets.shown(deck, ""),
    demonstrate=bets.at_random,
    score=bets.score,
    engine=bets.table,
    warm_up=80,
    warm_rate=1e-2,
    width=32,
    layers=1,
    batch=64,
    steps=56,
    window=5,
    rates=dict.fromkeys(LONG, 3e-3) | {"rloo": 1e-3},
    critic_rate=3e-3,
    critic_epochs=16,
    critic_cuts=1,
    critic_first=4,
    lam=0.5,
    goal=0.57,
)
REPLAYED = attrs.evolve(
    BETS,
    engine=partial(bets.table, same=True),
    steps=32,
    methods=("mse", "grpo", "rloo"),
    rates={"mse": 1e-2, "grpo": 3e-3, "rloo": 3e-3},
)
HANDS = 4
POKER = games.poker(HANDS, games.LOOSE)
KUHN = Task(
    characters=games.CARDS + "bc?",
    tokens=7 * HANDS,
    draws=5 * HANDS,
    make=lambda draws: games.CARDS[int(3 * draws[0])] + "?",
    demonstrate=partial(games.at_random, node=POKER.node),
    score=lambda episode, said: POKER.end(episode, "stop"),
    engine=partial(seat, game=POKER, actions="bc", turns=2 * HANDS),
    warm_up=160,
    warm_rate=1e-2,
    width=32,
    layers=1,
    batch=64,
    steps=16,
    window=5,
    rates=dict.fromkeys(LONG, 3e-4),
    critic_rate=3e-3,
    critic_epochs=8,
    critic_cuts=1,
    critic_first=2,
    lam=0.5,
    goal=0.53,
)
TASKS = {"chain": CHAIN, "walk": WALK, "bets": BETS, "bets, the same cards for a group": REPLAYED, "kuhn": KUHN}
