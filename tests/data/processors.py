"""Processors of images and text that nothing has to be downloaded for."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BatchFeature,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_processing_utils import VideoProcessorMixin
from transformers.video_utils import make_batched_metadata, make_batched_videos

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SPECIAL = {
    "llava": ["<image>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"],
}


def _tokenizer(special: list[str]) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *special, *"abcdefghijklmnopqrstuvwxyz0123456789 ?:.<>\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=special, **names)


def processor(name: str) -> Any:
    """Of "llava" or "idefics3": characters are tokens, <pad> 0, <eos> 1, <image> 3, and images are 16 by 16."""
    fast = _tokenizer(SPECIAL[name])
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


class _Videos(VideoProcessorMixin):
    """Qwen3-VL's frames and patches, of videos that need no other size, for which that takes torchvision."""

    valid_kwargs = Qwen3VLVideoProcessor.valid_kwargs
    model_input_names: ClassVar[list[str]] = ["pixel_values_videos", "video_grid_thw"]
    patch_size, merge_size, temporal_patch_size = 4, 2, 2
    do_sample_frames, fps, num_frames, min_frames, max_frames = True, 2, None, 2, 16
    sample_frames = Qwen3VLVideoProcessor.sample_frames

    def __call__(self, videos: Any, video_metadata: Any = None, **others: Any) -> BatchFeature:
        patches, grids, frames = [], [], make_batched_videos(videos)
        for video in frames:
            pixels = torch.from_numpy(video).permute(0, 3, 1, 2)[None].float() / 255 - 0.5
            sizes = self.patch_size, self.merge_size, self.temporal_patch_size
            one, *grid = Qwen3VLVideoProcessor.patchify(self, pixels, *sizes)
            patches.append(one[0])
            grids.append(grid)
        metadata = make_batched_metadata(frames, video_metadata=video_metadata)
        tensors = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return BatchFeature({**tensors, "video_metadata": metadata})


def video_processor(name: str) -> Any:
    """Of "qwen2_5_vl" or "qwen3_vl": characters are tokens, <pad> 0, <eos> 1, images and videos stand for 3 and 4."""
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 256})
    kind = Qwen3VLProcessor if name == "qwen3_vl" else Qwen2_5_VLProcessor
    image, video = (f"<|vision_start|><|{seen}_pad|><|vision_end|>" for seen in ("image", "video"))
    video = "<|video_pad|>" if name == "qwen3_vl" else video
    template = TEMPLATE.replace("<image>", image)
    template = template.replace("{% else %}{{ c", f"{{% elif c['type'] == 'video' %}}{video}{{% else %}}{{{{ c")
    with pytest.MonkeyPatch.context() as patch:  # it asks a list of classes that needs torchvision
        patch.setattr(kind, "check_argument_for_proper_class", lambda *_: None)
        return kind(images, _tokenizer(special), _Videos(), chat_template=template)
