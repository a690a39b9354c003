"""What fppo does with a type of model that transformers maps, as the checks say that it is asked when it is loaded."""

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from kinds.published import PUBLISHED
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from fppo import models
from fppo.models import Model, lora

Verdict = dict[str, str | None]  # by column, why not; None if it does
WHOLE, CUT, ADAPTED, IMAGES, VIDEOS = "whole, packed", "cut", "adapted", "with images", "with videos"
AS_PUBLISHED = "as published"
TEXT, UNKNOWN = "takes none", "no published config is known here"
LAYERS, RANKS = 4, 2
_SECTION = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_FITTING = {  # of published models, where transformers' defaults do not fit one another
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}, "text_config": {"rope_parameters": _SECTION}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}, "text_config": {"rope_parameters": _SECTION}},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"num_hidden_layers": LAYERS, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
}
_NONE = re.compile(r"^fppo cannot check whether it runs model type .* or have other parameters\. ")
_NAMED = re.compile(r"^(fppo cannot (run|adapt) )?model type '[\w-]+'( on a tensor axis of \d ranks)?(: |, whose | )")


def verdict_of(kind: str) -> Verdict:
    """What the type does: runs whole, in packed rows; is cut over a tensor axis; has adapters; sees images, videos."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    kept = list[Model]()
    whole = _refusal(lambda: kept.append(_checked(kind)))
    if whole is not None:
        return {WHOLE: whole}
    (model,), published = kept, PUBLISHED.get(kind)
    return {
        WHOLE: None,
        AS_PUBLISHED: UNKNOWN if published is None else _refusal(lambda: _checked(kind, published.changes)),
        CUT: _refusal(lambda: models.check_placed(model, RANKS)),
        ADAPTED: _refusal(lambda: lora.check_adapted(model, models.Lora(2, 4.0))),
        IMAGES: None if model.vision is not None else TEXT,
        VIDEOS: None if model.vision is not None and model.vision.video is not None else TEXT,
    }


def shortened(kind: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A type's default config with `changes`, and with fewer layers if it has each kind of them among the first."""
    config = AutoConfig.for_model(kind, **_FITTING.get(kind, {}) | dict(changes or {}))
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    if getattr(text, "num_hidden_layers", 0) > LAYERS and set(kinds[:LAYERS]) == set(kinds):
        with contextlib.suppress(AttributeError):  # one that follows from another
            text.num_hidden_layers = LAYERS
            if kinds:
                text.layer_types = kinds[:LAYERS]
    return config


def _checked(kind: str, changes: Mapping[str, Any] | None = None) -> Model:
    model = models.build(shortened(kind, changes))
    models.check_model(model)
    return model


def _refusal(check: Callable[[], object]) -> str | None:
    """Why a check fails, but for the type's name; None if it does not."""
    try:
        check()
    except Exception as error:
        why = _NONE.sub("no small instance runs: ", " ".join(str(error).split()).replace("|", "/"))
        return _NAMED.sub("", why)[:200] or type(error).__name__
    return None
