"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from fppo._errors import json_of
from fppo.models.adapted import FACTORS, Lora
from fppo.models.codes import names_of_weights
from fppo.models.heads import embedding_name, vocabulary_head
from fppo.models.load import find_directory
from fppo.models.lora import frozen_of, places_of
from fppo.models.model import Model, Params
from fppo.models.place import own_params, whole_params
from fppo.models.save import first_alone
from fppo.runtime.exports import draft_of, replacing
from fppo.runtime.gguf_files import gguf_of
from fppo.runtime.mesh import LOCAL, Mesh, device_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_START = "base_model.model."
_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
_BASE = ".base_layer"  # PEFT wraps a module once for each of its adapted parameters, the first one innermost
_WEIGHT = ".weight"
# names that PEFT takes for layers inside of experts, in types whose experts transformers stores one by one
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# options that change an adapter's function and that fppo does not support
_REFUSED = (
    *("use_dora", "lora_bias", "layer_replication", "modules_to_save", "use_qalora", "trainable_token_indices"),
    *("alora_invocation_tokens", "megatron_config", "eva_config", "corda_config"),
)
# modules whose weights are read by code outside them. PEFT adapts calls of modules: it refuses some of these, and its
# adapters of the others have no effect
_READ = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), ("out_proj", "conv1d")),
    **dict.fromkeys(("mamba", "falcon_mamba"), ("out_proj", "conv1d", "dt_proj")),
    "jamba": ("dt_proj",),
}
_PATTERNS = ("rank_pattern", "alpha_pattern")
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", None)  # values of init_lora_weights that leave the base alone


def read_config(directory: Path) -> Lora:
    """Read the config of the adapter in a directory; its targets are all adapted weights by name. Dropout, which is for
    PEFT's own training, is ignored. If weights have different ranks, the largest is taken.

    Raises ValueError for missing files, and, naming them, for unsupported options, such as ranks that give weights
    different scales.
    """
    config, stored = _opened(directory)
    wrong = [f"{name} = {config[name]!r}" for name in _REFUSED if config.get(name)]
    wrong += [f"peft_type = {kind!r}" for kind in [config.get("peft_type")] if kind != "LORA"]
    wrong += [f"bias = {bias!r}" for bias in [config.get("bias", "none")] if bias != "none"]
    wrong += [f"init_lora_weights = {x!r}" for x in [config.get("init_lora_weights")] if x not in _PLAIN_STARTS]
    if wrong:
        raise ValueError(f"{directory / CONFIG}: fppo does not run adapters with {', '.join(wrong)}")
    spec, *others = _specs(config, targets := _targets(stored, config, directory), directory).values()
    widest = max([spec, *others], key=lambda each: each.rank)
    if any(not math.isclose(each.scale, spec.scale) for each in others):
        own = ", ".join(f"{name} = {config[name]!r}" for name in _PATTERNS if config.get(name))
        raise ValueError(
            f"{directory / CONFIG}: fppo does not run adapters with {own}, which give weights different scales"
        )
    return Lora(widest.rank, widest.alpha, targets, widest.scaling)


def _opened(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The config of an adapter, and the names of its stored tensors. Raises ValueError for missing files."""
    try:
        config = json_of((directory / CONFIG).read_text(encoding="utf-8"))
        with safetensors.safe_open(directory / WEIGHTS, "pt") as file:
            return config, list(file.keys())
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{directory} holds no PEFT adapter, {CONFIG} and {WEIGHTS}: {error}") from error


def _specs(config: Mapping[str, Any], targets: Iterable[str], directory: Path) -> dict[str, Lora]:
    """The rank and the scale of each target, by the config's patterns of names. Raises ValueError for a pattern that
    names none of them."""
    scaling, used, specs = "rslora" if config.get("use_rslora") else "standard", set[tuple[str, str]](), {}
    for target in targets:
        own = {"rank_pattern": config["r"], "alpha_pattern": config["lora_alpha"]}
        for name in _PATTERNS:
            for pattern, value in (config.get(name) or {}).items():
                if any(_matches(rf"(.*\.)?({pattern})", each, directory) for each in (target, target + _WEIGHT)):
                    own[name] = value
                    used.add((name, pattern))
                    break
        specs[target] = Lora(own["rank_pattern"], float(own["alpha_pattern"]), (target,), scaling)
    for name in _PATTERNS:
        if idle := [pattern for pattern in config.get(name) or {} if (name, pattern) not in used]:
            given = f"{name} = {config[name]!r}"
            raise ValueError(
                f"{directory / CONFIG}: fppo does not run adapters with {given}: {idle} name no weight of the adapter"
            )
    return specs


def _targets(stored: Sequence[str], config: Mapping[str, Any], directory: Path) -> tuple[str, ...]:
    """The paths of the weights whose factors are stored."""
    paths = dict.fromkeys(_path(name) for name in stored)
    if None in paths or not paths:
        unknown = [name for name in stored if _path(name) is None]
        hint = "; PEFT leaves out its copies of embeddings with save_pretrained(..., save_embedding_layers=False)"
        copies = hint if any(f"{_BASE}." in name for name in unknown) else ""
        raise ValueError(f"{directory / WEIGHTS} holds tensors that are no factor of a weight: {unknown[:5]}{copies}")
    depths: dict[str, int] = {}
    for path in filter(None, paths):
        module = re.sub(rf"({re.escape(_BASE)})*$", "", path)
        depths[module] = depths.get(module, 0) + 1
    return tuple(name for module, depth in depths.items() for name in _adapted(module, depth, config, directory))


def _adapted(module: str, depth: int, config: Mapping[str, Any], directory: Path) -> list[str]:
    """The names of a module's `depth` adapted parameters: its weight if it is one of the config's target modules, else
    its parameters among the target parameters."""
    modules, parameters = config.get("target_modules") or (), config.get("target_parameters") or ()
    if isinstance(modules, str):
        whole = _matches(modules, module, directory)
    else:
        whole = any(_ends(module, each) for each in modules)
    own = dict.fromkeys(each.rpartition(".")[2] for each in parameters)
    names = [f"{module}.{each}" for each in own if any(_ends(f"{module}.{each}", target) for target in parameters)]
    if whole or not names:
        names = [module]
    if len(names) != depth:
        found = f"{depth} pairs of factors of {module}, and its target_parameters name {names}"
        raise ValueError(f"{directory / CONFIG} does not say what the adapter adapts: there are {found}")
    return [name.removesuffix(_WEIGHT) for name in names]


def _matches(pattern: str, name: str, directory: Path) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"{directory / CONFIG}: {pattern!r} is no pattern of names: {error}") from error


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _path(stored: str) -> str | None:
    end = next((kind for kind in _KINDS if stored.endswith(kind)), None)
    return stored[len(_START) : -len(end)] if end and stored.startswith(_START) else None


def load(model: Model, directory: Path, *, like: Mapping[str, Tensor], mesh: Mesh = LOCAL) -> Params:
    """Load the adapter in a directory into an adapted model (`adapt` with `read_config`'s), in the dtypes and on the
    device of `like`; on a mesh that cuts parameters this rank's parts. Factors of lower rank than the model's are
    filled up with zeros, which get no gradient.

    Raises ValueError that names missing or unknown factors, and those of another shape or not in floating point; and
    for an adapter of tied embeddings, which PEFT applies to the embeddings alone.
    """
    if _is_tied(model):
        raise ValueError(f"{directory}: PEFT adapts {embedding_name(model)} alone, which is the vocabulary head, too")
    config, stored = _opened(directory)
    specs = _specs(config, _targets(stored, config, directory), directory)
    found = safetensors.torch.load_file(directory / WEIGHTS)
    whole, taken, problems = {}, set[str](), list[str]()
    for name, names in _stored(model).items():
        taken |= set(names)
        absent, spec = [each for each in names if each not in found], specs.get(name.removesuffix(_WEIGHT))
        if absent or spec is None:
            problems.append(f"missing {absent or name}")
            continue
        a, b = (found[each] for each in names)
        wrong = _misfits(model, name, (a, b), spec.rank)
        problems += wrong
        if not wrong:
            whole |= dict(zip((name + x for x in FACTORS), _back(model, name, a, b, spec.rank), strict=True))
    problems += [f"unknown {unknown[:5]}"] if (unknown := sorted(found.keys() - taken)) else []
    if problems:
        raise ValueError(f"the adapter in {directory} does not fit the model: {'; '.join(problems)}")
    own = own_params(model, whole, mesh)
    return {name: own[name].to(x).contiguous() if name in own else x for name, x in like.items()}


def save(
    model: Model,
    adapter: Mapping[str, Tensor],
    directory: Path,
    *,
    base: str,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    mesh: Mesh = LOCAL,
) -> None:
    """Write an adapter as a directory that PEFT and vLLM load onto `base`, the name or directory of its base. A base in
    a GGUF file is named by the directory into which the file is unpacked, since PEFT finds no other.

    It replaces a directory that `check_replaceable` permits. On a mesh that cuts parameters every rank must call, and
    the first one writes. Raises ValueError for adapters that PEFT's files cannot hold (`obstacle`).
    """
    if (text := obstacle(model)) is not None:
        raise ValueError(f"{text}; merge the adapter")
    frozen, tensors = frozen_of(model), stored(model, adapter, mesh)

    def write() -> None:
        with replacing(directory):
            draft = draft_of(directory)
            draft.mkdir()
            metadata = {"format": "pt", "base_digest": frozen.digest}
            contiguous = {name: x.cpu().contiguous() for name, x in tensors.items()}
            safetensors.torch.save_file(contiguous, draft / WEIGHTS, metadata=metadata)
            _order_metadata(draft / WEIGHTS)
            text = json.dumps(_config(model, _found(base)), indent=2, sort_keys=True) + "\n"
            (draft / CONFIG).write_text(text, encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)

    first_alone(write, mesh, device_of(adapter))


def _found(base: str) -> str:
    """The name or directory by which PEFT finds a base; for a GGUF file the directory of its unpacked model, or, if the
    file is gone, its path."""
    try:
        return base if gguf_of(base) is None else str(find_directory(base))
    except ValueError:
        return base


def _order_metadata(path: Path) -> None:
    """Sort the metadata in a safetensors file's header: its writer orders them at random, and equal adapters should be
    equal files. The header keeps its length, as the format's spaces at its end allow."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(text) != length:
            raise AssertionError(f"{path}: its header has {length} bytes, and sorted {len(text)}")
        file.seek(8)
        file.write(text)


def stored(model: Model, adapter: Mapping[str, Tensor], mesh: Mesh = LOCAL) -> Params:
    """The whole factors of `adapter` by PEFT's names, in its shapes. Every rank must call if the mesh cuts
    parameters."""
    forms, tensors = _stored(model), dict[str, Tensor]()
    whole = whole_params(model, dict(adapter), mesh)
    for name, names in forms.items():
        a, b = (whole[name + factor].detach() for factor in FACTORS)
        tensors |= dict(zip(names, _forth(model, name, a, b), strict=True))
    return tensors


def _config(model: Model, base: str) -> dict[str, Any]:
    frozen, wrapped = frozen_of(model), _wrapped(model)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": frozen.lora.rank,
        "lora_alpha": frozen.lora.alpha,
        "use_rslora": frozen.lora.scaling == "rslora",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(name.removesuffix(_WEIGHT) for name in frozen.places if name not in wrapped),
        "exclude_modules": _excluded(model) or None,
        "target_parameters": list(dict.fromkeys(_end(name, model) for name in wrapped)) or None,
        "fan_in_fan_out": any(flipped for name, flipped in frozen.places.items() if name not in wrapped),
    }


def _excluded(model: Model) -> list[str]:
    """The modules that targets name and `Lora.exclude` leaves out, by their whole names, as PEFT's list has them.
    Stacks of experts are no modules of their own."""
    frozen = frozen_of(model)
    if not frozen.lora.exclude:
        return []
    chosen = places_of((model.unplaced or model).plain, frozen.lora.targets)
    names = (name for name in chosen if name not in frozen.places and name.endswith(_WEIGHT))
    return sorted(name.removesuffix(_WEIGHT) for name in names)


def _wrapped(model: Model) -> list[str]:
    """The adapted weights that the config must give as target parameters: stacks of experts, and linear layers that
    PEFT would mistake for layers inside of experts (its `convert_peft_config_for_transformers`)."""
    converted = get_checkpoint_conversion_mapping(model.whole_config.model_type) is not None
    mistaken = _OF_EXPERTS if converted else ()
    return [
        name
        for name in frozen_of(model).places
        if _is_stack(name, model) or name.removesuffix(_WEIGHT).rpartition(".")[2] in mistaken
    ]


def _is_stack(name: str, model: Model) -> bool:
    return len(model.whole_shapes[name + FACTORS[0]]) == 3


def _end(name: str, model: Model) -> str:
    """The entry for a weight in PEFT's list of adapted parameters: its whole name, or for a stack of experts the last
    three parts of its name, if all stacks whose names end so are adapted."""
    end, frozen = ".".join(name.split(".")[-3:]), frozen_of(model.unplaced or model)
    alike = [each for each in names_of_weights(frozen.shapes) if each.endswith(f".{end}")]
    return end if _is_stack(name, model) and all(each in frozen.places for each in alike) else name


def obstacle(model: Model) -> str | None:
    """The reason why PEFT's files cannot hold a model's adapter, such as one of a value model or of tied embeddings;
    None if they can."""
    frozen, wrapped = frozen_of(model), _wrapped(model)
    if model.head != "lm":
        return "the adapter of a value model has a value head, which PEFT's files cannot hold"
    if _is_tied(model):
        return f"{embedding_name(model)} is the vocabulary head, too: PEFT adapts one without the other"
    kind, places = model.whole_config.model_type, list(frozen.places)
    if read := [name for name in places if name.split(".")[-2] in _READ.get(kind, ())]:
        return f"{read[0]}: PEFT does not adapt {read[0].split('.')[-2]} of a model of type {kind!r}"
    renamings = [x for x in get_checkpoint_conversion_mapping(kind) or () if isinstance(x, WeightRenaming)]
    if renamed := [name for name in places if rename_source_key(name, renamings, [])[0] != name]:
        return f"{renamed[0]}: transformers renames it in stored files of type {kind!r}, and PEFT does, too"
    if wrapped and any(flipped for name, flipped in frozen.places.items() if name not in wrapped):
        return f"{wrapped[0]} is a parameter of its own in PEFT's files, which then hold no layer that stores [in, out]"
    if single := [name for name in wrapped if _is_stack(name, model) and model.whole_shapes[name + FACTORS[0]][0] == 1]:
        return f"{single[0]} is a stack of one expert, which PEFT takes for a layer"
    return None


def _is_tied(model: Model) -> bool:
    """Whether the embedding is adapted and is the vocabulary head, too."""
    table = embedding_name(model)
    return (
        model.head == "lm" and table in frozen_of(model).places and vocabulary_head(model.unplaced or model)[0] == table
    )


def _stored(model: Model) -> dict[str, tuple[str, str]]:
    """The stored names of each adapted weight's factors."""
    frozen, table, blocks = frozen_of(model), embedding_name(model), dict[str, list[str]]()
    for name in frozen.places:
        if _is_stack(name, model):
            blocks.setdefault(name.rpartition(".")[0], []).append(name)
    names = {}
    for name in frozen.places:
        module = name.removesuffix(_WEIGHT)
        if name == table:
            names[name] = (f"{_START}{module}.lora_embedding_A", f"{_START}{module}.lora_embedding_B")
            continue
        if _is_stack(name, model):
            module = name.rpartition(".")[0]
            module += _BASE * (len(blocks[module]) - 1 - blocks[module].index(name))
        names[name] = (f"{_START}{module}.lora_A.weight", f"{_START}{module}.lora_B.weight")
    return names


def _forth(model: Model, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Convert A and B to their stored shapes: those of experts to [E r, in] and [out, r E], experts innermost."""
    if name == embedding_name(model):
        return b.T, a.T
    return (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)) if a.dim() == 3 else (a, b)


def _back(model: Model, name: str, a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Convert stored factors of this rank to A and B of the model's, filled up with zeros."""
    if name == embedding_name(model):
        a, b = b.T, a.T
    elif _is_stack(name, model):
        a, b = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
    more = frozen_of(model).lora.rank - rank
    return (F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))) if more else (a, b)


def _misfits(model: Model, name: str, factors: Sequence[Tensor], rank: int) -> list[str]:
    """Describe the faults of a weight's stored factors, which should have the shapes of this rank and be floating
    point; empty if they fit."""
    (*stack, most, wide), (*_, out, _) = (model.whole_shapes[name + factor] for factor in FACTORS)
    shapes = torch.empty(*stack, rank, wide, device="meta"), torch.empty(*stack, out, rank, device="meta")
    problems = []
    for own, x, like in zip((name + factor for factor in FACTORS), factors, _forth(model, name, *shapes), strict=True):
        problems += [f"{own} of shape {list(x.shape)}"] if x.shape != like.shape or rank > most else []
        problems += [] if x.is_floating_point() else [f"{own} in {x.dtype}"]
    return problems
