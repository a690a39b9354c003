"""Processors of images and text that nothing has to be downloaded for."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Idefics3Processor, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SPECIAL = {
    "llava": ["<image>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"],
}


def processor(name: str) -> Any:
    """Of "llava" or "idefics3": characters are tokens, <pad> 0, <eos> 1, <image> 3, and images are 16 by 16."""
    special = SPECIAL[name]
    words = ["<pad>", "<eos>", "<unk>", *special, *"abcdefghijklmnopqrstuvwxyz0123456789 ?:.\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=special, **names)
    side = {"height": 16, "width": 16}
    if name == "llava":
        return LlavaProcessor(
            image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
            tokenizer=fast,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=TEMPLATE,
        )
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
    )
    return Idefics3Processor(image_processor=images, tokenizer=fast, image_seq_len=4, chat_template=TEMPLATE)
