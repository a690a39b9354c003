"""reasoning-gym: procedural questions, scored by the data set that made them (pip install reasoning-gym)."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import reasoning_gym  # pyright: ignore[reportMissingImports]

from fppo._errors import shown
from fppo.environments.adapters.objects import seed_generators
from fppo.environments.protocol import Begin, Reply, Step

_ITEMS = 1 << 30  # questions of a data set, made one by one when needed
_AT_ONCE = {"acre": 10_000, "list_functions": 1_000_000, "word_ladder": 10_000}  # sets that make all questions at once


class ReasoningGym:
    """Questions of the data sets {name: settings}, drawn by the seed; a row may choose a set by its field "dataset".

    `seed` is the data sets' own seed; use another one for held-out questions. With `chances` above 1 a wrong answer is
    followed by the text `again`, each further answer is worth `worth` times the one before, and only right answers
    count. The answer is the text after the last `mark` in a response. Without a mark it is as many of the last lines as
    the data set's own answer has. If the data set's own answer has several lines or is unknown, the text after the last
    empty line is tried too.
    """

    def __init__(
        self,
        *,
        datasets: Mapping[str, Mapping[str, Any]],
        seed: int = 0,
        chances: int = 1,
        worth: float = 0.5,
        again: str = " No, again:",
        mark: str = "",
    ) -> None:
        sizes = {name: _AT_ONCE.get(name, _ITEMS) for name in datasets}
        made = {name: {"seed": seed, "size": sizes[name], **how} for name, how in datasets.items()}
        self._sizes = {name: int(how["size"]) for name, how in made.items()}
        self._sets = {name: reasoning_gym.create_dataset(name, **how) for name, how in made.items()}
        self._chances, self._worth, self._again, self._mark = chances, worth, again, mark

    def reset(self, row: Mapping[str, Any], seed: int) -> Begin:
        """Draw a question by the seed. The data `row` may name its data set in the field "dataset"; else the seed draws
        that too. Raises ValueError for a name that is not one of the data sets."""
        names = sorted(self._sets)
        name = row.get("dataset") or names[seed % len(names)]
        if name not in self._sets:
            raise ValueError(f"a row's dataset = {shown(name)}; there are {', '.join(names)}")
        number = seed // len(names) % self._sizes[name]
        return Begin((name, number, 0), [{"role": "user", "content": self._item(name, number)["question"]}])

    def step(self, state: tuple[str, int, int], reply: Reply) -> Step:
        """Score the answer from 0 to 1; after a wrong one, give another chance if one is left."""
        name, number, turn = state
        item, score = self._item(name, number), 0.0
        for answer in _answers(reply.text, item["answer"], self._mark):
            seed_generators(number, turn)
            score = max(score, float(self._sets[name].score_answer(answer=answer, entry=item)))
        right, over = score >= 1.0, score >= 1.0 or turn + 1 >= self._chances
        info = {f"right/{name}": float(right and not turn), "right_at_once": float(right and not turn)}
        messages = () if over else [{"role": "user", "content": self._again}]
        reward = score * self._worth**turn if right or self._chances == 1 else 0.0
        return Step((name, number, turn + 1), messages, reward, over, {**info, "right": float(right)})

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (an environment lives as long as its process)
    def _item(self, name: str, number: int) -> Any:
        return self._sets[name][number]


def _answers(text: str, own: Any, mark: str) -> list[str]:
    """The parts of a response's `text` that may be its answer; `own` is the data set's own answer to the question."""
    if mark:
        return [text.rpartition(mark)[2].strip()]
    lines, count = text.strip().splitlines() or [""], len(str(own or "").strip().splitlines())
    last = "\n".join(lines[-max(count, 1) :]).strip()
    if own is not None and count <= 1:
        return [last]
    return [*dict.fromkeys((last, re.split(r"\n[ \t]*\n", text.strip())[-1].strip()))]
