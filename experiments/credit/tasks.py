"""Two tasks whose reward comes at the end and whose credit belongs to single tokens: ten sums, and a walk on a grid."""

from collections.abc import Callable

import attrs


@attrs.frozen
class Task:
    characters: str
    tokens: int  # of a response
    make_prompt: Callable[[list[float]], str]  # of uniform draws
    demonstrate: Callable[[str, list[float]], str]  # a flawed response, of uniform draws
    score: Callable[[str, str], float]  # of a prompt and a response, from 0 to 1
    warm_up: int  # steps of imitation that it takes to be right now and then
    lr: float  # the policy's; a critic's is twice that
    goal: float  # a mean score that is worth counting the samples to


def chain_prompt(draws: list[float]) -> str:
    """A digit from 0 to 4 to begin with, and ten to add."""
    return "".join(str(int(5 * u)) for u in draws[:11])


def chain_demonstration(prompt: str, draws: list[float]) -> str:
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


def walk_prompt(draws: list[float]) -> str:
    """Where a walk on five by five fields begins, and where it should end."""
    return "".join(str(int(5 * u)) for u in draws[:4])


def walk_demonstration(prompt: str, draws: list[float]) -> str:
    return "".join("LRUD"[int(4 * u)] for u in draws[:8])


def walk_score(prompt: str, response: str) -> float:
    """1 on the goal, and an eighth less for each step that is missing; the edges stop a step."""
    x, y, goal_x, goal_y = map(int, prompt)
    for step in response:
        x = min(max(x + (step == "R") - (step == "L"), 0), 4)
        y = min(max(y + (step == "U") - (step == "D"), 0), 4)
    return 1 - (abs(x - goal_x) + abs(y - goal_y)) / 8


CHAIN = Task("01234", 10, chain_prompt, chain_demonstration, chain_score, 300, 3e-4, 0.85)
WALK = Task("01234LRUD", 8, walk_prompt, walk_demonstration, walk_score, 100, 1e-3, 0.75)
TASKS = {"chain": CHAIN, "walk": WALK}
