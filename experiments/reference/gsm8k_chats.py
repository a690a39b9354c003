"""GSM8K for `data.rows`: questions as chats, their solutions without annotations, and the numbers they end with.

The files train.jsonl and test.jsonl lie in the directory that the variable GSM8K names. They are at
https://github.com/openai/grade-school-math.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def train() -> Iterator[dict[str, Any]]:
    return rows("train")


def test() -> Iterator[dict[str, Any]]:
    return rows("test")


def rows(split: str) -> Iterator[dict[str, Any]]:
    for line in (Path(os.environ["GSM8K"]) / f"{split}.jsonl").read_text().splitlines():
        row = json.loads(line)
        solution, _, answer = re.sub("<<.*?>>", "", row["answer"]).rpartition("####")
        answer = answer.strip().replace(",", "")
        chat = [{"role": "user", "content": row["question"]}]
        yield {"prompt": chat, "response": f"{solution}#### {answer}", "answer": answer, "source": "gsm8k"}
