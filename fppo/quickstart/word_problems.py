"""The quickstart's task for a real model, SmolLM2-135M-Instruct: sums, differences and products, asked in words."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fppo.key import Key
from fppo.runtime.gguf_files import SMOL

if TYPE_CHECKING:
    from fppo.settings.train import TrainSettings

TRAIN, TEST = "train.jsonl", "test.jsonl"
LAST_NUMBER = r"(?<![\d.,-])(\d+)\D*\Z"  # the last number of a text, if it is a whole one
STEPS = 30
MINUTES, MEMORY_GB = "8 to 15", 5  # on two idle cores
DISK_GB = 3  # two checkpoints, an export, and the unpacked model
NAMES = ("Ann", "Ben", "Eva", "Jim", "Kim", "Lin", "Max", "Mia", "Sam", "Tom")
THINGS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "toys")
# questions by the sign of their operation; some mention a name and a thing
QUESTIONS = {
    "+": (
        "What is {a} + {b}?",
        "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?",
        "There are {a} {thing} on a table and {b} in a box. How many {thing} are there?",
    ),
    "-": (
        "What is {a} - {b}?",
        "{name} has {a} {thing} and gives {b} away. How many {thing} does {name} have left?",
        "There were {a} {thing}, and {name} took {b}. How many {thing} are left?",
    ),
    "x": (
        "What is {a} times {b}?",
        "{name} has {a} boxes with {b} {thing} in each. How many {thing} does {name} have?",
        "One costs {a} dollars. How many dollars do {b} {thing} cost?",
    ),
}


@attrs.frozen
class WordProblem:
    """A question in words, its answer, the sign of its operation (+, - or x), and its two numbers."""

    question: str
    answer: int
    sign: str
    numbers: tuple[int, int]


def word_problems() -> list[WordProblem]:
    """All questions, in a fixed random order. No answer is among the numbers of its question, so that repeating one is
    always wrong."""
    found = []
    for sign, forms in QUESTIONS.items():
        for a, b, form in product(range(2, 13), range(2, 13), forms):
            first = a + b if sign == "-" else a
            answer = {"+": a + b, "-": a, "x": a * b}[sign]
            if answer not in (first, b):
                found.append((sign, first, b, answer, form))
    draws = Key(0).fold("word problems").uniform(torch.arange(len(found)), 3).tolist()
    problems = []
    for (sign, a, b, answer, form), (_, of_name, of_thing) in zip(found, draws, strict=True):
        words = {"name": NAMES[int(len(NAMES) * of_name)], "thing": THINGS[int(len(THINGS) * of_thing)]}
        problems.append(WordProblem(form.format(a=a, b=b, **words), answer, sign, (a, b)))
    order = sorted(range(len(problems)), key=lambda i: draws[i][0])
    return [problems[i] for i in order]


def split() -> tuple[list[WordProblem], list[WordProblem]]:
    """The questions to train on, and the held-out ones. No sum, difference or product is asked for in both. The split
    is the same for every seed of a run."""
    everything = word_problems()
    facts = sorted({*map(_fact, everything)})
    draws = Key(0).fold("held out").uniform(torch.arange(len(facts)), 1)[:, 0].tolist()
    kept = {fact for fact, draw in zip(facts, draws, strict=True) if draw < 0.1}
    train = [problem for problem in everything if _fact(problem) not in kept]
    return train, [problem for problem in everything if _fact(problem) in kept]


def _fact(problem: WordProblem) -> tuple[str, int, int]:
    """The operation of a question and its two numbers, the smaller one first, so that 2 + 3 and 3 + 2 are equal."""
    a, b = problem.numbers
    return problem.sign, min(a, b), max(a, b)


def row(problem: WordProblem) -> dict[str, Any]:
    """A question as a row of a data set: the chat that asks it, its answer, and the name of its kind."""
    chat = [{"role": "user", "content": problem.question}]
    return {"prompt": chat, "answer": str(problem.answer), "source": "word problems"}


def prepare(directory: Path) -> None:
    """Write the questions to train on, and those that are held out, to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in zip((TRAIN, TEST), split(), strict=True):
        (directory / name).write_text("\n".join(json.dumps(row(problem)) for problem in part) + "\n")


def cost(directory: Path) -> str:
    """A text on the time, memory and disk that the run in `directory` takes."""
    return (
        f"SmolLM2-135M-Instruct, {STEPS} steps of GRPO: about {MINUTES} minutes on two idle cores, "
        f"{MEMORY_GB} GB of memory, and {DISK_GB} GB of disk, most of it in {directory}; nothing is downloaded"
    )


def settings(directory: Path, seed: int) -> TrainSettings:
    """The settings of the GRPO run on the questions that `prepare` wrote to `directory`."""
    # imported here, since the task alone needs no packages of the command line
    from fppo.settings.learning import ActorSettings, AdvantageSettings, AlgorithmSettings, OptimizerSettings
    from fppo.settings.model import ModelSettings
    from fppo.settings.train import (
        CheckpointSettings,
        DataSettings,
        EvalSettings,
        RewardSettings,
        RolloutSettings,
        TrainSettings,
    )

    return TrainSettings(
        output_dir=str(directory),
        seed=seed,
        steps=STEPS,
        model=ModelSettings(path=SMOL),
        data=DataSettings(
            path=(str(directory / TRAIN),),
            eval_path=(str(directory / TEST),),
            source="source",
            chat=True,
            max_prompt_tokens=96,
        ),
        rollout=RolloutSettings(batch_size=64, n=8, max_tokens=32),
        reward=RewardSettings(
            functions=("regular_expression",), arguments={"regular_expression": {"pattern": LAST_NUMBER}}
        ),
        algorithm=AlgorithmSettings(advantage=AdvantageSettings(name="grpo")),
        actor=ActorSettings(mini_batch_size=32, draw_by="prompt", optimizer=OptimizerSettings(lr=2e-5)),
        eval=EvalSettings(every=15),
        checkpoint=CheckpointSettings(every=15, keep=1),
    )
