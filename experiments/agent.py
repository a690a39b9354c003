"""An agent that searches files, trained as it is: it knows the openai client, and nothing of training.

It takes pip install -e ".[serve]" openai. `search_tasks.py` makes a small model that knows the commands, and guesses at
half of its turns. A search costs a fiftieth. Held out: 0.40 at first, 0.91 after 40 steps and 5 minutes of processor.
"""

import random
import sys
from pathlib import Path
from typing import Any

import openai  # pyright: ignore[reportMissingImports]
import tyro

NAMES = ("a", "b", "c", "d")
WORDS = ("lamp", "tree", "ship", "bell", "coat", "rope", "drum", "nail")
CLIENT = openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=0)


def task(seed: int) -> tuple[dict[str, str], str]:
    """Four files of two words each, and a word of one of them."""
    words = random.Random(seed).sample(WORDS, 2 * len(NAMES))
    files = {name: " ".join(words[2 * i : 2 * i + 2]) for i, name in enumerate(NAMES)}
    return files, random.Random(~seed).choice(words)


def play(row, base_url, api_key):
    """One episode: the policy searches files until it says which one holds the word."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    files, word = task(row["seed"])
    messages: list[Any] = [{"role": "user", "content": f"find {word}"}]
    for searches in range(len(NAMES) + 1):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        said = answer.choices[0].message.content or ""
        command, _, name = said.partition(" ")
        if name not in files or command not in ("search", "answer"):
            return {"score": 0.0, "found": 0, "searches": searches}
        found = word in files[name].split()
        if command == "answer":
            return {"score": found - 0.02 * searches, "found": found, "searches": searches}
        shown = "here" if found else "nothing"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": shown}]
    return {"score": 0.0, "found": 0, "searches": searches}


def main(output_dir: Path = Path("runs/agent"), seed: int = 0, examples: int = 600, more: tuple[str, ...] = ()) -> int:
    from search_tasks import warm_up

    from fppo.commands.cli import main as fppo

    if not (output_dir / "warm").exists():
        warm_up(output_dir / "warm", seed, examples)
    given = [f"--output-dir={output_dir}", f"--model.path={output_dir / 'warm'}", f"--seed={seed}"]
    return fppo(["train", str(Path(__file__).with_suffix(".toml")), *given, *(f"--{each}" for each in more)])


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
