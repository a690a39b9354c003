"""The responses that prompts had when they last came, from which an engine may draft their next ones.

They are a leaf of the cursor, so a run that resumes has the same drafts. Each item is the text of one prompt: its
responses in base64, of 32-bit token ids, with spaces between them, then a new line and the prompt's id.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence

from fppo.batch import Column, Prompts, Rollout
from fppo.tree import replace

RESPONSES = 4  # of one prompt, all different
TOKENS = 1 << 20  # of all prompts
_PER_TOKEN = 16 / 3  # characters of base64


def with_responses(earlier: Sequence[str], rollout: Rollout, *, most: int = TOKENS) -> Column:
    """Put a rollout's responses in the place of the same prompts' earlier ones. Of more than `most` tokens, those of
    prompts that have not come for longest are left out."""
    width, own = rollout.response_mask.shape[1], dict[str, list[str]]()
    for name, row, mask in zip(rollout.ids, rollout.tokens.cpu(), rollout.response_mask.cpu(), strict=True):
        text = base64.b64encode(array("i", row[-width:][mask].tolist())).decode()
        kept = own.setdefault(name, [])
        if text not in kept and len(kept) < RESPONSES:
            kept.append(text)
    texts = {name: text for name, text in map(_divided, earlier) if name not in own}
    texts |= {name: " ".join(kept) for name, kept in own.items()}
    found, left = list[str](), most * _PER_TOKEN
    for name, text in reversed(texts.items()):
        left -= len(text)
        if left < 0:
            break
        found.append(f"{text}\n{name}")
    return Column(reversed(found))


def with_earlier(prompts: Prompts, earlier: Sequence[str]) -> Prompts:
    """Give each prompt its own responses among the `earlier` ones, as lists of token ids."""
    texts = dict(map(_divided, earlier))
    return replace(prompts, earlier=Column([_responses(texts.get(name, "")) for name in prompts.ids]))


def _divided(item: str) -> tuple[str, str]:
    text, name = item.split("\n", 1)
    return name, text


def _responses(text: str) -> list[list[int]]:
    return [array("i", base64.b64decode(each)).tolist() for each in text.split()]
