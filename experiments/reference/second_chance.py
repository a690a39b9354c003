"""An environment for `rollout.environment`: a sum of reasoning-gym, and after a wrong answer a second chance.

It takes pip install -e ".[reasoning]". The answer is the last number of a turn; right at once it scores 1, and 1/2 in
the second turn.
"""

import re
from collections.abc import Mapping
from typing import Any

import reasoning_gym  # pyright: ignore[reportMissingImports]

from fppo.environments import Begin, Reply, Step

AGAIN = "That is not right. What is the right number?"
LAST_NUMBER = re.compile(r"(-?\d+)\D*\Z")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


class Sums:
    """The sums and differences of two numbers below 100 that `chain_sum` draws."""

    def __init__(self) -> None:
        self._sums: Any = reasoning_gym.create_dataset("chain_sum", seed=0, size=1 << 20, **SUMS)

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        number = seed % (1 << 20)
        return Begin((number, 0), [{"role": "user", "content": self._sums[number]["question"]}])

    def step(self, state: tuple[int, int], reply: Reply) -> Step:
        number, turn = state
        found = LAST_NUMBER.search(reply.text)
        right = self._sums.score_answer(answer=found and found[1], entry=self._sums[number]) == 1.0
        messages = [] if right or turn else [{"role": "user", "content": AGAIN}]
        info = {"right_at_once": float(right and not turn), "right": float(right)}
        return Step((number, turn + 1), messages, right / 2**turn, right or bool(turn), info)
