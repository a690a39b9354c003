"""Models to Hugging Face checkpoints."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import cast

import torch
from huggingface_hub import save_torch_state_dict
from transformers import (
    AutoModelForTokenClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fppo.models.model import SCORE_BIAS, SCORE_WEIGHT, Model, Params, causal_lm

DEFAULT_SHARD_BYTES = 5 << 30


def save(
    model: Model,
    params: Params,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    generation_config: GenerationConfig | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes whole parameters as a directory that transformers loads: AutoModelForCausalLM, or for a value head
    AutoModelForTokenClassification with one label where the family has that class.

    It is written beside `directory` first and takes its place at the end. Raises ValueError if `params` do not fit.
    """
    misfits = sorted(set(params) ^ set(model.shapes)) or [n for n, x in params.items() if x.shape != model.shapes[n]]
    if misfits:
        raise ValueError(f"cannot save: parameters that are missing, unknown or of another shape: {misfits}")
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        _write(model, {name: x.detach().contiguous() for name, x in params.items()}, beside, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        if generation_config is not None:
            generation_config.save_pretrained(beside)
        _take_place(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(model: Model, params: Params, directory: Path, max_shard_bytes: int) -> None:
    if model.head == "lm":
        module = causal_lm(model.config, "meta", trust_remote_code=model.trust_remote_code)
    else:
        module = _token_classifier(model.config)
        if module is None:
            _write_bare(model, params, directory, max_shard_bytes)
            return
        place = next(name for name, _ in module.named_children() if name in ("score", "classifier"))
        renamed = {SCORE_WEIGHT: f"{place}.weight", SCORE_BIAS: f"{place}.bias"}
        params = {renamed.get(name, name): x for name, x in params.items()}
    module.load_state_dict(params, assign=True, strict=False)
    module.tie_weights()
    left = [name for name, p in module.named_parameters() if p.is_meta]
    if left:
        raise ValueError(f"cannot save: {type(module).__name__} has parameters that fppo does not hold: {left}")
    _keep_config(module, model.config)
    module.save_pretrained(directory, max_shard_size=max_shard_bytes)


def _keep_config(module: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Puts the dropouts and the like back as they were before training."""
    for name, value in config.to_dict().items():
        if "drop" in name:
            setattr(module.config, name, value)


def _value_config(config: PreTrainedConfig) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.num_labels = 1
    return config


def _token_classifier(config: PreTrainedConfig) -> PreTrainedModel | None:
    """The family's token-classification model on meta, or None if there is none with a plain linear head."""
    if type(config) not in AutoModelForTokenClassification._model_mapping:
        return None
    with torch.device("meta"):
        module = cast(PreTrainedModel, AutoModelForTokenClassification.from_config(_value_config(config)))
    heads = [child for name, child in module.named_children() if name in ("score", "classifier")]
    return module if len(heads) == 1 and getattr(heads[0], "bias", None) is not None else None


def _write_bare(model: Model, params: Params, directory: Path, max_shard_bytes: int) -> None:
    """The token-classification layout for a family without such a class: base parameters and score.*."""
    directory.mkdir()
    save_torch_state_dict(params, directory, max_shard_size=max_shard_bytes)
    config = _value_config(model.config)
    config.architectures = [type(model.skeleton).__name__.removesuffix("Model") + "ForTokenClassification"]
    config.dtype = next(iter(params.values())).dtype
    config.save_pretrained(directory)


def _take_place(beside: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    beside.rename(target)
    shutil.rmtree(old, ignore_errors=True)
