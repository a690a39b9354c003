"""Load models from Hugging Face checkpoints."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from fppo._errors import printable, words_of
from fppo.key import Key
from fppo.models._parts import read_parts
from fppo.models.gguf_files import unpacked
from fppo.models.init import init_value_head
from fppo.models.model import (
    BUILDING,
    SCORE_BIAS,
    SCORE_WEIGHT,
    HeadKind,
    Model,
    Params,
    build,
    model_class,
    named_state,
    plain_config,
    state_dtype,
)
from fppo.models.place import check_dispatched, check_placed, check_staged, own_params, place
from fppo.models.probe import check_model
from fppo.models.recompute import Recompute
from fppo.models.vision import parts_of
from fppo.runtime.gguf_files import gguf_of
from fppo.runtime.mesh import LOCAL, Mesh
from fppo.runtime.weights import no_weights, weight_files

_PATIENCE = 4.0  # seconds for the hub to answer
_WINDOWED = ("sliding_attention", "hybrid_sliding", "chunked_attention")  # kinds of layers with a window of tokens
# parameter paths of value heads: token and sequence classification, GPT-2's token classification, TRL, and others
VALUE_HEADS = ("score", "classifier", "v_head.summary", "v_head", "value_head")


def load(
    path: str | os.PathLike[str],
    head: HeadKind = "lm",
    *,
    dtype: torch.dtype = torch.float32,
    key: Key | None = None,
    outputs: int | range = 1,
    compute_dtype: torch.dtype | None = None,
    checkpoint_layers: Recompute = False,
    trust_remote_code: bool = False,
    config: Mapping[str, Any] | None = None,
    mesh: Mesh = LOCAL,
) -> tuple[Model, Params]:
    """Load the model in a directory, in a GGUF file or on the Hugging Face hub, with its parameters on the CPU in
    `dtype`.

    On a mesh that cuts parameters they are this rank's part (most checkpoints are read no further than that), and the
    model is placed (`place`), after `check_placed` and the like for the mesh's axes.
    A value head is read from token- or sequence-classification checkpoints (`score`, `classifier`) and TRL's
    (`v_head.summary`), in float32 or wider; `outputs` is its number of outputs, or a range of the outputs to take. A
    checkpoint without one gets a head drawn from `key`, or zeros without a key. The model of a sequence classifier
    has its padding token as `padding`, which `compute_reward_scores` passes over. `config` overrides fields of the
    model's own config. Only safetensors files are read.
    Raises ValueError with a list of missing and unknown parameters, and of those with another shape or dtype; for a
    quantised checkpoint that transformers cannot dequantise; and for a model that fppo would compute differently from
    transformers (`check_model`).
    """
    directory = find_directory(path)
    own = read_config(directory, changes=config, trust_remote_code=trust_remote_code)
    model = build(
        own,
        head,
        outputs=outputs if isinstance(outputs, int) else len(outputs),
        compute_dtype=compute_dtype,
        checkpoint_layers=checkpoint_layers,
        trust_remote_code=trust_remote_code,
    )
    check_model(model)
    if head == "value" and any(name.endswith("ForSequenceClassification") for name in own.architectures or ()):
        model = attrs.evolve(model, padding=own.get_text_config().pad_token_id)
    whole, model = model, place(model, mesh)
    if (ranks := mesh["tensor"].size) > 1:
        check_placed(whole, ranks)
    if (ranks := mesh["expert"].size) > 1:
        check_dispatched(whole, ranks, tensor=mesh["tensor"].size)
    if mesh["pipeline"].size > 1:
        check_staged(whole)
    try:
        params, problems = _read(model, directory, own, dtype, mesh)
    except SafetensorError as error:
        raise ValueError(
            f"{path} holds weights that are cut off or damaged ({error}); copy or download it again"
        ) from error
    if head == "value":
        value_head = _value_head(model, directory, outputs, key, torch.promote_types(dtype, torch.float32))
        problems += _compare(model, value_head)
        params |= own_params(model, value_head, mesh)
    if problems:
        raise ValueError(f"{path} does not hold a whole {own.model_type!r} model: " + "; ".join(problems))
    return model, {name: params[name] for name in model.shapes}


def read_config(
    directory: Path, *, changes: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Read the config of a checkpoint, with `changes`. Raises ValueError for unknown fields, for values that
    transformers refuses, and for layers whose windows have no size."""
    config = _config(directory, trust_remote_code)
    if unknown := [name for name in changes or {} if not hasattr(config, name)]:
        raise ValueError(
            f"the config of {directory} ({config.model_type}) has no {unknown}; it has {sorted(vars(config))}"
        )
    if changes:
        config = _config(directory, trust_remote_code, changes)
    _check_windows(directory, config)
    return config


def _check_windows(directory: Path, config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    given = {name: getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")}
    sizes = [value for value in given.values() if value is not None]
    kinds = dict.fromkeys(kind for kind in getattr(text, "layer_types", None) or () if kind in _WINDOWED)
    if kinds and not any(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        named = " and ".join(f"{name} = {value!r}" for name, value in given.items() if hasattr(text, name))
        layers = f"layers of kind {' and '.join(map(repr, kinds))} and {named or 'no window'}"
        raise ValueError(f"the config of {directory} has {layers}: give how many tokens they see, or other layer_types")


def _config(directory: Path, trust_remote_code: bool, changes: Mapping[str, Any] = {}) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **changes)
    except (OSError, ValueError):
        raise
    except Exception as error:  # transformers may raise any exception for values of a wrong type
        which = f"with {printable(str(dict(changes)), 400)}" if changes else "of config.json"
        raise ValueError(f"the config of {directory} {which} cannot be read: {words_of(error, 600)}") from error


def find_directory(path: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The directory of a checkpoint: `path` itself, that of an unpacked GGUF file (`gguf_of`, `unpacked`), or the hub's
    files of that name, downloaded once. Raises ValueError where there is none, and for one without safetensors files
    unless a directory is given without `weights`."""
    if (file := gguf_of(path)) is not None:
        return unpacked(file, weights=weights)
    directory = Path(path)
    if not directory.is_dir():
        if directory.exists() or directory.is_absolute() or str(path).startswith("."):
            raise ValueError(f"{path} is not a directory with a model, nor a GGUF file")
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        others = ["original/*", "consolidated*"]  # the same weights in the makers' own layouts
        try:
            came = snapshot_download(str(path), allow_patterns=patterns, ignore_patterns=others, etag_timeout=_PATIENCE)
            directory, weights = Path(came), True
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{path} is no directory, and the hub gave no model of that name: {why}") from error
    if weights and not weight_files(directory):
        raise ValueError(f"{path} {no_weights(directory)}")
    return directory


def _read(
    model: Model, directory: Path, config: PreTrainedConfig, dtype: torch.dtype, mesh: Mesh
) -> tuple[Params, list[str]]:
    """This rank's part of the parameters without a value head, and the problems with the files."""
    files = weight_files(directory)
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(f"{directory} lacks files that its index names: {absent}")
    if _quantisation(config) is None:
        parts = read_parts(model, files, dtype=dtype, mesh=mesh, ignored=lambda name: _expected(name, model))
        if parts is not None:
            return parts, []
        named, problems = _read_whole(model, directory, plain_config(config), dtype)
    else:
        named, problems = _read_quantised(model, directory, config, dtype)
    problems += _compare(model, named)
    if problems:
        return named, problems
    parts = {}
    for name in list(named):  # one by one, as copies, like those of `read_parts`
        parts |= own_params(model, {name: named.pop(name).clone()}, mesh)
    return parts, []


def _read_quantised(
    model: Model, directory: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[Params, list[str]]:
    """The parameters of a quantised checkpoint, dequantised by transformers. Raises ValueError where it cannot: no
    method, or a missing package or device."""
    settings = {**(_quantisation(config) or {})}
    method = str(settings.get("quant_method") or "bitsandbytes")
    known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if known is not None and "dequantize" in inspect.signature(known.__init__).parameters:
        settings["dequantize"] = True  # a GPU that has such kernels would keep the codes
    asked = plain_config(config)
    asked.quantization_config = settings
    advice = "dequantise it by transformers (model.dequantize()) and save that, or give the model that it was made from"
    try:
        named, problems = _read_whole(model, directory, asked, dtype)
    except Exception as error:  # packages that dequantise may raise any exception
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{directory} is quantised ({method}), and transformers cannot read it here: {why}; {advice}"
        ) from error
    if codes := [name for name, x in named.items() if type(x) is not Tensor or not _is_float(x.dtype)]:
        kept = named[codes[0]]
        kind = str(kept.dtype).removeprefix("torch.") if type(kept) is Tensor else type(kept).__name__
        raise ValueError(
            f"{directory} is quantised ({method}): transformers reads {len(codes)} of its weights as codes, "
            f"{codes[0]} as {kind}; {advice}"
        )
    return named, problems


def _quantisation(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The quantisation of a checkpoint by its config; None without one, or for a method unknown to transformers, which
    then reads the weights as plain."""
    own = next((x for part in parts_of(config) if (x := getattr(part, "quantization_config", None))), None)
    settings: Any = own if own is None or isinstance(own, dict) else own.to_dict()
    return settings if settings and AutoHfQuantizer.supports_quant_method(settings) else None


def _is_float(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype are weights: floating point, wider than the 8-bit codes."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _read_whole(
    model: Model, directory: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[Params, list[str]]:
    """The parameters as transformers reads them, and the problems with the files."""
    with BUILDING, torch.random.fork_rng(devices=[]), _QuietTransformers():  # missing parameters get drawn
        loaded = model_class(config).from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=model.trust_remote_code,
        )
    module, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    named = {name: x.detach() for name, x in named_state(module).items() if name in model.whole_shapes}
    named = {name: x.to(state_dtype(model, name, dtype)) if _is_float(x.dtype) else x for name, x in named.items()}
    wanted = {name for name in model.whole_shapes if name not in (SCORE_WEIGHT, SCORE_BIAS)}
    missing = sorted(wanted & set(info["missing_keys"]) | (wanted - set(named)))
    unknown = sorted(name for name in info["unexpected_keys"] if not _expected(name, model))
    problems = [f"missing {missing}"] if missing else []
    problems += [f"unknown {unknown}"] if unknown else []
    problems += [
        f"{name} has shape {tuple(stored)}, expected {tuple(shape)}"
        for name, stored, shape in sorted(info["mismatched_keys"])
        if name in wanted
    ]
    if model.head == "lm" and "lm_head.weight" not in model.whole_shapes:
        extra = dict(module.named_parameters()).keys() - model.whole_shapes.keys()
        problems += [f"{sorted(extra)} are tied by the config but stored separately"] if extra else []
    return named, problems


def _expected(name: str, model: Model) -> bool:
    """Whether a stored parameter unknown to the causal language model is permitted: value heads, old buffers."""
    if name.rpartition(".")[0] in VALUE_HEADS or name.endswith(("rotary_emb.inv_freq", "masked_bias", "attn.bias")):
        return True
    return model.head == "value" and not name.startswith(model.prefix)


def read_value_head(directory: Path, dtype: torch.dtype) -> Params:
    """The value head in a checkpoint as score.weight [K, H] and score.bias [K] (zeros if missing), or {}."""
    heads: dict[str, Tensor] = {}
    for file in weight_files(directory):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.rpartition(".")[0] in VALUE_HEADS:
                    stored = tensors.get_tensor(name)
                    if not _is_float(stored.dtype):
                        raise ValueError(f"{file} holds {name} as {stored.dtype}: a value head is floating point")
                    heads[name] = stored.to(dtype, copy=True)
    for head in VALUE_HEADS:
        if f"{head}.weight" in heads:
            weight = heads[f"{head}.weight"]
            return {SCORE_WEIGHT: weight, SCORE_BIAS: heads.get(f"{head}.bias", weight.new_zeros(len(weight)))}
    return {}


def _value_head(model: Model, directory: Path, outputs: int | range, key: Key | None, dtype: torch.dtype) -> Params:
    """The value head in a checkpoint, cut to a range of `outputs`; without one a head drawn from `key`, or zeros."""
    if stored := read_value_head(directory, dtype):
        taken = slice(outputs.start, outputs.stop) if isinstance(outputs, range) else slice(None)
        return {name: x[taken] for name, x in stored.items()}
    if key is not None:
        return init_value_head(model, key, dtype)
    return {name: torch.zeros(model.whole_shapes[name], dtype=dtype) for name in (SCORE_WEIGHT, SCORE_BIAS)}


def _compare(model: Model, params: Params) -> list[str]:
    """The parameters whose shape is not the model's."""
    return [
        f"{name} has shape {tuple(x.shape)}, expected {tuple(model.whole_shapes[name])}"
        for name, x in params.items()
        if x.shape != model.whole_shapes[name]
    ]


class _QuietTransformers:
    """Silence transformers' log of misfits, which raise an error here."""

    def __enter__(self) -> None:
        self.verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()

    def __exit__(self, *_: Any) -> None:
        transformers_logging.set_verbosity(self.verbosity)
