"""A small model that knows the commands of `agent.py`: it has imitated searches, most of which end in a guess."""

import random
from collections.abc import Iterator
from pathlib import Path

from agent import NAMES, WORDS, task
from transformers import PreTrainedTokenizerFast

from fppo import models, quickstart
from fppo.key import Key
from fppo.steps import Forward, MicroBatching, adamw, schedule
from fppo.steps.supervised import Demonstrations, demonstrations, imitate

HASTE = 0.5  # the share of turns that answer with any file at all
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<policy>"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the task."""
    says = [f"{command} {name}" for command in ("search", "answer") for name in NAMES]
    texts = [*says, "here nothing", *(f"find {word}" for word in WORDS)]
    tokenizer = quickstart.bpe_tokenizer(texts * 20, size=400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<policy>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def transcript(files: dict[str, str], word: str, draw: random.Random) -> str:
    """A search that never looks twice into a file, and at every turn may end in a guess."""
    said = ""
    for name in draw.sample(NAMES, len(NAMES)):
        if draw.random() < HASTE:
            break
        found = word in files[name].split()
        said += f"search {name}<eos><user>{'here' if found else 'nothing'}<policy>"
        if found:
            return f"{said}answer {name}<eos>"
    return f"{said}answer {draw.choice(NAMES)}<eos>"


def warm_up(directory: Path, seed: int, steps: int) -> None:
    """Writes the model."""
    tokenizer, key = tokenizer_of_words(), Key(seed)
    model = quickstart.small_model(len(tokenizer), width=64, positions=64)

    def batches() -> Iterator[Demonstrations]:
        for step in range(steps):
            draw = random.Random(key.fold(step).seed)
            tasks = (task(draw.randrange(1 << 60)) for _ in range(128))
            read = [(f"<user>find {word}<policy>", transcript(files, word, draw)) for files, word in tasks]
            prompts, answers = ([tokenizer.encode(text) for text in texts] for texts in zip(*read, strict=True))
            yield demonstrations(prompts, answers, pad_token_id=0)

    optimizer = adamw(schedule("linear", 2e-3, total_steps=steps, warmup_steps=30), weight_decay=0.0)
    how = {"forward": Forward(model), "optimizer": optimizer, "micro_batching": MicroBatching(size=128)}
    models.save(model, imitate(models.init_params(model, key), batches(), **how), directory, tokenizer=tokenizer)
