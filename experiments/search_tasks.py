"""A small model that knows the commands of `agent.py`: it has imitated searches whose answers are mostly guesses."""

import random
from collections.abc import Iterator
from pathlib import Path

from agent import NAMES, WORDS, task
from transformers import PreTrainedTokenizerFast

from fppo import models, quickstart
from fppo.data.chat import encode_chat
from fppo.key import Key
from fppo.rollout import chat_template
from fppo.steps import Forward, MicroBatching, adamw, schedule
from fppo.steps.supervised import Demonstrations, demonstrations, imitate

CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}<policy>"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the words of the task."""
    says = [f"{command} {name}" for command in ("read", "answer") for name in NAMES]
    texts = [*(f"find {word} {word}" for word in WORDS), *(f"{one} {other}" for one in WORDS for other in WORDS)]
    tokenizer = quickstart.bpe_tokenizer([*says * 20, *texts], size=400)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<policy>"]})
    tokenizer.chat_template = CHAT
    return tokenizer


def warm_up(directory: Path, seed: int, steps: int) -> None:
    """Writes the model."""
    tokenizer, key = tokenizer_of_words(), Key(seed)
    model, observe = quickstart.small_model(len(tokenizer), width=64, positions=64), chat_template(tokenizer)

    def batches() -> Iterator[Demonstrations]:
        for step in range(steps):
            draw, prompts, answers = random.Random(key.fold(step).seed), [], []
            for _ in range(128):
                files, word = task(draw.randrange(1 << 60))
                context = encode_chat(tokenizer, [{"role": "user", "content": f"find {word}"}])
                order = draw.sample(NAMES, len(NAMES))
                for place in range(draw.choice((0, 0, 1, 2, 3))):
                    said = [*tokenizer.encode(f"read {order[place]}"), tokenizer.eos_token_id]
                    context += [*said, *observe([{"role": "user", "content": files[order[place]]}], said[-1])]
                guess = f"read {draw.choice(NAMES)}" if draw.random() < 0.4 else f"answer {draw.choice(NAMES)}"
                prompts.append(context)
                answers.append([*tokenizer.encode(guess), tokenizer.eos_token_id])
            yield demonstrations(prompts, answers, pad_token_id=0)

    optimizer = adamw(schedule("linear", 2e-3, total_steps=steps, warmup_steps=30), weight_decay=0.0)
    how = {"forward": Forward(model), "optimizer": optimizer, "micro_batching": MicroBatching(size=128)}
    models.save(model, imitate(models.init_params(model, key), batches(), **how), directory, tokenizer=tokenizer)
