"""Tiny random models of images and text that vLLM's CPU kernels run, and prompts with images for them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from fppo import models
from fppo.batch import Column, Prompts
from fppo.key import Key
from fppo.models.model import Model, Params
from tests.models.vision import CONFIGS, prompt

_WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
_IMPORTED = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}


def config_of(name: str) -> PreTrainedConfig:
    """Heads are 32 wide, in the text layers and in the tower."""
    config: Any = copy.deepcopy(CONFIGS[name])
    text, tower = config.text_config, config.vision_config
    for key, value in _WIDE.items():
        setattr(text, key, value)
    if hasattr(text, "head_dim"):
        text.head_dim = 32
    if name.startswith("qwen"):
        text.layer_types = ["full_attention"] * 2
        text.rope_parameters = {**text.rope_parameters, "mrope_section": [4, 6, 6]}
        tower.out_hidden_size = 64
    if name == "qwen2_5_vl":
        tower.tokens_per_second = 1
    if name == "qwen2_vl":
        tower.embed_dim, tower.hidden_size = 64, 64
    else:
        tower.hidden_size = 64
    return config


def make(name: str, *, seed: int = 5) -> tuple[Model, Params]:
    """The model with random parameters, so spread that a wrong one shows."""
    model = models.build(config_of(name))
    generator = Key(seed).fold(name).generator()
    params = models.init_params(model, Key(seed))
    return model, {key: x + 0.1 * torch.randn(x.shape, generator=generator) for key, x in params.items()}


def prompts_of(name: str, counts: Sequence[int], seed: int = 5) -> Prompts:
    """Prompts with so many images."""
    generator = torch.Generator().manual_seed(seed)
    rows = [prompt(name, count, generator, 3 + i) for i, count in enumerate(counts)]
    width = max(len(tokens) for tokens, _ in rows)
    names = Column([""] * len(rows))
    return Prompts(
        tokens=torch.tensor([[0] * (width - len(tokens)) + tokens for tokens, _ in rows]),
        attention_mask=torch.tensor([[i >= width - len(tokens) for i in range(width)] for tokens, _ in rows]),
        row_ids=torch.arange(len(rows)),
        ids=names,
        ground_truth=names,
        source=names,
        extras=names,
        inputs=Column(x for _, x in rows),
    )


def stand_in(name: str) -> None:
    """Has vLLM import a family whose file imports torchvision, of whose parts it runs none here: the CPU build's
    environment has no torchvision, as none is built for its torch."""
    architecture = _IMPORTED.get(name)
    if architecture is None or find_spec("torchvision") is not None:
        return
    import_module("transformers.image_processing_backends")  # which does without
    registry = import_module("vllm.model_executor.models.registry").ModelRegistry
    parts = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    with pytest.MonkeyPatch.context() as patch:
        for part in parts:
            patch.setitem(sys.modules, part, ModuleType(part))
        patch.setattr(sys.modules[parts[2]], "functional", sys.modules[parts[3]], raising=False)
        registry.register_model(architecture, registry.models[architecture].load_model_cls())
