"""Tiny random models of images and text, and rows with images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma3Config,
    Idefics3Config,
    LlamaConfig,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
)

from fppo import models
from fppo.batch import RowInputs
from fppo.models.model import HeadKind, Model, Params
from fppo.steps.supervised import Demonstrations, demonstrations

SIZE, IMAGE, VIDEO, START, END = 64, 60, 61, 58, 59
TEXT: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
PATCHES = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
}


def _configs() -> dict[str, PreTrainedConfig]:
    text = TEXT | {"rope_parameters": ROPE}
    tower = {**PATCHES, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    first = {**PATCHES, "depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    second = {**tower, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    third = {**tower, "depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    llama = LlamaConfig(**TEXT)
    others = {"image_token_id": IMAGE, "tie_word_embeddings": False}
    return {
        "qwen2_vl": Qwen2VLConfig(text_config=text, vision_config=first, **IDS),
        "qwen2_5_vl": Qwen2_5_VLConfig(text_config=text, vision_config=second, **IDS),
        "qwen3_vl": Qwen3VLConfig(
            text_config=text | {"head_dim": 8, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
            vision_config=third,
            **IDS,
        ),
        "smolvlm": SmolVLMConfig(text_config=llama.to_dict(), vision_config=TOWER, scale_factor=2, **others),
        "idefics3": Idefics3Config(text_config=llama.to_dict(), vision_config=TOWER, scale_factor=2, **others),
        "llava": LlavaConfig(
            text_config=llama,
            vision_config=CLIPVisionConfig(**TOWER),
            vision_feature_layer=-2,
            vision_feature_select_strategy="default",
            image_token_index=IMAGE,
            **others,
        ),
    }


CONFIGS = _configs()
MIXTURE = Qwen3VLMoeConfig(
    text_config=CONFIGS["qwen3_vl"].get_text_config().to_dict()
    | {"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 5}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    vision_config=CONFIGS["qwen3_vl"].vision_config.to_dict() | {"model_type": "qwen3_vl_moe_vision"},
    **IDS,
)
GEMMA = Gemma3Config(
    text_config=TEXT | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    vision_config=SiglipVisionConfig(**TOWER, vision_use_head=False).to_dict(),
    mm_tokens_per_image=4,
    image_token_id=IMAGE,
    boi_token_index=START,
    eoi_token_index=END,
    image_token_index=IMAGE,
)


def make(name: str, head: HeadKind = "lm") -> tuple[PreTrainedModel, Model, Params]:
    """transformers' model in float64, with random numbers everywhere; fppo's; and the parameters."""
    config = MIXTURE if name == "qwen3_vl_moe" else CONFIGS[name]
    torch.manual_seed(0)
    module: PreTrainedModel = AutoModelForImageTextToText.from_config(config).double().eval()
    module.set_attn_implementation("eager")
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + ("norm" in path and path.endswith("weight")))
    for part in module.modules():  # .double() widens buffers, which a loaded model keeps in float32
        for path, buffer in part._buffers.items():
            if buffer is not None and buffer.dtype == torch.float64:
                part._buffers[path] = buffer.float()
    model = models.build(config, head)
    params = {path: x.detach().clone() for path, x in module.named_parameters() if path in model.shapes}
    generator = torch.Generator().manual_seed(1)
    fresh = {path: shape for path, shape in model.shapes.items() if path not in params}
    params |= {path: torch.randn(shape, generator=generator, dtype=torch.float64) for path, shape in fresh.items()}
    return module, model, params


def image(name: str, generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    """One image's inputs, and how many tokens stand for it."""
    if name.startswith("qwen"):
        height, width = [(4, 4), (4, 8), (8, 4)][int(torch.randint(3, (), generator=generator))]
        pixels = torch.randn(height * width, 3 * 2 * 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}, height * width // 4
    tensors = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator, dtype=torch.float64)}
    if name in ("smolvlm", "idefics3"):
        return tensors | {"pixel_attention_mask": torch.ones(1, 16, 16, dtype=torch.bool)}, 4
    return tensors, 16


def video(name: str, generator: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """One video's inputs, and the tokens that stand for it: those of frames together, or each after its time."""
    frames, height, width = [(1, 4, 8), (2, 4, 4), (3, 8, 4)][int(torch.randint(3, (), generator=generator))]
    pixels = torch.randn(frames * height * width, 3 * 2 * 16, generator=generator, dtype=torch.float64)
    tensors = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, height, width]])}
    if name == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = torch.tensor([(0.5, 1.0, 2.75)[int(torch.randint(3, (), generator=generator))]])
    frame = [VIDEO] * (height * width // 4)
    if name != "qwen3_vl":
        return tensors, [START, *frame * frames, END]
    times = torch.randint(3, 57, (frames,), generator=generator).tolist()
    return tensors, [token for time in times for token in (time, START, *frame, END)]


def prompt(
    name: str, seen: int | str, generator: torch.Generator, words: int = 3
) -> tuple[list[int], RowInputs | None]:
    """A prompt with so many images, or with images and videos in an order as "ivi"; one without any has what stands for
    an image all the same."""
    kinds = "i" * seen if isinstance(seen, int) else seen
    tokens = [1, *torch.randint(3, 57, (words,), generator=generator).tolist(), *([] if kinds else [IMAGE])]
    places: dict[str, list[int]] = {"i": [], "v": []}
    every: list[dict[str, Tensor]] = []
    for kind in kinds:
        if kind == "i":
            tensors, size = image(name, generator)
            own = [START, *[IMAGE] * size, END]
        else:
            tensors, own = video(name, generator)
        places[kind] += [len(tokens) + i for i, token in enumerate(own) if token in (IMAGE, VIDEO)]
        tokens += [*own, *torch.randint(3, 57, (2,), generator=generator).tolist()]
        every.append(tensors)
    if not every:
        return tokens, None
    names = dict.fromkeys(key for x in every for key in x)
    together = {key: torch.cat([x[key] for x in every if key in x]) for key in names}
    of_images, of_videos = (torch.tensor(places[kind], dtype=torch.int64) for kind in "iv")
    return tokens, RowInputs(together, of_images, torch.zeros(len(kinds), 2, 2, 3, dtype=torch.uint8), of_videos)


def rows(
    name: str, counts: Sequence[int | str] = (0, 1, 2, 1), *, sampled: bool = False, seed: int = 1
) -> Demonstrations:
    """Rows with so many images, or images and videos, and responses, in which `sampled` puts what stands for an image
    and for a video."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [prompt(name, count, generator, 3 + i) for i, count in enumerate(counts)]
    responses = [torch.randint(3, 57, (5 + i,), generator=generator).tolist() for i in range(len(counts))]
    if sampled:
        responses = [[*response[:2], IMAGE, VIDEO, *response[4:]] for response in responses]
    inputs = [x for _, x in prompts]
    return demonstrations([tokens for tokens, _ in prompts], responses, pad_token_id=0, inputs=inputs)
