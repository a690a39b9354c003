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

_ITEMS = 1 << 30  # they are made when asked for
_AT_ONCE = {"acre": 10_000, "list_functions": 1_000_000, "word_ladder": 10_000}  # but for these sets'


class ReasoningGym:
    """Questions of the data sets {name: its settings}, drawn by the seed; a row may name its own as "dataset".

    `seed` is that of the data sets: held-out questions are those of another one. With `chances` above 1 a wrong answer
    is followed by `again`, each further one is worth `worth` times as much, and only right ones count. An answer is
    what stands behind `mark` in a response; without one its last line, or as many of its last lines as the data set's
    own answer has, or all behind its last empty line where that one has several or is not known.
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
        """A question."""
        names = sorted(self._sets)
        name = row.get("dataset") or names[seed % len(names)]
        if name not in self._sets:
            raise ValueError(f"a row's dataset = {shown(name)}; there are {', '.join(names)}")
        number = seed // len(names) % self._sizes[name]
        return Begin((name, number, 0), [{"role": "user", "content": self._item(name, number)["question"]}])

    def step(self, state: tuple[str, int, int], reply: Reply) -> Step:
        """The answer's score, of 0 to 1; and another chance where there is one, and it is not right."""
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
    """The parts of a text that may be the answer to a question, whose data set has this answer of its own."""
    if mark:
        return [text.rpartition(mark)[2].strip()]
    lines, count = text.strip().splitlines() or [""], len(str(own or "").strip().splitlines())
    last = "\n".join(lines[-max(count, 1) :]).strip()
    if own is not None and count <= 1:
        return [last]
    return [*dict.fromkeys((last, re.split(r"\n[ \t]*\n", text.strip())[-1].strip()))]
