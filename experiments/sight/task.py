"""Images of a digit or of squares in one colour, questions about them, and a model small enough to learn both."""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from fppo import models, quickstart
from fppo.models import Model

COLOURS = {"r": "red", "g": "green", "b": "blue", "o": "orange"}
NUMBERS = "1234"
DESCRIBE, COLOUR, DIGIT, COUNT = "all?", "colour?", "digit?", "count?"
SIDE, PATCH, WIDTH = 32, 8, 64
TEMPLATE = (
    "{% for m in messages %}{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}"
    "{% endfor %}{% endfor %}"
)


def draw(colour: str, number: str, kind: str, rng: np.random.Generator) -> Image.Image:
    """The digit, or as many squares in cells of their own."""
    image, cells = Image.new("RGB", (SIDE, SIDE), "white"), rng.permutation(16).tolist()
    pen = ImageDraw.Draw(image)
    if kind == DIGIT:
        pen.text((9, 3), number, fill=COLOURS[colour], font_size=24)
    for y, x in (divmod(cell, 4) for cell in cells[: int(number) if kind == COUNT else 0]):
        pen.rectangle((8 * x + 1, 8 * y + 1, 8 * x + 6, 8 * y + 6), fill=COLOURS[colour])
    return image


def write(output: Path, split: str, count: int, rng: np.random.Generator, *, described: float | None = None) -> None:
    """A file of prompts with images. With a share of images to be `described`, colour and number, it is for imitation,
    and answers to the other prompts are guesses; else all answers are right."""
    (output / split).mkdir(parents=True, exist_ok=True)
    with (output / f"{split}.jsonl").open("w") as file:
        for name in (f"{split}/{row}.png" for row in range(count)):
            colour, number, kind = (str(rng.choice([*x])) for x in (COLOURS, NUMBERS, (DIGIT, COUNT)))
            draw(colour, number, kind, rng).save(output / name)
            asked, answer, guesses = (COLOUR, colour, COLOURS) if rng.random() < 0.5 else (kind, number, NUMBERS)
            if described is not None:
                guess = str(rng.choice([*guesses]))
                asked, answer = (DESCRIBE, colour + number) if rng.random() < described else (asked, guess)
            print(json.dumps({"prompt": asked, "answer": answer, "image": name}), file=file)


def small_model(layers: int = 2) -> tuple[Model, LlavaProcessor]:
    """A LLaVA-shaped model, for which an image is 16 tokens and a letter one, and its processor."""
    tokenizer = quickstart.character_tokenizer(
        "".join(sorted({*COLOURS, *NUMBERS, *DESCRIBE, *COLOUR, *DIGIT, *COUNT}))
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,  # of 32, which is the least that vLLM's attention on CPUs takes
        "initializer_range": 0.05,
    }
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes),
        vision_config=CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, **sizes),
        vision_feature_layer=-1,
        image_token_index=tokenizer.get_vocab()["<image>"],
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    square = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size=square, crop_size=square),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    return models.build(config), processor
