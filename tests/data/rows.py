"""A tokenizer of whole words and rows on disk."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}{% if m.role not in ['user', 'system'] %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


def tokenizer(*, chat: bool = False, unknown: bool = True, **special: str | None) -> PreTrainedTokenizerFast:
    """Words to ids: <pad> 0, <eos> 1, <unk> 2, user 3, assistant 4, ':' 5, and the numbers 0 .. 9 as 10 .. 19."""
    words = ["<pad>", "<eos>", "<unk>" if unknown else "<other>", "user", "assistant", ":", "Q", "A", "system", "x"]
    vocabulary = {word: i for i, word in enumerate(words)} | {str(i): 10 + i for i in range(10)}
    model = Tokenizer(WordLevel(vocabulary, unk_token="<unk>" if unknown else None))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", **special}
    fast = PreTrainedTokenizerFast(tokenizer_object=model, **{k: v for k, v in names.items() if v is not None})
    if chat:
        fast.chat_template = CHAT
    return fast


def write(path: Path, rows: list) -> Path:
    """The rows as lines of JSON; text stands as it is."""
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path
