"""Models from Hugging Face checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fppo._errors import json_of, printable, words_of
from fppo.key import Key
from fppo.models._parts import read_parts
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
from fppo.runtime.mesh import LOCAL, Mesh

_PATIENCE = 4.0  # seconds for the hub to answer
# where a value head stands: token and sequence classification, GPT-2's token classification, TRL, and others' models
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
    """The model in a directory or on the Hugging Face hub, with its parameters on the CPU in `dtype`.

    On a mesh that cuts parameters they are this rank's part, and it reads no more than that of most checkpoints; the
    model is placed (`place`), on a tensor axis if what its ranks compute is what it does (`check_placed`).
    A value head is read from token- or sequence-classification checkpoints (`score`, `classifier`) and TRL's
    (`v_head.summary`), in float32 or wider; `outputs` is how many numbers it gives, or a range says which of them
    are taken of a head that has more. A checkpoint without one gets a head drawn from `key`, or zeros without a key.
    `config` holds what differs from the model's own config. Only safetensors files are read. Raises ValueError that
    lists every parameter that is missing, unknown or of another shape, and for a model that fppo computes otherwise
    than transformers does (`check_model`).
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
        wide = torch.promote_types(dtype, torch.float32)
        value_head = read_value_head(directory, wide)
        if isinstance(outputs, range):
            value_head = {name: x[outputs.start : outputs.stop] for name, x in value_head.items()}
        value_head = value_head or _fresh_head(model, key, wide)
        problems += _compare(model, value_head)
        params |= own_params(model, value_head, mesh)
    if problems:
        raise ValueError(f"{path} does not hold a whole {own.model_type!r} model: " + "; ".join(problems))
    return model, {name: params[name] for name in model.shapes}


def read_config(
    directory: Path, *, changes: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """The config of a checkpoint, with `changes`. Raises ValueError for those that it has no place for, and for values
    of other kinds than its own."""
    config = _config(directory, trust_remote_code)
    if unknown := [name for name in changes or {} if not hasattr(config, name)]:
        raise ValueError(
            f"the config of {directory} ({config.model_type}) has no {unknown}; it has {sorted(vars(config))}"
        )
    if changes:
        return _config(directory, trust_remote_code, changes)
    return config


def _config(directory: Path, trust_remote_code: bool, changes: Mapping[str, Any] = {}) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **changes)
    except (OSError, ValueError):
        raise
    except Exception as error:  # transformers raises what it likes of values of a wrong kind
        which = f"with {printable(str(dict(changes)), 400)}" if changes else "of config.json"
        raise ValueError(f"the config of {directory} {which} cannot be read: {words_of(error, 600)}") from error


def find_directory(path: str | os.PathLike[str]) -> Path:
    """The directory of a checkpoint: `path` itself, or the hub's files of that name, downloaded once."""
    directory = Path(path)
    if not directory.is_dir():
        if directory.exists() or directory.is_absolute() or str(path).startswith("."):
            raise ValueError(f"{path} is not a directory with a model")
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
        others = ["original/*", "consolidated*"]  # the same weights in the makers' own layouts
        try:
            came = snapshot_download(str(path), allow_patterns=patterns, ignore_patterns=others, etag_timeout=_PATIENCE)
            directory = Path(came)
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{path} is no directory, and no model of that name came from the hub: {why}") from error
    if not list_files(directory):
        pickled = sorted(file.name for file in directory.glob("*.bin"))
        raise ValueError(
            f"{path} has no model.safetensors"
            + (
                f"; {pickled} are pickles, which fppo does not open: save the model as safetensors first"
                if pickled
                else ""
            )
        )
    return directory


def list_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return sorted({directory / name for name in json_of(index.read_text())["weight_map"].values()})
    return [file for file in [directory / "model.safetensors"] if file.exists()]


def _read(
    model: Model, directory: Path, config: PreTrainedConfig, dtype: torch.dtype, mesh: Mesh
) -> tuple[Params, list[str]]:
    """This rank's part of the parameters without a value head, and what is wrong with the files."""
    files = list_files(directory)
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(f"{directory} lacks files that its index names: {absent}")
    parts = read_parts(model, files, dtype=dtype, mesh=mesh, ignored=lambda name: _expected(name, model))
    if parts is not None:
        return parts, []
    named, problems = _read_whole(model, directory, config, dtype)
    if problems:
        return named, problems
    parts = {}
    for name in list(named):  # one by one, in memory of their own as above
        parts |= own_params(model, {name: named.pop(name).clone()}, mesh)
    return parts, []


def _read_whole(
    model: Model, directory: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> tuple[Params, list[str]]:
    """The parameters as transformers reads them, and what is wrong with the files."""
    with BUILDING, torch.random.fork_rng(devices=[]), _QuietTransformers():  # what is missing gets drawn
        loaded = model_class(config).from_pretrained(
            directory,
            config=plain_config(config),
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=model.trust_remote_code,
        )
    module, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    named = {name: x.detach() for name, x in named_state(module).items() if name in model.whole_shapes}
    named |= {name: x.to(state_dtype(model, name, dtype)) for name, x in named.items() if name in model.buffers}
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
        problems += [f"{sorted(extra)} are tied by the config but stored apart"] if extra else []
    return named, problems


def _expected(name: str, model: Model) -> bool:
    """Whether a stored parameter that the causal language model lacks may stand there: value heads, old buffers."""
    if name.rpartition(".")[0] in VALUE_HEADS or name.endswith(("rotary_emb.inv_freq", "masked_bias", "attn.bias")):
        return True
    return model.head == "value" and not name.startswith(model.prefix)


def read_value_head(directory: Path, dtype: torch.dtype) -> Params:
    """The value head in a checkpoint as score.weight [K, H] and score.bias [K] (zero if it has none), or {}."""
    heads: dict[str, Tensor] = {}
    for file in list_files(directory):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.rpartition(".")[0] in VALUE_HEADS:
                    heads[name] = tensors.get_tensor(name).to(dtype, copy=True)
    for head in VALUE_HEADS:
        if f"{head}.weight" in heads:
            weight = heads[f"{head}.weight"]
            return {SCORE_WEIGHT: weight, SCORE_BIAS: heads.get(f"{head}.bias", weight.new_zeros(len(weight)))}
    return {}


def _fresh_head(model: Model, key: Key | None, dtype: torch.dtype) -> Params:
    if key is not None:
        return init_value_head(model, key, dtype)
    return {name: torch.zeros(model.whole_shapes[name], dtype=dtype) for name in (SCORE_WEIGHT, SCORE_BIAS)}


def _compare(model: Model, params: Params) -> list[str]:
    return [
        f"{name} has shape {tuple(x.shape)}, expected {tuple(model.whole_shapes[name])}"
        for name, x in params.items()
        if x.shape != model.whole_shapes[name]
    ]


class _QuietTransformers:
    """transformers reports what does not fit on its log; here that is an error, raised by us."""

    def __enter__(self) -> None:
        self.verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()

    def __exit__(self, *_: Any) -> None:
        transformers_logging.set_verbosity(self.verbosity)
