"""GSM8K's questions as chats, with the numbers that its solutions end with; for `data.rows` of the recipes."""

from collections.abc import Iterator
from typing import Any

import datasets

ASK = "Solve the problem step by step, and put the number that is the answer into \\boxed{}."


def train() -> Iterator[dict[str, Any]]:
    return rows("train")


def test() -> Iterator[dict[str, Any]]:
    return rows("test")


def rows(split: str) -> Iterator[dict[str, Any]]:
    found: Any = datasets.load_dataset("openai/gsm8k", "main", split=split)
    for row in found:
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        yield {"prompt": [{"role": "user", "content": f"{row['question']}\n\n{ASK}"}], "answer": answer}
